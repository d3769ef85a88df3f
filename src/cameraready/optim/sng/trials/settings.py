"""Eight settings for each arm in PyTorch to choose from, and which one was chosen: by the mean log error of runs that the study never makes.

``python -m cameraready.optim.sng.trials.settings poisson adam sng`` chooses again, from the seeds `SEEDS`, by processor time. randngd is not
among them: it searches its step and sets its damping itself, and each setting takes it most of a minute to compile. It runs with its
defaults and a sketch of 200, which in looks at Poisson did better than its exact solver and than its other damping rule.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from typing import Any

import torch

from cameraready.optim.sng.trials.problems import PROBLEMS
from cameraready.optim.sng.trials.rivals import ARMS, ON_SAMPLES, train

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
    "randngd": [{"solver": "nystrom", "damping": "eigenvalue", "sketch": 200}],
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
    "poisson": {"spring": 2, "sng": 3, "adam": 4, "lbfgs": 5, "muon": 2, "singd": 4, "randngd": 0},
    "burgers": {"spring": 5, "sng": 2, "adam": 4, "lbfgs": 5, "muon": 4, "singd": 4, "randngd": 0},
    "least-squares": {"spring": 7, "sng": 6, "adam": 4, "lbfgs": 6, "muon": 2, "singd": 6, "randngd": 0},
}


def chosen(problem: str, arm: str) -> dict[str, Any]:
    """The setting of an arm; on a user's own problem the one chosen on burgers."""
    name = problem if problem in CHOSEN else "burgers"
    if arm == ON_SAMPLES:
        return chosen(name, "spring")
    return grid(name, arm)[CHOSEN[name][arm]]


def scores(problem: str, arm: str) -> list[float]:
    """Mean log10 error of each setting."""
    opened, seconds = PROBLEMS[problem](), LONGER * SECONDS[problem]
    found = []
    for setting in grid(problem, arm):
        runs = [train(opened, arm, ARMS[arm], setting, seconds, seed, clock=time.thread_time) for seed in SEEDS]
        found.append(sum(math.log10(max(rows[-1]["error"], 1e-16)) for rows in runs) / len(runs))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        result = scores(sys.argv[1], name)
        print(sys.argv[1], name, min(range(len(result)), key=result.__getitem__), [round(s, 2) for s in result])
