"""The likelihood of traces given a partial order, on bit sets, compiled.

``after[i]`` holds the actions that must come after i, ``before[i]`` those that must come before it; both are closed.
"""

from __future__ import annotations

import numba
import numpy as np

_M1, _M2, _M4 = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333), np.uint64(0x0F0F0F0F0F0F0F0F)
_H01, _ONE = np.uint64(0x0101010101010101), np.uint64(1)
_S1, _S2, _S4, _S56 = np.uint64(1), np.uint64(2), np.uint64(4), np.uint64(56)
#: A running total of weights below this share of its peak is added up afresh: the rest may be rounding.
_CANCELLED = 1e-6


@numba.njit(cache=True, nogil=True)
def _ones(x: np.uint64) -> int:
    """Number of bits that are set."""
    x = x - ((x >> _S1) & _M1)
    x = (x & _M2) + ((x >> _S2) & _M2)
    x = (x + (x >> _S4)) & _M4
    return int((x * _H01) >> _S56)


@numba.njit(cache=True, nogil=True)
def step_weights(beta: float, weight: np.ndarray) -> None:
    """Fill ``weight[s]`` with exp(beta log(1 + s)): what an action with s remaining descendants weighs."""
    for s in range(weight.size):
        weight[s] = (1.0 + s) ** beta


@numba.njit(cache=True, nogil=True)
def covers(after: np.ndarray, links: np.ndarray) -> None:
    """Fill `links` with the transitive reduction of `after`, uint64 (n, n_words) both. O(relations)."""
    n, words = after.shape
    for i in range(n):
        links[i] = after[i]
        for w in range(words):
            rest = after[i, w]
            while rest:
                lowest = rest & (~rest + _ONE)
                rest ^= lowest
                j = 64 * w + _ones(lowest - _ONE)
                for x in range(words):
                    links[i, x] &= ~after[j, x]


@numba.njit(cache=True, nogil=True)
def begin(
    choice: np.ndarray, after: np.ndarray, before: np.ndarray, weight: np.ndarray, unmet: np.ndarray, open_: np.ndarray
) -> float:
    """Count each action's predecessors (`unmet`) and descendants (`open_`) in `choice`; the frontier's total weight."""
    n, words = after.shape
    total = 0.0
    for v in range(n):
        if (choice[v >> 6] >> np.uint64(v & 63)) & _ONE:
            lacking, later = 0, 0
            for w in range(words):
                lacking += _ones(before[v, w] & choice[w])
                later += _ones(after[v, w] & choice[w])
            unmet[v], open_[v] = lacking, later
            if lacking == 0:
                total += weight[later]
    return total


@numba.njit(cache=True, nogil=True)
def count_covers(links: np.ndarray, unmet: np.ndarray) -> None:
    """Count each action's immediate predecessors, of all actions."""
    n, words = links.shape
    unmet[:] = 0
    for i in range(n):
        for w in range(words):
            rest = links[i, w]
            while rest:
                lowest = rest & (~rest + _ONE)
                rest ^= lowest
                unmet[64 * w + _ones(lowest - _ONE)] += 1


