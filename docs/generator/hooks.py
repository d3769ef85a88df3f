"""What mkdocs calls while it builds: adds the pages that are generated from cards, results and docstrings."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import commands  # noqa: E402
import finding  # noqa: E402
import methods  # noqa: E402
import styles  # noqa: E402

from cameraready.catalog import catalog  # noqa: E402

_MARKER = re.compile(r"<!-- generated: (\w+)(?: ([^>]*?))? -->")

#: What a marker in a hand-written page is replaced with: `<!-- generated: name arguments -->`.
_MARKED = {
    "problems": finding.problems,
    "example": finding.flagship,
    "verdict": methods.one_verdict,
    "figure": methods.one_figure,
    "ratios": methods.block_ratios,
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give every room and every method its place in the navigation."""
    cards = catalog()
    for section in config.nav or []:
        ((title, items),) = section.items()
        if title == "Find by problem":
            items.extend({finding.room_title(room): finding.room_path(room)} for room in finding.rooms(cards))
        if title == "Methods":
            items.extend({methods.display_name(card): methods.page_path(card)} for card in cards)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    cards = catalog()
    made: dict[str, str] = {
        "stylesheets/verdicts.css": styles.verdict_colours(),
        "methods/index.md": finding.methods_index(cards),
        "problems/index.md": finding.problems_index(cards),
        "reference/cli.md": commands.page(),
        "reference/changelog.md": (HERE.parent.parent / "CHANGELOG.md").read_text(encoding="utf-8"),
    }
    for room in finding.rooms(cards):
        made[finding.room_path(room)] = finding.room_page(room, [card for card in cards if card.room == room])
    for card in cards:
        made[methods.page_path(card)] = methods.page(card)
        if card.results_path.is_file():
            made[methods.report_path(card)] = methods.report(card)
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what a hand-written page asks for."""

    def fill(match: re.Match[str]) -> str:
        name, arguments = match[1], (match[2] or "").split()
        if name not in _MARKED:
            raise ValueError(f"{page.file.src_uri}: nothing generates {name!r}; known: {', '.join(_MARKED)}")
        return str(_MARKED[name](*arguments))

    return _MARKER.sub(fill, markdown)
