"""Networks in training on real images, watched against Gaussian clones; and a user's own model or data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cameraready.evidence import Context, SpecError
from cameraready.flows import FlowProblem
from cameraready.flows._pictures import image_grid
from cameraready.flows._toy.images import digits, patch_range, patches
from cameraready.flows._toy.stacked import StackedMLP
from cameraready.flows.mixed_cumulant import GaussianClone, SimplicityBiasCallback
from cameraready.flows.mixed_cumulant.experiment.networks import StackedMixer

DIGITS, PATCHES = "digits", "patches"
#: Noise levels of the path t x1 + (1 - t) x0.
TIMES = (0.35, 0.65, 0.8)
#: What is trained: steps, batch and learning rate of Adam, which falls to nothing along a cosine.
RECIPES = {"denoiser": (3_000, 64, 2e-3), "mixer": (3_000, 32, 3e-3)}
OWN = (1_500, 64, 2e-3)
#: Shares of the excess over the Wiener denoiser's error, and of the final gap, at which half-way steps are read.
NEAR, HALF = 1.25, 0.5
FEWEST = 100


def data_of(name: str) -> tuple[Tensor, Tensor]:
    """Rows to train on and rows to judge by, (N, 64) each, of one law: held-out digits, or other patches of the same photographs."""
    if name == DIGITS:
        return digits("train")[0].flatten(1), digits("test")[0].flatten(1)
    return patches(20_000, seed=1, split="train").flatten(1), patches(512, seed=2, split="train").flatten(1)


def network(arm: str, seeds: int, dim: int) -> nn.Module:
    return (
        StackedMLP(range(100, 100 + seeds), dim, width=256, depth=2)
        if arm == "denoiser"
        else StackedMixer(seeds, width=24)
    )


def watched(
    net: nn.Module,
    train: Tensor,
    callbacks: list[SimplicityBiasCallback],
    recipe: tuple[int, int, float],
    generator: torch.Generator,
) -> None:
    """Train stacked velocities on the linear path; every callback (they share states) takes down its own seed."""
    steps, batch, rate = recipe
    seeds = len(callbacks)
    optimizer = torch.optim.Adam(net.parameters(), rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    due = 1
    for step in range(1, steps + 1):
        x1 = train[torch.randint(len(train), (seeds, batch), generator=generator)]
        x0 = torch.randn(x1.shape, generator=generator)
        t = torch.rand(seeds, batch, generator=generator)
        x = t[..., None] * x1 + (1 - t[..., None]) * x0
        loss = (net(x, t) - (x1 - x0)).square().mean((1, 2)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step >= due or step == steps:
            due = math.ceil(1.35 * step)
            answers = asked(net, callbacks[0])
            for seed, callback in enumerate(callbacks):
                callback.record(step, [(a[seed], b[seed]) for a, b in answers])


@torch.no_grad()
def asked(net: nn.Module, callback: SimplicityBiasCallback) -> list[tuple[Tensor, Tensor]]:
    """Estimates (S, n, D) of the clean data and clones at every noise level."""
    answers = []
    for t, on_data, on_clones in callback.states():
        x = torch.cat([on_data, on_clones])
        clean = x + (1 - t) * net(x, t)
        answers.append((clean[:, : len(on_data)], clean[:, len(on_data) :]))
    return answers


def trained(name: str, arm: str, runs: int, short: bool, seed: int) -> Iterator[dict[str, Any]]:
    """Rows of one build of network: curves of every seed, and a summary for each noise level."""
    train, test = data_of(name)
    clone = GaussianClone(torch.cat([train, test]))  # with the rows that judge, which favours the Wiener denoiser
    callbacks = [SimplicityBiasCallback(test, clone=clone, times=TIMES) for _ in range(runs)]
    steps, batch, rate = RECIPES[arm]
    generator = torch.Generator().manual_seed(1_000 + seed)
    watched(network(arm, runs, 64), train, callbacks, (40 if short else steps, batch, rate), generator)
    for run, callback in enumerate(callbacks):
        yield from rows_of(callback, arm, str(run))
    if arm == "denoiser":
        yield from pictures(name, test, clone)


def rows_of(callback: SimplicityBiasCallback, arm: str, run: str) -> Iterator[dict[str, Any]]:
    """Curves relative to the Wiener denoiser's error, and what they come to."""
    references = callback.wiener_errors()
    for place, (passage, reference) in enumerate(zip(callback.passages(), references, strict=True)):
        curve = callback.history[place :: len(callback.times)]
        common = {"run": run, "time": passage.time}
        for row in curve[2::2]:
            yield {"arm": arm, **common, "step": row["step"], "relative": row["data"] / reference}
            yield {"arm": f"{arm}-on-clones", **common, "step": row["step"], "relative": row["clones"] / reference}
        yield {"arm": arm, **common, "error": curve[-1]["data"], **summary(curve, reference)}
        if arm == "denoiser":
            yield {"arm": "wiener", **common, "error": reference}


