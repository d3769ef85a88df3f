"""The figures of a study, redrawn from a run: the arms' curves, a panel a workload, and the numbers in them."""

from __future__ import annotations

import difflib
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import altair as alt
import polars as pl

from cameraready.evidence.report import drawing
from cameraready.evidence.rules import significant
from cameraready.evidence.study import Figure, Study

PANEL_WIDTH, PANEL_HEIGHT = 320, 220
COLUMNS_LISTED = 12  # of the numbers under a figure
POINTS_DRAWN = 10  # on a line, so that a long curve stays a curve
COLOURS = 8  # as many as the style sheet has, --arm-0 being the method's
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right", "triangle-left")
DASHES: tuple[list[int], ...] = ([1, 0], [6, 3], [2, 2])


@dataclass(frozen=True)
class Style:
    """How one arm is drawn, in every figure of a page."""

    arm: str
    colour: str  # a CSS variable
    shape: str
    dash: list[int]
    is_method: bool


def arm_styles(study: Study, arms: Sequence[str]) -> list[Style]:
    """One style an arm, the method first; colours repeat with another dash."""
    styles = [Style(study.method, "var(--arm-0)", SHAPES[0], DASHES[0], True)] if study.method in arms else []
    for index, arm in enumerate(arm for arm in arms if arm != study.method):
        turn, slot = divmod(index, COLOURS - 1)
        styles.append(Style(arm, f"var(--arm-{slot + 1})", SHAPES[slot + 1], DASHES[turn % len(DASHES)], False))
    return styles


@dataclass(frozen=True)
class Panel:
    """One workload of a figure: its chart, and the numbers in it."""

    workload: str
    chart: str
    xs: list[Any]  # those listed; the chart shows all of them
    n_xs: int
    medians: dict[str, list[float | None]]  # by arm, one entry an x
    blocks: int
    undrawn: int  # points that a logarithmic axis cannot show


