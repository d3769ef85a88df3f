"""Pairs of points closer than a radius, found by k-d trees in O(n log n + number of pairs)."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.spatial import cKDTree


def as_points(X: Any) -> np.ndarray:
    """X as a float array (n, d); one dimension is refused rather than guessed."""
    points = np.asarray(X, dtype=float)
    if points.ndim != 2:
        raise ValueError(f"this kernel needs points as an array (n, d), got an array of shape {points.shape}")
    return points


def close_pairs(X: np.ndarray, Y: np.ndarray | None, radius: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Pairs with Euclidean distance <= radius: (rows, cols), each once, in no order that matters.

    X (n, d), Y (m, d). With Y None: the upper triangle, row < column, and the diagonal.
    The coordinates are centred first, so that far-away origins (map projections, timestamps) cost no precision.
    """
    centre = X.mean(axis=0) if len(X) else 0.0
    tree = cKDTree(X - centre, balanced_tree=False, compact_nodes=False)
    # A hair more than the radius: rounding in the tree must not lose a pair that the kernel would still weigh.
    reach = radius * (1 + 1e-9)
    if Y is None:
        found = tree.query_pairs(reach, output_type="ndarray")
        index = np.arange(len(X))
        return np.concatenate([found[:, 0], index]), np.concatenate([found[:, 1], index])
    other = cKDTree(Y - centre, balanced_tree=False, compact_nodes=False)
    found = tree.sparse_distance_matrix(other, reach, output_type="ndarray")
    return found["i"].astype(np.int64), found["j"].astype(np.int64)


def neighbour_distances(X: np.ndarray, count: int, *, sample: int = 2000) -> np.ndarray:
    """The distance of up to `sample` points of X to their `count`-th neighbour (themselves not counted)."""
    count = min(count, len(X) - 1)
    if count < 1:
        return np.zeros(len(X))
    chosen = X[:: max(1, len(X) // sample)]
    return cKDTree(X).query(chosen, k=[count + 1])[0][:, 0]
