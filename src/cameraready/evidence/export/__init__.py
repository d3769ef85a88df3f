"""Hands a result to other tools: tables, LaTeX, PDF figures, MLflow, Trackio. Imports its libraries when first used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cameraready.evidence.subject import UsageError

if TYPE_CHECKING:
    from cameraready.evidence.results import Result

__all__ = ["FORMATS", "OPTIONS", "Written", "export"]

FORMATS = ("csv", "parquet", "latex", "pdf", "mlflow", "trackio")

#: What `export` takes beside the folder, by format.
OPTIONS = {"mlflow": ("tracking_uri",), "trackio": ("publish", "openreview")}


@dataclass(frozen=True)
class Written:
    """Where an export went: paths, or the address of a tracking server; and how to look at it, in a sentence."""

    places: list[str]
    hint: str = ""


def export(result: Result, to: str, out: Path, **options: Any) -> Written:
    """Write `result` for another tool into the folder `out`.

    Files and folders are named after the method (and its tier and workloads where they are not the usual ones); those
    are replaced, nothing else is touched. Each is written whole or not at all.

    Parameters
    ----------
    to : str
        One of `FORMATS`.
    tracking_uri : str
        mlflow: where to log; by default ``MLFLOW_TRACKING_URI``, else a database in `out`.
    publish : bool
        trackio: put the logbook on the Hugging Face Hub.
    openreview : str
        trackio: the paper's OpenReview id or URL, by default the card's.

    Raises
    ------
    UsageError
        If there is no such format, an option is not the format's, or `out` cannot be a folder.
    ModuleNotFoundError
        If the format's extra is not installed; the message says how to get it.
    ValueError
        If the result is damaged.
    """
    from cameraready.evidence.soundness import check

    if to not in FORMATS:
        raise UsageError(f"there is no export to {to!r}; formats: {', '.join(FORMATS)}")
    for name in options:
        if name not in OPTIONS.get(to, ()):
            raise UsageError(f"an export to {to} takes no option {name!r}")
    if out.suffix in (".csv", ".parquet", ".pdf", ".tex", ".db") and not (to == "latex" and out.suffix == ".tex"):
        raise UsageError(f"the export to {to} goes into a folder, and {out} is named like a file")
    check(result)
    return _writer(to)(result, out, **options)


def _writer(to: str) -> Callable[..., Written]:
    if to in ("csv", "parquet"):
        from cameraready.evidence.export.frames import write_csv, write_parquet

        return write_csv if to == "csv" else write_parquet
    if to == "latex":
        from cameraready.evidence.export.latex import write_table

        return write_table
    if to == "pdf":
        from cameraready.evidence.export.pdf import write_figures

        return write_figures
    if to == "mlflow":
        from cameraready.evidence.export.mlflow_runs import log_run

        return log_run
    from cameraready.evidence.export.logbook import write_logbook

    return write_logbook
