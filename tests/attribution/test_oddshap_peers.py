"""OddSHAP against shapiq's, which runs in an environment of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cameraready.attribution.oddshap as package
from cameraready.attribution._game import UnanimityGame, exact_shapley
from cameraready.attribution.oddshap import OddShap


@pytest.fixture(scope="module")
def shapiq() -> Iterator[Any]:
    from cameraready.attribution.oddshap.study import STUDY
    from cameraready.evidence.peers.environments import open_peer

    with open_peer(STUDY.peers[0], Path(package.__file__).parent) as remote:
        yield remote


@pytest.mark.peers
@pytest.mark.parametrize("n", [3, 8, 10])
def test_both_are_exact_at_full_budget(shapiq: Any, n: int) -> None:
    values = np.random.default_rng(n).normal(size=2**n)
    game = lambda coalitions: values[coalitions @ (1 << np.arange(n))]  # noqa: E731
    theirs = shapiq.approximate(game, "OddSHAP", n, 2**n, 0)["values"]
    assert OddShap(n).approximate(2**n, game).values == pytest.approx(theirs, abs=1e-8)
    assert theirs == pytest.approx(exact_shapley(game, n), abs=1e-8)


@pytest.mark.peers
def test_both_estimate_the_same_and_ours_is_no_worse(shapiq: Any) -> None:
    ours_squared, theirs_squared, z = [], [], []
    for seed in range(10):
        game = UnanimityGame.random(20, n_terms=60, max_size=5, seed=seed)
        ours = OddShap(20, seed=seed).approximate(2000, game)
        theirs = shapiq.approximate(game, "OddSHAP", 20, 2000, seed)["values"]
        truth = game.shapley_values()
        ours_squared.append(np.mean((ours.values - truth) ** 2))
        theirs_squared.append(np.mean((theirs - truth) ** 2))
        # Independent samples of equal size: their difference has about twice the variance of either.
        z.append((ours.values - theirs) / (np.sqrt(2) * ours.standard_errors))
    assert np.mean(np.abs(z) < 2.5) > 0.9
    log_ratio = np.log(ours_squared) - np.log(theirs_squared)
    assert log_ratio.mean() < 2 * log_ratio.std(ddof=1) / np.sqrt(len(log_ratio))


@pytest.mark.skipif(importlib.util.find_spec("shapiq") is None, reason="shapiq is not installed here")
def test_results_become_shapiqs_interaction_values() -> None:
    estimate = OddShap(6, seed=0).approximate(64, lambda s: s @ np.arange(6.0) + 2.0)
    values = estimate.to_shapiq()
    assert [values[(player,)] for player in range(6)] == pytest.approx(list(range(6)))
    assert values.baseline_value == 2.0
    assert values[()] == 2.0
    assert values.index == "SV"


@pytest.mark.skipif(importlib.util.find_spec("shapiq") is not None, reason="shapiq is installed here")
def test_without_shapiq_the_conversion_says_what_to_install() -> None:
    with pytest.raises(ImportError, match="pip install shapiq"):
        OddShap(3).approximate(8, lambda s: s.sum(axis=1)).to_shapiq()
