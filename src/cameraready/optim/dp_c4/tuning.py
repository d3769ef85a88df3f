"""Settings for every arm from a public twin of a workload: the same grid size for each, all of a grid at once.

For a linear model a record's gradient is a number times its row, and so are its clipped gradient and its reference. The forms here keep these numbers alone,
for a whole grid of settings together; tests hold them to the optimizers, step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cameraready.optim.dp_c4.arms import (
    ANCHOR_SHARE,
    RATE,
    RESTART,
    SMOOTHNESS,
    Budget,
    Settings,
    count_noise,
    decaying_shares,
    noise_for,
    snapshot_steps,
    thresholds,
    train_network,
)
from cameraready.optim.dp_c4.schedules import noise_shares
from cameraready.optim.dp_c4.workloads import Array, Images, Problem, twin_of

#: Six step sizes over two and a half decades, in units of one over the twin's mean squared row norm.
LR = np.geomspace(1.0, 300.0, 6)
#: Thresholds in units of the twin's median row norm: of single gradients, or in table mode of all steps together.
THRESHOLDS = (0.1, 0.3, 1.0, 3.0)
#: Four values of each arm's second number.
SECOND: Mapping[str, tuple[float, ...]] = {
    **dict.fromkeys(("c4", "c4-uniform", "clip21", "c4-snapshot", "dp-sgd", "dp-sgd-poisson", "decay"), THRESHOLDS),
    "auto-s": (0.01, 0.1, 1.0, 10.0),
    "adaclip": (0.5, 0.7, 0.9, 0.97),
}
TWINS = 2


def tuned(problem: Problem, budget: Budget, arms: list[str]) -> dict[str, Settings]:
    """For each arm the settings of its grid with the smallest mean excess loss over the twins."""
    losses: dict[str, list[Array]] = {arm: [] for arm in arms}
    grids: dict[str, list[Settings]] = {}
    for seed in range(TWINS):
        twin = twin_of(problem, seed)
        best = twin.value(twin.optimum())
        for arm in arms:
            grids[arm] = grid(twin_of(problem, 0), arm)
            weights = GRIDS[arm](twin, budget, grids[arm], seed)
            losses[arm].append(np.array([twin.value(w) - best if np.isfinite(w).all() else np.inf for w in weights.T]))
    return {arm: grids[arm][int(np.argmin(np.mean(losses[arm], axis=0)))] for arm in arms}


def grid(twin: Problem, arm: str) -> list[Settings]:
    """24 settings, in units that the twin sets, which is public."""
    norms = np.linalg.norm(twin.features, axis=1)
    unit = 1.0 if arm in ("auto-s", "adaclip") else float(np.median(norms))
    steps = LR / np.mean(norms**2)
    if arm == "auto-s":  # its gradients have norm one whatever the rows'
        steps = steps * float(np.median(norms))
    return [Settings(float(lr), float(unit * second)) for lr in steps for second in SECOND[arm]]


# --- the arms' forms ---------------------------------------------------------------------------------------------------------


class _Grid:
    """State of a whole grid: weights (d, K), step sizes and second numbers (K,), the same chance for all."""

    def __init__(self, problem: Problem, settings: list[Settings], seed: int) -> None:
        self.problem = problem
        self.lr = np.array([s.lr for s in settings])
        self.second = np.array([s.second for s in settings])
        self.weights = np.zeros((problem.d, len(settings)))
        self.norms = np.linalg.norm(problem.features, axis=1)[:, None]
        self.rng = np.random.default_rng([seed, 0x6D])

    def noise(self) -> Array:
        return self.rng.normal(size=(self.problem.d, 1))

    def rows(self, rate: float) -> Problem:
        picked = self.rng.random(self.problem.n) < rate if rate < 1.0 else slice(None)
        return Problem("part", self.problem.features[picked], self.problem.target[picked], self.problem.loss)

    def move(self, gradient: Array) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            self.weights = self.weights - self.lr * (gradient + self.problem.l2 * self.weights)


def shortened(slopes: Array, norms: Array, threshold: Array | float) -> Array:
    """Slopes of clipped gradients: a gradient is its slope times its row."""
    length = np.abs(slopes) * norms
    return np.where(length > threshold, slopes / np.maximum(length, 1e-300) * threshold, slopes)


def plain(rate: float = 1.0, shares: Callable[[int], list[float]] | None = None) -> Callable[..., Array]:
    def run(problem: Problem, budget: Budget, settings: list[Settings], seed: int) -> Array:
        state, steps = _Grid(problem, settings, seed), int(budget.evaluations / rate)
        noise, each = noise_for(budget, steps, rate), shares(steps) if shares else [1.0] * steps
        for step in range(steps):
            part = state.rows(rate)
            norms = np.linalg.norm(part.features, axis=1)[:, None] if rate < 1.0 else state.norms
            slopes = shortened(part.slopes(part.features @ state.weights), norms, state.second)
            total = part.features.T @ slopes + noise * each[step] * state.second * state.noise()
            state.move(total / (rate * problem.n))
        return state.weights

    return run


def normalised(problem: Problem, budget: Budget, settings: list[Settings], seed: int) -> Array:
    state, steps = _Grid(problem, settings, seed), budget.evaluations
    noise = noise_for(budget, steps)
    for _ in range(steps):
        slopes = problem.slopes(problem.features @ state.weights)
        slopes = slopes / (np.abs(slopes) * state.norms + state.second)
        state.move((problem.features.T @ slopes + noise * state.noise()) / problem.n)
    return state.weights


def adaptive(problem: Problem, budget: Budget, settings: list[Settings], seed: int) -> Array:
    state, steps = _Grid(problem, settings, seed), budget.evaluations
    noise = noise_for(budget, steps)
    of_count = count_noise(problem.n, noise)
    raised = (noise**-2 - (2.0 * of_count) ** -2) ** -0.5
    threshold = np.ones(len(settings))
    for _ in range(steps):
        slopes = problem.slopes(problem.features @ state.weights)
        inside = (np.abs(slopes) * state.norms <= threshold).sum(axis=0) + of_count * state.rng.normal()
        total = problem.features.T @ shortened(slopes, state.norms, threshold) + raised * threshold * state.noise()
        state.move(total / problem.n)
        threshold = np.clip(threshold * np.exp(-0.2 * (inside / problem.n - state.second)), 1e-3, 1e3)
    return state.weights


def coupled(decay: float | None, uniform: bool) -> Callable[..., Array]:
    def run(problem: Problem, budget: Budget, settings: list[Settings], seed: int) -> Array:
        state, steps = _Grid(problem, settings, seed), budget.evaluations
        schedule = thresholds(1.0, steps, decay)
        each = [1.0] * steps if uniform else noise_shares([schedule(step) for step in range(steps)])
        noise = noise_for(budget, steps)
        references, running = np.zeros((problem.n, len(settings))), np.zeros_like(state.weights)
        for step in range(steps):
            tau = state.second * schedule(step)
            slopes = problem.slopes(problem.features @ state.weights) - references
            moves = shortened(slopes, state.norms, tau)
            references += moves
            running += (problem.features.T @ moves + noise * each[step] * tau * state.noise()) / problem.n
            state.move(running)
        return state.weights

    return run


def snapshots(problem: Problem, budget: Budget, settings: list[Settings], seed: int) -> Array:
    state, steps = _Grid(problem, settings, seed), snapshot_steps(budget)
    noise = noise_for(budget, steps, RATE, (RESTART, ANCHOR_SHARE))
    there, running = state.weights, state.weights
    for step in range(steps):
        part = state.rows(RATE)
        norms = np.linalg.norm(part.features, axis=1)[:, None]
        slopes, share = part.slopes(part.features @ state.weights), 1.0
        if step % RESTART == 0:
            tau, share, running = state.second, ANCHOR_SHARE, np.zeros_like(running)
        else:
            tau = SMOOTHNESS * np.linalg.norm(state.weights - there, axis=0)
            slopes = slopes - part.slopes(part.features @ there)
        total = part.features.T @ shortened(slopes, norms, tau) + noise * share * tau * state.noise()
        running = running + total / (RATE * problem.n)
        there = state.weights
        state.move(running)
    return state.weights


GRIDS: Mapping[str, Callable[..., Any]] = {
    "c4": coupled(None, uniform=False),
    "c4-uniform": coupled(None, uniform=True),
    "clip21": coupled(1.0, uniform=True),
    "c4-snapshot": snapshots,
    "dp-sgd": plain(),
    "dp-sgd-poisson": plain(RATE),
    "decay": plain(shares=decaying_shares),
    "auto-s": normalised,
    "adaclip": adaptive,
}


# --- the network ---------------------------------------------------------------------------------------------------------------

#: Six settings for each arm, tried once each on the twin at an epsilon of 2, and kept for all budgets.
NETWORK_LR = {"c4": (1.5, 5.0), "dp-sgd": (1.5, 5.0), "c4-snapshot": (0.3, 1.0), "dp-sgd-poisson": (0.3, 1.0)}
#: Thresholds of single gradients, in table mode of all steps together.
NETWORK_THRESHOLDS = {
    "c4": (1.0, 3.0, 10.0),
    **dict.fromkeys(("dp-sgd", "c4-snapshot", "dp-sgd-poisson"), (0.3, 1.0, 3.0)),
}


def tuned_network(images: Images, budget: Budget) -> dict[str, Settings]:
    """For each arm the settings with the smallest error on images drawn about ten random prototypes."""
    twin = images.twin()
    found = {}
    for arm, steps in NETWORK_LR.items():
        grid_of_arm = [Settings(lr, threshold) for lr in steps for threshold in NETWORK_THRESHOLDS[arm]]
        errors = [train_network(twin, arm, budget, settings, seed=0) for settings in grid_of_arm]
        found[arm] = grid_of_arm[int(np.argmin(errors))]
    return found
