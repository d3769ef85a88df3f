"""Metropolis-Hastings against a posterior known by quadrature; interruptions; links that start switched off."""

from __future__ import annotations

import numpy as np
import pytest

from cameraready.stats.gp2scale import Bumps, SparseGPRegressor, Wendland, sample_prior
from cameraready.stats.gp2scale.likelihood import LogLikelihood
from cameraready.stats.gp2scale.search import Mover, blocks_of

RNG = np.random.default_rng(5)
X = np.sort(RNG.random((80, 1)), axis=0)
y = np.sin(9 * X[:, 0]) + 0.2 * RNG.standard_normal(80)
BOUNDS = (0.05, 2.0)
KERNEL = Wendland(0.5, 1, length_scale_bounds=BOUNDS)


def test_samples_follow_the_posterior():
    model = SparseGPRegressor(KERNEL, noise=0.04, optimizer="mcmc", n_samples=2000, random_state=0).fit(X, y)
    grid = np.linspace(*np.log(BOUNDS), 400)
    log = np.array([model.log_marginal_likelihood([t]) for t in grid])
    density = np.exp(log - log.max())
    density /= density.sum()
    mean = density @ grid
    std = np.sqrt(density @ (grid - mean) ** 2)
    samples = model.samples_[:, 0]
    assert len(samples) == len(model.sample_log_likelihoods_) == 1000
    # Autocorrelation of a tuned random walk in one dimension leaves some 150 independent samples; three standard errors.
    assert samples.mean() == pytest.approx(mean, abs=0.25 * std)
    assert samples.std() == pytest.approx(std, rel=0.25)
    assert 0.3 < model.acceptance_rate_ < 0.6
    assert model.log_marginal_likelihood() == pytest.approx(log.max(), abs=0.05)


def test_values_belong_to_their_samples():
    kernel = 1.0 * KERNEL
    model = SparseGPRegressor(kernel, noise="learn", optimizer="mcmc", n_samples=60, random_state=1).fit(X, y)
    for k in (0, 15, -1):
        assert model.log_marginal_likelihood(model.samples_[k]) == pytest.approx(model.sample_log_likelihoods_[k])
    assert model.log_marginal_likelihood() >= model.sample_log_likelihoods_.max()
    assert (model.samples_[:, 1] >= np.log(BOUNDS[0])).all()
    assert (model.samples_[:, 1] <= np.log(BOUNDS[1])).all()


def test_chains_repeat_and_add_up():
    options = {"noise": 0.04, "optimizer": "mcmc", "n_samples": 40}
    one, two = (SparseGPRegressor(KERNEL, random_state=3, **options).fit(X, y) for _ in range(2))
    np.testing.assert_array_equal(one.samples_, two.samples_)
    three = SparseGPRegressor(KERNEL, random_state=3, n_restarts_optimizer=2, **options).fit(X, y)
    assert three.samples_.shape == (60, 1)


def test_proposals_learn_the_scale_and_shape_of_the_target():
    """A long narrow Gaussian: the adapted covariance must have its orientation."""
    mover = Mover(np.arange(2), np.array([[-10.0, 10.0]] * 2))
    rng = np.random.default_rng(0)
    root = np.array([[1.0, 0.0], [0.95, 0.1]])
    precision = np.linalg.inv(root @ root.T)
    state, accepts = np.zeros(2), []
    for turn in range(6000):
        proposal = mover.propose(state, rng)
        accept = np.log(rng.random()) < 0.5 * (state @ precision @ state - proposal @ precision @ proposal)
        state = proposal if accept else state
        mover.adapt(state, bool(accept), turn)
        accepts.append(accept)
    covariance = mover._covariance
    correlation = covariance[0, 1] / np.sqrt(covariance[0, 0] * covariance[1, 1])
    assert correlation > 0.9
    assert 0.17 < np.mean(accepts[3000:]) < 0.3


def test_blocks_cover_theta_once():
    for sizes in ([1, 2], [4, 3, 1], []):
        joined = np.concatenate([*blocks_of(sizes), np.empty(0, dtype=int)])
        np.testing.assert_array_equal(np.sort(joined), np.arange(sum(sizes)))
    assert [len(b) for b in blocks_of([4, 3, 1])] == [4, 3, 1]


@pytest.mark.parametrize("optimizer", ["mcmc", "lbfgs"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_fit_leaves_the_best_so_far(monkeypatch, optimizer, error):
    seen = []
    original = LogLikelihood.__call__

    def breaking(self, theta, eval_gradient=False):
        if len(seen) == 6:
            raise error("stop")
        found = original(self, theta, eval_gradient)
        seen.append((found.value, np.array(theta)))
        return found

    model = SparseGPRegressor(1.0 * KERNEL, noise="learn", optimizer=optimizer, random_state=0)
    monkeypatch.setattr(LogLikelihood, "__call__", breaking)
    with pytest.raises(error):
        model.fit(X, y)
    monkeypatch.undo()
    best = max(seen, key=lambda pair: pair[0])
    np.testing.assert_array_equal(model.theta_, best[1])
    fixed = SparseGPRegressor(model.kernel_, noise=model.noise_, optimizer=None).fit(X, y)
    np.testing.assert_allclose(model.predict(X), fixed.predict(X), atol=1e-10)
    assert model.log_marginal_likelihood() == pytest.approx(best[0], abs=1e-9)


def test_links_that_start_switched_off_are_found_when_they_exist():
    points = np.random.default_rng(0).random((500, 2)) * 4
    centres = [np.array([[0.7, 0.7], [3.3, 3.3]])]
    truth = Bumps(centres, 0.6, 3.0) + Wendland(0.5)
    drawn = sample_prior(truth, points, noise=0.05, random_state=4)[:, 0]
    start = Bumps(centres, 0.6, 0.0, radius_bounds="fixed") + Wendland(0.5, length_scale_bounds="fixed")
    model = SparseGPRegressor(start, noise=0.05).fit(points, drawn)
    plain = SparseGPRegressor(Wendland(0.5, length_scale_bounds="fixed"), noise=0.05).fit(points, drawn)
    assert model.kernel_.k1.amplitude > 1
    assert model.log_marginal_likelihood() > plain.log_marginal_likelihood() + 3
