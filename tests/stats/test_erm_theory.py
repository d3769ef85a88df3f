"""The fixed point: closed forms, invariances, limits, and agreement with models that scikit-learn fits to simulated data."""

import warnings

import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtr
from sklearn.base import clone
from sklearn.linear_model import HuberRegressor, LinearRegression, LogisticRegression, Ridge, RidgeClassifier
from sklearn.svm import SVC, LinearSVC

from cameraready.stats.erm import (
    BinaryTarget,
    EllipticalDesign,
    EmpiricalDesign,
    GaussianDesign,
    HighDimERM,
    IndependentDesign,
    LinearTarget,
    MixtureDesign,
    NoMinimiserError,
    PlugInWarning,
    SeparablePenalty,
    log_cosh_penalty,
    matching_erm,
    pseudo_huber_penalty,
    two_point,
    universality_gap,
)
from cameraready.stats.erm.laws import marginal, quantile_nodes
from cameraready.stats.erm.losses import SquaredLoss

P, N = 200, 400
DENSE = np.random.default_rng(0).normal(size=P) / np.sqrt(P)
FIRST = np.eye(P)[0]


def wishart(p=P, seed=0):
    return stats.wishart(df=2 * p, scale=np.eye(p) / (2 * p)).rvs(random_state=seed)


# --- closed forms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.01, 0.3, 5.0])
@pytest.mark.parametrize("n", [100, 400])
def test_ridge_equals_its_deterministic_equivalent(alpha, n):
    """Known risk of ridge regression: a = alpha + a tr(S (S + a)^-1) / n, and the bias-variance form in a."""
    cov = wishart()
    found = HighDimERM("squared", alpha=alpha).predict_asymptotics(GaussianDesign(DENSE, cov=cov), n)
    values, vectors = np.linalg.eigh(cov)
    a = alpha
    for _ in range(5_000):
        a = alpha + a * np.sum(values / (values + a)) / n
    df2 = np.sum((values / (values + a)) ** 2) / n
    bias = a**2 * np.sum(values * (vectors.T @ DENSE) ** 2 / (values + a) ** 2)
    np.testing.assert_allclose(found.test_error, (1.0 + bias) / (1.0 - df2), rtol=1e-6)
    np.testing.assert_allclose(found.coef_mean, np.linalg.solve(cov + a * np.eye(P), cov @ DENSE), atol=1e-6)
    np.testing.assert_allclose(np.trace(found.coef_cov()), found.coef_trace, rtol=1e-9)


def test_least_squares_has_its_known_risk():
    found = HighDimERM("squared", alpha=0).predict_asymptotics(GaussianDesign(DENSE, target=LinearTarget(0.5)), N)
    np.testing.assert_allclose(found.test_error, 0.25 / (1 - P / N), rtol=1e-6)
    np.testing.assert_allclose(2 * found.train_loss, 0.25 * (1 - P / N), rtol=1e-6)
    np.testing.assert_allclose(found.coef_mean, DENSE, atol=1e-7)


def test_the_numbers_checked_when_the_system_was_derived():
    """Localised mean 1.2, logistic, alpha 0.1: errors 0.1666 and 0.1971, alignment 1.132, trace 0.692 (by Monte Carlo)."""
    erm = HighDimERM("logistic", alpha=0.1)
    normal = erm.predict_asymptotics(IndependentDesign("normal", class_mean=1.2 * FIRST), N)
    coin = erm.predict_asymptotics(IndependentDesign("rademacher", class_mean=1.2 * FIRST), N)
    assert abs(normal.test_error - 0.1666) < 1e-3
    assert abs(coin.test_error - 0.1971) < 1e-3
    assert abs(normal.coef_mean[0] - 1.132) < 5e-3
    assert abs(normal.coef_trace - 0.692) < 5e-3
    np.testing.assert_allclose(normal.coef_mean[1:], 0.0, atol=1e-9)


