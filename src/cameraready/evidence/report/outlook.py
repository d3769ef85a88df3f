"""What would change a verdict, in a sentence: computed from estimate, interval, blocks and rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from scipy.special import betaincinv, ndtri, stdtrit

from cameraready.evidence.outcomes import Verdict
from cameraready.evidence.report import wording
from cameraready.evidence.rules import MIN_BLOCKS, Above, Always, Below, Rule, Within
from cameraready.evidence.study import Claim

TAIL = 0.025  # of a 95 % interval, on each side
MOST_TIMES = 100  # as many blocks as there are: beyond, the estimate is too near to the limit for any run


class Distance(NamedTuple):
    """How far an end of the interval reaches from the estimate, and how far it may reach for a verdict."""

    reach: float
    room: float


def outlook(claim: Claim, verdict: Verdict) -> str:
    """What would have to happen for `verdict` to become another; empty where nothing was tested.

    For an inconclusive verdict: how many blocks would settle it if estimate and spread stay as they are, the interval
    shrinking with the square root of their number on the measure's own scale (logarithms for ratios).
    """
    if verdict.verdict == "untested":
        return ""
    if verdict.rule != claim.rule.describe():
        return f"The rule has changed since ({verdict.rule} then, {claim.rule.describe()} now): run the study again."
    if isinstance(claim.rule, Always):
        return _of_census(verdict)
    if verdict.verdict == "holds":
        return _of_kept(claim, verdict)
    if verdict.verdict in ("fails", "not seen"):
        return _of_broken(claim.rule, verdict)
    return _of_open(claim, verdict)


def blocks_to_settle(claim: Claim, verdict: Verdict) -> int | None:
    """The number of blocks at which an open verdict would be settled; None where `MOST_TIMES` as many would not do.

    Raises
    ------
    ValueError
        If the verdict has no interval, or its interval does not reach both sides of the rule.
    """
    low, estimate, high = verdict.low, verdict.estimate, verdict.high
    if low is None or estimate is None or high is None or claim.rule.judge(estimate, low, high) != "open":
        raise ValueError("only an interval that reaches both sides of its rule can be settled by more blocks")
    n = verdict.blocks
    settled = _settled_exactly(claim.rule, estimate) if claim.measure.interval == "exact" else None
    if settled is None:
        scale = _working_scale(claim)
        needed = _distances(claim.rule, scale, low, estimate, high)
        if any(d.room <= 0 or not math.isfinite(d.reach) for d in needed):
            return None
        settled = _shrinks_into(needed, n, normal=claim.measure.interval == "fisher")
    most = MOST_TIMES * n
    return _smallest(settled, n + 1, most) if settled(most) else None


# --- settled by how many blocks -------------------------------------------------------------------------------------


def _working_scale(claim: Claim) -> Callable[[float], float]:
    """The scale on which the measure's interval is made."""
    if claim.measure.log_scale:
        return lambda x: math.log(x) if x > 0 else -math.inf
    if claim.measure.interval == "fisher":
        return lambda x: math.atanh(x) if abs(x) < 1 else math.copysign(math.inf, x)
    return float


def _distances(
    rule: Rule, scale: Callable[[float], float], low: float, estimate: float, high: float
) -> tuple[Distance, ...]:
    """What must shrink into what; the estimate says on which side of the rule the interval will end up."""
    e, down, up = scale(estimate), scale(estimate) - scale(low), scale(high) - scale(estimate)
    if isinstance(rule, Below | Above):
        room = scale(rule.limit) - e
        return (Distance(up, room),) if room > 0 else (Distance(down, -room),)
    assert isinstance(rule, Within)
    if estimate > rule.hi:
        return (Distance(down, e - scale(rule.hi)),)
    if estimate < rule.lo:
        return (Distance(up, scale(rule.lo) - e),)
    return (Distance(down, e - scale(rule.lo)), Distance(up, scale(rule.hi) - e))


def _shrinks_into(needed: tuple[Distance, ...], n: int, *, normal: bool) -> Callable[[int], bool]:
    """Whether intervals of so many blocks lie on one side; `normal`: of Fisher's z, otherwise of Student's t."""

    def width(blocks: int) -> float:
        if normal:
            return float(ndtri(1 - TAIL)) / math.sqrt(blocks - 3)
        return float(stdtrit(blocks - 1, 1 - TAIL)) / math.sqrt(blocks)

    return lambda blocks: all(d.reach * width(blocks) / width(n) < d.room for d in needed)


def _settled_exactly(rule: Rule, share: float) -> Callable[[int], bool]:
    """Whether a share of that many blocks, with Clopper and Pearson's interval, lies on one side of the rule."""

    def settled(blocks: int) -> bool:
        wins = share * blocks
        low = 0.0 if wins <= 0 else float(betaincinv(wins, blocks - wins + 1, TAIL))
        high = 1.0 if wins >= blocks else float(betaincinv(wins + 1, blocks - wins, 1 - TAIL))
        return rule.judge(share, low, high) != "open"

    return settled


