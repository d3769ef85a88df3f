"""The error estimated from one fit: equal to leaving rows out, unbiased where the truth is known, and honest where it cannot work."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.special import ndtr
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer
from sklearn.feature_selection import SelectKBest
from sklearn.linear_model import HuberRegressor, LinearRegression, LogisticRegression, Ridge, RidgeClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, LinearSVC
from sklearn.utils.estimator_checks import check_estimator

from cameraready.stats.erm import AsymptoticErrorEstimator, EllipticalDesign, IndependentDesign
from cameraready.stats.erm.leave_out import Influence
from cameraready.stats.erm.universality import anderson_darling_p


def rows(n, p, seed=0, classes=True):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, p)) + 0.5
    t = X @ rng.normal(size=p) / np.sqrt(p)
    return X, (np.where(2 * t + rng.logistic(size=n) > 0.5, 1, -1) if classes else t + rng.normal(size=n))


def refitted(estimator, X, y):
    """Scores of every fifth row under the model fitted without it."""
    found = []
    for i in range(0, len(y), 5):
        model = clone(estimator).fit(np.delete(X, i, axis=0), np.delete(y, i))
        score = model.decision_function if hasattr(model, "decision_function") else model.predict
        found.append(score(X[i : i + 1])[0])
    return np.array(found)


@pytest.mark.parametrize("estimator", [Ridge(), LogisticRegression(), LinearSVC()], ids=lambda e: type(e).__name__)
def test_it_is_an_estimator(estimator):
    check_estimator(AsymptoticErrorEstimator(estimator), on_skip=None)


# --- leaving out -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(60, 25), (30, 50)])
@pytest.mark.parametrize("intercept", [True, False])
def test_ridge_with_own_leverages_is_exact_leave_one_out(shape, intercept):
    X, y = rows(*shape, classes=False)
    ridge = Ridge(3.0, fit_intercept=intercept)
    found = AsymptoticErrorEstimator(ridge, leverage="individual").fit(X, y)
    np.testing.assert_allclose(found.scores_[::5], refitted(ridge, X, y), rtol=1e-8)
    np.testing.assert_allclose(found.test_error_, np.mean((y - found.scores_) ** 2))


def test_least_squares_is_exact_leave_one_out_also_with_collinear_and_constant_columns():
    X, y = rows(60, 10, classes=False)
    X = np.column_stack([X, X[:, 0] + X[:, 1], np.full(60, 3.0)])
    found = AsymptoticErrorEstimator(LinearRegression(), leverage="individual").fit(X, y)
    np.testing.assert_allclose(found.scores_[::5], refitted(LinearRegression(), X, y), rtol=1e-6)


@pytest.mark.parametrize("shape", [(90, 30), (60, 90)])
@pytest.mark.parametrize(
    ("estimator", "share"),
    [
        (LogisticRegression(C=0.3, tol=1e-9, max_iter=1_000), 0.05),
        (LogisticRegression(C=0.3, solver="liblinear", tol=1e-9), 0.05),
        (LinearSVC(C=0.02, tol=1e-8, max_iter=100_000), 0.1),
        (LinearSVC(C=0.02, loss="hinge", tol=1e-8, max_iter=1_000_000), 0.35),
        (SVC(kernel="linear", C=0.02, tol=1e-8), 0.35),
        (RidgeClassifier(5.0), 1e-6),
    ],
    ids=["logistic", "liblinear", "squared hinge", "hinge", "svc", "ridge"],
)
def test_classifiers_scores_are_nearly_those_of_refitting(shape, estimator, share):
    """The correction removes nearly all of the difference between a row's score in the fit and without it."""
    X, y = rows(*shape)
    found = AsymptoticErrorEstimator(estimator, leverage="individual").fit(X, y)
    exact = refitted(estimator, X, y)
    fitted = found.decision_function(X)[::5]
    assert np.linalg.norm(found.scores_[::5] - exact) <= share * np.linalg.norm(fitted - exact)


