"""The ledger: every finished trial, in one SQLite file in the user's data folder."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from cameraready.evidence.execution.ledger_schema import (
    BUSY_SECONDS,
    LedgerError,
    bring_up_to_date,
    refuse_what_is_not_ours,
    use_write_ahead_log,
)
from cameraready.evidence.outcomes import Outcome, Status, Trial

ERROR_CHARACTERS = 20_000  # of a traceback; the middle goes first

_OUTCOME = "key, status, rows, seconds, peak_mb, error, final"
_TRIAL = "method, workload, condition, seed, arm, block"
_FETCHED = 200  # trials in memory at once while many are read


@dataclass(frozen=True)
class Run:
    """One start of a study."""

    run: int
    method: str
    tier: str
    command: str
    environment: Mapping[str, str]
    started: float  # seconds since 1970
    ended: float | None
    status: str  # "running" (or killed), or what `end_run` was told
    trials: int  # finished in it


def data_folder() -> Path:
    """Where camera-ready keeps its data: ``CAMERAREADY_HOME``, or the user's data folder."""
    if home := os.environ.get("CAMERAREADY_HOME"):
        return Path(home).expanduser()
    import platformdirs

    return Path(platformdirs.user_data_dir("cameraready", appauthor=False))


def default_path() -> Path:
    """The ledger that is used unless ``--ledger`` names another."""
    return data_folder() / "ledger.sqlite"