def _smallest(settled: Callable[[int], bool], least: int, most: int) -> int:
    """The smallest number in [least, most] that is settled; `most` must be."""
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if settled(middle) else (middle + 1, most)
    return least


# --- in words -------------------------------------------------------------------------------------------------------


def _of_census(verdict: Verdict) -> str:
    if verdict.verdict == "holds":
        return "A single violation would refute it."
    if verdict.verdict in ("fails", "not seen"):
        return "More blocks cannot undo a violation; only an error in the test itself would."
    return _in_the_way(verdict) or f"Without any violation it would hold: {verdict.reason} stands in the way."


def _of_kept(claim: Claim, verdict: Verdict) -> str:
    (low, high), rule = _ends(verdict), claim.rule
    if isinstance(rule, Below):
        return f"The interval’s upper end, {_n(high)}, would have to rise to {_n(rule.limit)}."
    if isinstance(rule, Above):
        return f"The interval’s lower end, {_n(low)}, would have to fall to {_n(rule.limit)}."
    assert isinstance(rule, Within)
    scale = _working_scale(claim)
    if scale(rule.hi) - scale(high) <= scale(low) - scale(rule.lo):
        return f"The interval’s upper end, {_n(high)}, would have to rise above {_n(rule.hi)}."
    return f"The interval’s lower end, {_n(low)}, would have to fall below {_n(rule.lo)}."


def _of_broken(rule: Rule, verdict: Verdict) -> str:
    low, high = _ends(verdict)
    if isinstance(rule, Below) or (isinstance(rule, Within) and low > rule.hi):
        limit = rule.limit if isinstance(rule, Below) else rule.hi
        return (
            f"Doubt would need the interval’s lower end, {_n(low)}, to fall below {_n(limit)}; "
            f"to hold, its upper end, {_n(high)}, as well."
        )
    assert isinstance(rule, Above | Within)
    limit = rule.limit if isinstance(rule, Above) else rule.lo
    return (
        f"Doubt would need the interval’s upper end, {_n(high)}, to rise above {_n(limit)}; "
        f"to hold, its lower end, {_n(low)}, as well."
    )


def _ends(verdict: Verdict) -> tuple[float, float]:
    if verdict.low is None or verdict.high is None:
        raise ValueError(f"a verdict of {verdict.verdict!r} on claim {verdict.label} needs an interval, and has none")
    return verdict.low, verdict.high


def _of_open(claim: Claim, verdict: Verdict) -> str:
    early = _in_the_way(verdict)
    if early:
        return early
    low, estimate, high = verdict.low, verdict.estimate, verdict.high
    if estimate is None or low is None or high is None:
        return f"More blocks would not help: {verdict.reason or 'there is no interval'}."
    judgement = claim.rule.judge(estimate, low, high)
    if judgement == "yes":
        return f"The numbers obey the rule; in the way is this: {verdict.reason}."
    if judgement == "no":
        return f"The numbers break the rule; in the way is this: {verdict.reason}."
    across = _reaches(claim.rule, low, high)
    blocks = blocks_to_settle(claim, verdict)
    if blocks is None:
        return (
            f"The interval reaches {across}, and the estimate {_n(estimate)} is so near to it that even "
            f"{MOST_TIMES * verdict.blocks:,} blocks (now {verdict.blocks:,}) would not settle it."
        )
    broken = "fail" if claim.scope in ("exact", "ours") else "count as not seen"
    return (
        f"The interval reaches {across}. If the estimate stays at {_n(estimate)}, about {_rounded(blocks)} blocks "
        f"(now {verdict.blocks:,}) would settle it: it would {'hold' if _obeys(claim.rule, estimate) else broken}."
    )


def _in_the_way(verdict: Verdict) -> str:
    """What must happen before the numbers count at all."""
    if verdict.blocks >= MIN_BLOCKS:
        return ""
    return f"A verdict needs {MIN_BLOCKS} blocks; {MIN_BLOCKS - verdict.blocks} more are missing."


def _obeys(rule: Rule, estimate: float) -> bool:
    """Whether an interval that has shrunk to the estimate obeys the rule."""
    return rule.judge(estimate, estimate, estimate) == "yes"


def _reaches(rule: Rule, low: float, high: float) -> str:
    if isinstance(rule, Below | Above):
        return f"over the limit {_n(rule.limit)}"
    assert isinstance(rule, Within)
    if low < rule.lo and high > rule.hi:
        return f"over both limits, {_n(rule.lo)} and {_n(rule.hi)}"
    return f"over the limit {_n(rule.hi if high > rule.hi else rule.lo)}"


def _rounded(blocks: int) -> str:
    """Two digits say enough of an estimate."""
    digits = max(len(str(blocks)) - 2, 0)
    return f"{math.ceil(blocks / 10**digits) * 10**digits:,}"


def _n(value: float) -> str:
    return wording.number(value)
