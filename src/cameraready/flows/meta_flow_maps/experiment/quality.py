"""Unconditional samples in few calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cameraready.flows import sample
from cameraready.flows._toy.distances import energy_distance
from cameraready.flows.meta_flow_maps.experiment.problems import SMOKE, Problem

STEPS = (1, 2, 4)
#: The teacher's many-step samples that few steps are held against.
MANY = 32


def few_steps(problem: Problem, *, runs: int) -> Iterator[dict[str, Any]]:
    """A row for each run, arm and number of calls: energy distance to fresh data, as a share of how far apart data are."""
    n = 360 if problem.costly else 200 if problem.name == SMOKE else 1500
    arms: list[tuple[str, int]] = [(name, steps) for name in ("mfm", "mfm-kernel", "teacher") for steps in STEPS]
    for run in range(runs):
        g = torch.Generator().manual_seed(300 + run)
        real = _real(problem, n, g)
        apart = float(torch.cdist(real, real).sum() / (n * (n - 1)))
        noise = torch.randn(n, *problem.shape, generator=g)
        for name, steps in [*arms, ("teacher", 8), ("teacher-many", MANY)]:
            if name.startswith("teacher"):
                x = sample(problem.teacher, noise, steps=steps, method="euler").x.detach()
            else:
                x = problem.mfm.sample(noise.shape, steps=steps, kernel=name == "mfm-kernel", generator=g)
            far = float(energy_distance(x.flatten(1), real))
            for calls in STEPS if name == "teacher-many" else (steps,):
                yield {"run": run, "arm": name, "budget": calls, "distance": far / apart}


def _real(problem: Problem, n: int, generator: torch.Generator) -> Tensor:
    if problem.mixture is not None or problem.reference is None:
        return problem.draw(n, generator).flatten(1)
    pool = problem.reference
    return pool[torch.randperm(len(pool), generator=generator)[:n]].flatten(1)
