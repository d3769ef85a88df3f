"""`check`: which trials run under which options, what is kept, and what the reader is told."""

import dataclasses
import threading

import numpy as np
import polars as pl
import pytest

from cameraready.evidence import checking
from cameraready.evidence.checking import Plan, UsageError, check
from cameraready.evidence.execution.ledger import Ledger
from cameraready.evidence.results import make_frame
from cameraready.evidence.specs import SpecError

ESTIMATING = "tests.evidence.studies.estimating:STUDY"
OWN_DATA = "tests.evidence.studies.own_data:STUDY"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def smoke(method=ESTIMATING, **options):
    return check(method, tier="smoke", quiet=True, **options)


# --- which trials -----------------------------------------------------------------------------------------------------


def test_rows_are_the_plan_crossed_with_the_seeds():
    rows = smoke().rows
    assert rows.height == 2 * 2 * 3  # seeds x sizes x estimators
    assert rows.select("seed", "size", "estimator").is_unique().all()


def test_seeds_take_a_number_or_a_list():
    assert smoke(seeds=4).rows["seed"].unique().sort().to_list() == [0, 1, 2, 3]
    assert smoke(seeds=[7, 9]).rows["seed"].unique().sort().to_list() == [7, 9]


def test_set_replaces_a_value_and_a_list_is_crossed():
    assert smoke(set={"size": 30}).rows["size"].unique().to_list() == [30]
    assert smoke(set={"size": [30, 40]}).rows["size"].unique().sort().to_list() == [30, 40]


def test_setting_what_no_condition_has_is_refused_with_what_there_is():
    with pytest.raises(UsageError, match=r"nothing to set named length.*size"):
        smoke(set={"length": 3})


def test_an_arm_left_out_is_gone_and_its_claims_say_so():
    result = smoke(without=["mean"])
    assert set(result.rows["estimator"]) == {"trimmed", "median"}
    (verdict,) = [v for v in result.claims if v.label == "1"]
    assert verdict.verdict == "untested"
    assert "left out" in verdict.reason


def test_unknown_arms_the_method_itself_and_taken_names_are_refused():
    with pytest.raises(UsageError, match=r"no arm winsorised.*mean, median, trimmed"):
        smoke(without=["winsorised"])
    with pytest.raises(UsageError, match="cannot be left out"):
        smoke(without=["trimmed"])
    with pytest.raises(UsageError, match="exists already"):
        smoke(with_={"mean": np.mean})


def test_a_users_method_is_one_more_arm_under_the_same_conditions():
    rows = smoke(with_={"zero": lambda sample: 0.0}).rows
    mine = rows.filter(pl.col("estimator") == "zero")
    theirs = rows.filter(pl.col("estimator") == "trimmed")
    assert mine["error"].to_list() == [0.0] * 4
    assert mine.select("seed", "size").equals(theirs.select("seed", "size"))


def test_a_users_method_by_name():
    result = smoke(with_=["tests.evidence.studies.estimating:trimmed"])
    mine = result.rows.filter(pl.col("estimator").str.contains(":"))
    theirs = result.rows.filter(pl.col("estimator") == "trimmed")
    assert mine["error"].to_list() == theirs["error"].to_list()


def test_one_claim_runs_only_what_it_looks_at():
    result = smoke(claims=["1"])
    assert [v.label for v in result.claims] == ["1"]
    assert set(result.rows["estimator"]) == {"trimmed", "mean"}
    assert set(result.rows["size"]) == {200}
    with pytest.raises(UsageError, match="there is no claim 8"):
        smoke(claims=[8])


def test_unknown_tier_method_and_workload_are_refused_with_a_sentence():
    with pytest.raises(UsageError, match="smoke, desk or full"):
        check(ESTIMATING, tier="quick")
    with pytest.raises(UsageError, match="no module"):
        check("no.such.module:STUDY")
    with pytest.raises(SpecError, match="clean"):
        smoke(on="no-such-workload")


def test_workloads_take_turns_with_as_many_whole_blocks_as_a_verdict_needs():
    selection = checking.Selection(
        subject=checking.load_subject(ESTIMATING),
        tier="desk",
        own={},
        without=frozenset(),
        changes={},
        seeds=range(12),
        only=None,
    )
    loads = checking.workloads_of(selection.subject.study, "desk", None)
    order = [(t.workload, t.seed) for t in selection.trials(loads)]
    turns = [("clean", range(10)), ("dirty", range(10)), ("clean", range(10, 12)), ("dirty", range(10, 12))]
    assert order == [(workload, seed) for workload, seeds in turns for seed in seeds for _ in range(6)]


