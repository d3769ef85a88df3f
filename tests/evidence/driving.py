"""Drivers for the survival tests: processes that run trials and say on standard output what has been recorded.

``python -m tests.evidence.driving LEDGER LOG TRIALS WORKERS`` reads lines from standard input. For each it forks a driver
(imports are paid once) that begins a run of the trials and writes its process id, then key and status of each recorded
trial, then ``end`` and the summary. Trials leave a line in LOG when they have run to their end.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from cameraready.evidence.execution import crew, pool, worker
from cameraready.evidence.execution.ledger import Ledger
from cameraready.evidence.outcomes import Outcome, Trial
from tests.evidence.studies.spec import PlainSpec

assert crew is not None  # imported here so that forked drivers have it


def make_trials(log: Path, n: int, does: str = "count_on_file", **more: Any) -> list[Trial]:
    conditions = [{"does": does, "value": number, "file": str(log), **more} for number in range(n)]
    return [Trial(f"{does}-{number}", "conduct", "plain", each, 0, does, "") for number, each in enumerate(conditions)]


def make_job(**changes: Any) -> worker.Job:
    specs = {"plain": PlainSpec("plain")}
    return worker.Job(**{"study": "tests.evidence.studies.conduct:STUDY", "specs": specs, "timeout": 60.0, **changes})


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def drive(ledger_path: Path, trials: list[Trial], workers: int) -> None:
    """Run the trials, saying what was recorded."""

    def tell(trial: Trial, outcome: Outcome) -> None:
        say(trial.key, outcome.status)

    with Ledger.open(ledger_path) as ledger:
        summary = pool.run_trials(trials, make_job(), ledger, 1, jobs=workers, on_outcome=tell)
    say("end", summary.done, summary.failed, summary.skipped, summary.interrupted)


def main() -> None:
    ledger, log, n, workers = sys.argv[1:]
    does = "leave_child" if n == "0" else "count_on_file"
    trials = make_trials(Path(log), max(int(n), 1), does)
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.setsid()  # so that a test can send signals as a terminal does
            say("pid", os.getpid())
            drive(Path(ledger), trials, int(workers))
            os._exit(0)
        os.waitpid(pid, 0)
        say("over")


if __name__ == "__main__":
    main()
