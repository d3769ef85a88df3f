"""The sparse regressor against a dense Gaussian process, its errors, and its life as a scikit-learn estimator."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
from scipy.stats import multivariate_normal
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process import kernels as dense
from sklearn.utils.estimator_checks import check_estimator

from cameraready.stats.gp2scale import (
    Bumps,
    Core,
    EmptyNeighbourhood,
    Field,
    NonStationary,
    NotPositiveDefinite,
    PaperNonStationary,
    SparseGPRegressor,
    SupportKernel,
    Wendland,
    sample_prior,
)

RNG = np.random.default_rng(3)
X = RNG.random((350, 2))
y = np.sin(6 * X[:, 0]) + X[:, 1] + 0.1 * RNG.standard_normal(350)
NEW = RNG.random((40, 2))
VARIANCES = 0.01 + 0.05 * RNG.random(350)
PLACES = [RNG.random((2, 2)), RNG.random((2, 2))]
KERNELS = {
    "wendland": 1.5 * Wendland(0.25, 3),
    "ard": Wendland([0.3, 0.2], 1),
    "core": Core(dense.RBF(0.5) + dense.Matern(0.3, nu=1.5)) * Wendland(0.3, 2),
    "far": Core(dense.RBF(0.6)) * (Bumps(PLACES, 0.2, [0.5, 1.0]) + Wendland(0.25)),
    "varying": NonStationary(Field(RNG.random((3, 2)), [0.3, 0.2, 0.5]), Field(RNG.random((2, 2)), [1.0, 2.0]), 0.4),
}


class Dense(dense.Kernel):
    """A sparse kernel as one of scikit-learn's own, so that its regressor is the reference."""

    def __init__(self, kernel):
        self.kernel = kernel

    @property
    def theta(self):
        return self.kernel.theta

    @theta.setter
    def theta(self, theta):
        self.kernel = self.kernel.clone_with_theta(theta)

    @property
    def bounds(self):
        return self.kernel.bounds

    def clone_with_theta(self, theta):
        return Dense(self.kernel.clone_with_theta(theta))

    def __call__(self, X, Y=None, eval_gradient=False):
        if not eval_gradient:
            return self.kernel(X, Y).toarray()
        K, slopes = self.kernel(X, eval_gradient=True)
        return K.toarray(), np.stack([s.toarray() for s in slopes], axis=2)

    def diag(self, X):
        return self.kernel.diag(X)

    def is_stationary(self):
        return False


def by_hand(kernel, variances, target, mean=0.0):
    """Mean, covariance at NEW and log-likelihood by NumPy, with no code shared beyond the kernel's values."""
    A = kernel(X).toarray() + np.diag(np.broadcast_to(variances, len(X)))
    cross, prior = kernel(NEW, X).toarray(), kernel(NEW).toarray()
    inverse = np.linalg.inv(A)
    value = multivariate_normal(np.full(len(X), mean), A).logpdf(target)
    return mean + cross @ inverse @ (target - mean), prior - cross @ inverse @ cross.T, value


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("noise", [0.02, "array"])
def test_equals_a_dense_gaussian_process(name, noise):
    kernel = KERNELS[name]
    variances = VARIANCES if isinstance(noise, str) else noise
    model = SparseGPRegressor(kernel, noise=variances, optimizer=None).fit(X, y)
    reference = GaussianProcessRegressor(Dense(kernel), alpha=variances, optimizer=None).fit(X, y)
    mean, covariance, value = by_hand(kernel, variances, y)
    found, std = model.predict(NEW, return_std=True)
    np.testing.assert_allclose(found, mean, atol=1e-8)
    np.testing.assert_allclose(found, reference.predict(NEW), atol=1e-8)
    np.testing.assert_allclose(std**2, covariance.diagonal(), atol=1e-8)
    np.testing.assert_allclose(model.predict(NEW, return_cov=True)[1], covariance, atol=1e-8)
    np.testing.assert_allclose(std, reference.predict(NEW, return_std=True)[1], atol=1e-8)
    assert model.log_marginal_likelihood() == pytest.approx(value, abs=1e-8)
    theta = kernel.theta + 0.05
    expected, slope = reference.log_marginal_likelihood(theta, eval_gradient=True)
    here, gradient = model.log_marginal_likelihood(theta, eval_gradient=True)
    assert here == pytest.approx(expected, abs=1e-8)
    np.testing.assert_allclose(gradient, slope, atol=1e-8 * max(1.0, np.abs(slope).max()))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("mean", [0.0, "learn"])
