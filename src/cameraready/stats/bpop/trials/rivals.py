"""The arms of the study: BPOP, its ablation, counting rules, and pm4py's miners; all are told the same traces."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cameraready.evidence import Context
from cameraready.stats.bpop import ConvergenceWarning, PartialOrderModel, posets

#: (traces, n_actions, seed) -> closed order (n, n), or `Found`.
Arm = Callable[[Sequence[Sequence[int]], int, int], Any]


@dataclass(frozen=True)
class Found:
    """What an arm found: a closed order (n, n) and, where it has any, the probability of every edge (n, n)."""

    order: np.ndarray
    probability: np.ndarray | None = None
    numbers: dict[str, float] = field(default_factory=dict)


def bayesian(n_iter: int, **options: Any) -> Arm:
    """BPOP at its defaults but for the number of steps, thresholded at one third."""

    def infer(traces: Sequence[Sequence[int]], n: int, seed: int) -> Found:
        model = PartialOrderModel(n_iter=n_iter, seed=seed, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the rows say how far chains are apart
            posterior = model.fit(traces, actions=range(n))
        checked = posterior.diagnostics()
        numbers = {"chain_gap": checked.chain_gap, "rhat": min(checked.largest_rhat, 100.0)}
        return Found(posterior.relation(), posterior.edge_probability.to_numpy(), numbers)

    return infer


def precedence_shares(traces: Sequence[Sequence[int]], n: int) -> np.ndarray:
    """In which share of the traces that have both i comes before j, (n, n); 0 where none has both."""
    counts = posets.precedence_counts(traces, n)
    both = counts + counts.T
    return np.divide(counts, both, out=np.zeros((n, n)), where=both > 0)


def intersection(traces: Sequence[Sequence[int]], n: int, seed: int) -> np.ndarray:
    """i before j where no trace says otherwise; that is transitive by itself where all traces are complete."""
    return posets.greedy_order(precedence_shares(traces, n), 1 - 1e-9)


def majority(traces: Sequence[Sequence[int]], n: int, seed: int) -> np.ndarray:
    """i before j where most traces say so, from the most to the least agreed on, leaving out what makes a cycle."""
    return posets.greedy_order(precedence_shares(traces, n), 0.5)


def tolerant(traces: Sequence[Sequence[int]], n: int, seed: int) -> np.ndarray:
    """i before j where at least nine traces in ten say so: an intersection that forgives."""
    return posets.greedy_order(precedence_shares(traces, n), 0.9 - 1e-9)


def miner(ctx: Context, name: str) -> Arm:
    """A miner of pm4py at its defaults; cycles are broken at their weakest arc."""

    def infer(traces: Sequence[Sequence[int]], n: int, seed: int) -> np.ndarray:
        return posets.greedy_order(np.asarray(ctx.peer("pm4py").mine(name, [list(t) for t in traces], n)), 0.0)

    return infer


COUNTING: dict[str, Arm] = {"intersection": intersection, "majority": majority, "tolerant": tolerant}
MINERS = ("inductive", "inductive-noise", "heuristics", "powl")


def arms(ctx: Context, n_iter: int) -> dict[str, Arm]:
    """Every arm of the accuracy trials, the user's own included; the latter give a matrix, closed or not."""
    return ctx.select(
        {
            "bpop": bayesian(n_iter),
            "beta-0": bayesian(n_iter, beta=0.0),
            "eps-inferred": bayesian(n_iter, eps=(1.0, 19.0)),
            **COUNTING,
            **{name: miner(ctx, name) for name in MINERS},
        }
    )


def inferred(arm: Arm, traces: Sequence[Sequence[int]], n: int, seed: int) -> Found:
    """What `arm` finds, checked: a user's own may return any acyclic relation."""
    found = arm(traces, n, seed)
    if isinstance(found, Found):
        return found
    relation = np.asarray(found)
    if relation.shape != (n, n):
        raise ValueError(f"an arm must return an array of shape ({n}, {n}), got {relation.shape}")
    return Found(posets.closure(relation))
