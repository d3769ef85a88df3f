"""What the pictures of a report share: data, ticks, labels, and the way from a chart to SVG in the page."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import vl_convert

from cameraready.evidence.report.drawing import svg

#: 0.001, 2k, 1e-9: short labels that need no more room at any magnitude.
LABEL = (
    "datum.value == 0 ? '0' : abs(datum.value) >= 1000 ? format(datum.value, '~s') : "
    "abs(datum.value) < 0.001 ? format(datum.value, '~e') : format(datum.value, '~g')"
)
FONT_SIZE = 12
FEWEST_TICKS = 4
LABEL_ROOM = 0.1  # of an axis, between a label and the next

CONFIG = {
    "aria": False,
    "font": "sans-serif",
    "padding": 4,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)",
        "titleColor": "var(--muted)",
        "titleFontWeight": "normal",
        "labelFontSize": FONT_SIZE,
        "titleFontSize": FONT_SIZE,
        "gridColor": "var(--line)",
        "domainColor": "var(--line)",
        "tickColor": "var(--line)",
    },
}

Rows = Sequence[Mapping[str, Any]]


def data(name: str) -> alt.NamedData:
    """The data that `draw` gets under this name: altair copies what is put into a chart with every layer."""
    return alt.NamedData(name=name)


def log_ticks(domain: tuple[float, float]) -> list[float]:
    """Round values for a logarithmic axis: decades, parts of them where these are too few, or equal steps."""
    low, high = (math.log10(end) for end in domain)
    decades = range(math.floor(low), math.ceil(high) + 1)
    step = max(math.ceil(len(decades) / 6), 1)
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        ticks = [factor * 10.0**power for power in decades if power % step == 0 for factor in factors]
        ticks = [tick for tick in ticks if domain[0] <= tick <= domain[1]]
        if len(ticks) >= FEWEST_TICKS or step > 1:
            return ticks
    return even_ticks(domain)


def ticks_with(
    limits: Sequence[float], ticks: Sequence[float], domain: tuple[float, float], is_log: bool
) -> list[float]:
    """`ticks`, and the limits of a rule among them: those too near to a limit to be read beside it give way."""
    scale = math.log if is_log else float
    low, high = (scale(end) for end in domain)
    kept = [float(f"{limit:.3g}") for limit in limits]
    kept = [limit for limit in kept if low <= (scale(limit) if limit > 0 or not is_log else -math.inf) <= high]
    free = [t for t in ticks if all(abs(scale(t) - scale(limit)) > LABEL_ROOM * (high - low) for limit in kept)]
    return sorted({*kept, *free})


def even_ticks(domain: tuple[float, float], smallest: float = 0) -> list[float]:
    """About five round values at equal distances, no closer than `smallest`."""
    rough = (domain[1] - domain[0]) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = max(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough), smallest)
    first, last = math.ceil(domain[0] / step - 1e-9), math.floor(domain[1] / step + 1e-9)
    return [float(f"{index * step:.10g}") for index in range(first, last + 1)]


def draw(chart: Any, rows: Mapping[str, Rows], *, name: str, title: str, description: str) -> str:
    """An altair chart as SVG for the page, with `rows` as its data by name; see `svg.for_page`."""
    # Its parts were checked against altair's schema when they were made; once more takes longer than the drawing. The
    # configuration is added here because altair copies the whole chart for each part of one.
    spec = chart.to_dict(validate=False)
    spec |= {"config": CONFIG, "datasets": {key: list(table) for key, table in rows.items()}}
    drawn = str(vl_convert.vegalite_to_svg(_drawable(spec)))
    return svg.for_page(drawn, name=name, title=drawable(title), description=drawable(description))


#: What XML 1.0 cannot hold: control characters, halves of surrogate pairs, two that are none. The chart library ends the
#: whole process at the sight of one.
_UNDRAWABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def drawable(text: str) -> str:
    """`text` with a replacement character for each that a picture or a page cannot hold."""
    return _UNDRAWABLE.sub("\ufffd", text)


def _drawable(part: Any) -> Any:
    if isinstance(part, str):
        return drawable(part)
    if isinstance(part, Mapping):
        return {key: _drawable(value) for key, value in part.items()}
    return [_drawable(item) for item in part] if isinstance(part, list | tuple) else part
