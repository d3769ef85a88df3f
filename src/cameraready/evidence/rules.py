"""Rules: what a measure must be for a claim to hold, fixed before the run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

#: Fewer blocks than this give no verdict.
MIN_BLOCKS = 10

#: yes: the whole interval obeys the rule. no: the whole interval breaks it. open: neither.
Judgement = Literal["yes", "no", "open"]


def significant(x: float, digits: int = 3) -> str:
    """`x` to `digits` significant digits, as a person would write it: ``0.333``, ``1.08``, ``12,300``, ``3.1e-07``."""
    if not math.isfinite(x):
        return "not a number" if math.isnan(x) else ("infinity" if x > 0 else "-infinity")
    if x == 0:
        return "0"
    rounded = float(f"{x:.{digits}g}")
    if 1e-4 <= abs(rounded) < 1e6:
        decimals = max(digits - 1 - math.floor(math.log10(abs(rounded))), 0)
        text = f"{rounded:,.{decimals}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{rounded:.{digits}g}"


@dataclass(frozen=True)
class Rule:
    """Base of the rules; use `below`, `above`, `within` or `always`."""

    def judge(self, estimate: float, low: float, high: float) -> Judgement:
        """Whether a measure with this estimate and interval obeys the rule; a NaN among the limits leaves it open."""
        raise NotImplementedError

    def describe(self) -> str:
        """The rule in words: ``"below 0.333"``."""
        raise NotImplementedError


@dataclass(frozen=True)
class Below(Rule):
    """The measure is smaller than `limit`."""

    limit: float

    def judge(self, estimate: float, low: float, high: float) -> Judgement:
        if high < self.limit:
            return "yes"
        return "no" if low >= self.limit else "open"

    def describe(self) -> str:
        return f"below {significant(self.limit)}"


@dataclass(frozen=True)
class Above(Rule):
    """The measure is larger than `limit`."""

    limit: float

    def judge(self, estimate: float, low: float, high: float) -> Judgement:
        if low > self.limit:
            return "yes"
        return "no" if high <= self.limit else "open"

    def describe(self) -> str:
        return f"above {significant(self.limit)}"


@dataclass(frozen=True)
class Within(Rule):
    """The measure lies between `lo` and `hi`, both included: "on par" says how far from parity still counts."""

    lo: float
    hi: float

    def judge(self, estimate: float, low: float, high: float) -> Judgement:
        if self.lo <= low and high <= self.hi:
            return "yes"
        return "no" if high < self.lo or low > self.hi else "open"

    def describe(self) -> str:
        return f"between {significant(self.lo)} and {significant(self.hi)}"


@dataclass(frozen=True)
class Always(Rule):
    """A census: no violation at all. It looks at the count alone, for a census has no interval."""

    def judge(self, estimate: float, low: float, high: float) -> Judgement:
        if math.isnan(estimate):
            return "open"
        return "yes" if estimate == 0 else "no"

    def describe(self) -> str:
        return "no violation"


def _finite(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def below(limit: float) -> Below:
    """The measure must be below `limit`: yes when the whole interval is, no when all of it is at or above."""
    return Below(_finite("limit of below()", limit))


def above(limit: float) -> Above:
    """The measure must be above `limit`: yes when the whole interval is, no when all of it is at or below."""
    return Above(_finite("limit of above()", limit))


def within(lo: float, hi: float) -> Within:
    """The measure must lie in ``[lo, hi]``: yes when the whole interval does, no when it lies wholly outside."""
    lo, hi = _finite("lo of within()", lo), _finite("hi of within()", hi)
    if lo >= hi:
        raise ValueError(f"within(lo, hi) needs lo < hi, got {lo} and {hi}")
    return Within(lo, hi)


def always() -> Always:
    """A census that must have no violation; goes with the measure `violations`."""
    return Always()