def test_the_gradient_equals_finite_differences(name, mean):
    model = SparseGPRegressor(KERNELS[name], noise="learn", mean=mean, optimizer=None).fit(X, y)
    theta, step = model.theta_, 1e-5
    _, gradient = model.log_marginal_likelihood(theta, eval_gradient=True)
    for k in range(len(theta)):
        away = step * np.eye(len(theta))[k]
        slope = (model.log_marginal_likelihood(theta + away) - model.log_marginal_likelihood(theta - away)) / (2 * step)
        # Differences of numbers near 1e3 at this step are good to 1e3 * 1e-16 / 1e-5 * conditioning.
        assert gradient[k] == pytest.approx(slope, rel=1e-6, abs=1e-5)


def test_normalised_targets_equal_scikit_learns():
    target = 1e4 + 300 * y
    kernel = KERNELS["wendland"]
    model = SparseGPRegressor(kernel, noise=0.05, optimizer=None, normalize_y=True).fit(X, target)
    reference = GaussianProcessRegressor(Dense(kernel), alpha=0.05, optimizer=None, normalize_y=True).fit(X, target)
    for ours, theirs in zip(model.predict(NEW, return_cov=True), reference.predict(NEW, return_cov=True), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-5)
    assert model.log_marginal_likelihood() == pytest.approx(reference.log_marginal_likelihood(), abs=1e-8)


def test_means_given_and_learned():
    kernel = KERNELS["wendland"]
    expected, _, value = by_hand(kernel, 0.02, y, mean=0.7)
    model = SparseGPRegressor(kernel, noise=0.02, mean=0.7, optimizer=None).fit(X, y)
    np.testing.assert_allclose(model.predict(NEW), expected, atol=1e-8)
    assert model.log_marginal_likelihood() == pytest.approx(value, abs=1e-8)
    trend = SparseGPRegressor(kernel, noise=0.02, mean=lambda X: 5 * X[:, 0], optimizer=None).fit(X, y + 5 * X[:, 0])
    plain = SparseGPRegressor(kernel, noise=0.02, optimizer=None).fit(X, y)
    np.testing.assert_allclose(trend.predict(NEW), plain.predict(NEW) + 5 * NEW[:, 0], atol=1e-8)
    # A learned constant is the limit of a constant kernel of unbounded variance, in mean and in variance.
    learned = SparseGPRegressor(kernel, noise=0.02, mean="learn", optimizer=None).fit(X, y)
    wide = 1e6
    A = kernel(X).toarray() + 0.02 * np.eye(len(X)) + wide
    cross = kernel(NEW, X).toarray() + wide
    limit = cross @ np.linalg.solve(A, y)
    spread = kernel.diag(NEW) + wide - np.einsum("ij,ji->i", cross, np.linalg.solve(A, cross.T))
    mean, std = learned.predict(NEW, return_std=True)
    np.testing.assert_allclose(mean, limit, atol=1e-4)
    np.testing.assert_allclose(std**2, spread, atol=1e-4)
    np.testing.assert_allclose(learned.predict(NEW, return_cov=True)[1].diagonal(), std**2, atol=1e-10)


def test_noise_by_a_callable_is_that_of_the_points():
    def noise(points):
        return 0.01 + 0.1 * points[:, 0]

    kernel = KERNELS["wendland"]
    one = SparseGPRegressor(kernel, noise=noise, optimizer=None).fit(X, y)
    other = SparseGPRegressor(kernel, noise=noise(X), optimizer=None).fit(X, y)
    np.testing.assert_array_equal(one.predict(NEW), other.predict(NEW))
    std, with_noise = (one.predict(NEW, return_std=True, include_noise=flag)[1] for flag in (False, True))
    np.testing.assert_allclose(with_noise**2 - std**2, noise(NEW), atol=1e-12)
    with pytest.raises(ValueError, match="training points alone"):
        other.predict(NEW, return_std=True, include_noise=True)


def test_the_optimiser_finds_the_maximum_that_a_dense_one_finds():
    kernel = 1.0 * Wendland(0.3, 1, length_scale_bounds=(0.05, 1.0))
    model = SparseGPRegressor(kernel, noise=0.01).fit(X, y)
    reference = GaussianProcessRegressor(Dense(kernel), alpha=0.01).fit(X, y)
    assert model.log_marginal_likelihood() == pytest.approx(reference.log_marginal_likelihood_value_, abs=1e-3)
    assert (model.theta_ >= kernel.bounds[:, 0]).all()
    assert (model.theta_ <= kernel.bounds[:, 1]).all()


