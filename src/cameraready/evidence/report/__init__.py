"""The report: one self-contained page for a run, one index for many. Imports its libraries when first used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cameraready.evidence.execution.ledger import Run
    from cameraready.evidence.results import Result

__all__ = ["page_name", "render", "render_summary", "write_index", "write_report"]


def render(result: Result) -> str:
    """The whole page of a run, as one HTML document that needs no network."""
    from cameraready.evidence.report.page import render_page

    return render_page(result)


def render_summary(result: Result) -> str:
    """Answer, verdicts and pictures as an HTML fragment with its own style, for a notebook's cell."""
    from cameraready.evidence.report.page import render_fragment

    return render_fragment(result)


def write_report(result: Result, folder: Path) -> Path:
    """Write the page of a run as ``index.html`` into `folder` and return its path."""
    from cameraready.evidence.report.page import write_page

    return write_page(folder / "index.html", render(result))


def page_name(result: Result) -> str:
    """Name of the folder for a run's page: the method, then tier and workloads where they are not the usual ones.

    The same command gives the same name, so that running it again replaces the page.
    """
    from cameraready.evidence.report.page import folder_name

    return folder_name(result)


def write_index(folder: Path, history: Sequence[Run] = (), ledger: str = "") -> Path:
    """Write ``index.html`` over all runs whose results lie below `folder`, and return its path.

    `history` are the runs that the ledger at `ledger` remembers; see `cameraready.evidence.report.index`.
    """
    from cameraready.evidence.report.index import render_index
    from cameraready.evidence.report.page import write_page

    return write_page(folder / "index.html", render_index(folder, history, ledger))
