"""The study's data are what they say, its scores and its dense algebra are right, and its arms see no test value."""

import numpy as np
import pandas as pd
import pytest

from cameraready.evidence import Context
from cameraready.evidence.specs import SpecError, parse
from cameraready.stats.gp2scale import (
    Amplitude,
    SparseGPRegressor,
    Wendland,
    measurements,
    rivals,
    study,
    trials,
    workloads,
)


def table(n=200):
    generator = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "size": generator.normal(50, 10, n),
            "city": generator.choice(["Bern", "Graz", None], n),
            "day": pd.to_datetime("2020-01-01") + pd.to_timedelta(generator.integers(0, 900, n), unit="D"),
            "new": generator.random(n) < 0.5,
            "constant": 1.0,
        }
    )
    frame.loc[::9, "size"] = np.nan
    price = 3.0 * frame["size"].fillna(50) + 40.0 * (frame["city"] == "Bern") + generator.normal(0, 1, n)
    return frame, price.rename("price")


def split_of(n=300, seed=0):
    return workloads.wiggle().draw(seed, n, None)


def test_scores_are_those_of_gaussian_predictions():
    """CRPS against its definition, the integral of the squared difference of distribution functions; NLPD against scipy."""
    from scipy.stats import norm

    split = split_of(60)
    mean, std = split.y_test + np.linspace(-2, 2, len(split.y_test)), np.full(len(split.y_test), 0.7)
    found = measurements.scores(split, mean, std)
    grid = np.linspace(-12, 12, 20_001)
    steps = [
        np.trapezoid((norm.cdf(grid, m, 0.7) - (grid >= y)) ** 2, grid)
        for m, y in zip(mean[:50], split.y_test[:50], strict=True)
    ]
    part = workloads.Split(split.X_train, split.y_train, split.X_test[:50], split.y_test[:50], split.unit)
    crps = measurements.scores(part, mean[:50], std[:50])["crps"]
    assert crps == pytest.approx(np.mean(steps) * split.unit, rel=1e-3)
    original = norm.logpdf(split.y_test * split.unit, mean * split.unit, std * split.unit)
    assert found["nlpd"] == pytest.approx(-original.mean())
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean((mean - split.y_test) ** 2)) * split.unit)


@pytest.mark.parametrize(
    ("n", "mean", "std"), [(3, 0.0, 1.0), (1_000, 0.0, 0.0), (1_000, 0.0, np.nan), (1_000, np.inf, 1.0)]
)
def test_predictions_that_are_none_fail_the_trial(n, mean, std):
    with pytest.raises(ValueError, match=r"expected mean and std of shape|above zero"):
        measurements.scores(split_of(60), np.full(n, mean), np.full(n, std))


def test_the_census_would_notice_a_wrong_number():
    """Rows are within 1e-8 as they are, and outside when the dense process has slightly more noise."""
    rows = list(measurements.gaps(0, 2, 80))
    assert {row["kernel"] for row in rows} >= {
        "wendland-3",
        "nonstationary",
        "bumps",
        "deltas",
        "two-cores",
        "by-the-book",
    }
    assert max(max(row[name] for name in row if name.endswith("_gap")) for row in rows) < 1e-8
    generator = np.random.default_rng(1)
    X, y = generator.random((80, 2)), generator.normal(size=80)
    kernel = Amplitude(1.0) * Wendland(0.4)
    model = SparseGPRegressor(kernel, noise=0.02, optimizer=None).fit(X, y)
    other = measurements.dense_process(kernel, X, y, X, 0.02 + 1e-5)
    assert abs(model.log_marginal_likelihood() - other["value"]) / abs(other["value"]) > 1e-8


def test_faulty_kernels_have_negative_eigenvalues_and_are_refused():
    rows = list(measurements.indefinite(3))
    assert [row["kernel"] for row in rows] == ["city-block", "equation-6"]
    assert all(row["smallest_eigenvalue"] < -1e-4 and row["returned"] == 0 for row in rows)


def test_a_draw_of_the_model_has_the_models_covariance():
    """Over many draws at the same points, noise included; within what sampling allows."""
    X, _ = workloads.sample_of_the_model(5, 40, radius=0.6, noise=0.1)
    distance = np.sqrt(np.square(X[:, None] - X[None]).sum(axis=2)) / 0.6
    covariance = workloads.wendland_by_the_book(distance, 2) + 0.1 * np.eye(40)
    ours = (Wendland(0.6, smoothness=3)(X)).toarray() + 0.1 * np.eye(40)
    np.testing.assert_allclose(ours, covariance, atol=1e-12)
    z = [np.linalg.solve(np.linalg.cholesky(covariance), workloads.sample_of_the_model(5, 40, 0.6, 0.1)[1])]
    assert np.mean(np.square(z)) == pytest.approx(1.0, abs=4 * np.sqrt(2 / 40))


def test_planted_places_are_out_of_sight_and_of_one_height():
    data = workloads.planted(4, 800)
    held_out = np.array([group[4 % 5, 0] for group in data.groups[: data.n_planted]])
    assert np.abs(data.X_train - held_out).min() > data.radius
    assert np.abs(data.X_test - held_out).min(axis=1).max() < data.radius
    assert len(np.unique(np.concatenate(data.groups))) == 20


