"""Which trials each tier runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from cameraready.stats.bpop.trials.rivals import COUNTING, MINERS
from cameraready.stats.bpop.trials.workloads import RECIPES

#: How traces are drawn: (draw, coverage, noise). The first is the paper's padding of its cloud traces.
PADDED = [
    ("model", 1.0, 0.0), ("kahn", 1.0, 0.0), ("extensions", 1.0, 0.0),
    ("kahn", 0.1, 0.0), ("kahn", 0.3, 0.0), ("kahn", 0.6, 0.0),
    ("kahn", 1.0, 0.02), ("kahn", 1.0, 0.1), ("extensions", 1.0, 0.1),
]  # fmt: skip
EVERY_ARM = ("bpop", "beta-0", "eps-inferred", *COUNTING, *MINERS)
RIVALS = (*COUNTING, *MINERS)


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    smoke = tier == "smoke"
    if workload == "small":
        yield from ({"part": "exact", "instance": i} for i in range(2 if smoke else 12))
        return
    if workload == "latent":
        yield from ({"part": "speed", "instance": i} for i in range(10))
        return
    if workload.startswith("synthetic"):
        for instance in range(20 if tier == "desk" else 200):
            for arm in ("bpop", *COUNTING):
                yield accuracy(instance, arm, "model-noisy", n_iter=20_000, padded=False)
        return
    if workload in RECIPES:
        steps = 20_000 if tier == "desk" else 1_000_000
        for instance in range(10):
            for arm in ("bpop", *RIVALS):
                yield accuracy(instance, arm, "model", n_iter=steps)
        return
    if workload == "own":
        yield from ({"part": "own", "instance": i, "arm": arm} for i in range(12) for arm in EVERY_ARM)
        return
    if smoke:
        for instance, arm in itertools.product(range(2), ("bpop", "beta-0", "eps-inferred", *COUNTING)):
            yield accuracy(instance, arm, "model", n_iter=1_000)
        return
    for instance in range(12 if tier == "desk" else 60):
        for draw, coverage, noise in PADDED:
            for arm in EVERY_ARM:
                # The ablations run where something is asked of them.
                if (arm == "beta-0" and (noise > 0 or coverage < 1)) or (arm == "eps-inferred" and noise == 0):
                    continue
                yield accuracy(instance, arm, draw, coverage=coverage, noise=noise, n_iter=30_000)


def accuracy(
    instance: int, arm: str, draw: str, *, coverage: float = 1.0, noise: float = 0.0, n_iter: int, padded: bool = True
) -> dict[str, Any]:
    return {
        "part": "accuracy",
        "instance": instance,
        "arm": arm,
        "draw": draw,
        "coverage": coverage,
        "noise": noise,
        "n_iter": n_iter,
        "padded": padded,
    }
