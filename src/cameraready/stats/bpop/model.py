"""The estimator: from traces to a posterior over partial orders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import ndtri

from cameraready.stats.bpop import posets
from cameraready.stats.bpop.inference.bitsets import encode
from cameraready.stats.bpop.inference.prior import LatentPrior, latent_rows
from cameraready.stats.bpop.inference.sampler import MAX_BETA, Chain, Target, begin_chain
from cameraready.stats.bpop.posterior import PosetPosterior
from cameraready.stats.bpop.traces import Action, Repeats, Vocabulary, checked_traces, read_traces

#: Shares of the traces whose agreement a chain may start from.
AGREEMENT = (1.0, 0.98, 0.95, 0.9, 0.8, 0.7)
#: States that are kept of each chain where `thin` is not given, burn-in included.
N_KEPT = 2_000


@dataclass(frozen=True)
class PartialOrderModel:
    """Posterior over the partial order behind traces (Li, Cheng, Nicholls and Kong, 2026, arXiv:2602.02806).

    At every step a trace takes one of the actions whose predecessors are done, with probability proportional to
    (1 + number of its remaining successors)^beta; with probability `eps` it takes any remaining action. The order has the
    latent Gaussian prior of `LatentPrior`. Metropolis-Hastings over latent rows, with jumps between dimensions, gives
    the posterior.

    Use it where some traces of one procedure, from one up to hundreds, are what you know of its dependencies, and some
    may be wrong. With many clean traces the intersection of their orders gives the same answer for nothing. It does not
    handle loops or alternatives (either one or the other action): process mining (pm4py) does.

    Parameters
    ----------
    prior : LatentPrior
        Prior over orders.
    beta : (shape, rate) or float
        Gamma prior of the successor preference, or its fixed value from 0 to 50; 0 is Kahn's algorithm with uniform choice.
    eps : float or (a, b)
        Probability that a step ignores the order, from 0 to below 1, or its Beta prior. With 0 a single wrong trace rules
        an order out for good, and chains mix worse.
    n_iter : int
        Steps of each chain. 50,000 suit up to about 12 actions; cost is about ``n_iter * chains * len(traces) *
        n_actions`` times 10 to 50 nanoseconds.
    burn_in : float
        Share of each chain that is dropped, from 0 to below 1.
    thin : int, optional
        One state in `thin` is kept; None keeps 2,000 a chain.
    chains : int
        Chains. Each starts from the likeliest of what all, 49 in 50, 19 in 20 ... of the traces agree on, drawn into random
        latent rows; that they agree with each other later says nothing of orders that are far from all of these.
    seed : int, numpy.random.Generator or None
        Source of randomness; an int gives the same posterior every time, whatever `n_jobs`.
    n_jobs : int
        Threads that chains are spread over.
    progress : bool, optional
        Whether to draw a progress bar; None does where standard error is a terminal.

    Examples
    --------
    >>> traces = [["dig", "pour", "brick"], ["dig", "pour", "brick"], ["pour", "dig", "brick"]]
    >>> posterior = PartialOrderModel(n_iter=4_000, seed=0).fit(traces)
    >>> sorted(posterior.graph().edges)
    [('dig', 'brick'), ('pour', 'brick')]
    """

    prior: LatentPrior = field(default_factory=LatentPrior)
    beta: tuple[float, float] | float = (2.0, 2.0)
    eps: tuple[float, float] | float = 0.02
    n_iter: int = 50_000
    burn_in: float = 0.5
    thin: int | None = None
    chains: int = 4
    seed: int | np.random.Generator | None = None
    n_jobs: int = 1
    progress: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.prior, LatentPrior):
            raise TypeError(f"prior must be a LatentPrior, got {type(self.prior).__name__}")
        for name, lowest in (("n_iter", 10), ("chains", 1), ("n_jobs", 1), ("thin", 1)):
            value = getattr(self, name)
            if name == "thin" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < lowest:
                raise ValueError(f"{name} must be a whole number of at least {lowest}, got {value!r}")
        if not 0 <= self.burn_in < 1:
            raise ValueError(f"burn_in must be at least 0 and below 1, got {self.burn_in!r}")
        if self.thin is not None and self.thin > self.n_iter * (1 - self.burn_in):
            raise ValueError(f"thin={self.thin} leaves no draw of {self.n_iter} steps after burn-in; make it smaller")
        _law("beta", self.beta, MAX_BETA, closed=True)
        _law("eps", self.eps, 1.0, closed=False)

    def fit(
        self,
        traces: Any,
        *,
        actions: Iterable[Action] | None = None,
        choice_sets: Sequence[Iterable[Action]] | None = None,
        repeats: Repeats = "refuse",
    ) -> PosetPosterior:
        """Sample the posterior given `traces`. O(n_iter * chains * relations * len(traces)).

        Parameters
        ----------
        traces : sequence of sequences of actions, table of events, or pm4py EventLog
            See `read_traces`. A trace need not cover all actions; it speaks of those that it has.
        actions : iterable of actions, optional
            All that there are; None takes those of the traces, in order of appearance. With it there may be no traces,
            and the posterior is the prior.
        choice_sets : sequence of iterables of actions, optional
            For each trace all actions that were to be done, where it broke off before its end.
        repeats : {"refuse", "number"}
            What to do with an action that a trace has twice: a ValueError, or an action of its own for each occurrence.

        Returns
        -------
        PosetPosterior

        Raises
        ------
        ValueError
            For an empty or repeating trace, an action that `actions` lacks, or traces that the model cannot produce
            (`eps` = 0 and one dimension).
        TypeError
            For traces that are no sequences, or actions that cannot be hashed.

        Warns
        -----
        InterruptedFitWarning
            After Ctrl-C: the posterior rests on what had been drawn.
        ConvergenceWarning
            Where chains disagree about an edge.
        """
        read = checked_traces(read_traces(traces), repeats)
        named = Vocabulary(actions if actions is not None else dict.fromkeys(a for trace in read for a in trace))
        places = [named.places(trace, f"trace {i}") for i, trace in enumerate(read)]
        sets = None if choice_sets is None else _choice_sets(named, choice_sets, places)
        n = len(named.actions)
        law = (self.prior, _law("beta", self.beta, MAX_BETA, closed=True), _law("eps", self.eps, 1.0, closed=False))
        target = Target(encode(places, n, sets), n, *law)
        generators = np.random.default_rng(self.seed).spawn(self.chains)
        shares = _shares(places, n) if places else None
        states = [_begin(target, shares, generator) for generator in generators]
        thin = self.thin or max(1, self.n_iter // N_KEPT)
        drawn = PosetPosterior(
            named, target, states, thin, self.burn_in, places, n_jobs=self.n_jobs, progress=self.progress
        )
        return drawn.extend(self.n_iter)


def _law(name: str, value: Any, highest: float, *, closed: bool) -> tuple[float, float]:
    """(shape, rate) or (a, b) of a prior, or (0, value) of a fixed number, checked."""
    if isinstance(value, tuple):
        if len(value) != 2 or not all(np.isfinite(v) and v > 0 for v in value):
            raise ValueError(f"a prior of {name} is a pair of positive numbers, got {value!r}")
        return float(value[0]), float(value[1])
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number or a pair of numbers, got {value!r}") from None
    if isinstance(value, bool) or not (0 <= number < highest or (closed and number == highest)):
        raise ValueError(f"{name} must be from 0 to {'' if closed else 'below '}{highest:g}, got {value!r}")
    return 0.0, number


def _choice_sets(named: Vocabulary, given: Sequence[Iterable[Action]], places: list[list[int]]) -> list[list[int]]:
    sets = [named.places(choice, f"choice set {i}") for i, choice in enumerate(given)]
    if len(sets) != len(places):
        raise ValueError(f"there are {len(places)} traces and {len(sets)} choice sets; give one for each trace")
    for i, (trace, choice) in enumerate(zip(places, sets, strict=True)):
        if not set(trace) <= set(choice):
            stray = named.actions[min(set(trace) - set(choice))]
            raise ValueError(f"trace {i} has the action {stray!r}, which is not in its choice set")
    return sets


def _shares(places: Sequence[Sequence[int]], n: int) -> np.ndarray:
    """In which share of the traces with both i comes before j, (n, n); 0 where no trace has both."""
    counts = posets.precedence_counts(places, n)
    both = counts + counts.T
    return np.divide(counts, both, out=np.zeros((n, n)), where=both > 0)


def _begin(target: Target, shares: np.ndarray | None, generator: np.random.Generator) -> Chain:
    """A chain at the likeliest of the orders that certain shares of the traces agree on, or at no order at all.

    The latent columns are random linear extensions of that order which have little else in common.
    """
    n, largest = target.n_actions, target.prior.largest
    fixed = target.prior.dimension
    if shares is None:
        k = fixed or min(2, largest)
        return begin_chain(target, latent_rows(np.array([0.5]), n, k, generator)[0], generator)
    starts = []
    for share in AGREEMENT:
        extensions = posets.realizer(posets.greedy_order(shares, share - 1e-9), largest, generator)
        columns = [extensions[c % len(extensions)] for c in range(fixed or len(extensions))]
        starts.append(np.stack([_scores(column) for column in columns], axis=1))
    if largest > 1:
        one = generator.standard_normal((n, 1))
        starts.append(np.where(np.arange(fixed or 2) % 2, -one, one))
    chain = max((begin_chain(target, start, generator) for start in starts), key=lambda c: c.scalars[3])
    if not np.isfinite(chain.scalars[3]):
        raise ValueError(
            "the traces contradict each other, and with eps=0 and one dimension no order can produce them; give eps a "
            "positive value, or the prior more dimensions"
        )
    return chain


def _scores(extension: Sequence[int]) -> np.ndarray:
    """Normal scores (n,) that fall along a sequence of all n actions."""
    scores = np.empty(len(extension))
    scores[list(extension)] = ndtri((np.arange(len(extension))[::-1] + 0.5) / len(extension))
    return scores
