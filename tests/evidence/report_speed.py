"""How long the page of a large run takes: ``python -m tests.evidence.report_speed [ROWS]`` prints the seconds."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cameraready.evidence.report.saved import read_result
from cameraready.evidence.results import Result
from tests.evidence.report_runs import ARMS, BUDGETS, a_result

WORKLOADS = tuple(f"table-{number}" for number in range(8))


def large_result(rows: int) -> Result:
    """A run of eight workloads, six arms and four budgets, with as many blocks as `rows` need."""
    blocks = round(rows / (len(WORKLOADS) * len(ARMS) * len(BUDGETS)))
    return a_result(WORKLOADS, blocks=blocks)


def main(rows: int = 100_000) -> None:
    result = large_result(rows)
    with tempfile.TemporaryDirectory() as folder:
        result.save(folder)
        took = _timed(lambda: result.report(folder))
        size = Path(folder, "index.html").stat().st_size
        print(f"{result.rows.height:,} rows: page of {size / 1000:.0f} kB in {took}, libraries included")
        print(f"the same again: {_timed(lambda: result.report(folder))}")
        print(f"reading the results and importing the study: {_timed(lambda: read_result(Path(folder)))}")


def _timed(call: Callable[[], object]) -> str:
    """Seconds on the clock and of the processor; they differ where others use the machine."""
    clock, processor = time.perf_counter(), time.process_time()
    call()
    return f"{time.perf_counter() - clock:.1f} s ({time.process_time() - processor:.1f} s of processor)"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
