"""Lays a result out as HTML: the page of a run, and the fragment for a notebook."""

from __future__ import annotations

import datetime
import functools
import hashlib
import itertools
import os
import re
import shlex
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import polars as pl
from markupsafe import Markup

from cameraready.evidence.outcomes import Verdict
from cameraready.evidence.report import charts, drawing, forest, tables, wording
from cameraready.evidence.report.curves import Panel, Style, arm_styles, figure_panels, in_curves_order, swatch
from cameraready.evidence.report.galleries import GalleryView, gallery_view
from cameraready.evidence.report.outlook import outlook
from cameraready.evidence.study import Claim, Figure, Study, Untested

if TYPE_CHECKING:
    from cameraready.evidence.results import Result

HERE = Path(__file__).parent
TEMPLATES = HERE / "templates"
FAILURES_SHOWN = 20


@dataclass(frozen=True)
class ClaimView:
    """One claim of a page: its sentence, its verdicts, its picture, and what would change them."""

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
    remarks: dict[str, list[str]]  # by workload: what must be said beside the numbers
    outlooks: list[tuple[str, str]]  # workloads (empty: all of them), and what would change their verdicts


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
    elsewhere: bool = False  # it is about workloads that the run did not have, or that are measured otherwise


def render_page(result: Result) -> str:
    """The page of a run, one HTML document."""
    claims = claim_views(result.study, result.claims_shown, rows=result.rows)
    figures = figure_views(result)
    return _template("page.html.j2").render(
        result=result,
        claims=claims,
        places=wording.places(v.workload for v in result.claims),
        forest=forest.grow({claim.label: claim for claim in result.study.claims}, result.claims),
        figures=[figure for figure in figures if not figure.elsewhere],
        figures_elsewhere=[figure.title for figure in figures if figure.elsewhere],
        whose=_whose(result, [f for f, view in zip(result.study.figures, figures, strict=True) if view.elsewhere]),
        galleries=[gallery for gallery in gallery_views(result) if gallery.panels],
        cost=tables.cost(result.study, result.rows),
        failures=tables.failure_groups(result.failures),
        failures_shown=FAILURES_SHOWN,
        status_words=tables.STATUS_WORDS,
        style=style_sheet(),
        date=in_words(result.started),
        used_scopes=[scope for scope in wording.SCOPES if any(v.scope == scope for v in result.claims)],
        used_words=[word for word in wording.LOOKS if any(v.verdict == word for v in result.claims)],
        covers=_covers(result),
    )


def render_fragment(result: Result) -> str:
    """Answer, verdicts and pictures for a notebook's cell: only classes and ids of its own, unique in each call."""
    prefix = f"cr-{uuid.uuid4().hex[:8]}-"
    return _template("summary.html.j2").render(
        result=result,
        claims=claim_views(result.study, result.claims_shown, prefix=prefix),
        style=Markup((TEMPLATES / "summary.css").read_text(encoding="utf-8")),
    )


def render(template: str, **values: Any) -> str:
    """A template of this folder, filled in."""
    return _template(template).render(**values)


def style_sheet() -> Markup:
    """The style of pages."""
    return Markup((HERE / "style.css").read_text(encoding="utf-8"))


def write_page(path: Path, text: str) -> Path:
    """Write `text` to `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(drawing.drawable(text), encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return path


def folder_name(result: Result) -> str:
    """``oddshap``, ``oddshap-smoke``, ``oddshap-on-churn-csv-left``: safe on any file system.

    What a name like that loses of the workloads' own (folders, letters outside a to z) is kept apart by a digest of them.
    """
    parts = [result.card.slug]
    if result.tier != "desk":
        parts.append(result.tier)
    own = [str(workload["name"]) for workload in result.workloads if workload.get("own")]
    if own:
        # Folders of a path say little; the last part tells tables apart.
        parts += ["on", *(re.split(r"[/\\]", name)[-1] for name in own)]
    name = re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")
    plain = all(re.fullmatch(r"[a-z0-9]+([.:-][a-z0-9]+)*", name) for name in own)
    asked = _questions(result.command)
    if plain and len(name) <= 80 and not asked:
        return name
    mark = hashlib.sha256("\n".join([*own, *asked]).encode("utf-8", "surrogatepass")).hexdigest()[:6]
    return f"{name[:73].rstrip('-')}-{mark}"


#: Options that make another question of a run; a shorter run of the same question replaces its page.
_ASKING = ("--with", "--without", "--set", "--seeds", "--claim", "--device", "--dtype")


def _questions(command: str) -> list[str]:
    """The options of a run's command that make it another run, with their values."""
    try:
        words = shlex.split(command)
    except ValueError:  # a command that was written by hand
        return [command]
    return [f"{flag} {value}" for flag, value in itertools.pairwise(words) if flag in _ASKING]


# --- what the templates lay out -------------------------------------------------------------------------------------