def test_hyper_parameters_of_a_drawn_process_are_recovered():
    points = np.random.default_rng(0).random((2000, 2))
    truth = 2.0 * Wendland(0.1)
    drawn = sample_prior(truth, points, noise=0.05, random_state=1)[:, 0]
    start = Wendland(0.05, length_scale_bounds=(0.02, 0.15)) * 1.0
    model = SparseGPRegressor(start, noise="learn", max_iter=15).fit(points, drawn)
    assert model.noise_ == pytest.approx(0.05, rel=0.2)
    assert model.kernel_(points[:1])[0, 0] == pytest.approx(2.0, rel=0.25)
    assert model.kernel_.k1.length_scale == pytest.approx(0.1, rel=0.2)


def test_coverage_of_new_observations():
    points = np.random.default_rng(0).random((3000, 2))
    drawn = sample_prior(Wendland(0.15), points, noise=0.1, random_state=2)[:, 0]
    model = SparseGPRegressor(Wendland(0.15), noise=0.1, optimizer=None).fit(points[:2000], drawn[:2000])
    mean, std = model.predict(points[2000:], return_std=True, include_noise=True)
    inside = np.mean(np.abs(drawn[2000:] - mean) < 1.96 * std)
    assert 0.93 < inside < 0.97  # 95 % of 1000, four standard errors are 2.8 %


def test_prior_draws_have_the_kernels_covariance():
    points = np.array([[0.0], [0.3], [2.0]])
    draws = sample_prior(Wendland(1.0), points, noise=0.1, n_samples=20_000)
    expected = Wendland(1.0)(points).toarray() + 0.1 * np.eye(3)
    np.testing.assert_allclose(np.cov(draws), expected, atol=5 * 1.5 / np.sqrt(20_000))


def test_posterior_draws_have_the_posteriors_moments():
    model = SparseGPRegressor(Wendland(0.4), noise=0.05, optimizer=None).fit(X, y)
    mean, covariance = model.predict(NEW[:3], return_cov=True)
    draws = model.sample_y(NEW[:3], n_samples=20_000, random_state=0)
    error = 5 * np.sqrt(covariance.max() / 20_000)
    np.testing.assert_allclose(draws.mean(axis=1), mean, atol=error)
    np.testing.assert_allclose(np.cov(draws), covariance, atol=error)


def indefinite():
    scales = np.exp(np.random.default_rng(4).standard_normal(len(X)) - 2)
    lookup = {row.tobytes(): s for row, s in zip(X, scales, strict=True)}
    return PaperNonStationary(lambda P: np.array([lookup.get(row.tobytes(), 0.2) for row in P]), smoothness=1)


@pytest.mark.parametrize("solver", ["cholesky", "cg"])
def test_noise_does_not_hide_an_indefinite_kernel(solver):
    kernel = indefinite()
    K = kernel(X).toarray()
    assert np.linalg.eigvalsh(K)[0] < -1e-4
    assert np.linalg.eigvalsh(K + np.eye(len(X)))[0] > 0  # K + V alone would look healthy
    with pytest.raises(NotPositiveDefinite, match=r"K without noise.*Use NonStationary") as caught:
        SparseGPRegressor(kernel, noise=1.0, optimizer=None, solver=solver).fit(X, y)
    assert caught.value.kernel == kernel


def test_errors_travel_between_processes():
    error = NotPositiveDefinite(PaperNonStationary(0.3), "seen", "do")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_an_unguaranteed_kernel_that_is_fine_passes_its_check():
    kernel = PaperNonStationary(0.3, 1.0)
    model = SparseGPRegressor(kernel, noise=0.02, optimizer=None).fit(X, y)
    expected = SparseGPRegressor(Wendland(0.3, 3), noise=0.02, optimizer=None).fit(X, y)
    assert model.log_marginal_likelihood() == pytest.approx(expected.log_marginal_likelihood(), abs=1e-8)


def test_the_search_keeps_to_where_the_kernel_is_positive_definite():
    values = [0.3, 0.3, 0.3]
    kernel = PaperNonStationary(Field(RNG.random((3, 2)), values, values_bounds=(0.02, 2.0)), 1.0, 1)
    model = SparseGPRegressor(kernel, noise=0.05, max_iter=10).fit(X, y)
    assert np.linalg.eigvalsh(model.kernel_(X).toarray())[0] > -1e-8


