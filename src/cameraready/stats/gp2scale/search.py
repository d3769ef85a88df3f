"""Looks for hyper-parameters: L-BFGS from several starts, or the paper's Metropolis-Hastings over blocks.

Both keep the best point so far in a `Trace`, so that an interruption at any moment leaves something to work with.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import numpy as np
from scipy import optimize

from cameraready.stats.gp2scale.likelihood import LogLikelihood, NotPositiveDefinite

# Acceptance rates that random-walk proposals are tuned to (Roberts, Gelman and Gilks, 1997; one dimension, several).
TARGETS = {1: 0.44}
TARGET = 0.234
# Up to this many hyper-parameters move together; more are moved in blocks.
JOINT = 6


@dataclass
class Trace:
    """What a search has seen.

    theta, value: the best point and its log-likelihood. samples, values: the kept states of a chain, in natural logarithms.
    accepted, proposed: counts of a chain's proposals after its adaptation.
    """

    theta: np.ndarray | None = None
    value: float = -np.inf
    samples: list[np.ndarray] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    accepted: int = 0
    proposed: int = 0
    evaluations: int = 0
    iterations: int = 0

    def see(self, theta: np.ndarray, value: float) -> None:
        """Remember theta if it is the best so far."""
        self.evaluations += 1
        if value > self.value:
            self.theta, self.value = np.array(theta), float(value)

    def merge(self, other: Trace) -> None:
        """Take over what another search has seen."""
        if other.theta is not None and other.value > self.value:
            self.theta, self.value = other.theta, other.value
        self.samples += other.samples
        self.values += other.values
        self.accepted += other.accepted
        self.proposed += other.proposed
        self.evaluations += other.evaluations
        self.iterations = max(self.iterations, other.iterations)


def climb(likelihood: LogLikelihood, start: np.ndarray, bounds: np.ndarray, max_iter: int, trace: Trace) -> None:
    """L-BFGS-B from `start`, filling `trace`. Only a start that is not positive definite raises."""
    report = Progress("likelihoods", None)
    unit = 1.0

    def negative(theta: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal unit
        try:
            found = likelihood(theta, eval_gradient=True)
        except NotPositiveDefinite:
            if trace.theta is None:
                raise
            # A wall: the line search steps back from it.
            return (-trace.value + 1e3 * (1 + abs(trace.value))) / unit, np.zeros_like(theta)
        assert found.gradient is not None
        if not trace.evaluations:
            # L-BFGS-B's first step within finite bounds is the whole gradient, which for thousands of points ends at the
            # bounds, often at a dense matrix. In these units it moves no hyper-parameter by more than a factor of e.
            unit = max(1.0, float(np.linalg.norm(found.gradient)))
        trace.see(theta, found.value)
        report(trace.evaluations, trace.value)
        return -found.value / unit, -found.gradient / unit

    def count(_: np.ndarray) -> None:
        trace.iterations += 1

    optimize.minimize(
        negative, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": max_iter}, callback=count
    )
    report.close()


def walk(
    likelihood: LogLikelihood, start: np.ndarray, bounds: np.ndarray, steps: int, seed: int, blocks: list[np.ndarray],
    trace: Trace,
) -> None:  # fmt: skip
    """Metropolis-Hastings with the prior uniform in log-hyper-parameters within `bounds` (p, 2), filling `trace`.

    Each step proposes one block in turn from a Gaussian. During the first half, its scale follows the acceptance rate and its
    covariance the states so far, both with falling gain (Andrieu and Thoms, 2008); then both are frozen and states are kept,
    so that the kept ones come from a genuine Markov chain. A point that is not positive definite is rejected.
    """
    generator = np.random.default_rng(seed)
    theta = np.array(start, dtype=float)
    value = likelihood(theta).value
    trace.see(theta, value)
    movers = [Mover(block, bounds) for block in blocks]
    warm_up = steps // 2
    report = Progress("samples", steps)
    for step in range(steps):
        mover = movers[step % len(movers)]
        proposal = mover.propose(theta, generator)
        new = _value_at(likelihood, proposal, bounds)
        accepted = np.log(generator.random()) < new - value
        if np.isfinite(new):
            trace.see(proposal, new)
        if accepted:
            theta, value = proposal, new
        if step < warm_up:
            mover.adapt(theta, bool(accepted), step // len(movers))
        else:
            trace.samples.append(theta.copy())
            trace.values.append(value)
            trace.accepted += int(accepted)
            trace.proposed += 1
        trace.iterations = step + 1
        report(step + 1, trace.value)
    report.close()


def _value_at(likelihood: LogLikelihood, theta: np.ndarray, bounds: np.ndarray) -> float:
    if (theta < bounds[:, 0]).any() or (theta > bounds[:, 1]).any():
        return -np.inf
    try:
        return likelihood(theta).value
    except NotPositiveDefinite:
        return -np.inf


class Mover:
    """The Gaussian proposals of one block of hyper-parameters."""

    def __init__(self, block: np.ndarray, bounds: np.ndarray):
        self.block = block
        width = bounds[block, 1] - bounds[block, 0]
        self._covariance = np.diag((0.2 * width) ** 2 / 12)
        self._mean: np.ndarray | None = None
        self._log_scale = 0.0
        self._target = TARGETS.get(len(block), TARGET)

    def propose(self, theta: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """theta with a new block."""
        lower = np.linalg.cholesky(self._covariance + 1e-12 * np.eye(len(self.block)))
        proposal = theta.copy()
        proposal[self.block] += np.exp(self._log_scale) * lower @ generator.standard_normal(len(self.block))
        return proposal

    def adapt(self, theta: np.ndarray, accepted: bool, turn: int) -> None:
        """Move the scale towards the target rate and the covariance towards that of the states."""
        gain = (turn + 2) ** -0.6
        self._log_scale += gain * (float(accepted) - self._target)
        here = theta[self.block]
        if self._mean is None:
            self._mean = here.copy()
        away = here - self._mean
        self._mean = self._mean + gain * away
        if turn >= 20:  # a few states say nothing about a covariance
            slow = gain / 2
            self._covariance = (1 - slow) * self._covariance + slow * np.outer(away, away)


def blocks_of(sizes: list[int]) -> list[np.ndarray]:
    """Blocks of indices into theta: all together when they are few, otherwise those of each hyper-parameter."""
    total = sum(sizes)
    if total <= JOINT:
        return [np.arange(total)] if total else []
    ends = np.cumsum(sizes)
    return [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]


class Progress:
    """One line on standard error that is rewritten; silent when it is not a terminal."""

    def __init__(self, what: str, total: int | None):
        self._what, self._total = what, total
        self._shown = sys.stderr is not None and sys.stderr.isatty()

    def __call__(self, done: int, best: float) -> None:
        if self._shown:
            of = f"/{self._total}" if self._total else ""
            sys.stderr.write(f"\rgp2scale: {done}{of} {self._what}, best log-likelihood {best:.4f} ")
            sys.stderr.flush()

    def close(self) -> None:
        """End the line."""
        if self._shown:
            sys.stderr.write("\n")
