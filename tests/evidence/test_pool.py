"""Trials that behave badly are recorded and hurt no other; stops are clean; nothing is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from cameraready.evidence.execution.ledger import Ledger
from cameraready.evidence.execution.pool import Summary, prepare_workloads, run_trials
from cameraready.evidence.execution.storable import load_arrays
from cameraready.evidence.execution.worker import Job
from cameraready.evidence.outcomes import Outcome, Trial
from tests.evidence.studies.spec import PlainSpec

STUDY = "tests.evidence.studies.conduct:STUDY"
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
posix_only = pytest.mark.skipif(os.name != "posix", reason="needs process groups")


def make_job(*workloads: str, **changes: Any) -> Job:
    specs = {name: PlainSpec(name) for name in workloads or ("plain",)}
    return Job(**{"study": STUDY, "specs": specs, "timeout": 60.0, **changes})


def make_trials(
    *conditions: dict[str, Any], workload: str = "plain", alone: bool = False, seed: int = 0
) -> list[Trial]:
    made = []
    for condition in conditions:
        key = json.dumps([condition, workload, alone, seed])
        arm = condition.get("does", "")
        made.append(Trial(key, "conduct", workload, condition, seed, arm, str(len(made)), alone))
    return made


def counts(n: int) -> list[dict[str, Any]]:
    return [{"does": "count", "value": number} for number in range(n)]


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(tmp_path / "ledger.sqlite") as opened:
        yield opened


Go = Callable[..., tuple[list[Outcome], Summary]]


@pytest.fixture
def go(ledger: Ledger) -> Iterator[Go]:
    """Runs trials and returns their outcomes as the ledger has them; at the end no process may be left."""

    def run(trials: Sequence[Trial], job: Job | None = None, **options: Any) -> tuple[list[Outcome], Summary]:
        summary = run_trials(trials, job or make_job(), ledger, 1, **{"jobs": 2, **options})
        found = ledger.outcomes(trial.key for trial in trials)
        return [found[trial.key] for trial in trials if trial.key in found], summary

    # A browser of other tests, for one, and whatever it starts meanwhile.
    before = set(psutil.Process().children(recursive=True))
    yield run
    left = [
        child
        for child in psutil.Process().children(recursive=True)
        if "resource_tracker" not in " ".join(child.cmdline()) and before.isdisjoint([child, *child.parents()])
    ]
    assert left == []


def test_rows_come_back_as_they_were_computed(go: Go) -> None:
    trials = make_trials(*counts(20), {"does": "rows", "value": 3})
    outcomes, summary = go(trials)
    assert [outcome.rows for outcome in outcomes[:20]] == [
        [{"value": number, "square": number**2, "seed_seen": 0}] for number in range(20)
    ]
    assert outcomes[20].rows == [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 0.5}, {"step": 2, "loss": 1 / 3}]
    assert (summary.done, summary.failed, summary.skipped, summary.remaining) == (21, 0, 0, 0)
    assert not summary.interrupted
    assert not summary.ran_out


def test_what_the_ledger_holds_is_not_run_again(go: Go, tmp_path: Path) -> None:
    file = tmp_path / "log"
    conditions = [{"does": "count_on_file", "value": number, "file": str(file)} for number in range(10)]
    go(make_trials(*conditions[:6]))
    _, summary = go(make_trials(*conditions, *conditions))
    assert (summary.done, summary.skipped) == (4, 6)
    assert sorted(file.read_text().split(), key=int) == [str(number) for number in range(10)]


def test_bad_trials_are_recorded_and_hurt_no_other(go: Go) -> None:
    bad = [
        ({"does": "raise", "value": 7}, "raised", r"ZeroDivisionError: divided 7 by zero"),
        ({"does": "leave"}, "raised", "SystemExit: 3"),
        ({"does": "exit", "value": 5}, "died", "ended by itself with exit status 5"),
        ({"does": "crash"}, "died", "ended by SIGSEGV"),
        ({"does": "hang"}, "timeout", "ended after 1 s, its limit"),
        ({"does": "hoard", "value": 900}, "memory", "MemoryError"),
        ({"does": "no such thing"}, "raised", "KeyError: 'do_no such thing'"),
        ({"unknown": 1}, "raised", "unexpected keyword argument 'unknown'"),
    ]
    conditions = []
    for number, (condition, _, _) in enumerate(bad):
        conditions += [condition, *[{"does": "count", "value": 100 * number + each} for each in range(5)]]
    trials = make_trials(*conditions)
    outcomes, summary = go(trials, make_job(timeout=1.0, memory=0.5))
    by_key = {outcome.key: outcome for outcome in outcomes}
    for (_, status, message), trial in zip(bad, make_trials(*[each[0] for each in bad]), strict=True):
        assert by_key[trial.key].status == status, by_key[trial.key].error
        assert message in by_key[trial.key].error
        assert not by_key[trial.key].rows
    good = [by_key[trial.key] for trial in trials if trial.condition.get("does") == "count"]
    assert [(outcome.status, outcome.error) for outcome in good] == [("done", "")] * len(good)
    assert summary.failed == len(bad)
    assert summary.done == 5 * len(bad)
    crash = by_key[make_trials({"does": "crash"})[0].key]
    assert "do_crash" in crash.error  # the stack, although the process was gone at once
    assert "do_hang" in by_key[make_trials({"does": "hang"})[0].key].error


def test_only_deaths_are_tried_again(go: Go) -> None:
    trials = make_trials({"does": "raise"}, {"does": "exit", "value": 1}, *counts(2))
    go(trials)
    _, summary = go(trials)
    assert (summary.skipped, summary.failed) == (3, 1)


@linux_only
@pytest.mark.parametrize("does", ["hoard_in_child", "hoard_shared"])
def test_memory_that_the_kernel_does_not_deny_counts(go: Go, does: str) -> None:
    outcomes, _ = go(make_trials({"does": does, "value": 900}, *counts(3)), make_job(memory=0.5), jobs=1)
    assert [outcome.status for outcome in outcomes] == ["memory", "done", "done", "done"]
    assert "allowed were" in outcomes[0].error


@linux_only
def test_peak_memory_is_that_of_the_trial(go: Go) -> None:
    conditions = [{"does": "touch", "value": 300}, {"does": "count"}, {"does": "touch", "value": 100}]
    shared, _ = go(make_trials(*conditions), jobs=1)
    alone, _ = go(make_trials(*conditions, alone=True))
    for peaks in ([outcome.peak_mb for outcome in each] for each in (shared, alone)):
        assert 290 < peaks[0] - peaks[1] < 310
        assert 190 < peaks[0] - peaks[2] < 210


@linux_only
def test_peak_memory_does_not_inherit_that_of_the_driver(go: Go) -> None:
    ballast = bytearray(600 * 2**20)
    ballast[:: 2**12] = b"x" * len(ballast[:: 2**12])
    outcomes, _ = go(make_trials({"does": "count"}, alone=True))
    assert outcomes[0].peak_mb < 500


@posix_only
def test_a_trial_that_blocks_its_interpreter_is_ended_with_all_it_started(go: Go, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    conditions = [{"does": "leave_child", "file": str(file)}, {"does": "hang_hard"}, *counts(3)]
    outcomes, _ = go(make_trials(*conditions), make_job(timeout=4.0))  # enough for a child to start on a busy machine
    assert [outcome.status for outcome in outcomes] == ["timeout", "timeout", "done", "done", "done"]
    assert "do_hang_hard" in outcomes[1].error
    assert not any(psutil.pid_exists(int(pid)) for pid in file.read_text().split())


def test_a_workload_that_does_not_open_is_told_for_each_of_its_trials_and_tried_again_later(go: Go) -> None:
    trials = [*make_trials(*counts(4), workload="closed"), *make_trials(*counts(4))]
    outcomes, summary = go(trials, make_job("plain", "closed"))
    assert [outcome.status for outcome in outcomes] == ["raised"] * 4 + ["done"] * 4
    assert all("workload 'closed' did not open" in outcome.error for outcome in outcomes[:4])
    assert all("FileNotFoundError: this workload is closed" in outcome.error for outcome in outcomes[:4])
    _, summary = go(trials, make_job("plain", "closed"))
    assert (summary.skipped, summary.failed) == (4, 4)


def test_a_workload_that_kills_the_process_is_given_up(go: Go) -> None:
    trials = [*make_trials(*counts(30), workload="deadly"), *make_trials(*counts(4))]
    outcomes, _ = go(trials, make_job("plain", "deadly"))
    assert {outcome.status for outcome in outcomes[:30]} == {"died", "raised"}
    assert all("opening workload 'deadly' was ended by SIGSEGV" in outcome.error for outcome in outcomes[:30])
    assert [outcome.status for outcome in outcomes[30:]] == ["done"] * 4


def test_a_workload_for_which_there_is_room_only_once_is_worked_on_by_one(go: Go, tmp_path: Path) -> None:
    (tmp_path / "room").write_text("")
    trials = make_trials(*[{"does": "span", "value": 0.02 + number / 10_000} for number in range(200)], workload="big")
    specs = {"big": PlainSpec(f"big:{tmp_path / 'room'}")}
    outcomes, summary = go(trials, make_job(specs=specs))
    assert [outcome.status for outcome in outcomes] == ["done"] * 200
    assert len({outcome.rows[0]["pid"] for outcome in outcomes}) == 1
    assert len(summary.notes) == 1
    assert "a worker process less was used" in summary.notes[0]
    assert "opening workload 'big' was ended by SIGKILL" in summary.notes[0]


def test_a_study_that_does_not_import_is_told(go: Go) -> None:
    outcomes, _ = go(make_trials(*counts(2)), make_job(study="tests.evidence.studies.absent:STUDY"))
    assert all("No module named 'tests.evidence.studies.absent'" in outcome.error for outcome in outcomes)
    outcomes, _ = go(make_trials(*counts(2)), make_job(study="tests.evidence.studies.conduct:ABSENT"))
    assert all("has no study named 'ABSENT'" in outcome.error for outcome in outcomes)


def test_trials_that_are_alone_run_last_one_by_one_each_in_a_new_process(go: Go) -> None:
    conditions = [{"does": "span", "value": 0.05 + number / 1000} for number in range(3)]
    trials = [*make_trials(*conditions, alone=True), *make_trials(*conditions)]
    outcomes, _ = go(trials)
    rows = [outcome.rows[0] for outcome in outcomes]
    alone, shared = rows[:3], rows[3:]
    assert len({row["pid"] for row in alone} | {row["pid"] for row in shared}) == 3 + len(
        {row["pid"] for row in shared}
    )
    assert max(row["ended"] for row in shared) < alone[0]["began"]
    assert alone[0]["ended"] < alone[1]["began"] < alone[1]["ended"] < alone[2]["began"]


def test_a_workload_is_opened_once_in_a_process_and_threads_are_held_to_one(go: Go) -> None:
    outcomes, _ = go(make_trials(*[{"does": "who", "value": number} for number in range(8)]))
    rows = [outcome.rows[0] for outcome in outcomes]
    assert all(row["pid"] == row["opened_by"] != os.getpid() for row in rows)
    assert all(row["omp"] == "1" for row in rows)


def test_workers_print_nowhere_and_scratch_folders_go(go: Go, capfd: pytest.CaptureFixture[str]) -> None:
    outcomes, _ = go(
        make_trials(*[{"does": does, "value": n} for does in ("print", "scratch") for n in range(2)], {"does": "exit"})
    )
    assert capfd.readouterr() == ("", "")
    scratch = [outcome.rows[0] for outcome in outcomes[2:4]]
    assert all(row["empty"] for row in scratch)
    assert not any(Path(row["folder"]).exists() or Path(row["folder"]).parent.exists() for row in scratch)


def test_last_words_of_a_dying_worker_are_those_of_its_trial(go: Go) -> None:
    outcomes, _ = go(make_trials({"does": "print"}, {"does": "crash"}), jobs=1)
    assert "noise" not in outcomes[1].error


def test_the_environment_of_the_driver_is_as_before(go: Go) -> None:
    before = dict(os.environ)
    go(make_trials(*counts(2)))
    assert dict(os.environ) == before


def test_own_arms_travel_by_value(go: Go) -> None:
    class Local:
        def __init__(self, factor: int) -> None:
            self.factor = factor

        def __call__(self, value: int) -> int:
            return self.factor * value

    job = make_job(own={"mine": Local(3), "lambda": lambda x: x + 1})
    outcomes, _ = go(make_trials({"does": "own", "value": 5}), job)
    assert outcomes[0].rows == [{"theirs": -5, "mine": 15, "lambda": 6}]
    outcomes, _ = go(make_trials({"does": "own", "value": 6}), make_job(own=job.own, without=frozenset({"theirs"})))
    assert outcomes[0].rows == [{"mine": 18, "lambda": 7}]


def test_what_cannot_be_sent_is_named_and_runs_in_this_process(go: Go) -> None:
    lock = threading.Lock()
    job = make_job(own={"fine": abs, "locked": lambda value: value if lock else 0})
    with pytest.raises(TypeError, match="own method 'locked' cannot be sent to worker processes"):
        go(make_trials({"does": "own", "value": 5}), job)
    outcomes, _ = go(make_trials({"does": "own", "value": 5}), job, in_process=True)
    assert outcomes[0].rows == [{"theirs": -5, "fine": 5, "locked": 5}]


@pytest.mark.parametrize("in_process", [True, False])
def test_in_process_and_in_workers_agree(go: Go, ledger: Ledger, in_process: bool) -> None:
    trials = make_trials(
        *counts(3), {"does": "raise"}, {"does": "rows", "value": 2}, {"does": "return", "value": "special"}, seed=4
    )
    outcomes, summary = go(trials, in_process=in_process)
    assert [outcome.status for outcome in outcomes] == ["done"] * 3 + ["raised"] + ["done"] * 2
    assert outcomes[2].rows == [{"value": 2, "square": 4, "seed_seen": 4}]
    assert outcomes[3].error.endswith("ZeroDivisionError: divided 0 by zero")
    assert str(outcomes[5].rows) == "[{'nan': nan, 'inf': inf, 'ninf': -inf, 'zero': -0.0, 'none': None}]"
    assert (summary.done, summary.failed) == (5, 1)


def test_the_driver_hears_of_each_outcome_after_it_is_safe(ledger: Ledger, tmp_path: Path) -> None:
    heard = []

    def hear(trial: Trial, outcome: Outcome) -> None:
        with Ledger.open(ledger.path) as another:
            heard.append((trial.key, another.outcomes([trial.key])[trial.key] == outcome))

    trials = make_trials(*counts(6), {"does": "raise"})
    run_trials(trials, make_job(), ledger, 1, jobs=2, on_outcome=hear)
    assert sorted(heard) == sorted((trial.key, True) for trial in trials)


def test_an_error_in_the_driver_ends_the_workers(go: Go) -> None:
    def fail(trial: Trial, outcome: Outcome) -> None:
        raise RuntimeError("the display broke")

    with pytest.raises(RuntimeError, match="the display broke"):
        go(make_trials(*counts(5), {"does": "hang"}), on_outcome=fail)


@pytest.mark.parametrize("in_process", [True, False])
def test_cancelling_keeps_what_has_finished(go: Go, in_process: bool) -> None:
    cancel = threading.Event()
    seen = []

    def hear(trial: Trial, outcome: Outcome) -> None:
        seen.append(outcome)
        if len(seen) == 5:
            cancel.set()

    outcomes, summary = go(make_trials(*counts(500)), cancel=cancel, on_outcome=hear, in_process=in_process)
    assert summary.interrupted
    assert len(outcomes) == len(seen) == summary.done
    assert 5 <= summary.done <= 10
    assert summary.remaining == 500 - summary.done
    outcomes, summary = go(make_trials(*counts(20)))
    assert len(outcomes) == 20
    assert summary.remaining == 0


def test_a_run_may_be_driven_from_any_thread(go: Go) -> None:
    # Linux ends a worker when the thread that started it ends; here that thread lives for the run alone.
    found = []
    trials = make_trials(*counts(30), {"does": "exit", "value": 1}, {"does": "count", "value": 99})

    def drive() -> None:
        found.append(go(trials)[1])

    for _ in range(2):
        thread = threading.Thread(target=drive)
        thread.start()
        thread.join()
    assert (found[0].done, found[0].failed) == (31, 1)
    assert (found[1].skipped, found[1].failed) == (31, 1)


def test_out_of_time_starts_nothing_more_but_trials_that_are_alone_have_their_share(go: Go) -> None:
    conditions = [{"does": "span", "value": 0.3 + number / 1000} for number in range(40)]
    trials = [*make_trials(*conditions), *make_trials(*conditions[:1], alone=True)]
    outcomes, summary = go(trials, minutes=0.1)
    assert summary.ran_out
    assert not summary.interrupted
    assert 0 < summary.done < 41
    assert summary.remaining == 41 - summary.done
    assert outcomes[-1].key == trials[-1].key


def test_a_trial_that_overruns_the_time_of_the_run_is_cut_off_and_not_recorded(go: Go) -> None:
    outcomes, summary = go(make_trials({"does": "hang"}), minutes=0.02)
    assert outcomes == []
    assert summary.ran_out
    assert (summary.done, summary.failed, summary.remaining) == (0, 0, 1)


def test_preparing_makes_arrays_once_and_trials_see_them(go: Go, tmp_path: Path) -> None:
    job = make_job("plain", "objects", "unready", "closed")
    digests = {name: name for name in job.specs}
    told = []
    paths, errors = prepare_workloads(
        job, digests, tmp_path / "cache", jobs=2, on_prepared=lambda *told_: told.append(told_)
    )
    assert set(paths) == {"plain"}
    assert "objects" in errors
    assert "dtype object" in errors["objects"]
    assert "ValueError: cannot be prepared" in errors["unready"]
    assert "FileNotFoundError" in errors["closed"]
    assert dict(told) == {"plain": "", **errors}
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["plain.npz"]
    assert load_arrays(paths["plain"])["names"].tolist() == ["a", "b"]

    made = paths["plain"].stat().st_mtime_ns
    for in_process in (False, True):
        again, errors = prepare_workloads(job, {"plain": "plain"}, tmp_path / "cache", in_process=in_process)
        assert again == paths
        assert errors == {}
    assert paths["plain"].stat().st_mtime_ns == made
    outcomes, _ = go(make_trials({"does": "return", "value": "prepared"}), make_job(prepared=paths))
    assert outcomes[0].rows == [{"total": 10.0}]


@posix_only
def test_a_full_disk_ends_the_run_with_a_sentence_and_keeps_what_was_recorded(tmp_path: Path) -> None:
    script = """
import resource, signal, sys
from cameraready.evidence.execution.ledger import Ledger, LedgerError
from cameraready.evidence.execution.pool import run_trials
from tests.evidence.test_pool import make_job, make_trials, counts
with Ledger.open(sys.argv[1]) as ledger:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
    told = []
    try:
        run_trials(make_trials(*counts(300)), make_job(), ledger, 1, jobs=2, on_outcome=lambda t, o: told.append(t))
    except LedgerError as error:
        print(len(told), error)
"""
    path = tmp_path / "ledger.sqlite"
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    told, _, sentence = done.stdout.partition(" ")
    assert "could not be written" in sentence
    with Ledger.open(path) as ledger:
        assert ledger.count() == int(told) > 10
