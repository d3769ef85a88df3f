"""The online denoiser: gradients, the overlaps' own chain, recovery, and the fit of exponents."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import CensoredData, ecdf, ks_2samp

from cameraready.flows.mixed_cumulant import (
    MixedCumulant,
    SphericalDenoiser,
    kaplan_meier_median,
    population_loss,
    sample_complexity_curve,
)
from cameraready.flows.mixed_cumulant._activation import activation
from cameraready.flows.mixed_cumulant.denoiser import loss_and_gradient, spherical_step
from cameraready.flows.mixed_cumulant.exponent import noise_levels
from cameraready.flows.mixed_cumulant.scaling import _Overlaps, _Runs, recovery_times, summarised

pytestmark = pytest.mark.torch
TORCH = {"tanh": torch.tanh, "erf": torch.erf, "sin": torch.sin, "relu": torch.relu, "silu": torch.nn.functional.silu}
OPTIONS = {"phi": "tanh", "gain": 0.5, "snr": 1.0, "step_size": 1.0, "batch_size": 16}


def batch(runs=2, size=7, d=5, seed=0):
    rng = np.random.default_rng(seed)
    w, x, eps = (
        rng.standard_normal((runs, d)),
        rng.standard_normal((runs, size, d)),
        rng.standard_normal((runs, size, d)),
    )
    return w, x, eps


@pytest.mark.parametrize("name", TORCH)
def test_the_closed_form_gradient_is_autograds(name):
    w, x, eps = batch()  # w not normalised: the formula holds everywhere
    (a,), (s,) = noise_levels(0.6)
    loss, gradient = loss_and_gradient(w, x, eps, a, s, 0.8, activation(name))
    tw = torch.tensor(w, requires_grad=True)
    tx, ty = torch.tensor(x), torch.tensor(a * x + s * eps)
    value = TORCH[name]((ty * tw[:, None]).sum(-1))
    expected = (tx - a * ty - 0.8 * value[..., None] * tw[:, None]).square().sum(-1).mean(1)
    expected.sum().backward()
    np.testing.assert_allclose(loss, expected.detach().numpy(), rtol=1e-10)
    np.testing.assert_allclose(gradient, tw.grad.numpy(), rtol=1e-10, atol=1e-10)


def test_the_closed_form_gradient_is_the_slope_of_the_loss():
    w, x, eps = batch(seed=1)
    (a,), (s,) = noise_levels(2.0)
    phi = activation("gelu")
    _, gradient = loss_and_gradient(w, x, eps, a, s, -0.5, phi)
    direction, h = np.random.default_rng(2).standard_normal(w.shape), 1e-5
    up, down = (loss_and_gradient(w + k * h * direction, x, eps, a, s, -0.5, phi)[0] for k in (1, -1))
    np.testing.assert_allclose((up - down) / (2 * h), (gradient * direction).sum(1), rtol=1e-7)


def test_the_mean_gradient_is_that_of_the_population_loss():
    model, n, m = MixedCumulant(), 200_000, 0.5
    (a,), (s,) = noise_levels(1.0)
    rng = np.random.default_rng(3)
    w = np.array([[m, 0.4, math.sqrt(1 - m * m - 0.16), 0.0]])
    x = model.sample((1, n), np.eye(2, 4), rng)
    eps = rng.standard_normal(x.shape)
    _, gradient = loss_and_gradient(w, x, eps, a, s, 0.5, activation("tanh"))
    each = np.array(
        [loss_and_gradient(w, x[:, i::50], eps[:, i::50], a, s, 0.5, activation("tanh"))[1][0] for i in range(50)]
    )
    # Along the tangent from the third axis to u the loss changes as population_loss says.
    h = 1e-4
    along = np.array([1.0, 0.0, -m / w[0, 2], 0.0])
    slope = (population_loss(model, 4, (m + h, 0.4)) - population_loss(model, 4, (m - h, 0.4))) / (2 * h)
    error = (each @ along).std() / math.sqrt(50)
    assert gradient[0] @ along == pytest.approx(slope, abs=4.5 * error)


def test_steps_stay_on_the_sphere_and_turn_with_the_data():
    w, x, eps = batch(seed=4)
    w /= np.linalg.norm(w, axis=1, keepdims=True)
    turn = np.linalg.qr(np.random.default_rng(5).standard_normal((5, 5)))[0]
    (a,), (s,) = noise_levels(1.0)

    def moved(w, x, eps):
        return spherical_step(w, loss_and_gradient(w, x, eps, a, s, 0.5, activation("tanh"))[1], 0.3)

    np.testing.assert_allclose(np.linalg.norm(moved(w, x, eps), axis=1), 1, atol=1e-12)
    np.testing.assert_allclose(moved(w @ turn, x @ turn, eps @ turn), moved(w, x, eps) @ turn, atol=1e-12)


@pytest.mark.parametrize(("d", "rho", "phi"), [(3, 0.0, "tanh"), (12, 0.0, "sin"), (12, 1.0, "tanh")])
def test_the_overlaps_alone_have_the_law_of_the_whole(d, rho, phi):
    """Two implementations, one of d and one of 3 coordinates, with the same distribution after many steps."""
    model, options, runs = MixedCumulant(beta_u=1.0, correlation=rho), {**OPTIONS, "phi": phi, "step_size": 2.0}, 3_000
    found = []
    for kind, seed in ((_Runs, 6), (_Overlaps, 7)):
        process = kind(model, d, runs, options, np.random.default_rng(seed))
        for _ in range(25):
            process.step()
        found.append([process.overlap(0), process.overlap(1)])
    for one, other in zip(*found, strict=True):
        assert ks_2samp(one, other).pvalue > 1e-3


def test_a_denoiser_finds_u_quickly_and_v_late_unless_latents_are_correlated():
    def fitted(rho, d=24):
        denoiser = SphericalDenoiser("tanh", step_size=4.0, batch_size=64, runs=12)
        return denoiser.fit_online(MixedCumulant(correlation=rho), 150 * d, n_features=d, random_state=8)

    independent, correlated = fitted(0.0), fitted(1.0)
    assert np.isfinite(independent.weak_recovery(0.5)).all()
    late = np.abs(independent.overlaps_[-20:, :, 1]).mean()
    assert late < 0.2
    assert np.abs(correlated.overlaps_[-20:, :, 1]).mean() > 0.35
    assert independent.samples_[0] == 0
    assert independent.samples_[-1] == independent.samples_seen_ == 56 * 64


def test_training_goes_on_where_it_stopped():
    model, directions = MixedCumulant(), np.eye(2, 6)
    whole = SphericalDenoiser(batch_size=10, runs=2)
    whole.fit_online(model, 400, directions=directions, random_state=np.random.default_rng(9))
    rng, parts = np.random.default_rng(9), SphericalDenoiser(batch_size=10, runs=2)
    for n in (100, 300):
        parts.fit_online(model, n, directions=directions, random_state=rng)
    np.testing.assert_allclose(parts.w_, whole.w_, atol=1e-12)
    np.testing.assert_allclose(parts.overlaps_, whole.overlaps_, atol=1e-12)
    assert parts.samples_.tolist() == whole.samples_.tolist()


def test_a_table_is_passed_once():
    data = MixedCumulant(beta_u=20.0).sample(2_000, np.eye(2, 10), np.random.default_rng(10))
    denoiser = SphericalDenoiser(step_size=8.0, batch_size=20, runs=4)
    denoiser.fit_online(data, 2_000, directions=np.eye(2, 10))
    assert np.isfinite(denoiser.weak_recovery(0.7)).all()
    with pytest.raises(ValueError, match="each row once"):
        denoiser.fit_online(data, 2_020)
    y = denoiser.a * data
    expected = denoiser.a * y + 0.5 * np.tanh(y @ denoiser.w_[1])[:, None] * denoiser.w_[1]
    np.testing.assert_allclose(denoiser.denoise(y, run=1), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SphericalDenoiser("nothing"), "there is no activation"),
        (lambda: SphericalDenoiser(np.tanh), "derivative"),
        (lambda: SphericalDenoiser(step_size=0.0), "step_size"),
        (lambda: SphericalDenoiser(gain=0.0), "not speak"),
        (lambda: SphericalDenoiser().fit_online(MixedCumulant(), 640), "n_features"),
        (lambda: SphericalDenoiser().fit_online(MixedCumulant(), 640, n_features=2), "at least 3"),
        (lambda: SphericalDenoiser().fit_online(np.zeros((640, 3)), 3), "at least one batch"),
        (lambda: SphericalDenoiser().fit_online(np.full((640, 3), np.nan), 640), "NaN"),
        (lambda: SphericalDenoiser().fit_online(lambda shape, g: np.zeros((2, 2)), 640), "the stream must give"),
        (lambda: SphericalDenoiser().fit_online(np.zeros((640, 3)), 640, directions=2 * np.eye(1, 3)), "unit vectors"),
        (lambda: recovery_times(MixedCumulant(), 5, runs=2, budget=100, momentum=0.9), "momentum"),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()


# --- scaling -------------------------------------------------------------------------------------------------------------------


def test_kaplan_meier_agrees_with_scipy():
    rng = np.random.default_rng(11)
    for _ in range(20):
        times, limits = rng.exponential(1.0, 30), rng.exponential(2.5, 30)
        seen, censored = np.minimum(times, limits), times > limits
        survival = ecdf(CensoredData(uncensored=seen[~censored], right=seen[censored])).sf
        below = survival.quantiles[survival.probabilities <= 0.5 + 1e-12]
        assert kaplan_meier_median(seen, censored) == pytest.approx(below[0] if len(below) else math.inf)
    assert kaplan_meier_median(np.array([1.0, 3.0, math.inf])) == 3.0
    assert math.isinf(kaplan_meier_median(np.array([1.0, math.inf, math.inf])))


def test_a_power_law_gets_its_exponent_and_a_wide_enough_interval():
    dims, rng = np.array([10, 20, 40, 80]), np.random.default_rng(12)
    exact = summarised(dims, np.repeat(5.0 * dims[:, None] ** 1.5, 9, axis=1), dims, rng)
    assert (exact.slope, exact.low, exact.high) == pytest.approx((1.5, 1.5, 1.5))
    covered = 0
    for _ in range(100):
        times = dims[:, None] ** 2.0 * rng.lognormal(0, 0.8, (4, 25))
        found = summarised(dims, times, dims, rng, resamples=200)
        covered += found.low <= 2 <= found.high
    assert covered >= 87


def test_censored_runs_forbid_or_widen_a_slope():
    dims, rng = np.array([10, 20, 40]), np.random.default_rng(13)
    times = dims[:, None] ** 2.0 * rng.lognormal(0, 0.3, (3, 9))
    times[2, :4] = np.inf
    wide = summarised(dims, times, dims, rng)
    assert np.isfinite(wide.slope)
    assert math.isinf(wide.high)
    assert wide.censored.tolist() == [0, 0, 4]
    times[2, :5] = np.inf
    none = summarised(dims, times, dims, rng)
    assert math.isnan(none.slope)
    assert "d = 40" in none.reason
    assert "no slope" in str(none)


def test_the_pairwise_direction_grows_about_linearly_and_the_fourth_cumulant_much_faster():
    pairwise = sample_complexity_curve([16, 128], runs=40, step_size=4.0, overlaps_only=True, random_state=14)
    assert 0.9 < pairwise.slope < 1.6
    assert not pairwise.censored.any()
    fourth = sample_complexity_curve(
        [12, 20],
        model=MixedCumulant(beta_u=0.0),
        direction=1,
        threshold=0.8,
        runs=60,
        step_size=lambda d: 32 / d,
        batch_size=16,
        snr=3.0,
        phi=(lambda x: np.sin(math.sqrt(3) * x), lambda x: math.sqrt(3) * np.cos(math.sqrt(3) * x)),
        overlaps_only=True,
        random_state=15,
    )
    assert fourth.slope > pairwise.slope + 0.5
    with pytest.raises(ValueError, match="two or more different"):
        sample_complexity_curve([16])
