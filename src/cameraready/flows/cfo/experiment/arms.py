"""What is compared: CFO and its rivals, for networks trained side by side, built from the component's public pieces."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cameraready.flows._toy.stacked import StackedMLP
from cameraready.flows.cfo import (
    AugmentedLagrangian,
    FixedWeights,
    FlowPolicy,
    FlowSolver,
    Objective,
    Solver,
    WeightedPoints,
    exact_optimum,
)
from cameraready.flows.cfo.experiment.problems import Steering
from cameraready.flows.cfo.objective import Scores

#: The weights of claim 3, and a narrower grid for a user who knows where to look.
WIDE = [10 ** (-6 + 12 * k / 17) for k in range(18)]
NARROW = [10 ** (-2 + 4 * k / 7) for k in range(8)]
#: A bound counts as met in a sweep, as in `ConstrainedFlowOptimizer`, up to so many standard errors.
SLACK = 2.0
#: Longest gradient that guidance follows.
LONGEST = 20.0


@dataclass
class Tuned:
    """Networks after an arm's budget, what it spent, and what is known of its rounds."""

    policy: FlowPolicy
    iterations: int
    rounds: list[dict[str, Any]] = field(default_factory=list)


def alone(solver: FlowSolver, base: FlowPolicy, task: Steering, g: torch.Generator, *, iterations: int) -> Tuned:
    """The inner solver on the reward alone."""
    policy = solver.copy(base)
    objective = FixedWeights(task.reward, task.constraint, task.bound, 0.0, runs=base.runs)
    solver.solve(policy, base, objective, kl=task.kl, steps=iterations, generator=g)
    return Tuned(policy, iterations)


def cfo(
    solver: FlowSolver,
    base: FlowPolicy,
    task: Steering,
    g: torch.Generator,
    *,
    rounds: int,
    inner: int,
    n_mc: int,
    objective: AugmentedLagrangian | Cooper | None = None,
    **settings: Any,
) -> Tuned:
    """Rounds of the inner solver under an augmented Lagrangian; what `ConstrainedFlowOptimizer` does, for runs side by side."""
    policy = solver.copy(base)
    if objective is None:
        objective = AugmentedLagrangian(task.reward, task.constraint, task.bound, runs=base.runs, **settings)
    kept = []
    for number in range(1, rounds + 1):
        solver.solve(policy, base, objective, kl=task.kl, steps=inner, generator=g)
        x, _ = solver.draw(policy, n_mc, g)
        scores = objective.scores(x)
        update = objective.update(scores.constraint, valid=scores.valid)
        kept.append(
            {
                "round": number,
                "excess": (update.gap / abs(task.bound)).reshape(-1).tolist(),
                "multiplier": update.multiplier.reshape(-1).tolist(),
                "penalty": update.penalty.reshape(-1).tolist(),
            }
        )
    return Tuned(policy, rounds * inner, kept)


def checked(solver: Any) -> Solver:
    """The solver, or a TypeError that says what one is."""
    if not isinstance(solver, Solver) or isinstance(solver, type):
        raise TypeError(
            f"an arm of your own must be a Solver (an instance; derive it from FlowSolver and write solve), got {solver!r}"
        )
    return solver


def one_by_one(solver: Any, base: FlowPolicy, task: Steering, g: torch.Generator, **loop: Any) -> Tuned:
    """CFO (expectation form) with an inner solver of a user's own, which knows nothing of runs side by side: one network after the other."""
    stack, rounds, iterations = taken(base.velocity, torch.arange(base.runs[0])), [], 0
    for place in range(base.runs[0]):
        opened = checked(solver).open(base.velocity.single(place).requires_grad_(True), base.shape)
        tuned = cfo(solver, opened, task, g, penalty="expectation", **loop)
        stack.load(place, tuned.policy.module)
        rounds.append(tuned.rounds)
        iterations = tuned.iterations
    joined = [
        {"round": each[0]["round"], "excess": [one["excess"][0] for one in each]} for each in zip(*rounds, strict=True)
    ]
    return Tuned(FlowPolicy(stack, base.shape, base.runs).freeze(), iterations, joined)


