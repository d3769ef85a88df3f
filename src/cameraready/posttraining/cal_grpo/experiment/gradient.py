"""The gradient of Verification@K and its estimators by exact enumeration: mean, bias and variance, no sampling.

An attempt is a draw from a categorical distribution of its own (answer 0 is right), so attempts do not depend on earlier failures. What a
group earns depends on its pattern alone: at which attempt each trajectory succeeded, or that none did. Within a pattern the failures are
independent draws from the wrong answers, whose scores have a known mean and variance; so the patterns of N exchangeable trajectories, of
which there are (N + K over K), give all moments exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

#: Rewards (T, K), group ids (T,) -> advantages (T, K), NaN where not reached.
Estimator = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Moments:
    """Of an estimator of the gradient with respect to the logits of each attempt, all (K, M): mean and exact gradient.

    ``variances`` (K,) are total variances, summed over the logits of an attempt. ``shared`` is the total variance where all attempts have the same logits,
    whose gradient is the sum over attempts.
    """

    mean: np.ndarray
    exact: np.ndarray
    variances: np.ndarray
    shared: float

    @property
    def variance(self) -> float:
        """Summed over all logits of all attempts."""
        return float(self.variances.sum())

    @property
    def bias(self) -> float:
        """Largest absolute difference of a component."""
        return float(np.abs(self.mean - self.exact).max())

    @property
    def relative_bias(self) -> float:
        """Norm of the difference over that of the exact gradient."""
        return float(np.linalg.norm(self.mean - self.exact) / np.linalg.norm(self.exact))


def patterns(attempts: int) -> np.ndarray:
    """Rewards of the K + 1 ways that a trajectory can go, (K + 1, K): success at 1 .. K, or none; NaN where not reached."""
    table = np.full((attempts + 1, attempts), np.nan)
    for way in range(attempts + 1):
        table[way, : way + 1] = 0.0
        if way < attempts:
            table[way, way] = 1.0
    return table


def exact_gradient(probabilities: np.ndarray) -> np.ndarray:
    """Gradient of V@K with respect to the logits of each attempt, (K, M), from probabilities (K, M): P(reach k) w_k p_k (e_0 - pi_k)."""
    p = probabilities[:, 0]
    others = np.array([np.prod(np.delete(1 - p, k)) for k in range(len(p))])
    return (others * p)[:, None] * (np.eye(probabilities.shape[1])[0] - probabilities)


def moments(probabilities: np.ndarray, n: int, estimator: Estimator) -> Moments:
    """Exact moments of ``1/N sum_i sum_k A_ik grad log pi_k(a_ik)`` over groups of N trajectories.

    Parameters
    ----------
    probabilities : float64 (K, M)
        Of each answer at each attempt; answer 0 is right.
    n : int
        Trajectories in a group; cost grows as (N + K over K).
    estimator : callable
    """
    attempts, answers = probabilities.shape
    p = probabilities[:, 0]
    table = patterns(attempts)
    fail = np.concatenate([[1.0], np.cumprod(1 - p)])
    chance = np.append(fail[:-1] * p, fail[-1])
    right = np.eye(answers)[0] - probabilities
    wrong = probabilities.copy()
    wrong[:, 0] = 0.0
    with np.errstate(invalid="ignore"):
        wrong = np.where(p[:, None] < 1, wrong / (1 - p)[:, None], 0.0)
    failing = wrong - probabilities
    spread = (wrong * (1 - wrong)).sum(axis=1)  # trace of the covariance of e_a over wrong answers

    combos = np.array(list(itertools.combinations_with_replacement(range(attempts + 1), n)))
    log_chance = np.log(np.where(chance > 0, chance, 1.0))
    ways = np.array([multiplicity(combo) for combo in combos])
    weight = ways * np.exp(log_chance[combos].sum(axis=1)) * (chance[combos] > 0).all(axis=1)
    rewards = table[combos].reshape(-1, attempts)
    groups = np.repeat(np.arange(len(combos)), n)
    advantages = np.nan_to_num(estimator(rewards, groups)).reshape(len(combos), n, attempts)
    won = np.nan_to_num(table[combos]) == 1
    lost = table[combos] == 0

    # Given the pattern: mean (C, K, M) and the trace of the covariance, which only the failures' answers bring in.
    up, down = (advantages * won).sum(axis=1) / n, (advantages * lost).sum(axis=1) / n
    given = up[..., None] * right + down[..., None] * failing
    within = weight @ (advantages**2 * lost).sum(axis=1) * spread / n**2
    mean = np.tensordot(weight, given, axes=1)
    variances = weight @ ((given - mean) ** 2).sum(axis=2) + within
    summed = given.sum(axis=1)
    shared = float(weight @ ((summed - mean.sum(axis=0)) ** 2).sum(axis=1) + within.sum())
    return Moments(mean, exact_gradient(probabilities), variances, shared)


def multiplicity(combo: Sequence[int]) -> float:
    """Number of orders of a multiset."""
    total = math.factorial(len(combo))
    for value in set(combo):
        total //= math.factorial(list(combo).count(value))
    return float(total)
