"""A large ledger is asked by index and read a few trials at a time; an older one is brought up to date without loss.

`tests.evidence.ledger_scale` shows what that comes to for a million trials.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tracemalloc
from itertools import islice
from pathlib import Path

import pytest

from cameraready.evidence.execution.ledger import Ledger, LedgerError
from cameraready.evidence.execution.ledger_schema import SCHEMA_VERSION
from cameraready.evidence.outcomes import Outcome, Trial
from tests.evidence import ledger_scale

N = 6_000

#: The first schema, as it was released.
SCHEMA_1 = """
CREATE TABLE runs (
    run INTEGER PRIMARY KEY, method TEXT NOT NULL, tier TEXT NOT NULL, command TEXT NOT NULL, environment TEXT NOT NULL,
    started REAL NOT NULL, ended REAL, status TEXT NOT NULL
);
CREATE TABLE trials (
    key TEXT PRIMARY KEY, method TEXT NOT NULL, workload TEXT NOT NULL, condition TEXT NOT NULL, seed INTEGER NOT NULL,
    arm TEXT NOT NULL, block TEXT NOT NULL, status TEXT NOT NULL, final INTEGER NOT NULL, rows TEXT NOT NULL,
    seconds REAL NOT NULL, peak_mb REAL NOT NULL, error TEXT NOT NULL, run INTEGER NOT NULL, finished REAL NOT NULL
);
PRAGMA application_id=1130458450;
PRAGMA user_version=1;
PRAGMA journal_mode=WAL;
INSERT INTO runs VALUES (1, 'm', 'desk', 'cameraready run m', '{"python": "3.11"}', 1.5, 2.5, 'done');
"""


def old_ledger(path: Path, n: int = 500) -> Path:
    connection = sqlite3.connect(path)
    connection.executescript(SCHEMA_1)
    connection.executemany(
        "INSERT INTO trials VALUES (?, 'm', 'w', '{\"budget\":10}', 3, 'a', '0', 'done', 1, ?, 0.25, 1.5, '', 1, 2.0)",
        ((f"{number:06d}", f'[{{"x":{number}}}]') for number in range(n)),
    )
    connection.commit()
    connection.close()
    return path


def content(path: Path) -> list[list[tuple[object, ...]]]:
    """Every value of every table."""
    connection = sqlite3.connect(path)
    try:
        return [connection.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall() for table in ("runs", "trials")]
    finally:
        connection.close()


def version(path: Path) -> int:
    connection = sqlite3.connect(path)
    try:
        return connection.execute("PRAGMA user_version").fetchone()[0]
    finally:
        connection.close()


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("large") / "ledger.sqlite"
    ledger_scale.build(path, N)
    return path


# --- asking ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "question", [q for q in ledger_scale.QUESTIONS if q not in ("rows of all", "check() (doctor)")]
)
def test_no_question_reads_the_table_of_trials_from_end_to_end(large, question):
    asked: list[str] = []
    with Ledger.open(large) as ledger:
        ledger._connection.set_trace_callback(asked.append)
        ledger_scale.QUESTIONS[question](ledger, N)
        ledger._connection.set_trace_callback(None)
        plans = [
            step
            for statement in asked
            if statement.startswith("SELECT")
            for *_, step in ledger._connection.execute(f"EXPLAIN QUERY PLAN {statement}")
            if "trials" in step
        ]
    if question != "open":
        assert plans
    assert all("INDEX" in step for step in plans), plans


def test_the_trials_of_a_run_or_a_method_come_with_all_that_was_recorded(tmp_path):
    recorded = {}
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        for number in range(450):  # more than are fetched at once
            key, method = str(number), f"m{number % 2}"
            trial = Trial(key, method, "w", {"budget": number}, number % 3, "arm", str(number % 5))
            outcome = Outcome(key, "done", [{"x": number, "y": float("inf")}, {"x": 1, "y": 2.0}], 0.5, 7.0)
            ledger.record(trial, outcome, run=number % 3)
            recorded[key] = (trial, outcome)

        def expected(wanted) -> dict[str, tuple[Trial, Outcome]]:
            return {key: found for key, found in recorded.items() if wanted(int(key))}

        def found(**which) -> dict[str, tuple[Trial, Outcome]]:
            trials = list(ledger.trials(**which))
            assert len(trials) == len({trial.key for trial, _ in trials})
            return {trial.key: (trial, outcome) for trial, outcome in trials}

        assert found() == recorded
        assert found(run=1) == expected(lambda number: number % 3 == 1)
        assert found(method="m1") == expected(lambda number: number % 2 == 1)
        assert found(run=0, method="m0") == expected(lambda number: number % 6 == 0)
        assert found(run=99) == found(method="nobody") == {}


def test_reading_all_trials_needs_no_more_memory_than_reading_a_few(large):
    def peak(n: int) -> int:
        with Ledger.open(large) as ledger:
            tracemalloc.start()
            try:
                assert sum(1 for _ in islice(ledger.trials(), n)) == n
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

    peak(10)
    assert peak(N) < 1.5 * peak(600)


def test_the_ledger_can_be_written_while_it_is_read_and_after_reading_was_given_up(large, tmp_path):
    with Ledger.open(large) as reader, Ledger.open(large) as writer:
        before = reader.count()
        trials = reader.trials()
        next(trials)
        writer.record(Trial("new", "m", "w", {}, 0, "", ""), Outcome("new", "done"), 1)
        assert sum(1 for _ in trials) == before - 1
        trials = reader.trials()
        next(trials)
        trials.close()
        assert writer.forget(["new"]) == 1
        assert reader.count() == before


# --- an older ledger ------------------------------------------------------------------------------------------------


def test_an_older_ledger_is_brought_up_to_date_and_loses_nothing(tmp_path):
    path = old_ledger(tmp_path / "ledger.sqlite")
    before = content(path)
    with Ledger.open(path) as ledger:
        assert ledger.count() == 500
        assert ledger.outcomes(["000007"])["000007"] == Outcome("000007", "done", [{"x": 7}], 0.25, 1.5)
        assert [(run.run, run.trials, run.status) for run in ledger.runs()] == [(1, 500, "done")]
        ledger.check()
        assert content(path) == before
    assert version(path) == SCHEMA_VERSION == 2


def test_an_upgraded_ledger_is_built_as_a_new_one_is(tmp_path):
    def schema(path: Path) -> set[tuple[str, str]]:
        with Ledger.open(path) as ledger:
            rows = ledger._connection.execute("SELECT name, coalesce(sql, '') FROM sqlite_master").fetchall()
        return {(name, " ".join(sql.split()).replace("( ", "(").replace(" )", ")")) for name, sql in rows}

    assert schema(old_ledger(tmp_path / "old.sqlite")) == schema(tmp_path / "new.sqlite")


OPENER = """
import sys
from cameraready.evidence.execution.ledger import Ledger
sys.stdin.readline()
with Ledger.open(sys.argv[1]) as ledger:
    print(ledger.count(), len(list(ledger.trials(run=1))))
