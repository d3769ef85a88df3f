"""The picture of a claim: estimates and intervals against the rule. Altair draws, the page colours."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import altair as alt

from cameraready.evidence.outcomes import Verdict
from cameraready.evidence.report import drawing, wording
from cameraready.evidence.rules import MIN_BLOCKS, Above, Always, Below, Rule, Within
from cameraready.evidence.study import Claim

Channel = Callable[[str], alt.X]  # the x axis of a picture, for the column that it shows

WIDTH, ROW_HEIGHT = 340, 40
FONT_SIZE = 12
VERDICT_SHAPES = {
    "holds": "circle",
    "fails": "square",
    "not seen": "triangle-up",
    "inconclusive": "diamond",
    "untested": "stroke",
}


def claim_chart(claim: Claim, verdicts: Sequence[Verdict], *, prefix: str = "") -> str:
    """Estimate and interval of each workload against the rule, as SVG for the page; empty if nothing was measured.

    `prefix` goes before every id, for pages on which the same claim is shown twice.
    """
    shown = [
        v if v.blocks >= MIN_BLOCKS else replace(v, low=None, high=None)
        for v in verdicts
        if v.estimate is not None and math.isfinite(v.estimate)
    ]
    if not shown:
        return ""
    limits = rule_limits(claim.rule)
    census = isinstance(claim.rule, Always)
    domain, is_log = _domain(shown, limits, claim.measure.log_scale, census)
    x = _axis(domain, is_log, limits, whole=census)
    kept = _kept(claim.rule, limits, domain)
    rows = {
        "kept": [{"x": kept[0], "x2": kept[1]}] if kept else [],
        "limits": [{"x": limit} for limit in limits],
        "estimates": _estimates(shown, domain),
    }
    chart = alt.layer(*_layers(x)).properties(width=WIDTH, height=ROW_HEIGHT * len(shown))
    return drawing.draw(
        chart,
        rows,
        name=f"{prefix}claim-{claim.label}-chart",
        title=f"Claim {claim.label}: {claim.measure.describe()}, by workload",
        description="; ".join(f"{wording.place(v.workload)} {wording.estimate(v)}, {wording.word(v)}" for v in shown)
        + f". The rule: {claim.rule.describe()}.",
    )


def rule_limits(rule: Rule) -> list[float]:
    """The values at which a rule turns from kept to broken."""
    if isinstance(rule, Below | Above):
        return [rule.limit]
    if isinstance(rule, Within):
        return [rule.lo, rule.hi]
    return [0.0] if isinstance(rule, Always) else []


def _domain(
    shown: Sequence[Verdict], limits: Sequence[float], log_scale: bool, census: bool
) -> tuple[tuple[float, float], bool]:
    """What the x axis shows: all estimates and limits, and the intervals as far as they leave the rest readable."""
    centres = [v.estimate for v in shown if v.estimate is not None] + list(limits)
    if census:
        return (0.0, max(1.0, *centres) * 1.05), False
    ends = [end for v in shown for end in (v.low, v.high) if end is not None and math.isfinite(end)]
    is_log = log_scale and all(value > 0 for value in centres)
    if is_log:
        centres.append(1.0)
        ends = [end for end in ends if end > 0]
    scale = math.log10 if is_log else float
    points, tips = [scale(c) for c in centres], [scale(e) for e in ends]
    low, high = min(points), max(points)
    reach = max(3 * (high - low), 1.0 if is_log else 2 * max(abs(low), abs(high))) or math.inf
    low = min([low, *(max(tip, low - reach) for tip in tips)])
    high = max([high, *(min(tip, high + reach) for tip in tips)])
    margin = 0.06 * (high - low) or (0.3 if is_log else max(abs(high), 1.0) * 0.1)
    low, high = low - margin, high + margin
    return ((10**low, 10**high) if is_log else (low, high)), is_log


def _axis(domain: tuple[float, float], is_log: bool, limits: Sequence[float], whole: bool) -> Channel:
    """Round values and the rule's limits, which are what the eye compares with."""
    ticks = drawing.log_ticks(domain) if is_log else drawing.even_ticks(domain, smallest=1 if whole else 0)
    shown = drawing.ticks_with(limits, ticks, domain, is_log)
    axis = alt.Axis(title=None, labelExpr=drawing.LABEL, labelOverlap=True, grid=True, ticks=False, values=shown)
    scale = alt.Scale(type="log" if is_log else "linear", domain=list(domain), nice=False)
    return functools.partial(alt.X, scale=scale, axis=axis)


def _kept(rule: Rule, limits: Sequence[float], domain: tuple[float, float]) -> tuple[float, float] | None:
    """Where the rule is kept, as far as the axis shows it."""
    if not limits:
        return None
    ends = {Below: (domain[0], limits[0]), Above: (limits[0], domain[1])}.get(type(rule), (limits[0], limits[-1]))
    return ends if ends[0] < ends[1] else None


def _estimates(shown: Sequence[Verdict], domain: tuple[float, float]) -> list[dict[str, Any]]:
    """A row a verdict, from the top; intervals cut at the ends of the axis."""
    rows = []
    for index, verdict in enumerate(shown):
        low, high = (verdict.estimate if end is None or math.isnan(end) else end for end in (verdict.low, verdict.high))
        rows.append(
            {
                "row": index,
                "x": verdict.estimate,
                "low": max(low, domain[0]) if low is not None else None,
                "high": min(high, domain[1]) if high is not None else None,
                "colour": f"var(--{wording.LOOKS[verdict.verdict].tone})",
                "shape": VERDICT_SHAPES[verdict.verdict],
                "name": _shortened(wording.place(verdict.workload), 46),
            }
        )
    return rows


def _layers(x: Channel) -> list[alt.Chart]:
    """From the ground up: where the rule is kept, its limits, then the names, bars and points of the estimates."""
    area = alt.Chart(drawing.data("kept")).mark_rect(color="var(--good)", opacity=0.13)
    lines = alt.Chart(drawing.data("limits")).mark_rule(color="var(--ink)", strokeDash=[4, 3], strokeWidth=1.2)
    base = alt.Chart(drawing.data("estimates")).encode(
        y=alt.Y("row:O", axis=None, scale=alt.Scale(paddingInner=0, paddingOuter=0)),
        color=alt.Color("colour:N", scale=None),
    )
    # The names stand on plain ground, so that neither grid nor threshold runs through them.
    strips = base.mark_rect(height=18, yOffset=-11).encode(
        x=alt.XValue(0), x2=alt.X2Value(WIDTH), color=alt.ColorValue("var(--card)")
    )
    names = base.mark_text(align="left", baseline="middle", dx=4, dy=-11, fontSize=FONT_SIZE).encode(
        x=alt.XValue(0), text=alt.Text("name:N"), color=alt.ColorValue("var(--ink)")
    )
    bars = base.mark_rule(strokeWidth=3, yOffset=7, strokeCap="round").encode(x=x("low:Q"), x2=alt.X2("high:Q"))
    dots = base.mark_point(size=85, filled=True, opacity=1, yOffset=7).encode(
        x=x("x:Q"), shape=alt.Shape("shape:N", scale=None)
    )
    return [area.encode(x=x("x:Q"), x2=alt.X2("x2:Q")), lines.encode(x=x("x:Q")), strips, names, bars, dots]


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length // 2 - 1]}…{text[-(length // 2) :]}"
