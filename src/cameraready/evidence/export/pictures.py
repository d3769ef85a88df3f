"""The report's pictures as SVG that stands alone: colours, fonts, titles and legends are in the picture itself."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from cameraready.evidence.report.page import ClaimView, FigureView, claim_views, figure_views

if TYPE_CHECKING:
    from cameraready.evidence.report.curves import Panel, Style
    from cameraready.evidence.results import Result

FONT = "sans-serif"
SIZE, LINE = 11, 15
CHARACTER = 6.0  # mean width of a character of that size, on the generous side
PAD = 8


@dataclass(frozen=True)
class Picture:
    """One picture: a name for its file, what it shows, and its SVG."""

    name: str  # "claim-3a", "figure-1-digits"
    title: str
    svg: str
    label: str = ""  # of the claim, where it is a claim's


def pictures(result: Result) -> list[Picture]:
    """Every claim's chart and every panel of the paper's figures, in the order of the report."""
    return [*claim_pictures(result), *figure_pictures(result)]


def claim_pictures(result: Result) -> list[Picture]:
    """Charts of the claims that have one."""
    views = claim_views(result.study, result.claims_shown)
    return [
        Picture(slug(f"claim-{view.label}"), f"Claim {view.label}", _claim_svg(view), view.label)
        for view in views
        if view.chart
    ]


def figure_pictures(result: Result) -> list[Picture]:
    """Panels of the study's figures, each with its legend."""
    found = []
    for number, figure in enumerate(figure_views(result), start=1):
        for panel in figure.panels:
            if panel.chart:
                name = slug(f"figure-{number}-{panel.workload}")
                found.append(Picture(name, f"{figure.title}, {panel.workload}", _panel_svg(figure, panel)))
    return found


def slug(text: str) -> str:
    """`text` as part of a file's name, safe on every system."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:80].rstrip("-") or "unnamed"


# --- composing ------------------------------------------------------------------------------------------------------


def _claim_svg(view: ClaimView) -> str:
    """The chart, and under its axis what it measures and the claim's rule."""
    width, height = _size(view.chart)
    below = [(text, False) for text in _wrapped(view.measure, width)]
    below += [(text, False) for text in _wrapped(f"rule of claim {view.label}: {view.rule}", width)]
    parts = [_placed(view.chart, 0, 0), *_lines(below, PAD / 2, height + LINE - 4)]
    return _document(width, height + LINE * len(below) + PAD / 2, parts)


def _panel_svg(figure: FigureView, panel: Panel) -> str:
    """The workload and the y axis' title above the panel, the legend of its own arms under it."""
    width, height = _size(panel.chart)
    above = [(text, True) for text in _wrapped(panel.workload, width)]
    above += [(text, False) for text in _wrapped(f"{figure.y_title} (median and quartiles over blocks)", width)]
    top = LINE * len(above) + PAD
    mine = [(str(swatch), style) for swatch, style in figure.legend if style.arm in panel.medians]
    legend, legend_height = _legend(mine, width)
    parts = [*_lines(above, PAD / 2, LINE), _placed(panel.chart, 0, top)]
    parts.append(f'<g transform="translate({PAD},{top + height + PAD:g})">{legend}</g>')
    return _document(width, top + height + legend_height + 2 * PAD, parts)


def _legend(entries: Sequence[tuple[str, Style]], width: float) -> tuple[str, float]:
    """Swatches with the names of the arms, in as many columns as the width holds; and its height."""
    longest = max((len(style.arm) for _, style in entries), default=0)
    column = 40 + CHARACTER * min(longest, 48)
    columns = max(int((width - PAD) // column), 1)
    parts = []
    for index, (swatch, style) in enumerate(entries):
        row, place = divmod(index, columns)
        x, y = place * column, row * LINE
        weight = ' font-weight="bold"' if style.is_method else ""
        name = escape(style.arm if len(style.arm) <= 48 else f"{style.arm[:47]}…")
        parts.append(f'<g transform="translate({x + 16:g},{y + 6:g})">{_inner(swatch)}</g>')
        parts.append(f'<text x="{x + 37:g}" y="{y + 10:g}" fill="var(--ink)"{weight}>{name}</text>')
    return "".join(parts), LINE * -(-len(entries) // columns)


def _lines(lines: Sequence[tuple[str, bool]], x: float, y: float) -> Iterator[str]:
    for index, (text, strong) in enumerate(lines):
        look = 'fill="var(--ink)" font-weight="bold"' if strong else 'fill="var(--muted)"'
        yield f'<text x="{x:g}" y="{y + index * LINE:g}" {look}>{escape(text)}</text>'


def _wrapped(text: str, width: float) -> list[str]:
    return textwrap.wrap(text, max(int((width - PAD) / CHARACTER), 12), break_on_hyphens=False)


def _placed(svg: str, x: float, y: float) -> str:
    return f'<g transform="translate({x:g},{y:g})">{_inner(svg)}</g>'


def _inner(svg: str) -> str:
    """What is inside the outermost element, without title and description, which a PDF cannot show."""
    inside = re.sub(r"^\s*<svg[^>]*>|</svg>\s*$", "", svg)
    return re.sub(r"<(title|desc)\b[^>]*>.*?</\1>", "", inside, flags=re.DOTALL)


def _size(svg: str) -> tuple[float, float]:
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    if box is None:
        raise ValueError("the report drew a picture without a size")
    return float(box[1]), float(box[2])


def _document(width: float, height: float, parts: Sequence[str]) -> str:
    body = _coloured("".join(parts))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="{FONT}" font-size="{SIZE}">{body}</svg>'
    )


def _coloured(svg: str) -> str:
    """`svg` with the style sheet's names replaced by its colours for light ground; cards are white on paper."""
    return re.sub(r"var\((--[\w-]+)\)", lambda match: light_colours()[match[1]], svg)


@functools.cache
def light_colours() -> dict[str, str]:
    """The colours of the report's light theme, by custom property."""
    style = files("cameraready.evidence.report").joinpath("style.css").read_text(encoding="utf-8")
    root = style[style.index(":root") : style.index("}")]  # the first rule; later ones are for dark ground and print
    return dict(re.findall(r"(--[\w-]+):\s*(#[0-9a-fA-F]{3,8})\s*;", root))
