"""What calibration needs of next-token distributions: the largest probabilities, and a histogram of the others."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

#: How many of the largest probabilities are kept one by one.
KEPT = 8
#: How many tokens transformers' "selfhash" tries for the bias; the others keep their probability.
CANDIDATES = 40
#: Octaves of the histogram; what is rarer than the last is dust, of which every green list holds its share.
OCTAVES = 26


@dataclass(frozen=True)
class Contexts:
    """Next-token distributions, in the few numbers of each that power and distortion depend on.

    Tokens are kept in groups of nearly equal probability: the eight most likely each by itself, the others by octaves of their probability.
    Axis 1 tells the 40 most likely tokens (0) from the rest (1), which transformers' "selfhash" never favours.

    Attributes
    ----------
    counts, mass, surprisal : arrays (n, 2, 34)
        Number of tokens in a group, their total probability, and the total of ``-p log p`` in nats.
    dust, dust_surprisal : arrays (n, 2)
        The same for tokens too rare to be counted.
    collision : array (n,)
        Probability that two draws are the same token, ``c2 = sum p^2``.
    """

    counts: np.ndarray
    mass: np.ndarray
    surprisal: np.ndarray
    dust: np.ndarray
    dust_surprisal: np.ndarray
    collision: np.ndarray

    def __len__(self) -> int:
        return len(self.collision)

    def __getitem__(self, rows: np.ndarray | slice) -> Contexts:
        return Contexts(*(getattr(self, field.name)[rows] for field in fields(self)))

    @property
    def entropy(self) -> np.ndarray:
        """Of each distribution, in nats, (n,)."""
        return self.surprisal.sum(axis=(1, 2)) + self.dust_surprisal.sum(axis=1)

    @classmethod
    def limit(cls) -> Contexts:
        """One context of unbounded entropy: every green list holds exactly its share of the probability."""
        empty = np.zeros((1, 2, KEPT + OCTAVES))
        return cls(empty, empty, empty, np.array([[0.0, 1.0]]), np.array([[0.0, np.inf]]), np.zeros(1))

    @classmethod
    def of(
        cls, probabilities: np.ndarray, vocab_size: int | None = None, tail_surprisal: np.ndarray | None = None
    ) -> Contexts:
        """From rows of probabilities (n, K); a row may hold the largest K alone, and the remainder is spread evenly over the other tokens.

        O(n K log K). `tail_surprisal` (n,) is the remainder's total of ``-p log p`` where it is known.

        Raises
        ------
        ValueError
            For rows that are no probabilities, or a remainder without a vocabulary to hold it.
        """
        p = as_probabilities(probabilities)
        if p.ndim != 2 or p.size == 0:
            raise ValueError(f"probabilities must have shape (contexts, tokens), got {p.shape}")
        if not np.isfinite(p).all() or (p < 0).any():
            raise ValueError("probabilities must be finite numbers >= 0; pass probabilities, not logits")
        k = p.shape[1]
        if vocab_size is not None and vocab_size < k:
            raise ValueError(f"vocab_size is {vocab_size}, but the rows hold {k} tokens")
        left = 1.0 - p.sum(axis=1)
        if (left < -1e-3).any():
            raise ValueError(
                f"a row of probabilities sums to {1 - left.min():.6g}, which is more than 1; take the softmax in float32"
            )
        left = np.where(left < 1e-6, 0.0, left)
        others = (vocab_size or k) - k
        if left.any() and others < 1:
            raise ValueError(
                f"a row of probabilities sums to {1 - left.max():.6g}, and vocab_size leaves no token for the remainder;"
                " pass vocab_size, the size of the model's whole vocabulary"
            )
        p = np.where(left[:, None] > 0, p, p / p.sum(axis=1, keepdims=True))
        p = -np.sort(-p, axis=1)
        if k < CANDIDATES:
            p = np.pad(p, ((0, 0), (0, CANDIDATES - k)))
        found = cls._grouped(p)
        found.dust[:, 1] += left
        even = -left * np.log(np.where(left > 0, left / max(others, 1), 1.0))
        found.dust_surprisal[:, 1] += even if tail_surprisal is None else np.where(left > 0, tail_surprisal, 0.0)
        return Contexts(**{**vars(found), "collision": found.collision + left**2 / max(others, 1)})

    @classmethod
    def _grouped(cls, p: np.ndarray) -> Contexts:
        """From rows in descending order."""
        n, k = p.shape
        group = np.where(p > 0, KEPT + np.minimum(-np.log2(np.where(p > 0, p, 1.0)), OCTAVES), KEPT + OCTAVES).astype(
            int
        )
        group[:, :KEPT] = np.where(p[:, :KEPT] > 0, np.arange(KEPT), KEPT + OCTAVES)
        rest = (np.arange(k) >= CANDIDATES).astype(int)
        width = KEPT + OCTAVES + 1
        at = ((np.arange(n)[:, None] * 2 + rest) * width + group).ravel()
        total = [
            np.bincount(at, weights=w.ravel(), minlength=2 * n * width).reshape(n, 2, width)
            for w in (np.ones_like(p), p, -p * np.log(np.where(p > 0, p, 1.0)))
        ]
        counts, mass, surprisal = (each[..., :-1].copy() for each in total)
        return cls(counts, mass, surprisal, total[1][..., -1].copy(), total[2][..., -1].copy(), (p**2).sum(axis=1))

    @classmethod
    def joined(cls, parts: list[Contexts]) -> Contexts:
        """All contexts of `parts`, in order."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))


def as_probabilities(values: Any) -> np.ndarray:
    """An array of floats from an array, a list or a tensor of any dtype and device."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=float)
