"""What the engine adds to a trial: ``python -m tests.evidence.overhead [TRIALS] [WORKERS]`` runs trials that do nothing."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

from cameraready.evidence.execution.ledger import Ledger
from cameraready.evidence.execution.pool import run_trials
from tests.evidence.test_pool import counts, make_job, make_trials


def main(n: int = 1_000, workers: int = 1) -> None:
    ended: list[float] = []
    with tempfile.TemporaryDirectory() as folder, Ledger.open(Path(folder) / "ledger.sqlite") as ledger:
        trials = make_trials(*counts(n))
        run_trials(trials, make_job(), ledger, 1, jobs=workers, on_outcome=lambda *_: ended.append(time.perf_counter()))
    per_trial = (ended[-1] - ended[0]) / (n - 1) * 1e3
    own = resource.getrusage(resource.RUSAGE_SELF)
    print(f"{n} trials, {workers} workers: {per_trial:.2f} ms a trial from the first to the last")
    print(f"processor time of the driver, its start included: {(own.ru_utime + own.ru_stime) / n * 1e3:.2f} ms a trial")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
