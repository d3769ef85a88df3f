"""What is fitted to the pair labels: a small network, a line, or any regressor by boosting.

Each has ``predict(X) -> (n,)``; a pass over rows, never over pairs. Scores mean nothing beyond their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from scipy.special import expit
from sklearn.base import clone

from cameraready.causal.rank_learner.network import Network, Training, minimise
from cameraready.causal.rank_learner.objective import PairLabels, PairsOfBatch, WatchedPairs

SCORERS = ("mlp", "linear", "trees")
#: Ridge penalties tried for the line.
PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)
#: Partners of each row, at most: more change a line, or a tree's split, by less than the labels' noise. Fewer do for choosing a penalty.
PARTNERS, FEW_PARTNERS = 64, 8


class Scorer(Protocol):
    def predict(self, X: np.ndarray) -> np.ndarray: ...


def fit_scorer(scorer: Any, X: np.ndarray, labels: PairLabels, seed: int) -> Scorer:
    """Fit the scorer that `scorer` names, or boost the regressor that it is.

    Raises
    ------
    ValueError, TypeError
        For an unknown name, or an object that is no regressor.
    """
    if isinstance(scorer, str) and scorer not in SCORERS:
        raise ValueError(f"scorer must be one of {', '.join(SCORERS)} or a regressor, got {scorer!r}")
    if not isinstance(scorer, (str, Training)) and not (hasattr(scorer, "fit") and hasattr(scorer, "predict")):
        raise TypeError(f"scorer must be one of {', '.join(SCORERS)} or a regressor, got {type(scorer).__name__}")
    if X.shape[1] == 0:
        return Flat()
    if isinstance(scorer, Training):
        return fit_networks(X, labels, scorer, seed)
    if scorer == "mlp":
        return fit_networks(X, labels, Training(), seed)
    if scorer == "linear":
        return fit_line(X, labels, seed)
    return fit_boosted(small_tree(len(X)) if scorer == "trees" else scorer, X, labels, seed)


@dataclass(frozen=True)
class Flat:
    """No features, no order."""

    def predict(self, X: np.ndarray) -> np.ndarray:
        return np.zeros(len(X))


# --- networks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Networks:
    """The mean of several networks, of which each was stopped by another fifth of the rows."""

    networks: Sequence[Network]

    def predict(self, X: np.ndarray) -> np.ndarray:
        return np.mean([network(X) for network in self.networks], axis=0)


def fit_networks(X: np.ndarray, labels: PairLabels, training: Training, seed: int, count: int = 5) -> Networks:
    """Train `count` networks, each on the pairs of all rows but a part that stops it; O(n batch) pairs an epoch."""
    generator = np.random.default_rng([seed, 0x4E45])
    networks = []
    for held in parts_of(len(X), count, generator):
        train = np.setdiff1d(np.arange(len(X)), held)
        network = Network(X.shape[1], training.hidden, generator)
        watched = WatchedPairs(labels.taken(held), partners(len(held), generator))
        minimise(
            network,
            X[train],
            PairsOfBatch(labels.taken(train), training.batch),
            lambda current, inputs=X[held], watched=watched: watched(current(inputs)),
            training,
            generator,
        )
        networks.append(network)
    return Networks(networks)


def parts_of(n: int, count: int, generator: np.random.Generator) -> list[np.ndarray]:
    """Rows cut at random into `count` parts of at least two rows, fewer parts where there are too few rows."""
    return np.array_split(generator.permutation(n), max(2, min(count, n // 2)))


# --- a line ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """x -> x @ coefficients."""

    coefficients: np.ndarray
    penalty: float

    def predict(self, X: np.ndarray) -> np.ndarray:
        return X @ self.coefficients


def fit_line(X: np.ndarray, labels: PairLabels, seed: int) -> Line:
    """Ridge-penalised pairwise logistic regression, the penalty chosen by the pair loss of held-out rows; fit for n < p."""
    generator = np.random.default_rng([seed, 0x4C49])
    n = len(X)
    losses, starts = np.zeros(len(PENALTIES)), np.zeros((len(PENALTIES), X.shape[1]))
    for held in parts_of(n, 3, generator):
        train = np.setdiff1d(np.arange(n), held)
        watched = WatchedPairs(labels.taken(held), partners(len(held), generator))
        start = np.zeros(X.shape[1])
        for index in reversed(range(len(PENALTIES))):  # the stiffest first: each is the next one's start
            pairs = partners(len(train), np.random.default_rng([seed, 1]), FEW_PARTNERS)
            start = _line(X[train], labels.taken(train), PENALTIES[index], start, pairs)
            losses[index] += watched(X[held] @ start)
            starts[index] = start
    best = int(np.argmin(losses))
    return Line(_line(X, labels, PENALTIES[best], starts[best], partners(n, generator)), PENALTIES[best])


def _line(
    X: np.ndarray, labels: PairLabels, penalty: float, start: np.ndarray, pairs: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    from scipy.optimize import minimize  # slow to import

    watched = WatchedPairs(labels, pairs)

    def loss(coefficients: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = watched.with_slope(X @ coefficients)
        return value + 0.5 * penalty * coefficients @ coefficients, X.T @ slope + penalty * coefficients

    return minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 100, "ftol": 1e-8, "gtol": 1e-6}).x


def partners(n: int, generator: np.random.Generator, count: int = PARTNERS) -> tuple[np.ndarray, np.ndarray]:
    """Pairs in which every row occurs equally often: all of them, or `count` shifts of a random order."""
    order = generator.permutation(n)
    most = (n - 1) // 2
    few = most > count // 2
    shifts = generator.choice(most, count // 2, replace=False) + 1 if few else np.arange(1, most + 1)
    half = np.arange(n // 2 if n % 2 == 0 and not few else 0)
    across = (order[half], order[half + n // 2])
    place = np.arange(n)
    first = np.tile(place, len(shifts))
    second = (first + np.repeat(shifts, n)) % n
    return np.concatenate([order[first], across[0]]), np.concatenate([order[second], across[1]])


# --- any regressor --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Boosted:
    """The sum of regressors, each fitted to what the ones before left over."""

    members: Sequence[Any]
    rate: float

    def predict(self, X: np.ndarray) -> np.ndarray:
        total = np.zeros(len(X))
        for member in self.members:
            total += self.rate * np.asarray(member.predict(X), dtype=float).reshape(len(X))
        return total


def small_tree(n: int) -> Any:
    """Eight leaves at most, each with a hundredth of the rows."""
    from sklearn.tree import DecisionTreeRegressor  # slow to import

    return DecisionTreeRegressor(max_depth=3, min_samples_leaf=max(5, n // 100))


def fit_boosted(
    base: Any, X: np.ndarray, labels: PairLabels, seed: int, *, rate: float = 0.1, rounds: int = 200, patience: int = 10
) -> Boosted:
    """Functional gradient descent on the pair loss (Friedman, 2001): each member is fitted to the slopes of its rows.

    A row's slope is estimated from random partners, anew in every round; a fifth of the rows decides when to stop.
    """
    generator = np.random.default_rng([seed, 0x424F])
    n = len(X)
    held, train = np.split(generator.permutation(n), [max(2, n // 5)])
    inner, watched = labels.taken(train), WatchedPairs(labels.taken(held), partners(len(held), generator))
    scores, seen = np.zeros(len(train)), np.zeros(len(held))
    members: list[Any] = []
    best, kept, waited = watched(seen), 0, 0
    rows = np.arange(len(train))[:, None]
    for _ in range(rounds):
        others = generator.choice(len(train), min(PARTNERS, len(train)), replace=False)[None, :]
        left = (inner.of(rows, others) - expit(scores[rows] - scores[others])).mean(axis=1)
        member = clone(base)
        if "random_state" in member.get_params():
            member.set_params(random_state=int(generator.integers(2**31)))
        member.fit(X[train], 4.0 * left)  # a pair's curvature is at most 1/4
        scores = scores + rate * np.asarray(member.predict(X[train]), dtype=float).reshape(len(train))
        seen = seen + rate * np.asarray(member.predict(X[held]), dtype=float).reshape(len(held))
        members.append(member)
        value = watched(seen)
        if value < best - 1e-5:
            best, kept, waited = value, len(members), 0
        else:
            waited += 1
            if waited >= patience:
                break
    return Boosted(members[:kept], rate)
