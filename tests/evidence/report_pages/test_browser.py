"""Pages in a real browser: drawn, legible in both schemes, usable at 360 pixels, by keyboard, with axe, on paper."""

import json
import re
from dataclasses import replace

import polars as pl
import pytest

from cameraready.evidence.outcomes import Failure
from cameraready.evidence.report import render, render_summary, write_index
from cameraready.evidence.study import Figure, Gallery
from tests import browser
from tests.evidence.report_runs import a_result, a_study

pytestmark = pytest.mark.xdist_group("browser")

KINDS = ("run", "long", "index", "notebook")
SCHEMES = ("light", "dark")
AA = 4.5
LONG = "/data/customers/2026/a-very-long-name-of-a-table-with-many-words.csv:the_column_that_is_predicted"


def crowded():
    """A run with long names, many arms, a failure with a traceback, a figure on text, and pictures."""
    study = a_study(
        figures=[*a_study().figures, Figure("Error by table", "workload", "mse", log_x=False)],
        galleries=[Gallery("What was drawn", caption="below")],
    )
    result = a_result((LONG, "digits"), own=True, study=study, command=f"cameraready run oddshap --on {LONG}")
    drawn = '<svg xmlns="http://www.w3.org/2000/svg" width="90" height="90"><circle cx="45" cy="45" r="40"/></svg>'
    rows = result.rows.with_columns(picture=pl.lit(drawn), below=pl.lit("C1=CC=C(C=C1)" * 8))
    error = (
        "Traceback (most recent call last):\n"
        + "  File somewhere, line 1, in a_function\n" * 30
        + "ValueError: "
        + LONG
    )
    return replace(
        result, rows=rows, failures=[*result.failures, Failure(LONG, "kernel", "1", 0, {"budget": 3}, "raised", error)]
    )


@pytest.fixture(scope="session")
def pages(result, html, tmp_path_factory):
    """The files to look at, by kind."""
    root = tmp_path_factory.mktemp("pages")
    for number, tier in enumerate(("desk", "smoke", "full")):
        folder = root / "runs" / f"run-{number}"
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps({**result.to_json(), "tier": tier}), encoding="utf-8")
        (folder / "index.html").write_text(html, encoding="utf-8")
    cells = "".join(f"<div>{render_summary(result)}</div>" for _ in range(2))
    shell = f'<!doctype html><html lang="en"><title>Notebook</title><body><main><h1>Notebook</h1>{cells}</main></body></html>'
    for name, text in {"run": html, "long": render(crowded()), "notebook": shell}.items():
        (root / f"{name}.html").write_text(text, encoding="utf-8")
    return {
        **{name: root / f"{name}.html" for name in ("run", "long", "notebook")},
        "index": write_index(root / "runs"),
    }


def unfold(tab):
    """Open whatever can be opened."""
    tab.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_complained_about_and_nothing_leaves_the_file(visit, pages, kind):
    tab = visit(pages[kind])
    unfold(tab)
    tab.wait_for_load_state("networkidle")
    assert tab.said == []
    # Chromium counts the empty icon in the page as a request.
    assert [url for url in tab.asked if not url.startswith("data:")] == [pages[kind].absolute().as_uri()]


@pytest.mark.parametrize("kind", ["run", "long", "notebook"])
def test_every_picture_is_drawn_inside_its_frame(visit, pages, kind):
    tab = visit(pages[kind])
    unfold(tab)
    assert tab.locator("svg[role=img]").count() >= 6
    assert tab.evaluate(browser.POORLY_DRAWN) == []


def test_the_pictures_have_a_bar_for_every_interval(visit, pages, result):
    tab = visit(pages["run"])
    for label in ("3a", "3b", "3c", "4", "5"):
        verdicts = [v for v in result.claims if v.label == label]
        bars = tab.locator(f"#claim-{label} svg path[stroke-width='3']").evaluate_all(
            "paths => paths.flatMap(p => p.getAttribute('d').match(/M/g)).length"
        )
        assert bars == len(verdicts)
    assert tab.locator(".overview .strip circle").count() == 6  # 3a and 3b, on two tables and together


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("run", "light"),
        ("run", "dark"),
        ("long", "light"),
        ("index", "dark"),
        ("notebook", "light"),
        ("notebook", "dark"),
    ],
)
def test_axe_finds_nothing_wrong(visit, pages, axe, kind, scheme):
    tab = visit(pages[kind], scheme=scheme)
    unfold(tab)
    tab.evaluate(axe)
    assert tab.evaluate(browser.AXE) == []


