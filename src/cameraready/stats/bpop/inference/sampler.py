"""Markov chain Monte Carlo over latent rows, their correlation and dimension, and the parameters of the traces.

Every step consumes one row of uniform and one of normal numbers that are drawn outside, so that a chain is a function of
its generator alone, can be continued, and can be repeated by another implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cameraready.stats.bpop.inference.bitsets import EncodedTraces, packed
from cameraready.stats.bpop.inference.prior import LatentPrior, dominance

#: The moves, in the order of their weights and counts. `row`, `rho`, `beta` and `dimension` are the paper's.
MOVES = ("row", "entry", "exchange", "rho", "beta", "eps", "dimension")
ROW, ENTRY, EXCHANGE, RHO, BETA, EPS, DIMENSION = range(7)
N_UNIFORMS = 6
#: Largest successor preference; weights (1 + s)^beta stay finite.
MAX_BETA = 50.0
#: Steps of the multiplicative walk on 1 - rho, of the walks on log beta and logit eps, and the smallest
#: step of the walk on rows, whose steps are log-uniform up to 1.
RHO_STEP, BETA_STEP, EPS_STEP, SMALL_STEP = 0.8, 0.3, 0.5, 0.03
MAX_RHO = 1.0 - 1e-9


@dataclass
class Chain:
    """The state of one chain; arrays are changed in place.

    Attributes
    ----------
    latent : float64 array (n, largest dimension)
        Rows; columns from the current dimension on are unused.
    dimension : int64 array (1,)
    scalars : float64 array (4,)
        rho, beta, eps and the current log-likelihood.
    after, before : uint64 arrays (n, n_words)
        The current order.
    counts : int64 array (7, 2)
        Proposals and acceptances of each of `MOVES`.
    n_done : int
        Steps made.
    """

    latent: np.ndarray
    dimension: np.ndarray
    scalars: np.ndarray
    after: np.ndarray
    before: np.ndarray
    generator: np.random.Generator
    counts: np.ndarray = field(default_factory=lambda: np.zeros((len(MOVES), 2), dtype=np.int64))
    n_done: int = 0


@dataclass(frozen=True)
class Target:
    """What the chains sample from.

    `beta` and `eps` are (shape, rate) of a Gamma and (a, b) of a Beta prior, or fixed where the first is 0 and the second
    the value.
    """

    traces: EncodedTraces
    n_actions: int
    prior: LatentPrior
    beta: tuple[float, float]
    eps: tuple[float, float]

    def move_weights(self) -> np.ndarray:
        """Cumulative probabilities of the moves, float64 (7,): the paper's schedule, rows shared among three moves."""
        n, largest = self.n_actions, self.prior.largest
        weights = np.array([n / 2, n / 3, n / 6 if n > 1 else 0.0, 2.0, 2.0, 2.0, max(3.0, np.sqrt(n))])
        weights[BETA] *= self.beta[0] > 0
        weights[EPS] *= self.eps[0] > 0
        weights[DIMENSION] *= self.prior.dimension is None and largest > 1
        return np.cumsum(weights) / weights.sum()


def begin_chain(target: Target, latent: np.ndarray, generator: np.random.Generator) -> Chain:
    """A chain at the rows `latent` (n, K), with beta and eps at their prior means."""
    n, k = latent.shape
    order = dominance(latent)
    after, before = packed(order), packed(order.T)
    rows = np.zeros((n, target.prior.largest))
    rows[:, :k] = latent
    shape, rate = target.beta
    beta = shape / rate if shape > 0 else rate
    a, b = target.eps
    eps = a / (a + b) if a > 0 else b
    value = order_log_likelihood(target.traces, after, before, beta, eps)
    return Chain(rows, np.array([k]), np.array([0.5, beta, eps, value]), after, before, generator)


def order_log_likelihood(
    traces: EncodedTraces, after: np.ndarray, before: np.ndarray, beta: float, eps: float
) -> float:
    """Log-likelihood of `traces` under one order."""
    from cameraready.stats.bpop.inference.likelihood import log_likelihood, step_weights

    weight = np.empty(len(after) + 1)
    step_weights(beta, weight)
    out = np.empty(len(traces.count))
    return log_likelihood(
        traces.steps, traces.start, traces.choice, traces.count, after, before, weight, eps, -np.inf, out
    )


def advance(target: Target, chain: Chain, n_steps: int, *, thin: int, orders: np.ndarray, scalars: np.ndarray) -> None:
    """Advance `chain` by `n_steps` and keep one state in `thin`.

    `orders` uint64 (n_kept, n, n_words) and `scalars` float64 (n_kept, 5) (dimension, rho, beta, eps, log-likelihood)
    take the state after step ``(k + 1) thin`` at place k; what does not fit is not kept.
    """
    from cameraready.stats.bpop.inference.kernel import run_chain

    traces = target.traces
    uniforms = chain.generator.random((n_steps, N_UNIFORMS))
    width = max(target.n_actions, target.prior.largest + 1)
    normals = chain.generator.standard_normal((n_steps, width))
    constants = np.array([target.prior.rho_shape, *target.beta, *target.eps])
    run_chain(
        traces.steps, traces.start, traces.choice, traces.count,
        chain.latent, chain.dimension, chain.scalars, chain.after, chain.before, chain.counts,
        uniforms, normals, target.move_weights(), target.prior.log_dimension(), constants,
        chain.n_done, thin, orders, scalars,
    )  # fmt: skip
    chain.n_done += n_steps
