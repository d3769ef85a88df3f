"""The page of a method, made from its card, its notes, its docstrings and the results that ship with it."""

from __future__ import annotations

import functools
import math
import re
import statistics
from dataclasses import dataclass, replace

import pages
import polars as pl
from markupsafe import Markup
from scipy import stats

from cameraready.catalog import Card, resolve
from cameraready.citation import bibtex
from cameraready.evidence.measures.paired import Ratio, VersusBest
from cameraready.evidence.outcomes import Verdict
from cameraready.evidence.report import render, tables
from cameraready.evidence.report.page import claim_views, figure_views, gallery_views
from cameraready.evidence.report.saved import read_result
from cameraready.evidence.results import Result
from cameraready.evidence.rivals import Rival, rivals
from cameraready.evidence.study import Claim
from cameraready.evidence.verdicts import evidence

NOTES = "notes.md"
#: Sections of a method's notes, in the order of the page.
HOW, CORRECTED, LIMITS = "How it works", "What we corrected, and why", "What it does not tell"


def page_path(card: Card) -> str:
    return f"methods/{card.slug}.md"


def report_path(card: Card) -> str:
    return f"methods/{card.slug}-report.html"


@functools.cache
def notes(card: Card) -> tuple[str, dict[str, str]]:
    """The method's name as people write it, and the sections of its notes.

    Raises
    ------
    ValueError
        If the notes are missing, or one of their sections is.
    """
    path = card.folder / NOTES
    if not path.is_file():
        raise ValueError(f"{card.slug} has no {NOTES} beside its card")
    text = path.read_text(encoding="utf-8")
    title = re.match(r"# (.+)\n", text)
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    sections = {name.strip(): body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)}
    wanted = [HOW, CORRECTED, LIMITS]
    if title is None or list(sections) != wanted:
        raise ValueError(f"{path.name} of {card.slug} must be '# Name' and the sections {', '.join(wanted)}")
    return title[1].strip(), sections


def display_name(card: Card) -> str:
    return notes(card)[0]


@functools.cache
def result_of(card: Card) -> Result | None:
    """What the last desk run measured, or None before there is one."""
    return read_result(card.folder) if card.results_path.is_file() else None


def page(card: Card) -> str:
    """The whole page of a method, as Markdown with HTML."""
    name, sections = notes(card)
    result = result_of(card)
    return pages.render(
        "method.md.j2",
        card=card,
        name=name,
        bibtex=Markup(bibtex([card]).strip()),
        how=Markup(sections[HOW]),
        corrected=Markup(sections[CORRECTED]),
        limits=Markup(sections[LIMITS]),
        result=result,
        claims=claim_views(result.study, result.claims_shown) if result else [],
        figures=figure_views(result) if result else [],
        galleries=[each for each in gallery_views(result) if each.panels] if result else [],
        cost=tables.cost(result.study, result.rows) if result else None,
        rivals=rival_table(card, result) if result else None,
        level_name=result.study.answer.by if result and result.study.answer else "",
        date=result.started[:10] if result else "",
        report=report_path(card).rpartition("/")[2],
        failures=tables.failure_groups(result.failures) if result else [],
        extras=",".join(["study", *([card.extra] if card.extra else [])]),
        **_comparison(result),
    )


def _comparison(result: Result | None) -> dict[str, str]:
    """What the table against each alternative shows, in words."""
    measure = result.study.answer.measure if result and result.study.answer else None
    if not isinstance(measure, VersusBest):
        return {"measured": "", "better": ""}
    side = "below" if measure.lower_is_better else "above"
    mark, what = (1, "ratios") if measure.kind == "ratio" else (0, "differences")
    return {"measured": measure.column, "better": f"{what} with 95 % intervals, {side} {mark} is better"}


def report(card: Card) -> str:
    """The report of the run whose results ship, a page of its own."""
    result = result_of(card)
    assert result is not None
    return render(result)


@dataclass(frozen=True)
class RivalTable:
    """The method against each alternative: a row an arm, a column a workload."""

    workloads: list[tuple[str, str]]  # name, and the level compared at
    rows: list[tuple[str, dict[str, Rival]]]  # what the arm is, and the comparison by workload


