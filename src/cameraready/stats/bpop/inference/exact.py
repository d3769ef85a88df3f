"""The exact posterior over partial orders of up to five actions, by enumeration: an oracle for the sampler.

The prior of every order is estimated by drawing latent rows directly and averaging over relabellings and reversals,
under which it does not change; the likelihood is written a second time, over all orders at once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp, roots_genlaguerre

from cameraready.stats.bpop.inference.prior import LatentPrior

MAX_ACTIONS = 5


@dataclass(frozen=True)
class ExactPosterior:
    """Every partial order with its probability.

    Attributes
    ----------
    actions : tuple of length n
    orders : bool array (n_orders, n, n)
        All strict partial orders, closed.
    prior, probability : float64 arrays (n_orders,)
        Before and after the traces.
    edge_probability : float64 array (n, n)
        Probability that the action of the row comes before that of the column.
    """

    actions: tuple[Hashable, ...]
    orders: np.ndarray
    prior: np.ndarray
    probability: np.ndarray

    @property
    def edge_probability(self) -> np.ndarray:
        return np.tensordot(self.probability, self.orders.astype(float), axes=1)


def exact_posterior(
    traces: Sequence[Sequence[Hashable]],
    actions: Sequence[Hashable],
    *,
    prior: LatentPrior | None = None,
    beta: tuple[float, float] | float = (2.0, 2.0),
    eps: float = 0.02,
    n_prior_draws: int = 200_000,
    n_nodes: int = 24,
    seed: int | np.random.Generator | None = None,
) -> ExactPosterior:
    """The posterior by enumeration of all partial orders of at most five actions.

    Parameters
    ----------
    traces : sequence of sequences of actions
        Each is a sequence of different actions; the rest is as in `PartialOrderModel`.
    actions : sequence of 1 to 5 actions
    n_prior_draws : int
        Draws for the prior's Monte Carlo estimate; the error of an edge's probability is about 1 / sqrt(n_prior_draws).
    n_nodes : int
        Nodes of Gauss-Laguerre quadrature over beta.

    Raises
    ------
    ValueError
        For more than five actions, or an action that `actions` does not have.
    """
    names = tuple(actions)
    if not 1 <= len(names) <= MAX_ACTIONS:
        raise ValueError(f"enumeration is for 1 to {MAX_ACTIONS} actions, got {len(names)}; use PartialOrderModel")
    place = {action: i for i, action in enumerate(names)}
    unknown = [a for trace in traces for a in trace if a not in place]
    if unknown:
        raise ValueError(f"a trace has the action {unknown[0]!r}, which is not among {list(names)}")
    orders = all_orders(len(names))
    before_traces = prior_of_orders(prior or LatentPrior(), len(names), n_prior_draws, np.random.default_rng(seed))
    nodes, weights = _beta_nodes(beta, n_nodes)
    by_node = np.zeros((len(nodes), len(orders)))
    for trace in traces:
        by_node += log_likelihood_of_orders([place[a] for a in trace], orders, nodes, eps)
    with np.errstate(divide="ignore"):
        logs = logsumexp(by_node, axis=0, b=weights[:, None]) + np.log(before_traces)
    probability = np.exp(logs - logsumexp(logs))
    return ExactPosterior(names, orders, before_traces, probability)


def _beta_nodes(beta: tuple[float, float] | float, n_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights, which add up to one, for an expectation over beta's Gamma prior."""
    if not isinstance(beta, tuple):
        return np.array([float(beta)]), np.ones(1)
    shape, rate = beta
    nodes, weights = roots_genlaguerre(n_nodes, shape - 1)
    return nodes / rate, weights / weights.sum()


@functools.cache
def all_orders(n: int) -> np.ndarray:
    """Every strict partial order on n <= 5 labelled actions, bool (n_orders, n, n): 1, 3, 19, 219, 4231 of them."""
    pairs = list(itertools.combinations(range(n), 2))
    states = np.array(list(itertools.product(range(3), repeat=len(pairs))), dtype=np.int8)
    relation = np.zeros((len(states), n, n), dtype=bool)
    for (i, j), state in zip(pairs, states.T, strict=True):
        relation[:, i, j] = state == 1
        relation[:, j, i] = state == 2
    two_steps = (relation[:, :, :, None] & relation[:, None, :, :]).any(axis=2)
    return relation[(~two_steps | relation).all(axis=(1, 2))]


def _keys(orders: np.ndarray) -> np.ndarray:
    """One whole number for each order, int64."""
    flat = orders.reshape(len(orders), -1)
    return flat @ (1 << np.arange(flat.shape[1], dtype=np.int64))


@functools.cache
def _orbits(n: int) -> np.ndarray:
    """For every order the smallest key among its relabellings and those of its reversal, int64 (n_orders,)."""
    orders = all_orders(n)
    smallest = np.full(len(orders), np.iinfo(np.int64).max)
    for labels in itertools.permutations(range(n)):
        renamed = orders[:, labels][:, :, labels]
        smallest = np.minimum(smallest, np.minimum(_keys(renamed), _keys(renamed.transpose(0, 2, 1))))
    return smallest


def prior_of_orders(prior: LatentPrior, n: int, n_draws: int, generator: np.random.Generator) -> np.ndarray:
    """Prior probability of `all_orders(n)`, float64 (n_orders,), from direct draws averaged over symmetries."""
    keys = _keys(all_orders(n))
    sorter = np.argsort(keys)
    counts = np.zeros(len(keys))
    for size in _batches(n_draws):
        drawn = _keys(prior.draw(n, size, generator))
        at = sorter[np.searchsorted(keys, drawn, sorter=sorter)]
        counts += np.bincount(at, minlength=len(keys))
    _, orbit, members = np.unique(_orbits(n), return_inverse=True, return_counts=True)
    return (np.bincount(orbit, weights=counts) / members)[orbit] / n_draws


def _batches(n_draws: int, size: int = 50_000) -> list[int]:
    return [min(size, n_draws - first) for first in range(0, n_draws, size)]


def log_likelihood_of_orders(trace: Sequence[int], orders: np.ndarray, beta: np.ndarray, eps: float) -> np.ndarray:
    """Log-likelihood of one trace under every order and every beta: (n_beta, n_orders)."""
    n_orders, n, _ = orders.shape
    left = np.zeros(n, dtype=bool)
    left[list(trace)] = True
    found = np.zeros((len(beta), n_orders))
    for y in trace:
        frontier = left & ~(orders & left[None, :, None]).any(axis=1)
        descendants = (orders & left[None, None, :]).sum(axis=2)
        scores = np.where(frontier, (1.0 + descendants) ** beta[:, None, None], 0.0)
        with np.errstate(divide="ignore"):
            found += np.log(eps / left.sum() + (1 - eps) * scores[..., y] / scores.sum(axis=-1))
        left[y] = False
    return found
