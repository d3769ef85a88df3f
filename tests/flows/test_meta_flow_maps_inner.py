"""The closed-form inner velocity is the velocity of the posterior's own flow, and its draws are posterior draws."""

import math
from dataclasses import dataclass

import pytest
import torch

from cameraready.flows import CosinePath, LinearPath, Path
from cameraready.flows._toy.mixtures import GaussianMixture, random_mixture
from cameraready.flows.meta_flow_maps import PosteriorFlow, inner_velocity
from cameraready.flows.meta_flow_maps.inner import inner_flow
from tests.flows.mfm_exact import F64, generator, noise

pytestmark = pytest.mark.torch
TIMES = (0.0, 0.01, 0.3, 0.7, 0.95, 0.999, 1.0)


@dataclass(frozen=True)
class Bent(Path):
    """Neither linear nor variance preserving, and its times are found by bisection."""

    def alpha(self, t):
        return t * (1 + t) / 2

    def sigma(self, t):
        return 1 - t**2

    def d_alpha(self, t):
        return 0.5 + t

    def d_sigma(self, t):
        return -2 * t


every_path = pytest.mark.parametrize("path", [LinearPath(), CosinePath(), Bent()], ids=lambda p: type(p).__name__)


@every_path
@pytest.mark.parametrize("components", [1, 4])
def test_it_is_the_velocity_of_the_flow_to_the_analytic_posterior_at_every_s_and_t(path, components):
    mixture = random_mixture(3, components, generator(components))
    u = inner_velocity(mixture.velocity(path), path)
    x, y = noise(2, 3, seed=1), noise(2, 3, seed=2)
    for t in TIMES[:-1]:
        posterior = mixture.posterior(x, t, path)
        for row in range(2):
            law = GaussianMixture(posterior.weights[row].clamp(min=1e-300), posterior.means[row], posterior.covariances)
            for s in TIMES:
                expected = law.velocity(path)(y[row : row + 1], s)
                found = u(s, y[row : row + 1], t, x[row : row + 1])
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@every_path
def test_where_the_state_is_clean_the_flow_goes_straight_to_it(path):
    x, y = noise(4, 3, seed=1), noise(4, 3, seed=2)
    u = inner_velocity(random_mixture(3, 4).velocity(path), path)
    for s in TIMES[:-1]:
        rate = path.d_sigma(s) / path.sigma(s)
        torch.testing.assert_close(
            u(s, y, 1.0, x), path.d_alpha(s) * x + rate * (y - path.alpha(s) * x), rtol=1e-6, atol=1e-6
        )
    assert torch.isfinite(u(1.0, y, 1.0, x)).all()  # where there is none


@every_path
def test_at_t_0_it_is_the_velocity_itself_whatever_the_state(path):
    v = random_mixture(3, 4).velocity(path)
    y = noise(4, 3)
    for s in TIMES:
        torch.testing.assert_close(
            inner_velocity(v, path)(s, y, 0.0, noise(4, 3, seed=9)), v(y, s), rtol=1e-9, atol=1e-9
        )


