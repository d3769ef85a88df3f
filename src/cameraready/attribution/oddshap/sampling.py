"""The order in which coalitions are evaluated: paired, spread evenly over sizes, never twice the same."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np

#: Units (pairs, or single coalitions) drawn at a time. Fixed, so that the sequence depends on the seed alone
#: and not on how far each call extends it.
_BLOCK = 1024


@dataclass(frozen=True)
class Units:
    """What the regression needs to know of the first coalitions of a sequence.

    A unit is a pair (S, complement of S), or a single coalition S where pairing is off.

    Attributes
    ----------
    coalitions : bool array (u, n_players)
        S of every unit.
    first : int array (u,)
        Position of S in the sequence; if `paired`, its complement is at the next one.
    paired : bool
    weights : float array (u,)
        Total least-squares weight of the unit (both rows of a pair together): the Shapley kernel's mass of its stratum
        over the number of units drawn from it, an unbiased estimate of the kernel-weighted sum over all coalitions.
    strata : int array (u,)
        Sizes that are drawn from separately; S and its complement share one.
    sampled_fraction : float array (u,)
        Share of the unit's stratum that was drawn; 1 where the size is enumerated.
    """

    coalitions: np.ndarray
    first: np.ndarray
    paired: bool
    weights: np.ndarray
    strata: np.ndarray
    sampled_fraction: np.ndarray


class CoalitionSequence:
    """A reproducible, endless-until-exhausted sequence of distinct coalitions; any prefix is a valid sample.

    The empty and the full coalition come first. Then units follow in rounds: each round takes every size 1..n-1 once,
    in random order, so sizes are uniform (as in OddSHAP) with less variance than independent draws. Within a size
    coalitions are drawn without replacement; a size that has none left drops out of later rounds, which is the border
    enumeration of small sizes. With `paired`, every coalition is followed by its complement.

    Because a prefix is a sample, one set of evaluations serves several budgets, and a budget can be raised without
    losing what was paid for.

    Parameters
    ----------
    n_players : int
        Number of players, at least 1.
    paired : bool
        Whether each coalition is followed by its complement.
    generator : numpy.random.Generator
        Source of randomness; it belongs to the sequence from here on.

    Notes
    -----
    No binomial enters a weight: C(n, s) in the Shapley kernel 1 / (s (n - s) C(n, s)) cancels against the same
    factor of the importance correction, so hundreds of players are no numerical problem. Drawing m coalitions costs
    O(m n log n).
    """

    def __init__(self, n_players: int, *, paired: bool, generator: np.random.Generator) -> None:
        if n_players < 1:
            raise ValueError(f"a sequence of coalitions needs at least 1 player, got {n_players}")
        self.n_players = n_players
        self.paired = paired
        self._generator = generator
        sizes = np.arange(1, n_players)
        stratum = np.minimum(sizes, n_players - sizes) if paired else sizes
        self._sizes, self._stratum_of_size = sizes, np.concatenate([[0], stratum])
        n_strata = int(stratum.max(initial=0)) + 1
        self._capacity = np.zeros(n_strata)
        for c in range(1, n_strata):
            count = math.comb(n_players, c)
            count = count // 2 if paired and 2 * c == n_players else count
            self._capacity[c] = min(count, 2**62)  # beyond any budget, and within float range for any n
        self.n_units = self._capacity.sum()
        # One 64-bit number per player: a coalition's key is the sum over its members (modulo 2^64). A collision
        # would only reject a good draw.
        self._code = generator.integers(0, 2**64, size=n_players, dtype=np.uint64)
        self._taken = np.zeros(n_strata, dtype=np.int64)
        self._seen = np.zeros(0, dtype=np.uint64)
        self._remainder: dict[int, np.ndarray] = {}
        self._units = np.zeros((0, n_players), dtype=bool)
        self._unit_sizes = np.zeros(0, dtype=np.int64)

    def coalitions(self, start: int, stop: int) -> np.ndarray:
        """Coalitions `start` to `stop` (exclusive) of the sequence: bool array (stop - start, n_players)."""
        per_unit = 2 if self.paired else 1
        needed = max(0, -(-(stop - 2) // per_unit))
        self._extend(needed)
        first = max(start - 2, 0) // per_unit
        units = self._units[first:needed]
        rows = np.stack([units, ~units], axis=1).reshape(-1, self.n_players) if self.paired else units
        rows = rows[max(start - 2, 0) - first * per_unit :]
        if start < 2:
            ends = np.array([[False], [True]]).repeat(self.n_players, axis=1)
            rows = np.concatenate([ends[start:], rows])
        return rows[: stop - start]

    def units(self, budget: int) -> Units:
        """The complete units among the first `budget` coalitions, with their weights.

        A last coalition whose complement is beyond the budget belongs to none: without the complement its even part
        cannot be told from the odd one, and would only be noise to the regression.
        """
        per_unit = 2 if self.paired else 1
        count = max(0, budget - 2) // per_unit
        self._extend(count)
        strata = self._stratum_of_size[self._unit_sizes[:count]]
        # Shapley kernel mass of a coalition size s: C(n, s) / (s (n - s) C(n, s)).
        mass = np.zeros(len(self._capacity))
        np.add.at(mass, self._stratum_of_size[1:], 1.0 / (self._sizes * (self.n_players - self._sizes)))
        drawn = np.bincount(strata, minlength=len(mass))
        return Units(
            coalitions=self._units[:count],
            first=2 + per_unit * np.arange(count),
            paired=self.paired,
            weights=mass[strata] / drawn[strata],
            strata=strata,
            sampled_fraction=drawn[strata] / self._capacity[strata],
        )

    def _extend(self, n_units: int) -> None:
        if n_units > self.n_units:
            raise ValueError(
                f"there are only {self.n_units:.0f} units of {self.n_players} players, {n_units} asked for"
            )
        while len(self._units) < n_units:
            sizes = self._next_sizes()
            block = self._draw(sizes)
            self._units = np.concatenate([self._units, block])
            self._unit_sizes = np.concatenate([self._unit_sizes, sizes])

    def _next_sizes(self) -> np.ndarray:
        """Sizes of the next block of units: whole rounds of shuffled sizes, less those beyond their stratum's end."""
        open_sizes = self._sizes[self._taken[self._stratum_of_size[1:]] < self._capacity[self._stratum_of_size[1:]]]
        n_rounds = max(1, -(-_BLOCK // len(open_sizes)))
        sizes = self._generator.permuted(np.tile(open_sizes, (n_rounds, 1)), axis=1).ravel()
        strata = self._stratum_of_size[sizes]
        rank = _rank_within(strata) + self._taken[strata]
        keep = rank < self._capacity[strata]
        sizes = sizes[keep]
        self._taken += np.bincount(strata[keep], minlength=len(self._taken))
        return sizes

    def _draw(self, sizes: np.ndarray) -> np.ndarray:
        """Distinct new coalitions of the given sizes, (len(sizes), n_players); `_taken` already counts them."""
        block = np.zeros((len(sizes), self.n_players), dtype=bool)
        strata = self._stratum_of_size[sizes]
        # Rejection slows down once half of a stratum is used: from there on its remaining coalitions are listed.
        listed = 2 * self._taken > self._capacity
        open_places = np.flatnonzero(~listed[strata])
        while len(open_places):
            drawn = self._random_subsets(sizes[open_places])
            keys = self._keys(drawn)
            _, where = np.unique(keys, return_index=True)
            fresh = np.zeros(len(keys), dtype=bool)
            fresh[where] = True
            fresh &= ~_contains(self._seen, keys)
            block[open_places[fresh]] = drawn[fresh]
            self._seen = np.union1d(self._seen, keys[fresh])
            open_places = open_places[~fresh]
        for c in np.unique(strata[listed[strata]]):
            places = np.flatnonzero(strata == c)
            rest = self._list_remainder(int(c))
            chosen = rest[: len(places)]
            self._remainder[int(c)] = rest[len(places) :]
            flip = chosen.sum(axis=1) != sizes[places]
            chosen[flip] = ~chosen[flip]
            block[places] = chosen
        return block

    def _list_remainder(self, c: int) -> np.ndarray:
        if c not in self._remainder:
            n = self.n_players
            halved = self.paired and 2 * c == n
            # Of two complementary halves the one with player 0 stands for both.
            members = np.array([(0, *rest) for rest in combinations(range(1, n), c - 1)] if halved else
                               list(combinations(range(n), c)))  # fmt: skip
            subsets = np.zeros((len(members), n), dtype=bool)
            np.put_along_axis(subsets, members, True, axis=1)
            subsets = subsets[~_contains(self._seen, self._keys(subsets))]
            flip = self._generator.random(len(subsets)) < 0.5 if halved else np.zeros(len(subsets), dtype=bool)
            subsets[flip] = ~subsets[flip]
            self._remainder[c] = subsets[self._generator.permutation(len(subsets))]
        return self._remainder[c]

    def _random_subsets(self, sizes: np.ndarray) -> np.ndarray:
        score = self._generator.random((len(sizes), self.n_players))
        cut = np.take_along_axis(np.sort(score, axis=1), sizes[:, None] - 1, axis=1)
        return score <= cut

    def _keys(self, subsets: np.ndarray) -> np.ndarray:
        keys = np.where(subsets, self._code, np.uint64(0)).sum(axis=1, dtype=np.uint64)
        if not self.paired:
            return keys
        return np.minimum(keys, self._code.sum(dtype=np.uint64) - keys)


def _rank_within(labels: np.ndarray) -> np.ndarray:
    """How many equal labels stand before each position."""
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels)
    starts = np.cumsum(counts) - counts
    rank = np.empty(len(labels), dtype=np.int64)
    rank[order] = np.arange(len(labels)) - starts[labels[order]]
    return rank


def _contains(sorted_keys: np.ndarray, keys: np.ndarray) -> np.ndarray:
    if len(sorted_keys) == 0:
        return np.zeros(len(keys), dtype=bool)
    at = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return sorted_keys[at] == keys
