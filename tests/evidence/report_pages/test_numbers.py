"""What the page tells beside the pictures, and the files that a report is."""

import json
import re
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from cameraready.catalog import resolve
from cameraready.evidence.outcomes import Failure, Verdict
from cameraready.evidence.report import (
    page_name,
    render,
    tables,
    wording,
    write_report,
)
from cameraready.evidence.report.saved import read_result, verdicts_of
from tests.cli import toy_room
from tests.evidence.report_pages.reading import Page
from tests.evidence.report_runs import a_frame, a_result, a_study


def test_cost_is_the_median_over_trials():
    found = tables.cost(a_study(), a_frame())
    assert found.arms[0] == "oddshap"
    assert found.cells["kernel", "digits"] == "0.4 s"  # budgets 300 to 10,000 at 0.2 ms a call


def test_memory_is_told_only_of_trials_in_processes_of_their_own():
    assert not tables.cost(a_study(), a_frame()).has_memory
    found = tables.cost(a_study(alone=True), a_frame())
    assert found.has_memory
    assert found.cells["kernel", "digits"] == "0.4 s, 180 MB"


def test_where_a_trial_covers_all_arms_the_cost_is_the_trials():
    rows = a_frame().with_columns(trial=pl.format("{}-{}", "workload", "instance"), trial_seconds=pl.lit(3.0))
    found = tables.cost(a_study(), rows)
    assert found.arms == [""]
    assert found.cells["", "digits"] == "3.0 s"


@pytest.mark.parametrize("label", ["3a", "3b", "4"])
def test_beside_a_comparison_stands_what_each_arm_measured(result, label):
    """Medians over blocks, by numpy; no other workload, budget or arm may slip in."""
    claim = next(c for c in result.study.claims if c.label == label)
    for verdict in (v for v in result.claims if v.label == label):
        found = tables.medians(result.study, claim, verdict, result.rows)
        if verdict.workload == "all":
            assert found == {}
            continue
        peer = verdict.peer or claim.measure.peer
        for arm in ("oddshap", peer):
            rows = result.rows.filter(
                (pl.col("workload") == verdict.workload) & (pl.col("estimator") == arm) & (pl.col("budget") == 10_000)
            )
            assert found.pop(arm) == wording.number(float(np.median(rows["mse"].drop_nulls().to_numpy())))
        assert found == {}


def test_times_say_their_unit(result):
    claim = next(c for c in result.study.claims if c.label == "5")
    verdict = next(v for v in result.claims if v.label == "5" and v.workload == "digits")
    found = tables.medians(result.study, claim, verdict, result.rows)
    assert all(value.endswith(" s") for value in found.values())
    assert "median seconds: oddshap 1.0 s" in Page(render(result)).text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00091, "0.91 ms"),
        (0.5, "0.5 s"),
        (3.0, "3.0 s"),
        (48, "48 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (7200, "2 h"),
    ],
)
def test_durations_read_as_a_person_says_them(seconds, text):
    assert wording.duration(seconds) == text


def test_failures_of_one_sort_are_told_once(result):
    other = Failure("digits", "kernel", "1", 0, {}, "raised", "Traceback\nZeroDivisionError: division by zero")
    groups = tables.failure_groups([other, *result.failures])
    assert [(g.arm, g.count) for g in groups] == [("svarm", 4), ("kernel", 1)]
    assert groups[1].last_line == "ZeroDivisionError: division by zero"


def test_the_page_is_written_whole_and_replaces_the_last(result, tmp_path):
    first = write_report(result, tmp_path / "run")
    second = write_report(replace(result, answer="Another answer."), tmp_path / "run")
    assert first == second
    assert "Another answer." in second.read_text(encoding="utf-8")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["index.html"]


