"""Rows of made-up runs, as the engine would hand them over, and a study to judge them by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from cameraready.evidence import Study


def run_rows(
    values: Mapping[str, Sequence[float | None] | np.ndarray],
    *,
    column: str = "error",
    workload: str = "digits",
    **more: Any,
) -> pl.DataFrame:
    """One row per arm and block; `values` maps an arm to its value in each block."""
    return pl.DataFrame(
        [
            {
                "workload": workload,
                "seed": 0,
                "trial": f"{workload}-{arm}-{block}-{sorted(more.items())}",
                "status": "done",
                "trial_seconds": 0.5,
                "instance": block,
                "arm": arm,
                column: None if value is None else float(value),
                **more,
            }
            for arm, series in values.items()
            for block, value in enumerate(series)
        ],
        infer_schema_length=None,
    )


def failing(rows: pl.DataFrame, arm: str, blocks: Sequence[int], status: str = "raised") -> pl.DataFrame:
    """The same run with the trials of `arm` failed in `blocks`: no measurements, condition kept."""
    hit = (pl.col("arm") == arm) & pl.col("instance").is_in(list(blocks))
    kept = {"workload", "seed", "trial", "status", "trial_seconds", "instance", "arm", "budget"}
    return rows.with_columns(
        pl.when(hit).then(pl.lit(status)).otherwise(pl.col("status")).alias("status"),
        *(pl.when(hit).then(None).otherwise(pl.col(c)).alias(c) for c in rows.columns if c not in kept),
    )


def study_of(*claims: Any, method: str = "new", **more: Any) -> Study:
    """A study with these claims; it is only judged here, never run."""
    return Study(
        open=lambda spec: spec,
        workloads={"smoke": ["digits"], "desk": ["digits"]},
        plan=lambda tier, workload: [],
        trial=lambda workload, ctx, **condition: [],
        method=method,
        arms="arm",
        block="instance",
        claims=claims,
        **more,
    )