# --- what is kept -------------------------------------------------------------------------------------------------------


def test_a_second_run_runs_nothing_and_gives_the_same_rows(home):
    first = smoke()
    with Ledger.open() as ledger:
        before = ledger.count()
    second = smoke()
    with Ledger.open() as ledger:
        assert ledger.count() == before
    assert first.rows.equals(second.rows)


def test_a_changed_method_of_the_user_runs_again():
    first = smoke(with_={"mine": lambda sample: 0.0})
    second = smoke(with_={"mine": lambda sample: 1.0})
    assert set(first.rows.filter(pl.col("estimator") == "mine")["error"]) == {0.0}
    assert set(second.rows.filter(pl.col("estimator") == "mine")["error"]) == {1.0}


def test_a_failure_is_a_row_and_runs_again_only_when_asked():
    def fails(sample):
        raise RuntimeError("not today")

    first = smoke(with_={"broken": fails})
    assert len(first.failures) == 4
    assert "not today" in first.failures[0].error
    failed = first.rows.filter(pl.col("status") == "raised")
    assert failed.height == 4
    assert failed["error"].is_null().all()
    assert failed["failure"].str.contains("not today").all()
    with Ledger.open() as ledger:
        run = ledger.runs()[-1]
    smoke(with_={"broken": fails})
    with Ledger.open() as ledger:
        assert ledger.runs()[-1].trials == 0
    smoke(with_={"broken": fails}, retry=True)
    with Ledger.open() as ledger:
        assert ledger.runs()[-1].trials == 4
    assert run.status == "done"


@pytest.mark.parametrize(("gib", "told"), [(12.5, "12.5 GiB"), (0.002, "2.05 MiB"), (0.0, "0 GiB")])
def test_a_plan_tells_little_memory_in_small_units(gib, told):
    assert f"memory: at most {told}" in str(Plan(1, 0, {"mine": 1}, None, [], gib)).splitlines()


def test_dry_run_counts_and_runs_nothing():
    plan = smoke(dry_run=True)
    assert isinstance(plan, Plan)
    assert (plan.trials, plan.finished, plan.blocks) == (12, 0, {"dirty": 2})
    assert plan.hours is None
    assert "unknown" in str(plan)
    smoke()
    again = smoke(dry_run=True, seeds=3)
    assert (again.trials, again.finished) == (18, 12)
    assert again.hours is not None
    assert again.hours > 0


# --- the user's own workload ------------------------------------------------------------------------------------------


def test_python_objects_are_a_workload():
    result = smoke(OWN_DATA, on=np.full(9, 4.0))
    assert result.rows["value"].to_list() == [4.0, 4.0]
    assert result.workloads[0]["own"]
    assert result.component() == 4.0


def test_a_table_is_a_workload_and_its_content_is_part_of_the_key(tmp_path):
    table = tmp_path / "mine.csv"
    table.write_text("a,y\nx,1\n,3\n")
    spec = f"{table}:y"
    assert smoke(OWN_DATA, on=spec).rows["value"].to_list() == [2.0, 2.0]
    table.write_text("a,y\nx,1\n,5\n")
    assert smoke(OWN_DATA, on=spec).rows["value"].to_list() == [3.0, 3.0]


def test_objects_that_cannot_be_sent_run_here_and_the_reader_is_told():
    guarded = {"values": np.ones(4), "lock": threading.Lock()}
    result = check(OWN_DATA, on=guarded, quiet=True)
    assert result.rows["value"].to_list() == [1.0] * 12
    assert any("calling process" in note for note in result.notes)


def test_rows_of_a_users_single_table_are_resampled_by_seed(tmp_path):
    own = checking.check(OWN_DATA, on=np.arange(20.0), seeds=6, tier="smoke", quiet=True, set={"resample": True})
    shipped = checking.check(OWN_DATA, seeds=6, tier="smoke", quiet=True, set={"resample": True})
    assert own.rows["value"].n_unique() > 1
    assert shipped.rows["value"].n_unique() == 1


# --- what comes out -----------------------------------------------------------------------------------------------------


def test_results_are_written_and_read_back(tmp_path):
    result = smoke()
    result.save(tmp_path / "out")
    assert pl.read_parquet(tmp_path / "out" / "results.parquet").equals(result.rows)
    import json

    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [c["verdict"] for c in written["claims"]] == [v.verdict for v in result.claims_shown]
    assert set(written) >= {"method", "tier", "commit", "environment", "workloads", "claims", "failed_trials"}


