"""The mixed cumulant model: moments in closed form, rotations, and what is refused."""

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import erf
from scipy.stats import kstat, norm

from cameraready.flows.mixed_cumulant import MixedCumulant, make_mixed_cumulant
from cameraready.flows.mixed_cumulant.model import random_directions

N = 200_000
KAPPA4 = {"rademacher": -2.0, "uniform": -1.2, "laplace": 3.0, "gaussian": 0.0}


def drawn(d=6, seed=0, **options):
    model = MixedCumulant(**options)
    rng = np.random.default_rng(seed)
    directions = random_directions(d, rng)
    return model, directions, model.sample(N, directions, rng)


@pytest.mark.parametrize("latent", KAPPA4)
def test_v_is_invisible_at_second_order_and_carries_the_fourth_cumulant(latent):
    model, directions, x = drawn(beta_u=4.0, beta_v=10.0, latent=latent)
    u, v = directions
    np.testing.assert_allclose(model.covariance(directions), np.eye(6) + 4 * np.outer(u, u), atol=1e-12)
    found = x.T @ x / N
    # Entries are means of products of variables with at most these fourth moments.
    np.testing.assert_allclose(found, model.covariance(directions), atol=5 * math.sqrt(80 / N))
    assert model.kappa4 == pytest.approx(KAPPA4[latent] * (10 / 11) ** 2, abs=1e-9)
    assert kstat(x @ v, 4) == pytest.approx(model.kappa4, abs=5 * math.sqrt(3_000 / N))
    other = np.linalg.svd(directions)[2][2]
    assert abs(kstat(x @ other, 4)) < 5 * math.sqrt(24 / N)


@pytest.mark.parametrize(
    ("latent", "rho"), [("rademacher", 0.7), ("rademacher", -1.0), ("uniform", 1.0), ("laplace", 0.4)]
)
def test_correlated_latents_show_in_the_covariance(latent, rho):
    model, directions, x = drawn(beta_u=2.0, beta_v=3.0, latent=latent, correlation=rho)
    if latent == "rademacher":
        assert model.latent_correlation == pytest.approx(rho * math.sqrt(2 / math.pi), abs=1e-12)
    if latent == "uniform":  # E[g sqrt(3) (2 Phi(g) - 1)] = sqrt(3 / pi)
        assert model.latent_correlation == pytest.approx(rho * math.sqrt(3 / math.pi), abs=1e-12)
    np.testing.assert_allclose(x.T @ x / N, model.covariance(directions), atol=5 * math.sqrt(40 / N))
    u, v = directions
    cross = math.sqrt(2.0) * math.sqrt(3 / 4) * model.latent_correlation
    assert u @ model.covariance(directions) @ v == pytest.approx(cross, abs=1e-12)
    assert v @ model.covariance(directions) @ v == pytest.approx(1.0, abs=1e-12)


def test_the_sign_of_a_correlated_latent_has_the_probability_it_should():
    model = MixedCumulant(correlation=0.6)
    lam, nu = model.latents((N,), np.random.default_rng(1))
    expected = quad(lambda g: norm.pdf(g) * g * erf(0.6 * g / math.sqrt(2 * (1 - 0.36))), -10, 10)[0]
    assert (lam * nu).mean() == pytest.approx(expected, abs=5 / math.sqrt(N))
    assert model.latent_correlation == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("latent", ["rademacher", "uniform", "laplace"])
def test_hermite_moments_are_those_of_the_law(latent):
    model, directions, x = drawn(beta_u=0.5, beta_v=2.0, latent=latent)
    powers = [np.ones(N), x @ directions[1]]
    for k in range(2, 5):
        powers.append(powers[1] * powers[-1] - (k - 1) * powers[-2])
    for k, moment in enumerate(model.hermite_moments_v(4)):
        assert powers[k].mean() == pytest.approx(moment, abs=5 * powers[k].std() / math.sqrt(N) + 1e-12)
    along_u = model.hermite_moments_u(6)
    assert along_u.tolist() == pytest.approx([1, 0, 0.5, 0, 3 * 0.25, 0, 15 * 0.125])


def test_data_turn_with_their_directions():
    model = MixedCumulant()
    turn = np.linalg.qr(np.random.default_rng(2).standard_normal((5, 5)))[0]
    plain = np.eye(2, 5)
    x = model.sample(40_000, plain, np.random.default_rng(3))
    y = model.sample(40_000, plain @ turn.T, np.random.default_rng(4)) @ turn
    for direction in (*plain, np.eye(5)[4]):
        for k in (2, 4):
            a, b = (x @ direction) ** k, (y @ direction) ** k
            assert abs(a.mean() - b.mean()) < 5 * math.hypot(a.std(), b.std()) / math.sqrt(40_000)


def test_each_run_has_its_own_directions():
    rng = np.random.default_rng(5)
    model = MixedCumulant(beta_u=50.0)
    directions = random_directions(4, rng, runs=3)
    x = model.sample((3, 20_000), directions, rng)
    assert x.shape == (3, 20_000, 4)
    for each, (u, v) in zip(x, directions, strict=True):
        assert u @ v == pytest.approx(0, abs=1e-12)
        assert (each @ u).var() == pytest.approx(51, rel=0.1)
        assert (each @ v).var() == pytest.approx(1, rel=0.1)


def test_the_data_set_maker_is_repeatable_and_leaves_global_states_alone():
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    first = make_mixed_cumulant(50, 7, random_state=11, return_directions=True)
    again = make_mixed_cumulant(50, 7, random_state=np.random.RandomState(11))
    np.testing.assert_array_equal(first.data, again)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002
    assert first.directions.shape == (2, 7)
    np.testing.assert_allclose(first.directions @ first.directions.T, np.eye(2), atol=1e-12)
    axes = make_mixed_cumulant(5, 7, shuffle_axes=False, random_state=0, return_directions=True)
    np.testing.assert_array_equal(axes.directions, np.eye(2, 7))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_features": 2}, "at least 3"),
        ({"n_samples": 0}, "n_samples must be at least 1"),
        ({"beta_v": -1.0}, "beta_v must be at least 0"),
        ({"latent": "cauchy"}, "unit variance"),
        ({"correlation": 1.5}, r"\[-1, 1\]"),
    ],
)
def test_what_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        make_mixed_cumulant(**options)
