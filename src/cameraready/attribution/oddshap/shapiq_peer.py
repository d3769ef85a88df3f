"""The side of the study that runs in shapiq's own environment: its approximators on a game that lives in the caller."""

import time
import warnings

import numpy as np
from shapiq import approximator as approximators

#: How each approximator is asked for plain Shapley values; everything else stays at shapiq's defaults.
OPTIONS = {
    "LeverageSHAP": {},
    "RegressionMSR": {"index": "SV"},
    "ProxySHAP": {"index": "SV", "max_order": 1},
    "SVARM": {},
    "OddSHAP": {},
}


def approximate(game, name, n_players, budget, seed):
    """Shapley values of `game`, shape (n_players,), with the seconds in all and those spent waiting for the game."""
    waited = game.seconds
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sampling hints that concern its own tuning, not the result
        estimator = getattr(approximators, name)(n=n_players, random_state=seed, **OPTIONS[name])
        found = estimator.approximate(budget, lambda coalitions: game(np.asarray(coalitions, dtype=bool)))
    seconds = time.perf_counter() - started
    values = np.array([found[(player,)] for player in range(n_players)], dtype=float)
    return {"values": values, "seconds": seconds, "game_seconds": game.seconds - waited}
