"""The constrained regression against a reference solver, and what its standard errors promise."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg

from cameraready.attribution._game import UnanimityGame, all_coalitions, exact_shapley
from cameraready.attribution.oddshap import regression
from cameraready.attribution.oddshap.regression import Fit, parities, regress
from cameraready.attribution.oddshap.sampling import CoalitionSequence, Units


def sets(n: int, sizes: tuple[int, ...]) -> np.ndarray:
    every = all_coalitions(n)
    order = np.argsort(every.sum(axis=1), kind="stable")
    return np.array([row for row in every[order] if row.sum() in sizes])


def fitted(game, n: int, m: int, terms: np.ndarray, *, paired: bool = True, seed: int = 0) -> Fit:
    sequence = CoalitionSequence(n, paired=paired, generator=np.random.default_rng(seed))
    return regress(terms, sequence.units(m), np.asarray(game(sequence.coalitions(0, m)), dtype=float))


def reference(game, n: int, m: int, terms: np.ndarray, *, paired: bool = True, seed: int = 0) -> np.ndarray:
    """Constrained least squares over single coalitions, by an orthonormal basis of the constraints' null space."""
    sequence = CoalitionSequence(n, paired=paired, generator=np.random.default_rng(seed))
    units, coalitions = sequence.units(m), sequence.coalitions(0, m)
    rows = np.concatenate([units.coalitions, ~units.coalitions]) if paired else units.coalitions
    weights = np.concatenate([units.weights, units.weights]) if paired else units.weights
    odd = bool((terms.sum(axis=1) % 2 == 1).all())
    ends = game(coalitions[:2])
    constant = ends.mean() if odd else 0.0
    design = (-1.0) ** (rows.astype(int) @ terms.T.astype(int))
    constraint = (-1.0) ** (coalitions[:2].astype(int) @ terms.T.astype(int))
    start, *_ = np.linalg.lstsq(constraint, ends - constant, rcond=1e-12)
    basis = scipy.linalg.null_space(constraint)
    root = np.sqrt(weights)
    step, *_ = np.linalg.lstsq(
        (design @ basis) * root[:, None], (game(rows) - constant - design @ start) * root, rcond=1e-12
    )
    return start + basis @ step


def dense_game(n: int, seed: int = 0):
    values = np.random.default_rng(seed).normal(size=2**n) + all_coalitions(n) @ np.arange(n)
    return lambda coalitions: values[np.asarray(coalitions) @ (1 << np.arange(n))]


