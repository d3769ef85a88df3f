"""The numbers of a report: what each arm cost, and which trials failed, ready to be laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from cameraready.evidence.outcomes import Failure, Verdict
from cameraready.evidence.report import wording
from cameraready.evidence.rules import significant
from cameraready.evidence.study import Claim, Study


@dataclass(frozen=True)
class Cost:
    """Time of trials, and memory where it is their own: one row an arm, one column a workload."""

    workloads: list[str]
    arms: list[str]  # "" where a trial covers all arms
    cells: dict[tuple[str, str], str]  # (arm, workload) -> "0.12 s", or "0.12 s, 210 MB"
    has_memory: bool


def cost(study: Study, rows: pl.DataFrame) -> Cost:
    """Median time of finished trials. Where one trial covers several arms, the trial's own.

    Peak memory is shown only if every trial had a fresh process: a worker that is used again keeps the peak, and the
    libraries, of all its earlier trials.
    """
    needed = {"trial", "status", "trial_seconds", "trial_peak_mb", "workload", study.arms}
    if not needed <= set(rows.columns):
        return Cost([], [], {}, False)
    has_memory = study.alone is True
    done = rows.filter(pl.col("status") == "done")
    shared = done.group_by("trial").agg(pl.col(study.arms).n_unique().alias("arms"))["arms"].max()
    arm = pl.lit("") if isinstance(shared, int) and shared > 1 else pl.col(study.arms).cast(pl.String)
    trials = done.with_columns(arm.alias("_arm")).unique(subset=["trial"], maintain_order=True)
    table = trials.group_by("_arm", "workload", maintain_order=True).agg(
        pl.col("trial_seconds").median().alias("seconds"), pl.col("trial_peak_mb").median().alias("peak")
    )
    cells = {}
    for row in table.iter_rows(named=True):
        peak = f", {significant(row['peak'])} MB" if has_memory and row["peak"] else ""
        cells[row["_arm"], row["workload"]] = f"{wording.duration(row['seconds'])}{peak}"
    arms = list(dict.fromkeys(name for name, _ in cells))
    arms.sort(key=lambda name: name != study.method)
    return Cost(list(dict.fromkeys(load for _, load in cells)), arms, cells, has_memory)


def medians(study: Study, claim: Claim, verdict: Verdict, rows: pl.DataFrame) -> dict[str, str]:
    """What the two arms of a comparison measured, each by itself: arm -> median over blocks, with its unit if known.

    Empty for claims that compare no two arms in one column, for verdicts over several workloads, and where the rows
    are those of an older study, with other columns.
    """
    measure = claim.measure
    column, method = getattr(measure, "column", ""), getattr(measure, "method", "")
    peer = verdict.peer or getattr(measure, "peer", "")
    if not (column and method and peer) or verdict.workload == "all" or verdict.estimate is None:
        return {}
    asked = {"workload", "status", study.arms, study.block, column}
    if not asked.union(claim.where.meta.root_names() if claim.where is not None else ()) <= set(rows.columns):
        return {}
    here = (pl.col("workload").cast(pl.String) == verdict.workload) & (pl.col("status") == "done")
    here &= pl.col(study.arms).cast(pl.String).is_in([method, peer])
    kept = rows.lazy().filter(here if claim.where is None else here & claim.where)
    arm, block = pl.col(study.arms).cast(pl.String).alias("arm"), pl.col(study.block).cast(pl.String).alias("block")
    found = kept.group_by(arm, block).agg(pl.col(column).cast(pl.Float64).mean().alias("value"))
    table = dict(found.group_by("arm").agg(pl.col("value").median()).collect().iter_rows())
    return {name: _with_unit(table[name], column) for name in (method, peer) if table.get(name) is not None}


def _with_unit(value: float, column: str) -> str:
    """Columns that end in ``seconds`` or ``mb`` say their unit; others have none that is known here."""
    if column.endswith("seconds") and value >= 0:
        return wording.duration(value)
    return f"{wording.number(value)} MB" if column.endswith("mb") else wording.number(value)


@dataclass(frozen=True)
class FailureGroup:
    """Trials of one arm that failed in the same way."""

    arm: str
    status: str
    count: int
    workloads: list[str]
    last_line: str
    example: Failure


#: What became of a failed trial, in words.
STATUS_WORDS = {
    "raised": "raised an error",
    "timeout": "took longer than its limit",
    "memory": "needed more memory than its limit",
    "died": "its process died",
}


def failure_groups(failures: Sequence[Failure]) -> list[FailureGroup]:
    """Failures grouped by arm, status and message, the most frequent first."""
    groups: dict[tuple[str, str, str], list[Failure]] = {}
    for failure in failures:
        lines = failure.error.strip().splitlines()
        groups.setdefault((failure.arm, failure.status, lines[-1] if lines else ""), []).append(failure)
    found = [
        FailureGroup(arm, status, len(members), list(dict.fromkeys(f.workload for f in members)), last, members[0])
        for (arm, status, last), members in groups.items()
    ]
    return sorted(found, key=lambda group: -group.count)
