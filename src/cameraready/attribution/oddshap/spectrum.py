"""The exact Fourier (Walsh) spectrum of tree ensembles over 0/1 features, and the Shapley values that follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

#: Terms aggregated at a time; what bounds the memory (about 60 bytes a term while sorting).
_MAX_TERMS_AT_ONCE = 10_000_000

#: Deepest trees that are expanded; a single path of 20 splits already touches a million sets.
_DEEPEST = 20


@dataclass(frozen=True)
class Forest:
    """The sum of several binary trees over features that are 0 or 1.

    Attributes
    ----------
    feature : int array (n_nodes,)
        Feature that an internal node splits on.
    children : int array (n_nodes, 2)
        Next node where the feature is 0 and 1; a negative entry ``-1 - j`` is leaf j.
    leaf_value : float array (n_leaves,)
    roots : int array (n_trees,)
        Root of each tree, a leaf (negative) for a constant tree.

    No path may meet a feature twice; `simplified` sees to that.
    """

    feature: np.ndarray
    children: np.ndarray
    leaf_value: np.ndarray
    roots: np.ndarray

    def __call__(self, bits: np.ndarray) -> np.ndarray:
        """Value of the sum of trees for every row of a 0/1 array (m, n_features): (m,)."""
        bits = np.asarray(bits, dtype=bool)
        total = np.zeros(len(bits))
        rows = np.arange(len(bits))
        for root in self.roots:
            node = np.full(len(bits), root)
            while (inside := node >= 0).any():
                at = node[inside]
                node[inside] = self.children[at, bits[rows[inside], self.feature[at]].astype(np.int64)]
            total += self.leaf_value[-1 - node]
        return total


@dataclass(frozen=True)
class _Level:
    """The internal nodes at one depth k of all trees: their ancestors and what they add to the spectrum.

    With A the k ancestors of a node that splits on f, s_a = +1 where the path takes a = 0 and -1 where it takes a = 1,
    and D half the difference of the uniform means below, the node adds D / 2^k prod_{a in T} s_a to the coefficient of
    T + f for every T within A. Summed over nodes, and with the mean as the coefficient of the empty set, that is the whole spectrum: the
    indicator of reaching the node is prod_a (1 + s_a chi_a) / 2.
    """

    feature: np.ndarray  # (n,)
    ancestors: np.ndarray  # (n, k)
    signs: np.ndarray  # (n, k), +1 or -1
    amount: np.ndarray  # (n,), D / 2^k


def levels(forest: Forest) -> tuple[list[_Level], float]:
    """Nodes of all trees by depth, and the uniform mean of the forest."""
    by_depth, below = [], []
    node = forest.roots[forest.roots >= 0]
    ancestors = np.zeros((len(node), 0), dtype=np.int64)
    signs = np.zeros((len(node), 0))
    while len(node):
        by_depth.append((node, ancestors, signs))
        children = forest.children[node]
        inner = children >= 0
        below.append(inner)
        node = np.concatenate([children[inner[:, 0], 0], children[inner[:, 1], 1]])
        parents = np.concatenate([np.flatnonzero(inner[:, 0]), np.flatnonzero(inner[:, 1])])
        side = np.ones(len(node))
        side[int(inner[:, 0].sum()) :] = -1.0
        ancestors = np.column_stack([ancestors[parents], forest.feature[by_depth[-1][0]][parents]])
        signs = np.column_stack([signs[parents], side])
    mean = np.zeros(len(forest.feature))

    def mean_of(children: np.ndarray) -> np.ndarray:
        inner = children >= 0
        return np.where(inner, mean[np.where(inner, children, 0)] if len(mean) else 0.0,
                        forest.leaf_value[np.where(inner, 0, -1 - children)])  # fmt: skip

    found = []
    for depth in range(len(by_depth) - 1, -1, -1):
        node, ancestors, signs = by_depth[depth]
        means = mean_of(forest.children[node])
        mean[node] = means.mean(axis=1)
        amount = (means[:, 0] - means[:, 1]) / 2 / 2.0**depth
        kept = amount != 0
        found.append(_Level(forest.feature[node[kept]], ancestors[kept], signs[kept], amount[kept]))
    return found[::-1], float(mean_of(forest.roots).sum())


def largest_terms(
    forest: Forest,
    n_features: int,
    count: int,
    *,
    parity: Literal["odd", "all"] = "odd",
    min_size: int = 3,
) -> tuple[np.ndarray, np.ndarray]:
    """The sets with the largest coefficients: a bool array (k, n_features) of members and the coefficients (k,).

    Parameters
    ----------
    forest : Forest
        Trees over `n_features` 0/1 features.
    count : int
        How many sets at most; fewer are returned where the forest has fewer.
    parity : {"odd", "all"}
        Whether sets of even size count.
    min_size : int
        Smallest size that counts.

    Notes
    -----
    A node at depth k adds to 2^k coefficients. They are generated for all nodes of a depth at once, keyed by XOR of one
    64-bit code per feature (single bits up to 64 features, hence exact; random codes beyond, verified by a second
    code), and summed by sorting. Above ten million terms the keys are split into ranges handled one after another.
    O(N log N) for N terms.
    """
    by_depth, _ = levels(forest)
    if count <= 0 or not by_depth:
        return np.zeros((0, n_features), dtype=bool), np.zeros(0)
    if len(by_depth) > _DEEPEST:
        raise ValueError(
            f"the surrogate has a tree of depth {len(by_depth)}, and a split at depth k touches 2^k sets; "
            f"limit its depth to {_DEEPEST} or less (max_depth=10 is what OddSHAP uses)"
        )
    used = np.unique(np.concatenate([level.feature for level in by_depth]))
    wanted = _wanted_subsets(len(by_depth), parity, min_size)
    total = sum(len(level.feature) * len(subsets) for level, subsets in zip(by_depth, wanted, strict=True))
    range_bits = max(0, int(np.ceil(np.log2(max(total, 1) / _MAX_TERMS_AT_ONCE))))
    for attempt in range(8):
        codes, checks = _feature_codes(used, n_features, attempt)
        try:
            parts = [
                _largest_in_range(by_depth, wanted, codes, checks, count, number, range_bits)
                for number in range(1 << range_bits)
            ]
            break
        except _Collision:  # once in 2^64 pairs of sets
            continue
    else:
        raise RuntimeError("eight hash functions in a row collided on the sets of this forest; please report it")
    depth, node, subset, coefficient = (np.concatenate(column) for column in zip(*parts, strict=True))
    best = np.argsort(-np.abs(coefficient), kind="stable")[:count]
    return _members(by_depth, depth[best], node[best], subset[best], n_features), coefficient[best]


def shapley_values(forest: Forest, n_features: int) -> np.ndarray:
    """Shapley values (n_features,) of the game S -> forest(bits of S).

    The same values as TreeSHAP for that game, from phi_i = -2 sum of beta_T / |T| over odd T that contain i. Sums over
    the subsets of a node's ancestors depend only on how often its path takes 0 and 1, so the cost is O(nodes x depth).
    """
    by_depth, _ = levels(forest)
    values = np.zeros(n_features)
    tables = _subset_sums(len(by_depth))
    for depth, level in enumerate(by_depth):
        down = level.signs < 0
        ones = down.sum(axis=1)
        pull = -2.0 * level.amount
        np.add.at(values, level.feature, pull * tables[0, depth, ones])
        if depth:
            share = level.signs * tables[1, depth - 1, ones[:, None] - down]  # of each ancestor, by the others' signs
            np.add.at(values, level.ancestors, pull[:, None] * share)
    return values


class _Collision(Exception):
    """Two different sets share a key."""


def _feature_codes(used: np.ndarray, n_features: int, attempt: int) -> tuple[np.ndarray, np.ndarray | None]:
    codes = np.zeros(n_features, dtype=np.uint64)
    if len(used) <= 64:
        codes[used] = np.left_shift(np.uint64(1), np.arange(len(used), dtype=np.uint64))
        return codes, None
    generator = np.random.default_rng(attempt)
    codes[used] = generator.integers(0, 2**64, size=len(used), dtype=np.uint64)
    return codes, generator.integers(0, 2**32, size=n_features, dtype=np.uint32)


def _wanted_subsets(n_levels: int, parity: str, min_size: int) -> list[np.ndarray]:
    """For each depth k the subsets of k ancestors (numbers below 2^k, bit a for ancestor a) whose terms count."""
    wanted = []
    for depth in range(n_levels):
        ones = np.ones((1, depth), dtype=np.int64)
        size = _over_subsets(np.ones(1, dtype=np.int64), ones, np.add)[0]
        keep = size >= min_size
        if parity == "odd":
            keep &= size % 2 == 1
        wanted.append(np.flatnonzero(keep))
    return wanted


@dataclass(frozen=True)
class _Block:
    """Consecutive nodes of one depth, and the terms of their wanted subsets, node by node."""

    depth: int
    first_node: int
    first_place: int  # the number of its first term among all
    keys: np.ndarray  # (nodes x subsets,)
    checks: np.ndarray | None
    amounts: np.ndarray


def _blocks(
    by_depth: list[_Level], wanted: list[np.ndarray], codes: np.ndarray, checks: np.ndarray | None
) -> Iterator[_Block]:
    """All terms of the forest, about a million at a time."""
    place = 0
    for depth, (level, subsets) in enumerate(zip(by_depth, wanted, strict=True)):
        step = max(1, (1 << 20) >> depth)
        for start in range(0, len(level.feature) if len(subsets) else 0, step):
            at = slice(start, start + step)

            def terms(
                own: np.ndarray, others: np.ndarray, combine: np.ufunc, chosen: np.ndarray = subsets
            ) -> np.ndarray:
                return np.take(_over_subsets(own, others, combine), chosen, axis=1).ravel()

            own, others = level.feature[at], level.ancestors[at]
            block = _Block(
                depth,
                start,
                place,
                terms(codes[own], codes[others], np.bitwise_xor),
                None if checks is None else terms(checks[own], checks[others], np.bitwise_xor),
                terms(level.amount[at], level.signs[at], np.multiply),
            )
            place += len(block.keys)
            yield block


def _largest_in_range(
    by_depth: list[_Level],
    wanted: list[np.ndarray],
    codes: np.ndarray,
    checks: np.ndarray | None,
    count: int,
    number: int,
    range_bits: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The `count` largest sums among the keys of one range, as (depth, node, subset, coefficient) of a first holder."""
    keys, seconds, amounts, places, index = [], [], [], [], []
    for block in _blocks(by_depth, wanted, codes, checks):
        index.append((block.first_place, block.depth, block.first_node, len(wanted[block.depth])))
        mine = slice(None)
        if range_bits:
            scattered = (block.keys * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - range_bits)
            mine = np.flatnonzero(scattered == np.uint64(number))
        keys.append(block.keys[mine])
        amounts.append(block.amounts[mine])
        places.append(np.arange(block.first_place, block.first_place + len(block.keys))[mine])
        if block.checks is not None:
            seconds.append(block.checks[mine])
    if not keys or not sum(map(len, keys)):
        return (*(np.zeros(0, dtype=np.int64),) * 3, np.zeros(0))
    key = np.concatenate(keys)
    order = np.argsort(key)
    key = key[order]
    fresh = np.concatenate([[True], key[1:] != key[:-1]])
    if seconds:
        second = np.concatenate(seconds)[order]
        if (~fresh[1:] & (second[1:] != second[:-1])).any():
            raise _Collision
    heads = np.flatnonzero(fresh)
    coefficient = np.add.reduceat(np.concatenate(amounts)[order], heads)
    best = np.arange(len(heads))
    if len(heads) > count:
        best = np.sort(np.argpartition(-np.abs(coefficient), count - 1)[:count])
    place = np.concatenate(places)[order[heads[best]]]
    first_place, depth, first_node, width = np.array(index).T
    block_of = np.searchsorted(first_place, place, side="right") - 1
    row, column = np.divmod(place - first_place[block_of], width[block_of])
    depth = depth[block_of]
    subset = np.array([wanted[k][j] for k, j in zip(depth, column, strict=True)], dtype=np.int64)
    return depth, first_node[block_of] + row, subset, coefficient[best]


