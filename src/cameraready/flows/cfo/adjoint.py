"""Adjoint Matching: the first-order inner solver, a regression of the velocity on a reward's gradient pulled back in time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cameraready.flows.cfo.memoryless import MemorylessSteps, lean_adjoint, simulate
from cameraready.flows.cfo.objective import Objective
from cameraready.flows.cfo.solver import FlowPolicy, FlowSolver


@dataclass(frozen=True, kw_only=True)
class AdjointMatching(FlowSolver):
    """Tune a flow towards p_pre exp(f / alpha) by adjoint matching: needs gradients of reward and constraint, keeps no graph of a trajectory.

    One iteration draws memoryless trajectories of the model as it is, pulls the gradient of f / alpha back through the *base* model (the lean adjoint a), and
    moves the velocity towards v_base - s^2 / 2 a by least squares, s being the noise of the memoryless process. Where rewards are black boxes take `NFT`.

    Parameters
    ----------
    cutoff : float
        Times before it are not trained. The authors take 0.5, which leaves the first half of the flow, and with it modes, as they are.
    final_share, random_share : float
        Shares of the steps that each update uses: the last ones always, and so many of the others at random.
    times_per_update : int
        Of those, at most so many.
    gradient_quantile, gradient_factor : float
        Gradients of f longer than `gradient_factor` times this quantile of the batch's are shortened to that; factor 0 leaves all as they are.
    loss_cap : float
        Most that one sample at one time adds to the loss, times alpha^-2; 0 is no cap. (The authors' LCT.)
    jacobian_up_to : int
        Samples of at most so many numbers: Jacobians of all steps are taken at once instead of one product after another. The same up to rounding, and faster.
    lr, batch, steps, path, scheme, clip_norm, sample_steps, sample_method, micro_batch, times_together
        As of `FlowSolver`.

    Raises
    ------
    ValueError
        An argument is out of range; or, in `solve`, reward or constraint has no gradient.

    References
    ----------
    Domingo-Enrich, Drozdzal, Karrer and Chen, 2025, arXiv:2409.08861, Alg. 1; its use within rounds: Gutjahr et al., 2026, arXiv:2605.30610.
    """

    cutoff: float = 0.0
    final_share: float = 0.25
    random_share: float = 0.25
    times_per_update: int = 10
    gradient_quantile: float = 0.99
    gradient_factor: float = 3.0
    loss_cap: float = 0.0
    jacobian_up_to: int = 4

    _positive: ClassVar[tuple[str, ...]] = (*FlowSolver._positive, "times_per_update")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("cutoff", "final_share", "random_share", "gradient_quantile"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {value!r}")
        for name in ("gradient_factor", "loss_cap", "jacobian_up_to"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)!r}")
        if self.final_share + self.random_share == 0:
            raise ValueError("final_share and random_share are both 0, so that no time would be trained")
        if not any(t >= self.cutoff for t in self.grid().times[:-1]):
            raise ValueError(f"no step begins at the cutoff {self.cutoff:g} or later")

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
        """`steps` iterations of adjoint matching; see `Solver.solve`. Samples whose f is not finite are left out of the loss and counted."""
        grid = self.grid()
        optimizer, masked, total = self.optimizer(policy), 0, 0.0
        for done in range(steps):
            states = simulate(
                policy, policy.noise(self.batch, generator), grid, generator, events=len(policy.shape)
            ).states
            found = objective.gradient(states[-1])
            masked += found.scores.masked
            valid = found.scores.valid
            terminal = -self.shortened(found.gradient, valid) / kl
            adjoints, velocities = self.pulled(base, states, terminal, grid)
            chosen = self.chosen(grid, generator)
            loss = self.loss(policy, states, velocities, adjoints, valid, chosen, grid, kl)
            self.step(loss, optimizer, policy, done)
            total += float(loss.detach())
            if report is not None:
                report(done + 1)
        # A batch costs T evaluations of the policy, T of the base with their products, and those that are trained.
        return {"loss": total / max(steps, 1), "masked": float(masked)}

    # --- parts of an iteration --------------------------------------------------------------------------------------------

    def shortened(self, gradient: Tensor, valid: Tensor) -> Tensor:
        """Gradients of samples (*runs, B, ...), none longer than `gradient_factor` times the batch's quantile."""
        if self.gradient_factor == 0:
            return gradient
        lead = valid.ndim
        norms = gradient.flatten(lead).double().norm(dim=-1)
        counted = torch.where(valid, norms, torch.nan)
        limit = self.gradient_factor * torch.nanquantile(counted, self.gradient_quantile, dim=-1, keepdim=True)
        factor = (limit / norms.clamp(min=1e-300)).clamp(max=1.0)
        return gradient * factor.to(gradient.dtype).reshape(*valid.shape, *[1] * (gradient.ndim - lead))

    def pulled(
        self, base: FlowPolicy, states: list[Tensor], terminal: Tensor, grid: MemorylessSteps
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Adjoints after each step, and the base's velocities before it, T of each."""
        if math.prod(base.shape) <= self.jacobian_up_to and len(base.shape) == 1:
            return _by_jacobians(base, states, terminal, grid)
        return lean_adjoint(base, states, terminal, grid)

    def chosen(self, grid: MemorylessSteps, generator: torch.Generator) -> list[int]:
        """The steps of one update: the last ones, some of the others at random, at most `times_per_update`."""
        usable = [k for k in range(len(grid)) if grid.times[k] >= self.cutoff]
        last = round(self.final_share * len(usable))
        early, late = usable[: len(usable) - last], usable[len(usable) - last :]
        some = _some(early, math.ceil(self.random_share * len(usable)), generator)
        return sorted(_some(some + late, self.times_per_update, generator))

    def loss(
        self,
        policy: FlowPolicy,
        states: list[Tensor],
        velocities: list[Tensor],
        adjoints: list[Tensor],
        valid: Tensor,
        chosen: list[int],
        grid: MemorylessSteps,
        kl: float,
    ) -> Tensor:
        """Sum over times, mean over samples and sum over runs of ||control (v - v_base) + noise a||^2 a unit of time."""
        axis = len(policy.runs)
        tuned = policy.at_times([states[k] for k in chosen], [grid.times[k] for k in chosen])
        total = tuned.new_zeros(())
        share = valid / valid.sum(-1, keepdim=True).clamp(min=1)
        for k, v in zip(chosen, tuned.chunk(len(chosen), axis), strict=True):
            width = grid.times[k + 1] - grid.times[k]
            error = grid.control(k) * (v - velocities[k]) + grid.noise[k] * adjoints[k]
            squared = error.flatten(axis + 1).square().sum(-1) / width
            if self.loss_cap > 0:
                squared = squared.clamp(max=self.loss_cap / kl**2)
            total = total + (share.to(squared.dtype) * squared).sum()
        return total


def _some(of: list[int], most: int, generator: torch.Generator) -> list[int]:
    if len(of) <= most:
        return list(of)
    order = torch.randperm(len(of), generator=generator, device=generator.device).tolist()
    return [of[place] for place in order[:most]]


def _by_jacobians(
    base: FlowPolicy, states: list[Tensor], terminal: Tensor, grid: MemorylessSteps
) -> tuple[list[Tensor], list[Tensor]]:
    """As `lean_adjoint`, for vectors of few numbers: one call of the base on all steps, one product for each coordinate."""
    axis, count = len(base.runs), len(grid)
    with torch.enable_grad():
        inputs = [each.detach().requires_grad_(True) for each in states[:-1]]
        found = base.at_times(inputs, list(grid.times[:-1]))
        rows = [
            torch.autograd.grad(found[..., i].sum(), inputs, retain_graph=i + 1 < found.shape[-1])
            for i in range(found.shape[-1])
        ]
    jacobians = [torch.stack([row[k] for row in rows], -2) for k in range(count)]  # d v_i / d x_j at [..., i, j]
    adjoint, adjoints = terminal, [terminal] * count
    for k in range(count - 1, 0, -1):
        adjoint = grid.keep[k] * adjoint + grid.move[k] * (adjoint.unsqueeze(-2) @ jacobians[k]).squeeze(-2)
        adjoints[k - 1] = adjoint
    return adjoints, list(found.detach().chunk(count, axis))
