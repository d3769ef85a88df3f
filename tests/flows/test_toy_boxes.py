"""The checkerboard against numerical integration, arbitrary precision, Monte Carlo, and far outside the board."""

import mpmath
import numpy as np
import pytest
import torch

from cameraready.flows._paths import CosinePath, LinearPath
from cameraready.flows._toy.boxes import Checkerboard, truncated_normal

pytestmark = pytest.mark.torch
BOARD = Checkerboard()


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("half", [1e-12, 1e-3, 0.3, 1.9, 2.1, 40.0, 1e5])
@pytest.mark.parametrize("centre", [0.0, 0.7, 2.0, -7.0, 29.9, 31.0, -1e3, 1e6])
def test_truncated_normals_in_arbitrary_precision(centre, half):
    found = truncated_normal(f64(centre), f64(half))
    with mpmath.workdps(60):
        c, h = mpmath.mpf(abs(centre)), mpmath.mpf(half)
        mass = (mpmath.erfc((c - h) / mpmath.sqrt(2)) - mpmath.erfc((c + h) / mpmath.sqrt(2))) / 2
        mean = (mpmath.npdf(c - h) - mpmath.npdf(c + h)) / mass
        log_density, place = float(mpmath.log(mass / (2 * h))), float((mean - c) / h)
    side = -1 if centre < 0 else 1
    assert float(found.log_density) == pytest.approx(log_density, rel=1e-12, abs=1e-12)
    assert float(found.mean) == pytest.approx(side * float(mean), rel=1e-12, abs=1e-10)
    assert float(found.place) == pytest.approx(side * place, abs=1e-10)


def test_truncated_normals_are_differentiable_across_their_three_formulas():
    centre = torch.linspace(-40, 40, 9, dtype=torch.float64)[:, None].requires_grad_()
    half = f64(0.01, 0.5, 3.0, 30.0).requires_grad_()

    def log_density(c, h):
        return truncated_normal(c, h).log_density

    (slope,) = torch.autograd.grad(log_density(centre, half).sum(), centre)
    with torch.no_grad():  # d/dc of the mean density: minus the mean of the truncated law
        torch.testing.assert_close(
            slope, -truncated_normal(centre, half).mean.sum(1, keepdim=True), rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("path", [LinearPath(), CosinePath()])
@pytest.mark.parametrize("t", [1e-5, 0.2, 0.6, 0.95])
def test_velocity_against_numerical_integration(path, t):
    """The posterior mean by Gauss-Legendre quadrature over every square."""
    x = 1.5 * torch.randn(5, 2, generator=seeded(1), dtype=torch.float64)
    alpha, sigma = path.alpha(t), path.sigma(t)
    nodes, weights = (torch.from_numpy(v) for v in np.polynomial.legendre.leggauss(200))
    grid = BOARD.centres[:, None] + BOARD.half * nodes[:, None]  # (boxes, nodes, 2)
    exponent = -((x[:, None, None] - alpha * grid) ** 2) / (2 * sigma**2)
    highest = exponent.amax(
        (1, 2), keepdim=True
    )  # for each state and coordinate, else all squares underflow far outside
    likelihood = torch.exp((exponent - highest).clamp_min(-500)) * weights[:, None]
    mass = likelihood.sum(2)  # (states, boxes, 2)
    inside = (likelihood * grid).sum(2) / mass
    share = mass.prod(-1)
    mean = (share[..., None] * inside).sum(1) / share.sum(1, keepdim=True)
    torch.testing.assert_close(BOARD.posterior_mean(x, t, path), mean, rtol=1e-8, atol=1e-8)
    expected = path.d_alpha(t) * mean + path.d_sigma(t) * (x - alpha * mean) / sigma
    torch.testing.assert_close(BOARD.velocity(path)(x, t), expected, rtol=1e-7, atol=1e-7)


def test_velocity_follows_from_the_gradient_of_the_log_density():
    t = torch.linspace(0.05, 0.95, 8, dtype=torch.float64)
    x = 2 * torch.randn(8, 2, generator=seeded(2), dtype=torch.float64).requires_grad_()
    (score,) = torch.autograd.grad(BOARD.marginal_log_prob(x, t).sum(), x)
    expected = (x + (1 - t)[:, None] * score) / t[:, None]
    torch.testing.assert_close(BOARD.velocity()(x, t), expected, rtol=1e-6, atol=1e-6)


def test_far_outside_the_velocity_points_at_the_nearest_square():
    """The posterior there is an exponential of mean sigma^2 / (alpha distance) from the nearest edge."""
    t = 0.5
    for distance in (1e2, 1e4, 1e6):
        x = f64(distance, 1.5)[None]
        mean = BOARD.posterior_mean(x, t)
        assert float(mean[0, 0]) == pytest.approx(2 - (1 - t) ** 2 / (t * (distance - 2 * t)), rel=1e-3)
        torch.testing.assert_close(BOARD.velocity()(x, t)[0, 0], (mean[0, 0] - distance) / (1 - t), rtol=1e-9, atol=0)
    assert bool(BOARD.velocity()(f64(-1e8, 1e8)[None], 0.01).isfinite().all())


def test_both_ends():
    v, x = BOARD.velocity(), f64(-1.5, -1.3, 0.5, 0.6, 1.7, -0.4).view(3, 2)
    assert bool(BOARD.log_prob(x).isfinite().all())
    torch.testing.assert_close(v(x, 0.0), -x, rtol=0, atol=1e-12)  # the board's mean is zero
    torch.testing.assert_close(v(x, 1.0), x)
    torch.testing.assert_close(v(x, 1 - 1e-6), x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(BOARD.posterior_mean(x, 1.0), x)
    assert bool(v(f64(0.5, -0.5)[None], 1.0).isfinite().all())  # an empty square
    normal = torch.distributions.Normal(0.0, 1.0)
    torch.testing.assert_close(BOARD.marginal_log_prob(x, 0.0), normal.log_prob(x).sum(1), rtol=1e-9, atol=1e-9)


def test_transport_fills_the_squares_evenly():
    v, steps = BOARD.velocity(), 50
    x = torch.randn(1500, 2, generator=seeded(3))
    assert v(x, 0.3).dtype == torch.float32
    for i in range(steps):
        half = x + v(x, i / steps) / (2 * steps)
        x = x + v(half, (i + 0.5) / steps) / steps
    inside = BOARD.log_prob(x).isfinite()
    assert float(inside.float().mean()) > 0.97
    box = ((x[:, None] - BOARD.centres).abs().amax(-1)).argmin(1)
    share = torch.bincount(box, minlength=8) / len(x)
    assert float((share - 1 / 8).abs().max()) < 5 * (1 / 8 * 7 / 8 / len(x)) ** 0.5


def test_samples_and_mistakes():
    x = BOARD.sample(4000, seeded(4))
    assert bool(BOARD.log_prob(x).isfinite().all())
    assert float(x.mean(0).abs().max()) < 5 * 1.2 / 4000**0.5
    big = Checkerboard(6, extent=3.0)
    assert len(big.centres) == 18
    assert float(big.log_prob(big.centres[:1]).exp()) == pytest.approx(1 / 18)
    with pytest.raises(ValueError, match="at least 2 squares"):
        Checkerboard(1)
    with pytest.raises(ValueError, match="no labels"):
        BOARD.velocity()(x, 0.5, torch.zeros(4000))
    with pytest.raises(ValueError, match=r"state must be \(B, 2\)"):
        BOARD.velocity()(torch.zeros(3, 3), 0.5)