def figure_panels(
    figure: Figure, study: Study, rows: pl.DataFrame, styles: Sequence[Style], number: int
) -> list[Panel]:
    """One panel a workload: median of y over blocks against x, with the band between the quartiles.

    Raises
    ------
    ValueError
        If the rows lack a column that the figure names.
    """
    for column in (figure.x, figure.y, study.arms, study.block, *([figure.x_mean_by] if figure.x_mean_by else [])):
        if column not in rows.columns:
            near = difflib.get_close_matches(column, rows.columns, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "no row of this run has it"
            raise ValueError(f"figure {figure.title!r} needs column {column!r}; {hint}")
    table = rows if figure.where is None else rows.filter(figure.where)
    table = of_workloads(table, figure.workloads, study)
    table = table.filter(
        pl.col(figure.y).is_not_null() & pl.col(figure.x).is_not_null() & pl.col(study.arms).is_not_null()
    )
    if figure.x_mean_by:
        table = table.with_columns(pl.col(figure.x).mean().over("workload", figure.x_mean_by))
    panels = []
    for index, workload in enumerate(table["workload"].unique(maintain_order=True).to_list()):
        curves = _curves(table.filter(pl.col("workload") == workload), figure, study)
        panels.append(_panel(figure, workload, curves, styles, f"figure-{number}-{index}"))
    return panels


def of_workloads(table: pl.DataFrame, workloads: Sequence[str] | None, study: Study) -> pl.DataFrame:
    """Rows of the workloads that a figure or gallery is about; ``"own"`` stands for all that the study does not ship, None for every one."""
    if workloads is None:
        return table
    wanted = set(workloads)
    if "own" in wanted:
        wanted |= set(table["workload"]) - set(itertools.chain.from_iterable(study.workloads.values()))
    return table.filter(pl.col("workload").is_in(sorted(wanted)))


def _curves(table: pl.DataFrame, figure: Figure, study: Study) -> pl.DataFrame:
    """Median and quartiles over blocks of each arm at each x; several rows of a block are averaged first."""
    cells = table.select(
        arm=pl.col(study.arms).cast(pl.String),
        x=pl.col(figure.x),
        block=pl.col(study.block).cast(pl.String),
        y=pl.col(figure.y).cast(pl.Float64),
    )
    cells = (
        cells.filter(pl.col("y").is_not_nan())
        .group_by("arm", "x", "block", maintain_order=True)
        .agg(pl.col("y").mean())
    )
    return (
        cells.group_by("arm", "x", maintain_order=True)
        .agg(
            median=pl.col("y").median(),
            lower=pl.col("y").quantile(0.25, "linear"),
            upper=pl.col("y").quantile(0.75, "linear"),
            blocks=pl.len(),
        )
        .sort("x", maintain_order=True)
    )


def _panel(figure: Figure, workload: str, curves: pl.DataFrame, styles: Sequence[Style], name: str) -> Panel:
    is_number = curves.schema["x"].is_numeric()
    xs = curves["x"].unique(maintain_order=True).to_list()
    log_x = figure.log_x and is_number and all(x > 0 for x in xs)
    drawn = curves.filter(pl.col("median").is_finite())
    if figure.log_y:
        drawn = drawn.filter(pl.col("median") > 0)
    # A band that the axis cannot show to its end is cut at the lowest or the highest median.
    low_end = pl.col("lower").is_finite() & (pl.col("lower") > 0 if figure.log_y else pl.lit(True))
    drawn = drawn.with_columns(
        lower=pl.when(low_end).then(pl.col("lower")).otherwise(pl.col("median").min()),
        upper=pl.when(pl.col("upper").is_finite()).then(pl.col("upper")).otherwise(pl.col("median").max()),
    )
    chart = ""
    if drawn.height:
        shown = [style for style in reversed(styles) if style.arm in set(drawn["arm"].to_list())]
        chart = drawing.draw(
            _lines(figure, drawn, shown, xs=xs, log_x=log_x, is_number=is_number),
            {"curves": _points(drawn, shown)},
            name=name,
            title=f"{figure.title}, {workload}",
            description=_in_words(figure, drawn, styles),
        )
    listed = _spread(xs, COLUMNS_LISTED)
    medians = {}
    for style in styles:
        mine = dict(curves.filter(pl.col("arm") == style.arm).select("x", "median").iter_rows())
        if mine:
            medians[style.arm] = [mine.get(x) for x in listed]
    blocks = max(curves["blocks"].to_list(), default=0)
    return Panel(workload, chart, listed, len(xs), medians, blocks, curves.height - drawn.height)


def _points(drawn: pl.DataFrame, shown: Sequence[Style]) -> list[dict[str, Any]]:
    """The curves' points, arm by arm in the order in which they are drawn."""
    rows = []
    for style in shown:
        mine = drawn.filter(pl.col("arm") == style.arm).to_dicts()
        marked = set(_spread([row["x"] for row in mine], POINTS_DRAWN))
        rows += [{**row, "marked": row["x"] in marked} for row in mine]
    return rows


def _lines(
    figure: Figure, drawn: pl.DataFrame, shown: Sequence[Style], *, xs: Sequence[Any], log_x: bool, is_number: bool
) -> Any:
    """The chart of a panel: bands under lines under points, the method on top of all."""

    def by_arm(channel: Any, *looks: Any) -> Any:
        scale = alt.Scale(type="ordinal", domain=[style.arm for style in shown], range=list(looks))
        return channel("arm:N", scale=scale, legend=None)

    y = _y_channel(figure, drawn)
    base = alt.Chart(drawing.data("curves")).encode(
        x=_x_channel(figure, xs, log_x, is_number), color=by_arm(alt.Color, *(style.colour for style in shown))
    )
    bands = base.mark_area().encode(
        y=y("lower:Q"),
        y2=alt.Y2("upper:Q"),
        opacity=by_arm(alt.Opacity, *(0.2 if style.is_method else 0.09 for style in shown)),
    )
    lines = base.mark_line().encode(
        y=y("median:Q"),
        strokeWidth=by_arm(alt.StrokeWidth, *(2.8 if style.is_method else 1.5 for style in shown)),
        strokeDash=by_arm(alt.StrokeDash, *(style.dash for style in shown)),
    )
    points = base.transform_filter("datum.marked").mark_point(filled=True, opacity=1)
    points = points.encode(
        y=y("median:Q"),
        shape=by_arm(alt.Shape, *(style.shape for style in shown)),
        size=by_arm(alt.Size, *(46 if style.is_method else 28 for style in shown)),
    )
    return alt.layer(bands, lines, points).properties(width=PANEL_WIDTH, height=PANEL_HEIGHT)


def _x_channel(figure: Figure, xs: Sequence[Any], log_x: bool, is_number: bool) -> alt.X:
    title = figure.x_title or figure.x
    if not is_number:
        return alt.X("x:O", sort=None, axis=alt.Axis(title=title, labelOverlap=True, labelAngle=0))
    scale = alt.Scale(type="log" if log_x else "linear", nice=False, zero=False, padding=8)
    placed: dict[str, Any] = {"values": list(xs)} if len(xs) <= 7 else {"tickCount": 5}
    axis = alt.Axis(title=title, labelExpr=drawing.LABEL, labelOverlap=True, grid=False, **placed)
    return alt.X("x:Q", scale=scale, axis=axis)


def _y_channel(figure: Figure, drawn: pl.DataFrame) -> Callable[[str], alt.Y]:
    if not figure.log_y:
        axis = alt.Axis(title=None, labelExpr=drawing.LABEL, tickCount=5, grid=True)
        return functools.partial(alt.Y, scale=alt.Scale(zero=False, nice=True), axis=axis)
    low, high = min(drawn["lower"].to_list()), max(drawn["upper"].to_list())
    room = max(high / low, 1.3) ** 0.04
    domain = (low / room, high * room)
    axis = alt.Axis(title=None, labelExpr=drawing.LABEL, values=drawing.log_ticks(domain), grid=True)
    return functools.partial(alt.Y, scale=alt.Scale(type="log", domain=list(domain), nice=False), axis=axis)


def _spread(xs: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of `xs`, evenly spread, the first and the last among them."""
    if len(xs) <= most:
        return list(xs)
    return [xs[round(index * (len(xs) - 1) / (most - 1))] for index in range(most)]


def _in_words(figure: Figure, drawn: pl.DataFrame, styles: Sequence[Style]) -> str:
    last = drawn["x"].to_list()[-1]
    at_end = dict(drawn.filter(pl.col("x") == last).select("arm", "median").iter_rows())
    listed = ", ".join(f"{s.arm} {significant(at_end[s.arm])}" for s in styles if s.arm in at_end)
    at = f"{last:,}" if isinstance(last, int) else str(last)
    return f"Median of {figure.y_title or figure.y} by {figure.x_title or figure.x}. At {at}: {listed}."


#: The shapes of the points as the chart library draws them, for legends: paths around the origin.
_SHAPE_PATHS = {
    "circle": "M4 0A4 4 0 1 1-4 0A4 4 0 1 1 4 0",
    "square": "M-3.5-3.5h7v7h-7Z",
    "triangle-up": "M0-4.3L4.3 3.4H-4.3Z",
    "triangle-down": "M0 4.3L4.3-3.4H-4.3Z",
    "triangle-right": "M4.3 0L-3.4 4.3V-4.3Z",
    "triangle-left": "M-4.3 0L3.4 4.3V-4.3Z",
    "diamond": "M0-4.8L3.6 0L0 4.8L-3.6 0Z",
    "cross": "M-4.5-1.5h3v-3h3v3h3v3h-3v3h-3v-3h-3Z",
}


def in_curves_order(styles: Sequence[Style], panels: Sequence[Panel]) -> list[Style]:
    """The arms as their curves end, from the top of the panels to the bottom; by mean rank over several panels."""
    ranks: dict[str, list[float]] = {}
    for panel in panels:
        ends = {arm: end for arm, values in panel.medians.items() if (end := _last_number(values)) is not None}
        for rank, arm in enumerate(sorted(ends, key=lambda arm: -ends[arm])):
            ranks.setdefault(arm, []).append(rank / max(len(ends) - 1, 1))
    shown = [style for style in styles if any(style.arm in panel.medians for panel in panels)]
    return sorted(shown, key=lambda s: fmean(ranks[s.arm]) if s.arm in ranks else math.inf)


def _last_number(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None and math.isfinite(value)), None)


def swatch(style: Style) -> str:
    """A short piece of an arm's line with its point, as SVG for a legend."""
    width = "2.8" if style.is_method else "1.5"
    dash = f' stroke-dasharray="{style.dash[0]} {style.dash[1]}"' if style.dash[1] else ""
    return (
        f'<svg class="swatch" viewBox="-16 -6 32 12" aria-hidden="true"><path d="M-15 0H15" stroke="{style.colour}" '
        f'stroke-width="{width}"{dash}/><path d="{_SHAPE_PATHS[style.shape]}" fill="{style.colour}"/></svg>'
    )