def test_huber_scores_are_nearly_those_of_refitting():
    X, y = rows(90, 30, classes=False)
    huber = HuberRegressor(alpha=5.0, tol=1e-8, max_iter=2_000)
    found = AsymptoticErrorEstimator(huber, leverage="individual").fit(X, y)
    exact = refitted(huber, X, y)
    assert np.linalg.norm(found.scores_[::5] - exact) <= 0.25 * np.linalg.norm(found.predict(X)[::5] - exact)


def test_more_features_than_rows_give_the_same_influence_either_way():
    rng = np.random.default_rng(0)
    X, curvature = rng.normal(size=(30, 29)), rng.random(30)
    for free in (True, False):
        by_features = Influence.of(X, curvature, 0.1, free_intercept=free)
        wide = np.column_stack([X, np.zeros((30, 2))])  # two empty features change the route, not the answer
        by_rows = Influence.of(wide, curvature, 0.1, free_intercept=free)
        np.testing.assert_allclose(by_rows.leverages(), by_features.leverages(), rtol=1e-8)
        np.testing.assert_allclose(
            by_rows.factor.T @ by_rows.factor, by_features.factor.T @ by_features.factor, atol=1e-9
        )


# --- truth recovered ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", ["auto", "empirical", "normal"])
def test_the_estimated_error_is_unbiased_where_the_truth_is_known(law):
    """Normal classes, n = 160, p = 80: the fitted model's true error is Phi(-coef'm / |coef|)."""
    mean = 1.2 * np.eye(80)[0]
    design = IndependentDesign("normal", class_mean=mean)
    gaps, claimed = [], []
    for seed in range(60):
        X, y = design.sample(160, seed)
        found = AsymptoticErrorEstimator(LogisticRegression(C=0.1, fit_intercept=False), law=law).fit(X, y)
        coef = found.estimator_.coef_[0]
        gaps.append(found.test_error_ - ndtr(-coef @ mean / np.linalg.norm(coef)))
        claimed.append(found.test_error_se_)
    gaps = np.array(gaps)
    assert abs(gaps.mean()) < 3 * gaps.std() / np.sqrt(60) + 0.004
    assert 0.6 < gaps.std() / np.mean(claimed) < 1.6


def test_reading_the_error_off_a_normal_law_varies_less_than_counting():
    design = IndependentDesign("normal", class_mean=1.2 * np.eye(80)[0])
    found = {law: [] for law in ("empirical", "normal")}
    for seed in range(60):
        X, y = design.sample(160, seed)
        for law, values in found.items():
            model = AsymptoticErrorEstimator(LogisticRegression(C=0.1, fit_intercept=False), law=law).fit(X, y)
            coef = model.estimator_.coef_[0]
            values.append(model.test_error_ - ndtr(-1.2 * coef[0] / np.linalg.norm(coef)))
    assert np.std(found["normal"]) < 0.9 * np.std(found["empirical"])


def test_training_errors_are_far_too_small_and_estimated_ones_are_not():
    X, y = rows(200, 100, seed=3)
    fresh, fresh_y = rows(20_000, 100, seed=3)
    found = AsymptoticErrorEstimator(LogisticRegression()).fit(X, y)
    truth = np.mean(found.predict(rows(200, 100, seed=3)[0]) != y)
    assert found.train_error_ == pytest.approx(truth)
    rng = np.random.default_rng(9)
    beta = np.random.default_rng(3)
    beta.normal(size=(200, 100))
    coef = beta.normal(size=100) / 10
    fresh = rng.normal(size=(20_000, 100)) + 0.5
    fresh_y = np.where(2 * fresh @ coef + rng.logistic(size=20_000) > 0.5, 1, -1)
    error = np.mean(found.predict(fresh) != fresh_y)
    assert found.train_error_ < 0.3 * error
    assert abs(found.test_error_ - error) < 4 * found.test_error_se_


# --- invariances -------------------------------------------------------------------------------------------------------