def claim_views(
    study: Study, verdicts: list[Verdict], draw: bool = True, *, rows: pl.DataFrame | None = None, prefix: str = ""
) -> list[ClaimView]:
    """The claims in order, each with its verdicts and, if wanted, its picture.

    With the run's `rows`, the remarks say what each arm measured by itself. `prefix` goes before the pictures' ids.
    """
    known = {claim.label: claim for claim in study.claims}
    views = []
    for label, group in wording.by_claim(verdicts).items():
        found = known.get(label)
        claim = found if isinstance(found, Claim) else None
        head = group[0]
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
                tested=not (isinstance(found, Untested) or all(v.verdict == "untested" for v in group)),
                verdicts=group,
                chart=Markup(charts.claim_chart(claim, group, prefix=prefix) if draw and claim else ""),
                remarks={v.workload: _remarks(study, claim, v, rows) for v in group},
                outlooks=_outlooks(claim, group) if claim else [],
            )
        )
    return views


def _remarks(study: Study, claim: Claim | None, verdict: Verdict, rows: pl.DataFrame | None) -> list[str]:
    told = wording.remarks(wording.told_elsewhere(verdict) if claim else verdict)
    alone = tables.medians(study, claim, verdict, rows) if claim and rows is not None else {}
    if alone:
        column = getattr(claim.measure, "column", "") if claim else ""
        told.insert(0, f"median {column}: {', '.join(f'{arm} {value}' for arm, value in alone.items())}")
    return told


def _outlooks(claim: Claim, verdicts: list[Verdict]) -> list[tuple[str, str]]:
    """What would change the verdicts; workloads of which the same is to be said together."""
    said: dict[str, list[str]] = {}
    places = wording.places(verdict.workload for verdict in verdicts)
    for verdict in verdicts:
        text = outlook(claim, verdict)
        if text:
            said.setdefault(text, []).append(places[verdict.workload])
    everywhere = len(said) == 1
    return [("" if everywhere else ", ".join(places), text) for text, places in said.items()]


def figure_views(result: Result) -> list[FigureView]:
    """The study's figures, drawn from the rows; one that cannot be drawn says why."""
    study, rows = result.study, result.rows
    styles = _styles(result)
    views = []
    for number, figure in enumerate(study.figures, start=1):
        left_out = ""
        try:
            panels = figure_panels(figure, study, rows, styles, number)
        except (ValueError, pl.exceptions.PolarsError) as error:
            panels, left_out = [], str(error).partition("\n")[0]
        if not panels:
            left_out = left_out or "no finished trial of this run measured what it shows"
        legend = [(Markup(swatch(style)), style) for style in in_curves_order(styles, panels)]
        x_title, y_title = figure.x_title or figure.x, figure.y_title or figure.y
        elsewhere = not panels and (_all_own(result) or _is_about_others(figure, result))
        views.append(FigureView(figure.title, figure.source, x_title, y_title, panels, legend, left_out, elsewhere))
    return views


def gallery_views(result: Result) -> list[GalleryView]:
    """The study's galleries, from the rows; one without pictures says why."""
    styles = _styles(result)
    return [gallery_view(gallery, result.study, result.rows, styles) for gallery in result.study.galleries]


def _styles(result: Result) -> list[Style]:
    study, rows = result.study, result.rows
    known = rows[study.arms].drop_nulls() if study.arms in rows.columns else pl.Series(dtype=pl.String)
    return arm_styles(study, known.cast(pl.String).unique(maintain_order=True).to_list())


def _is_about_others(figure: Figure, result: Result) -> bool:
    """Whether a figure is about workloads that the run did not have."""
    if figure.workloads is None:
        return False
    names = {workload.get("name") for workload in result.workloads}
    own = "own" in figure.workloads and any(workload.get("own") for workload in result.workloads)
    return bool(names) and not own and not names.intersection(figure.workloads)


def _whose(result: Result, left_out: Sequence[Figure]) -> str:
    """What the figures that a page leaves out without a word on each are about."""
    if not _all_own(result):
        return "about other workloads"
    here = any(figure.workloads is not None and "own" in figure.workloads for figure in left_out)
    return "about the shipped workloads" + (", or of what was not measured here," if here else "")


def _all_own(result: Result) -> bool:
    return bool(result.workloads) and all(workload.get("own") for workload in result.workloads)


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


def in_words(started: str) -> str:
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


def _condition(condition: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in condition.items())


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_source),
        autoescape=True,  # for every template, whatever its name ends in
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(w=wording, condition=_condition)
    environment.filters.update(value=_value, svg=Markup, signed=wording.signed)
    return environment


def _source(name: str) -> str:
    """A template without its indentation and empty lines, which would be a tenth of a page."""
    return re.sub(r"\n\s+", "\n", (TEMPLATES / name).read_text(encoding="utf-8"))


def _template(name: str) -> jinja2.Template:
    return _environment().get_template(name)
