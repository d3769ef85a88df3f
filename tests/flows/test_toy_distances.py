"""Distances between samples against naive loops, scipy, closed forms, and their expectation for equal laws."""

import numpy as np
import pytest
import torch
from scipy import linalg, stats

from cameraready.flows._toy import distances
from cameraready.flows._toy.distances import energy_distance, frechet, frechet_gaussians, sliced_wasserstein

pytestmark = pytest.mark.torch


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive(x, y):
    def mean(a, b, skip):
        pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if not (skip and i == j)]
        return sum(float((a[i] - b[j]).norm()) for i, j in pairs) / len(pairs)

    return 2 * mean(x, y, False) - mean(x, x, True) - mean(y, y, True)


@pytest.mark.parametrize("block", [7, 1 << 22])
def test_energy_distance_is_that_of_a_naive_loop(monkeypatch, block):
    monkeypatch.setattr(distances, "_BLOCK", block)
    x, y = normal(9, 3), 1 + 2 * normal(7, 3, seed=1)
    assert float(energy_distance(x, y)) == pytest.approx(naive(x, y), rel=1e-9)
    both = energy_distance(torch.stack([x[:7], y]), torch.stack([y, x[2:]]))
    assert both.tolist() == pytest.approx([naive(x[:7], y), naive(y, x[2:])], rel=1e-9)
    assert float(energy_distance(x.view(9, 1, 3, 1), y.view(7, 1, 3, 1))) == pytest.approx(naive(x, y), rel=1e-9)


def test_energy_distance_is_the_square_of_scipys_up_to_its_bias():
    """In one dimension scipy has the biased (V-statistic) form, under a root."""
    x, y = normal(400, 1), normal(300, 1, seed=1) + 0.8
    n, m = 400, 300
    biased = (
        float(energy_distance(x, y))
        + float(torch.cdist(x, x).sum()) * (1 / (n * (n - 1)) - 1 / n**2)
        + float(torch.cdist(y, y).sum()) * (1 / (m * (m - 1)) - 1 / m**2)
    )
    assert biased == pytest.approx(stats.energy_distance(x[:, 0].numpy(), y[:, 0].numpy()) ** 2, rel=1e-9)


def test_energy_distance_is_zero_in_expectation_for_equal_laws_and_not_for_others():
    found = energy_distance(normal(400, 20, 2), normal(400, 20, 2, seed=1))
    assert abs(float(found.mean())) < 4 * float(found.std()) / 20
    assert float(found.min()) < 0
    moved = energy_distance(normal(400, 20, 2), normal(400, 20, 2, seed=1) + 0.5)
    assert float(moved.mean()) > 8 * float(moved.std()) / 20


def test_energy_distance_pulls_samples_together():
    x = normal(50, 2).requires_grad_()
    (gradient,) = torch.autograd.grad(energy_distance(x, normal(60, 2, seed=1) + 3), x)
    assert bool((gradient.mean(0) < 0).all())
    step = 1e-6 * normal(50, 2, seed=2)
    with torch.no_grad():
        y = normal(60, 2, seed=1) + 3
        numeric = (energy_distance(x + step, y) - energy_distance(x - step, y)) / 2
    assert float((gradient * step).sum()) == pytest.approx(float(numeric), rel=1e-3)


@pytest.mark.parametrize(("n", "m"), [(50, 50), (50, 35), (8, 30)])
def test_in_one_dimension_wasserstein_is_scipys(n, m):
    x, y = normal(n, 1), 2 * normal(m, 1, seed=1) + 0.3
    found = float(sliced_wasserstein(x, y, torch.Generator()))
    assert found == pytest.approx(stats.wasserstein_distance(x[:, 0].numpy(), y[:, 0].numpy()), rel=1e-9)
    # the second order by the quantile functions on the common refinement
    grid = np.repeat(np.sort(x[:, 0].numpy()), m), np.repeat(np.sort(y[:, 0].numpy()), n)
    second = float(sliced_wasserstein(x, y, torch.Generator(), order=2))
    assert second == pytest.approx(np.sqrt(np.mean((grid[0] - grid[1]) ** 2)), rel=1e-9)


def test_sliced_wasserstein_of_a_shift_is_its_closed_form():
    """Projections of a shift s have mean square |s|^2 / D."""
    x, shift = normal(40, 6), 0.7 * torch.arange(6.0)
    found = sliced_wasserstein(x, x + shift, torch.Generator().manual_seed(3), projections=4000, order=2)
    assert float(found) == pytest.approx(float(shift.norm()) / 6**0.5, rel=0.04)
    assert float(sliced_wasserstein(x, x, torch.Generator())) == 0
    one, two = (sliced_wasserstein(x, x + shift, torch.Generator().manual_seed(s)) for s in (1, 1))
    assert float(one) == float(two)


def test_frechet_against_the_closed_form():
    a, b = normal(4, 4), normal(4, 4, seed=1)
    a, b = a @ a.T, b @ b.T
    root = linalg.sqrtm(a.numpy() @ b.numpy()).real
    mean = normal(2, 4, seed=2)
    expected = float((mean[0] - mean[1]).square().sum() + a.trace() + b.trace()) - 2 * np.trace(root)
    assert float(frechet_gaussians(mean[0], a, mean[1], b)) == pytest.approx(expected, rel=1e-8)
    diagonal = frechet_gaussians(mean[0], 4 * torch.eye(4).double(), mean[0], 9 * torch.eye(4).double())
    assert float(diagonal) == pytest.approx(4.0)  # four times (3 - 2)^2


def test_frechet_of_samples_uses_their_moments():
    x = normal(300, 3)
    y = 2 * x + 1
    mean, cov = x.mean(0), torch.from_numpy(np.cov(x.numpy().T))
    assert float(frechet(x, y)) == pytest.approx(float((mean + 1).square().sum() + cov.trace()), rel=1e-9)
    assert float(frechet(x, x)) == pytest.approx(0, abs=1e-9)
    assert float(frechet(x[:, :1], y[:, :1])) == pytest.approx(float((mean[0] + 1) ** 2 + cov[0, 0]), rel=1e-9)


def test_mistakes_are_named():
    x = normal(5, 2)
    with pytest.raises(ValueError, match="same dimension, got 2 and 3"):
        energy_distance(x, normal(5, 3))
    with pytest.raises(ValueError, match="at least two draws"):
        energy_distance(x, x[:1])
    with pytest.raises(ValueError, match="order must be 1 or 2"):
        sliced_wasserstein(x, x, torch.Generator(), order=3)
    with pytest.raises(ValueError, match="features must be"):
        frechet(x, x[:1])
