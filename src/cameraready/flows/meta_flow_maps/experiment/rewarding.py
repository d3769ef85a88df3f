"""What each way to a high reward reaches, and in how many calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cameraready.flows import sample
from cameraready.flows._toy.distances import energy_distance
from cameraready.flows._toy.tilts import tilted
from cameraready.flows.meta_flow_maps import Steered
from cameraready.flows.meta_flow_maps.experiment.problems import DIGITS, SMOKE, Problem, training_passes

#: Settings that an arm chooses from, the mildest or cheapest first: a factor of the tilt, or calls of the map. The first one is taken whose reward, on runs that are
#: not judged, is not worse than the best one's by more than the standard error of their difference.
FACTORS = (1.0, 4.0, 16.0)
#: Euler steps of the base flow: the fewest of 4, 8, 16 whose samples are about as near to the data as those of 32 (the rows of `few` show it).
BASE_STEPS = (8,)
MAP_STEPS = (1, 2, 4)
#: Runs on which settings are compared.
TUNING = 24
STEER_STEPS = 16
SMC_STEPS = 32


@dataclass(frozen=True)
class Reached:
    """One answer for each run: samples (runs, ...) and what each took."""

    x: Tensor
    network_calls: float
    reward_calls: float
    backward_passes: float = 0.0
    effective: float = float("nan")
    trajectory: Tensor | None = None


Way = Callable[[Problem, int, float, torch.Generator], Reached]


def best_of(n: int, *, fast: bool = False) -> Way:
    """The best of `n` samples of the base flow by Euler's method, or of the map's own."""

    def way(problem: Problem, runs: int, setting: float, generator: torch.Generator) -> Reached:
        steps = round(setting)
        best, score = None, torch.full((runs,), -torch.inf)
        left = n
        while left:
            part = min(left, max(1, 4096 // runs))
            left -= part
            noise = torch.randn(runs * part, *problem.shape, generator=generator)
            if fast:
                x = problem.mfm.sample(noise.shape, steps=steps, generator=generator)
            else:
                x = sample(problem.teacher, noise, steps=steps, method="euler").x
            with torch.no_grad():
                rewards = problem.reward(x).reshape(runs, part)
            top, where = rewards.max(1)
            chosen = x.reshape(runs, part, *problem.shape)[torch.arange(runs), where]
            better = (top > score).reshape(-1, *([1] * len(problem.shape)))
            best = chosen if best is None else torch.where(better, chosen, best)
            score = torch.maximum(score, top)
        assert best is not None
        return Reached(best, n * steps, n)

    return way


def steered(method: str, n: int, dynamics: str = "ode") -> Way:
    """One particle, steered in `STEER_STEPS` steps."""

    def way(problem: Problem, runs: int, setting: float, generator: torch.Generator) -> Reached:
        guide = Steered(
            problem.mfm,
            problem.reward,
            n=n,
            method=method,  # type: ignore[arg-type]
            velocity=problem.teacher,
            scale=setting * problem.scale,
            dynamics=dynamics,  # type: ignore[arg-type]
        )
        found = guide.sample((runs, *problem.shape), steps=STEER_STEPS, generator=generator, trajectory=True)
        size = float(found.effective.mean())
        return Reached(found.x, found.network_calls, found.reward_calls, found.backward_passes, size, found.trajectory)

    return way


def smc(particles: int, *, pick: str = "best") -> Way:
    """Feynman-Kac steering: the memoryless diffusion of the base flow, resampled by rewards of posterior means; the best particle is the answer.

    With ``pick="any"`` the answer is a particle drawn by its weight, which has nearly the tilted law.

    Singhal et al., 2025, arXiv:2501.06848, with differences of rewards as potentials and resampling where half of the particles are left.
    """

    def way(problem: Problem, runs: int, setting: float, generator: torch.Generator) -> Reached:
        shape = (runs * particles, *problem.shape)
        x = torch.randn(shape, generator=generator)
        times = torch.linspace(0, 1, SMC_STEPS + 1).tolist()
        times[0] = 0.01
        log_weight, last = torch.zeros(runs, particles), torch.zeros(runs, particles)
        calls = rewards = 0
        with torch.no_grad():
            for t, later in itertools.pairwise(times):
                b = problem.teacher(x, torch.full((len(x),), t))
                calls += 1
                now = setting * problem.scale * problem.reward(x + (1 - t) * b).reshape(runs, particles)
                rewards += 1
                log_weight, last = log_weight + now - last, now
                weight = torch.softmax(log_weight, 1)
                low = 1 / weight.square().sum(1) < particles / 2
                drawn = torch.multinomial(weight, particles, replacement=True, generator=generator)
                keep = torch.where(low[:, None], drawn, torch.arange(particles))
                row = torch.arange(runs)[:, None]
                x, b = (v.reshape(runs, particles, *problem.shape)[row, keep].reshape(shape) for v in (x, b))
                last, log_weight = last[row, keep], torch.where(low[:, None], 0.0, log_weight)
                # The memoryless diffusion, exact for a posterior that is a point (ancestral sampling).
                mean = x + (1 - t) * b
                rest = x - t * mean  # (1 - t) times the noise's mean
                kept = t / later * ((1 - later) / (1 - t)) ** 2
                spread = ((1 - later) ** 2 - kept**2 * (1 - t) ** 2) ** 0.5 if later < 1 else 0.0
                x = later * mean + kept * rest + spread * torch.randn(shape, generator=generator)
            final = problem.reward(x).reshape(runs, particles)
            rewards += 1
        weight = torch.softmax(log_weight + setting * problem.scale * final - last, 1)
        drawn = torch.multinomial(weight, 1, generator=generator)[:, 0]
        where = final.argmax(1) if pick == "best" else drawn
        best = x.reshape(runs, particles, *problem.shape)[torch.arange(runs), where]
        return Reached(best, calls * particles, rewards * particles)

    return way


def ways(problem: Problem) -> dict[str, tuple[Way, tuple[float, ...]]]:
    """The arms, each with the settings that it chooses from."""
    if problem.name == SMOKE:
        return {
            "base": (best_of(1), (8,)),
            "best-of-10": (best_of(10), (8,)),
            "mfm-g": (steered("grad", 4), (1.0,)),
            "mfm-gf": (steered("weights", 16), (1.0,)),
            "dps": (steered("dps", 1), (1.0,)),
            "smc-16": (smc(16), (1.0,)),
        }
    found: dict[str, tuple[Way, tuple[float, ...]]] = {"base": (best_of(1), BASE_STEPS)}
    found |= {f"best-of-{n}": (best_of(n), BASE_STEPS) for n in (10, 100, 1000)}
    found["best-of-1000-fast"] = (best_of(1000, fast=True), MAP_STEPS)
    found["dps"] = (steered("dps", 1), FACTORS)
    found["smc-16"] = (smc(16), FACTORS)
    found |= {"mfm-g-1": (steered("grad", 1), FACTORS), "mfm-g": (steered("grad", 4), FACTORS)}
    found |= {"mfm-g-sde": (steered("grad", 4, "sde"), FACTORS), "mfm-gf": (steered("weights", 16), FACTORS)}
    if problem.name != DIGITS:
        found |= {
            "smc-64": (smc(64), FACTORS),
            "mfm-g-16": (steered("grad", 16), FACTORS),
            "mfm-gf-64": (steered("weights", 64), FACTORS),
        }
    return found


def laws(problem: Problem, *, runs: int, particles: int) -> Iterator[dict[str, Any]]:
    """A row for each run and arm: squared energy distance of particles, steered at exactly the tilt, to the exact tilted law, in units of the base's."""
    arms = {
        "base": best_of(1),
        "dps": steered("dps", 1),
        "mfm-g": steered("grad", 4),
        "mfm-g-16": steered("grad", 16),
        "mfm-g-sde": steered("grad", 4, "sde"),
        "mfm-gf": steered("weights", 16),
        "smc-16": smc(16, pick="any"),
    }
    goal = tilted(problem.mixture, problem.reward.scaled(problem.scale))  # type: ignore[arg-type, attr-defined]
    for run in range(runs):
        real = goal.sample(particles, torch.Generator().manual_seed(400 + run))
        far: dict[str, float] = {}
        for name, way in arms.items():
            found = way(problem, particles, 8.0 if name == "base" else 1.0, torch.Generator().manual_seed(500 + run))
            far[name] = float(energy_distance(found.x.double(), real))
            calls = found.network_calls + found.reward_calls
            yield {
                "run": run,
                "arm": name,
                "law": far[name],
                "law_remaining": far[name] / far["base"],
                "law_calls": calls,
            }


