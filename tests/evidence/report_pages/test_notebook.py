"""A result in a notebook: a real kernel runs the cells, a real browser shows what they put out."""

import os
import re
from pathlib import Path

import pytest

from tests import browser
from tests.evidence.report_pages.reading import Page

pytestmark = pytest.mark.xdist_group("browser")

ROOT = Path(__file__).parents[3]
CELLS = (
    "import cameraready",
    "result = cameraready.check('tests.evidence.studies.estimating:STUDY', seeds=12, jobs=1, quiet=True)",
    "result",
    "result",
    "print(result)",
)
#: What JupyterLab and its HTML exports set on the body, with the ground of their cells.
THEMES = {"light": ('data-jp-theme-light="true"', "#ffffff"), "dark": ('data-jp-theme-light="false"', "#111111")}


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """The executed cells of a notebook that puts a miniature study to the test and shows the result twice."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    home = tmp_path_factory.mktemp("home")
    environment = {**os.environ, "CAMERAREADY_HOME": str(home), "PYTHONPATH": str(ROOT)}
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(home)}})
    client.execute(env=environment)
    return notebook.cells


@pytest.fixture(scope="module")
def fragments(cells):
    return [cell.outputs[0].data["text/html"] for cell in cells[2:4]]


@pytest.fixture(scope="module")
def notebooks(fragments, tmp_path_factory):
    """Pages with both outputs, by theme."""
    folder, written = tmp_path_factory.mktemp("notebooks"), {}
    for theme, (mark, ground) in THEMES.items():
        body = "".join(f"<div>{fragment}</div>" for fragment in fragments)
        written[theme] = folder / f"{theme}.html"
        written[theme].write_text(
            f'<!doctype html><html lang="en"><title>Notebook</title><body {mark} style="background:{ground};font:13px '
            f'sans-serif"><main><h1 style="color:#888">Notebook</h1>{body}</main></body></html>',
            encoding="utf-8",
        )
    return written


def test_the_cell_shows_answer_verdicts_and_what_would_change_them(cells, fragments):
    shown = Page(fragments[0])
    assert not shown.misnested
    said = cells[4].outputs[0].text
    assert said.splitlines()[0] in shown.text  # the answer
    for verdict in re.findall(r"^ +\d\w? +([a-z ]+?)  +", said, re.M):
        assert verdict in shown.text
    assert "would have to" in shown.text or "would settle it" in shown.text or "would not settle it" in shown.text
    assert len([a for a in shown.all("svg") if a.get("role") == "img"]) == 2  # a picture for each tested claim


def test_shown_twice_no_name_is_given_twice(fragments):
    first, second = ({a["id"] for _, a in Page(text).elements if "id" in a} for text in fragments)
    assert first
    assert not first & second
    for text, ids in zip(fragments, (first, second), strict=True):
        referred = [name for _, a in Page(text).elements for name in a.get("aria-labelledby", "").split()]
        assert set(referred) <= ids


def test_pictures_are_folded_and_drawn_once_opened(visit, notebooks):
    tab = visit(notebooks["light"])
    pictures = tab.locator("svg[role=img]")
    assert pictures.count() == 4
    assert not any(picture.is_visible() for picture in pictures.all())
    for summary in tab.locator("summary").all():
        summary.press("Enter")
    assert all(picture.is_visible() for picture in pictures.all())
    assert tab.evaluate(browser.POORLY_DRAWN) == []
    assert tab.said == []
    assert tab.asked == [notebooks["light"].absolute().as_uri()]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("system", ["light", "dark"])
def test_texts_and_pictures_are_legible_in_either_theme_on_either_system(visit, notebooks, axe, theme, system):
    tab = visit(notebooks[theme], scheme=system)
    tab.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    found = tab.evaluate(browser.WEAK_TEXTS, 4.5)
    assert found["checked"] >= 8
    assert found["weak"] == []
    if theme != system:  # the other two are covered by the system's scheme alone
        tab.evaluate(axe)
        assert tab.evaluate(browser.AXE) == []


@pytest.mark.parametrize("width", [360, 900])
def test_it_fits_into_a_narrow_cell(visit, notebooks, width):
    tab = visit(notebooks["light"], width=width)
    tab.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert tab.evaluate(browser.CUT_OFF, 9) == []
