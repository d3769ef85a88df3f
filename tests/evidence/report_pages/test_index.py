"""The index: every page by room, apart from the shipped ones, short enough for a whole catalogue; and the ledger."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cameraready.catalog import resolve
from cameraready.cli.app import app
from cameraready.evidence.execution.ledger import Ledger, default_path
from cameraready.evidence.report import write_index, write_report
from tests.cli import toy_room
from tests.evidence.report_pages.reading import Page


def saved(result, folder, **changes):
    """Results and an (empty) page in `folder`."""
    folder.mkdir(parents=True)
    content = {**result.to_json(), **changes}
    (folder / "results.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "index.html").touch()


def runs_of(page):
    return [a["href"] for a in page.all("a") if not a["href"].startswith("#")]


def read(path):
    return Page(path.read_text(encoding="utf-8"))


def test_it_leads_to_every_run_that_has_a_page(result, tmp_path):
    for name in ("one", "two"):
        result.save(tmp_path / name)
        write_report(result, tmp_path / name)
    result.save(tmp_path / "no-page")
    page = read(write_index(tmp_path))
    assert runs_of(page) == ["one/index.html", "two/index.html"]
    assert page.text.count(result.answer.partition("; ")[0]) == 2
    assert not page.misnested


def test_shipped_results_are_told_from_the_users_own(result, tmp_path):
    saved(result, tmp_path / "mine")
    saved(result, tmp_path / "shipped" / "oddshap")
    page = read(write_index(tmp_path))
    assert set(runs_of(page)) == {"mine/index.html", "shipped/oddshap/index.html"}
    assert page.text.count("desk run, yours") == 1
    assert page.text.count("desk run, shipped with the method") == 1


def test_methods_stand_in_their_rooms_and_others_last(result, tmp_path):
    with toy_room.installed(tmp_path / "package"):
        saved(result, tmp_path / "a", method="elsewhere")
        saved(result, tmp_path / "b", method="tidy", started="2026-01-01T00:00:00+00:00")
        saved(result, tmp_path / "c", method="tidy", started="2026-02-01T00:00:00+00:00")
        page = read(write_index(tmp_path))
    assert runs_of(page) == ["c/index.html", "b/index.html", "a/index.html"]  # the newest of a method first
    assert page.text.rindex("Toys") < page.text.index("tidy") < page.text.rindex("Other studies")
    assert "No results yet: loose , shaky ." in page.text


def test_seventy_six_methods_stay_one_short_page(result, tmp_path):
    for number in range(76):
        saved(result, tmp_path / f"m{number}", method=f"m{number:02}", answer="; ".join([result.answer] * 4))
    path = write_index(tmp_path)
    page = read(path)
    assert len(runs_of(page)) == 76
    assert path.stat().st_size < 120_000
    assert page.text.count(result.answer.partition("; ")[0]) == 76


def test_what_the_ledger_remembers_is_listed_with_its_page(result, tmp_path):
    saved(result, tmp_path / "mine", command="cameraready run oddshap")
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        for index in range(50):
            ledger.end_run(ledger.start_run("oddshap", "desk", f"cameraready run number-{index}", {}), "done")
        ledger.end_run(ledger.start_run("oddshap", "desk", "cameraready run oddshap", {}), "interrupted")
        ledger.start_run("killed", "desk", "cameraready run killed", {})
        page = read(write_index(tmp_path, ledger.runs(), str(ledger.path)))
    assert runs_of(page) == ["mine/index.html", "mine/index.html"]  # its line, and the run in the history
    assert "number-49" in page.text
    assert "number-0 " not in page.text
    assert "12 earlier runs are not listed" in page.text
    assert page.text.index("cameraready run killed") < page.text.index("interrupted")
    assert "not ended" in page.text


def test_damaged_results_are_named(result, tmp_path):
    saved(result, tmp_path / "mine")
    saved(result, tmp_path / "good")
    (tmp_path / "mine" / "results.json").write_text("{}")
    page = read(write_index(tmp_path))
    assert "mine/results.json is damaged" in page.text
    assert "1 report" in page.text  # the other one


def test_own_workloads_and_unfinished_runs_are_marked(result, tmp_path):
    own = replace(result, workloads=[{"name": "churn.csv:left", "own": True}], incomplete=True)
    saved(own, tmp_path / "mine")
    assert "desk run on churn.csv:left, yours, not complete" in read(write_index(tmp_path)).text


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def report(monkeypatch, tmp_path):
    """Calls ``cameraready report`` in a folder of its own, with the toy methods, of which `tidy` ships results."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path / "home"))
    with toy_room.installed(tmp_path / "package") as package:
        ready = CliRunner()
        yield lambda *words: ready.invoke(app, ["report", *map(str, words)]), package / "toys" / "tidy"


def test_without_a_name_all_shipped_results_get_pages_and_an_index(report, result):
    call, tidy = report
    replace(result, card=resolve("tidy")).save(tidy)
    written = call()
    assert written.exit_code == 0
    assert written.stdout.split() == ["report/shipped/tidy/index.html", "report/index.html"]
    assert runs_of(read(Path("report/index.html"))) == ["shipped/tidy/index.html"]


def test_the_users_own_run_of_a_method_is_left_alone(report, result):
    call, tidy = report
    replace(result, card=resolve("tidy")).save(tidy)
    mine = replace(result, card=resolve("tidy"), answer="What I found.")
    mine.save("report/tidy")
    write_report(mine, Path("report/tidy"))
    assert call("all").exit_code == 0
    assert "What I found." in Path("report/tidy/index.html").read_text()
    assert json.loads(Path("report/tidy/results.json").read_text())["answer"] == "What I found."
    assert set(runs_of(read(Path("report/index.html")))) == {"tidy/index.html", "shipped/tidy/index.html"}


def test_the_index_lists_what_the_ledger_holds_and_makes_no_ledger(report, result):
    call, _ = report
    assert call().exit_code == 0
    assert not default_path().exists()
    with Ledger.open() as ledger:
        ledger.end_run(ledger.start_run("tidy", "desk", "cameraready run tidy --seeds 3", {}), "interrupted")
    assert call().exit_code == 0
    page = read(Path("report/index.html"))
    assert "cameraready run tidy --seeds 3" in page.text
    assert "interrupted" in page.text


def test_a_ledger_that_cannot_be_read_is_told_and_costs_only_its_list(report):
    call, _ = report
    default_path().parent.mkdir(parents=True)
    default_path().write_text("notes" * 50)
    written = call()
    assert written.exit_code == 0
    assert "the index is without the ledger's runs" in written.stderr
    assert "What ran here" not in Path("report/index.html").read_text()