def rival_table(card: Card, result: Result) -> RivalTable | None:
    """The method against each other arm on every workload, the alternative that comes closest first; None if there is none."""
    by_arm: dict[str, dict[str, Rival]] = {}
    levels: dict[str, str] = {}
    for rival in rivals(result.study, result.rows):
        by_arm.setdefault(rival.arm, {})[rival.workload] = rival
        levels[rival.workload] = f"{rival.level:,}" if isinstance(rival.level, int) else str(rival.level or "")
    if not by_arm:
        return None
    measure = result.study.answer.measure if result.study.answer else None
    sign = -1 if getattr(measure, "lower_is_better", True) else 1

    def closeness(item: tuple[str, dict[str, Rival]]) -> float:
        estimates = [r.estimate for r in item[1].values() if r.estimate is not None]
        return sign * statistics.median(estimates) if estimates else math.inf

    ordered = sorted(by_arm.items(), key=closeness)
    return RivalTable(list(levels.items()), [(card.arms.get(arm, arm), found) for arm, found in ordered])


# --- what hand-written pages show -----------------------------------------------------------------------------------


def find_verdict(slug: str, label: str, workload: str) -> tuple[Result, Verdict]:
    result = result_of(resolve(slug))
    if result is None:
        raise ValueError(f"{slug} ships no results")
    for verdict in result.claims:
        if (verdict.label, verdict.workload) == (label, workload):
            return result, verdict
    raise ValueError(f"{slug} has no verdict on claim {label} for {workload}")


def one_verdict(slug: str, label: str, workload: str) -> str:
    """One claim on one workload: the sentence, the picture, the numbers."""
    result, verdict = find_verdict(slug, label, workload)
    (view,) = claim_views(result.study, [verdict])
    return pages.render("verdict.md.j2", claim=view)


def one_figure(slug: str, number: str, *workloads: str) -> str:
    """A figure of a study, counted from 1, drawn from the rows that ship; of all its workloads or of these.

    Raises
    ------
    ValueError
        If the figure is not there, could not be drawn, or does not show such a workload.
    """
    result = result_of(resolve(slug))
    if result is None:
        raise ValueError(f"{slug} ships no results")
    views = figure_views(result)
    if not 1 <= int(number) <= len(views):
        raise ValueError(f"{slug} has {len(views)} figures, so none of number {number}")
    view = views[int(number) - 1]
    panels = [panel for panel in view.panels if not workloads or panel.workload in workloads]
    if not panels or len(panels) < len(workloads):
        shown = ", ".join(str(panel.workload) for panel in view.panels) or view.left_out
        raise ValueError(f"figure {number} of {slug} shows {shown}")
    # A page may show figures of several studies: what a picture calls its parts is told apart by the study's name.
    named = [replace(panel, chart=Markup(panel.chart.replace("figure-", f"{slug}-figure-"))) for panel in panels]
    return pages.render("figure.md.j2", figure=replace(view, panels=named))


def block_ratios(slug: str, label: str, workload: str) -> str:
    """The arithmetic of one verdict on a ratio, step by step, from the rows that ship.

    Raises
    ------
    ValueError
        If the steps do not lead to the verdict's interval: then this page would explain something else.
    """
    result, verdict = find_verdict(slug, label, workload)
    claim = next(c for c in result.study.claims if c.label == label)
    assert isinstance(claim, Claim)
    assert isinstance(claim.measure, Ratio)
    found = evidence(result.study, result.rows, claim.measure, workload, claim.where, {})
    assert found.table is not None
    logs = pl.Series(found.table.values[:, 0]).sort()
    n, mean, deviation = len(logs), float(logs.mean()), float(logs.std())
    quantile = float(stats.t.ppf(0.975, n - 1))
    half = quantile * deviation / math.sqrt(n)
    low, high = math.exp(mean - half), math.exp(mean + half)
    if not (math.isclose(low, verdict.low or 0, rel_tol=1e-6) and math.isclose(high, verdict.high or 0, rel_tol=1e-6)):
        raise ValueError(f"claim {label} of {slug}: the steps give [{low}, {high}], the verdict {verdict}")
    return pages.render(
        "ratios.md.j2",
        verdict=verdict,
        ratios=[math.exp(x) for x in logs],
        n=n, mean=mean, deviation=deviation, quantile=quantile, half=half, low=low, high=high,
    )  # fmt: skip