def test_few_features_and_many_rows_give_the_classical_limit():
    coef = np.array([1.0, -0.5, 0.2])
    design = GaussianDesign(coef, target=BinaryTarget())
    found = HighDimERM("logistic", alpha=1e-9).predict_asymptotics(design, 10**7)
    np.testing.assert_allclose(found.coef_mean, coef, rtol=1e-3)
    np.testing.assert_allclose(found.test_loss, found.train_loss, rtol=1e-6)


# --- invariances -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["logistic", "hinge"])
def test_rotating_the_features_changes_nothing(loss):
    variances = np.linspace(0.2, 2.0, 60)
    rotation = stats.ortho_group(60, seed=1).rvs()
    erm = HighDimERM(loss, alpha=0.05)
    straight = erm.predict_asymptotics(GaussianDesign(2 * DENSE[:60], cov=variances, target=BinaryTarget()), 150)
    turned = GaussianDesign(rotation @ (2 * DENSE[:60]), cov=(rotation * variances) @ rotation.T, target=BinaryTarget())
    found = erm.predict_asymptotics(turned, 150)
    np.testing.assert_allclose(found.test_error, straight.test_error, rtol=1e-7)
    np.testing.assert_allclose(found.coef_mean, rotation @ straight.coef_mean, atol=1e-6)
    np.testing.assert_allclose(np.trace(found.coef_cov()), np.trace(straight.coef_cov()), rtol=1e-6)


def test_dense_and_diagonal_algebra_agree():
    """The same mixture with variances and with matrices, which keeps it from being rotated."""
    means, variances = [-0.5 * DENSE[:40], DENSE[:40]], [np.linspace(0.5, 1, 40), np.linspace(2, 1, 40)]
    erm = HighDimERM("logistic", alpha=0.1, intercept="free")
    diagonal = erm.predict_asymptotics(MixtureDesign(means, variances, [0.3, 0.7]), 100)
    dense = erm.predict_asymptotics(MixtureDesign(means, [np.diag(v) for v in variances], [0.3, 0.7]), 100)
    np.testing.assert_allclose(dense.test_error, diagonal.test_error, rtol=1e-7)
    np.testing.assert_allclose(dense.v, diagonal.v, rtol=1e-6)
    np.testing.assert_allclose(dense.coef_trace, diagonal.coef_trace, rtol=1e-6)


@pytest.mark.parametrize("factor", [1e-3, 1e4])
def test_units_of_the_features_do_not_matter(factor):
    erm = HighDimERM("logistic", alpha=0.1)
    plain = erm.predict_asymptotics(IndependentDesign("laplace", class_mean=1.2 * FIRST), N)
    scaled = HighDimERM("logistic", alpha=0.1 * factor**2).predict_asymptotics(
        IndependentDesign("laplace", class_mean=1.2 * factor * FIRST, scale=factor), N
    )
    np.testing.assert_allclose(scaled.test_error, plain.test_error, rtol=1e-6)


def test_a_free_intercept_takes_up_any_mean():
    erm = HighDimERM("logistic", alpha=0.1, intercept="free")
    centred = erm.predict_asymptotics(GaussianDesign(2 * DENSE, target=BinaryTarget()), N)
    shift = 3.0 * FIRST
    probability = lambda t: 1 / (1 + np.exp(-(t - shift @ (2 * DENSE))))  # noqa: E731
    moved = erm.predict_asymptotics(GaussianDesign(2 * DENSE, mean=shift, target=BinaryTarget(probability)), N)
    np.testing.assert_allclose(moved.test_error, centred.test_error, rtol=1e-3)
    np.testing.assert_allclose(moved.intercept_mean, -shift @ moved.coef_mean, atol=1e-2)


def test_a_constant_radius_and_equal_covariances_are_the_gaussian_case():
    mean = 1.2 * FIRST
    erm = HighDimERM("squared_hinge", alpha=0.1)
    want = erm.predict_asymptotics(IndependentDesign("normal", class_mean=mean), N).test_error
    for design in (EllipticalDesign(class_mean=mean), MixtureDesign([-mean, mean])):
        np.testing.assert_allclose(erm.predict_asymptotics(design, N).test_error, want, rtol=1e-7)
    common = HighDimERM("squared_hinge", alpha=0.1, fluctuations="common")
    np.testing.assert_allclose(common.predict_asymptotics(MixtureDesign([-mean, mean]), N).test_error, want, rtol=1e-6)