"""


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_processes_that_open_an_older_ledger_at_once_all_get_it_whole(tmp_path):
    path = old_ledger(tmp_path / "ledger.sqlite", 8_000)
    before = content(path)
    openers = [start(OPENER, str(path)) for _ in range(3)]
    for opener in openers:
        opener.stdin.write("go\n")
        opener.stdin.flush()
    assert [opener.communicate(timeout=60) for opener in openers] == [("8000 8000\n", "")] * 3
    assert content(path) == before
    assert version(path) == SCHEMA_VERSION


UPGRADER = """
import os, signal, sys
from cameraready.evidence.execution.ledger import Ledger
from cameraready.evidence.execution import ledger_schema
# The last statement of the upgrade never ends: the process is killed in the middle of it.
steps = list(ledger_schema.STEPS)
steps[1] += "; SELECT pause()"
ledger_schema.STEPS = tuple(steps)
import sqlite3
usual = sqlite3.connect
def connect(*args, **options):
    connection = usual(*args, **options)
    connection.create_function("pause", 0, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return connection
sqlite3.connect = connect
Ledger.open(sys.argv[1])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_an_upgrade_that_is_killed_leaves_the_older_ledger_as_it_was(tmp_path):
    path = old_ledger(tmp_path / "ledger.sqlite", 8_000)
    before = content(path)
    assert subprocess.run([sys.executable, "-c", UPGRADER, str(path)]).returncode == -signal.SIGKILL
    assert version(path) == 1
    assert content(path) == before
    with Ledger.open(path) as ledger:  # and the next one does it
        assert ledger.count() == 8_000
    assert version(path) == SCHEMA_VERSION


FULL = """
import resource, signal, sys
from cameraready.evidence.execution.ledger import Ledger, LedgerError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    Ledger.open(sys.argv[1])
except LedgerError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on the size of files")
def test_an_upgrade_without_room_says_so_and_leaves_the_older_ledger_as_it_was(tmp_path):
    path = old_ledger(tmp_path / "ledger.sqlite", 8_000)
    before = content(path)
    ran = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True)
    assert "could not be written" in ran.stdout
    assert "Free some space" in ran.stdout
    assert version(path) == 1
    assert content(path) == before


@pytest.mark.skipif(os.name == "nt", reason="needs the write-ahead log to stay behind")
def test_a_newer_ledger_is_refused_also_where_its_version_is_still_in_the_log(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger.open(path).close()
    with sqlite3.connect(path) as holder:
        holder.execute("PRAGMA wal_autocheckpoint=0")
        holder.execute("PRAGMA user_version=99")
        holder.commit()
        with pytest.raises(LedgerError, match=rf"schema 99; this version reads {SCHEMA_VERSION}"):
            Ledger.open(path)
    holder.close()
