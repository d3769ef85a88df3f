"""Templates of the generated pages, and the words that they share with the report."""

from __future__ import annotations

import functools
import html
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from cameraready.evidence.report import wording

TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **values: Any) -> str:
    """A page from a template. Whatever comes from a card or a result is escaped: it is text, not Markdown."""
    return _environment().get_template(template).render(**values)


def number(x: float | None) -> str:
    return wording.signed(wording.number(x))


def code(name: str) -> Markup:
    return Markup(f"<code>{html.escape(name)}</code>")


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals.update(w=wording)
    environment.filters.update(number=number, code=code, signed=wording.signed)
    return environment
