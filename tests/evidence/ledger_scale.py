"""What a large ledger costs: ``python -m tests.evidence.ledger_scale [TRIALS] [FOLDER]``, a million trials by default.

Every question is asked in a fresh process. Memory is what that process needs at most beyond what it needs to open a
ledger that is empty.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cameraready.evidence.execution.ledger import Ledger, _pack

PER_RUN = 1_000
METHODS = 20
ROWS = 4  # a trial


def build(path: Path, n: int) -> None:
    """A ledger of `n` trials, `PER_RUN` of them in a run, by `METHODS` methods in turn."""
    with Ledger.open(path) as ledger:
        for start in range(0, n, PER_RUN):
            method = f"method-{start // PER_RUN % METHODS:02d}"
            run = ledger.start_run(method, "desk", f"cameraready run {method}", {"python": "3.11.7", "numpy": "2.4.6"})
            with ledger._transaction():
                ledger._connection.executemany(
                    f"INSERT INTO trials VALUES ({', '.join('?' * 15)})",
                    (_values(number, method, run) for number in range(start, min(start + PER_RUN, n))),
                )
            ledger.end_run(run, "done")


def key_of(number: int) -> str:
    return hashlib.blake2b(str(number).encode(), digest_size=16).hexdigest()


def _values(number: int, method: str, run: int) -> tuple[object, ...]:
    condition = {"estimator": f"arm-{number % 7}", "budget": 1000 * (1 + number % 5), "instance": number % 30}
    rows = [
        {"budget": 500 * (1 + i), "mse": 1 / (number + i + 1), "error_std": 0.1, "calls": 997 + i} for i in range(ROWS)
    ]
    return (
        *(key_of(number), method, "breast-cancer", json.dumps(condition, separators=(",", ":")), number % 10),
        *(
            condition["estimator"],
            str(condition["instance"]),
            "done",
            1,
            _pack(rows),
            0.5,
            100.0,
            "",
            run,
            1.7e9 + number,
        ),
    )


def _some_keys(n: int) -> Iterator[str]:
    yield from (key_of(number * 7919 % n) for number in range(1_000))


def _count_rows(trials: Iterator[tuple[object, object]]) -> int:
    return sum(len(outcome.rows) for _, outcome in trials)


QUESTIONS: dict[str, Callable[[Ledger, int], object]] = {
    "open": lambda ledger, n: "",
    "finished(1,000 keys)": lambda ledger, n: len(ledger.finished(_some_keys(n))),
    "runs()": lambda ledger, n: len(ledger.runs()),
    "runs(one method)": lambda ledger, n: len(ledger.runs("method-03")),
    "mean_seconds(one method)": lambda ledger, n: ledger.mean_seconds("method-03"),
    "count()": lambda ledger, n: ledger.count(),
    "rows of one run": lambda ledger, n: _count_rows(ledger.trials(run=3)),
    "rows of one method": lambda ledger, n: _count_rows(ledger.trials(method="method-03")),
    "rows of all": lambda ledger, n: _count_rows(ledger.trials()),
    "check() (doctor)": lambda ledger, n: ledger.check(),
}


def ask(question: str, path: Path, n: int) -> None:
    """Print the answer, the seconds it took with opening, and the memory that the process needed at most, in MB."""
    started = time.perf_counter()
    with Ledger.open(path) as ledger:
        answer = QUESTIONS[question](ledger, n)
    print(answer, time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, sep="\t")


def _asked(question: str, path: Path, n: int) -> tuple[str, float, float]:
    words = [sys.executable, "-m", "tests.evidence.ledger_scale", "--ask", question, str(path), str(n)]
    ran = subprocess.run(words, capture_output=True, text=True, check=True)
    answer, seconds, memory = ran.stdout.rstrip("\n").split("\t")
    return answer, float(seconds), float(memory)


def main(n: int, folder: Path) -> None:
    path, empty = folder / "ledger.sqlite", folder / "empty.sqlite"
    started = time.perf_counter()
    build(path, n)
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    print(f"{n:,} trials built in {time.perf_counter() - started:.0f} s, {size:,.0f} MB, on {os.cpu_count()} cores")
    _, _, least = _asked("open", empty, 0)
    print(f"{'':<26}   seconds  MB more    answer")
    for question in QUESTIONS:
        answer, seconds, memory = _asked(question, path, n)
        print(f"{question:<26}  {seconds:8.3f}  {memory - least:7.1f}    {answer}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ask"]:
        ask(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        trials = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
        with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as scratch:
            main(trials, Path(scratch))
