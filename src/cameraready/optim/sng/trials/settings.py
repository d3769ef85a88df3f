"""Eight settings for each arm to choose from, and which one was chosen: by the mean log error of runs that the study never makes.

``python -m cameraready.optim.sng.trials.settings poisson adam sng`` chooses again, from the seeds `SEEDS`, by processor time.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

from cameraready.evidence.peers.environments import open_peer
from cameraready.optim.sng.trials.problems import PROBLEMS
from cameraready.optim.sng.trials.rivals import ARMS, ON_SAMPLES, RANDNGD, train, train_in_jax

SEEDS = (900_001, 900_002)
#: Seconds that an arm has. Choosing takes half as long again in processor time, for a machine that is busy with other work.
SECONDS = {"poisson": 0.8, "burgers": 0.8, "least-squares": 0.4}
LONGER = 1.5


def _grid(**values: list[Any]) -> list[dict[str, Any]]:
    return [dict(zip(values, pick, strict=True)) for pick in itertools.product(*values.values())]


_DAMPINGS = [1e-3, 1e-4, 1e-5, 1e-6]
GRIDS: dict[str, list[dict[str, Any]]] = {
    "spring": [{"lr": lr, "mu": mu, "damping": d} for lr, mu in ((0.3, 0.7), (0.3, 0.9)) for d in _DAMPINGS],
    "sng": _grid(lr=[0.3, 1.0], damping=_DAMPINGS),
    "adam": _grid(lr=[3e-3, 1e-2, 3e-2, 1e-1], batch=["some", "all"]),
    "lbfgs": _grid(lr=[0.3, 1.0], history=[5, 20, 50, 100], batch=["all"]),
    "muon": _grid(lr=[2e-2, 4e-2, 8e-2, 1.6e-1], batch=["some", "all"]),
    "singd": _grid(lr=[1e-1, 3e-1], damping=[1e-4, 1e-2], batch=["some", "all"]),
    "randngd": _grid(solver=["nystrom-50", "nystrom-100", "nystrom-200", "full"], damping=["eigenvalue", "lm"]),
}
#: On the linear problem smaller dampings, for its smallest singular values, and larger learning rates for the others.
LINEAR = {
    "spring": [
        {"lr": lr, "mu": mu, "damping": d} for lr, mu in ((0.3, 0.7), (0.3, 0.9)) for d in (1e-4, 1e-6, 1e-8, 1e-10)
    ],
    "sng": _grid(lr=[0.5, 1.0], damping=[1e-4, 1e-6, 1e-8, 1e-10]),
    "adam": _grid(lr=[1e-1, 3e-1, 1.0, 3.0], batch=["some", "all"]),
    "muon": _grid(lr=[8e-2, 1.6e-1, 3.2e-1, 6.4e-1], batch=["some", "all"]),
    "singd": _grid(lr=[3e-1, 1.0], damping=[1e-4, 1e-2], batch=["some", "all"]),
}


def grid(problem: str, arm: str) -> list[dict[str, Any]]:
    """Grids whose best setting lay at their end were moved on until it did not."""
    if problem == "poisson" and arm == "muon":
        return LINEAR["muon"]
    return LINEAR.get(arm, GRIDS[arm]) if problem == "least-squares" else GRIDS[arm]


#: The number in `grid` of the setting chosen.
CHOSEN: dict[str, dict[str, int]] = {
    "poisson": {"spring": 2, "sng": 3, "adam": 4, "lbfgs": 5, "muon": 2, "singd": 4, "randngd": 4},
    "burgers": {"spring": 5, "sng": 2, "adam": 4, "lbfgs": 5, "muon": 4, "singd": 4, "randngd": 4},
    "least-squares": {"spring": 7, "sng": 6, "adam": 4, "lbfgs": 6, "muon": 2, "singd": 6, "randngd": 4},
}


def chosen(problem: str, arm: str) -> dict[str, Any]:
    """The setting of an arm; on a user's own problem the one chosen on burgers."""
    name = problem if problem in CHOSEN else "burgers"
    if arm == ON_SAMPLES:
        return chosen(name, "spring")
    return grid(name, arm)[CHOSEN[name][arm]]


def scores(problem: str, arm: str) -> list[float]:
    """Mean log10 error of each setting."""
    opened = PROBLEMS[problem]()
    found = []
    with contextlib.ExitStack() as stack:
        if arm == "randngd":
            remote = stack.enter_context(open_peer(RANDNGD, Path(__file__).parent.parent))
        seconds = LONGER * SECONDS[problem]
        for setting in grid(problem, arm):
            ends = []
            for seed in SEEDS:
                if arm == "randngd":
                    rows = train_in_jax(opened, remote, setting, seconds, seed, processor_time=True)
                else:
                    rows = train(opened, arm, ARMS[arm], setting, seconds, seed, clock=time.thread_time)
                ends.append(math.log10(max(rows[-1]["error"], 1e-16)))
            found.append(sum(ends) / len(ends))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        result = scores(sys.argv[1], name)
        print(sys.argv[1], name, min(range(len(result)), key=result.__getitem__), [round(s, 2) for s in result])