def summary(curve: list[dict[str, float]], reference: float) -> dict[str, float]:
    """Numbers of one seed at one noise level."""
    gaps = np.array([(row["clones"] - row["data"]) / reference for row in curve])
    data, clones, steps = (np.array([row[key] for row in curve]) for key in ("data", "clones", "step"))
    near = int(np.argmax(data <= NEAR * reference)) if (data <= NEAR * reference).any() else len(data) - 1
    # From the end backwards: the step from which on the gap stays above half of what it comes to.
    below = np.flatnonzero(gaps < HALF * gaps[-1])
    half = min(int(below[-1]) + 1 if len(below) else 0, len(gaps) - 1)
    parts = gaps[-1] > 0  # where clones and data never part, shares and lags count against a later parting
    lowest = int(clones.argmin())
    return {
        "final": float(data[-1] / reference),
        "final_gap": float(gaps[-1]),
        "early_gap": float(gaps[near]),
        "early_share": float(gaps[near] / gaps[-1]) if parts else 1.0,
        "pairwise_step": float(steps[near]),
        "half_step": float(steps[half]),
        "lag": float(steps[half] / steps[near]) if parts else 0.0,
        "clone_rise": float(clones[-1] / clones[lowest]),
        "clone_turn": float(steps[lowest]),
    }


def pictures(name: str, test: Tensor, clone: GaussianClone) -> Iterator[dict[str, Any]]:
    drawn = clone.sample(16, torch.Generator().manual_seed(3))
    low, high = (-1.0, 1.0) if name == DIGITS else patch_range()
    for arm, images, what in (("held-out", test[:16], "held-out"), ("clones", drawn, "Gaussian clones of")):
        text = f"{what} {'handwritten digits' if name == DIGITS else 'patches of photographs'}"
        picture = image_grid(images.reshape(-1, 8, 8), columns=8, scale=4, low=float(low), high=float(high))
        yield {
            "arm": arm,
            "run": "0",
            "picture": picture,
            "caption": text,
            "alt": f"Sixteen {text}, grey, 8 by 8 pixels",
        }


# --- a user's own ------------------------------------------------------------------------------------------------------------


def own(problem: FlowProblem, ctx: Context, *, runs: int, short: bool) -> Iterator[dict[str, Any]]:
    """A model against the Wiener denoiser on disjoint parts of the held-out rows; where there is none, a perceptron in training."""
    if len(problem.data) < FEWEST:
        raise SpecError(
            f"{problem.name} has {len(problem.data)} rows; a clone and errors that mean something take {FEWEST} or more"
        )
    data, train, test = (rows.float() for rows in (problem.data, problem.train, problem.test))
    dim = data[0].numel()
    shrinkage = 0.0 if len(data) >= 4 * dim else 0.1
    if problem.needs_training:
        clone = GaussianClone(data.flatten(1), shrinkage=shrinkage)
        callbacks = [SimplicityBiasCallback(test.flatten(1), clone=clone, times=TIMES) for _ in range(runs)]
        steps, batch, rate = OWN
        generator = torch.Generator().manual_seed(ctx.seed)
        recipe = (40 if short else steps, batch, rate)
        watched(StackedMLP(runs, dim, width=256, depth=2), train.flatten(1), callbacks, recipe, generator)
        for run, callback in enumerate(callbacks):
            yield from rows_of(callback, "denoiser", str(run))
        return
    clone = GaussianClone(data, shrinkage=shrinkage)
    for run, part in enumerate(test.chunk(min(runs, len(test) // 20))):
        callback = SimplicityBiasCallback(
            part, clone=clone, times=TIMES, path=problem.path, seed=run, adapt=lambda model: model
        )
        callback.evaluate(problem.velocity, 1)
        for row, reference in zip(callback.history, callback.wiener_errors(), strict=True):
            common = {"run": str(run), "time": row["time"]}
            gap = (row["clones"] - row["data"]) / reference
            yield {
                "arm": "denoiser",
                **common,
                "error": row["data"],
                "final": row["data"] / reference,
                "final_gap": gap,
            }
            yield {"arm": "wiener", **common, "error": reference}
