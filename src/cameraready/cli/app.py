"""The command `cameraready` and its sub-commands."""

from __future__ import annotations

from typing import Annotated

import typer

from cameraready.cli import browse, cite, doctor, export, failing, report, run
from cameraready.cli.plain import PlainCommand, PlainGroup

# Plain help: rich's panels would double the time that --help takes.
app = typer.Typer(
    name="cameraready",
    cls=PlainGroup,
    help="Methods of ICML 2026, each ready to import, each put to the test with one command.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import cameraready

        typer.echo(f"cameraready {cameraready.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    failing.show_tracebacks(debug)


app.command("list", cls=PlainCommand)(failing.in_one_sentence(browse.list_methods))
app.command("find", cls=PlainCommand)(failing.in_one_sentence(browse.find_methods))
app.command("show", cls=PlainCommand)(failing.in_one_sentence(browse.show_method))
app.command("run", cls=PlainCommand)(failing.in_one_sentence(run.run_methods))
app.command("report", cls=PlainCommand)(failing.in_one_sentence(report.write_reports))
app.command("export", cls=PlainCommand)(failing.in_one_sentence(export.export_results))
app.command("cite", cls=PlainCommand)(failing.in_one_sentence(cite.cite_methods))
app.command("doctor", cls=PlainCommand)(failing.in_one_sentence(doctor.diagnose))