# --- cooper ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CooperUpdate:
    gap: Tensor
    multiplier: Tensor
    penalty: Tensor


class Cooper(Objective):
    """cooper-optim's augmented Lagrangian on E[c] - B, with its own multiplier, penalty updater and dual optimizer; one constraint a run."""

    def __init__(self, task: Steering, runs: tuple[int, ...], *, rho: float = 0.5, eta: float = 1.25) -> None:
        import cooper

        super().__init__(task.reward, task.constraint, 1, runs)
        count = math.prod(runs)
        self.bound, self._cooper = task.bound, cooper
        self.lagrange = cooper.multipliers.DenseMultiplier(
            init=torch.zeros(count, dtype=torch.float64), dtype=torch.float64
        )
        self.coefficient = cooper.penalty_coefficients.DensePenaltyCoefficient(
            init=torch.full((count,), rho, dtype=torch.float64)
        )
        self.held = cooper.Constraint(
            constraint_type=cooper.ConstraintType.INEQUALITY,
            formulation_type=cooper.formulations.AugmentedLagrangian,
            multiplier=self.lagrange,
            penalty_coefficient=self.coefficient,
        )
        # Tolerance 0 and no restart: the penalty grows after every violated round, by the same factor as CFO's.
        self.growth = cooper.penalty_coefficients.MultiplicativePenaltyCoefficientUpdater(eta, 0.0, has_restart=False)

    def combine(self, scores: Scores) -> Tensor:
        """r - price (c - B), the price being the derivative of cooper's primal Lagrangian in E[c]."""
        over = scores.constraint[..., 0] - self.bound
        mean = (over.detach() * scores.valid).sum(-1) / scores.valid.sum(-1)
        violation = mean.reshape(-1).clone().requires_grad_(True)
        with torch.enable_grad():
            state = self._cooper.ConstraintState(violation=violation)
            store = self.held.compute_contribution_to_lagrangian(state, "primal")
            (price,) = torch.autograd.grad(store.lagrangian_contribution, violation)
        return scores.reward - price.reshape(mean.shape).unsqueeze(-1) * over

    def update(self, constraint: Tensor, *, valid: Tensor | None = None) -> CooperUpdate:
        """A step of dual ascent whose rate is the penalty, and cooper's own updates of both."""
        gap = (constraint[..., 0] - self.bound).mean(-1).reshape(-1)
        before, penalty = self.lagrange.weight.detach().clone(), self.coefficient.value.clone()
        state = self._cooper.ConstraintState(violation=gap)
        dual = self.held.compute_contribution_to_lagrangian(state, "dual").lagrangian_contribution
        (slope,) = torch.autograd.grad(dual, self.lagrange.weight)
        with torch.no_grad():
            self.lagrange.weight += penalty * slope
        self.lagrange.post_step_()
        self.growth.step({self.held: state})
        return CooperUpdate(gap, -before, penalty)


# --- fixed weights ----------------------------------------------------------------------------------------------------------


def sweep(
    solver: FlowSolver,
    base: FlowPolicy,
    task: Steering,
    g: torch.Generator,
    *,
    weights: list[float],
    iterations: int,
    n_mc: int,
) -> Tuned:
    """Every weight with its share of the iterations, side by side; of those that meet the bound the one with the most reward, else the least violation."""
    (runs,) = base.runs
    many = FlowPolicy(repeated(base.velocity, len(weights)), base.shape, (len(weights) * runs,)).freeze()
    each = torch.tensor(weights, dtype=torch.float64).repeat_interleave(runs).unsqueeze(-1)
    objective = FixedWeights(task.reward, task.constraint, task.bound, each, runs=many.runs)
    policy, share = solver.copy(many), iterations // len(weights)
    solver.solve(policy, many, objective, kl=task.kl, steps=share, generator=g)
    x, _ = solver.draw(policy, n_mc, g)
    best = chosen(task.reward(x), task.constraint(x), task.bound, len(weights))
    places = best * runs + torch.arange(runs)
    picked = FlowPolicy(taken(policy.velocity, places), base.shape, base.runs)
    return Tuned(picked, share * len(weights), [{"weight": [weights[int(k)] for k in best]}])


