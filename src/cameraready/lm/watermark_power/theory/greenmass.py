"""The probability that falls on a random green list, and what a bias does to it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cameraready.lm.watermark_power.theory.contexts import Contexts
from cameraready.lm.watermark_power.theory.tails import number

Scheme = Literal["lefthash", "selfhash"]

#: Nodes of the integrals over t = exp(y); the trapezoid rule is exact to 1e-5 at this step.
STEP = 0.6
Y = np.arange(-18.0, 24.0, STEP)
T = np.exp(Y)
#: A list is as good as forced on the sampler by this bias; above it nothing changes but the reverse divergence.
FORCED = 20.0


def realised(gamma: float, vocab_size: int | None) -> float:
    """The share of the vocabulary that is really green: ``int(V * gamma) / V``, as transformers and MarkLLM cut the list.

    Raises ValueError for a list that is empty or the whole vocabulary.
    """
    if not 0.0 < number("gamma", gamma) < 1.0:
        raise ValueError(f"gamma, the green share of the vocabulary, must lie strictly between 0 and 1, got {gamma!r}")
    if vocab_size is None:
        return float(gamma)
    green = int(vocab_size * gamma)
    if green == 0:
        raise ValueError(f"gamma = {gamma:g} leaves no green token in a vocabulary of {vocab_size}")
    return green / vocab_size


def check_delta(delta: float) -> float:
    """`delta` as a float, or ValueError unless it is finite and not negative."""
    if not (math.isfinite(number("delta", delta)) and delta >= 0):
        raise ValueError(f"delta, the bias on green logits, must be a finite number >= 0, got {delta!r}")
    return float(delta)


@dataclass(frozen=True)
class Effect:
    """What a bias does at each context, averaged over green lists; arrays (n,), divergences in nats.

    `rate` is the probability that the next token is green, `kl` is KL(watermarked || original), `reverse_kl` the other way round, `variation`
    the total variation distance, `surprisal` the change of the expected surprisal under the original model (log-perplexity).
    """

    rate: np.ndarray
    kl: np.ndarray
    reverse_kl: np.ndarray
    variation: np.ndarray
    surprisal: np.ndarray


class _FixedSize:
    """What it adds to log phi(t) that exactly ``gamma V`` tokens are green: log P_t(N = gamma V) / P(N = gamma V).

    N, the number of green tokens, is a sum of independent ones; P_t is the measure tilted by ``e^(-t g)``. Both chances are taken from the
    normal law with its correction for skewness, which keeps E[g] = gamma; where the variance of N is below 6 (a small vocabulary, or gamma
    next to 0 or 1) they are computed, by inverting the characteristic function. That may take fewer points than N has values: what is
    folded onto gamma V lies so far from it that phi is next to zero there.
    """

    def __init__(self, gamma: float, vocab_size: int, counts: np.ndarray, dust: np.ndarray) -> None:
        unit = gamma * (1 - gamma)
        self.gamma, self.green = gamma, round(gamma * vocab_size)
        self.untilted = max(vocab_size * unit, 1e-300)
        self.shift = np.zeros((len(counts), len(T)))
        self.variance, self.third = np.zeros_like(self.shift), np.zeros_like(self.shift)
        self.log_cf: np.ndarray | None = None
        if self.untilted < 6:
            points = min(vocab_size + 1, math.ceil(16 * math.sqrt(self.untilted)) + 25) | 1
            self.points = points
            self.turn = np.exp(2j * np.pi * np.arange(1, points // 2 + 1) / points)
            self.log_cf = np.zeros((*self.shift.shape, len(self.turn)), dtype=complex)
        rare = np.maximum(vocab_size - counts.sum(axis=1), 0.0)[:, None]
        each = np.divide(dust[:, None], rare, out=np.zeros_like(rare), where=rare > 0)
        self.add(np.ones(len(counts), dtype=bool), rare, np.expm1(-T[None, :] * each))

    def add(self, rows: np.ndarray, counts: np.ndarray, lost: np.ndarray) -> None:
        """A group of equal tokens, `lost` being ``e^(-t p) - 1``."""
        tilted = self.gamma * (1 + lost) / (1 + self.gamma * lost)
        if self.log_cf is not None:
            self.log_cf[rows] += counts[..., None] * np.log(1 + tilted[..., None] * (self.turn - 1))
            return
        self.shift[rows] += counts * (tilted - self.gamma)
        self.variance[rows] += counts * tilted * (1 - tilted)
        self.third[rows] += counts * tilted * (1 - tilted) * (1 - 2 * tilted)

    def log_ratio(self) -> np.ndarray:
        if self.log_cf is not None:
            back = self.turn**-self.green
            chance = (1 + 2 * (np.exp(self.log_cf) * back).real.sum(axis=-1)) / self.points
            return np.log(np.maximum(chance, 1e-300)) - np.log(np.maximum(chance[:, :1], 1e-300))
        variance = np.maximum(self.variance, 1.0)
        x = -self.shift / np.sqrt(variance)
        skew = np.maximum(self.third / (6 * variance**1.5) * (x**3 - 3 * x), -0.9)
        found = -(x**2) / 2 - 0.5 * np.log(variance / self.untilted) + np.log1p(skew)
        # Where hardly any variance is left the normal law says nothing, and phi is next to zero.
        return np.where(self.variance > 1.0, found, 0.0)


def _log_phi(counts: np.ndarray, each: np.ndarray, dust: np.ndarray, gamma: float, fixed_in: int | None) -> np.ndarray:
    """log E[e^(-t g)] at the nodes, (n, nodes); for lists of a fixed size in a vocabulary of `fixed_in`, or of independent tokens."""
    found = -gamma * T[None, :] * dust[:, None]
    fixed = _FixedSize(gamma, fixed_in, counts, dust) if fixed_in else None
    for group in np.flatnonzero(counts.any(axis=0)):
        some = counts[:, group] > 0
        lost = np.expm1(-T[None, :] * each[some, group, None])
        found[some] += counts[some, group, None] * np.log1p(gamma * lost)
        if fixed is not None:
            fixed.add(some, counts[some, group, None], lost)
    return found if fixed is None else np.minimum(found + fixed.log_ratio(), 0.0)


class GreenMass:
    """Expectations over random green lists, for each context, as functions of the bias.

    With g the green probability and Z = 1 + g (e^delta - 1), all that is wanted follows from E[1/Z] and E[log Z], and both are integrals of
    g's Laplace transform, a product over tokens. No list is drawn, so that results are smooth in delta and have no noise. Tokens are taken as
    green independently of each other; that lists have a fixed size is then put right by the saddle-point approximation of the chance of that size.

    Parameters
    ----------
    contexts : Contexts
    gamma : float
        The realised green share.
    vocab_size : int, optional
    scheme : {"lefthash", "selfhash"}
        Under "selfhash" only the 40 most likely tokens are favoured, as in transformers.

    Notes
    -----
    O(n) with about 5,000 operations a context; after that each `delta` costs 70 of them.
    """

    def __init__(
        self, contexts: Contexts, gamma: float, vocab_size: int | None = None, scheme: Scheme = "lefthash"
    ) -> None:
        self.contexts, self.gamma, self.vocab_size = contexts, gamma, vocab_size
        self.spared = contexts.mass[:, 1].sum(axis=1) + contexts.dust[:, 1] if scheme == "selfhash" else None
        # (n, groups): what the bias can reach, by number and by probability of one token.
        reach = slice(0, 1) if scheme == "selfhash" else slice(0, 2)
        self._sides = 1 if scheme == "selfhash" else 2
        counts = contexts.counts[:, reach].reshape(len(contexts), -1)
        mass = contexts.mass[:, reach].reshape(len(contexts), -1)
        self._each = np.divide(mass, counts, out=np.zeros_like(mass), where=counts > 0)
        self._dust = contexts.dust[:, reach].sum(axis=1)
        fixed = vocab_size if scheme == "lefthash" else None
        log_phi = np.concatenate(
            [
                _log_phi(counts[i : i + 256], self._each[i : i + 256], self._dust[i : i + 256], gamma, fixed)
                for i in range(0, len(contexts), 256)
            ]
        )
        self._phi = np.exp(log_phi)
        self._missing = -np.expm1(log_phi)  # 1 - phi, without cancellation
        self._share = gamma * (1.0 if self.spared is None else 1.0 - self.spared)  # E[g]

    def expectations(self, delta: float) -> tuple[np.ndarray, np.ndarray]:
        """E[1/Z] and E[log Z] for a bias of at most 20, (n,) each."""
        c = math.expm1(delta)
        if c == 0:
            return np.ones(len(self.contexts)), np.zeros(len(self.contexts))
        s = T / c
        weight = STEP * np.exp(-s)
        weight[0] *= 0.5
        inverse = 1.0 - self._missing @ (weight * s)
        log_z = (
            self._missing @ weight + self._share * T[0]
        )  # the integral left of the first node, where 1 - phi = t E[g]
        return np.clip(inverse, 0.0, 1.0), log_z

    def rate_and_kl(self, delta: float) -> tuple[np.ndarray, np.ndarray]:
        """Probability that the next token is green, and KL(watermarked || original) in nats, (n,) each. O(70 n)."""
        delta = min(check_delta(delta), FORCED)
        if delta == 0:
            return np.full(len(self.contexts), self.gamma), np.zeros(len(self.contexts))
        inverse, log_z = self.expectations(delta)
        reached = (1.0 - inverse) / -math.expm1(-delta)
        green = reached if self.spared is None else reached + self.gamma * self.spared * inverse
        return np.clip(green, 0.0, 1.0), np.maximum(delta * reached - log_z, 0.0)

    def effect(self, delta: float) -> Effect:
        """Everything at once. O(2,500 n)."""
        forced = min(check_delta(delta), FORCED)
        rate, kl = self.rate_and_kl(delta)
        inverse, log_z = self.expectations(forced)
        reached = (1.0 - inverse) / -math.expm1(-forced) if forced else self._share
        log_z = log_z + (delta - forced) * reached
        return Effect(
            rate=rate,
            kl=kl,
            reverse_kl=np.maximum(log_z - delta * self._share, 0.0),
            variation=np.maximum(reached - self._share, 0.0),
            surprisal=self._surprisal(forced, inverse),
        )

    def _surprisal(self, delta: float, inverse: np.ndarray) -> np.ndarray:
        """sum_v p_v (E[e^(delta G_v) / Z] - 1) (-log p_v): what each group of tokens gains or loses, times its surprisal."""
        n = len(self.contexts)
        if delta == 0:
            return np.zeros(n)
        s = T / math.expm1(delta)
        weight = STEP * s * np.exp(-s)
        weight[0] *= 0.5
        each = self._each.reshape(n, self._sides, -1)
        mass = self.contexts.mass[:, : self._sides]
        gain = np.ones_like(each)
        for side in range(self._sides):
            for group in np.flatnonzero((mass[:, side] > 0).any(axis=0)):
                kept = np.exp(-T[None, :] * each[:, side, group, None])
                odds = (1 - self.gamma + self.gamma * math.exp(delta) * kept) / (1 - self.gamma + self.gamma * kept)
                gain[:, side, group] = (self._phi * odds) @ weight
        dust_gain = (self._phi @ weight) * (1 + self.gamma * math.expm1(delta))
        # The gains keep the probability that the bias reaches and what it takes from the rest: use that against rounding.
        dust = self.contexts.dust[:, : self._sides]
        total = (mass * gain).sum(axis=(1, 2)) + dust.sum(axis=1) * dust_gain
        spared = np.zeros(n) if self.spared is None else self.spared
        scale = np.divide(1 - spared * inverse, total, out=np.ones(n), where=total > 0)
        surprisal = self.contexts.surprisal[:, : self._sides]
        change = ((gain * scale[:, None, None] - 1) * surprisal).sum(axis=(1, 2))
        rare = self.contexts.dust_surprisal[:, : self._sides].sum(axis=1)
        change = change + np.where(np.isfinite(rare), (dust_gain * scale - 1) * np.where(np.isfinite(rare), rare, 0), 0)
        if self.spared is not None:
            beyond = self.contexts.surprisal[:, 1].sum(axis=1) + self.contexts.dust_surprisal[:, 1]
            change = change + (inverse - 1) * np.where(np.isfinite(beyond), beyond, 0.0)
        return change
