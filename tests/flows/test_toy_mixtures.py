"""Mixtures against autograd, Monte Carlo, importance sampling, Bayes' rule for Gaussians, and their limits at both ends of time."""

import math

import pytest
import torch

from cameraready.flows._paths import CosinePath, LinearPath
from cameraready.flows._toy.mixtures import GaussianMixture, eight_gaussians, random_mixture, spiked

pytestmark = pytest.mark.torch
PATHS = [LinearPath(), CosinePath()]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=["full", "isotropic"])
def mixture(request):
    full = random_mixture(3, 4, seeded(1))
    if request.param == "full":
        return full
    return GaussianMixture(full.weights, full.means, torch.tensor([0.1, 0.5, 1.0, 2.0]))


@pytest.fixture
def states():
    return 2 * torch.randn(6, 3, generator=seeded(2), dtype=torch.float64)


def test_density_is_that_of_torch_distributions(mixture, states):
    d = torch.distributions
    reference = d.MixtureSameFamily(
        d.Categorical(mixture.weights), d.MultivariateNormal(mixture.means, mixture.covariances)
    )
    torch.testing.assert_close(mixture.log_prob(states), reference.log_prob(states), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(mixture.mean(), reference.mean)


def test_score_is_the_gradient_of_the_log_density(mixture, states):
    x = states.requires_grad_()
    (gradient,) = torch.autograd.grad(mixture.log_prob(x).sum(), x)
    torch.testing.assert_close(mixture.score(x), gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("t", [0.05, 0.5, 0.93])
def test_velocity_follows_from_the_gradient_of_the_marginal_log_density(mixture, states, path, t):
    """v = (alpha'/alpha) x + (alpha'/alpha sigma^2 - sigma sigma') score, for any law of the data."""
    x = states.requires_grad_()
    marginal = mixture.marginal(t, path)
    (score,) = torch.autograd.grad(marginal.log_prob(x).sum(), x)
    ratio, sigma = path.d_alpha(t) / path.alpha(t), path.sigma(t)
    expected = ratio * x + (ratio * sigma**2 - sigma * path.d_sigma(t)) * score
    torch.testing.assert_close(mixture.velocity(path)(x, t), expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(mixture.marginal_score(x, t, path), score, rtol=1e-8, atol=1e-8)


def test_velocity_and_posterior_against_importance_sampling(mixture, states):
    """Data drawn from the prior, weighted by the likelihood of the state."""
    n, t, path = 400_000, 0.4, CosinePath()
    alpha, sigma = path.alpha(t), path.sigma(t)
    x1 = mixture.sample(n, seeded(3))
    velocity, posterior = mixture.velocity(path)(states, t), mixture.posterior(states, t, path)
    for i, x in enumerate(states[:3]):
        weights = torch.softmax(-((x - alpha * x1) ** 2).sum(1) / (2 * sigma**2), 0)
        size = 1 / float((weights**2).sum())
        assert size > 500
        mean = weights @ x1
        covariance = (weights[:, None] * (x1 - mean)).T @ (x1 - mean)
        spread = covariance.diagonal().sqrt()
        tolerance = 5 * spread / size**0.5
        assert bool(((posterior.mean[i] - mean).abs() < tolerance).all())
        estimate = path.d_alpha(t) * mean + path.d_sigma(t) * (x - alpha * mean) / sigma
        factor = abs(path.d_alpha(t) - path.d_sigma(t) * alpha / sigma)
        assert bool(((velocity[i] - estimate).abs() < factor * tolerance).all())
        assert bool(((posterior.covariance[i] - covariance).abs() < 10 * torch.outer(spread, spread) / size**0.5).all())


def test_transport_along_the_velocity_reproduces_the_mixture():
    """The flow's map of noise, many small steps, has the mixture's mean and covariance."""
    mixture = random_mixture(2, 3, seeded(4))
    v, x, steps = mixture.velocity(), torch.randn(8_000, 2, generator=seeded(5), dtype=torch.float64), 50
    for i in range(steps):
        half = x + v(x, i / steps) / (2 * steps)
        x = x + v(half, (i + 0.5) / steps) / steps
    spread = mixture.covariance().diagonal().sqrt()
    assert bool(((x.mean(0) - mixture.mean()).abs() < 5 * spread / len(x) ** 0.5).all())
    torch.testing.assert_close(x.T.cov(), mixture.covariance(), rtol=0.06, atol=0.08)


@pytest.mark.parametrize("path", PATHS)
def test_posterior_of_one_gaussian_is_bayes_rule(states, path):
    covariance = random_mixture(3, 1, seeded(6)).covariances
    mean, t = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), 0.6
    gaussian = GaussianMixture(torch.ones(1), mean[None], covariance)
    alpha, sigma = path.alpha(t), path.sigma(t)
    precision = torch.linalg.inv(covariance[0]) + alpha**2 / sigma**2 * torch.eye(3, dtype=torch.float64)
    expected = torch.linalg.solve(precision, (torch.linalg.inv(covariance[0]) @ mean + alpha / sigma**2 * states).T).T
    found = gaussian.posterior(states, t, path)
    torch.testing.assert_close(found.mean, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.covariance[0], torch.linalg.inv(precision), rtol=1e-9, atol=1e-9)
    assert bool((found.weights == 1).all())


@pytest.mark.parametrize("path", PATHS)
def test_at_the_noise_end_the_posterior_is_the_mixture(mixture, states, path):
    found = mixture.posterior(states, 0.0, path)
    torch.testing.assert_close(found.weights, mixture.weights.expand(6, -1))
    torch.testing.assert_close(found.means, mixture.means.expand(6, -1, -1))
    torch.testing.assert_close(found.covariances, mixture.covariances)
    expected = path.d_alpha(0.0) * mixture.mean() + path.d_sigma(0.0) * states
    torch.testing.assert_close(mixture.velocity(path)(states, 0.0), expected)


@pytest.mark.parametrize("path", PATHS)
def test_at_the_data_end_the_posterior_is_a_point(mixture, states, path):
    found = mixture.posterior(states, 1.0, path)
    torch.testing.assert_close(found.mean, states)
    assert bool((found.covariances == 0).all())
    torch.testing.assert_close(mixture.posterior_sample(states, 1.0, 2, seeded(), path)[1], states)
    # v = alpha' x + sigma' E[x0]: no noise is expected in a state that holds none
    torch.testing.assert_close(mixture.velocity(path)(states, 1.0), path.d_alpha(1.0) * states)
    near = mixture.velocity(path)(states, 1 - 1e-7)
    torch.testing.assert_close(near, path.d_alpha(1.0) * states, rtol=1e-4, atol=1e-4)


def test_posterior_draws_have_the_posterior_moments_and_depend_on_the_generator_alone(mixture, states):
    n, t = 40_000, torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9, 0.4])
    before = torch.get_rng_state()
    draws = mixture.posterior_sample(states, t, n, seeded(8))
    assert torch.equal(before, torch.get_rng_state())
    assert draws.shape == (n, 6, 3)
    assert torch.equal(draws, mixture.posterior_sample(states, t, n, seeded(8)))
    posterior = mixture.posterior(states, t)
    spread = posterior.covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    assert bool(((draws.mean(0) - posterior.mean).abs() < 5 * spread / n**0.5).all())
    found = torch.stack([draws[:, i].T.cov() for i in range(6)])
    scale = spread[:, :, None] * spread[:, None, :]
    assert bool(((found - posterior.covariance).abs() < 0.08 * scale).all())


