"""The trials of the study: one arm, or one question, for all runs at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from cameraready.evidence import Context
from cameraready.flows import FlowProblem, LinearPath
from cameraready.flows._paths import reparametrise_path
from cameraready.flows.meta_flow_maps import MetaFlowMap
from cameraready.flows.meta_flow_maps.experiment import calibration, problems, quality, rewarding, tilting
from cameraready.flows.meta_flow_maps.experiment.problems import Problem


def posterior(problem: Problem, ctx: Context, *, runs: int) -> Iterator[dict[str, Any]]:
    """Draws of all arms at all times."""
    arms = {name: _drawer(arm) for name, arm in ctx.select(calibration.drawers(problem)).items()}
    yield from calibration.posterior(problem, arms, runs=runs)


def gradient(problem: Problem, ctx: Context, *, runs: int) -> Iterator[dict[str, Any]]:
    """Estimates of the value's gradient."""
    yield from (row for row in calibration.gradients(problem, runs=runs) if row["arm"] not in ctx.without)


def reward(problem: Problem, ctx: Context, *, runs: int, way: str) -> Iterator[dict[str, Any]]:
    """One way to a high reward."""
    if way not in ctx.without:
        yield from rewarding.curve(problem, way, *rewarding.ways(problem)[way], runs=runs)


def law(problem: Problem, ctx: Context, *, runs: int) -> Iterator[dict[str, Any]]:
    """Which law steered particles have."""
    particles = 40 if problem.name == problems.SMOKE else 300
    yield from (row for row in rewarding.laws(problem, runs=runs, particles=particles) if row["arm"] not in ctx.without)


def tilt(problem: Problem, ctx: Context, *, runs: int, way: str) -> Iterator[dict[str, Any]]:
    """One way of fine-tuning."""
    if way not in ctx.without:
        yield from tilting.ends(problem, way, runs=runs)


def few(problem: Problem, ctx: Context, *, runs: int) -> Iterator[dict[str, Any]]:
    """Samples in few calls."""
    yield from (row for row in quality.few_steps(problem, runs=runs) if row["arm"] not in ctx.without)


def _drawer(arm: Any) -> Callable[..., Any]:
    """An arm as ``draw(x, t, n, generator)``; a user's map is asked by `sample_posterior`, and what comes back is checked."""
    asked = getattr(arm, "sample_posterior", None)
    if asked is None and not callable(arm):
        raise TypeError(
            f"your own arm must be a MetaFlowMap or a callable draw(x_t, t, n, generator), not {type(arm).__name__}"
        )

    def draw(x: torch.Tensor, t: float, n: int, generator: torch.Generator) -> torch.Tensor:
        with torch.no_grad():
            found = arm(x, t, n, generator) if asked is None else asked(x, t, n, generator=generator)
        if not isinstance(found, torch.Tensor) or found.shape != (n, *x.shape):
            got = tuple(found.shape) if hasattr(found, "shape") else type(found).__name__
            raise ValueError(f"your own arm must return draws of shape (n, *x_t.shape) = {(n, *x.shape)}, got {got}")
        return found

    return draw


def opened(problem: Any, prepared: Mapping[str, Any]) -> Problem:
    """The problem of a workload: a shipped one by its name, a user's with the map that `prepare` trained."""
    if isinstance(problem, str):
        return problems.problem(problem)
    mfm = of_own(problem)
    mfm.load_state_dict({name: torch.as_tensor(value) for name, value in prepared.items()})
    return own(problem, mfm.eval().requires_grad_(False))


def of_own(flow: FlowProblem) -> MetaFlowMap:
    """An untrained map for a user's flow."""
    return problems.own_network(flow.train[0].numel(), float(flow.train.square().mean().sqrt()))


def own(flow: FlowProblem, mfm: MetaFlowMap) -> Problem:
    """A user's flow as flat vectors."""
    shape = tuple(flow.train.shape[1:])
    train, test = flow.train.flatten(1).float(), flow.test.flatten(1).float()

    velocity = flow.velocity
    if flow.path != LinearPath():
        velocity = reparametrise_path(velocity, flow.path, LinearPath())  # the same flow

    def teacher(x: torch.Tensor, t: Any, y: Any = None) -> torch.Tensor:
        return velocity(x.reshape(-1, *shape), t).flatten(1)

    def draw(n: int, generator: torch.Generator) -> torch.Tensor:
        return train[torch.randint(len(train), (n,), generator=generator)]

    def first(x: torch.Tensor) -> torch.Tensor:
        return x[:, 0]

    probe = draw(256, torch.Generator().manual_seed(0))
    began = time.monotonic()
    with torch.no_grad():
        teacher(probe, torch.full((256,), 0.5))
    costly = (time.monotonic() - began) / 256 > 2e-5
    shape_flat = (train.shape[1],)
    return Problem(flow.name, shape_flat, teacher, draw, mfm, first, 1.0, flow.mixture, test, costly, {"train": train})