def test_splits_do_not_overlap_and_are_standardised_by_training_rows_alone():
    X = np.arange(500.0)[:, None]
    drawn = workloads.sampled("rows", X, X[:, 0] ** 2, n_train=300, n_test=100).draw(7, 300, None)
    assert drawn.X_train.shape == (300, 1)
    assert not set(np.round(drawn.X_train[:, 0], 9)) & set(np.round(drawn.X_test[:, 0], 9))
    np.testing.assert_allclose([drawn.X_train.mean(), drawn.y_train.mean()], 0, atol=1e-12)
    np.testing.assert_allclose([drawn.X_train.std(), drawn.y_train.std()], 1)
    again = workloads.sampled("rows", X, X[:, 0] ** 2, n_train=300, n_test=100).draw(7, 300, None)
    np.testing.assert_array_equal(drawn.X_test, again.X_test)


def test_a_table_with_text_dates_and_gaps_becomes_numbers_and_repeated_rows_count_once():
    features, price = table()
    own = workloads.own_table("mine", features, price)
    repeated = np.random.default_rng(0).integers(200, size=200)
    drawn = own.draw(0, own.n_train, repeated)
    distinct = len(np.unique(repeated))
    assert len(drawn.y_train) + len(drawn.y_test) <= distinct
    assert drawn.X_train.shape[1] == 6  # size, day, new and three levels of city; the constant column is gone
    assert np.isfinite(drawn.X_train).all()
    assert np.isfinite(drawn.X_test).all()
    component = workloads.ready_regressor(own)
    assert np.corrcoef(component.predict(features), price)[0, 1] > 0.95


def test_unfit_tables_are_refused_with_a_sentence():
    features, price = table()
    with pytest.raises(ValueError, match="at least 60"):
        workloads.own_table("tiny", features.head(30), price.head(30))
    with pytest.raises(ValueError, match="is not a number"):
        workloads.own_table("labels", features, features["city"].fillna("none").rename("answer"))
    flat = workloads.own_table("flat", features, pd.Series(np.ones(len(features)), name="flat"))
    with pytest.raises(ValueError, match="the same value"):
        flat.draw(0, 100, None)
    with pytest.raises(SpecError):
        parse("hf:some/model", shipped=["wiggle"], accepts=study.STUDY.accepts)


@pytest.mark.parametrize("name", ["gp2scale", "nonstationary", "mcmc", "matern"])
def test_arms_learn_the_function_without_seeing_test_values(name):
    split = split_of(400)
    blind = workloads.Split(split.X_train, split.y_train, split.X_test, np.full_like(split.y_test, np.nan), split.unit)
    found = rivals.arms(Context(seed=0))[name](blind, 0.5)
    score = measurements.scores(split, found["mean"], found["std"])
    assert score["rmse"] < 0.35  # a constant has 1.0, the slow part of the function alone has 0.21
    assert 0.85 < score["coverage"] <= 1.0


def test_a_users_own_arm_is_called_with_arrays_and_judged_alike():
    def constant(X_train, y_train, X_test):
        return np.full(len(X_test), y_train.mean()), np.full(len(X_test), y_train.std())

    context = Context(seed=0, own={"constant": constant})
    (row,) = trials.trial(workloads.wiggle(), context, part="regression", arm="constant", seconds=1.0, n=300)
    assert row["rmse"] == pytest.approx(1.0, rel=0.1)
    assert row["n_train"] == 300


def test_the_full_tier_is_planned_with_a_million_points_and_more_time():
    desk = {c["arm"]: c["seconds"] for c in trials.plan("desk", "wiggle")}
    full = {c["arm"]: c["seconds"] for c in trials.plan("full", "wiggle")}
    assert all(full[arm] > desk[arm] for arm in desk)
    assert [c["n"] for c in trials.plan("full", "million")] == [1_000_000]
    assert study.STUDY.runs_alone({"part": "million"})
    assert trials.trial(workloads.Workload("million"), Context(seed=1), part="million", n=10) == []
    assert measurements.a_million(0, 3_000)["coverage"] > 0.8


@pytest.mark.peers
def test_fvgps_direct_solver_gives_our_likelihood():
    """Two implementations that share nothing but the formula, at unequal radii."""
    from pathlib import Path

    from cameraready.evidence.peers.environments import open_peer

    X, y = measurements.points_and_values(0, 300)
    kernel = Amplitude(1.3) * Wendland([0.2, 0.3], smoothness=3)
    ours = SparseGPRegressor(kernel, noise=0.05, optimizer=None).fit(X, y).log_marginal_likelihood_value_
    with open_peer(study.STUDY.peer("fvgp"), Path(study.__file__).parent) as fvgp:
        theirs = fvgp.likelihood(X, y, np.array([1.3, 0.2, 0.3]), 0.05, "sparseLU")["value"]
    assert ours == pytest.approx(theirs, rel=1e-10)
