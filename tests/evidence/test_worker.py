"""What a worker makes of a trial: scalars only, clear complaints, nothing pickled."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cameraready.evidence.execution.storable import load_arrays, plain_rows, rows_of, save_arrays
from cameraready.evidence.execution.worker import Job, Stage, load_study
from cameraready.evidence.outcomes import Outcome, Trial
from cameraready.evidence.peers import environments
from cameraready.evidence.peers.remote import PeerUnavailable, Remote
from cameraready.evidence.study import Peer, Study
from tests.evidence.studies.spec import PlainSpec

RunOne = Callable[..., Outcome]


@pytest.fixture
def run_one(tmp_path: Path) -> RunOne:
    def run(does: str, value: Any = 0, **job: Any) -> Outcome:
        stage = Stage(Job("tests.evidence.studies.conduct:STUDY", {"plain": PlainSpec("plain")}, **job), tmp_path)
        return stage.run(Trial("k", "conduct", "plain", {"does": does, "value": value}, 3, does, "0"))

    return run


def test_scalars_of_numpy_become_those_of_python(run_one: RunOne) -> None:
    row = dict(run_one("return", "scalars").rows[0])
    assert row == {"a": float(np.float32(0.1)), "b": 3, "c": True, "d": 2.5, "e": "x"}
    assert [type(value) for value in row.values()] == [float, int, bool, float, str]


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("array", "a of type ndarray; a row holds numbers, strings, booleans and None"),
        ("complex", "a of type complex"),
        ("huge", "does not fit 64 bits"),
        ("engine", "a column 'status', which the engine fills itself"),
        ("contradiction", "value='another', but its condition says value='contradiction'"),
    ],
)
def test_what_a_row_cannot_hold_is_told(run_one: RunOne, value: str, complaint: str) -> None:
    outcome = run_one("return", value)
    assert outcome.status == "raised"
    assert complaint in outcome.error
    assert outcome.final


@pytest.mark.parametrize("returned", [None, 3, 0.5, "text", b"bytes", np.float64(2.0)])
def test_what_is_no_row_is_told(returned: Any) -> None:
    with pytest.raises(TypeError, match=r"^the trial returned .*; a trial returns a dict, or several$"):
        rows_of(returned)
    with pytest.raises(TypeError, match="among its rows; a trial returns a dict, or several"):
        rows_of([{"a": 1}, returned])


def test_an_empty_list_is_done(run_one: RunOne) -> None:
    outcome = run_one("return", "nothing")
    assert outcome.status == "done"
    assert list(outcome.rows) == []


def test_rows_may_repeat_their_condition() -> None:
    condition = {"budget": 10, "share": math.nan, "arms": ["a", "b"]}
    rows = plain_rows([{"budget": np.int64(10), "share": float("nan"), "error": 0.5}], condition)
    assert rows[0]["budget"] == 10
    with pytest.raises(ValueError, match="its condition says budget=10"):
        plain_rows([{"budget": 11}], condition)


def test_a_traceback_begins_in_the_study(run_one: RunOne) -> None:
    outcome = run_one("raise", 7)
    assert "worker.py" not in outcome.error
    assert "conduct.py" in outcome.error
    assert outcome.error.endswith("ZeroDivisionError: divided 7 by zero")


def test_the_chain_of_causes_tells_memory_from_other_errors(tmp_path: Path) -> None:
    def out_of_memory(kind: str) -> Any:
        try:
            raise MemoryError if kind == "chained" else ValueError("fine")
        except (MemoryError, ValueError) as error:
            text = {"torch": "[enforce fail] DefaultCPUAllocator: can't allocate memory", "boost": "std::bad_alloc"}
            raise RuntimeError(text.get(kind, "wrapped")) from error

    study = Study(
        open=lambda spec: None,
        workloads={"smoke": [], "desk": []},
        plan=lambda tier, workload: [],
        trial=lambda workload, ctx, kind: out_of_memory(kind),
        method="m",
        arms="kind",
        block="seed",
    )
    stage = Stage(Job(study, {"plain": PlainSpec("plain")}), tmp_path)
    kinds = ("chained", "torch", "boost", "other")
    found = [stage.run(Trial(kind, "m", "plain", {"kind": kind}, 0, "", "")).status for kind in kinds]
    assert found == ["memory", "memory", "memory", "raised"]


def test_the_context_says_what_the_job_says(tmp_path: Path) -> None:
    def look(workload: Any, ctx: Any) -> dict[str, Any]:
        return {
            "seed_seen": ctx.seed,
            "device": ctx.device,
            "dtype": ctx.dtype,
            "own_workload": ctx.is_own_workload,
            "left": 0 < ctx.time_left() <= 5.0,
            "scratch": ctx.scratch.is_dir() and not any(ctx.scratch.iterdir()),
            "arms": " ".join(ctx.select({"a": 1, "b": 2})),
            "workload_opened": workload,
        }

    study = Study(
        open=lambda spec: spec.text.upper(),
        workloads={"smoke": [], "desk": []},
        plan=lambda tier, workload: [],
        trial=look,
        method="m",
        arms="arm",
        block="seed",
    )
    job = Job(
        study,
        {"shipped": PlainSpec("shipped"), "theirs": PlainSpec("theirs")},
        own_workloads=frozenset({"theirs"}),
        own={"mine": 3},
        without=frozenset({"a"}),
        device="cuda:1",
        dtype="float32",
        timeout=5.0,
    )
    stage = Stage(job, tmp_path)
    rows = [stage.run(Trial(name, "m", name, {}, 7, "", "")).rows[0] for name in ("shipped", "theirs")]
    common = {"seed_seen": 7, "device": "cuda:1", "dtype": "float32", "left": True, "scratch": True, "arms": "b mine"}
    assert rows[0] == {**common, "own_workload": False, "workload_opened": "SHIPPED"}
    assert rows[1] == {**common, "own_workload": True, "workload_opened": "THEIRS"}
    stage.close()
    assert list(tmp_path.iterdir()) == []


def test_a_workload_that_does_not_open_is_asked_for_once(tmp_path: Path) -> None:
    asked = []

    def open_workload(spec: Any) -> None:
        asked.append(spec.text)
        raise ConnectionError("the hub did not answer")

    study = Study(
        open=open_workload,
        workloads={"smoke": [], "desk": []},
        plan=lambda tier, workload: [],
        trial=lambda workload, ctx: {},
        method="m",
        arms="arm",
        block="seed",
    )
    stage = Stage(Job(study, {"far": PlainSpec("far")}), tmp_path)
    outcomes = [stage.run(Trial(str(number), "m", "far", {}, 0, "", "")) for number in range(3)]
    assert asked == ["far"]
    assert all("ConnectionError: the hub did not answer" in outcome.error and not outcome.final for outcome in outcomes)


def test_a_peer_is_opened_once_before_the_clock_starts_and_anew_when_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def open_here(peer: Peer, folder: Path) -> Remote:
        opened.append(peer.name)
        time.sleep(0.3)  # peers take a while to start
        return Remote(peer.name, Path(sys.executable), folder / peer.script)

    monkeypatch.setattr(environments, "open_peer", open_here)
    stage = Stage(Job("tests.evidence.studies.peering", {"plain": PlainSpec("plain")}), tmp_path)
    conditions = [{"arm": "theirs"}, {"arm": "theirs"}, {"arm": "theirs", "breaks": True}, {"arm": "theirs"}]
    outcomes = [stage.run(Trial(str(n), "m", "plain", each, 0, "theirs", "")) for n, each in enumerate(conditions)]
    stage.close()
    assert [outcome.status for outcome in outcomes] == ["done", "done", "raised", "done"]
    assert outcomes[0].seconds < 0.3
    assert outcomes[0].rows == outcomes[1].rows
    assert "exited with status 9 in end_yourself()" in outcomes[2].error
    assert outcomes[3].rows[0]["answer"] == 42
    assert outcomes[3].rows[0]["pid"] != outcomes[0].rows[0]["pid"]
    assert opened == ["local", "local"]


@pytest.mark.parametrize("arm", ["theirs", ""])
def test_a_peer_that_cannot_be_had_says_nothing_about_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arm: str
) -> None:
    def cannot(peer: Peer, folder: Path) -> Remote:
        raise PeerUnavailable("no interpreter for it")

    monkeypatch.setattr(environments, "open_peer", cannot)
    stage = Stage(Job("tests.evidence.studies.peering", {"plain": PlainSpec("plain")}), tmp_path)
    outcome = stage.run(Trial("k", "m", "plain", {"arm": "theirs"}, 0, arm, ""))
    assert (outcome.status, outcome.final) == ("raised", False)
    assert "PeerUnavailable: no interpreter for it" in outcome.error


def test_arrays_round_trip_and_objects_are_refused(tmp_path: Path) -> None:
    arrays = {
        "floats": np.array([0.1, np.nan, -np.inf]),
        "flags": np.array([[True], [False]]),
        "names": np.array(["ä", ""]),
        "number": 3,
    }
    path = tmp_path / "deep" / "arrays.npz"
    save_arrays(arrays, path)
    found = load_arrays(path)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    with pytest.raises(TypeError, match="'things' with dtype object"):
        save_arrays({"things": np.array([{}])}, path)
    assert [each.name for each in path.parent.iterdir()] == ["arrays.npz"]
    np.savez(path, things=np.array([{}]))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        load_arrays(path)


def test_studies_are_found_by_reference() -> None:
    study = load_study("tests.evidence.studies.conduct:STUDY")
    assert study is load_study("tests.evidence.studies.conduct") is load_study(study)
    with pytest.raises(AttributeError, match="has no study named 'ELSE'"):
        load_study("tests.evidence.studies.conduct:ELSE")