@pytest.mark.parametrize("optimizer", ["lbfgs", "mcmc"])
def test_a_chain_of_neighbours_is_indefinite_beyond_one_half(optimizer):
    """1 on the diagonal, p beside it: positive definite for p < 1/2 alone, and most restarts begin beyond."""
    n = 60
    chain = np.arange(n)

    def values(A, B, p):
        return np.where(np.asarray(A) == np.asarray(B), 1.0, p[0])

    def neighbours(A, B):
        return np.nonzero(np.abs(np.asarray(A)[:, None] - np.asarray(B)[None]) <= 1)

    kernel = SupportKernel(values, neighbours, [0.3], parameters_bounds=(0.1, 10.0))
    target = np.repeat(np.random.default_rng(0).standard_normal(n // 2), 2)  # neighbours in pairs: p would like to be 1
    options = {"max_iter": 10, "n_samples": 40, "n_restarts_optimizer": 4, "random_state": 0}
    model = SparseGPRegressor(kernel, noise=0.1, optimizer=optimizer, **options).fit(chain, target)
    assert 0.4 < model.kernel_.parameters < 0.501
    assert (model.samples_ < np.log(0.501)).all()
    with pytest.raises(NotPositiveDefinite):
        model.log_marginal_likelihood(np.log([0.6]))


def test_strings_have_a_gaussian_process_too():
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("ACGT"), 12)) for _ in range(60)]
    target = np.array([word.count("ACG") + 0.5 * word.count("TT") for word in words], dtype=float)

    def kmers(word):
        return {word[i : i + 3] for i in range(len(word) - 2)}

    def shared(A, B, p):
        return np.array([p[0] * len(kmers(a) & kmers(b)) / 10 for a, b in zip(A, B, strict=True)])

    def neighbours(A, B):
        index = {}
        for j, word in enumerate(B):
            for mer in kmers(word):
                index.setdefault(mer, []).append(j)
        return np.array([(i, j) for i, a in enumerate(A) for mer in kmers(a) for j in index.get(mer, [])]).T

    kernel = SupportKernel(shared, neighbours, [1.0])
    assert not kernel.guaranteed
    model = SparseGPRegressor(kernel, noise=0.05, optimizer=None).fit(words, target)
    K = np.array([[len(kmers(a) & kmers(b)) / 10 for b in words] for a in words])
    expected = K[:10] @ np.linalg.solve(K + 0.05 * np.eye(60), target)
    np.testing.assert_allclose(model.predict(words[:10]), expected, atol=1e-8)
    learned = SparseGPRegressor(kernel, noise="learn", max_iter=3).fit(words, target)
    assert learned.log_marginal_likelihood() > model.log_marginal_likelihood()


def test_conjugate_gradients_agree_with_the_factor():
    exact = SparseGPRegressor(Wendland(0.2), noise=0.05, optimizer=None).fit(X, y)
    other = clone(exact).set_params(solver="cg", tol=1e-11, n_probes=100, random_state=0).fit(X, y)
    assert (exact.solver_, other.solver_) == ("multifrontal", "cg")
    for ours, theirs in zip(exact.predict(NEW, return_std=True), other.predict(NEW, return_std=True), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-8)
    assert other.log_marginal_likelihood() == pytest.approx(exact.log_marginal_likelihood(), rel=0.02)