def test_what_was_saved_is_read_back(result, tmp_path):
    with toy_room.installed(tmp_path / "package"):
        result = replace(result, card=resolve("tidy"), seconds=431.0)
        result.save(tmp_path)
        saved = read_result(tmp_path)
    assert saved.rows.equals(result.rows)
    assert saved.claims_shown == [replace(v, value={}) for v in result.claims_shown]
    assert saved.failures == result.failures
    assert saved.card == result.card
    assert saved.study.method == "tidy"
    for name in ("tier", "answer", "workloads", "environment", "command", "commit", "started", "seconds", "notes"):
        assert getattr(saved, name) == getattr(result, name), name


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"method": "oddshap"}'])
def test_damaged_results_are_refused(result, tmp_path, damage):
    result.save(tmp_path)
    (tmp_path / "results.json").write_text(damage)
    with pytest.raises(ValueError, match="damaged"):
        read_result(tmp_path)


def test_rows_that_are_missing_are_named(result, tmp_path):
    result.save(tmp_path)
    (tmp_path / "results.parquet").unlink()
    with pytest.raises(ValueError, match="has no results"):
        read_result(tmp_path)


def test_a_later_versions_keys_are_ignored():
    claim = {
        "label": "12b",
        "claim": "c",
        "paper": "p",
        "scope": "exact",
        "verdict": "holds",
        "workload": "w",
        "new": 1,
    }
    assert verdicts_of({"claims": [claim]}) == [Verdict("12b", 12, "c", "p", "exact", "holds", "w")]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "oddshap"),
        ({"tier": "smoke"}, "oddshap-smoke"),
        ({"workloads": [{"name": "churn.csv:left", "own": True}]}, "oddshap-on-churn-csv-left"),
        ({"command": "cameraready run oddshap --max-minutes 3"}, "oddshap"),
        ({"workloads": [{"name": "/home/ada/Churn Data.csv:left", "own": True}]}, "oddshap-on-churn-data-csv-left-*"),
        ({"workloads": [{"name": "..\\..\\x", "own": True}]}, "oddshap-on-x-*"),
        (
            {"workloads": [{"name": "<script>" * 40, "own": True}]},
            ("oddshap-on-" + "script-" * 40)[:73].rstrip("-") + "-*",
        ),
        ({"command": "cameraready run oddshap --claim 1"}, "oddshap-*"),
    ],
)
def test_a_pages_folder_is_named_safely(result, changes, name):
    found = page_name(replace(result, **changes))
    start, mark, _ = name.partition("*")
    assert found.startswith(start)
    assert re.fullmatch("[0-9a-f]{6}" if mark else "", found.removeprefix(start))


def test_what_would_be_named_alike_is_kept_apart(result):
    names = ["数据.csv:目标", "客户.csv:流失", "a/train.csv:y", "b/train.csv:y", "a_b.csv:y", "a-b.csv:y"]
    folders = {page_name(replace(result, workloads=[{"name": name, "own": True}])) for name in names}
    commands = [f"cameraready run oddshap {more}" for more in ("--claim 1", "--claim 2", "--with mine:a", "--seeds 3")]
    folders |= {page_name(replace(result, command=command)) for command in commands}
    assert len(folders) == len(names) + len(commands)


@pytest.mark.parametrize("character", ["\x00", "\x1b", "\ufffe", "\ud800", "\x0b"])
def test_a_character_that_no_picture_can_hold_ends_nothing(result, tmp_path, character):
    name = f"my{character}data.csv:y"
    claims = [replace(verdict, workload=name) for verdict in result.claims]
    page = replace(result, claims=claims).report(tmp_path)
    assert "my\ufffddata.csv:y" in page.read_text(encoding="utf-8")


