"""`report`: write the page of a finished run again, without running anything."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from cameraready.cli import failing
from cameraready.cli.failing import BadUsage
from cameraready.cli.run import write_run


def write_reports(
    method: Annotated[
        str,
        typer.Argument(
            help="Slug, arXiv id or URL, a room, or 'all', for shipped results; or a folder with results.json.",
            metavar="METHOD|ROOM|all|FOLDER",
        ),
    ] = "all",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the page; by default one of its own under report/.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open the report in the browser.")] = False,
) -> None:
    """Write the page of a finished run, without running.

    Of the results that a method ships, or of a folder that a run wrote.
    """
    from cameraready.catalog import RESULTS_FILE, UnknownMethod, select
    from cameraready.evidence.report.saved import read_result

    if (Path(method) / RESULTS_FILE).is_file():
        folders = [Path(method)]
    else:
        try:
            cards = select(method)
        except UnknownMethod as error:
            raise BadUsage(f"{error}; nor is there a folder {method} with a {RESULTS_FILE}") from error
        folders = [card.folder for card in cards if card.results_path.is_file()]
        if not folders:
            raise BadUsage(f"no results are shipped for {method}; `cameraready run {method}` makes them")
    pages = []
    for folder in folders:
        try:
            pages.append(write_run(read_result(folder), out, alone=len(folders) == 1))
            print(pages[-1])
        except Exception as error:
            failing.tell(error, about=str(folder))
    if open_ and pages:
        page = pages[0] if len(folders) == 1 else pages[0].parent.parent / "index.html"
        webbrowser.open(page.absolute().as_uri())
    if len(pages) < len(folders):
        raise typer.Exit(failing.ERROR)
