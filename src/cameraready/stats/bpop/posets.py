"""Partial orders as boolean matrices: closure, reduction, and random linear extensions.

``relation[i, j]`` says that i comes before j.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


def closure(relation: np.ndarray) -> np.ndarray:
    """Transitive closure of a boolean matrix (n, n). O(n^3).

    Raises
    ------
    ValueError
        Where the relation has a cycle, or is not a square matrix.
    """
    reach = np.array(relation, dtype=bool)
    if reach.ndim != 2 or reach.shape[0] != reach.shape[1]:
        raise ValueError(f"a relation is a square matrix, got shape {reach.shape}")
    for middle in range(len(reach)):
        reach |= np.outer(reach[:, middle], reach[middle])
    if reach.diagonal().any():
        raise ValueError("the relation has a cycle, so it is no partial order")
    return reach


def cover(order: np.ndarray) -> np.ndarray:
    """Transitive reduction of a closed order: the relations that no third action lies between. bool (n, n)."""
    whole = np.asarray(order, dtype=bool)
    between = whole.astype(np.float32) @ whole.astype(np.float32)
    return whole & (between < 0.5)


def greedy_order(weight: np.ndarray, threshold: float) -> np.ndarray:
    """A closed order of the relations whose weight (n, n) exceeds `threshold`, without cycles.

    Relations enter by falling weight; one that would contradict what is there already is left out.
    """
    n = len(weight)
    order = np.zeros((n, n), dtype=bool)
    rows, columns = np.nonzero((weight > threshold) & ~np.eye(n, dtype=bool))
    for at in np.argsort(-weight[rows, columns], kind="stable"):
        i, j = rows[at], columns[at]
        if order[i, j] or order[j, i]:
            continue
        up = order[:, i].copy()
        up[i] = True
        down = order[j].copy()
        down[j] = True
        order |= np.outer(up, down)
    return order


def incomparable(order: np.ndarray) -> np.ndarray:
    """Pairs i < j that a closed order leaves free, bool (n, n) with True above the diagonal only."""
    return np.triu(~(order | order.T), k=1)


def seen_both_ways(traces: Sequence[Sequence[int]], n: int) -> np.ndarray:
    """Pairs that the traces have in both orders, bool (n, n), symmetric."""
    seen = precedence_counts(traces, n) > 0
    return seen & seen.T


def precedence_counts(traces: Sequence[Sequence[int]], n: int) -> np.ndarray:
    """In how many traces i comes before j, int64 (n, n)."""
    counts = np.zeros((n, n), dtype=np.int64)
    for trace in traces:
        at = np.asarray(trace, dtype=np.int64)
        first, second = np.triu_indices(len(at), k=1)
        np.add.at(counts, (at[first], at[second]), 1)
    return counts


def is_linear_extension(trace: Sequence[int], order: np.ndarray) -> bool:
    """Whether no action of `trace` comes before one that it depends on."""
    at = np.asarray(trace, dtype=np.int64)
    first, second = np.triu_indices(len(at), k=1)
    return not order[at[second], at[first]].any()


def frontier_walk(
    order: np.ndarray, generator: np.random.Generator, *, beta: float = 0.0, eps: float = 0.0
) -> list[int]:
    """A random trace of a closed order, step by step (the model's own law; Kahn's algorithm at beta = eps = 0).

    Of the actions whose predecessors are done, one is taken with probability proportional to (1 + its remaining
    descendants)^beta; with probability `eps` any remaining action is taken instead.
    """
    n = len(order)
    left = np.ones(n, dtype=bool)
    trace = []
    for _ in range(n):
        if generator.random() < eps:
            ready = np.flatnonzero(left)
            weight = np.ones(len(ready))
        else:
            ready = np.flatnonzero(left & ~order[left].any(axis=0))
            weight = (1.0 + order[ready][:, left].sum(axis=1)) ** beta
        chosen = int(generator.choice(ready, p=weight / weight.sum()))
        trace.append(chosen)
        left[chosen] = False
    return trace


def uniform_extension(order: np.ndarray, generator: np.random.Generator, *, sweeps: int = 0) -> list[int]:
    """A linear extension that is uniform in the limit: adjacent free pairs are exchanged at random (Karzanov and Khachiyan).

    `sweeps` times n^2 exchanges are proposed, ``ceil(log(n)) + 2`` times n^2 where it is 0.
    """
    trace = frontier_walk(order, generator)
    n = len(trace)
    if n < 2:
        return trace
    proposals = (sweeps or int(np.ceil(np.log(n))) + 2) * n * n
    places = generator.integers(n - 1, size=proposals)
    coins = generator.random(proposals) < 0.5
    free = (~order).tolist()
    for place in places[coins].tolist():
        first, second = trace[place], trace[place + 1]
        if free[first][second]:
            trace[place], trace[place + 1] = second, first
    return trace


def realizer(order: np.ndarray, most: int, generator: np.random.Generator) -> list[list[int]]:
    """Linear extensions that have little more in common than a closed order (n, n); at most `most` of them.

    The first is random; every further one reverses as many of the pairs that all so far have alike, without need, as a
    greedy topological sort finds. O(most n^2).
    """
    extensions = [frontier_walk(order, generator)]
    alike = ~order
    while True:
        position = np.argsort(extensions[-1])
        alike &= position[:, None] < position
        if len(extensions) == most or not alike.any():
            return extensions
        left, trace = np.ones(len(order), dtype=bool), []
        for _ in range(len(order)):
            ready = np.flatnonzero(left & ~order[left].any(axis=0))
            gain = alike[left][:, ready].sum(axis=0) - alike[ready][:, left].sum(axis=1)
            chosen = int(ready[np.argmax(gain + generator.random(len(ready)))])
            trace.append(chosen)
            left[chosen] = False
        extensions.append(trace)


def linear_extensions(order: np.ndarray) -> Iterator[list[int]]:
    """Every linear extension of a closed order; there may be n! of them."""
    n = len(order)

    def extend(done: list[int]) -> Iterator[list[int]]:
        if len(done) == n:
            yield list(done)
            return
        for v in range(n):
            if v not in done and all(u in done for u in np.flatnonzero(order[:, v])):
                done.append(v)
                yield from extend(done)
                done.pop()

    return extend([])
