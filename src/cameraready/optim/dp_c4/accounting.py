"""What a run has released, as a log, and the privacy that follows from the log alone."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from scipy.optimize import brentq

Adjacency = Literal["add-remove", "replace-one"]
Accountant = Literal["pld", "rdp"]
#: How the records of a step were chosen, as far as the accounting may use it. "cyclic": one of `parts` fixed parts of the data.
Participation = Literal["poisson", "full", "cyclic"]

VERSION = 1
#: Orders of Renyi divergences for sampled releases: whole ones, which cost little, and all.
WHOLE_ORDERS = [*range(2, 65), 80, 96, 128, 192, 256, 384, 512, 1024]
ORDERS = [2.0 + k / 4.0 for k in range(40)] + [*range(12, 65), 80, 96, 128, 192, 256, 384, 512, 1024]


@dataclass(frozen=True)
class Release:
    """One noised sum that left the data.

    Attributes
    ----------
    step : int
        Number of the step, from 0.
    kind : str
        ``"gradient"`` (no coupling), ``"coupled"`` (table mode), ``"anchor"`` or ``"difference"`` (snapshot mode).
    noise_multiplier : float
        Standard deviation of the noise divided by `threshold`. The only number of the mechanism that privacy depends on.
    threshold : float
        The largest influence of one record on the sum.
    participation : {"poisson", "full", "cyclic"}
        ``"full"`` stands for every choice of records that nothing is gained from.
    rate : float
        Probability of a record to take part, for ``"poisson"``; otherwise 1.
    part, parts : int
        Which of how many fixed parts, for ``"cyclic"``.
    run : str
        Chance name of the ledger that wrote it down, so that equal releases of two runs are not taken for one.
    """

    step: int
    kind: str
    noise_multiplier: float
    threshold: float
    participation: Participation
    rate: float = 1.0
    part: int = 0
    parts: int = 1
    run: str = ""

    def __post_init__(self) -> None:
        for name in ("noise_multiplier", "threshold"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < math.inf:
                raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
        if self.participation not in get_args(Participation):
            raise ValueError(f"participation must be one of {get_args(Participation)}, got {self.participation!r}")
        if not isinstance(self.rate, (int, float)) or not 0.0 < self.rate <= 1.0:
            raise ValueError(f"rate must be above 0 and at most 1, got {self.rate!r}")
        if (
            not all(isinstance(value, int) for value in (self.step, self.part, self.parts))
            or not 0 <= self.part < self.parts
        ):
            raise ValueError(
                f"step, part and parts must be whole numbers with part below parts, got {self.part!r} of {self.parts!r}"
            )
        if not isinstance(self.run, str):
            raise ValueError(f"run must be a text, got {self.run!r}")
        if (self.participation != "poisson" and self.rate != 1.0) or (
            self.participation != "cyclic" and self.parts != 1
        ):
            raise ValueError("rate must be 1 but for 'poisson', and parts 1 but for 'cyclic'")


@dataclass
class PrivacyLedger:
    """The releases of a run in order; written before the parameters change, so that a broken-off run is counted too.

    Parameters
    ----------
    path : path, optional
        A file to which each release is appended as a line of JSON. A run that resumes with the same file counts what the interrupted
        one released after its last checkpoint as well. The file holds public numbers only.
    """

    path: Path | None = None
    releases: list[Release] = field(default_factory=list)
    run: str = field(default_factory=lambda: os.urandom(8).hex())

    def __post_init__(self) -> None:
        if self.path is not None:
            self.path = Path(self.path)
            if self.path.is_file():
                self.releases = _read(self.path) + self.releases

    def add(self, release: Release) -> None:
        """Write a release down under this ledger's name, on the disk before anything else."""
        release = replace(release, run=self.run)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(release)) + "\n")
                file.flush()
                os.fsync(file.fileno())
        self.releases.append(release)

    def log(self) -> dict[str, Any]:
        """Plain numbers and strings, fit for ``json.dumps``: all that `epsilon_from_log` needs."""
        return {"version": VERSION, "releases": [asdict(release) for release in self.releases]}

    def restore(self, log: Mapping[str, Any]) -> list[Release]:
        """Take over the log of a checkpoint. What this ledger holds beyond it has been released and stays counted; it is returned."""
        stored = _releases_of(log)
        lost = list((Counter(self.releases) - Counter(stored)).elements())
        self.releases = stored + lost
        return lost