def test_a_quadratic_penalty_given_by_its_functions_is_the_l2_penalty():
    quadratic = SeparablePenalty(lambda t: 0.05 * t * t, lambda t: 0.1 * t, lambda t: 0.1 * np.ones_like(t))
    design = IndependentDesign("uniform", class_mean=1.2 * FIRST)
    by_name = HighDimERM("logistic", alpha=0.1).predict_asymptotics(design, N)
    by_functions = HighDimERM("logistic", penalty=quadratic).predict_asymptotics(design, N)
    np.testing.assert_allclose(by_functions.test_error, by_name.test_error, rtol=1e-7)
    np.testing.assert_allclose(by_functions.coef_mean, by_name.coef_mean, atol=1e-7)


@pytest.mark.parametrize("make", [pseudo_huber_penalty, log_cosh_penalty])
def test_a_smooth_penalty_keeps_the_fluctuations_and_lets_the_mean_grow(make):
    """Stationarity at the mean, grad rho(mu) = -E[x xi], with the fluctuations of curvature alpha at zero."""
    design = IndependentDesign("normal", class_mean=1.2 * FIRST)
    ridge = HighDimERM("logistic", alpha=0.3).predict_asymptotics(design, N)
    smooth = HighDimERM("logistic", penalty=make(0.3)).predict_asymptotics(design, N)
    assert smooth.coef_mean[0] > 1.02 * ridge.coef_mean[0]
    dense = IndependentDesign("normal", class_mean=np.full(P, 1.2 / np.sqrt(P)))
    found = HighDimERM("logistic", penalty=make(0.3)).predict_asymptotics(dense, N)
    np.testing.assert_allclose(found.test_error, ridge.test_error, rtol=5e-3)  # many small coordinates feel a ridge


# --- universality ------------------------------------------------------------------------------------------------------


def test_a_dense_mean_is_universal_and_a_localised_one_is_not():
    erm = HighDimERM("logistic", alpha=0.1)
    dense = universality_gap(IndependentDesign("rademacher", class_mean=np.full(P, 1.2 / np.sqrt(P))), erm, N)
    assert dense.holds
    local = universality_gap(IndependentDesign("rademacher", class_mean=1.2 * FIRST), erm, N)
    assert not local.holds
    assert local.distance > 0.02
    np.testing.assert_allclose(local.error_gap, 0.167 - 0.1974, atol=1e-3)


def test_squared_error_is_universal_whatever_the_features_are():
    """Only second moments enter the mean squared error of ridge with a linear target."""
    erm = HighDimERM("squared", alpha=0.1)
    gap = universality_gap(IndependentDesign("skewed", coef=1.5 * FIRST), erm, N)
    np.testing.assert_allclose(gap.test_error, gap.gaussian_test_error, rtol=1e-6)


def test_random_scales_are_named_as_a_failure_of_concentration():
    gap = universality_gap(EllipticalDesign(stats.uniform(0.3, 1.4), class_mean=1.2 * FIRST), HighDimERM(), N)
    assert not gap.concentrates
    squares = stats.uniform(0.3, 1.4).rvs(400_000, random_state=0) ** 2
    np.testing.assert_allclose(gap.scale_cv, squares.std() / squares.mean(), rtol=0.01)


# --- the law of scores -------------------------------------------------------------------------------------------------