def test_a_study_outside_the_catalogue_is_code_and_is_not_run_unasked(result, tmp_path, monkeypatch):
    from cameraready.evidence.subject import UsageError

    place = tmp_path / "evil"
    result.save(place)
    saved = json.loads((place / "results.json").read_text())
    (place / "results.json").write_text(
        json.dumps({**saved, "method": "evil_study:STUDY", "study": "evil_study:STUDY"})
    )
    (tmp_path / "evil_study.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match="outside the catalogue: that is code"):
        read_result(place)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(UsageError, match="not a Study"):
        read_result(place, trust=True)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": None}, "seconds should be a number"),
        ({"environment": None}, "environment should be"),
        ({"answer": ["a"]}, "answer should be text"),
        ({"workloads": [{}]}, "the name of a workload should be text"),
        ({"blocks": 10**400}, "blocks of claim .* is too large"),
        ({"blocks": -1}, "a count of claim .* is negative"),
        ({"low": None, "high": 1.0}, "has one end only"),
        ({"verdict": "refuted"}, "Results of a later version need that version"),
    ],
)
def test_results_that_are_none_are_refused_with_the_value_named(result, tmp_path, change, message):
    result.save(tmp_path)
    path = tmp_path / "results.json"
    saved = json.loads(path.read_text())
    for name, value in change.items():
        (saved if name in saved else saved["claims"][0])[name] = value
    path.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=message):
        read_result(tmp_path)


def test_in_a_notebook_answer_and_verdicts_stand_alone(result):
    fragment = Page(result._repr_html_())
    assert result.answer in fragment.text
    assert "0.137" in fragment.text or wording.number(result.claims[2].estimate) in fragment.text
    style = re.search(r"<style>(.*?)</style>", result._repr_html_(), re.S)[1]
    selectors = re.findall(r"(?:^|\})\s*([^{}@]+)\{", style)
    assert all(".cameraready" in selector for selector in selectors)


@pytest.mark.parametrize("failed", [True, False])
def test_a_run_in_which_nothing_finished_has_its_report(failed):
    rows = a_frame().head(5).select("workload", "estimator", "budget", "instance", "seed")
    rows = rows.with_columns(status=pl.lit("raised"), trial=pl.lit("t"), trial_seconds=0.1, trial_peak_mb=1.0)
    if not failed:
        rows = pl.DataFrame(schema={"workload": pl.String, "status": pl.String})
    page = render(replace(a_result(), rows=rows, claims=[]))
    assert "Left out: figure" in page


def test_intervals_from_few_blocks_are_not_told():
    verdict = next(v for v in a_result().claims if v.low is not None)
    assert wording.interval(replace(verdict, blocks=10))
    few = replace(verdict, blocks=9)
    assert wording.interval(few) == ""
    assert wording.estimate(few) == wording.number(few.estimate)


def test_a_result_shows_itself_briefly():
    result = replace(a_result(), notes=["interrupted"])
    lines = repr(result).splitlines()
    assert lines[0] == result.answer
    assert len(lines) == 2 + len(result.claims)
    assert lines[-1] == "Note: interrupted"


def test_a_page_does_not_grow_with_its_rows():
    """Twenty times the blocks: the same pictures and tables, of other numbers."""
    small, large = (a_result(("w",), blocks=blocks) for blocks in (12, 240))
    assert large.rows.height == 20 * small.rows.height
    pages = [render(result) for result in (small, large)]
    assert len(pages[1]) < 1.05 * len(pages[0])
    at = large.rows.filter((pl.col("estimator") == "kernel") & (pl.col("budget") == 300))["mse"]
    assert wording.number(float(np.median(at.to_numpy()))) in Page(pages[1]).text


def test_the_page_of_shipped_results_stays_small():
    """OddSHAP's: nineteen claims, two figures, six workloads."""
    shipped = read_result(resolve("oddshap").folder)
    assert len(render(shipped).encode()) <= 120_000


def test_long_paths_are_called_by_their_last_part_where_that_is_clear():
    folder = "/data/customers/of/the/year/2026/"
    assert wording.places(["digits", f"{folder}churn.csv:left", "all"]) == {
        "digits": "digits",
        f"{folder}churn.csv:left": "churn.csv:left",
        "all": "all together",
    }
    same = [f"{folder}a/churn.csv:left", f"{folder}b/churn.csv:left"]
    assert wording.places(same) == dict(zip(same, same, strict=True))