@numba.njit(cache=True, nogil=True)
def walk(
    steps: np.ndarray,
    links: np.ndarray,
    after: np.ndarray,
    before: np.ndarray,
    weight: np.ndarray,
    eps: float,
    total: float,
    left: np.ndarray,
    unmet: np.ndarray,
    open_: np.ndarray,
) -> tuple[float, float]:
    """Log-likelihood of `steps` and the weight of the frontier that they leave.

    `left` (bit set of the actions not done), `unmet` and `open_` (see `begin`) are brought up to date in place. An
    action that was done before its time counts as done. `unmet` counts predecessors along `links`, which are the
    immediate ones where all actions are to be done: O(steps + immediate relations). Once an action comes too early, those
    that it stood for count for themselves, so that all relations are followed from there on.
    """
    n, words = after.shape
    n_left = 0
    for w in range(words):
        n_left += _ones(left[w])
    log_product, product, peak = 0.0, 1.0, total
    followed = links
    for t in range(steps.size):
        y = steps[t]
        in_time = unmet[y] == 0
        p = eps / n_left
        if in_time:
            p += (1.0 - eps) * weight[open_[y]] / total
        if p <= 0.0:
            return -np.inf, total
        product *= p
        if product < 1e-200:
            log_product += np.log(product)
            product = 1.0
        left[y >> 6] &= ~(_ONE << np.uint64(y & 63))
        n_left -= 1
        if in_time:
            total -= weight[open_[y]]
        else:  # what should have come before it has one descendant less to wait for it
            for w in range(words):
                waiting = before[y, w] & left[w]
                while waiting:
                    lowest = waiting & (~waiting + _ONE)
                    waiting ^= lowest
                    a = 64 * w + _ones(lowest - _ONE)
                    if unmet[a] == 0:
                        total += weight[open_[a] - 1] - weight[open_[a]]
                    open_[a] -= 1
            followed = after
            for v in range(n):
                if (left[v >> 6] >> np.uint64(v & 63)) & _ONE and unmet[v] > 0:
                    unmet[v] = np.int64((after[y, v >> 6] >> np.uint64(v & 63)) & _ONE)  # y itself is taken off below
                    for w in range(words):
                        unmet[v] += _ones(before[v, w] & left[w])
        for w in range(words):
            freed = followed[y, w] & left[w]
            while freed:
                lowest = freed & (~freed + _ONE)
                freed ^= lowest
                v = 64 * w + _ones(lowest - _ONE)
                unmet[v] -= 1
                if unmet[v] == 0:
                    total += weight[open_[v]]
        peak = max(peak, total)
        if total < _CANCELLED * peak and n_left > 0:
            total = 0.0
            for v in range(n):
                if (left[v >> 6] >> np.uint64(v & 63)) & _ONE and unmet[v] == 0:
                    total += weight[open_[v]]
            peak = total
    return log_product + np.log(product), total


@numba.njit(cache=True, nogil=True)
def log_likelihood(
    steps: np.ndarray,
    start: np.ndarray,
    choice: np.ndarray,
    count: np.ndarray,
    after: np.ndarray,
    before: np.ndarray,
    weight: np.ndarray,
    eps: float,
    floor: float,
    out: np.ndarray,
) -> float:
    """Log-likelihood of all traces; -inf as soon as it is sure to be at most `floor` (every term is at most 0).

    `out` takes that of the single traces (n_traces,); what was not reached is left as it was.
    """
    n, words = after.shape
    unmet0, open0 = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    unmet, open_ = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    left, links = np.empty(words, dtype=np.uint64), np.empty_like(after)
    total0, value, linked = 0.0, 0.0, False
    for t in range(count.size):
        same = t > 0
        if same:
            for w in range(words):
                same = same and choice[t, w] == choice[t - 1, w]
        if not same:
            total0 = begin(choice[t], after, before, weight, unmet0, open0)
            size = 0
            for w in range(words):
                size += _ones(choice[t, w])
            linked = size == n
            if linked:
                covers(after, links)
                count_covers(links, unmet0)
        unmet[:], open_[:], left[:] = unmet0, open0, choice[t]
        trace, followed = steps[start[t] : start[t + 1]], links if linked else after
        found, _ = walk(trace, followed, after, before, weight, eps, total0, left, unmet, open_)
        out[t] = found
        value += count[t] * found
        if value <= floor:
            return -np.inf
    return value


@numba.njit(cache=True, nogil=True)
def trace_by_draw(
    steps: np.ndarray, choice: np.ndarray, after: np.ndarray, before: np.ndarray, beta: np.ndarray, eps: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One trace, or its beginning, under many orders.

    Parameters
    ----------
    after, before : uint64 arrays (n_draws, n, n_words)
    beta, eps : float64 arrays (n_draws,)

    Returns
    -------
    log_likelihood : float64 array (n_draws,)
    following : float64 array (n_draws, n)
        Probability of each action to be the next one; zero for those that are done or not in `choice`.
    """
    n_draws, n, words = after.shape
    found, following = np.empty(n_draws), np.zeros((n_draws, n))
    unmet, open_ = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    left, weight = np.empty(words, dtype=np.uint64), np.empty(n + 1)
    for s in range(n_draws):
        step_weights(beta[s], weight)
        total = begin(choice, after[s], before[s], weight, unmet, open_)
        left[:] = choice
        found[s], total = walk(steps, after[s], after[s], before[s], weight, eps[s], total, left, unmet, open_)
        n_left = 0
        for w in range(words):
            n_left += _ones(left[w])
        for v in range(n):
            if n_left and (left[v >> 6] >> np.uint64(v & 63)) & _ONE:
                following[s, v] = eps[s] / n_left
                if unmet[v] == 0:
                    following[s, v] += (1.0 - eps[s]) * weight[open_[v]] / total
    return found, following