def test_the_score_law_is_consistent_with_itself():
    found = HighDimERM("logistic", alpha=0.1).predict_asymptotics(
        IndependentDesign("skewed", class_mean=1.2 * FIRST), N
    )
    law = found.score_law
    grid = np.linspace(-8, 8, 4_001)
    np.testing.assert_allclose(np.gradient(law.cdf(grid), grid)[1:-1], law.pdf(grid)[1:-1], atol=1e-4)
    np.testing.assert_allclose(law.expect(lambda y, s: s), law.mean, atol=1e-9)
    np.testing.assert_allclose(law.expect(lambda y, s: (s - law.mean) ** 2), law.variance, rtol=1e-9)
    assert stats.kstest(law.rvs(20_000, seed=0), law.cdf).statistic < 1.63 / np.sqrt(20_000)
    by_class = 0.5 * law.given(1.0).cdf(0.0) + 0.5 * (1 - law.given(-1.0).cdf(0.0))
    np.testing.assert_allclose(by_class, found.test_error, rtol=1e-9)
    with pytest.raises(ValueError, match="no row has the label"):
        law.given(7.0)


@pytest.mark.parametrize("law", ["normal", "rademacher", "uniform", "laplace", "skewed", stats.gamma(2), stats.t(5)])
def test_marginals_are_standardised_in_draws_and_quadrature(law):
    found = marginal(law)
    nodes, weights = found.quadrature(32)
    np.testing.assert_allclose([weights.sum(), weights @ nodes, weights @ nodes**2], [1, 0, 1], atol=1e-9)
    drawn = found.draw(np.random.default_rng(0), (200_000,))
    np.testing.assert_allclose([drawn.mean(), drawn.var()], [0, 1], atol=0.04)
    levels = np.random.default_rng(1).random(200_000)
    np.testing.assert_allclose([found.quantile(levels).mean(), found.quantile(levels).var()], [0, 1], atol=0.04)


def test_heavy_tailed_noise_keeps_its_variance_and_infinite_variance_is_said():
    nodes, weights = quantile_nodes(stats.t(3), 48)
    np.testing.assert_allclose(weights @ nodes**2, 3.0)
    np.testing.assert_allclose(
        weights @ np.minimum(nodes**2, 4), 2 * stats.t(3).expect(lambda x: min(x * x, 4), lb=0), rtol=2e-2
    )
    cauchy = GaussianDesign(DENSE, target=LinearTarget(stats.cauchy()))
    found = HighDimERM("huber", alpha=0.1).predict_asymptotics(cauchy, N)
    assert found.test_error == np.inf
    assert np.isfinite(found.coef_trace)


# --- simulation --------------------------------------------------------------------------------------------------------

FITS = {
    "ridge": (Ridge(0.1 * N), GaussianDesign(DENSE, cov=wishart(), mean=np.full(P, 0.5))),
    "huber": (
        HuberRegressor(alpha=0.1 * N, max_iter=1_000),
        IndependentDesign("uniform", coef=DENSE, target=LinearTarget(stats.laplace())),
    ),
    "logistic": (
        LogisticRegression(C=10 / N, solver="newton-cholesky"),
        IndependentDesign("skewed", class_mean=1.2 * FIRST, prior=0.3),
    ),
    "hinge": (
        LinearSVC(C=10 / N, loss="hinge", max_iter=50_000),
        IndependentDesign("rademacher", class_mean=1.2 * FIRST),
    ),
    "classes": (
        RidgeClassifier(0.1 * N),
        MixtureDesign([-FIRST, FIRST], [np.full(P, 0.5), np.full(P, 1.5)], [0.4, 0.6]),
    ),
}


@pytest.mark.parametrize("name", FITS)
def test_predictions_agree_with_fitted_models(name):
    """Test error within 2 % and three standard errors of ten fits; training loss and alignment alike."""
    estimator, design = FITS[name]
    erm = matching_erm(estimator, N)
    found = erm.predict_asymptotics(design, N)
    errors, coefs, scales = [], [], []
    for seed in range(10):
        rng = np.random.default_rng([seed, 5])
        fitted = clone(estimator).fit(*design.sample(N, rng))
        X, y = design.sample(3_000, rng)
        wrong = fitted.predict(X) != y if design.is_classification else (fitted.predict(X) - y) ** 2
        errors.append(np.mean(wrong))
        coefs.append(np.ravel(fitted.coef_))
        scales.append(getattr(fitted, "scale_", np.nan))
    noise = np.std(errors, ddof=1) / np.sqrt(len(errors))
    assert abs(found.test_error - np.mean(errors)) < 0.02 * found.test_error + 3 * noise
    np.testing.assert_allclose(np.var(coefs, axis=0, ddof=1).sum(), found.coef_trace, rtol=0.15)
    along = np.array(coefs) @ found.coef_mean / (found.coef_mean @ found.coef_mean)
    assert abs(along.mean() - 1) < 0.02 + 3 * along.std(ddof=1) / np.sqrt(len(along))
    if name == "huber":
        np.testing.assert_allclose(np.mean(scales), found.scale, rtol=0.05)