def _over_subsets(own: np.ndarray, ancestors: np.ndarray, combine: np.ufunc) -> np.ndarray:
    """`own` (n,) combined with every subset of `ancestors` (n, k): array (n, 2^k), bit a of the column for ancestor a."""
    table = np.empty((len(own), 1 << ancestors.shape[1]), dtype=own.dtype)
    table[:, 0] = own
    for a in range(ancestors.shape[1]):
        width = 1 << a
        combine(table[:, :width], ancestors[:, a : a + 1], out=table[:, width : 2 * width])
    return table


def _members(
    by_depth: list[_Level], depth: np.ndarray, node: np.ndarray, subset: np.ndarray, n_features: int
) -> np.ndarray:
    members = np.zeros((len(depth), n_features), dtype=bool)
    for k in np.unique(depth):
        rows = np.flatnonzero(depth == k)
        level = by_depth[k]
        members[rows, level.feature[node[rows]]] = True
        chosen = (subset[rows, None] >> np.arange(k)) & 1 == 1
        at, which = np.nonzero(chosen)
        members[rows[at], level.ancestors[node[rows[at]], which]] = True
    return members


def _subset_sums(n_levels: int) -> np.ndarray:
    """Tables t[i, k, q] over k signs of which q are -1, with e_j their elementary symmetric polynomials.

    i = 0: sum of e_j / (j + 1) over even j; i = 1: sum of e_j / (j + 2) over odd j.
    """
    tables = np.zeros((2, max(n_levels, 1), n_levels + 1))
    for k in range(n_levels):
        for q in range(k + 1):
            symmetric = np.array([1.0])
            for sign in (-1.0,) * q + (1.0,) * (k - q):
                symmetric = np.convolve(symmetric, [1.0, sign])
            j = np.arange(k + 1)
            even = j % 2 == 0
            tables[0, k, q] = (symmetric / (j + 1))[even].sum()
            tables[1, k, q] = (symmetric / (j + 2))[~even].sum()
    return tables
