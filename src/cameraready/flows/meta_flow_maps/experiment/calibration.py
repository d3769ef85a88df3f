"""Posterior draws and gradients of the value against what is known of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cameraready.flows import LinearPath
from cameraready.flows._toy.distances import energy_distance
from cameraready.flows._toy.tilts import value
from cameraready.flows.meta_flow_maps import PosteriorFlow, value_gradient
from cameraready.flows.meta_flow_maps.experiment.problems import SMOKE, Problem

TIMES = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95)
GRADIENT_TIMES = (0.3, 0.5)
#: Draws at a time for an estimate of a bias: 1,024 in all, in the plane 4,096.
PART = 512
#: What part of an arm's squared bias others are held against: of one draw's as if it fell as N^-0.5 to 16 draws, of DPS's that of half its bias.
SHARES = {"flow-1": 1 / 16, "dps": 1 / 4}
#: Share of the problem's tilt: at all of it a few draws decide, and a bias drowns in noise.
MILD = 0.25
#: Draws of a state between which distances are taken; means, spreads and weights are of all.
PAIRS = 256
DRAWS = (1, 4, 16, 64)


def states(problem: Problem, t: float, n: int, generator: torch.Generator) -> Tensor:
    """Typical noisy states at `t`, (n, *shape)."""
    x1 = problem.draw(n, generator)
    return t * x1 + (1 - t) * torch.randn(x1.shape, generator=generator)


def posterior(problem: Problem, arms: dict[str, Any], *, runs: int) -> Iterator[dict[str, Any]]:
    """A row for each run, arm and time: energy distance to draws of the truth in units of their spread, errors of mean, spread and mode weights."""
    smoke = problem.name == SMOKE
    times = (0.2, 0.5, 0.8) if smoke or problem.costly else TIMES
    known = problem.mixture is not None
    each, n = (2, 48) if problem.costly else (8, 300 if smoke else 1000) if known else (3, 256)
    rows: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for place, t in enumerate(times):
        g = torch.Generator().manual_seed(1000 + place)
        x = states(problem, t, runs * each, g)
        truth, again = (_truth(problem, x, t, n, g) for _ in range(2))
        found = {"exact": again, **{name: draw(x, t, n, g) for name, draw in arms.items()}}
        for name, draws in found.items():
            measured = _compared(problem, draws, truth, x, t)
            for run in range(runs):
                part = {key: float(v[run * each : (run + 1) * each].mean()) for key, v in measured.items()}
                rows.setdefault((run, name), []).append({"time": t, **part})
    for (run, name), parts in rows.items():
        worst = max(part["energy"] for part in parts)
        for part in parts:
            yield {"run": run, "arm": name, "worst_energy": worst, **part}


def drawers(problem: Problem) -> dict[str, Callable[..., Tensor]]:
    """The arms: ``draw(x, t, n, generator) -> (n, B, ...)``."""

    def by_map(steps: int) -> Callable[..., Tensor]:
        def draw(x: Tensor, t: float, n: int, generator: torch.Generator) -> Tensor:
            with torch.no_grad():
                return problem.mfm.sample_posterior(x, t, n, steps=steps, generator=generator)

        return draw

    def by_teacher(steps: int) -> Callable[..., Tensor]:
        flow = PosteriorFlow(problem.teacher, LinearPath(), steps=steps, method="euler")

        def draw(x: Tensor, t: float, n: int, generator: torch.Generator) -> Tensor:
            with torch.no_grad():
                return flow.sample_posterior(x, t, n, generator=generator)

        return draw

    arms = {"mfm": by_map(1), "mfm-4": by_map(4), "teacher-1": by_teacher(1), "teacher-4": by_teacher(4)}
    if problem.mixture is not None:
        arms["gaussian"] = _moment_matched(problem)
    return arms


def gradients(problem: Problem, *, runs: int) -> Iterator[dict[str, Any]]:
    """A row for each run, arm and number of draws: the bias of the estimated gradient of the value, as a share of the truth's norm."""
    assert problem.mixture is not None
    smoke = problem.name == SMOKE
    each, times, pool, sizes = (2, (0.5,), 64, DRAWS[:2]) if smoke else (6, GRADIENT_TIMES, PART, DRAWS)
    scale = problem.scale * MILD
    reward = problem.reward.scaled(scale)  # type: ignore[attr-defined]
    estimators = {"map": problem.mfm, "flow": PosteriorFlow(problem.teacher, LinearPath(), steps=5)}
    x = torch.cat([states(problem, t, runs * each, torch.Generator().manual_seed(77 + i)) for i, t in enumerate(times)])
    t = torch.tensor(times).repeat_interleave(runs * each)
    truth = _gradient_of_value(problem, reward, x, t)
    run = torch.arange(runs).repeat_interleave(each).repeat(len(times))
    for name, estimator in estimators.items():
        for n in sizes:
            g, repeats = torch.Generator().manual_seed(5000 + n), pool // n
            found = []
            for _ in range(1 if smoke else 2 if problem.shape[0] > 2 else 8):
                slopes, _ = value_gradient(
                    estimator, x.repeat(repeats, 1), t.repeat(repeats), problem.reward, n=n, scale=scale, generator=g
                )
                found.append(slopes.reshape(repeats, *x.shape))
            yield from _biases(name, n, torch.cat(found), truth, run, runs)
    state = x.clone().requires_grad_()
    mean = state + (1 - t)[:, None] * problem.teacher(state, t)
    (slope,) = torch.autograd.grad(reward(mean).sum(), state)
    yield from _biases("dps", 0, slope[None], truth, run, runs)  # one call and no draws