def test_a_common_variance_is_wrong_for_random_scales_and_one_by_component_is_not():
    """The negative control: the paper's form misses the law of the scores of elliptical rows, whose length is random."""
    design = EllipticalDesign(stats.uniform(0.3, 1.4), class_mean=1.2 * FIRST)
    laws = {
        kind: HighDimERM(SquaredLoss(is_classification=True), alpha=0.1, fluctuations=kind)
        .predict_asymptotics(design, N)
        .margin_law
        for kind in ("common", "by-component")
    }
    margins = []
    for seed in range(12):
        rng = np.random.default_rng([seed, 7])
        fitted = Ridge(0.1 * N, fit_intercept=False).fit(*design.sample(N, rng))
        X, y = design.sample(2_000, rng)
        margins.append(y * fitted.predict(X))
    sample = np.concatenate(margins)
    distance = {kind: stats.kstest(sample, law.cdf).statistic for kind, law in laws.items()}
    assert distance["by-component"] < 0.02
    assert distance["common"] > 2 * distance["by-component"]


# --- where no prediction exists ----------------------------------------------------------------------------------------


def test_separable_data_without_a_penalty_are_refused_on_the_right_side_of_the_threshold():
    """Labels without signal are separable with high probability exactly if n < 2 p (Cover, 1965)."""
    coin = GaussianDesign(np.zeros(P), target=BinaryTarget())
    for loss in ("logistic", "squared_hinge"):
        with pytest.raises(NoMinimiserError, match=r"no fixed point|no minimiser"):
            HighDimERM(loss, alpha=0).predict_asymptotics(coin, int(1.5 * P))
    found = HighDimERM("logistic", alpha=0).predict_asymptotics(coin, 3 * P)
    assert found.converged
    np.testing.assert_allclose(found.test_error, 0.5, atol=1e-6)


@pytest.mark.parametrize(
    ("erm", "words"),
    [
        (HighDimERM("squared", alpha=0), "not unique"),
        (HighDimERM("squared", alpha=-1), "alpha must be"),
        (HighDimERM("squared", alpha=float("nan")), "alpha must be"),
        (HighDimERM("squared", penalty="l1"), "no second derivative"),
        (HighDimERM("squared", intercept="yes"), "intercept must be"),
        (HighDimERM("squared", fluctuations="none"), "fluctuations must be"),
        (HighDimERM("logistic"), "labels -1 and 1"),
        (HighDimERM("cubic"), "loss must be one of"),
    ],
)
def test_parameters_out_of_range_are_refused(erm, words):
    with pytest.raises(ValueError, match=words):
        erm.predict_asymptotics(GaussianDesign(DENSE), P)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: IndependentDesign("normal"), "either class_mean"),
        (lambda: IndependentDesign("normal", class_mean=FIRST, prior=1.0), "one class alone"),
        (lambda: IndependentDesign("cauchy", class_mean=FIRST), "coordinate's law"),
        (lambda: IndependentDesign(stats.cauchy(), class_mean=FIRST), "finite mean"),
        (lambda: IndependentDesign(["normal"] * 3, class_mean=FIRST), "3 laws for 200"),
        (lambda: IndependentDesign("normal", coef=[np.nan]), "finite vector"),
        (lambda: GaussianDesign(FIRST, cov=-np.ones(P)), "negative eigenvalue"),
        (lambda: GaussianDesign([1.0, 0], cov=[[1, 2], [0, 1]]), "not symmetric"),
        (lambda: EllipticalDesign(stats.t(2), coef=FIRST), "radius"),
        (lambda: MixtureDesign([[0.0], [1.0]], priors=[0.5, 0.6]), "sum to one"),
        (lambda: two_point(1.5), "probability"),
        (lambda: EmpiricalDesign([[1.0], [np.nan]], [0, 1]), "impute"),
        (lambda: EmpiricalDesign([[1.0], [2.0]], [1, 1]), "single value"),
    ],
)
def test_designs_that_are_none_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# --- plug-in -----------------------------------------------------------------------------------------------------------


