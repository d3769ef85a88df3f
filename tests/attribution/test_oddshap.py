"""What OddSHAP promises of its values: axioms, exactness, recovery, reuse, and honest answers at the edges."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import RandomForestRegressor
from sklearn.linear_model import Ridge

from cameraready.attribution._game import CountedGame, UnanimityGame, all_coalitions, exact_shapley
from cameraready.attribution.oddshap import OddShap
from cameraready.attribution.oddshap.estimator import LowBudgetWarning
from cameraready.attribution.oddshap.regression import parities

SEEDS = st.integers(0, 2**31)


def dense_game(n: int, seed: int):
    values = np.random.default_rng(seed).normal(size=2**n)
    return lambda coalitions: values[np.asarray(coalitions) @ (1 << np.arange(n))]


def odd_game(members: np.ndarray, coefficients: np.ndarray, constant: float = 0.0):
    """sum of beta_T (-1)^|S n T|, whose values are phi_i = -2 sum of beta_T / |T| over T that contain i."""
    values = -2 * members.T @ (coefficients / members.sum(axis=1))
    return lambda coalitions: constant + coefficients @ parities(members, np.asarray(coalitions, dtype=bool)), values


# --- the identity behind the method ---------------------------------------------------------------------------------


@given(st.integers(1, 10), SEEDS)
@settings(max_examples=25, deadline=None)
def test_values_depend_on_the_odd_part_alone(n: int, seed: int) -> None:
    game = dense_game(n, seed)
    odd = lambda s: (game(s) - game(~s)) / 2  # noqa: E731
    assert exact_shapley(odd, n) == pytest.approx(exact_shapley(game, n), abs=1e-12)


# --- exactness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 13))
@pytest.mark.parametrize("options", [{}, {"paired": False}, {"terms": "all"}, {"low_budget": "raise"}])
def test_a_full_budget_is_exact(n: int, options: dict) -> None:
    game = CountedGame(dense_game(n, n), n)
    estimate = OddShap(n, seed=0, **options).approximate(2**n + 100, game)
    assert estimate.values == pytest.approx(exact_shapley(dense_game(n, n), n), abs=1e-9)
    assert (estimate.standard_errors == 0).all()
    assert estimate.method == "exact"
    assert not estimate.low_budget
    assert game.requests == game.evaluations == estimate.n_evaluations == 2**n


def test_error_vanishes_as_the_budget_approaches_all_coalitions() -> None:
    game = dense_game(10, 3)
    exact = exact_shapley(game, 10)
    budgets = [512, 900, 1000, 1022]
    errors = [
        np.mean([(e.values - exact) ** 2 for e in estimates])
        for estimates in zip(*(OddShap(10, seed=s).approximate(budgets, game) for s in range(5)), strict=True)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 100


@pytest.mark.parametrize("n", [20, 64, 90])
@pytest.mark.parametrize("constant", [0.0, 100.0])
def test_sparse_odd_games_are_recovered_exactly(n: int, constant: float) -> None:
    generator = np.random.default_rng(n)
    members = np.zeros((12, n), dtype=bool)
    for row in members:
        row[generator.choice(n, size=3, replace=False)] = True
    members = np.concatenate([np.eye(n, dtype=bool), members])
    coefficients = np.concatenate([generator.normal(size=n) / 2, generator.choice([-1.0, 1.0], size=12) * 3])
    game, values = odd_game(members, coefficients, constant)
    estimate = OddShap(n, seed=1).approximate(100 * n, game)
    assert estimate.values == pytest.approx(values, abs=1e-8)
    assert estimate.standard_errors == pytest.approx(np.zeros(n), abs=1e-8)
    probe = generator.random((50, n)) < 0.5
    assert estimate.predict(probe) == pytest.approx(game(probe), abs=1e-7)


def test_even_interactions_do_not_disturb_a_paired_estimate() -> None:
    """A game of main effects and strong pairs has even terms only beside its singletons: paired is exact, unpaired is not."""
    n, generator = 16, np.random.default_rng(0)
    main, pairs = generator.normal(size=n), np.triu(generator.normal(size=(n, n)), 1)
    game = lambda s: s @ main + 5 * np.einsum("mi,ij,mj->m", s, pairs, s)  # noqa: E731
    values = main + 2.5 * (pairs + pairs.T).sum(axis=1)
    paired, single = (OddShap(n, seed=0, paired=p).approximate(400, game) for p in (True, False))
    assert paired.values == pytest.approx(values, abs=1e-9)
    assert np.abs(single.values - values).max() > 0.1


# --- axioms ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [2, 3, 5, 64, 199, 200, 401, 900])
@pytest.mark.parametrize("low_budget", ["tree", "kernel"])
@pytest.mark.parametrize("options", [{}, {"paired": False}, {"terms": "all"}])
@pytest.mark.filterwarnings("ignore::cameraready.attribution.oddshap.estimator.LowBudgetWarning")
def test_values_add_up_at_every_budget(budget: int, low_budget: str, options: dict) -> None:
    game = dense_game(10, 0)
    ends = game(np.array([[False] * 10, [True] * 10]))
    estimate = OddShap(10, eta=20, low_budget=low_budget, seed=0, **options).approximate(budget, game)
    assert estimate.values.sum() == pytest.approx(ends[1] - ends[0], abs=1e-9)
    assert estimate.baseline == ends[0]
    assert estimate.low_budget == (budget < 200)


def test_a_player_that_helps_has_a_positive_value_and_a_negative_coefficient() -> None:
    estimate = OddShap(12, seed=0).approximate(300, lambda s: 2.0 * s[:, 4] - 1.0 * s[:, 7])
    assert estimate.values == pytest.approx(2.0 * np.eye(12)[4] - np.eye(12)[7], abs=1e-9)
    singleton = estimate.terms.index((4,))
    assert estimate.coefficients[singleton] == pytest.approx(-1.0, abs=1e-9)


def test_null_players_and_symmetric_players() -> None:
    # v depends on players 0..5 only, and alike on 0 and 1; the rest of twenty are null.
    game = lambda s: 3.0 * (s[:, :2].any(axis=1) & s[:, 2]) + s[:, 3] * s[:, 4] * s[:, 5] * 2.0 + s[:, 3]  # noqa: E731
    estimate = OddShap(20, seed=0).approximate(2000, game)
    error = np.maximum(4 * estimate.standard_errors, 1e-9)
    assert (np.abs(estimate.values[6:]) < error[6:]).all()
    assert abs(estimate.values[0] - estimate.values[1]) < error[0] + error[1]
    assert estimate.values[:6] == pytest.approx([0.5, 0.5, 2.0, 5 / 3, 2 / 3, 2 / 3], abs=error.max())


def test_values_are_linear_in_the_game_for_a_fixed_support() -> None:
    a, b = dense_game(10, 1), dense_game(10, 2)
    solve = lambda game: OddShap(10, seed=3, max_terms=0).approximate(200, game).values  # noqa: E731
    mixed = solve(lambda s: 2.0 * a(s) - 0.5 * b(s) + 7.0)
    assert mixed == pytest.approx(2.0 * solve(a) - 0.5 * solve(b), abs=1e-9)


@pytest.mark.parametrize("budget", [60, 400])
@pytest.mark.filterwarnings("ignore::cameraready.attribution.oddshap.estimator.LowBudgetWarning")
def test_scale_and_shift_of_the_game_carry_over(budget: int) -> None:
    game = UnanimityGame.random(12, n_terms=30, max_size=4, seed=0)
    plain = OddShap(12, seed=0).approximate(budget, game)
    for factor, shift in ((1e-9, 0.0), (-1e6, 3.0), (1.0, 50.0)):
        other = OddShap(12, seed=0).approximate(budget, lambda s, f=factor, c=shift: f * game(s) + c)
        assert other.values == pytest.approx(factor * plain.values, abs=1e-7 * abs(factor))


# --- accuracy and its measure ---------------------------------------------------------------------------------------


def test_interactions_lower_the_error_where_there_are_any() -> None:
    ratios = []
    for seed in range(8):
        game = UnanimityGame.random(24, n_terms=60, max_size=5, seed=seed)
        errors = [
            np.mean((OddShap(24, seed=seed, max_terms=k).approximate(4000, game).values - game.shapley_values()) ** 2)
            for k in (None, 0)
        ]
        ratios.append(errors[0] / errors[1])
    assert max(ratios) < 1 / 3


@pytest.mark.parametrize(("n_terms", "max_size"), [(40, 3), (300, 7)])
def test_standard_errors_are_calibrated_with_chosen_terms(n_terms: int, max_size: int) -> None:
    hits = []
    for seed in range(12):
        game = UnanimityGame.random(20, n_terms=n_terms, max_size=max_size, seed=seed)
        estimate = OddShap(20, seed=seed).approximate(2000, game)
        error = np.abs(estimate.values - game.shapley_values())
        hits.append(error <= 2 * estimate.standard_errors + 1e-9)
    assert np.mean(hits) > 0.85
    if n_terms == 300:  # the sparse game can be recovered exactly
        assert np.mean(hits) < 0.99


# --- budgets --------------------------------------------------------------------------------------------------------


def test_several_budgets_share_evaluations_and_equal_single_runs() -> None:
    game = CountedGame(dense_game(12, 0), 12)
    budgets = [1000, 240, 377, 4096]
    together = OddShap(12, seed=5).approximate(budgets, game)
    assert game.requests == 4096
    for budget, estimate in zip(budgets, together, strict=True):
        alone = OddShap(12, seed=5).approximate(budget, dense_game(12, 0))
        assert estimate.budget == budget
        assert (estimate.values == alone.values).all()
        assert (estimate.standard_errors == alone.standard_errors).all()


def test_a_budget_can_be_raised_without_losing_evaluations() -> None:
    game = CountedGame(dense_game(12, 0), 12)
    approximation = OddShap(12, seed=5).begin(game)
    first = approximation.estimate(300)
    later = approximation.estimate(700)
    assert game.requests == approximation.n_evaluations == 700
    assert (approximation.estimate(300).values == first.values).all()
    assert (later.values == OddShap(12, seed=5).approximate(700, dense_game(12, 0)).values).all()


@given(st.integers(2, 6), st.integers(2, 70), SEEDS)
@settings(max_examples=60, deadline=None)
def test_any_budget_gives_finite_values_and_is_not_exceeded(n: int, budget: int, seed: int) -> None:
    game = CountedGame(dense_game(n, seed), n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LowBudgetWarning)
        estimate = OddShap(n, eta=2, seed=seed).approximate(budget, game)
    assert np.isfinite(estimate.values).all()
    assert game.requests == game.evaluations == estimate.n_evaluations == min(budget, 2**n)


def test_an_odd_budget_is_no_worse_than_the_even_one_below() -> None:
    """The coalition without complement has an even part that must not leak into the regression."""
    n = 9
    even_part = np.random.default_rng(0).normal(size=(n, n)) * 100
    game = lambda s: dense_game(n, 0)(s) + np.einsum("mi,ij,mj->m", 2.0 * s - 1, even_part, 2.0 * s - 1)  # noqa: E731
    exact = exact_shapley(game, n)
    odd, even = OddShap(n, seed=0, max_terms=0).approximate([201, 200], game)
    assert odd.values == pytest.approx(even.values, abs=1e-9)
    assert odd.n_evaluations == 201
    assert np.abs(odd.values - exact).max() < 1.0


def test_fallbacks_are_announced_and_are_what_they_say() -> None:
    game = UnanimityGame.random(20, n_terms=30, max_size=3, seed=0)
    with pytest.warns(LowBudgetWarning, match="below eta \\* n_players = 200.*tree surrogate") as caught:
        tree = OddShap(20, seed=0).approximate(150, game)
    assert caught[0].filename == __file__
    assert (tree.method, tree.low_budget) == ("tree", True)
    assert np.isnan(tree.standard_errors).all()
    with pytest.warns(LowBudgetWarning, match="without interactions"):
        kernel = OddShap(20, low_budget="kernel", seed=0).approximate(150, game)
    assert (kernel.method, kernel.low_budget) == ("kernel", True)
    assert (kernel.values == OddShap(20, eta=7, max_terms=0, seed=0).approximate(150, game).values).all()
    counted = CountedGame(game, 20)
    with pytest.raises(ValueError, match="raise the budget"):
        OddShap(20, low_budget="raise").approximate([500, 150], counted)
    assert counted.requests == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not OddShap(20, seed=0).approximate(200, game).low_budget


def test_the_tree_fallback_beats_knowing_nothing() -> None:
    game = UnanimityGame.random(30, n_terms=40, max_size=2, seed=0)
    exact = game.shapley_values()
    with pytest.warns(LowBudgetWarning):
        found = OddShap(30, seed=0).approximate(290, game).values
    assert np.sum((found - exact) ** 2) < 0.5 * np.sum((exact - exact.mean()) ** 2)


# --- edges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 25])
@pytest.mark.parametrize("level", [0.0, -3.5, 1e12])
def test_constant_games_have_zero_values(n: int, level: float) -> None:
    estimate = OddShap(n, seed=0).approximate(1000, lambda s: np.full(len(s), level))
    assert estimate.values == pytest.approx(np.zeros(n), abs=1e-9 * max(1.0, abs(level)))
    assert estimate.baseline == level


def test_one_and_two_players() -> None:
    assert OddShap(1).approximate(2, lambda s: 4.0 * s[:, 0] + 1).values == pytest.approx([4.0])
    game = dense_game(2, 0)
    assert OddShap(2).approximate(4, game).values == pytest.approx(exact_shapley(game, 2))
    for budget in (2, 3):  # nothing tells the players apart
        with pytest.warns(LowBudgetWarning):
            values = OddShap(2, seed=0).approximate(budget, game).values
        assert values[0] == pytest.approx(values[1])


@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.float32, bool])
def test_outputs_of_other_types_are_their_numbers(dtype: type) -> None:
    base = lambda s: (s[:, 0] & s[:, 1] & s[:, 2]) | s[:, 5]  # noqa: E731
    plain = OddShap(15, seed=0).approximate(600, lambda s: base(s).astype(float))
    typed = OddShap(15, seed=0).approximate(600, lambda s: base(s).astype(dtype))
    assert (typed.values == plain.values).all()
    assert typed.values.dtype == np.float64


def test_bad_games_are_refused_in_words() -> None:
    estimator = OddShap(5, seed=0)
    with pytest.raises(ValueError, match="nan for 1 of"):
        estimator.approximate(30, lambda s: np.where(np.arange(len(s)) == 7, np.nan, 1.0))
    with pytest.raises(ValueError, match="one number per coalition"):
        estimator.approximate(30, lambda s: np.zeros(3))
    with pytest.raises(TypeError, match="must return numbers"):
        estimator.approximate(30, lambda s: np.full(len(s), "text"))


@pytest.mark.parametrize("budget", [1, 0, -5, 2.5, "auto", True, None])
def test_bad_budgets_are_refused(budget: object) -> None:
    with pytest.raises((ValueError, TypeError), match=r"budget|iterable"):
        OddShap(5).approximate(budget, lambda s: s.sum(axis=1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_players": 0}, "n_players must be an integer of at least 1"),
        ({"n_players": 5.0}, "n_players"),
        ({"eta": 0}, "eta"),
        ({"max_terms": -1}, "max_terms"),
        ({"low_budget": "guess"}, "low_budget must be one of"),
        ({"terms": "even"}, "terms must be one of"),
        ({"surrogate": "xgboost"}, "surrogate must be"),
    ],
)
def test_bad_settings_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OddShap(**{"n_players": 5, **options})


def test_many_players_are_no_numerical_problem() -> None:
    weights = np.random.default_rng(0).normal(size=300)
    estimate = OddShap(300, seed=0).approximate(3000, lambda s: s @ weights)
    assert estimate.values == pytest.approx(weights, abs=1e-9)


def test_seeds_repeat_and_differ() -> None:
    game = dense_game(12, 0)
    values = [OddShap(12, seed=s).approximate(300, game).values for s in (1, 1, 2)]
    assert (values[0] == values[1]).all()
    assert (values[0] != values[2]).any()
    unseeded = [OddShap(12).approximate(300, game).values for _ in range(2)]
    assert (unseeded[0] != unseeded[1]).any()


@pytest.mark.parametrize("surrogate", ["lightgbm", RandomForestRegressor(10, max_depth=5)])
def test_other_surrogates_find_the_interactions_too(surrogate: object) -> None:
    game = UnanimityGame.random(15, n_terms=12, max_size=3, seed=0)
    with_terms = OddShap(15, surrogate=surrogate, seed=0).approximate(1500, game)
    without = OddShap(15, max_terms=0, seed=0).approximate(1500, game)
    error, plain = (np.sum((e.values - game.shapley_values()) ** 2) for e in (with_terms, without))
    assert error < plain / 3
    again = OddShap(15, surrogate=surrogate, seed=0).approximate(1500, game)
    assert (again.values == with_terms.values).all()


def test_a_surrogate_without_trees_is_refused() -> None:
    with pytest.raises(TypeError, match="Ridge has no trees"):
        OddShap(8, surrogate=Ridge()).approximate(200, dense_game(8, 0))
    with pytest.raises(TypeError, match="must have a fit method"):
        OddShap(8, surrogate=7)


def test_terms_are_odd_and_as_many_as_the_budget_affords() -> None:
    game = UnanimityGame.random(20, n_terms=200, max_size=6, seed=0)
    for eta, budget in ((10, 1000), (10, 3005), (50, 3000), (5, 1000)):
        terms = OddShap(20, eta=eta, seed=0).approximate(budget, game).terms
        assert terms[0] == ()
        assert len(terms) - 1 == -(-budget // eta)
        assert {(player,) for player in range(20)} <= set(terms)
        assert len(set(terms)) == len(terms)
        assert all(len(term) % 2 for term in terms[1:])
    assert len(OddShap(20, max_terms=7, seed=0).approximate(3000, game).terms) == 1 + 20 + 7
    every = OddShap(20, terms="all", seed=0).approximate(3000, game).terms
    assert len(every) == 300
    assert any(len(term) == 2 for term in every)


@pytest.mark.parametrize("budget", [40, 500, 1023, 1024])
@pytest.mark.filterwarnings("ignore::cameraready.attribution.oddshap.estimator.LowBudgetWarning")
def test_the_fitted_function_has_the_values_that_are_reported(budget: int) -> None:
    estimate = OddShap(10, seed=0).approximate(budget, dense_game(10, 0))
    assert exact_shapley(estimate.predict, 10) == pytest.approx(estimate.values, abs=1e-9)
    ends = np.array([[False] * 10, [True] * 10])
    assert estimate.predict(ends) == pytest.approx(dense_game(10, 0)(ends), abs=1e-9)


def test_the_result_and_the_settings_cannot_be_changed() -> None:
    estimator = OddShap(6, seed=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        estimator.eta = 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        estimator.approximate(64, lambda s: s.sum(axis=1)).budget = 5
    assert all_coalitions(3).sum() == 12


# --- units ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low_budget", ["tree", "kernel"])
@pytest.mark.parametrize("terms", ["odd", "all"])
@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1e100, 1e200])
def test_the_unit_of_a_game_does_not_matter(scale: float, terms: str, low_budget: str) -> None:
    game = dense_game(10, 3)
    method = OddShap(10, seed=0, terms=terms, low_budget=low_budget)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LowBudgetWarning)
        plain = method.approximate([40, 400, 1024], game)
        scaled = method.approximate([40, 400, 1024], lambda s: game(s) * scale)
    for one, other in zip(plain, scaled, strict=True):
        assert other.baseline == one.baseline * scale
        for name in ("values", "standard_errors", "coefficients"):
            wanted = getattr(one, name)
            largest = np.abs(wanted).max()
            assert getattr(other, name) / scale == pytest.approx(wanted, rel=1e-9, abs=1e-12 * largest, nan_ok=True)
    assert (scaled[1].standard_errors > 0).all()
