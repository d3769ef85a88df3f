"""Text without a model: families of next-token distributions, and watermarked texts simulated from them token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

VOCAB = 1_000
TEXTS, POSITIONS = 32, 120
#: Random green lists a context, of each share.
LISTS = 40
#: At alpha = 0.001 and 120 tokens the authors' rule gives 0.92, and 0.944 is the largest share at which all-green text is significant.
GAMMAS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.85, 0.9, 0.92, 0.93, 0.944)
DELTAS = (0.25, 0.5, 1.0, 2.0, 4.0)
#: Thirty points: what a chosen watermark is compared with.
GRID = tuple((gamma, delta) for gamma in (0.05, 0.1, 0.25, 0.5, 0.75, 0.85) for delta in DELTAS)
FAMILIES = ("uniform", "zipf", "peaked")


@dataclass(frozen=True)
class Family:
    """32 texts of 120 positions: probabilities (3840, V), and green probabilities under random lists (gammas, 3840, lists)."""

    name: str
    probabilities: np.ndarray
    masses: np.ndarray

    @property
    def texts(self) -> np.ndarray:
        """Which text each context belongs to, (3840,)."""
        return np.repeat(np.arange(TEXTS), POSITIONS)

    def rows(self, texts: np.ndarray) -> np.ndarray:
        """Contexts of these texts, (len(texts), 120)."""
        return np.asarray(texts)[:, None] * POSITIONS + np.arange(POSITIONS)

    def mass(self, gamma: float) -> np.ndarray:
        """Green probabilities at one of `GAMMAS`, (3840, lists)."""
        return self.masses[GAMMAS.index(gamma)]


@cache
def distributions(name: str) -> np.ndarray:
    """Probabilities (3840, V) of a family.

    "uniform": every token alike. "zipf": p ~ 1 / rank^s, s from 0.8 to 1.6 by context. "peaked": a context is Zipf, or one token has 0.8 to
    0.99; the share of peaked ones is that of its text, from 0 to 1, so that texts differ.
    """
    rng = np.random.default_rng(FAMILIES.index(name))
    n = TEXTS * POSITIONS
    if name == "uniform":
        return np.full((n, VOCAB), 1 / VOCAB)
    p = np.arange(1, VOCAB + 1, dtype=float)[None, :] ** -rng.uniform(0.8, 1.6, size=(n, 1))
    p /= p.sum(axis=1, keepdims=True)
    if name == "peaked":
        share = np.repeat(rng.beta(2, 2, size=TEXTS), POSITIONS)
        peaked = rng.random(n) < share
        top = rng.uniform(0.8, 0.99, size=n)
        p[peaked] *= ((1 - top) / (1 - p[:, 0]))[peaked, None]
        p[peaked, 0] = top[peaked]
    return p


def list_masses(p: np.ndarray, gammas: tuple[float, ...], lists: int, seed: int) -> np.ndarray:
    """Green probability of each context under its own random lists of exactly ``int(gamma V)`` tokens, (gammas, contexts, lists), float32.

    One permutation serves every gamma, whose lists are then nested.
    """
    rng = np.random.default_rng([seed, 1])
    n, vocab = p.shape
    sizes = np.array([int(vocab * gamma) for gamma in gammas]) - 1
    found = np.empty((len(gammas), n, lists), dtype=np.float32)
    for number in range(lists):
        order = np.argsort(rng.random((n, vocab), dtype=np.float32), axis=1)
        found[:, :, number] = np.cumsum(np.take_along_axis(p, order, axis=1), axis=1)[:, sizes].T
    return np.clip(found, 0.0, 1.0)


def simulate(
    family: Family, texts: np.ndarray, gamma: float, delta: float, *, length: int, n: int, seed: int, kept: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Green tokens of `n` watermarked texts (n,), each drawn from one of `texts`, with a fresh list at every position; and their KL per token.

    Of the tokens a share ``1 - kept`` is replaced by others, green by chance.
    """
    rng = np.random.default_rng([seed, 2])
    rows = family.rows(texts[rng.integers(len(texts), size=n)])[:, :length]
    g = family.mass(gamma)[rows, rng.integers(LISTS, size=rows.shape)].astype(float)
    z = 1 + g * math.expm1(delta)
    q = g * math.exp(delta) / z
    kl = (delta * q - np.log(z)).mean(axis=1)
    share = int(gamma * VOCAB) / VOCAB
    q = np.where(rng.random(q.shape) < kept, q, share)
    return (rng.random(q.shape) < q).sum(axis=1), kl


def null(config: Any, *, length: int, n: int, seed: int) -> np.ndarray:
    """P-values of `n` texts written without the key, tokens by Zipf's law, under the real lists of a watermark, (n,)."""
    from cameraready.lm.watermark_power.detection import exact_detect

    rank = np.arange(1, VOCAB + 1, dtype=float) ** -1.0
    texts = np.random.default_rng([seed, 3]).choice(VOCAB, size=(n, length + 1), p=rank / rank.sum())
    return exact_detect(texts, config, VOCAB).p_value
