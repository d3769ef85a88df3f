"""`report`: write the pages of finished runs again, and the index over all of them, without running anything."""

from __future__ import annotations

import shutil
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cameraready.cli import failing
from cameraready.cli.browse import complete_selection
from cameraready.cli.failing import BadUsage
from cameraready.cli.run import REPORT_FOLDER, write_index_of

if TYPE_CHECKING:
    from cameraready.evidence.results import Result


TRUST_HELP = "Import the study that a FOLDER's results name, though it is not in the catalogue: this runs its code."


def write_reports(
    method: Annotated[
        str,
        typer.Argument(
            help="Slug, arXiv id or URL, a room, or 'all', for shipped results; or a folder with results.json.",
            metavar="METHOD|ROOM|all|FOLDER",
            autocompletion=complete_selection,
        ),
    ] = "all",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the page; by default one under report/, for a FOLDER that folder itself."),
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help=TRUST_HELP)] = False,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open the report in the browser.")] = False,
) -> None:
    """Write the page of a finished run, without running; without a name, all of them and an index.

    Of the results that a method ships, or of a folder that a run wrote. The index also leads to the runs whose pages
    are under report/, and lists what the ledger remembers.
    """
    from cameraready.catalog import RESULTS_FILE

    if (Path(method) / RESULTS_FILE).is_file():
        folders, root = [Path(method)], None
    else:
        folders, root = _shipped(method), REPORT_FOLDER if out is None else out
    alone = len(folders) == 1 and method != "all"
    pages = _write_pages(folders, out, root, trust=trust)
    shown = pages[0] if alone and pages else None
    if root is not None and not (alone and out is not None):
        index = write_index_of(root)
        shown = shown or index
        if not alone:
            print(index)
    if open_ and shown is not None:
        webbrowser.open(shown.absolute().as_uri())
    if len(pages) < len(folders):
        raise typer.Exit(failing.ERROR)


def _shipped(name: str) -> list[Path]:
    """Folders of the methods that `name` stands for and that ship results."""
    from cameraready.catalog import RESULTS_FILE, UnknownMethod, select

    try:
        cards = select(name)
    except UnknownMethod as error:
        raise BadUsage(f"{error}; nor is there a folder {name} with a {RESULTS_FILE}") from error
    folders = [card.folder for card in cards if card.results_path.is_file()]
    if not folders and name != "all":
        raise BadUsage(f"no results are shipped for {name}; `cameraready run {name}` makes them")
    return folders


def _write_pages(folders: Sequence[Path], out: Path | None, root: Path | None, *, trust: bool) -> list[Path]:
    """Write and name the pages; an error in one is told, and the others are still written."""
    from cameraready.evidence.report.saved import read_result

    pages = []
    for folder in folders:
        try:
            result = read_result(folder, trust=trust)
            place = folder if root is None else _place_of_shipped(result, root)
            pages.append(_write_page(result, folder, place if out is None or len(folders) > 1 else out))
            print(pages[-1])
        except Exception as error:
            failing.tell(error, about=str(folder))
    return pages


def _place_of_shipped(result: Result, root: Path) -> Path:
    """Where the page of shipped results goes: apart from the user's own run of the same method."""
    from cameraready.evidence.report import page_name
    from cameraready.evidence.report.index import SHIPPED

    return root / SHIPPED / page_name(result)


def _write_page(result: Result, folder: Path, place: Path) -> Path:
    """The page, and beside it the results as they lie in `folder`."""
    from cameraready.evidence.results import RESULTS_JSON, RESULTS_PARQUET

    page = result.report(place)
    if place.absolute() != folder.absolute():
        for name in (RESULTS_JSON, RESULTS_PARQUET):
            shutil.copyfile(folder / name, place / name)
    return page