def _biases(name: str, n: int, found: Tensor, truth: Tensor, run: Tensor, runs: int) -> Iterator[dict[str, Any]]:
    repeats = len(found)
    noise = found.var(0).sum(1) / repeats if repeats > 1 else torch.zeros(len(truth))
    off = (found.mean(0) - truth).square().sum(1) - noise  # without what the noise of the mean adds
    spread = (found - truth).square().sum(2).mean(0)
    for each in range(runs):
        mine = run == each
        squared = float(off[mine].sum() / truth[mine].square().sum())  # without bias, so at times below 0
        arm = name if name == "dps" else f"{name}-{n}"
        yield {
            "run": each,
            "arm": arm,
            "draws": n,
            "squared_bias": squared,
            "scaled_bias": squared * SHARES.get(arm, 1.0),
            "error": float((spread[mine].sum() / truth[mine].square().sum()).sqrt()),
        }


def _gradient_of_value(problem: Problem, reward: Any, x: Tensor, t: Tensor) -> Tensor:
    slopes = []
    state = x.double().requires_grad_()
    for at in sorted(set(t.tolist())):
        where = t == at
        part = torch.autograd.grad(value(problem.mixture, state[where], at, reward).sum(), state)[0]  # type: ignore[arg-type]
        slopes.append(part)
    return torch.stack(slopes).sum(0).float()


def _truth(problem: Problem, x: Tensor, t: float, n: int, generator: torch.Generator) -> Tensor:
    """Draws of the exact posterior, or of the teacher's by a long integration of its inner flow; (n, B, ...)."""
    if problem.mixture is not None:
        return problem.mixture.posterior_sample(x.double(), t, n, generator).float()
    steps = 10 if problem.costly else 16
    with torch.no_grad():
        return PosteriorFlow(problem.teacher, LinearPath(), steps=steps, method="midpoint").sample_posterior(
            x, t, n, generator=generator
        )


def _compared(problem: Problem, draws: Tensor, truth: Tensor, x: Tensor, t: float) -> dict[str, Tensor]:
    found, real = (v.flatten(2).transpose(0, 1).double() for v in (draws, truth))  # (B, n, D)
    few = (found[:, :PAIRS], real[:, :PAIRS])
    n = few[1].shape[1]
    apart = torch.stack([torch.cdist(part, part).sum() / (n * (n - 1)) for part in few[1]])
    spread = (real - real.mean(1, keepdim=True)).square().sum(2).mean(1).sqrt()
    seen = (found - found.mean(1, keepdim=True)).square().sum(2).mean(1).sqrt()
    result = {
        "energy": torch.stack([energy_distance(a, b) for a, b in zip(*few, strict=True)]) / apart,
        "mean_error": (found.mean(1) - real.mean(1)).norm(dim=1) / spread,
        "spread_ratio": seen / spread,
    }
    if problem.mixture is not None:
        result["weight_error"] = (_modes(problem, found) - problem.mixture.posterior(x.double(), t).weights).abs().sum(
            1
        ) / 2
    return result


def _modes(problem: Problem, draws: Tensor) -> Tensor:
    """Shares of draws (B, n, D) that belong to each mode, (B, K)."""
    assert problem.mixture is not None
    flat = draws.flatten(0, 1)
    likely = problem.mixture.posterior(flat, 1.0).weights.argmax(1).reshape(draws.shape[:2])
    return torch.stack([(likely == k).double().mean(1) for k in range(problem.mixture.components)], 1)


def _moment_matched(problem: Problem) -> Callable[..., Tensor]:
    def draw(x: Tensor, t: float, n: int, generator: torch.Generator) -> Tensor:
        law = problem.mixture.posterior(x.double(), t)  # type: ignore[union-attr]
        root = torch.linalg.cholesky(law.covariance + 1e-12 * torch.eye(x.shape[1], dtype=torch.float64))
        eps = torch.randn(n, *x.shape, generator=generator, dtype=torch.float64)
        return (law.mean + torch.einsum("bij,nbj->nbi", root, eps)).float()

    return draw
