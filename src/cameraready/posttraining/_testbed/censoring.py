"""Times until something happens, some of which the run was too short to see."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Censored:
    """Right-censored times to an event, one for each seed.

    Attributes
    ----------
    time : (S,) float64
        Time of the event, or the limit where it had not come by then.
    event : (S,) bool
        Whether it was seen.
    limit : float
    """

    time: np.ndarray
    event: np.ndarray
    limit: float

    def rows(self, name: str = "time") -> list[dict[str, float | bool]]:
        """One dictionary a seed: ``{name: min(time, limit), name_seen: bool}``. The mean of the first over seeds is the restricted mean time, so differences can be paired by seed."""
        return [{name: float(t), f"{name}_seen": bool(e)} for t, e in zip(self.time, self.event, strict=True)]

    @property
    def restricted_mean(self) -> float:
        """Mean of min(time, limit): with one common limit, the area under the survival curve up to it. Needs no assumption on what comes later."""
        return float(self.time.mean())

    def data(self) -> stats.CensoredData:
        """For scipy: ``scipy.stats.ecdf(x.data()).sf`` is the Kaplan-Meier estimate."""
        return stats.CensoredData(uncensored=self.time[self.event], right=self.time[~self.event])

    def log_rank(self, other: "Censored", alternative: str = "two-sided") -> tuple[float, float]:
        """Log-rank test of equal times (scipy), as (statistic, p-value). Unpaired: with paired seeds it is conservative.

        Without a single event on either side there is nothing to compare: (0.0, 1.0).
        """
        if not self.event.any() and not other.event.any():
            return 0.0, 1.0
        result = stats.logrank(self.data(), other.data(), alternative=alternative)
        return float(result.statistic), float(result.pvalue)


def censored(times: Sequence[float | None] | np.ndarray, limit: float) -> Censored:
    """Times to an event, censored at a common limit.

    Parameters
    ----------
    times : (S,) float
        None, NaN or infinity where the event was not seen; times beyond the limit count as not seen.
    limit : float
        Length of the run.

    Raises
    ------
    ValueError
        If there are no times, one is negative, or the limit is not positive and finite.
    """
    if not (np.isfinite(limit) and limit > 0):
        raise ValueError(f"limit must be a positive number, got {limit}")
    t = np.array([np.nan if x is None else float(x) for x in times], dtype=np.float64)
    if not t.size:
        raise ValueError("there are no times")
    if np.any(t < 0):
        raise ValueError(f"a time cannot be negative, got {np.nanmin(t)}")
    event = np.isfinite(t) & (t <= limit)
    return Censored(np.where(event, t, float(limit)), event, float(limit))


def first_time(
    rows: Sequence[dict], column: str, at_least: float, *, time: str = "step", run: str = "run"
) -> dict[int, float | None]:
    """First recorded time at which a column reached a level, for each run; None where it never did.

    Parameters
    ----------
    rows : list of dict
        As `train` returns them.
    column : str
    at_least : float
    time, run : str
        Columns of the time (steps, rollouts, KL spent ...) and of the run.
    """
    found: dict[int, float | None] = {}
    for row in sorted(rows, key=lambda r: r[time]):
        found.setdefault(row[run], None)
        if found[row[run]] is None and row[column] >= at_least:
            found[row[run]] = float(row[time])
    return found