def test_plug_in_moments_are_right_with_many_rows_and_optimistic_with_few():
    design = IndependentDesign("normal", class_mean=np.full(20, 0.25))
    truth = HighDimERM("logistic", alpha=0.1).predict_asymptotics(design, 60).test_error
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        many = EmpiricalDesign(*design.sample(20_000, 0))
    np.testing.assert_allclose(
        HighDimERM("logistic", alpha=0.1).predict_asymptotics(many, 60).test_error, truth, rtol=0.03
    )
    optimistic = []
    for seed in range(5):
        with pytest.warns(PlugInWarning, match="too optimistic"):
            few = EmpiricalDesign(*design.sample(60, seed))
        optimistic.append(HighDimERM("logistic", alpha=0.1).predict_asymptotics(few, 60).test_error)
    assert np.mean(optimistic) < 0.8 * truth


def test_plug_in_regression_recovers_the_model():
    design = GaussianDesign(DENSE[:5] * 10, mean=np.ones(5), target=LinearTarget(0.7, offset=3.0))
    plug_in = EmpiricalDesign(*design.sample(50_000, 0))
    erm = HighDimERM("squared", alpha=0.1, intercept="free")
    want, got = (erm.predict_asymptotics(d, 50) for d in (design, plug_in))
    np.testing.assert_allclose(got.test_error, want.test_error, rtol=0.02)
    np.testing.assert_allclose(got.intercept_mean, want.intercept_mean, rtol=0.02)
    with pytest.raises(ValueError, match="cannot be told from the signal"), pytest.warns(PlugInWarning):
        EmpiricalDesign(*design.sample(5, 0))


# --- scikit-learn ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "words"),
    [
        (LogisticRegression(l1_ratio=0.5, solver="saga"), "second derivative"),
        (LinearSVC(penalty="l1", dual=False), "second derivative"),
        (LogisticRegression(class_weight="balanced"), "class_weight"),
        (Ridge(positive=True), "signs"),
        (Ridge(alpha=-1.0), "not negative"),
        (SVC(kernel="rbf"), "not linear"),
    ],
)
def test_estimators_with_another_risk_are_refused(estimator, words):
    with pytest.raises(ValueError, match=words):
        matching_erm(estimator, 100)


def test_an_unknown_estimator_is_named():
    from sklearn.linear_model import Lasso

    with pytest.raises(TypeError, match="Lasso is not one of"):
        matching_erm(Lasso(), 100)


def test_conventions_of_scikit_learn_are_translated():
    assert matching_erm(LogisticRegression(C=0.5), 100).alpha == pytest.approx(1 / 50)
    assert matching_erm(LogisticRegression(C=np.inf), 100).alpha == 0
    assert matching_erm(LogisticRegression(solver="liblinear", intercept_scaling=5), 100).intercept == "penalised"
    assert matching_erm(LinearSVC(fit_intercept=False), 100).intercept == "none"
    assert matching_erm(LinearRegression(), 100).alpha == 0


def test_the_normal_law_of_a_linear_classifier_is_its_error():
    """With normal rows the predicted error is Phi(-mean / sd) of the margin."""
    found = HighDimERM("hinge", alpha=0.1).predict_asymptotics(IndependentDesign("normal", class_mean=1.2 * FIRST), N)
    margin = found.margin_law
    np.testing.assert_allclose(ndtr(-margin.mean / np.sqrt(margin.variance)), found.test_error, rtol=1e-6)
