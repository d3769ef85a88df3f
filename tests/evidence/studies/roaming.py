"""A study for clusters: values that depend on seed and condition alone, beside columns that tell where and when."""

from __future__ import annotations

import os
import platform
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cameraready.evidence import Study
from cameraready.evidence.specs import read_table

SCALE = 1.0
WHERE_AND_WHEN = ("host", "pid", "began", "ended")


def open_values(spec: Any) -> Any:
    if spec.kind == "table":
        return read_table(spec)[1].to_numpy(dtype=float)
    if spec.kind == "value":
        return np.asarray(spec.value, dtype=float)
    return np.arange(5.0)


def prepare(values: Any, ctx: Any) -> Mapping[str, Any]:
    return {"weights": SCALE * np.cumsum(values), "by": np.array(platform.node())}


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    for number in range(30):
        for arm in ("ours", "theirs"):
            yield {"number": number, "arm": arm, "pause": 0.01, "does": "count", "alone": False}


def trial(values: Any, ctx: Any, *, number: int, arm: str, pause: float, does: str, alone: bool) -> dict[str, Any]:
    began = time.time()
    time.sleep(pause)
    if does == "kill its host" and number == 3 and arm == "ours":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    draw = np.random.default_rng([ctx.seed, number]).normal(size=len(values))
    arms = ctx.select({"ours": np.dot, "theirs": lambda a, b: (a * b).sum()})
    return {
        "value": float(arms[arm](draw, ctx.prepared["weights"])),
        "host": platform.node(),
        "pid": os.getpid(),
        "began": began,
        "ended": time.time(),
    }


STUDY = Study(
    open=open_values,
    workloads={"smoke": ["five"], "desk": ["five"], "full": []},
    plan=plan,
    trial=trial,
    method="ours",
    arms="arm",
    block="number",
    alone=lambda condition: condition["alone"],
    prepare=prepare,
    libraries={"*": ["numpy"]},
    accepts=["table", "value"],
    own_arm="a callable (n,), (n,) -> number",
)
