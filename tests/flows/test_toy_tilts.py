"""Tilts of mixtures against importance sampling, the variational formula, and the value function's own equation."""

import pytest
import torch

from cameraready.flows._toy.mixtures import GaussianMixture, random_mixture
from cameraready.flows._toy.tilts import QuadraticReward, log_expectation, tilted, value

pytestmark = pytest.mark.torch


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def mixture():
    return random_mixture(2, 3, seeded(1))


LINEAR = QuadraticReward(torch.tensor([0.5, -0.3]), constant=0.2)
BOWL = QuadraticReward.closeness(torch.tensor([1.0, 0.5]), 1.5)
SADDLE = QuadraticReward(torch.tensor([0.1, 0.2]), torch.tensor([[0.15, 0.05], [0.05, -0.5]]))


@pytest.mark.parametrize("reward", [LINEAR, BOWL, SADDLE])
def test_expectation_and_tilted_law_against_weighted_draws(mixture, reward):
    x = mixture.sample(400_000, seeded(2))
    r = reward(x)
    weights = torch.softmax(r, 0)
    size = 1 / float((weights**2).sum())
    estimate = torch.logsumexp(r, 0) - torch.tensor(float(len(x))).log()
    assert abs(float(log_expectation(mixture, reward) - estimate)) < 5 * size**-0.5
    law = tilted(mixture, reward)
    mean = weights @ x
    covariance = (weights[:, None] * (x - mean)).T @ (x - mean)
    assert bool(((law.mean() - mean).abs() < 5 * covariance.diagonal().sqrt() * size**-0.5).all())
    torch.testing.assert_close(law.covariance(), covariance, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("reward", [LINEAR, BOWL, SADDLE])
def test_density_of_the_tilted_law(mixture, reward):
    x = torch.randn(20, 2, generator=seeded(3), dtype=torch.float64)
    expected = mixture.log_prob(x) + reward(x) - log_expectation(mixture, reward)
    torch.testing.assert_close(tilted(mixture, reward).log_prob(x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("t", [0.0, 0.3, 0.8])
def test_value_is_the_log_expectation_under_the_posterior(mixture, t):
    x = torch.randn(4, 2, generator=seeded(4), dtype=torch.float64)
    draws = mixture.posterior_sample(x, t, 100_000, seeded(5))
    r = SADDLE(draws)
    estimate = torch.logsumexp(r, 0) - torch.tensor(1e5).log()
    size = 1 / (torch.softmax(r, 0) ** 2).sum(0)
    assert bool(((value(mixture, x, t, SADDLE) - estimate).abs() < 5 * size**-0.5).all())
    each = torch.full((4,), t, dtype=torch.float64)
    torch.testing.assert_close(value(mixture, x, each, SADDLE), value(mixture, x, t, SADDLE), rtol=1e-10, atol=1e-10)


def test_doobs_drift_is_the_velocity_of_the_tilted_law(mixture):
    """v + (1 - t) / t grad V_t is the exact velocity towards p exp(r) / Z (linear path)."""
    t = 0.45
    x = torch.randn(6, 2, generator=seeded(6), dtype=torch.float64).requires_grad_()
    (gradient,) = torch.autograd.grad(value(mixture, x, t, SADDLE).sum(), x)
    steered = mixture.velocity()(x, t) + (1 - t) / t * gradient
    torch.testing.assert_close(steered, tilted(mixture, SADDLE).velocity()(x, t), rtol=1e-8, atol=1e-8)


def test_at_the_ends_the_value_is_a_constant_and_the_reward(mixture):
    x = torch.randn(4, 2, generator=seeded(7), dtype=torch.float64)
    torch.testing.assert_close(value(mixture, x, 0.0, BOWL), log_expectation(mixture, BOWL).expand(4))
    torch.testing.assert_close(value(mixture, x, 1.0, BOWL), BOWL(x))


def test_closeness_and_scaling():
    x = torch.randn(5, 2, generator=seeded(8), dtype=torch.float64)
    target = torch.tensor([1.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(BOWL(x), -(x - target).square().sum(1) / (2 * 1.5**2))
    torch.testing.assert_close(BOWL.scaled(3.0)(x), 3 * BOWL(x))


def test_what_has_no_expectation_is_told():
    wide = GaussianMixture(torch.ones(1), torch.zeros(1, 2), torch.tensor([4.0]))
    growing = QuadraticReward(torch.zeros(2), 0.3 * torch.eye(2))
    for call in (log_expectation, tilted):
        with pytest.raises(ValueError, match="infinite"):
            call(wide, growing)
    with pytest.raises(ValueError, match="reward is of 3 dimensions, the mixture of 2"):
        log_expectation(wide, QuadraticReward(torch.zeros(3)))
    with pytest.raises(ValueError, match="symmetric"):
        QuadraticReward(torch.zeros(2), torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
