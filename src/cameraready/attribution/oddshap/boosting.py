"""Gradient boosted trees on 0/1 features, grown as LightGBM grows them, compiled for this one case."""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True, nogil=True, boundscheck=False)
def grow(
    bits: np.ndarray,
    residual: np.ndarray,
    n_trees: int,
    learning_rate: float,
    max_leaves: int,
    max_depth: int,
    min_rows: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Boost regression trees on squared error, leaf by leaf in order of gain.

    Parameters
    ----------
    bits : uint8 array (n, d), C order
        Features, 0 or 1.
    residual : float64 array (n,)
        Target less its mean; overwritten with what the trees leave.
    n_trees, learning_rate, max_leaves, max_depth, min_rows
        LightGBM's num_iterations, learning_rate, num_leaves, max_depth and min_data_in_leaf.

    Returns
    -------
    feature : int32 array (n_trees, max_leaves - 1)
    children : int32 array (n_trees, max_leaves - 1, 2)
        Node where the feature is 0 and 1; -1 - j for leaf j of the tree.
    leaf_value : float64 array (n_trees, max_leaves)
        Times the learning rate.
    n_leaves : int64 array (n_trees,)
        Leaves used, 1 where no split was worth making; boosting stops there.

    Notes
    -----
    A split needs one sum of residuals and one count per feature (rows with a 1), so the histogram of a leaf is two
    vectors; the smaller child's is summed, the other's is the difference. O(n d log(max_leaves)) a tree.
    """
    n, d = bits.shape
    feature = np.zeros((n_trees, max_leaves - 1), dtype=np.int32)
    children = np.zeros((n_trees, max_leaves - 1, 2), dtype=np.int32)
    leaf_value = np.zeros((n_trees, max_leaves))
    n_leaves = np.ones(n_trees, dtype=np.int64)

    all_counts = np.zeros(d)
    for i in range(n):
        for f in range(d):
            all_counts[f] += bits[i, f]

    index = np.empty(n, dtype=np.int64)
    ones = np.empty(n, dtype=np.int64)
    sums = np.zeros((max_leaves, d))
    counts = np.zeros((max_leaves, d))
    start = np.zeros(max_leaves, dtype=np.int64)
    rows = np.zeros(max_leaves, dtype=np.int64)
    total = np.zeros(max_leaves)
    depth = np.zeros(max_leaves, dtype=np.int64)
    gain = np.zeros(max_leaves)
    choice = np.zeros(max_leaves, dtype=np.int64)
    parent = np.zeros(max_leaves, dtype=np.int64)  # node above each leaf, and on which side
    side = np.zeros(max_leaves, dtype=np.int64)

    for tree in range(n_trees):
        for i in range(n):
            index[i] = i
        start[0], rows[0], depth[0], parent[0] = 0, n, 0, -1
        for f in range(d):
            sums[0, f] = 0.0
            counts[0, f] = all_counts[f]
        total[0] = 0.0
        for i in range(n):
            r = residual[i]
            total[0] += r
            for f in range(d):
                sums[0, f] += r * bits[i, f]
        gain[0], choice[0] = _best_split(sums[0], counts[0], total[0], n, min_rows)
        leaves = 1
        while leaves < max_leaves:
            best = 0
            for leaf in range(1, leaves):
                if gain[leaf] > gain[best]:
                    best = leaf
            if gain[best] <= 0.0:
                break
            f0, node, new = choice[best], leaves - 1, leaves
            feature[tree, node] = f0
            children[tree, node, 0], children[tree, node, 1] = -1 - best, -1 - new
            if parent[best] >= 0:
                children[tree, parent[best], side[best]] = node
            parent[best], side[best] = node, 0
            parent[new], side[new] = node, 1
            begin, end = start[best], start[best] + rows[best]
            n_zeros, n_ones = 0, 0
            for k in range(begin, end):
                i, one = index[k], bits[index[k], f0]
                # Both are written and one counts: a branch here would be mispredicted half of the time.
                ones[n_ones] = i
                index[begin + n_zeros] = i
                n_ones += one
                n_zeros += 1 - one
            for k in range(n_ones):
                index[begin + n_zeros + k] = ones[k]
            start[new], rows[new], rows[best] = begin + n_zeros, n_ones, n_zeros
            total[new] = sums[best, f0]
            total[best] -= total[new]
            depth[best] += 1
            depth[new] = depth[best]
            small = new if n_ones < n_zeros else best
            large = best + new - small
            s, c = sums[small], counts[small]
            for f in range(d):
                whole_sum, whole_count = sums[best, f], counts[best, f]
                s[f], c[f] = 0.0, 0.0
                sums[large, f], counts[large, f] = whole_sum, whole_count
            for k in range(start[small], start[small] + rows[small]):
                i = index[k]
                r = residual[i]
                for f in range(d):
                    one_or_zero = bits[i, f]
                    s[f] += r * one_or_zero
                    c[f] += one_or_zero
            for f in range(d):
                sums[large, f] -= s[f]
                counts[large, f] -= c[f]
            for leaf in (best, new):
                gain[leaf] = 0.0
                if depth[leaf] < max_depth:
                    gain[leaf], choice[leaf] = _best_split(sums[leaf], counts[leaf], total[leaf], rows[leaf], min_rows)
            leaves += 1
        n_leaves[tree] = leaves
        if leaves == 1:
            break
        for leaf in range(leaves):
            value = learning_rate * total[leaf] / rows[leaf]
            leaf_value[tree, leaf] = value
            for k in range(start[leaf], start[leaf] + rows[leaf]):
                residual[index[k]] -= value
    return feature, children, leaf_value, n_leaves


@numba.njit(cache=True, nogil=True, boundscheck=False)
def _best_split(sums: np.ndarray, counts: np.ndarray, total: float, rows: int, min_rows: int) -> tuple[float, int]:
    """Largest reduction of squared error by one split, and its feature; no gain where no split is allowed."""
    best, choice = 0.0, 0
    whole = total * total / rows
    for f in range(len(sums)):
        n_ones = counts[f]
        n_zeros = rows - n_ones
        if n_ones < min_rows or n_zeros < min_rows:
            continue
        other = total - sums[f]
        reduction = sums[f] * sums[f] / n_ones + other * other / n_zeros - whole
        if reduction > best:
            best, choice = reduction, f
    return best, choice