class Ledger:
    """The store of finished trials. Open it with `Ledger.open`; it is a context manager.

    Every write is committed before the call returns and survives the end of the process by any signal. Several
    processes may write at once. Reading a trial by key uses an index, so the size of the ledger does not matter.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self.path = path

    @classmethod
    def open(cls, path: Path | str | None = None) -> Ledger:
        """Open the ledger at `path` (default: `default_path`), making it where there is none.

        Raises
        ------
        LedgerError
            The file is not a ledger, is damaged, was written by a newer version, or cannot be read or made. It is left
            as it is.
        """
        path = Path(path).expanduser() if path is not None else default_path()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            refuse_what_is_not_ours(path)
        except OSError as error:
            raise LedgerError(
                f"the ledger {path} cannot be opened: {error.strerror or error}; name another with --ledger"
            ) from error
        with _told_as_sentence(path):
            connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            try:
                bring_up_to_date(connection, path)
                use_write_ahead_log(connection)
            except BaseException:
                connection.close()
                raise
        return cls(connection, path)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start_run(self, method: str, tier: str, command: str, environment: Mapping[str, str]) -> int:
        """Note that a run has started; returns its number."""
        values = (method, tier, command, json.dumps(dict(environment)), time.time(), "running")
        with _told_as_sentence(self.path):
            cursor = self._connection.execute(
                "INSERT INTO runs (method, tier, command, environment, started, status) VALUES (?, ?, ?, ?, ?, ?)",
                values,
            )
        return cast(int, cursor.lastrowid)

    def end_run(self, run: int, status: str) -> None:
        """Note that a run has ended, and how (``"done"``, ``"interrupted"``, ``"ran out of time"`` ...)."""
        with _told_as_sentence(self.path):
            self._connection.execute("UPDATE runs SET ended = ?, status = ? WHERE run = ?", (time.time(), status, run))

    def runs(self, method: str | None = None) -> list[Run]:
        """All runs (of one method), oldest first."""
        query = (
            "SELECT run, method, tier, command, environment, started, ended, status,"
            " (SELECT count(*) FROM trials WHERE trials.run = runs.run) FROM runs"
        )
        with _told_as_sentence(self.path):
            if method is None:
                found = self._connection.execute(f"{query} ORDER BY run").fetchall()
            else:
                found = self._connection.execute(f"{query} WHERE method = ? ORDER BY run", (method,)).fetchall()
        return [
            Run(run, of, tier, command, json.loads(where), started, ended, status, trials)
            for run, of, tier, command, where, started, ended, status, trials in found
        ]

    def record(self, trial: Trial, outcome: Outcome, run: int) -> None:
        """Commit what became of a trial. An outcome that is ``done`` is never replaced; any other is, by the newest."""
        if trial.key != outcome.key:
            raise ValueError(f"the outcome of trial {outcome.key} was to be recorded as that of trial {trial.key}")
        values = (
            *(trial.key, trial.method, _text(trial.workload), json.dumps(dict(trial.condition), separators=(",", ":"))),
            *(trial.seed, trial.arm, _text(trial.block), outcome.status, outcome.final, _pack(outcome.rows)),
            *(outcome.seconds, outcome.peak_mb, _text(_shortened(outcome.error)), run, time.time()),
        )
        with _told_as_sentence(self.path):
            self._connection.execute(
                f"INSERT INTO trials VALUES ({', '.join('?' * len(values))}) ON CONFLICT (key) DO UPDATE SET"
                " status = excluded.status, final = excluded.final, rows = excluded.rows, seconds = excluded.seconds,"
                " peak_mb = excluded.peak_mb, error = excluded.error, run = excluded.run, finished = excluded.finished"
                " WHERE trials.status <> 'done'",
                values,
            )

    def finished(self, keys: Iterable[str]) -> dict[str, Outcome]:
        """Outcomes that stand: those of `keys` which the next run does not try again."""
        return {key: outcome for key, outcome in self.outcomes(keys).items() if outcome.final}

    def outcomes(self, keys: Iterable[str]) -> dict[str, Outcome]:
        """All outcomes of `keys`, those that the next run will try again included."""
        found: dict[str, Outcome] = {}
        with _told_as_sentence(self.path):
            for batch in _batches(keys):
                query = f"SELECT {_OUTCOME} FROM trials WHERE key IN ({', '.join('?' * len(batch))})"
                for values in self._connection.execute(query, batch):
                    found[values[0]] = _outcome(values)
        return found

    def trials(self, *, run: int | None = None, method: str | None = None) -> Iterator[tuple[Trial, Outcome]]:
        """The trials of a run, of a method, or all, each with its outcome; in no particular order (`alone` is not kept).

        They are read a few at a time, so that memory does not grow with their number. Until the last one was read, or the
        iterator is closed, what is recorded meanwhile is not seen.
        """
        wanted = {"run = ?": run, "method = ?": method}
        conditions = [condition for condition, value in wanted.items() if value is not None]
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        with _told_as_sentence(self.path):
            cursor = self._connection.execute(
                f"SELECT {_OUTCOME}, {_TRIAL} FROM trials{where}", [v for v in wanted.values() if v is not None]
            )
        with contextlib.closing(cursor):
            while True:
                with _told_as_sentence(self.path):
                    fetched = cursor.fetchmany(_FETCHED)
                if not fetched:
                    return
                for values in fetched:
                    of, workload, condition, seed, arm, block = values[7:]
                    yield Trial(values[0], of, workload, json.loads(condition), seed, arm, block), _outcome(values[:7])

    def forget(self, keys: Iterable[str]) -> int:
        """Remove trials, so that they run again; returns how many there were."""
        forgotten = 0
        with _told_as_sentence(self.path), self._transaction():
            for batch in _batches(keys):
                query = f"DELETE FROM trials WHERE key IN ({', '.join('?' * len(batch))})"
                forgotten += self._connection.execute(query, batch).rowcount
        return forgotten

    def mean_seconds(self, method: str) -> float | None:
        """Mean duration of the trials of `method` that ended, in seconds; None if there are none."""
        with _told_as_sentence(self.path):
            return self._connection.execute("SELECT avg(seconds) FROM trials WHERE method = ?", (method,)).fetchone()[0]

    def count(self) -> int:
        """How many trials the ledger holds."""
        with _told_as_sentence(self.path):
            return int(self._connection.execute("SELECT count(*) FROM trials").fetchone()[0])

    def check(self) -> None:
        """Read the whole file for damage (seconds for a large ledger); raises `LedgerError` where there is any."""
        with _told_as_sentence(self.path):
            found = self._connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise sqlite3.DatabaseError(found)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.rollback()
            raise
        self._connection.execute("COMMIT")


@contextlib.contextmanager
def _told_as_sentence(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) is None and type(error) is not sqlite3.DatabaseError:
            raise  # a mistake of ours, such as using a closed connection
        raise LedgerError(_sentence(path, error)) from error


def _sentence(path: Path, error: sqlite3.Error) -> str:
    kind = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    if kind in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return (
            f"the ledger {path} could not be written ({error}). Free some space and run again; finished trials are kept"
        )
    if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return (
            f"the ledger {path} was held by another program for over {BUSY_SECONDS:.0f} s; end it, or name another file"
            " with --ledger"
        )
    if kind in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return f"the ledger {path} cannot be opened for writing ({error}); name another file with --ledger"
    return (
        f"the ledger {path} is damaged ({error}); it was left as it is. Move it away to begin a new one, or name"
        " another file with --ledger"
    )


def _outcome(values: Sequence[Any]) -> Outcome:
    """What the columns of `_OUTCOME` say."""
    key, status, rows, seconds, peak_mb, error, final = values
    return Outcome(
        key=key,
        status=cast(Status, status),
        rows=_unpack(rows) or (),
        seconds=seconds,
        peak_mb=peak_mb,
        error=error,
        final=bool(final),
    )


def _batches(keys: Iterable[str]) -> Iterator[list[str]]:
    # SQLite allows at least 999 parameters in a statement.
    unique = list(dict.fromkeys(keys))
    for start in range(0, len(unique), 900):
        yield unique[start : start + 900]


def _text(text: str) -> str:
    # Names of files may hold bytes that are no text; SQLite takes none.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _pack(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as JSON. Where all rows have the same columns, the names are written once. NaN and infinities round-trip."""
    rows = [dict(row) for row in rows]
    if len(rows) > 1 and all(list(row) == list(rows[0]) for row in rows):
        packed: Any = {"columns": list(rows[0]), "rows": [list(row.values()) for row in rows]}
    else:
        packed = rows
    return json.dumps(packed, separators=(",", ":"))


def _unpack(text: str) -> list[dict[str, Any]]:
    packed = json.loads(text)
    if isinstance(packed, dict):
        return [dict(zip(packed["columns"], row, strict=True)) for row in packed["rows"]]
    return packed


def _shortened(text: str) -> str:
    if len(text) <= ERROR_CHARACTERS:
        return text
    half = ERROR_CHARACTERS // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
