"""What the pictures of a report share: data, ticks, labels, and the way from a chart to SVG in the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import vl_convert

from cameraready.evidence.report import svg

#: 0.001, 2k, 1e-9: short labels that need no more room at any magnitude.
LABEL = (
    "datum.value == 0 ? '0' : abs(datum.value) >= 1000 ? format(datum.value, '~s') : "
    "abs(datum.value) < 0.001 ? format(datum.value, '~e') : format(datum.value, '~g')"
)


def values(rows: Sequence[Mapping[str, Any]]) -> alt.Data:
    """`rows` as the data of a chart."""
    return alt.Data(values=[dict(row) for row in rows])


def log_ticks(domain: tuple[float, float]) -> list[float]:
    """Round values for a logarithmic axis: decades, or parts of them where there are few."""
    low, high = (math.log10(end) for end in domain)
    if high - low < 0.6:
        return even_ticks(domain)
    decades = range(math.floor(low), math.ceil(high) + 1)
    step = max(math.ceil(len(decades) / 6), 1)
    factors = (1, 2, 5) if high - low < 1.8 else (1, 3) if high - low < 2.5 else (1,)
    ticks = [factor * 10.0**power for power in decades if power % step == 0 for factor in factors]
    return [tick for tick in ticks if domain[0] <= tick <= domain[1]]


def even_ticks(domain: tuple[float, float], smallest: float = 0) -> list[float]:
    """About five round values at equal distances, no closer than `smallest`."""
    rough = (domain[1] - domain[0]) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = max(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough), smallest)
    first, last = math.ceil(domain[0] / step - 1e-9), math.floor(domain[1] / step + 1e-9)
    return [float(f"{index * step:.10g}") for index in range(first, last + 1)]


def draw(chart: Any, *, name: str, title: str, description: str) -> str:
    """An altair chart as SVG for the page; see `svg.for_page`."""
    themed = chart.configure(aria=False, font="sans-serif", padding=4).configure_view(stroke=None)
    themed = themed.configure_axis(
        labelColor="var(--muted)",
        titleColor="var(--muted)",
        titleFontWeight="normal",
        labelFontSize=11,
        titleFontSize=11,
        gridColor="var(--line)",
        domainColor="var(--line)",
        tickColor="var(--line)",
    )
    # Its parts were checked against altair's schema when they were made; once more takes longer than the drawing.
    drawn = str(vl_convert.vegalite_to_svg(themed.to_dict(validate=False)))
    return svg.for_page(drawn, name=name, title=title, description=description)
