"""What a cluster adds to a trial: ``python -m tests.evidence.cluster.overhead SCHEDULER [TRIALS]`` runs trials of 1 ms."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from cameraready.evidence.execution.cluster.session import Session, reach, setup_of
from cameraready.evidence.execution.ledger import Ledger
from cameraready.evidence.execution.pool import run_trials
from tests.evidence.driving import make_job, make_trials
from tests.evidence.studies.conduct import STUDY


def main(scheduler: str, n: int = 2_000) -> None:
    with tempfile.TemporaryDirectory() as folder, Ledger.open(Path(folder) / "ledger.sqlite") as ledger:
        trials = make_trials(Path(folder) / "log", n, "nap")
        job = make_job()

        def measure(name: str, runner: object = None) -> None:
            ended: list[float] = []
            those = [replace(trial, key=f"{name}-{trial.key}") for trial in trials]
            run_trials(
                those, job, ledger, 1, jobs=2, on_outcome=lambda *_: ended.append(time.perf_counter()), runner=runner
            )
            later = ended[n // 2 :]  # without the start
            print(f"{name}: {(later[-1] - later[0]) / (len(later) - 1) * 1e3:.2f} ms a trial")

        measure("local pool, 2 workers")
        address, security = reach(scheduler)
        setup = setup_of(job, STUDY, trials, {}, Path(folder), None)
        with Session(address, security, setup, print) as session:
            measure("cluster", session.run)
            print(f"done by host: {session.hosts}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
