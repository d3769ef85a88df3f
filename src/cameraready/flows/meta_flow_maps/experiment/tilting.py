"""Where fine-tuned flows end, against the exact tilt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cameraready.flows import sample
from cameraready.flows._toy.distances import energy_distance
from cameraready.flows._toy.networks import MLPVelocity
from cameraready.flows._toy.tilts import tilted
from cameraready.flows.meta_flow_maps import finetune
from cameraready.flows.meta_flow_maps.experiment.problems import SMOKE, Problem

RATES = (3e-3, 1e-2, 3e-2)
ARMS = ("finetune", "finetune-weights", "reward-weighted", "constant-sigma", "not-tuned")


class Corrected(nn.Module):
    """The exact base velocity and what a network adds to it, nothing at first: errors of the end are those of fine-tuning."""

    def __init__(self, problem: Problem, seed: int) -> None:
        super().__init__()
        self.teacher = problem.teacher
        self.network = MLPVelocity(problem.shape[0], width=64, depth=3, generator=torch.Generator().manual_seed(seed))
        nn.init.zeros_(self.network.last.weight)

    def forward(self, x: Tensor, t: Any, y: Any = None) -> Tensor:
        return self.teacher(x, t) + self.network(x, t)


def ends(problem: Problem, name: str, *, runs: int) -> Iterator[dict[str, Any]]:
    """A row for each run of one arm: how far its samples are from the tilted law, in units of how far the base's are."""
    smoke = problem.name == SMOKE
    steps, n = (30, 400) if smoke else (300, 2000)
    if name == "reward-weighted":
        steps *= 2  # a step is one pass through a network and back, half of what a fine-tuning step takes or less
    rates: tuple[float, ...] = RATES if not smoke and name != "not-tuned" else RATES[1:2]
    scored = (
        {rate: _distance(problem, _tuned(problem, name, rate, 900, steps), 900, n) for rate in rates}
        if len(rates) > 1
        else {rates[0]: 0.0}
    )
    rate = min(scored, key=lambda r: scored[r])
    for run in range(runs):
        network = _tuned(problem, name, rate, run, steps)
        base, far = (_distance(problem, each, run, n) for each in (Corrected(problem, 0), network))
        x = _ends(problem, network, run, n)
        yield {
            "run": run,
            "arm": name,
            "rate": rate,
            "energy": far,
            "remaining": max(far, 0.0) / base,
            "reward": float(problem.reward(x).mean()),
        }


def _tuned(problem: Problem, name: str, rate: float, seed: int, steps: int) -> nn.Module:
    network = Corrected(problem, seed)
    if name == "not-tuned":
        return network
    if name == "reward-weighted":
        return _reward_weighted(problem, network, rate, seed, steps)
    found = finetune(
        problem.teacher,
        problem.mfm,
        problem.reward,
        data=problem.draw,
        network=network,
        steps=steps,
        batch=256,
        lr=rate,
        ema=0.98,
        scale=problem.scale,
        sigma=200**0.5 if name == "constant-sigma" else "exact",
        method="weights" if name == "finetune-weights" else "grad",
        seed=seed,
        progress=False,
    )
    return found.network


def _reward_weighted(problem: Problem, network: nn.Module, rate: float, seed: int, steps: int) -> nn.Module:
    """Flow matching with each datum weighted by ``exp(scale reward)``: no posterior draws, the data's own rewards."""
    g = torch.Generator().manual_seed(seed)
    pilot = problem.scale * problem.reward(problem.draw(1024, g))
    offset = torch.logsumexp(pilot, 0) - torch.log(torch.tensor(1024.0))
    optimizer = torch.optim.Adam(network.parameters(), lr=rate)
    averaged = [p.detach().clone() for p in network.parameters()]
    for step in range(1, steps + 1):
        x1 = problem.draw(256, g)
        x0, t = torch.randn(x1.shape, generator=g), torch.rand(len(x1), generator=g)
        weight = torch.exp(problem.scale * problem.reward(x1) - offset)
        x = t[:, None] * x1 + (1 - t)[:, None] * x0
        loss = (weight * (network(x, t) - (x1 - x0)).square().sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        for mean, now in zip(averaged, network.parameters(), strict=True):
            mean.lerp_(now.detach(), 1 - min(0.98, step / (9 + step)))
    with torch.no_grad():
        for mean, now in zip(averaged, network.parameters(), strict=True):
            now.copy_(mean)
    return network


def _ends(problem: Problem, network: nn.Module, seed: int, n: int) -> Tensor:
    noise = torch.randn(n, *problem.shape, generator=torch.Generator().manual_seed(7000 + seed))
    return sample(network, noise, steps=24, method="heun").x.detach()


def _distance(problem: Problem, network: nn.Module, seed: int, n: int) -> float:
    goal = tilted(problem.mixture, problem.reward.scaled(problem.scale))  # type: ignore[arg-type, attr-defined]
    real = goal.sample(n, torch.Generator().manual_seed(8000 + seed))
    return float(energy_distance(_ends(problem, network, seed, n).double(), real))
