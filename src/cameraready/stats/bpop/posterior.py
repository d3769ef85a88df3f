"""What is known of the partial order after the traces: probabilities, a graph, predictions, and whether to trust them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import logsumexp

from cameraready.stats.bpop import posets
from cameraready.stats.bpop.inference import diagnostics as checks
from cameraready.stats.bpop.inference import storing
from cameraready.stats.bpop.inference.bitsets import bit_set, packed, unpacked
from cameraready.stats.bpop.inference.diagnostics import Calibration, Diagnostics
from cameraready.stats.bpop.inference.running import mapper, progress_bar
from cameraready.stats.bpop.inference.sampler import MOVES, Chain, Target, advance
from cameraready.stats.bpop.traces import Action, Vocabulary, checked_traces, read_traces

if TYPE_CHECKING:
    import networkx as nx
    import pandas as pd

#: The paper's threshold: a pair has three states, before, after and free.
THRESHOLD = 1 / 3
#: Steps between two looks at the keyboard and the progress bar.
SLICE = 2_000
#: Chains disagree where an edge's probability differs by more than this between them, with a large R-hat.
GAP, RHAT = 0.2, 1.1


class InterruptedFitWarning(UserWarning):
    """Sampling was interrupted; the posterior holds what had been drawn, and `extend` goes on from there."""


class ConvergenceWarning(UserWarning):
    """Chains disagree about an edge: take more steps (`extend`), or more chains."""


class PosetPosterior:
    """Draws from the posterior over partial orders. Made by `PartialOrderModel.fit`.

    Attributes
    ----------
    actions : tuple of length n
        The actions; every matrix has rows and columns in this order.
    interrupted : bool
        Whether sampling was broken off.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        target: Target,
        chains: Sequence[Chain],
        thin: int,
        burn_in: float,
        traces: Sequence[Sequence[int]],
        *,
        n_jobs: int = 1,
        progress: bool | None = None,
    ) -> None:
        self.actions = vocabulary.actions
        self.interrupted = False
        self._vocabulary, self._target, self._traces = vocabulary, target, traces
        self._chains, self._thin, self._burn_in = list(chains), thin, burn_in
        self._n_jobs, self._progress = n_jobs, progress
        n, words = chains[0].after.shape
        self._orders = [np.zeros((0, n, words), dtype=np.uint64) for _ in chains]
        self._scalars = [np.zeros((0, 5)) for _ in chains]

    # --- sampling ---------------------------------------------------------------------------------------------------

    @property
    def n_iter(self) -> int:
        """Steps that every chain has made."""
        return min(chain.n_done for chain in self._chains)

    def extend(self, n_iter: int) -> PosetPosterior:
        """Let every chain make `n_iter` more steps, burn-in being the same share of the whole; returns itself.

        Ctrl-C ends it early with `InterruptedFitWarning`; nothing that was drawn is lost.
        """
        goal = max(chain.n_done for chain in self._chains) + n_iter
        self._grow(goal // self._thin)
        try:
            self._run(goal)
            self.interrupted = False
        except KeyboardInterrupt:
            if self._kept().stop - self._kept().start < 2:
                raise
            self.interrupted = True
            warnings.warn(
                f"interrupted after {self.n_iter:,} of {goal:,} steps: the posterior rests on these", InterruptedFitWarning,
                stacklevel=3,
            )  # fmt: skip
        self._warn_unless_converged()
        return self

    def _grow(self, n_records: int) -> None:
        for c in range(len(self._chains)):
            more = max(n_records - len(self._orders[c]), 0)  # there is room left after an interruption
            self._orders[c] = np.concatenate(
                [self._orders[c], np.zeros((more, *self._orders[c].shape[1:]), dtype=np.uint64)]
            )
            self._scalars[c] = np.concatenate([self._scalars[c], np.zeros((more, 5))])

    def _run(self, goal: int) -> None:
        def step(c: int) -> None:
            chain = self._chains[c]
            n_steps = min(SLICE, goal - chain.n_done)
            advance(self._target, chain, n_steps, thin=self._thin, orders=self._orders[c], scalars=self._scalars[c])

        with progress_bar(self._progress, goal - self.n_iter) as tell, mapper(self._n_jobs) as each:
            while self.n_iter < goal:
                before = self.n_iter
                each(step, [c for c, chain in enumerate(self._chains) if chain.n_done < goal])
                tell(self.n_iter - before)

    def _kept(self) -> slice:
        n_records = self.n_iter // self._thin
        return slice(min(int(np.ceil(self._burn_in * n_records)), max(n_records - 1, 0)), n_records)

    def _warn_unless_converged(self) -> None:
        draws = self.orders
        if len(draws) < 2 or len(self.actions) < 2:
            return
        gap, rhat = _chain_gap(draws), checks.split_rhat(draws)
        bad = (gap > GAP) & (rhat > RHAT)
        if bad.any():
            i, j = np.unravel_index(np.argmax(np.where(bad, gap, -1)), gap.shape)
            warnings.warn(
                f"chains disagree about {int(bad.sum())} edges, most about {self.actions[i]!r} before {self.actions[j]!r}, "
                f"whose probability differs by {gap[i, j]:.2f} between chains; take more steps: posterior.extend(n_iter)",
                ConvergenceWarning,
                stacklevel=4,
            )

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, path: str | PathLike[str]) -> None:
        """Write the draws and the state of the chains to one file (NumPy's .npz, no pickle); see `load`.

        Raises TypeError for actions that are neither text nor numbers, nor tuples of them.
        """
        settings = {"thin": self._thin, "burn_in": self._burn_in, "n_jobs": self._n_jobs}
        storing.write(
            path,
            actions=self.actions,
            places=self._traces,
            settings=settings,
            target=self._target,
            chains=self._chains,
            orders=self._orders,
            scalars=self._scalars,
        )

    @classmethod
    def load(cls, path: str | PathLike[str]) -> PosetPosterior:
        """A posterior from a file that `save` wrote; it can be extended as if it had never been away."""
        stored = storing.read(path)
        settings, places = stored["settings"], stored["places"]
        found = cls(Vocabulary(stored["actions"]), stored["target"], stored["chains"], traces=places, **settings)
        found._orders, found._scalars = stored["orders"], stored["scalars"]
        return found

    # --- draws ------------------------------------------------------------------------------------------------------

    @property
    def orders(self) -> np.ndarray:
        """The kept orders, closed, bool (chains, draws, n, n)."""
        n, kept = len(self.actions), self._kept()
        return np.stack([unpacked(masks[kept], n) for masks in self._orders])

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """``dimension``, ``rho``, ``beta``, ``eps`` and ``log_likelihood`` of the draws, each (chains, draws)."""
        kept = np.stack([scalars[self._kept()] for scalars in self._scalars])
        names = ("dimension", "rho", "beta", "eps", "log_likelihood")
        return {name: kept[..., i] for i, name in enumerate(names)}

    def sample_orders(self, n_draws: int | None = None, *, seed: int | np.random.Generator | None = None) -> np.ndarray:
        """All kept orders of all chains, or `n_draws` of them at random; bool (n_draws, n, n)."""
        pooled = self.orders.reshape(-1, len(self.actions), len(self.actions))
        if n_draws is None:
            return pooled
        if n_draws < 1:
            raise ValueError(f"n_draws must be at least 1, got {n_draws!r}")
        return pooled[np.random.default_rng(seed).integers(len(pooled), size=n_draws)]

    @property
    def edge_probability(self) -> pd.DataFrame:
        """Probability that the row's action comes before the column's, (n, n)."""
        return self._frame(self._edge())

    def _edge(self) -> np.ndarray:
        n, kept = len(self.actions), self._kept()
        return np.mean([unpacked(masks[kept], n).mean(axis=0) for masks in self._orders], axis=0)

    def _frame(self, values: np.ndarray) -> pd.DataFrame:
        import pandas as pd

        labels = pd.Index(self.actions, tupleize_cols=False)
        return pd.DataFrame(values, index=labels, columns=labels)

    # --- one order --------------------------------------------------------------------------------------------------

    def relation(self, threshold: float = THRESHOLD) -> np.ndarray:
        """The closed order of the edges whose probability exceeds `threshold`, bool (n, n).

        Edges enter by falling probability and those that would make a cycle are left out. The paper's one third
        favours too many edges over too few: an extra edge costs time, a missing one breaks a run.
        """
        if not 0 <= threshold < 1:
            raise ValueError(f"threshold must be at least 0 and below 1, got {threshold!r}")
        return posets.greedy_order(self._edge(), threshold)

    def graph(self, threshold: float = THRESHOLD, *, reduced: bool = True) -> nx.DiGraph:
        """The dependency graph at `threshold`, transitively reduced, or closed with ``reduced=False``.

        Edges have the attribute ``probability``; an edge that only transitivity asks for may have one below `threshold`.
        """
        import networkx as nx

        order, edge = self.relation(threshold), self._edge()
        shown = posets.cover(order) if reduced else order
        found = nx.DiGraph()
        found.add_nodes_from(self.actions)
        for i, j in np.argwhere(shown):
            found.add_edge(self.actions[i], self.actions[j], probability=float(edge[i, j]))
        return found

    def coverage(self, truth: nx.DiGraph | None = None, *, threshold: float = THRESHOLD) -> float:
        """IP-Cov: share of the pairs free of each other that the traces have in both orders; 1 where no pair is free.

        Free in `truth`, where it is known, or else in the inferred order. Low coverage means that habit cannot be told
        from dependency.
        """
        order = self.relation(threshold) if truth is None else self._closed(truth)
        free = posets.incomparable(order)
        both = posets.seen_both_ways(self._traces, len(self.actions))
        return float(both[free].mean()) if free.any() else 1.0

    def feasibility(self, traces: Any, *, threshold: float = THRESHOLD) -> float:
        """Share of `traces` (see `read_traces`) that respect the inferred order."""
        order = self.relation(threshold)
        read = checked_traces(read_traces(traces), "refuse")
        if not read:
            raise ValueError("there are no traces")
        return float(np.mean([posets.is_linear_extension(self._vocabulary.places(t, "a trace"), order) for t in read]))

    # --- predictions ------------------------------------------------------------------------------------------------

    def log_likelihood(self, trace: Iterable[Action], *, choice_set: Iterable[Action] | None = None) -> float:
        """Log posterior predictive probability of one more trace; that of an empty one is 0.

        `choice_set` holds all actions that were to be done; None takes those of the trace.
        """
        places = self._vocabulary.places(trace, "the trace")
        choice = places if choice_set is None else self._vocabulary.places(choice_set, "the choice set")
        found, _ = self._by_draw(places, choice)
        return float(logsumexp(found) - np.log(len(found)))

    def predict_next(
        self, prefix: Iterable[Action] = (), *, choice_set: Iterable[Action] | None = None
    ) -> dict[Action, float]:
        """Probabilities of the next action after `prefix`, the likeliest first; they add up to one.

        Draws count by how well they explain the prefix. `choice_set` holds all actions to be done; None takes all.
        An empty dict where nothing is left.
        """
        places = self._vocabulary.places(prefix, "the prefix")
        everything: Sequence[int] = range(len(self.actions))
        choice = everything if choice_set is None else self._vocabulary.places(choice_set, "the choice set")
        found, following = self._by_draw(places, choice)
        if not np.isfinite(found).any():
            raise ValueError("no drawn order can produce the prefix: eps is 0 and it contradicts the traces")
        weight = np.exp(found - logsumexp(found))
        probability = weight @ following
        left = sorted(set(choice) - set(places), key=lambda v: (-probability[v], v))
        return {self.actions[v]: float(probability[v]) for v in left}

    def _by_draw(self, places: Sequence[int], choice: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        if not set(places) <= set(choice):
            stray = self.actions[min(set(places) - set(choice))]
            raise ValueError(f"the action {stray!r} is not in the choice set")
        from cameraready.stats.bpop.inference.likelihood import trace_by_draw

        n, kept = len(self.actions), self._kept()
        after = np.concatenate([masks[kept] for masks in self._orders])
        scalars = np.concatenate([scalars[kept] for scalars in self._scalars])
        return trace_by_draw(
            np.array(places, dtype=np.int64), bit_set(choice, n), after, _reversed(after, n),
            np.ascontiguousarray(scalars[:, 2]), np.ascontiguousarray(scalars[:, 3]),
        )  # fmt: skip

    # --- trust ------------------------------------------------------------------------------------------------------

    def diagnostics(self) -> Diagnostics:
        """R-hat, effective sample sizes, acceptance and WAIC. O(chains * draws * n^2)."""
        draws, edge = self.orders, self._edge()
        rhat, gap = checks.split_rhat(draws), _chain_gap(draws)
        level = checks.split_rhat(self.parameters["log_likelihood"])
        told = [float(level), *rhat[(edge >= 0.01) & (edge <= 0.99)]]
        counts = np.sum([chain.counts for chain in self._chains], axis=0)
        with np.errstate(invalid="ignore"):
            shares = counts[:, 1] / counts[:, 0]
        return Diagnostics(
            rhat=self._frame(rhat),
            effective_size=self._frame(checks.effective_size(draws)),
            largest_rhat=float(np.max(told)),
            chain_gap=float(gap.max()),
            acceptance=dict(zip(MOVES, shares.tolist(), strict=True)),
            waic=self._waic(),
            converged=not bool(((gap > GAP) & (rhat > RHAT)).any()),
        )

    def _waic(self) -> float:
        traces = self._target.traces
        if not len(traces.count):
            return 0.0
        n = len(self.actions)
        by_trace = []
        for t in range(len(traces.count)):
            steps = traces.steps[traces.start[t] : traces.start[t + 1]]
            choice = np.flatnonzero(unpacked(traces.choice[t], n)).tolist()
            by_trace.append(self._by_draw(steps.tolist(), choice)[0])
        return checks.waic(np.stack(by_trace, axis=1), traces.count)

    def calibration(self, truth: nx.DiGraph, *, n_bins: int = 10) -> Calibration:
        """Whether pairs with probability p are ordered in `truth`, a graph over the same actions, in a share p of cases."""
        import pandas as pd

        if n_bins < 1:
            raise ValueError(f"n_bins must be at least 1, got {n_bins!r}")
        pairs = ~np.eye(len(self.actions), dtype=bool)
        if not pairs.any():
            raise ValueError("there is only one action, so there are no pairs to calibrate")
        rows, ece = checks.calibration_table(self._edge()[pairs], self._closed(truth)[pairs].astype(float), n_bins)
        return Calibration(pd.DataFrame(rows, columns=["from", "predicted", "observed", "pairs"]), ece)

    def _closed(self, truth: nx.DiGraph) -> np.ndarray:
        if set(truth.nodes) != set(self.actions):
            different = sorted(map(str, set(truth.nodes) ^ set(self.actions)))
            raise ValueError(f"the true graph must have the same actions; these differ: {', '.join(different[:10])}")
        relation = np.zeros((len(self.actions),) * 2, dtype=bool)
        for first, second in truth.edges:
            relation[self._vocabulary.place[first], self._vocabulary.place[second]] = True
        return posets.closure(relation)

    def __repr__(self) -> str:
        kept = self._kept()
        draws = len(self._chains) * (kept.stop - kept.start)
        return f"PosetPosterior({len(self.actions)} actions, {len(self._traces)} traces, {draws:,} draws)"


def _chain_gap(draws: np.ndarray) -> np.ndarray:
    """Largest difference between chains in an edge's probability, bool (chains, draws, n, n) -> (n, n)."""
    return np.ptp(draws.mean(axis=1), axis=0)


def _reversed(after: np.ndarray, n: int) -> np.ndarray:
    """Bit sets of the predecessors from those of the descendants, (n_draws, n, n_words) both."""
    return packed(np.swapaxes(unpacked(after, n), -1, -2))
