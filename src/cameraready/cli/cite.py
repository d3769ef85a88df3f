"""`cite`: how to cite the papers of methods, and this software."""

from __future__ import annotations

from typing import Annotated

import typer

from cameraready.cli.browse import complete_selection
from cameraready.cli.failing import BadUsage


def cite_methods(
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            help="Slugs, arXiv ids or URLs, rooms, or 'all'; without any, this software alone.",
            metavar="[METHOD|ROOM|all]...",
            autocompletion=complete_selection,
        ),
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="bibtex.")] = "bibtex",
    as_json: Annotated[bool, typer.Option("--json", help="Print CSL-JSON.")] = False,
) -> None:
    """Print BibTeX of the papers, and of this software."""
    from cameraready import citation
    from cameraready.catalog import UnknownMethod, select

    if format_.lower() not in citation.FORMATS:
        raise BadUsage(f"--format must be {' or '.join(citation.FORMATS)} (or --json for CSL-JSON), got {format_!r}")
    cards = {}
    for name in methods or []:
        try:
            cards |= {card.slug: card for card in select(name)}
        except UnknownMethod as error:
            raise BadUsage(str(error)) from error
    if as_json:
        from cameraready.cli.terminal import print_json

        print_json(citation.csl(list(cards.values())))
    else:
        print(citation.bibtex(list(cards.values())), end="")
