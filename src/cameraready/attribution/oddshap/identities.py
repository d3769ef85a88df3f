"""The exact statements behind OddSHAP, measured on games small enough to enumerate."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np

from cameraready.attribution._game import exact_shapley
from cameraready.attribution.oddshap.estimator import OddShap
from cameraready.attribution.oddshap.regression import regress
from cameraready.attribution.oddshap.sampling import CoalitionSequence
from cameraready.attribution.oddshap.workloads import Workload


def gaps(workload: Workload, instance: int) -> dict[str, float | None]:
    """Largest deviations, relative to the scale of the values, for one small game.

    odd_gap: Shapley values of the game against those of its odd part. paired_gap, unpaired_gap: kernel-weighted least
    squares on the terms of odd size up to 3 against all terms up to size 3, from the same sample. full_budget_gap: OddSHAP
    with a budget of 2^d against enumeration.
    """
    game = workload.game(instance)
    n_players = 2 + instance // 2
    exact = exact_shapley(game, n_players)
    scale = max(float(np.abs(exact).max()), 1e-12)

    def odd_part(coalitions: np.ndarray) -> np.ndarray:
        return (np.asarray(game(coalitions)) - np.asarray(game(~coalitions))) / 2

    full = OddShap(n_players, seed=instance).approximate(2**n_players, game)
    found: dict[str, float | None] = {
        "n_players": n_players,
        "odd_gap": float(np.abs(exact_shapley(odd_part, n_players) - exact).max()) / scale,
        "full_budget_gap": float(np.abs(full.values - exact).max()) / scale,
        "paired_gap": None,
        "unpaired_gap": None,
    }
    if n_players >= 7:  # enough coalitions for a sample that determines all terms up to size 3
        for paired, name in ((True, "paired_gap"), (False, "unpaired_gap")):
            odd, every = (fitted_values(game, n_players, sizes, paired, instance) for sizes in ((1, 3), (1, 2, 3)))
            found[name] = float(np.abs(odd - every).max()) / scale
    return found


def fitted_values(
    game: Callable[[np.ndarray], np.ndarray], n_players: int, sizes: tuple[int, ...], paired: bool, seed: int
) -> np.ndarray:
    """Shapley values of the least-squares fit on all terms of the given sizes, from a sample that `seed` and `paired` fix."""
    every = [members for size in range(4) for members in combinations(range(n_players), size)]
    terms = np.zeros((len(every), n_players), dtype=bool)
    for row, members in zip(terms, every, strict=True):
        row[list(members)] = True
    budget = 2 * (min(3 * 2**n_players // 4, 3 * len(every)) // 2)
    sequence = CoalitionSequence(n_players, paired=paired, generator=np.random.default_rng(seed))
    game_values = np.asarray(game(sequence.coalitions(0, budget)), dtype=float)
    wanted = (0, *sizes) if 2 in sizes else sizes  # the odd fit holds its constant by the constraint
    return regress(terms[np.isin(terms.sum(axis=1), wanted)], sequence.units(budget), game_values).values