def test_order_of_rows_and_columns_and_a_shift_do_not_matter():
    X, y = rows(120, 40, seed=1)
    ridge = RidgeClassifier(10.0)
    want = AsymptoticErrorEstimator(ridge).fit(X, y)
    order, columns = np.random.default_rng(0).permutation(120), np.random.default_rng(1).permutation(40)
    got = AsymptoticErrorEstimator(ridge).fit(X[order][:, columns] + 5.0, y[order])
    np.testing.assert_allclose(got.scores_, want.scores_[order], atol=1e-8)
    np.testing.assert_allclose(got.test_error_, want.test_error_)


def test_labels_may_be_text_and_tables_may_be_frames():
    X, y = rows(120, 10)
    frame = pd.DataFrame(X, columns=[f"x{j}" for j in range(10)])
    named = np.where(y > 0, "yes", "no")
    want = AsymptoticErrorEstimator(LogisticRegression()).fit(X, y)
    got = AsymptoticErrorEstimator(LogisticRegression()).fit(frame, pd.Series(named))
    assert list(got.classes_) == ["no", "yes"]
    assert list(got.feature_names_in_) == list(frame.columns)
    np.testing.assert_allclose(got.test_error_, want.test_error_)
    assert set(got.predict(frame)) <= {"no", "yes"}


def test_a_pipeline_is_its_last_step_on_transformed_features():
    X, y = load_breast_cancer(return_X_y=True)
    pipeline = AsymptoticErrorEstimator(make_pipeline(StandardScaler(), LogisticRegression())).fit(X, y)
    scaled = AsymptoticErrorEstimator(LogisticRegression()).fit(StandardScaler().fit_transform(X), y)
    np.testing.assert_allclose(pipeline.scores_, scaled.scores_)
    assert 0.01 < pipeline.test_error_ < 0.05


# --- the check ---------------------------------------------------------------------------------------------------------


def flagged(design, n=200, repeats=20, estimator=None):
    found = []
    for seed in range(repeats):
        X, y = design.sample(n, seed)
        model = AsymptoticErrorEstimator(estimator or LogisticRegression(C=10 / n)).fit(X, y)
        found.append(model.universality_)
    return found


MEAN = 1.2 * np.eye(100)[0]


@pytest.mark.parametrize("law", ["normal", "uniform", "laplace"])
def test_rows_that_concentrate_are_trusted(law):
    spread = IndependentDesign(law, class_mean=np.full(100, 0.12))
    assert np.mean([check.trusted for check in flagged(spread)]) >= 0.85


def test_elliptical_rows_are_found_and_get_their_own_leverages():
    design = EllipticalDesign(stats.uniform(0.3, 1.4), class_mean=MEAN)
    checks = flagged(design)
    assert np.mean([not check.concentrates for check in checks]) >= 0.95
    assert "differ in scale" in next(c for c in checks if not c.concentrates).reasons[0]
    model = AsymptoticErrorEstimator(LogisticRegression(C=0.05)).fit(*design.sample(200, 0))
    assert (model.leverage_, model.normal_weight_) == ("individual", 0.0)


def test_a_localised_coordinate_with_its_own_law_is_found():
    design = IndependentDesign(["skewed"] + ["normal"] * 99, class_mean=2.0 * np.eye(100)[0])
    checks = flagged(design, n=400, repeats=10)
    assert np.mean([not check.scores_normal for check in checks]) >= 0.9
    assert np.mean([check.concentrates for check in checks]) >= 0.9
    assert any("not normal" in reason for check in checks for reason in check.reasons)


def test_the_normality_test_has_its_level():
    rng = np.random.default_rng(0)
    p = np.array([anderson_darling_p(rng.normal(3, 7, 80)) for _ in range(2_000)])
    for level in (0.01, 0.05, 0.3):
        assert abs(np.mean(p < level) - level) < 4 * np.sqrt(level * (1 - level) / 2_000)
    assert anderson_darling_p(rng.exponential(size=200)) < 1e-6
    assert anderson_darling_p(np.ones(50)) == 0.0
    assert anderson_darling_p(np.arange(5.0)) == 1.0


