"""Drivers for the cluster tests: ``python -m tests.evidence.cluster.driving`` reads calls of `check`, JSON, line by line.

For each it forks a driver (imports are paid once), which says its process id, and its result when it has one.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import distributed

from cameraready.evidence.checking import check
from cameraready.evidence.execution import crew, pool
from cameraready.evidence.execution.cluster import session
from tests.evidence.cluster.machines import die_with_parent

IMPORTED = (crew, pool, session, distributed)  # so that forked drivers have them

ROAMING = "tests.evidence.studies.roaming:STUDY"


class Scaled:
    """An own arm that weighs some, and that writes down when it is unpacked."""

    def __init__(self, log: str) -> None:
        self.log = log
        self.ballast = os.urandom(1_000_000)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with open(self.log, "a") as log:
            log.write(f"{os.getpid()}\n")

    def __call__(self, a: Any, b: Any) -> float:
        return 2.0 * float(a @ b)


def pieces_shipped(scheduler: str) -> int:
    """Pieces of jobs and files that a scheduler has passed on so far."""

    def ask(dask_scheduler: Any) -> int:
        prefix = dask_scheduler.task_prefixes.get("cameraready_ship")
        return prefix.state_counts["memory"] if prefix is not None else 0

    with distributed.Client(scheduler) as client:
        return client.run_on_scheduler(ask)


def answer(call: dict[str, Any]) -> dict[str, Any]:
    if "shipped" in call:
        return {"shipped": pieces_shipped(call["shipped"])}
    os.environ[session.WAIT_VARIABLE] = str(call.pop("wait", 60))
    if call.pop("by_client", False):
        call["scheduler"] = distributed.Client(call["scheduler"])
    if "own_arm" in call:
        call["with_"] = {"mine": Scaled(call.pop("own_arm"))}
    if "on_values" in call:
        call["on"] = tuple(call.pop("on_values"))
    try:
        result = check(ROAMING, **call)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    return {
        "rows": result.rows.to_dicts(),
        "notes": result.notes,
        "hosts": result.environment.get("hosts", ""),
        "interrupted": result.interrupted,
        "incomplete": result.incomplete,
        "failures": [failure.error for failure in result.failures],
    }


def say(message: dict[str, Any]) -> None:
    os.write(1, (json.dumps(message) + "\n").encode())


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            die_with_parent()
            say({"pid": os.getpid()})
            found = answer(json.loads(line))
            text = (json.dumps(found) + "\n").encode()
            while text:
                text = text[os.write(1, text) :]
            os._exit(0)
        os.waitpid(pid, 0)
        say({"over": True})


if __name__ == "__main__":
    main()
