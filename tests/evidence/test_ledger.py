"""The ledger keeps what it is given, and never touches a file that it does not understand."""

from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cameraready.evidence.execution.ledger import Ledger, LedgerError, _pack, _unpack, default_path
from cameraready.evidence.outcomes import Outcome, Trial


def make_trial(key: str = "k", **changes: object) -> Trial:
    known = {"method": "m", "workload": "w", "condition": {"budget": 10}, "seed": 0, "arm": "a", "block": "0"}
    return Trial(key=key, **{**known, **changes})  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "ledger.sqlite"


def test_keeps_outcomes_exactly_over_reopening(path: Path) -> None:
    rows = [{"a": 0.1 + 0.2, "b": 2**53 + 1, "c": "ß\udc80\0", "d": None, "e": True}, {"a": 5e-324, "other": -0.0}]
    outcome = Outcome("k", "done", rows, 1 / 3, 2 / 3)
    with Ledger.open(path) as ledger:
        ledger.record(make_trial(), outcome, 1)
    with Ledger.open(path) as ledger:
        assert ledger.outcomes(["k", "absent"]) == {"k": outcome}
        assert math.copysign(1, ledger.outcomes(["k"])["k"].rows[1]["other"]) == -1


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text()


@given(
    st.lists(st.dictionaries(st.text(), scalars), max_size=5)
    | st.lists(st.fixed_dictionaries({"x": scalars, "y": scalars}))
)
def test_rows_round_trip(rows: list[dict[str, object]]) -> None:
    found = _unpack(_pack(rows))
    assert [list(row) for row in found] == [list(row) for row in rows]
    for before, after in zip(rows, found, strict=True):
        for name, value in before.items():
            assert type(after[name]) is type(value)
            assert after[name] == value or (value != value and after[name] != after[name])


def test_a_done_outcome_is_never_replaced_and_any_other_is(path: Path) -> None:
    found = []
    with Ledger.open(path) as ledger:
        for status in ("died", "timeout", "raised", "done", "died", "raised"):
            ledger.record(make_trial(), Outcome("k", status, [{"x": status}], error=status, final=status != "died"), 1)
            found.append(ledger.outcomes(["k"])["k"].status)
        assert found == ["died", "timeout", "raised", "done", "done", "done"]
        assert ledger.outcomes(["k"])["k"].rows == [{"x": "done"}]


def test_finished_leaves_out_what_the_next_run_tries_again(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.record(make_trial("a"), Outcome("a", "died", final=False), 1)
        ledger.record(make_trial("b"), Outcome("b", "raised", error="ValueError"), 1)
        assert set(ledger.finished("abc")) == {"b"}
        assert set(ledger.outcomes("abc")) == {"a", "b"}
        assert ledger.forget(["b", "c"]) == 1
        assert set(ledger.outcomes("abc")) == {"a"}


def test_many_keys_are_found_by_index(path: Path) -> None:
    keys = [f"{number:032x}" for number in range(5_000)]
    with Ledger.open(path) as ledger:
        ledger._connection.execute("BEGIN")
        for key in keys:
            ledger.record(make_trial(key), Outcome(key, "done", [{"x": key}]), 1)
        ledger._connection.execute("COMMIT")
        found = ledger.finished([*keys, "absent"])
        assert len(found) == ledger.count() == len(keys)
        assert all(found[key].rows == [{"x": key}] for key in keys)
        plan = ledger._connection.execute(
            "EXPLAIN QUERY PLAN SELECT rows FROM trials WHERE key IN (?, ?)", ("a", "b")
        ).fetchall()
        assert all("USING INDEX" in row[-1] for row in plan)


def test_runs_are_noted(path: Path) -> None:
    with Ledger.open(path) as ledger:
        first = ledger.start_run("oddshap", "desk", "cameraready run oddshap", {"python": "3.11"})
        second = ledger.start_run("other", "smoke", "", {})
        ledger.record(make_trial(), Outcome("k", "done", [{"x": 1}]), first)
        ledger.end_run(first, "done")
        found = ledger.runs()
        assert [(run.run, run.status, run.trials) for run in found] == [(first, "done", 1), (second, "running", 0)]
        assert found[0].environment == {"python": "3.11"}
        assert found[0].ended is not None
        assert found[0].ended >= found[0].started
        assert [run.run for run in ledger.runs("other")] == [second]


def test_an_outcome_of_another_trial_is_refused(path: Path) -> None:
    with Ledger.open(path) as ledger, pytest.raises(ValueError, match="trial b was to be recorded as that of trial a"):
        ledger.record(make_trial("a"), Outcome("b", "done"), 1)


def test_the_error_of_a_failed_trial_is_kept_at_both_ends(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.record(make_trial(), Outcome("k", "raised", error="begin" + "x" * 10**6 + "end"), 1)
        error = ledger.outcomes(["k"])["k"].error
    assert error.startswith("begin")
    assert error.endswith("end")
    assert len(error) < 30_000


def test_home_is_where_the_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path / "here"))
    assert default_path() == tmp_path / "here" / "ledger.sqlite"
    with Ledger.open() as ledger:
        assert ledger.path == default_path()
    monkeypatch.delenv("CAMERAREADY_HOME")
    assert default_path().parent.name == "cameraready"