def test_the_margin_law_has_the_estimated_error_and_scores_are_calibrated():
    X, y = rows(600, 60, seed=4)
    found = AsymptoticErrorEstimator(LogisticRegression(C=0.05), law="normal").fit(X, y)
    np.testing.assert_allclose(found.margin_law().cdf(0.0), found.test_error_, rtol=1e-9)
    counted = AsymptoticErrorEstimator(LogisticRegression(C=0.05), law="empirical").fit(X, y)
    assert abs(counted.margin_law().cdf(0.0) - counted.test_error_) < 0.02
    predicted, observed = found.calibration(5)
    assert (np.diff(predicted) > 0).all()
    assert np.abs(predicted - observed).max() < 0.15
    with pytest.raises(ValueError, match="predicts no probabilities"):
        AsymptoticErrorEstimator(RidgeClassifier()).fit(X, y).calibration()


# --- edges -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", [LogisticRegression(), RidgeClassifier(), LinearSVC(), SVC(kernel="linear")])
def test_few_rows_constant_and_collinear_columns_and_huge_values_are_survived(estimator):
    X, y = rows(40, 60)
    X = np.column_stack([X, np.full(40, 2.0), X[:, 0], np.zeros(40)])
    found = AsymptoticErrorEstimator(estimator).fit(X, y)
    assert 0 <= found.test_error_ <= 1
    assert np.isfinite(found.scores_).all()
    huge = AsymptoticErrorEstimator(RidgeClassifier(1e16)).fit(X * 1e8, y)
    plain = AsymptoticErrorEstimator(RidgeClassifier(1.0)).fit(X, y)
    np.testing.assert_allclose(huge.scores_, plain.scores_, rtol=1e-4, atol=1e-6)


def test_separated_classes_without_a_penalty_are_refused():
    X = np.random.default_rng(0).normal(size=(60, 5))
    y = (X[:, 0] > 0).astype(int)
    with pytest.raises(ValueError, match="minimiser does not exist"), np.errstate(all="ignore"):
        AsymptoticErrorEstimator(LogisticRegression(C=np.inf, max_iter=5_000)).fit(X, y)
    noisy = np.where(np.arange(60) % 4 == 0, 1 - y, y)
    assert AsymptoticErrorEstimator(LogisticRegression(C=np.inf)).fit(X, noisy).test_error_ > 0.1


def test_an_interpolating_fit_is_refused():
    X, y = rows(20, 40, classes=False)
    with pytest.raises(ValueError, match="fitted exactly"):
        AsymptoticErrorEstimator(LinearRegression()).fit(X, y)


@pytest.mark.parametrize(
    ("estimator", "change", "words"),
    [
        (LogisticRegression(), lambda X, y: (X, np.ones_like(y)), "one class"),
        (LogisticRegression(), lambda X, y: (X, np.arange(len(y)) % 3), "3 classes"),
        (Ridge(), lambda X, y: (np.where(X > 2, np.nan, X), y), "NaN"),
        (Ridge(), lambda X, y: (X, np.where(y > 0, np.inf, 0.0)), "inf"),
        (Ridge(), lambda X, y: (X[:1], y[:1]), "n_samples=1"),
        (Ridge(), lambda X, y: (X, y[:-1]), "inconsistent|Found input"),
        (make_pipeline(SelectKBest(k=3), Ridge()), lambda X, y: (X, y), "needs y"),
        (LogisticRegression(class_weight="balanced"), lambda X, y: (X, y), "class_weight"),
    ],
)
def test_what_cannot_be_estimated_is_said_in_a_sentence(estimator, change, words):
    with pytest.raises(ValueError, match=words):
        AsymptoticErrorEstimator(estimator).fit(*change(*rows(40, 6)))


@pytest.mark.parametrize("options", [{"leverage": "mine"}, {"law": "cauchy"}])
def test_options_are_checked(options):
    with pytest.raises(ValueError, match="must be"):
        AsymptoticErrorEstimator(Ridge(), **options).fit(*rows(40, 6))
