"""The reference of the command line, made from the commands' own help."""

from __future__ import annotations

import click
import pages
import typer.main

from cameraready.cli.app import app


def page() -> str:
    """One section a command: what it does, its arguments and options."""
    group = typer.main.get_command(app)
    context = click.Context(group, info_name="cameraready")  # type: ignore[arg-type]
    listed = []
    for name in group.list_commands(context):  # type: ignore[attr-defined]
        command = group.get_command(context, name)  # type: ignore[attr-defined]
        inner = click.Context(command, info_name=name, parent=context, terminal_width=84, max_content_width=84)
        listed.append((name, (command.help or "").partition("\n")[0], command.get_help(inner)))
    return pages.render("commands.md.j2", commands=listed)