def chosen(reward: Tensor, constraint: Tensor, bound: float, settings: int) -> Tensor:
    """Of each run the place of the best setting: (settings * runs, n) scores, result (runs,)."""
    mean, n = constraint.double().mean(-1), constraint.shape[-1]
    over = (mean - bound - SLACK * constraint.double().std(-1) / math.sqrt(n)).reshape(settings, -1)
    gain = reward.double().mean(-1).reshape(settings, -1)
    feasible = over <= 0
    by_reward = torch.where(feasible, gain, -torch.inf).argmax(0)
    return torch.where(feasible.any(0), by_reward, over.argmin(0))


def repeated(net: StackedMLP, times: int) -> StackedMLP:
    """All networks of a stack, that many times over."""
    return taken(net, torch.arange(net.seeds).repeat(times))


def taken(net: StackedMLP, places: Tensor) -> StackedMLP:
    """The networks at these places of a stack, as a stack."""
    made = StackedMLP(
        len(places),
        net.dim,
        net.width,
        net.depth,
        classes=net.classes,
        fourier=net.fourier,
        extra=net.extra,
        times=net.times,
    ).to(net.last.bias)
    made.load_state_dict({name: value[places].clone() for name, value in net.state_dict().items()})
    return made


# --- at inference -------------------------------------------------------------------------------------------------------------


def guided(base: FlowPolicy, task: Steering, noise: Tensor, weight: Tensor, *, strength: float, steps: int) -> Tensor:
    """Samples of the base under the gradient of (r - weight c) / alpha at the predicted clean sample (Chung et al., 2023, arXiv:2209.14687).

    Exact guidance adds (1 - t) / t times the gradient of log E[exp(f / alpha) | x_t]; this takes f at E[x_1 | x_t] instead, and a `strength`.
    """
    x, h = noise, 1 / steps
    for k in range(steps):
        t = k * h
        with torch.enable_grad():
            leaf = x.detach().requires_grad_(True)
            v = base(leaf, t)
            clean = leaf + (1 - t) * v
            value = (task.reward(clean) - weight * task.constraint(clean)) / task.kl
            (slope,) = torch.autograd.grad(value.sum(), leaf)
        slope = slope * (
            LONGEST / slope.norm(dim=-1, keepdim=True).clamp(min=LONGEST)
        )  # steep weights would leave the numbers
        x = x + h * (v.detach() + strength * (1 - t) / (t + h) * slope)
    return x.detach()


def guided_best(
    base: FlowPolicy, task: Steering, g: torch.Generator, *, strength: float, steps: int, n_mc: int
) -> Callable[[int], Tensor]:
    """Guidance with the best of `NARROW` weights for each run, chosen on samples of their own; a sampler of n."""
    gains, costs = [], []
    for weight in NARROW:
        x = guided(base, task, base.noise(n_mc, g), torch.tensor(weight), strength=strength, steps=steps)
        gains.append(task.reward(x))
        costs.append(task.constraint(x))
    best = chosen(torch.cat(gains), torch.cat(costs), task.bound, len(NARROW))
    weights = torch.tensor(NARROW)[best].unsqueeze(-1)
    return lambda count: guided(base, task, base.noise(count, g), weights, strength=strength, steps=steps)


def resampled(
    solver: FlowSolver,
    base: FlowPolicy,
    task: Steering,
    g: torch.Generator,
    n: int,
    pool: int,
    told: dict[str, list[Any]],
) -> Tensor:
    """Draws of the base picked by exp((r - mu c) / alpha), mu being the price at which the picked ones meet the bound: no training at all.

    `told` gets ``draws_each``, the draws that one effective sample took.
    """
    x, _ = solver.draw(base, pool * n, g)
    kept, told["draws_each"] = [], []
    for each in x:
        best = exact_optimum(WeightedPoints(each), task.reward, task.constraint, [task.bound], kl=task.kl)
        weights = best.law.log_weights.exp()
        told["draws_each"].append(float(len(each) * weights.square().sum()))
        kept.append(each[torch.multinomial(weights, n, replacement=True, generator=g)])
    return torch.stack(kept)
