"""Actions, orders and traces as bit sets.

Of an action's mask, bit j of word j // 64 stands for action j.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class EncodedTraces:
    """Traces as arrays. Equal ones are stored once, with their count; equal choice sets lie next to each other.

    Attributes
    ----------
    steps : int64 array (total steps,)
        The actions of all traces, end to end.
    start : int64 array (n_traces + 1,)
        Where each trace begins in `steps`.
    choice : uint64 array (n_traces, n_words)
        The actions that had to be done, as a bit set.
    count : float64 array (n_traces,)
        How often the trace was seen.
    """

    steps: np.ndarray
    start: np.ndarray
    choice: np.ndarray
    count: np.ndarray


def n_words(n_actions: int) -> int:
    """64-bit words of a bit set of `n_actions`."""
    return max((n_actions + 63) // 64, 1)


def bit_set(members: Sequence[int], n_actions: int) -> np.ndarray:
    """`members` as a bit set, uint64 (n_words,)."""
    mask = np.zeros(n_words(n_actions), dtype=np.uint64)
    for member in members:
        mask[member // 64] |= np.uint64(1 << (member % 64))
    return mask


def packed(relation: np.ndarray) -> np.ndarray:
    """Boolean (..., n) as bit sets, uint64 (..., n_words)."""
    n = relation.shape[-1]
    words = n_words(n)
    padded = np.zeros((*relation.shape[:-1], 64 * words), dtype=bool)
    padded[..., :n] = relation
    eight = np.packbits(padded, axis=-1, bitorder="little")
    return np.ascontiguousarray(eight).view(np.dtype("<u8")).astype(np.uint64)


def unpacked(masks: np.ndarray, n_actions: int) -> np.ndarray:
    """Bit sets uint64 (..., n_words) as booleans (..., n_actions)."""
    eight = np.ascontiguousarray(masks.astype(np.dtype("<u8"))).view(np.uint8)
    return np.unpackbits(eight, axis=-1, count=n_actions, bitorder="little").astype(bool)


def encode(
    traces: Sequence[Sequence[int]], n_actions: int, choice_sets: Sequence[Sequence[int]] | None = None
) -> EncodedTraces:
    """`traces` of action indices as arrays; a trace's choice set is its own actions where none is given."""
    sets = traces if choice_sets is None else choice_sets
    counts: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for trace, choice in zip(traces, sets, strict=True):
        key = tuple(sorted(choice)), tuple(trace)
        counts[key] = counts.get(key, 0) + 1
    keys = sorted(counts)
    lengths = [len(trace) for _, trace in keys]
    return EncodedTraces(
        steps=np.array([a for _, trace in keys for a in trace], dtype=np.int64),
        start=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
        choice=np.array([bit_set(c, n_actions) for c, _ in keys], dtype=np.uint64).reshape(-1, n_words(n_actions)),
        count=np.array([counts[key] for key in keys], dtype=float),
    )
