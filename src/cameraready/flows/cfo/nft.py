"""A zero-order inner solver in the manner of DiffusionNFT: good samples pull the velocity, bad ones push it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cameraready.flows.cfo.memoryless import normal, simulate
from cameraready.flows.cfo.objective import Objective
from cameraready.flows.cfo.solver import FlowPolicy, FlowSolver


@dataclass(frozen=True, kw_only=True)
class NFT(FlowSolver):
    """Tune a flow by values of f alone: rewards and constraints may be black boxes, and gradients need not exist.

    Samples of the old policy get a weight w in [0, 1] by their advantage; with v+ = (1 - b) v_old + b v and v- = (1 + b) v_old - b v the loss is
    w |v+ - u|^2 + (1 - w) |v- - u|^2 on noised samples, u the conditional velocity. The old policy follows as a moving average. The advantage is that of
    f - alpha log(p / p_pre), the log-ratio being added up along the memoryless trajectory that made the sample: a step of size e moves log p by e times the advantage, so
    that the only law that stays is p_pre exp(f / alpha). (DiffusionNFT itself has no KL in the reward and no such law.)

    Where gradients exist, `AdjointMatching` learns more from the same trajectories.

    Parameters
    ----------
    strength : float
        b.
    decay : float
        Of the old policy's moving average, from 0 (it is the newest) to below 1.
    spread : float
        Advantages of so many standard deviations and more get weight 0 or 1.
    times_per_update : int
        Times at which each sample is noised.
    updates : int
        Optimizer steps on each batch of samples.
    lr, batch, steps, path, scheme, clip_norm, sample_steps, sample_method, micro_batch, times_together
        As of `FlowSolver`.

    References
    ----------
    Zheng et al., 2025, arXiv:2509.16117 (DiffusionNFT), Alg. 1; its use within rounds: Gutjahr et al., 2026, arXiv:2605.30610.
    """

    strength: float = 1.0
    decay: float = 0.9
    spread: float = 2.0
    times_per_update: int = 8
    updates: int = 1

    _positive: ClassVar[tuple[str, ...]] = (*FlowSolver._positive, "strength", "spread", "times_per_update", "updates")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be from 0 to below 1, got {self.decay!r}")

    def solve(
        self,
        policy: FlowPolicy,
        base: FlowPolicy,
        objective: Objective,
        *,
        kl: float,
        steps: int,
        generator: torch.Generator,
        report: Callable[[int], None] | None = None,
    ) -> dict[str, float]:
        """`steps` iterations, each a batch of samples; see `Solver.solve`. Samples whose f is not finite count as the worst of their batch."""
        grid, events, old = self.grid(), len(policy.shape), policy.copy().freeze()
        optimizer, masked, total = self.optimizer(policy), 0, 0.0
        for done in range(steps):
            made = simulate(old, policy.noise(self.batch, generator), grid, generator, base=base, events=events)
            with torch.no_grad():
                scores = objective.scores(made.end)
                value = objective.filled(objective.combine(scores), scores.valid)
            masked += scores.masked
            weight = self.weights(value, made.log_ratio, kl)
            for _ in range(self.updates):
                loss = self.loss(policy, old, made.end, weight, generator)
                self.step(loss, optimizer, policy, done)
                total += float(loss.detach()) / self.updates
                self.follow(old, policy)
            if report is not None:
                report(done + 1)
        return {"loss": total / max(steps, 1), "masked": float(masked)}

    # --- parts of an iteration --------------------------------------------------------------------------------------------

    def weights(self, value: Tensor, log_ratio: Tensor | None, kl: float) -> Tensor:
        """Weights in [0, 1] of samples, shape (*runs, B): 1/2 at the mean advantage."""
        gained = value if log_ratio is None else value - kl * log_ratio
        advantage = gained - gained.mean(-1, keepdim=True)
        width = self.spread * advantage.std(-1, keepdim=True, correction=0).clamp(min=1e-12)
        return 0.5 + 0.5 * (advantage / width).clamp(-1.0, 1.0)

    def loss(
        self, policy: FlowPolicy, old: FlowPolicy, x1: Tensor, weight: Tensor, generator: torch.Generator
    ) -> Tensor:
        """The contrast of samples noised at `times_per_update` stratified times: mean over samples and times, sum over runs."""
        axis, lead = len(policy.runs), weight.ndim
        n = self.times_per_update
        jitter = torch.rand(n, generator=generator, device=generator.device).tolist()
        times = [(k + jitter[k]) / n for k in range(n)]
        noise = [normal(tuple(x1.shape), generator, x1) for _ in times]
        states = [self.path.interpolate(x1, x0, t) for x0, t in zip(noise, times, strict=True)]
        goals = torch.cat([self.path.target(x1, x0, t) for x0, t in zip(noise, times, strict=True)], axis)
        with torch.no_grad():
            before = old.at_times(states, times)
        now = policy.at_times(states, times)
        moved = self.strength * (now - before)
        w = torch.cat([weight] * n, axis).to(now.dtype)
        good = (before + moved - goals).flatten(lead).square().mean(-1)
        bad = (before - moved - goals).flatten(lead).square().mean(-1)
        return (w * good + (1 - w) * bad).mean(-1).sum()

    @torch.no_grad()
    def follow(self, old: FlowPolicy, policy: FlowPolicy) -> None:
        """Move the old policy's parameters a step towards the new ones."""
        for mine, its in zip(old.velocity.parameters(), policy.velocity.parameters(), strict=True):
            mine.lerp_(its.detach(), 1 - self.decay)