def test_without_time_verdicts_are_provisional_and_the_next_run_goes_on():
    first = check(ESTIMATING, seeds=12, minutes=0.0, quiet=True)
    assert first.incomplete
    assert any("goes on from here" in note for note in first.notes)
    assert all(v.provisional for v in first.claims if v.verdict != "untested")
    second = check(ESTIMATING, seeds=12, quiet=True)
    assert not second.incomplete
    assert not any(v.provisional for v in second.claims)
    assert second.rows.height == 12 * 2 * 2 * 3


def test_frames_have_plain_columns_whatever_trials_return():
    frame = make_frame([{"a": 1, "b": "x"}, {"a": 2.5, "c": [1, 2]}, {"b": 3, "d": True}, {"a": None, "d": 2}])
    assert frame["a"].to_list() == [1.0, 2.5, None, None]
    assert frame["b"].to_list() == ["x", None, "3", None]
    assert frame["c"].to_list() == [None, "[1, 2]", None, None]
    assert frame["d"].to_list() == [None, None, 1.0, 2.0]


def test_trials_without_rows_are_counted_apart_from_those_that_failed(monkeypatch):
    from tests.evidence.studies import estimating

    whole = estimating.STUDY.trial

    def some(workload, ctx, **condition):
        if condition["size"] == 50:
            return []
        if ctx.seed == 0:
            raise RuntimeError("broken")
        return whole(workload, ctx, **condition)

    monkeypatch.setattr(estimating, "STUDY", dataclasses.replace(estimating.STUDY, trial=some))
    assert smoke().answer.startswith("12 of 12 trials ran, 3 of them failed and 6 had nothing to measure; ")


# --- the user's own: what is told ---------------------------------------------------------------------------------------


def test_a_settled_workload_is_told_and_nothing_runs():
    result = smoke(OWN_DATA, on=np.full(3, 7.0))
    assert "all three values are 7" in result.answer
    assert result.rows.height == 0
    assert result.claims == []
    assert result.component() == 7.0


def test_a_workload_that_cannot_be_opened_is_told_before_anything_runs(tmp_path):
    table = tmp_path / "mine.csv"
    table.write_text("a,y\nx,1\n,3\n")
    for options in ({}, {"dry_run": True}):
        with pytest.raises(SpecError, match="'x'"):
            smoke(OWN_DATA, on=f"{table}:x", **options)


def test_a_users_method_is_compared_with_the_method_by_name():
    result = check(ESTIMATING, seeds=12, claims=[1], with_={"zero": lambda sample: 1e-9}, jobs=1, quiet=True)
    assert "zero" in set(result.rows["estimator"])
    (note,) = [note for note in result.notes if note.startswith("against zero alone")]
    assert "Keep the zero" in note


def test_the_reproduction_is_a_command_for_specs_and_a_call_for_objects():
    assert smoke(seeds=2).command == f"cameraready run {ESTIMATING} --tier smoke --seeds 2"
    assert smoke(OWN_DATA, on=np.arange(9.0)).command == f"cameraready.check({OWN_DATA!r}, on=..., tier='smoke')"


@pytest.mark.parametrize(("value", "kind"), [("abc", "a number"), (True, "a number"), ({"a": 1}, "a number")])
def test_a_value_of_another_kind_is_refused(value, kind):
    with pytest.raises(UsageError, match=f"size is {kind} in the plan"):
        smoke(set={"size": value})


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (lambda tier, workload: None, "must return or yield dicts, got NoneType"),
        (lambda tier, workload: ["a"], "must yield dicts of JSON values, got 'a'"),
        (lambda tier, workload: [{"size": np.int64(3)}], "conditions hold JSON values"),
    ],
)
def test_a_plan_that_is_no_plan_is_refused(plan, sentence, monkeypatch):
    from tests.evidence.studies import estimating

    monkeypatch.setattr(estimating, "STUDY", dataclasses.replace(estimating.STUDY, plan=plan))
    with pytest.raises(UsageError, match=sentence):
        smoke()


def test_a_method_that_no_condition_names_is_refused(monkeypatch):
    from tests.evidence.studies import estimating

    monkeypatch.setattr(estimating, "STUDY", dataclasses.replace(estimating.STUDY, method="winsorised"))
    with pytest.raises(UsageError, match="names 'winsorised' as its method, but plans only mean, median, trimmed"):
        smoke()
