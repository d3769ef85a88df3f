"""Coupled clipping removes the bias of clipping, whatever the thresholds' size; thresholds and budget shares are what they say."""

import itertools
import math

import numpy as np
import pytest
import torch

from cameraready.optim.dp_c4 import (
    ConstantThreshold,
    GeometricThreshold,
    MovementThreshold,
    PolynomialThreshold,
    ThresholdSchedule,
    coupled_clip,
    noise_shares,
)

pytestmark = pytest.mark.torch


def descend(points, schedule, steps, *, coupled=True, lr=0.5):
    """Gradient descent on the mean of (x - a_i)^2 / 2 with clipped gradients."""
    a = torch.tensor(points, dtype=torch.float64)
    x, running = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    references = torch.zeros(len(a), 1, dtype=torch.float64)
    for step in range(steps):
        found = coupled_clip((x - a)[:, None], references, schedule(step, 0.0))
        if coupled:
            references = found.references
            running = running + found.delta.mean()
            torch.testing.assert_close(running, references.mean())
        else:
            running = found.delta.mean()
        x = x - lr * running
    return float(x)


def test_closed_forms():
    g = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    found = coupled_clip(g, torch.zeros_like(g), 1.0)
    torch.testing.assert_close(found.delta, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(found.clipped_fraction, torch.tensor(1 / 3, dtype=torch.float64))
    again = coupled_clip(g, found.references, 10.0)
    torch.testing.assert_close(again.references, g)
    assert again.clipped_fraction == 0.0


def test_at_a_point_that_stays_put_references_arrive_after_distance_over_threshold_steps():
    g = torch.tensor([[6.0, 8.0]], dtype=torch.float64)
    references = torch.zeros_like(g)
    for step in range(4):
        assert (references - g).norm().item() == pytest.approx(10 - 2.5 * step)
        references = coupled_clip(g, references, 2.5).references
    torch.testing.assert_close(references, g)


def test_three_points_plain_clipping_stalls_and_coupled_clipping_arrives():
    assert descend((0.0, 0.0, 10.0), ConstantThreshold(1.0), 400, coupled=False) == pytest.approx(0.5)
    for schedule in (ConstantThreshold(1.0), GeometricThreshold(1.0, 0.99), GeometricThreshold(1.0, 0.8, floor=0.05)):
        assert descend((0.0, 0.0, 10.0), schedule, 600) == pytest.approx(10 / 3, abs=1e-9)


def test_thresholds_with_too_small_a_sum_diverge():
    """The far point's gradient at the optimum is 20 / 3; thresholds 0.8 ** t add up to 5."""
    schedule = GeometricThreshold(1.0, 0.8)
    at = [descend((0.0, 0.0, 10.0), schedule, steps) for steps in (200, 400, 600)]
    assert at[2] - 10 / 3 > 10
    assert at[2] - at[1] == pytest.approx(at[1] - at[0])  # in proportion to the steps


def test_length_never_exceeds_the_threshold_and_direction_is_kept():
    generator = torch.Generator().manual_seed(0)
    for scale, threshold in itertools.product((1e-30, 1e-3, 1.0, 1e30), (1e-32, 1e-12, 0.7, 1e12)):
        for dtype in (torch.float32, torch.float64):
            g = scale * torch.randn(50, 3, 2, generator=generator, dtype=dtype)
            delta = coupled_clip(g, torch.zeros_like(g), threshold).delta.double().reshape(50, -1)
            largest = delta.abs().amax(dim=1, keepdim=True).clamp(min=1e-300)
            lengths = (delta / largest).norm(dim=1) * largest[:, 0]
            assert (lengths <= threshold * (1 + 1e-6)).all()
            wanted = (g.double() / scale).reshape(50, -1)
            cosine = torch.nn.functional.cosine_similarity(delta / largest, wanted)
            assert (cosine > 1 - 1e-6).all()


def test_half_precision_norms_do_not_overflow():
    g = torch.full((1, 400), 6e4, dtype=torch.float16)  # the norm, 1.2e6, is beyond half precision
    found = coupled_clip(g, torch.zeros_like(g), 20.0)
    assert found.delta.dtype == torch.float16
    torch.testing.assert_close(found.delta.float(), torch.full((1, 400), 1.0))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_record_whose_gradient_is_not_finite_has_no_influence(bad):
    g = torch.tensor([[1.0, 0.0], [bad, 1.0]])
    found = coupled_clip(g, torch.zeros_like(g), 1.0)
    assert torch.equal(found.delta, torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    assert torch.isfinite(found.references).all()


def test_edges():
    empty = coupled_clip(torch.zeros(0, 3), torch.zeros(0, 3), 1.0)
    assert empty.delta.shape == (0, 3)
    assert empty.clipped_fraction == 0.0
    assert not coupled_clip(torch.ones(2, 3), torch.zeros(2, 3), 0.0).delta.any()
    with pytest.raises(ValueError, match="must both be"):
        coupled_clip(torch.ones(2, 3), torch.ones(1, 3), 1.0)
    for threshold in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="threshold"):
            coupled_clip(torch.ones(2, 3), torch.ones(2, 3), threshold)


def test_schedules_depend_on_public_numbers_alone():
    assert [GeometricThreshold(8.0, 0.5, floor=1.5)(t) for t in range(4)] == [8.0, 4.0, 2.0, 1.5]
    assert [PolynomialThreshold(6.0, 1.0, floor=2.5)(t) for t in range(3)] == [6.0, 3.0, 2.5]
    moving = MovementThreshold(2.0, anchor=9.0, cap=5.0, floor=0.5)
    assert [moving(0, movement) for movement in (0.0, 1.0, 100.0)] == [0.5, 2.0, 5.0]
    assert moving.at_anchor() == 9.0
    assert GeometricThreshold(8.0, 0.5).at_anchor() == 8.0
    assert isinstance(moving, ThresholdSchedule)
    for wrong in (
        lambda: ConstantThreshold(0.0),
        lambda: GeometricThreshold(1.0, 1.5),
        lambda: GeometricThreshold(1.0, 0.5, floor=-1.0),
        lambda: PolynomialThreshold(1.0, math.nan),
        lambda: MovementThreshold(-1.0, anchor=1.0),
        lambda: MovementThreshold(1.0, anchor=1.0, cap=0.0),
    ):
        with pytest.raises(ValueError, match="must be"):
            wrong()


def test_shares_minimise_the_error_of_a_budget():
    """No other allocation of the same budget does better: compared with the closed form of the minimum and with perturbations."""
    rng = np.random.default_rng(0)
    tau, weights = rng.uniform(0.1, 5, 12), rng.uniform(0.1, 5, 12)
    shares = np.array(noise_shares(tau, weights))

    def error(sigma):
        return np.sum(weights * sigma**2 * tau**2)

    assert np.sum(shares**-2) == pytest.approx(12)
    assert error(shares) == pytest.approx(np.sum(tau * np.sqrt(weights)) ** 2 / 12)
    for _ in range(50):
        other = shares * np.exp(0.1 * rng.normal(size=12))
        other *= np.sqrt(np.sum(other**-2) / 12)  # the same budget
        assert error(other) > error(shares)
    np.testing.assert_allclose(noise_shares([3.0] * 4), 1.0)
    with pytest.raises(ValueError, match="as many weights"):
        noise_shares([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="above 0"):
        noise_shares([1.0, 0.0])