def foreign_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.execute("INSERT INTO bookmarks VALUES ('https://example.org')")
    connection.commit()
    connection.close()


def foreign_database_in_wal(path: Path) -> None:
    foreign_database(path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.close()


def newer_ledger(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger._connection.execute("PRAGMA user_version=99")


def text_file(path: Path) -> None:
    path.write_text("a,b\n1,2\n")


def long_text_file(path: Path) -> None:
    path.write_text("a,b\n1,2\n" * 1000)


def broken_header(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.record(make_trial(), Outcome("k", "done"), 1)
    content = bytearray(path.read_bytes())
    content[:16] = b"\0" * 16
    path.write_bytes(content)


def missing_tables(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger._connection.execute("DROP TABLE trials")


def torn_pages(path: Path) -> None:
    with Ledger.open(path) as ledger:
        for number in range(200):
            ledger.record(make_trial(str(number)), Outcome(str(number), "done", [{"x": "y" * 200}]), 1)
    content = bytearray(path.read_bytes())
    content[4096:12288] = b"\xaa" * 8192
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    torn_pages(path)
    path.write_bytes(path.read_bytes()[:5000])


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (foreign_database, "another program's SQLite file"),
        (foreign_database_in_wal, "another program's SQLite file"),
        (newer_ledger, r"written by a newer cameraready \(schema 99; this version reads 2\)"),
        (text_file, "not a ledger"),
        (long_text_file, "not a ledger"),
        (broken_header, "not a ledger"),
        (missing_tables, "is damaged"),
        (torn_pages, "is damaged"),
        (cut_short, "is damaged"),
    ],
)
def test_what_is_no_ledger_of_ours_is_refused_and_left_as_it_is(path: Path, spoil, complaint: str) -> None:
    path.parent.mkdir()
    spoil(path)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=complaint) as caught:
        Ledger.open(path)
    assert "--ledger" in str(caught.value)
    assert path.read_bytes() == before


def test_damage_inside_is_found_when_it_is_read(path: Path) -> None:
    with Ledger.open(path) as ledger:
        for number in range(2_000):
            ledger.record(make_trial(f"{number:05d}"), Outcome(f"{number:05d}", "done", [{"x": "y" * 200}]), 1)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2 // 4096 * 4096
    content[middle : middle + 40960] = b"\xaa" * 40960
    path.write_bytes(content)
    with Ledger.open(path) as ledger, pytest.raises(LedgerError, match="is damaged"):
        ledger.check()
    with Ledger.open(path) as ledger, pytest.raises(LedgerError, match="is damaged"):
        ledger.finished(f"{number:05d}" for number in range(2_000))
    assert path.read_bytes() == content


def test_a_folder_or_a_forbidden_place_gives_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="cannot be opened"):
        Ledger.open(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(LedgerError, match="cannot be opened"):
        Ledger.open(tmp_path / "file" / "ledger.sqlite")


def test_an_empty_file_becomes_a_ledger(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    with Ledger.open(path) as ledger:
        assert ledger.count() == 0


WRITER = """
import sys
from cameraready.evidence.execution.ledger import Ledger
from cameraready.evidence.outcomes import Outcome, Trial
path, name = sys.argv[1:]
with Ledger.open(path) as ledger:
    print("open", flush=True)
    sys.stdin.readline()
    run = ledger.start_run("m", "desk", name, {})
    for number in range(300):
        key = f"{name}{number}" if number % 2 else f"both{number}"
        ledger.record(Trial(key, "m", "w", {}, 0, "", ""), Outcome(key, "done", [{"by": name, "x": number}]), run)
    ledger.end_run(run, "done")
"""


def test_writers_at_once_lose_nothing(path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for name in ("one", "two", "three")
    ]
    for writer in writers:  # all three may be making the file at this moment
        assert writer.stdout.readline() == b"open\n"
    for writer in writers:
        writer.stdin.write(b"go\n")
        writer.stdin.close()
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    for writer in writers:
        writer.stdout.close()
    with Ledger.open(path) as ledger:
        assert ledger.count() == 3 * 150 + 150
        assert [run.status for run in ledger.runs()] == ["done"] * 3
        ledger.check()


FILLER = """
import resource, signal, sys
from cameraready.evidence.execution.ledger import Ledger, LedgerError
from cameraready.evidence.outcomes import Outcome, Trial
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
number = 0
try:
    with Ledger.open(sys.argv[1]) as ledger:
        while True:
            key = str(number)
            ledger.record(Trial(key, "m", "w", {}, 0, "", ""), Outcome(key, "done", [{"x": "y" * 500}]), 1)
            number += 1
except LedgerError as error:
    print(number)
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on the size of files")
def test_a_full_disk_gives_a_sentence_and_leaves_a_readable_ledger(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FILLER, str(path)], capture_output=True, text=True, timeout=60)
    written, sentence = done.stdout.splitlines()
    assert "could not be written" in sentence
    assert "Free some space" in sentence
    with Ledger.open(path) as ledger:
        ledger.check()
        assert ledger.count() == int(written) > 20