def test_samples_have_the_moments_and_labels_choose_components(mixture):
    n = 40_000
    x = mixture.sample(n, seeded(9))
    spread = mixture.covariance().diagonal().sqrt()
    assert bool(((x.mean(0) - mixture.mean()).abs() < 5 * spread / n**0.5).all())
    torch.testing.assert_close(x.T.cov(), mixture.covariance(), rtol=0.05, atol=0.1)
    own = mixture.sample(n, seeded(9), labels=torch.full((n,), 2))
    torch.testing.assert_close(own.T.cov(), mixture.covariances[2], rtol=0.05, atol=0.03)


def test_labels_restrict_the_flow_to_a_component_and_the_null_label_to_none(mixture, states):
    v = mixture.velocity()
    one = GaussianMixture(torch.ones(1), mixture.means[1:2], mixture.covariances[1:2])
    y = torch.full((6,), 1)
    torch.testing.assert_close(v(states, 0.3, y), one.velocity()(states, 0.3), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(v(states, 0.3, torch.full((6,), 4)), v(states, 0.3))


def test_times_of_each_state_dtypes_jvp_and_vmap(mixture, states):
    v, t = mixture.velocity(CosinePath()), torch.linspace(0, 1, 6, dtype=torch.float64)
    each = torch.cat([v(states[i : i + 1], float(t[i])) for i in range(6)])
    torch.testing.assert_close(v(states, t), each)
    torch.testing.assert_close(torch.vmap(v)(states, t), each)
    assert v(states.float(), 0.5).dtype == torch.float32
    assert v(states.bfloat16(), 0.5).dtype == torch.bfloat16
    _, slope = torch.func.jvp(v, (states, t), (torch.zeros_like(states), torch.ones_like(t)))
    step = 1e-6
    inner = slice(1, 5)
    numeric = (v(states, t + step) - v(states, t - step)) / (2 * step)
    torch.testing.assert_close(slope[inner], numeric[inner], rtol=1e-5, atol=1e-5)


def test_far_away_nothing_overflows(mixture):
    far = torch.full((1, 3), 1e4, dtype=torch.float64)
    for t in (0.0, 0.5, 1.0):
        assert bool(mixture.velocity()(far, t).isfinite().all())
        assert bool(mixture.posterior(far, t).mean.isfinite().all())


def test_named_mixtures():
    ring = eight_gaussians(radius=3.0, std=0.1)
    torch.testing.assert_close(ring.means.norm(dim=1), torch.full((8,), 3.0, dtype=torch.float64))
    assert float(ring.covariances[5, 1, 1]) == pytest.approx(0.01)
    law, u = spiked(6, [3.0, -0.5], seeded(1))
    torch.testing.assert_close(u.T @ u, torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(law.covariances[0] @ u, u * torch.tensor([4.0, 0.5], dtype=torch.float64))
    assert float(law.log_prob(torch.zeros(1, 6, dtype=torch.float64))) == pytest.approx(
        -3 * math.log(2 * math.pi) - 0.5 * math.log(2)
    )


@pytest.mark.parametrize(
    ("weights", "covariances", "message"),
    [
        ([0.5, 0.4], [1.0, 1.0], "sum to 1, got a sum of 0.9"),
        ([1.5, -0.5], [1.0, 1.0], "must be positive"),
        ([0.5, 0.5], [1.0, 0.0], "positive definite"),
        ([0.5, 0.5], [[[1.0, 2.0], [0.0, 1.0]]] * 2, "symmetric"),
        ([0.5, 0.5], [1.0], r"\(2, 2, 2\), or \(2,\) variances"),
        ([1.0], [1.0, 1.0], r"means must be \(K, D\)"),
    ],
)
def test_what_is_no_mixture_is_told(weights, covariances, message):
    with pytest.raises(ValueError, match=message):
        GaussianMixture(torch.tensor(weights), torch.zeros(2, 2), torch.tensor(covariances))


def test_times_and_labels_that_are_not_one_for_each_state_are_told(mixture):
    from cameraready.flows._toy.boxes import Checkerboard

    x, few = torch.zeros(4, 3), torch.rand(3)
    for ask in (mixture.velocity(), mixture.marginal_score, mixture.posterior, Checkerboard().velocity()):
        states = x[:, :2] if "Checkerboard" in ask.__qualname__ else x
        for t in (torch.rand(4, 1), few):
            with pytest.raises(ValueError, match=r"the time has shape .* give one for all or one for each state"):
                ask(states, t)
        assert ask(states, torch.rand(4)) is not None
    with pytest.raises(ValueError, match=r"the time has shape \(4,\); for states of shape \(4, 1, 1, 3\)"):
        mixture.velocity()(x[:, None, None], torch.rand(4))
    for y in (torch.zeros(3, dtype=torch.long), torch.zeros(4, 1, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"the label has shape .* give one for all or one for each state"):
            mixture.velocity()(x, 0.5, y)
    assert mixture.velocity()(torch.zeros(2, 4, 3), torch.rand(2, 1), torch.tensor(1)).shape == (2, 4, 3)  # stacked


def test_a_state_of_another_dimension_is_told(mixture):
    with pytest.raises(ValueError, match=r"state must be \(B, 3\), got shape \(5, 2\)"):
        mixture.velocity()(torch.zeros(5, 2), 0.5)