def test_parities_are_signs_of_intersections() -> None:
    terms, coalitions = all_coalitions(5), all_coalitions(5)
    expected = (-1) ** (terms.astype(int) @ coalitions.T.astype(int))
    assert (parities(terms, coalitions) == expected).all()


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("sizes", [(1,), (1, 3), (0, 1, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("m", [300, 301])
def test_the_solution_is_the_reference_solvers(paired: bool, sizes: tuple[int, ...], m: int) -> None:
    game, terms = dense_game(9), sets(9, sizes)
    fit = fitted(game, 9, m, terms, paired=paired)
    assert not fit.min_norm
    assert fit.coefficients == pytest.approx(reference(game, 9, m, terms, paired=paired), abs=1e-9)


def test_blocks_and_precision_do_not_change_the_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    game, terms = dense_game(10), sets(10, (1, 3))
    plain = fitted(game, 10, 700, terms)
    monkeypatch.setattr(regression, "_BLOCK", 37)
    monkeypatch.setattr(regression, "_KEPT", 0)
    blocked = fitted(game, 10, 700, terms)
    monkeypatch.setattr(regression, "_TRUSTED", {np.float32: np.inf, np.float64: 1e-13})
    double = fitted(game, 10, 700, terms)
    for other in (blocked, double):
        assert other.coefficients == pytest.approx(plain.coefficients, abs=1e-10)
        assert other.standard_errors == pytest.approx(plain.standard_errors, rel=1e-4)


@pytest.mark.parametrize("m", [8, 40, 160])
def test_too_few_rows_give_the_minimum_norm_solution(m: int) -> None:
    game, terms = dense_game(9), sets(9, (1, 3))  # 93 terms
    fit = fitted(game, 9, m, terms)
    assert fit.min_norm
    assert np.isnan(fit.standard_errors).all()
    # The reference's basis is orthonormal, so its least-squares step has minimum norm too.
    assert fit.coefficients == pytest.approx(reference(game, 9, m, terms), abs=1e-9)


def test_dependent_terms_give_the_minimum_norm_solution() -> None:
    game, terms = dense_game(8), sets(8, (1, 3))
    doubled = np.concatenate([terms, terms[-5:]])
    single, double = fitted(game, 8, 250, terms), fitted(game, 8, 250, doubled)
    assert double.min_norm
    assert double.values == pytest.approx(single.values, abs=1e-8)
    assert double.coefficients[-5:] == pytest.approx(double.coefficients[len(terms) - 5 : len(terms)], abs=1e-8)


@pytest.mark.parametrize("m", [2, 3, 50, 255, 400])
@pytest.mark.parametrize("sizes", [(1,), (1, 3), (0, 1, 2)])
def test_constraints_and_efficiency_hold_at_every_budget(m: int, sizes: tuple[int, ...]) -> None:
    game, terms = dense_game(9), sets(9, sizes)
    fit = fitted(game, 9, m, terms)
    ends = np.array([np.zeros(9, dtype=bool), np.ones(9, dtype=bool)])
    empty, full = game(ends)
    constant = 0.0 if sizes[0] == 0 else (empty + full) / 2
    assert fit.coefficients @ parities(terms, ends) + constant == pytest.approx([empty, full], abs=1e-9)
    assert fit.values.sum() == pytest.approx(full - empty, abs=1e-9)


def test_paired_regression_does_not_see_even_terms_but_unpaired_does() -> None:
    for n in (7, 9):
        game = dense_game(n, seed=n)
        odd, every = sets(n, (1, 3)), sets(n, (0, 1, 2, 3))
        m = 2**n * 3 // 4
        keep = every.sum(axis=1) % 2 == 1
        a, b = fitted(game, n, m, odd), fitted(game, n, m, every)
        assert a.values == pytest.approx(b.values, abs=1e-9)
        assert np.sort(a.coefficients) == pytest.approx(np.sort(b.coefficients[keep]), abs=1e-9)
        a, b = fitted(game, n, m, odd, paired=False), fitted(game, n, m, every, paired=False)
        assert np.abs(a.values - b.values).max() > 1e-3


def test_any_support_with_all_singletons_is_exact_when_all_coalitions_are_rows() -> None:
    n = 8
    game, exact = dense_game(n), exact_shapley(dense_game(n), n)
    for sizes in ((1,), (1, 3), (0, 1, 2)):
        fit = fitted(game, n, 2**n, sets(n, sizes))
        assert fit.values == pytest.approx(exact, abs=1e-9)
        assert fit.standard_errors == pytest.approx(np.zeros(n), abs=1e-12)  # every size is enumerated


def test_equal_weights_times_multiplicity_are_merged_rows() -> None:
    """A unit listed twice with half its weight is the unit once."""
    n, m, game = 8, 120, dense_game(8)
    sequence = CoalitionSequence(n, paired=True, generator=np.random.default_rng(0))
    units, values = sequence.units(m), game(sequence.coalitions(0, m))
    again = np.concatenate([np.arange(59), np.arange(20)])
    halves = np.where(np.arange(59) < 20, 0.5, 1.0)
    listed_twice = Units(
        units.coalitions[again],
        units.first[again],
        True,
        (units.weights * halves)[again],
        units.strata[again],
        units.sampled_fraction[again],
    )
    once, twice = regress(sets(n, (1,)), units, values), regress(sets(n, (1,)), listed_twice, values)
    assert once.coefficients == pytest.approx(twice.coefficients, abs=1e-10)


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize(("max_size", "terms_per_player"), [(3, 2), (6, 12)])
def test_standard_errors_cover_the_truth(paired: bool, max_size: int, terms_per_player: int) -> None:
    """|z| < 2 for about 95 % of values, on sparse and on dense games, with and without enumerated sizes."""
    hits = []
    for n, m in ((9, 150), (14, 600)):
        for seed in range(25):
            game = UnanimityGame.random(n, n_terms=terms_per_player * n, max_size=max_size, seed=seed)
            fit = fitted(game, n, m, sets(n, (1,)), paired=paired, seed=seed)
            hits.append(np.abs(fit.values - game.shapley_values()) < 2 * fit.standard_errors)
    assert 0.90 < np.concatenate(hits).mean() < 0.99
