"""Proximal maps minimise what they say they minimise, and penalties outside the theory are refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from cameraready.stats.erm import ScaledHuberLoss, SeparablePenalty, SmoothLoss, log_cosh_penalty, pseudo_huber_penalty
from cameraready.stats.erm.losses import LOSSES, LogisticLoss, SquaredLoss, named_loss

SMOOTH = ("squared", "logistic", "squared_hinge", "huber")
number = st.floats(-20, 20, allow_nan=False)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=60, deadline=None)
@given(s=number, log_kappa=st.floats(-6, 6), label=number)
def test_the_proximal_map_is_a_minimiser(name, s, log_kappa, label):
    loss, kappa = LOSSES[name], 10.0**log_kappa
    y = np.sign(label) or 1.0 if loss.is_classification else label
    z = float(loss.prox(np.array(y), np.array(s), kappa))

    def objective(t):
        return float(loss.value(y, t)) + (t - s) ** 2 / (2 * kappa)

    best = objective(z)
    slack = 1e-9 * (1 + abs(best))
    for step in (1e-3, 0.1, 1.0, 10.0):
        assert best <= objective(z + step) + slack
        assert best <= objective(z - step) + slack


@pytest.mark.parametrize("name", SMOOTH)
def test_the_dual_is_the_slope_and_the_curvature_its_derivative(name):
    loss = LOSSES[name]
    y = np.array([-1.0, 1.0])[:, None]
    z = np.linspace(-4, 4, 41)[None, :] + 0.013  # off the corners of the slopes
    s = z + 0.7 * loss.slope(y, z)
    np.testing.assert_allclose(loss.prox(y, s, 0.7), np.broadcast_to(z, (2, 41)), atol=1e-10)
    numeric = (loss.value(y, z + 1e-6) - loss.value(y, z - 1e-6)) / 2e-6
    np.testing.assert_allclose(loss.slope(y, z), numeric, atol=1e-6)
    curved = (loss.slope(y, z + 1e-6) - loss.slope(y, z - 1e-6)) / 2e-6
    np.testing.assert_allclose(loss.curvature(y, z), curved, atol=1e-6)


def test_the_logistic_map_holds_for_huge_steps_and_scores():
    loss = LogisticLoss()
    for kappa in (1e-8, 1.0, 1e4, 1e8):
        for scale in (1.0, 30.0, 1e4):
            s = np.linspace(-scale, scale, 401)
            z = loss.prox(1.0, s, kappa)
            gap = np.abs(z - s + kappa * loss.slope(1.0, z))
            assert gap.max() <= 1e-12 * (scale + kappa)
            assert (np.diff(z) > 0).all()


def test_a_loss_of_ones_own_equals_the_built_in_one():
    built_in = LogisticLoss()
    own = SmoothLoss(built_in.value, built_in.slope, built_in.curvature, is_classification=True)
    s, y = np.linspace(-5, 5, 50), np.where(np.arange(50) % 2, 1.0, -1.0)
    np.testing.assert_allclose(own.prox(y, s, 3.0), built_in.prox(y, s, 3.0), atol=1e-10)


def test_a_loss_that_is_not_convex_is_refused():
    bumpy = SmoothLoss(lambda y, z: np.cos(5 * z), lambda y, z: -5 * np.sin(5 * z), lambda y, z: -25 * np.cos(5 * z))
    with pytest.raises(ValueError, match="must be convex"):
        bumpy.prox(np.zeros(200), np.linspace(-3, 3, 200), 40.0)


def test_huber_with_a_large_corner_is_least_squares():
    s, y = np.linspace(-3, 3, 20), np.linspace(2, -2, 20)
    huber = named_loss("huber").__class__(1e6)
    np.testing.assert_allclose(huber.prox(y, s, 0.8), SquaredLoss().prox(y, s, 0.8))


@pytest.mark.parametrize("penalty", [pseudo_huber_penalty(0.3), log_cosh_penalty(0.3)])
def test_penalties_are_quadratic_at_zero_with_the_stated_curvature(penalty):
    t = np.array([-1e-3, 1e-3])
    np.testing.assert_allclose(penalty.value(t), 0.15 * t**2, rtol=1e-5)
    np.testing.assert_allclose(penalty.gradient(t), 0.3 * t, rtol=1e-5)
    far = minimize_scalar(lambda x: float(penalty.value(np.array(x))) - 0.1 * x).x
    np.testing.assert_allclose(penalty.gradient(np.array(far)), 0.1, atol=1e-6)


def test_a_penalty_with_a_corner_at_zero_is_refused():
    with pytest.raises(ValueError, match="no second derivative at zero"):
        SeparablePenalty(np.abs, np.sign, np.zeros_like)
    with pytest.raises(ValueError, match="no second derivative at zero"):
        SeparablePenalty(lambda t: np.abs(t) + t * t / 2, lambda t: np.sign(t) + t, np.ones_like)
    with pytest.raises(ValueError, match="not convex"):
        SeparablePenalty(lambda t: -t * t / 2, lambda t: -t, lambda t: -np.ones_like(t))


@pytest.mark.parametrize("wrong", ["absolute", 3, object()])
def test_unknown_losses_are_refused(wrong):
    with pytest.raises(ValueError, match="loss"):
        named_loss(wrong)


def test_parameters_of_losses_are_checked():
    with pytest.raises(ValueError, match="delta"):
        named_loss("huber").__class__(-1.0)
    with pytest.raises(ValueError, match="epsilon"):
        ScaledHuberLoss(1.0)
