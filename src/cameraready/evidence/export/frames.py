"""Results as two tables: verdicts and rows, as CSV or Parquet."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from cameraready.evidence.export import Written
from cameraready.evidence.export.landing import land_files
from cameraready.evidence.outcomes import Verdict
from cameraready.evidence.report import page_name

if TYPE_CHECKING:
    from cameraready.evidence.results import Result

#: The columns of the table of verdicts, in its order: every field of a verdict.
CLAIM_COLUMNS = {
    "method": pl.String, "tier": pl.String, "label": pl.String, "number": pl.Int64, "workload": pl.String,
    "verdict": pl.String, "provisional": pl.Boolean, "scope": pl.String, "estimate": pl.Float64, "low": pl.Float64,
    "high": pl.Float64, "blocks": pl.Int64, "rule": pl.String, "measure": pl.String, "claim": pl.String,
    "paper": pl.String, "source": pl.String, "peer": pl.String, "seconds": pl.Float64, "reason": pl.String,
    "failed_trials": pl.Int64, "lost_blocks": pl.Int64, "changed": pl.String, "value": pl.String,
}  # fmt: skip


def claims_frame(result: Result) -> pl.DataFrame:
    """One row a verdict, in reading order; what was not measured is null. `value` is JSON text."""
    records = []
    for verdict in result.claims_shown:
        record = {field.name: getattr(verdict, field.name) for field in fields(Verdict)}
        record["value"] = json.dumps(dict(verdict.value), ensure_ascii=False)
        records.append({"method": result.card.slug, "tier": result.tier, **record})
    return pl.DataFrame(records, schema=CLAIM_COLUMNS)


def flat_frame(rows: pl.DataFrame) -> pl.DataFrame:
    """`rows` with plain columns only, for formats without nesting: lists and structs as JSON text, bytes as hex digits."""
    columns = []
    for series in rows.get_columns():
        if series.dtype.is_nested():
            texts = [None if value is None else json.dumps(value, default=str) for value in series.to_list()]
            columns.append(pl.Series(series.name, texts, dtype=pl.String))
        elif series.dtype == pl.Binary:
            columns.append(series.bin.encode("hex"))
        elif series.dtype == pl.Duration:
            columns.append(series.dt.total_microseconds() / 1e6)  # seconds
        else:
            columns.append(series)
    return pl.DataFrame(columns)


def csv_bytes(frame: pl.DataFrame) -> bytes:
    """UTF-8; every float in full precision, missing values empty, the empty text quoted."""
    return flat_frame(frame).write_csv().encode()


def parquet_bytes(frame: pl.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.write_parquet(buffer, compression="zstd")
    return buffer.getvalue()


def write_csv(result: Result, out: Path) -> Written:
    """``NAME-claims.csv`` and ``NAME-rows.csv``."""
    return _write(result, out, "csv", csv_bytes)


def write_parquet(result: Result, out: Path) -> Written:
    """``NAME-claims.parquet`` and ``NAME-rows.parquet``."""
    return _write(result, out, "parquet", parquet_bytes)


def _write(result: Result, out: Path, suffix: str, encode: Any) -> Written:
    name = page_name(result)
    tables: Sequence[tuple[str, pl.DataFrame]] = (("claims", claims_frame(result)), ("rows", result.rows))
    return Written(land_files(out, {f"{name}-{table}.{suffix}": encode(frame) for table, frame in tables}))