def curve(problem: Problem, name: str, way: Way, settings: tuple[float, ...], *, runs: int) -> Iterator[dict[str, Any]]:
    """A row for each run of one arm: reward, calls, how plausible the answer is; the first row carries a picture."""
    chosen = _chosen(problem, way, settings)
    found = way(problem, runs, chosen, torch.Generator().manual_seed(1))
    with torch.no_grad():
        rewards = problem.reward(found.x)
    odd = implausibility(problem, found.x)
    calls = found.network_calls + found.reward_calls
    training = training_passes(problem.name)
    for run in range(runs):
        yield {
            "run": run,
            "arm": name,
            "setting": float(chosen),
            "reward": float(rewards[run]),
            "network_calls": float(found.network_calls),
            "reward_calls": float(found.reward_calls),
            "backward_passes": float(found.backward_passes),
            "calls": float(calls),
            "passes": float(calls + 2 * found.backward_passes),
            "training": training if name.startswith("mfm") or name.endswith("fast") else 0.0,
            "effective": float(found.effective),
            "implausible": float(odd[run]),
            **(pictures(problem, name, found) if run == 0 else {}),
        }


def implausibility(problem: Problem, x: Tensor) -> Tensor:
    """How far from anything real: minus the log density where it is known, else the distance to the nearest training datum; (B,)."""
    if problem.mixture is not None:
        return -problem.mixture.log_prob(x.double())
    near = problem.extra.get("train", problem.reference)
    return torch.cdist(x.flatten(1), near.flatten(1)).min(1).values  # type: ignore[union-attr]


