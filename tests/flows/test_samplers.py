"""Fixed-step, adaptive and stochastic samplers: orders of accuracy, counted evaluations, and exact laws of Gaussians."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from cameraready.flows._paths import CosinePath, LinearPath
from cameraready.flows._samplers import (
    STAGES,
    adaptive,
    euler_maruyama,
    evaluations,
    grid,
    sample,
    steps_for,
)
from cameraready.flows._toy.mixtures import GaussianMixture
from tests.flows.flow_cases import exact

pytestmark = pytest.mark.torch

ORDERS = {"euler": 1, "midpoint": 2, "heun": 2, "rk4": 4, "ab2": 2}
MEAN = torch.tensor([1.0, -2.0], dtype=torch.float64)
COVARIANCE = torch.tensor([[0.5, 0.2], [0.2, 0.3]], dtype=torch.float64)


def draws(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gaussian(path=LinearPath()):  # noqa: B008 (frozen)
    return GaussianMixture(torch.ones(1), MEAN[None], COVARIANCE[None]).velocity(path)


class Counting:
    def __init__(self, velocity):
        self.velocity, self.calls = velocity, 0

    def __call__(self, x, t, *y):
        self.calls += 1
        return self.velocity(x, t, *y)


# --- grids and budgets -----------------------------------------------------------------------------------------------


def test_grids_rise_from_start_to_end_and_have_their_formulas():
    for kind in ("uniform", "shift", "power"):
        times = grid(7, kind=kind, start=0.1, end=0.9)
        assert times.dtype == torch.float64
        assert (float(times[0]), float(times[-1]), len(times)) == (0.1, 0.9, 8)
        assert (times.diff() > 0).all()
    s = 1 - grid(10)
    torch.testing.assert_close(1 - grid(10, kind="shift", shift=3.0), 3 * s / (1 + 2 * s))
    torch.testing.assert_close(grid(10, kind="shift", shift=1.0), grid(10))
    torch.testing.assert_close(grid(10, kind="power", power=1.5), grid(10) ** 1.5)


@pytest.mark.parametrize("method", STAGES)
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_evaluations_are_counted_as_they_are_made(method, steps):
    v = Counting(exact())
    sampled = sample(v, draws(3, 3), steps=steps, method=method)
    assert sampled.calls == v.calls == evaluations(method, steps)
    assert steps_for(method, sampled.calls) == steps


def test_whole_numbers_of_numpy_are_steps_too():
    assert torch.equal(grid(np.int64(3)), grid(3))


def test_a_budget_that_does_not_divide_has_no_steps():
    assert [steps_for("rk4", nfe) for nfe in (4, 6, 8)] == [1, None, 2]
    assert [steps_for("heun", nfe) for nfe in (1, 2, 7)] == [None, 1, None]
    assert [steps_for("heun", nfe, scheduler=True) for nfe in (1, 2, 7)] == [1, None, 4]


# --- accuracy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ORDERS)
@pytest.mark.parametrize("spaced", ["uniform", "power"])
def test_order_of_accuracy(method, spaced):
    x = draws(16, 3)
    counts = (10, 20, 40) if method == "rk4" else (40, 80, 160)
    reference = sample(exact(), x, steps=400, method="rk4").x
    errors = [
        float(
            (sample(exact(), x, times=grid(n, kind=spaced, power=1.5), method=method).x - reference)
            .square()
            .mean()
            .sqrt()
        )
        for n in counts
    ]
    slopes = [math.log2(a / b) for a, b in pairwise(errors)]
    assert slopes[-1] == pytest.approx(ORDERS[method], abs=0.3), slopes


def test_the_flow_of_a_gaussian_ends_where_its_closed_form_says():
    # With x0 ~ N(0, I) the flow is linear: from x0 to MEAN + L x0 with L the root of the covariance that commutes with it.
    values, vectors = torch.linalg.eigh(COVARIANCE)
    root = vectors @ values.sqrt().diag() @ vectors.T
    x = draws(20, 2)
    for path in (LinearPath(), CosinePath()):
        assert_close_to = MEAN + x @ root
        torch.testing.assert_close(
            sample(gaussian(path), x, steps=100, method="rk4").x, assert_close_to, rtol=0, atol=1e-6
        )
        back = sample(gaussian(path), assert_close_to, times=grid(100).flip(0), method="rk4").x
        torch.testing.assert_close(back, x, rtol=0, atol=1e-6)


def test_adams_bashforth_on_unequal_steps_is_exact_where_the_velocity_is_linear_in_time():
    # After Euler's first step every two-step step integrates a linear velocity exactly.
    times = torch.tensor([0.0, 0.1, 0.45, 0.5, 1.0], dtype=torch.float64)
    found = sample(
        lambda x, t: (2 * t + 3) * torch.ones_like(x), torch.zeros(1, 1, dtype=torch.float64), times=times, method="ab2"
    )
    euler_error = 0.1**2  # of the integral of 2 t over the first step
    assert float(found.x) == pytest.approx(4 - euler_error, abs=1e-12)


def test_adaptive_steps_meet_their_tolerance_against_a_thousand_steps_of_runge_kutta():
    x = draws(20, 3)
    reference = sample(exact(), x, steps=1000, method="rk4").x
    loose, tight = (adaptive(exact(), x, rtol=tol, atol=tol) for tol in (1e-4, 1e-8))
    torch.testing.assert_close(tight.x, reference, rtol=0, atol=1e-6)
    torch.testing.assert_close(loose.x, reference, rtol=0, atol=1e-2)
    assert loose.calls < tight.calls
    back = adaptive(exact(), tight.x, rtol=1e-8, atol=1e-8, start=1.0, end=0.0)
    torch.testing.assert_close(back.x, x, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("start", "end"), [(0.0, 1.0), (1.0, 0.0), (0.2, 0.7)])
def test_adaptive_steps_ask_nothing_outside_their_interval(start, end):
    asked = []

    def v(x, t):
        asked.append(float(t))
        return -x * t

    x = draws(4, 3)
    for method in ("dopri5", "bosh3"):
        found = adaptive(v, x, method=method, start=start, end=end, rtol=1e-8, atol=1e-8).x
        torch.testing.assert_close(found, x * math.exp((start**2 - end**2) / 2), rtol=1e-6, atol=0)
    assert min(start, end) - 1e-12 <= min(asked) < max(asked) <= max(start, end) + 1e-12


def test_adaptive_steps_count_and_give_up_in_a_sentence():
    v = Counting(exact())
    assert adaptive(v, draws(4, 3)).calls == v.calls
    with pytest.raises(RuntimeError, match=r"had not come to t = 1 .* after 10 evaluations"):
        adaptive(exact(), draws(4, 3), rtol=1e-9, atol=1e-9, max_calls=10)
    with pytest.raises(RuntimeError, match=r"cannot meet rtol=1e-05, atol=1e-05 in torch.float32"):
        adaptive(lambda x, t: x**2, torch.full((2, 1), 2.0))  # infinite at t = 1/2
    with pytest.raises(ValueError, match="tolerances are above 0"):
        adaptive(exact(), draws(2, 3), rtol=0)
    for method in ("rk4", "scipy_solver", "dopri"):
        with pytest.raises(ValueError, match=f"no adaptive method '{method}'; choose one of dopri5"):
            adaptive(exact(), draws(2, 3), method=method)


# --- the memoryless process ------------------------------------------------------------------------------------------


def law_of(noise, times):
    """Mean and covariance after Euler-Maruyama of a Gaussian's flow: every step is linear, so sigma points carry them exactly."""
    mean, covariance = torch.zeros(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    for t, after in pairwise(times.tolist()):
        points = torch.cat([torch.zeros(1, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)])
        moved = points + (after - t) * drift(points, t, after, noise)[0]
        shift, matrix = moved[0], (moved[1:] - moved[0]).T
        shock = drift(points, t, after, noise)[1] * (after - t)
        mean = matrix @ mean + shift
        covariance = matrix @ covariance @ matrix.T + shock * torch.eye(2, dtype=torch.float64)
    return mean, covariance


def drift(x, t, after, noise):
    """Of the sheet's formulas on the linear path, written anew: the memoryless one, or any noise level with the Gaussian's own score."""
    v = gaussian()(x, t)
    if noise == "memoryless":
        return 2 * v - x / after, 2 * (1 - t) / after
    here = t**2 * COVARIANCE + (1 - t) ** 2 * torch.eye(2, dtype=torch.float64)
    score = -(x - t * MEAN) @ torch.linalg.inv(here)
    return v + noise(t) ** 2 / 2 * score, noise(t) ** 2


def some_noise(t):
    return 1.5 * (1 - t)


@pytest.mark.parametrize("noise", ["memoryless", some_noise], ids=["memoryless", "falling"])
def test_the_stochastic_process_has_the_marginals_of_a_gaussian_flow(noise):
    errors = []
    for steps in (100, 200, 400):
        mean, covariance = law_of(noise, grid(steps))
        errors.append(float((mean - MEAN).norm() + (covariance - COVARIANCE).norm()))
    assert errors[-1] < 0.02  # of first order in the step, to the exact law
    assert math.log2(errors[1] / errors[2]) == pytest.approx(1, abs=0.15)

    n, times = 40_000, grid(60)
    mean, covariance = law_of(noise, times)
    drawn = euler_maruyama(
        gaussian(), draws(n, 2), times=times, noise=noise, generator=torch.Generator().manual_seed(4)
    )
    assert drawn.calls == 60
    wide = 5 * torch.sqrt(covariance.diagonal() / n)  # five standard errors
    assert ((drawn.x.mean(0) - mean).abs() < wide).all()
    spread = torch.cov(drawn.x.T)
    bound = 5 * torch.sqrt((covariance.diagonal()[:, None] * covariance.diagonal() + covariance**2) / n)
    assert ((spread - covariance).abs() < bound).all()


def test_the_memoryless_process_forgets_where_it_began_and_others_do_not():
    x = draws(5000, 2)
    for noise, forgets in (("memoryless", True), (some_noise, False)):
        end = euler_maruyama(gaussian(), x, times=grid(50), noise=noise, generator=torch.Generator().manual_seed(1)).x
        correlation = torch.corrcoef(torch.cat([x.T, end.T]))[:2, 2:].abs().max()
        assert (correlation < 5 / math.sqrt(5000)) == forgets


def test_no_noise_is_the_method_of_euler():
    x = draws(5, 3)
    found = euler_maruyama(exact(), x, times=grid(9), noise=lambda t: 0.0, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found.x, sample(exact(), x, steps=9).x)


def test_the_memoryless_process_on_another_path():
    path = CosinePath()
    x = draws(20_000, 2)
    end = euler_maruyama(gaussian(path), x, times=grid(200), path=path, generator=torch.Generator().manual_seed(1)).x
    torch.testing.assert_close(end.mean(0), MEAN, rtol=0, atol=0.04)
    torch.testing.assert_close(torch.cov(end.T), COVARIANCE, rtol=0, atol=0.03)


# --- habits ----------------------------------------------------------------------------------------------------------


def test_half_precision_states_are_accumulated_in_float32():
    x = draws(64, 3, dtype=torch.bfloat16)
    seen = []

    def v(x, t):
        seen.append(x.dtype)
        return exact()(x, t)

    found = sample(v, x, steps=200).x
    assert found.dtype == torch.bfloat16
    assert set(seen) == {torch.bfloat16}
    reference = sample(exact(), x.double(), steps=200).x
    assert float((found.double() - reference).square().mean().sqrt()) < 0.02
    naive = x.clone()
    for t in range(200):
        naive = naive + exact()(naive, t / 200) / 200
    assert float((naive.double() - reference).square().mean().sqrt()) > 0.04  # what it protects from


def test_trajectories_labels_and_progress():
    y, said, asked = torch.tensor([1, 2, 3]), [], []

    def v(x, t, labels):
        asked.append(labels)
        return x

    x = draws(3, 2)
    found = sample(v, x, steps=4, y=y, trajectory=True, progress=lambda done, of: said.append((done, of)))
    assert all(labels is y for labels in asked)
    assert said == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert found.states.shape == (5, 3, 2)
    assert torch.equal(found.states[0], x)
    assert torch.equal(found.states[-1], found.x)
    torch.testing.assert_close(found.states[1], 1.25 * x)
    drawn = euler_maruyama(
        exact(), draws(3, 3), times=grid(4), trajectory=True, generator=torch.Generator().manual_seed(0)
    )
    assert torch.equal(drawn.states[-1], drawn.x)


def test_gradients_flow_only_where_they_are_asked_for():
    x = draws(2, 3).requires_grad_()
    assert not sample(exact(), x, steps=2).x.requires_grad
    end = sample(lambda x, t: x, x, steps=2, grad=True).x
    (slope,) = torch.autograd.grad(end.sum(), x)
    torch.testing.assert_close(slope, torch.full_like(x, 1.5**2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "either steps"),
        ({"steps": 3, "times": [0, 1]}, "either steps"),
        ({"steps": 0}, "whole number, at least 1"),
        ({"steps": 2.5}, "whole number, at least 1"),
        ({"times": [0.0, 0.5, 0.5, 1.0]}, "rise strictly"),
        ({"times": [0.0, math.nan, 1.0]}, "rise strictly"),
        ({"times": [0.0, 500.0, 1000.0]}, "timesteps of 0 to 1000 have to be divided"),
        ({"times": [[0.0, 1.0]]}, "a row of at least two numbers"),
        ({"steps": 2, "method": "rk5"}, "no method 'rk5'; choose one of euler"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(options, words):
    with pytest.raises(ValueError, match=words):
        sample(exact(), draws(2, 3), **options)


def test_velocities_of_another_shape_or_without_numbers_are_told():
    with pytest.raises(ValueError, match=r"shape \(2,\) for states of shape \(2, 3\)"):
        sample(lambda x, t: x[:, 0], draws(2, 3), steps=1)
    with pytest.raises(ValueError, match="the velocity returned tuple"):
        sample(lambda x, t: (x,), draws(2, 3), steps=1)
    with pytest.raises(FloatingPointError, match=r"not finite in 6 of 6 entries at t = 0\.5"):
        sample(lambda x, t: x / (0.5 - t), draws(2, 3), steps=2)
    with pytest.raises(ValueError, match="floating-point tensor"):
        sample(exact(), torch.ones(2, 3, dtype=torch.long), steps=1)
    for broken, words in (
        (lambda: euler_maruyama(exact(), draws(2, 3), times=[1.0, 0.0]), "from noise to data"),
        (lambda: euler_maruyama(exact(), draws(2, 3), times=[0.0, 1.0], noise=lambda t: -1.0), "at least 0"),
        (lambda: euler_maruyama(exact(), draws(2, 3), times=[0.0, 1.0], noise="ddpm"), "'memoryless' or a function"),
        (lambda: grid(3, start=0.5, end=0.5), "0 <= start < end <= 1"),
        (lambda: grid(3, kind="cosine"), "no grid 'cosine'"),
        (lambda: grid(3, kind="shift", shift=0.0), "above 0"),
        (lambda: grid(2000, kind="power", power=500.0), "closer together than numbers"),
        (lambda: steps_for("euler", 0), "at least one evaluation"),
        (lambda: evaluations("dopri5", 3), "no method 'dopri5'"),
        (lambda: evaluations("ddim", 3, scheduler=True), "no scheduler 'ddim'"),
        (lambda: steps_for("ddim", 3, scheduler=True), "no scheduler 'ddim'"),
    ):
        with pytest.raises(ValueError, match=words):
            broken()