@every_path
def test_precisions_add_and_the_merged_state_is_the_sufficient_statistic(path):
    s, t = torch.meshgrid(
        torch.linspace(0.01, 0.99, 9, dtype=F64), torch.linspace(0.01, 0.99, 9, dtype=F64), indexing="ij"
    )
    flow = inner_flow(s, t, path)
    torch.testing.assert_close(path.snr(flow.time), path.snr(s) + path.snr(t), rtol=1e-9, atol=0)
    one, two = (path.alpha(c) / path.sigma(c) ** 2 for c in (t, s))
    scale = path.sigma(flow.time) ** 2 / path.alpha(flow.time)
    torch.testing.assert_close(flow.from_x, scale * one, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(flow.from_y, scale * two, rtol=1e-9, atol=1e-12)


def test_times_for_each_state_and_derivatives_at_the_corner_are_regular():
    v = random_mixture(3, 4).velocity()
    u = inner_velocity(v)
    s, t = torch.tensor([0.0, 0.2, 1.0], dtype=F64), torch.tensor([0.0, 0.6, 0.3], dtype=F64)
    x, y = noise(3, 3, seed=1), noise(3, 3, seed=2)
    each = torch.cat([u(float(s[i]), y[i : i + 1], float(t[i]), x[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(u(s, y, t, x), each)
    _, slope = torch.func.jvp(lambda start: u(start, y, t, x), (s,), (torch.ones_like(s),))
    assert torch.isfinite(slope).all()


@pytest.mark.parametrize("t", [0.0, 0.2, 0.5, 0.8, 0.97, 1.0])
def test_draws_have_the_posterior_mean_covariance_and_mode_weights(t):
    mixture = GaussianMixture(
        torch.tensor([0.3, 0.7]), torch.tensor([[-1.5, 0.5], [1.0, 0.0]]), torch.tensor([0.05, 0.1])
    )
    x = torch.tensor([[-0.1, 0.1], [0.2, 0.3]], dtype=F64)
    n = 4000
    draws = PosteriorFlow(mixture.velocity(), steps=24).sample_posterior(x, t, n, generator=generator(3))
    law = mixture.posterior(x, t)
    spread = law.covariance.diagonal(dim1=1, dim2=2).sqrt()
    assert ((draws.mean(0) - law.mean).abs() <= 5 * spread / math.sqrt(n) + 2e-3).all()
    found = torch.stack([draws[:, i].T.cov() for i in range(2)])
    assert ((found - law.covariance).abs() <= 0.12 * spread[:, :, None] * spread[:, None] + 2e-3).all()
    if t < 1:
        nearer = (draws - mixture.means[0]).norm(dim=-1) < (draws - mixture.means[1]).norm(dim=-1)
        exact = mixture.posterior_sample(x, t, 40_000, generator(4))
        right = ((exact - mixture.means[0]).norm(dim=-1) < (exact - mixture.means[1]).norm(dim=-1)).double().mean(0)
        assert ((nearer.double().mean(0) - right).abs() <= 5 * (right * (1 - right) / n).sqrt() + 5e-3).all()


def test_the_gradient_through_a_draw_is_that_of_finite_differences():
    flow = PosteriorFlow(random_mixture(3, 4).velocity(), steps=6)
    eps, direction = noise(1, 2, 3, seed=1), noise(2, 3, seed=5)
    x = noise(2, 3, seed=2).requires_grad_()

    def total(state):
        return (flow.sample_posterior(state, 0.4, 1, noise=eps) ** 2).sum()

    (slope,) = torch.autograd.grad(total(x), x)
    h = 1e-5
    with torch.no_grad():
        difference = (total(x + h * direction) - total(x - h * direction)) / (2 * h)
    torch.testing.assert_close((slope * direction).sum(), difference, rtol=1e-7, atol=1e-7)


def test_it_counts_states_and_refuses_what_is_wrong():
    flow = PosteriorFlow(random_mixture(3, 4).velocity(), steps=3)
    flow.sample_posterior(noise(5, 3), 0.5, 2)
    assert flow.evaluations == 3 * 2 * 5 * 2
    with pytest.raises(ValueError, match="at least 1"):
        flow.sample_posterior(noise(5, 3), 0.5, 0)
    with pytest.raises(ValueError, match="noise must have the shape"):
        flow.sample_posterior(noise(5, 3), 0.5, 2, noise=noise(5, 3))
    for steps in (0, -2):
        with pytest.raises(ValueError, match="steps must be at least 1"):
            flow.sample_posterior(noise(5, 3), 0.5, steps=steps)
    with pytest.raises(ValueError, match="times run from 0"):
        flow.sample_posterior(noise(5, 3), 500.0)
    with pytest.raises(ValueError, match="one for each of the 5 states"):
        flow.sample_posterior(noise(5, 3), torch.rand(3))
    with pytest.raises(ValueError, match="one label for each of the 5"):
        flow.sample_posterior(noise(5, 3), 0.5, label=torch.zeros(4, dtype=torch.long))
    with pytest.raises(FloatingPointError, match="not finite"):
        PosteriorFlow(lambda x, t, y=None: x * math.nan).sample_posterior(noise(5, 3), 0.5)