def pictures(problem: Problem, name: str, found: Reached) -> dict[str, str]:
    """A picture of an arm's samples, with a description, where there is something to see."""
    from cameraready.flows._pictures import image_grid, plane

    if problem.name == DIGITS:
        return {
            "picture": image_grid(found.x[:12], columns=6, scale=3),
            "alt": f"{min(len(found.x), 12)} digits of {name}",
            "caption": f"{name}: mean reward {float(problem.reward(found.x).mean()):.2f}, {found.network_calls + found.reward_calls:.0f} calls each",
        }
    if problem.shape != (2,) or name not in ("base", "mfm-g", "dps", "best-of-1000"):
        return {}
    cloud = problem.draw(300, torch.Generator().manual_seed(3))
    return {
        "picture": plane(
            cloud,
            found.x,
            paths=None if found.trajectory is None else found.trajectory[:, :12],
            labels=("data", name),
            span=(-3.2, 3.2, -3.2, 3.2),
        ),
        "alt": f"points of the data and {len(found.x)} samples of {name}"
        + (", with their paths from noise" if found.trajectory is not None else ""),
        "caption": f"{name}: mean reward {float(problem.reward(found.x).mean()):.2f}, {found.network_calls + found.reward_calls:.0f} calls each",
    }


def _chosen(problem: Problem, way: Way, settings: tuple[float, ...]) -> float:
    """The first setting that is not worse than the best by more than the standard error of the difference, on runs that are not judged."""
    if len(settings) == 1:
        return settings[0]
    runs = TUNING if problem.name != DIGITS else TUNING // 3
    with torch.no_grad():
        tried = [
            problem.reward(way(problem, runs, setting, torch.Generator().manual_seed(99)).x.detach())
            for setting in settings
        ]
    best = max(tried, key=lambda rewards: float(rewards.mean()))
    for setting, rewards in zip(settings, tried, strict=True):
        gap = best - rewards
        if float(gap.mean()) <= float(gap.std()) / runs**0.5:
            return setting
    return settings[0]
