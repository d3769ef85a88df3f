"""The method against each of its competitors in turn, in the quantity that the study's answer is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from cameraready.evidence.measures import difference, ratio
from cameraready.evidence.measures.base import Measure
from cameraready.evidence.measures.blocks import arms_in, done, with_engine_columns
from cameraready.evidence.measures.paired import VersusBest
from cameraready.evidence.rules import MIN_BLOCKS
from cameraready.evidence.study import Study
from cameraready.evidence.verdicts import evidence, workloads_in


@dataclass(frozen=True)
class Rival:
    """How the method compares with one arm on one workload.

    Attributes
    ----------
    level : object
        Value of the answer's `by` column (a budget, say) at which they were compared; None if it has none.
    estimate, low, high : float or None
        Ratio (or difference) of the method to the arm, and the ends of its 95 % interval; None where there are none.
    blocks : int
    reason : str
        What must be said beside the numbers: failures, blocks left out.
    """

    arm: str
    workload: str
    level: Any
    estimate: float | None
    low: float | None
    high: float | None
    blocks: int
    reason: str


def rivals(study: Study, frame: pl.DataFrame) -> list[Rival]:
    """The method against every other arm, one by one, on each workload that the study's answer is about.

    Compared at the largest level of the answer's `by` at which the workload has the blocks that a verdict needs. Each
    interval stands for itself: picking the best arm from this list afterwards would be optimistic, which is why answers
    and claims choose the best peer inside every resample.

    Returns
    -------
    list of Rival
        By workload in order of appearance, then by arm; empty where the study's answer compares with no one.
    """
    plan = study.answer
    if plan is None or not isinstance(plan.measure, VersusBest):
        return []
    found = []
    for workload in workloads_in(frame):
        if plan.workloads is not None and workload not in plan.workloads:
            continue
        rows = with_engine_columns(frame.filter(pl.col("workload").cast(pl.String) == workload))
        rows = rows.filter(done()) if plan.where is None else rows.filter(done() & plan.where)
        rows = rows.filter(pl.col(plan.measure.column).is_not_null())
        level = _level(rows, study, plan.by, plan.measure.method)
        where = plan.where
        if level is not None:
            at = pl.col(plan.by) == level
            rows = rows.filter(at)
            where = at if where is None else where & at
        for arm in arms_in(rows, study.arms):
            if arm in (study.method, plan.measure.method) or arm in plan.measure.exclude:
                continue
            if plan.measure.peers is not None and arm not in plan.measure.peers:
                continue
            against = evidence(study, frame, _pair(plan.measure, arm), workload, where, {})
            reason = "; ".join(against.remarks)
            found.append(
                Rival(arm, workload, level, against.estimate, against.low, against.high, against.blocks, reason)
            )
    return found


def _pair(best: VersusBest, arm: str) -> Measure:
    if best.kind == "difference":
        return difference(best.column, best.method, arm, repeats=best.repeats)
    return ratio(best.column, best.method, arm, floor=best.floor, repeats=best.repeats)


def _level(rows: pl.DataFrame, study: Study, by: str, method: str) -> Any:
    """The largest level with enough blocks, or with the most where none has."""
    if not by or by not in rows.columns:
        return None
    mine = rows.filter(pl.col(study.arms).cast(pl.String) == method)
    blocks = mine.group_by(by).agg(_blocks=pl.col(study.block).n_unique()).drop_nulls().sort(by)
    if blocks.is_empty():
        return None
    enough = blocks.filter(pl.col("_blocks") >= MIN_BLOCKS)
    pick = enough if not enough.is_empty() else blocks.filter(pl.col("_blocks") == pl.col("_blocks").max())
    return pick[by][-1]