@pytest.mark.parametrize("backend", ["superlu", "qdldl", "cholmod"])
def test_other_backends_give_the_same_numbers(backend):
    if backend != "superlu":
        pytest.importorskip({"qdldl": "qdldl", "cholmod": "cvxopt"}[backend])
    ours = SparseGPRegressor(Wendland(0.2), noise=0.05, optimizer=None).fit(X, y)
    theirs = clone(ours).set_params(backend=backend).fit(X, y)
    theta = ours.theta_
    for a, b in zip(*(m.log_marginal_likelihood(theta, eval_gradient=True) for m in (ours, theirs)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-8)
    np.testing.assert_allclose(ours.predict(NEW, return_std=True), theirs.predict(NEW, return_std=True), atol=1e-8)


def test_points_out_of_reach_get_the_prior_and_a_warning():
    model = SparseGPRegressor(2.0 * Wendland(0.2), noise=0.05, mean=3.0, optimizer=None).fit(X, y)
    with pytest.warns(EmptyNeighbourhood, match="1 of 2 points"):
        mean, std = model.predict(np.array([[50.0, 50.0], [0.5, 0.5]]), return_std=True)
    assert (mean[0], std[0] ** 2) == pytest.approx((3.0, 2.0))
    assert std[1] < 1


def test_equal_rows_need_noise():
    twice, target = np.vstack([X, X[:1]]), np.append(y, y[0] + 1)
    with pytest.raises(ValueError, match="rows 0 and 350 of X are equal and have no noise"):
        SparseGPRegressor(Wendland(0.2), noise=0.0, optimizer=None).fit(twice, target)
    model = SparseGPRegressor(Wendland(0.2), noise=1e-6, optimizer=None).fit(twice, target)
    assert model.predict(X[:1])[0] == pytest.approx(y[0] + 0.5, abs=1e-3)


def test_without_noise_the_data_are_interpolated():
    model = SparseGPRegressor(Wendland(0.2, 0), noise=0.0, optimizer=None).fit(X, y)
    mean, std = model.predict(X, return_std=True)
    np.testing.assert_allclose(mean, y, atol=1e-8)
    np.testing.assert_allclose(std, 0, atol=1e-6)


def test_a_matrix_singular_in_floating_point_is_explained():
    close = np.linspace(0, 1e-4, 300)[:, None]
    with pytest.raises(NotPositiveDefinite, match=r"positive definite in exact arithmetic.*raise the noise"):
        SparseGPRegressor(Wendland(1.0, 3), noise=0.0, optimizer=None).fit(close, close[:, 0])


def test_one_point():
    model = SparseGPRegressor(Wendland(1.0), noise=0.5, optimizer=None).fit([[0.0, 0.0]], [3.0])
    assert model.predict([[0.0, 0.0]])[0] == pytest.approx(2.0)
    assert SparseGPRegressor().fit([[1.0]], [2.0]).predict([[1.0]])[0] == pytest.approx(2.0, abs=0.5)


def test_huge_coordinates_and_many_columns():
    here = SparseGPRegressor(Wendland(0.2), noise=0.05, optimizer=None).fit(X, y).predict(NEW)
    far = SparseGPRegressor(Wendland(0.2), noise=0.05, optimizer=None).fit(X + 1e6, y).predict(NEW + 1e6)
    np.testing.assert_allclose(far, here, atol=1e-7)  # 1e6 leaves ten digits of the coordinates
    wide = np.random.default_rng(0).standard_normal((100, 40))
    kernel = Wendland(8.0)
    model = SparseGPRegressor(kernel, noise=0.1, optimizer=None).fit(wide, wide[:, 0])
    K = kernel(wide).toarray()
    np.testing.assert_allclose(model.predict(wide), K @ np.linalg.solve(K + 0.1 * np.eye(100), wide[:, 0]), atol=1e-9)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kernel": dense.RBF()}, TypeError, r"Core\(kernel\) \* Wendland"),
        ({"solver": "lu"}, ValueError, "solver must be one of"),
        ({"noise": "guess"}, ValueError, "noise must be"),
        ({"noise": -1.0}, ValueError, "finite and at least 0"),
        ({"noise": np.ones(3)}, ValueError, "one variance for each of the 350 points"),
        ({"mean": "guess"}, ValueError, "mean must be"),
        ({"mean": lambda X: np.ones(2)}, ValueError, "mean must return 350 finite values"),
        ({"noise": "learn", "noise_bounds": (0, 1)}, ValueError, "noise_bounds must be two positive"),
    ],
)
def test_mistakes_are_explained(options, error, message):
    with pytest.raises(error, match=message):
        SparseGPRegressor(**options).fit(X, y)


def test_missing_values_wrong_widths_and_unfitted_models():
    model = SparseGPRegressor(Wendland(0.2), optimizer=None)
    with pytest.raises(NotFittedError):
        model.predict(NEW)
    bad = X.copy()
    bad[3, 1] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        model.fit(bad, y)
    with pytest.raises(ValueError, match="2 features"):
        model.fit(X, y).predict(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="theta has 5 entries, expected 1"):
        model.log_marginal_likelihood(np.zeros(5))


def test_scikit_learns_own_checks():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmptyNeighbourhood)
        failures = check_estimator(SparseGPRegressor(), on_skip=None, on_fail=None)
    assert [(c["check_name"], c["exception"]) for c in failures if c["status"] == "failed"] == []