def test_axe_finds_nothing_wrong_on_a_phone(visit, pages, axe):
    tab = visit(pages["run"], width=360)
    tab.evaluate(axe)
    assert tab.evaluate(browser.AXE) == []


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["run", "notebook"])
def test_texts_in_pictures_stand_out_from_their_ground(visit, pages, kind, scheme):
    """axe looks at HTML only."""
    tab = visit(pages[kind], scheme=scheme)
    unfold(tab)
    found = tab.evaluate(browser.WEAK_TEXTS, AA)
    assert found["checked"] > 40
    assert found["weak"] == []


def test_the_schemes_differ(visit, pages):
    grounds = {
        scheme: visit(pages["run"], scheme=scheme).evaluate(
            "getComputedStyle(document.documentElement).backgroundColor"
        )
        for scheme in SCHEMES
    }
    assert len(set(grounds.values())) == 2


def test_a_notebooks_theme_wins_over_the_systems(visit, pages):
    """A dark notebook on a light system shows the dark colours, and the other way round."""
    for scheme, theme in (("light", "false"), ("dark", "true")):
        tab = visit(pages["notebook"], scheme=scheme)
        tab.evaluate(f"document.body.setAttribute('data-jp-theme-light', '{theme}')")
        card = tab.locator(".cameraready").first.evaluate("e => getComputedStyle(e).backgroundColor")
        assert card == {"false": "rgb(28, 31, 35)", "true": "rgb(255, 255, 255)"}[theme]


@pytest.mark.parametrize("kind", KINDS)
def test_a_phone_shows_all_of_it(visit, pages, kind):
    tab = visit(pages[kind], width=360, height=740)
    unfold(tab)
    assert tab.evaluate(browser.CUT_OFF, 9) == []


def test_tables_can_be_read_on_a_phone(visit, pages, result):
    """Every number of the claims' tables is in view without scrolling sideways, and none breaks in two."""
    tab = visit(pages["run"], width=360, height=740)
    cells = tab.locator(".evidence .num b")
    assert cells.count() == sum(v.estimate is not None for v in result.claims)
    for box in cells.evaluate_all("bs => bs.map(b => b.getBoundingClientRect()).map(r => [r.left, r.right, r.height])"):
        assert 0 <= box[0] < box[1] <= 360
        assert box[2] < 26


def test_the_keyboard_reaches_everything_in_order(visit, pages):
    tab = visit(pages["run"])
    stops = []
    while True:
        tab.keyboard.press("Tab")
        stop = tab.evaluate(browser.FOCUS)
        if stop["what"] == "BODY":
            break
        stops.append(stop)
    shown = "es => es.filter(e => e.checkVisibility({contentVisibilityAuto: true})).length"
    assert len(stops) == tab.locator("a[href], summary, [tabindex='0']").evaluate_all(shown)
    assert [stop["position"] for stop in stops] == sorted(stop["position"] for stop in stops)
    for stop in stops:
        assert stop["visible"], stop
        assert stop["outline"] >= 2, stop


@pytest.mark.parametrize(("kind", "target"), [("run", "verdicts"), ("index", "runs")])
def test_the_first_stop_skips_to_what_matters(visit, pages, kind, target):
    tab = visit(pages[kind])
    tab.keyboard.press("Tab")
    stop = tab.evaluate(browser.FOCUS)
    assert stop["text"].startswith("Skip to")
    assert stop["visible"]
    tab.keyboard.press("Enter")
    assert tab.evaluate("location.hash") == f"#{target}"
    tab.wait_for_function(f"Math.abs(document.getElementById('{target}').getBoundingClientRect().top) < innerHeight")


@pytest.mark.parametrize("kind", ["run", "long", "index"])
def test_on_paper_nothing_is_cut_off(visit, pages, kind):
    tab = visit(pages[kind], width=718, height=1040, media="print")  # A4 less its margins
    out = tab.evaluate(browser.CUT_OFF, 6)
    assert out == []
    hidden = "es => es.filter(e => e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1).length"
    assert tab.locator(".scroll, pre").evaluate_all(hidden) == 0
    printed = tab.pdf(format="A4")
    assert printed.startswith(b"%PDF")
    n_pages = len(re.findall(rb"/Type\s*/Page\b", printed))
    height = tab.evaluate("document.documentElement.scrollHeight")
    assert n_pages >= height / 1400
