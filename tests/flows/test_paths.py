"""Paths and conversions against closed forms of Gaussians, derivatives by automatic differentiation, and each other."""

import itertools
import math

import pytest
import torch

from cameraready.flows._paths import (
    KINDS,
    CosinePath,
    DiscretePath,
    LinearPath,
    Path,
    check_finite,
    convert,
    reparametrise_path,
    time_like,
)

pytestmark = pytest.mark.torch

BETAS = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
DISCRETE = DiscretePath.of((1 - BETAS).cumprod(0))
PATHS = [LinearPath(), CosinePath(), DISCRETE]
every_path = pytest.mark.parametrize("path", PATHS, ids=["linear", "cosine", "discrete"])
MEAN = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
ROOT = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.7, 0.0], [-0.3, 0.2, 0.4]], dtype=torch.float64)
COVARIANCE = ROOT @ ROOT.T


def draws(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gaussian(x, t, path):
    """All four predictions for data N(MEAN, COVARIANCE), by the conditional law of jointly Gaussian vectors."""
    a, s, da, ds = path.alpha(t), path.sigma(t), path.d_alpha(t), path.d_sigma(t)
    inverse = torch.linalg.inv(a**2 * COVARIANCE + s**2 * torch.eye(3, dtype=torch.float64))
    away = (x - a * MEAN) @ inverse
    x1, noise = MEAN + a * away @ COVARIANCE, s * away
    return {"velocity": da * x1 + ds * noise, "score": -away, "x1": x1, "noise": noise}


@every_path
def test_coefficients_are_a_path_with_its_derivatives(path):
    t = torch.linspace(0, 1, 101, dtype=torch.float64)
    inside = t[1:-1] + 1e-4  # off the knots of the discrete path
    alpha, d_alpha = torch.func.jvp(path.alpha, (inside,), (torch.ones_like(inside),))
    sigma, d_sigma = torch.func.jvp(path.sigma, (inside,), (torch.ones_like(inside),))
    torch.testing.assert_close(path.d_alpha(inside), d_alpha, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(path.d_sigma(inside), d_sigma, rtol=1e-9, atol=1e-12)
    assert (path.alpha(t).diff() > 0).all()
    assert (path.sigma(t).diff() < 0).all()
    for name in ("alpha", "sigma", "d_alpha", "d_sigma", "snr"):  # numbers and tensors agree
        for value in inside[::20].tolist():
            one, many = getattr(path, name)(value), getattr(path, name)(torch.tensor([value], dtype=torch.float64))
            assert isinstance(one, float)
            assert one == pytest.approx(float(many), rel=1e-12)
    torch.testing.assert_close(path.snr(inside), (alpha / sigma) ** 2)


def test_ends_are_exact_and_the_signal_to_noise_ratio_runs_from_nothing_to_infinity():
    for path in (LinearPath(), CosinePath()):
        assert (path.alpha(0.0), path.sigma(0.0), path.alpha(1.0), path.sigma(1.0)) == (0, 1, 1, 0)
        assert (path.snr(0.0), path.snr(1.0)) == (0, math.inf)
        assert path.snr(torch.tensor(1.0)) == math.inf
    for path in (CosinePath(), DISCRETE):  # variance preserving
        t = torch.linspace(0, 1, 50, dtype=torch.float64)
        torch.testing.assert_close(path.alpha(t) ** 2 + path.sigma(t) ** 2, torch.ones_like(t))


@every_path
def test_the_time_of_a_ratio_is_found_again(path):
    class Bisected(Path):
        alpha, sigma = staticmethod(path.alpha), staticmethod(path.sigma)
        d_alpha, d_sigma = staticmethod(path.d_alpha), staticmethod(path.d_sigma)

    t = torch.linspace(0.01, 0.99, 40, dtype=torch.float64)
    for scale in (1.0, 7.0):
        for finder in (path, Bisected()):
            torch.testing.assert_close(
                finder.time_of(scale * path.alpha(t), scale * path.sigma(t)), t, rtol=0, atol=1e-9
            )
            assert finder.time_of(scale * path.alpha(0.37), scale * path.sigma(0.37)) == pytest.approx(0.37, abs=1e-9)


def test_a_discrete_path_has_each_level_of_its_scheduler_and_ends_where_that_ends():
    kept = (1 - BETAS).cumprod(0)
    t = 1 - torch.arange(1000, dtype=torch.float64) / 999
    torch.testing.assert_close(DISCRETE.alpha(t) ** 2, kept, rtol=1e-10, atol=1e-12)
    assert DISCRETE.time_of(1.0, 0.0) == 1
    assert DISCRETE.time_of(0.0, 1.0) == 0
    assert float(DISCRETE.time_of(torch.tensor(0.0), torch.tensor(1.0))) == 0
    with pytest.raises(ValueError, match="must fall strictly"):
        DiscretePath.of(kept.flip(0))


@every_path
def test_states_and_targets_are_those_of_the_formula_for_one_time_or_many(path):
    x1, x0 = draws(5, 2, 3, 4), draws(5, 2, 3, 4, seed=1)
    t = torch.rand(5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    states, targets = path.interpolate(x1, x0, t), path.target(x1, x0, t)
    for i in range(5):
        for one in (t[i], float(t[i])):
            torch.testing.assert_close(path.interpolate(x1[i : i + 1], x0[i : i + 1], one)[0], states[i])
            torch.testing.assert_close(path.target(x1[i : i + 1], x0[i : i + 1], one)[0], targets[i])
    _, moved = torch.func.jvp(lambda time: path.interpolate(x1, x0, time), (t,), (torch.ones_like(t),))
    torch.testing.assert_close(moved, targets, rtol=1e-8, atol=1e-10)


@every_path
def test_every_conversion_is_exact_for_a_gaussian_and_comes_back(path):
    x = draws(6, 3)
    for t in (0.2, torch.tensor(0.7, dtype=torch.float64)):
        truth = gaussian(x, t, path)
        for source, target in itertools.product(KINDS, KINDS):
            found = convert(truth[source], x, t, source=source, target=target, path=path)
            torch.testing.assert_close(found, truth[target], rtol=1e-9, atol=1e-9)
            back = convert(found, x, t, source=target, target=source, path=path)
            torch.testing.assert_close(back, truth[source], rtol=1e-9, atol=1e-9)


@every_path
def test_conversions_of_any_prediction_come_back_with_one_time_for_each_state(path):
    x, prediction = draws(4, 2, 3, 3), draws(4, 2, 3, 3, seed=1)
    t = torch.tensor([0.1, 0.4, 0.6, 0.9], dtype=torch.float64)
    for source, target in itertools.product(KINDS, KINDS):
        found = convert(prediction, x, t, source=source, target=target, path=path)
        torch.testing.assert_close(convert(found, x, t, source=target, target=source, path=path), prediction)
        one = convert(prediction[2:3], x[2:3], 0.6, source=source, target=target, path=path)
        torch.testing.assert_close(found[2:3], one)


SINGULAR_AT_DATA = {("velocity", "score"), ("x1", "velocity"), ("x1", "noise"), ("x1", "score"), ("noise", "score")}
SINGULAR_AT_NOISE = {("noise", "velocity"), ("noise", "x1"), ("score", "velocity"), ("score", "x1")}


@pytest.mark.parametrize("path", PATHS[:2], ids=["linear", "cosine"])
def test_ends_at_which_a_conversion_does_not_exist_raise_a_sentence_and_others_do_not(path):
    x, prediction = draws(2, 3), draws(2, 3, seed=1)
    for source, target in itertools.product(KINDS, KINDS):
        for t, singular, words in (
            (0.0, SINGULAR_AT_NOISE, "nothing but noise"),
            (1.0, SINGULAR_AT_DATA, "no noise is left"),
        ):
            for time in (t, torch.tensor(t), torch.tensor([0.5, t])):
                options = {"source": source, "target": target, "path": path}
                if (source, target) in singular:
                    with pytest.raises(ValueError, match=words):
                        convert(prediction, x, time, **options)
                    assert torch.isfinite(convert(prediction, x, time, eps=1e-3, **options)).all()
                else:
                    assert torch.isfinite(convert(prediction, x, time, **options)).all()


def test_half_precision_states_are_converted_in_float32_and_keep_their_dtype():
    x, v = draws(50, 3, dtype=torch.bfloat16), draws(50, 3, seed=1, dtype=torch.bfloat16)
    found = convert(v, x, 0.9, source="velocity", target="score")
    exact = convert(v.double(), x.double(), 0.9, source="velocity", target="score")
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)  # rounded once, at the end
    assert LinearPath().interpolate(x, v, torch.full((50,), 0.3)).dtype == torch.bfloat16


def test_conversions_can_be_differentiated_and_mapped():
    x, v = draws(3), draws(3, seed=1)
    each = torch.func.vmap(lambda time: convert(v, x, time, source="velocity", target="score", eps=1e-9))
    t = torch.tensor([0.2, 0.5], dtype=torch.float64)
    torch.testing.assert_close(each(t)[1], convert(v, x, 0.5, source="velocity", target="score"))
    _, slope = torch.func.jvp(
        lambda time: convert(v, x, time, source="velocity", target="noise"), (t[1],), (torch.ones_like(t[1]),)
    )
    torch.testing.assert_close(slope, -v)  # on the linear path the noise is x - t v


@pytest.mark.parametrize("source", PATHS, ids=["linear", "cosine", "discrete"])
@pytest.mark.parametrize("target", PATHS, ids=["linear", "cosine", "discrete"])
def test_a_flow_moved_to_another_path_is_that_paths_own(source, target):
    x = draws(5, 3)
    moved = reparametrise_path(lambda x, t, y=None: gaussian(x, t, source)["velocity"], source, target)
    for t in (0.15, 0.5, 0.85):
        torch.testing.assert_close(moved(x, t), gaussian(x, t, target)["velocity"], rtol=1e-7, atol=1e-8)


def test_a_moved_flow_keeps_its_ends_also_where_they_are_singular():
    x = draws(5, 3)
    for source, target in itertools.permutations(PATHS[:2], 2):
        moved = reparametrise_path(lambda x, t, y=None, p=source: gaussian(x, t, p)["velocity"], source, target)
        for t in (0.0, 1.0):
            torch.testing.assert_close(moved(x, t), gaussian(x, t, target)["velocity"])


def test_a_moved_flow_hands_labels_and_times_of_each_state_on():
    asked = []

    def v(x, t, y=None):
        asked.append((t, y))
        return x

    y = torch.tensor([1, 2])
    reparametrise_path(v, CosinePath(), LinearPath())(draws(2, 3), torch.tensor([0.2, 0.5]), y)
    reparametrise_path(lambda x, t: x, CosinePath(), LinearPath())(draws(2, 3), 0.2)  # needs no place for labels
    assert asked[0][0].shape == (2,)
    assert asked[0][1] is y


def test_timesteps_are_not_taken_for_times():
    x = draws(4, 3)
    for use in (
        lambda t: convert(x, x, t, source="x1", target="velocity"),
        lambda t: LinearPath().interpolate(x, x, t),
        lambda t: CosinePath().target(x, x, t),
        lambda t: reparametrise_path(lambda x, t: x, CosinePath(), LinearPath())(x, t),
    ):
        use(1 - 1e-9)
        for t in (700.0, -1.0, math.nan):
            with pytest.raises(ValueError, match=r"times lie between 0 .* timesteps of 0 to 1000 have to be divided"):
                use(t)


def test_what_is_wrong_is_said():
    x = draws(4, 3)
    with pytest.raises(ValueError, match="no prediction 'eps'; choose one of velocity, score, x1, noise"):
        convert(x, x, 0.5, source="eps", target="x1")
    with pytest.raises(ValueError, match=r"shape \(2, 3\) and the state \(4, 3\)"):
        convert(x[:2], x, 0.5, source="velocity", target="x1")
    with pytest.raises(ValueError, match=r"t has shape \(3,\); for states of shape \(4, 3\)"):
        time_like(torch.rand(3), x)
    bad = torch.tensor([[1.0, math.nan], [math.inf, 0.0]])
    with pytest.raises(FloatingPointError, match=r"the velocity is not finite in 2 of 4 entries at t = 0\.25"):
        check_finite(bad, 0.25)
    with pytest.raises(FloatingPointError, match=r"at t = 0\.25 to 0\.5"):
        check_finite(bad, torch.tensor([0.25, 0.5]))
    check_finite(torch.ones(3), 0.5)
