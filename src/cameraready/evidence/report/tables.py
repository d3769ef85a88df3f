"""The numbers of a report: what each arm cost, and which trials failed, ready to be laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from cameraready.evidence.outcomes import Failure
from cameraready.evidence.report import wording
from cameraready.evidence.rules import significant
from cameraready.evidence.study import Study


@dataclass(frozen=True)
class Cost:
    """Time and memory of trials: one row an arm, one column a workload."""

    workloads: list[str]
    arms: list[str]  # "" where a trial covers all arms
    cells: dict[tuple[str, str], str]  # (arm, workload) -> "0.12 s, 210 MB"


def cost(study: Study, rows: pl.DataFrame) -> Cost:
    """Median time and peak memory of finished trials. Where one trial covers several arms, the trial's own."""
    needed = {"trial", "status", "trial_seconds", "trial_peak_mb", "workload", study.arms}
    if not needed <= set(rows.columns):
        return Cost([], [], {})
    done = rows.filter(pl.col("status") == "done")
    shared = done.group_by("trial").agg(pl.col(study.arms).n_unique().alias("arms"))["arms"].max()
    arm = pl.lit("") if isinstance(shared, int) and shared > 1 else pl.col(study.arms).cast(pl.String)
    trials = done.with_columns(arm.alias("_arm")).unique(subset=["trial"], maintain_order=True)
    table = trials.group_by("_arm", "workload", maintain_order=True).agg(
        pl.col("trial_seconds").median().alias("seconds"),
        pl.col("trial_peak_mb").median().alias("peak"),
        pl.len().alias("n"),
    )
    cells = {}
    for row in table.iter_rows(named=True):
        peak = f", {significant(row['peak'])} MB" if row["peak"] else ""
        cells[row["_arm"], row["workload"]] = f"{wording.duration(row['seconds'])}{peak}"
    arms = list(dict.fromkeys(name for name, _ in cells))
    arms.sort(key=lambda name: name != study.method)
    return Cost(list(dict.fromkeys(load for _, load in cells)), arms, cells)


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