def _read(path: Path) -> list[Release]:
    """Releases of a file. A last line that was broken off in the middle is taken out of it: what it announces was never released."""
    text = path.read_text(encoding="utf-8")
    whole, _, rest = text.rpartition("\n")
    lines = whole.splitlines()
    if rest:
        try:
            Release(**json.loads(rest))
            lines.append(rest)  # complete but for its end
        except (TypeError, ValueError):
            warnings.warn(
                f"{path}: the last line is broken off; that release was never made, and the line is removed",
                UserWarning,
                stacklevel=4,
            )
        mended = path.with_name(path.name + ".mended")
        mended.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        os.replace(mended, path)
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found.append(Release(**json.loads(line)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}, is no release of a privacy ledger: {error}") from None
    return found


class PrivateQuantityWarning(UserWarning):
    """Something that is private in itself is about to be kept or shown."""


@dataclass(frozen=True)
class PrivacyStatement:
    """What can be said of a run.

    Attributes
    ----------
    epsilon, delta : float
        The guarantee under `adjacency`.
    adjacency : str
    epsilon_replace_one : float
        The guarantee if a record is replaced by another instead, which moves a sum by up to twice the threshold.
    accountant : str
    releases : int
        Noised sums that were released.
    amplified : bool
        Whether Poisson sampling was counted in favour of the guarantee.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency
    epsilon_replace_one: float
    accountant: Accountant
    releases: int
    amplified: bool

    def __str__(self) -> str:
        sampling = "with amplification by Poisson sampling" if self.amplified else "without amplification by sampling"
        return (
            f"({self.epsilon:.4g}, {self.delta:.3g})-differential privacy, neighbours by {self.adjacency}, after {self.releases} releases {sampling}; "
            f"epsilon {self.epsilon_replace_one:.4g} where one record is replaced by another ({self.accountant} accountant)"
        )


def epsilon_from_log(
    log: Mapping[str, Any] | str,
    delta: float,
    *,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add-remove",
) -> float:
    """Epsilon of everything that a log says was released, from the log alone.

    Parameters
    ----------
    log : mapping or str
        ``optimizer.audit_log()``, or the JSON text of it.
    delta : float
        Above 0 and below 1.
    accountant : {"pld", "rdp"}
        Privacy loss distributions (tight, default) or Renyi divergences (a little larger), both of dp-accounting.
    adjacency : {"add-remove", "replace-one"}
        Data sets are neighbours when a record is added or removed (its gradient counts as zero, and n is public), or when one is replaced by
        another. A replaced record moves a sum by up to twice the threshold.

    Returns
    -------
    float
        Infinity where a release had no noise; 0 for an empty log.

    Raises
    ------
    ValueError
        If the log cannot be read, delta is out of range, or Renyi accounting is asked for Poisson samples under ``"replace-one"``, which
        dp-accounting does not offer.

    References
    ----------
    Koskela et al., 2020, arXiv:1906.03049 (privacy loss distributions); Mironov et al., 2019, arXiv:1908.10530 (Renyi, subsampled Gaussian).
    """
    if isinstance(log, str):
        try:
            log = json.loads(log)
        except json.JSONDecodeError as error:
            raise ValueError(f"expected a log as JSON text: {error}") from None
    return epsilon_of(_releases_of(log), delta, accountant=accountant, adjacency=adjacency)


def epsilon_of(
    releases: Iterable[Release], delta: float, *, accountant: Accountant = "pld", adjacency: Adjacency = "add-remove"
) -> float:
    """As `epsilon_from_log`, of releases themselves."""
    _check_delta(delta)
    if accountant not in get_args(Accountant):
        raise ValueError(f"accountant must be one of {get_args(Accountant)}, got {accountant!r}")
    if adjacency not in get_args(Adjacency):
        raise ValueError(f"adjacency must be one of {get_args(Adjacency)}, got {adjacency!r}")
    poisson, precision = _composed(releases)
    if math.isinf(precision) or any(noise == 0.0 for noise, _ in poisson):
        return math.inf
    if not poisson and precision == 0.0:
        return 0.0
    return _account(poisson, precision, delta, accountant, adjacency)


def calibrate_noise(
    plan: Callable[[float], Iterable[Release]],
    target_epsilon: float,
    target_delta: float,
    *,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add-remove",
) -> float:
    """The smallest noise multiplier, to a relative 1e-4, with which a planned run stays within its budget.

    Parameters
    ----------
    plan : callable
        ``plan(noise_multiplier)`` gives the releases of the whole run.
    target_epsilon, target_delta : float
        The budget.
    accountant, adjacency
        As in `epsilon_from_log`.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If the target is not positive, or no multiplier up to a million reaches it.
    """
    if not 0.0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon must be a finite number above 0, got {target_epsilon}")

    def excess(log_noise: float) -> float:
        spent = epsilon_of(plan(math.exp(log_noise)), target_delta, accountant=accountant, adjacency=adjacency)
        return math.log(spent / target_epsilon) if 0.0 < spent < math.inf else math.copysign(50.0, spent - 1.0)

    # Renyi accounting is fast and nearly tight; half the noise for neighbours two removals apart is more than enough to start from.
    halved = 1.0 if adjacency == "add-remove" else 0.5

    def roughly(log_noise: float) -> float:
        poisson, precision = _composed(plan(halved * math.exp(log_noise)))
        if math.isinf(precision) or any(noise == 0.0 for noise, _ in poisson):
            return 50.0
        spent = _renyi(poisson, precision, target_delta, WHOLE_ORDERS)
        return math.log(spent / target_epsilon) if spent > 0.0 else -50.0

    high = 0.0
    while roughly(high) > 0.0:
        high += math.log(2.0)
        if high > math.log(1e6):
            raise ValueError(f"no noise multiplier up to 1e6 reaches epsilon {target_epsilon} at delta {target_delta}")
    low = high - math.log(2.0)
    while roughly(low) <= 0.0 and low > math.log(1e-3):
        low -= math.log(2.0)
    high = brentq(roughly, low, high, xtol=1e-3)

    def exactly(log_noise: float) -> float:
        # Aimed a little below the target, by more than the search's tolerance, so that what is found keeps to it.
        return excess(log_noise) + 1.5e-4

    step = 0.1
    while exactly(high) > 0.0:
        high += step
    low = high - step
    while exactly(low) <= 0.0:
        low, high = low - step, low
    found = brentq(exactly, low, high, xtol=5e-5, rtol=1e-6)
    while excess(found) > 0.0:
        found += 5e-5
    return math.exp(found)


def _composed(releases: Iterable[Release]) -> tuple[dict[tuple[float, float], int], float]:
    """Poisson-sampled releases by (noise multiplier, rate), and the summed 1 / sigma^2 of all others.

    Plain Gaussian releases compose into one exactly. A record is in one part only, so that of `parts` parts the worst counts; numbers of
    parts that differ may share records, and add up.
    """
    poisson: Counter[tuple[float, float]] = Counter()
    precision = 0.0
    by_part: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for release in releases:
        noise = release.noise_multiplier
        worth = math.inf if noise == 0.0 else noise**-2
        if release.participation == "poisson" and release.rate < 1.0:
            poisson[noise, release.rate] += 1
        elif release.participation == "cyclic":
            by_part[release.parts][release.part] += worth
        else:
            precision += worth
    return poisson, precision + sum(max(of.values()) for of in by_part.values())


def _account(
    poisson: Mapping[tuple[float, float], int],
    precision: float,
    delta: float,
    accountant: Accountant,
    adjacency: Adjacency,
) -> float:
    import dp_accounting
    from dp_accounting import pld

    replaced = adjacency == "replace-one"
    if replaced and poisson and accountant == "rdp":
        raise ValueError(
            "dp-accounting has no Renyi accounting of Poisson samples under replace-one; use accountant='pld'"
        )
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    if replaced and poisson:
        # The library doubles the sensitivity of Gaussian events itself under this relation (with the other accountant it would not).
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    elif replaced:
        precision *= 4.0
    if accountant == "rdp":
        return _renyi(poisson, precision, delta, ORDERS)
    # Privacy losses are rounded upwards to a grid g; after T releases that adds about T (g / epsilon)^2 to epsilon, in proportion.
    rough, count = _renyi(poisson, precision, delta, WHOLE_ORDERS), sum(poisson.values()) + 1
    grid = min(1e-3 * max(1.0, rough), rough * (2e-4 / count) ** 0.5)
    made: Any = pld.PLDAccountant(neighboring_relation=relation, value_discretization_interval=grid)
    _compose(made, poisson, precision)
    return float(made.get_epsilon(delta))


def _renyi(
    poisson: Mapping[tuple[float, float], int], precision: float, delta: float, orders: Sequence[float]
) -> float:
    """Epsilon by Renyi accounting; below order two the library's series for samples may not converge, so none is there."""
    from dp_accounting import rdp

    made = rdp.RdpAccountant(orders=orders if poisson else None)
    _compose(made, poisson, precision)
    return float(made.get_epsilon(delta))


def _compose(made: Any, poisson: Mapping[tuple[float, float], int], precision: float) -> None:
    import dp_accounting

    for (noise, rate), count in sorted(poisson.items()):
        made.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), count)
    if precision > 0.0:
        made.compose(dp_accounting.GaussianDpEvent(precision**-0.5))


def _releases_of(log: Any) -> list[Release]:
    known = isinstance(log, Mapping) and type(log.get("version")) is int and log["version"] == VERSION
    if not known or not isinstance(log.get("releases"), list):
        raise ValueError(f"expected a log: a mapping with version {VERSION} and a list of releases")
    try:
        return [Release(**entry) for entry in log["releases"]]
    except TypeError as error:
        raise ValueError(f"expected a log whose releases have the fields of Release: {error}") from None


def _check_delta(delta: float) -> None:
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must lie between 0 and 1, got {delta}")
