"""Gives the site the colours and the tables of the report, so that a verdict looks the same in both."""

from __future__ import annotations

import re
from pathlib import Path

import cameraready.evidence.report as report

_STYLE = Path(report.__file__).parent / "style.css"


def verdict_colours() -> str:
    """The report's colour variables, for the site's light and dark schemes."""
    css = _STYLE.read_text(encoding="utf-8")
    light, dark = (_declarations(block) for block in re.findall(r":root\s*{([^}]*)}", css)[:2])
    return (
        "/* Generated from the report's style. */\n"
        f":root, [data-md-color-scheme=default] {{ {light} }}\n"
        f"[data-md-color-scheme=slate] {{ {dark} }}\n"
    )


def _declarations(block: str) -> str:
    return " ".join(f"--{name}: {value};" for name, value in re.findall(r"--([\w-]+):\s*([^;]+);", block))
