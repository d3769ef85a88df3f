"""`export`: hand the results of a run to another tool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cameraready.cli import failing
from cameraready.cli.browse import complete_selection
from cameraready.cli.failing import BadUsage
from cameraready.cli.report import TRUST_HELP

if TYPE_CHECKING:
    from cameraready.evidence.results import Result

EXPORT_FOLDER = Path("export")

TO_HELP = "csv, parquet, latex, pdf, mlflow or trackio."
OUT_HELP = "Folder for the files, by default export/; for latex also a .tex file."
URI_HELP = "mlflow: where to log; by default MLFLOW_TRACKING_URI, else a database in --out."
PUBLISH_HELP = "trackio: put the logbook on the Hugging Face Hub, where everybody can read it."
OPENREVIEW_HELP = "trackio: the paper's OpenReview id or URL, where the method's card has none."


def export_results(
    method: Annotated[
        str,
        typer.Argument(
            help="Slug, arXiv id or URL, a room, or 'all', for shipped results; or a folder that a run wrote.",
            metavar="METHOD|ROOM|all|FOLDER",
            autocompletion=complete_selection,
        ),
    ],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help=TO_HELP)],
    out: Annotated[Path | None, typer.Option(help=OUT_HELP)] = None,
    tracking_uri: Annotated[str | None, typer.Option(metavar="URI", help=URI_HELP)] = None,
    publish: Annotated[bool, typer.Option("--publish", help=PUBLISH_HELP)] = False,
    openreview: Annotated[str | None, typer.Option(metavar="ID", help=OPENREVIEW_HELP)] = None,
    trust: Annotated[bool, typer.Option("--trust", help=TRUST_HELP)] = False,
) -> None:
    """Write results as tables, LaTeX, PDF figures, MLflow runs or a Trackio logbook.

    Prints what was written, a path a line. Files named after the method are replaced; nothing else is touched, and
    nothing leaves this machine without --publish or a remote --tracking-uri.
    """
    to = to.lower()
    options = _options(to, tracking_uri=tracking_uri, publish=publish, openreview=openreview)
    folders = _folders(method)
    if len(folders) > 1 and (openreview or (out is not None and out.suffix == ".tex")):
        raise BadUsage(f"--openreview and a .tex file are for one method, and {method} stands for {len(folders)}")
    failures = 0
    for folder in folders:
        try:
            written = _export(_read(folder, trust), to, EXPORT_FOLDER if out is None else out, options)
        except Exception as error:
            if len(folders) == 1:
                raise
            failing.tell(error, about=str(folder))
            failures += 1
            continue
        print("\n".join(written.places))
        if written.hint:
            failing.say(written.hint)
    if failures:
        raise typer.Exit(failing.ERROR)


def _options(to: str, **given: Any) -> dict[str, Any]:
    """The options that were given, which must be `to`'s own."""
    from cameraready.evidence.export import FORMATS, OPTIONS

    if to not in FORMATS:
        raise BadUsage(f"--to must be one of {', '.join(FORMATS)}; got {to!r}")
    options = {name: value for name, value in given.items() if value not in (None, False)}
    for name in options:
        if name not in OPTIONS.get(to, ()):
            owner = next(other for other, names in OPTIONS.items() if name in names)
            raise BadUsage(f"--{name.replace('_', '-')} is for --to {owner}, not for {to}")
    return options


def _folders(method: str) -> Sequence[Path]:
    """Where the results of `method` lie."""
    from cameraready.catalog import RESULTS_FILE, UnknownMethod, select

    folder = Path(method)
    if (folder / RESULTS_FILE).is_file():
        return [folder]
    try:
        cards = select(method)
    except UnknownMethod as error:
        what = f"the folder {method} has no {RESULTS_FILE}" if folder.is_dir() else str(error)
        more = "" if folder.is_dir() else f"; nor is there a folder {method} with a {RESULTS_FILE}"
        raise BadUsage(f"{what}{more}") from error
    folders = [card.folder for card in cards if card.results_path.is_file()]
    if not folders:
        raise BadUsage(f"no results are shipped for {method}; `cameraready run {method}` makes them")
    return folders


def _read(folder: Path, trust: bool) -> Result:
    from cameraready.evidence.checking import UsageError
    from cameraready.evidence.report.saved import read_result

    try:
        return read_result(folder, trust=trust)
    except UsageError as error:
        raise BadUsage(str(error)) from error


def _export(result: Result, to: str, out: Path, options: dict[str, Any]) -> Any:
    from cameraready.evidence.checking import UsageError
    from cameraready.evidence.export import export

    try:
        return export(result, to, out, **options)
    except UsageError as error:
        raise BadUsage(str(error)) from error
