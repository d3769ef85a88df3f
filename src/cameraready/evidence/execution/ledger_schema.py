"""What a ledger's file looks like inside, how an older one becomes a newer one, and which files are not ours to touch."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

APPLICATION_ID = 0x43616D52  # "CamR" in the file's header: says whose file it is
BUSY_SECONDS = 60.0  # how long one driver waits for another driver's write

#: Each step makes the next version out of the one before, beginning with an empty file. A step that was released is never
#: changed; a new one is added, and only adds, so that nothing that was measured is lost.
STEPS = (
    """
    CREATE TABLE runs (
        run INTEGER PRIMARY KEY, method TEXT NOT NULL, tier TEXT NOT NULL, command TEXT NOT NULL,
        environment TEXT NOT NULL, started REAL NOT NULL, ended REAL, status TEXT NOT NULL
    );
    CREATE TABLE trials (
        key TEXT PRIMARY KEY, method TEXT NOT NULL, workload TEXT NOT NULL, condition TEXT NOT NULL,
        seed INTEGER NOT NULL, arm TEXT NOT NULL, block TEXT NOT NULL, status TEXT NOT NULL, final INTEGER NOT NULL,
        rows TEXT NOT NULL, seconds REAL NOT NULL, peak_mb REAL NOT NULL, error TEXT NOT NULL, run INTEGER NOT NULL,
        finished REAL NOT NULL
    )
    """,
    # The trials of a run, of a method, and how long those of a method take, without reading all the others.
    """
    CREATE INDEX trials_by_run ON trials (run);
    CREATE INDEX trials_by_method ON trials (method, seconds)
    """,
)
SCHEMA_VERSION = len(STEPS)


class LedgerError(Exception):
    """The ledger cannot be used; the message says why and what to do."""


def refuse_what_is_not_ours(path: Path) -> None:
    """Look at the header before SQLite touches the file, so that somebody else's stays as it is, byte by byte."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb") as file:
        header = file.read(100)
    if len(header) < 100 or not header.startswith(b"SQLite format 3\0"):
        raise LedgerError(
            f"{path} is not a ledger (it is no SQLite file, or a damaged one); it was left as it is. Name another file"
            " with --ledger, or move this one away"
        )
    if int.from_bytes(header[68:72], "big") != APPLICATION_ID:
        raise LedgerError(
            f"{path} is another program's SQLite file; it was left as it is. Name another file with --ledger"
        )
    _refuse_newer(path, int.from_bytes(header[60:64], "big"))


def _refuse_newer(path: Path, version: int) -> None:
    if version > SCHEMA_VERSION:
        raise LedgerError(
            f"the ledger {path} was written by a newer cameraready (schema {version}; this version reads"
            f" {SCHEMA_VERSION}); it was left as it is. Upgrade cameraready, or name another file with --ledger"
        )


def bring_up_to_date(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables of a new ledger, or take an older one to this version: all of it or, after any error, nothing."""
    if _version(connection) == SCHEMA_VERSION:
        connection.execute("SELECT key, final FROM trials LIMIT 1").fetchone()  # damage shows here
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Asked again inside the write lock: another driver may have done it meanwhile, or be of a newer version.
        version = _version(connection)
        _refuse_newer(path, version)
        for step in STEPS[version:]:
            for statement in step.split(";"):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.rollback()
        raise


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Let readers and one writer not block each other; a file system that cannot do it keeps the rollback journal."""
    give_up = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL").fetchone()
            break
        except sqlite3.OperationalError as error:
            # SQLite does not wait by itself here while another driver opens the same new file.
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
            time.sleep(0.02)
    # A commit survives the process without waiting for the disk. After a power cut the last few trials may be gone, and
    # run again.
    connection.execute("PRAGMA synchronous=NORMAL")
