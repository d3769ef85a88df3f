"""Lays a result out as HTML: the page of a run, the fragment for a notebook, the index over runs."""

from __future__ import annotations

import datetime
import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import polars as pl
from markupsafe import Markup

from cameraready.evidence.outcomes import Verdict
from cameraready.evidence.report import charts, tables, wording
from cameraready.evidence.report.curves import Panel, Style, arm_styles, figure_panels, swatch
from cameraready.evidence.report.saved import verdicts_of
from cameraready.evidence.study import Claim, Study, Untested

if TYPE_CHECKING:
    from cameraready.evidence.results import Result

HERE = Path(__file__).parent
FAILURES_SHOWN = 20


@dataclass(frozen=True)
class ClaimView:
    """One claim of a page: its sentence, its verdicts, its picture."""

    label: str
    sentence: str
    paper: str
    scope: str
    source: str
    measure: str
    rule: str
    changed: str
    tested: bool
    verdicts: list[Verdict]
    chart: Markup


@dataclass(frozen=True)
class FigureView:
    """One figure of a page: a legend and a panel a workload."""

    title: str
    source: str
    x_title: str
    y_title: str
    panels: list[Panel]
    legend: list[tuple[Markup, Style]]
    left_out: str = ""  # why there is nothing to draw


def render_page(result: Result) -> str:
    """The page of a run, one HTML document."""
    return _template("page.html.j2").render(
        result=result,
        claims=claim_views(result.study, result.claims_shown),
        figures=figure_views(result),
        cost=tables.cost(result.study, result.rows),
        failures=tables.failure_groups(result.failures),
        failures_shown=FAILURES_SHOWN,
        status_words=tables.STATUS_WORDS,
        style=Markup((HERE / "style.css").read_text(encoding="utf-8")),
        date=_date(result.started),
        used_scopes=[scope for scope in wording.SCOPES if any(v.scope == scope for v in result.claims)],
        used_words=[word for word in wording.LOOKS if any(v.verdict == word for v in result.claims)],
        covers=_covers(result),
    )


def render_fragment(result: Result) -> str:
    """Answer and verdicts, for a notebook's cell: only classes of its own, nothing fixed to the page around it."""
    return _template("summary.html.j2").render(
        result=result,
        claims=claim_views(result.study, result.claims_shown, draw=False),
        style=Markup((HERE / "summary.css").read_text(encoding="utf-8")),
    )


def render_index(folder: Path) -> str:
    """The index over all runs in sub-folders of `folder` that have results and a page.

    Raises
    ------
    ValueError
        If a ``results.json`` there is damaged.
    """
    runs = []
    for path in sorted(folder.glob("*/results.json")):
        if not path.with_name("index.html").is_file():
            continue
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            claims = verdicts_of(saved)
            runs.append(
                {**saved, "href": f"{path.parent.name}/index.html", "verdicts": claims, "date": _date(saved["started"])}
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is damaged ({type(error).__name__}: {error}); delete it or run the study again"
            ) from error
    style = Markup((HERE / "style.css").read_text(encoding="utf-8"))
    return _template("index.html.j2").render(runs=runs, style=style)


def write_page(path: Path, text: str) -> Path:
    """Write `text` to `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return path


def folder_name(result: Result) -> str:
    """``oddshap``, ``oddshap-smoke``, ``oddshap-on-churn-csv-left``: safe on any file system."""
    parts = [result.card.slug]
    if result.tier != "desk":
        parts.append(result.tier)
    own = [str(workload["name"]) for workload in result.workloads if workload.get("own")]
    if own:
        # Folders of a path say little; the last part tells tables apart.
        parts += ["on", *(re.split(r"[/\\]", name)[-1] for name in own)]
    name = re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")
    return name[:80].rstrip("-")


# --- what the templates lay out -------------------------------------------------------------------------------------


def claim_views(study: Study, verdicts: list[Verdict], draw: bool = True) -> list[ClaimView]:
    """The claims in order, each with its verdicts and, if wanted, its picture."""
    known = {claim.label: claim for claim in study.claims}
    views = []
    for label, group in wording.by_claim(verdicts).items():
        claim = known.get(label)
        head = group[0]
        chart = charts.claim_chart(claim, group) if draw and isinstance(claim, Claim) else ""
        views.append(
            ClaimView(
                label=label,
                sentence=head.claim or head.paper,
                paper=head.paper,
                scope=head.scope,
                source=head.source,
                measure=head.measure,
                rule=head.rule,
                changed=head.changed,
                tested=not (isinstance(claim, Untested) or all(v.verdict == "untested" for v in group)),
                verdicts=group,
                chart=Markup(chart),
            )
        )
    return views


def figure_views(result: Result) -> list[FigureView]:
    """The study's figures, drawn from the rows; one that cannot be drawn says why."""
    study, rows = result.study, result.rows
    known = rows[study.arms].drop_nulls() if study.arms in rows.columns else pl.Series(dtype=pl.String)
    arms = known.cast(pl.String).unique(maintain_order=True).to_list()
    styles = arm_styles(study, arms)
    views = []
    for number, figure in enumerate(study.figures, start=1):
        left_out = ""
        try:
            panels = figure_panels(figure, study, rows, styles, number)
        except (ValueError, pl.exceptions.PolarsError) as error:
            panels, left_out = [], str(error).partition("\n")[0]
        if not panels:
            left_out = left_out or "no finished trial of this run measured what it shows"
        shown = {arm for panel in panels for arm in panel.medians}
        legend = [(Markup(swatch(style)), style) for style in styles if style.arm in shown]
        x_title, y_title = figure.x_title or figure.x, figure.y_title or figure.y
        views.append(FigureView(figure.title, figure.source, x_title, y_title, panels, legend, left_out))
    return views


def _covers(result: Result) -> list[tuple[str, str]]:
    """What an interval covers, on the shipped and on the user's own workloads of this run."""
    study = result.study
    own = [bool(workload.get("own")) for workload in result.workloads]
    found = []
    if study.covers and not all(own or [False]):
        found.append(("On the shipped workloads", study.covers))
    if any(own) and (study.covers_own or study.covers):
        found.append(("On your own workload", study.covers_own or study.covers))
    return found


def _date(started: str) -> str:
    """``30 November 2026, 11:04 UTC``; what is not a date stays as it is."""
    try:
        moment = datetime.datetime.fromisoformat(started)
    except ValueError:
        return started
    zone = f" {moment.tzname()}" if moment.tzinfo else ""
    return f"{moment.day} {moment:%B %Y, %H:%M}{zone}"


def _value(x: Any) -> str:
    """A cell of a table: numbers with separators, anything else as text."""
    if isinstance(x, bool) or not isinstance(x, int | float):
        return "–" if x is None else str(x)
    return f"{x:,}" if isinstance(x, int) else wording.number(x)


def _signed(text: str) -> str:
    """`text` with real minus signs before its numbers."""
    return re.sub(r"(?<![\w.\-])-(?=[\d.])", "−", text)


def _condition(condition: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in condition.items())


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,  # for every template, whatever its name ends in
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(w=wording, condition=_condition)
    environment.filters.update(value=_value, svg=Markup, signed=_signed)
    return environment


def _template(name: str) -> jinja2.Template:
    return _environment().get_template(name)
