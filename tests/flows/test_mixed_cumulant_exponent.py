"""The exponent: Hermite coefficients, the loss identity, its coefficients against the loss itself, and a user's directions."""

import doctest
import importlib
import math

import numpy as np
import pytest
from numpy.polynomial import hermite_e
from scipy.stats import norm
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA

from cameraready.flows.mixed_cumulant import (
    MixedCumulant,
    diffusion_information_exponent,
    empirical_exponent,
    make_mixed_cumulant,
    population_loss,
)
from cameraready.flows.mixed_cumulant._activation import activation, expectations
from cameraready.flows.mixed_cumulant.exponent import _judged, noise_levels


def kink(x):
    return np.maximum(x - 0.3, 0.0)


# --- Hermite coefficients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "identity"])
def test_closed_forms_of_kinked_activations(name):
    phi = activation(name)
    scale = np.sqrt([math.factorial(k) for k in range(11)])
    np.testing.assert_allclose(phi.hermite(10)[0] / scale, expectations(phi.function, 10) / scale, atol=1e-13)
    square = expectations(lambda x: phi.function(x) ** 2, 10)
    np.testing.assert_allclose(phi.hermite_of_square(10)[0] / scale, square / scale, atol=1e-13)


def test_smooth_activations_against_gauss_hermite_and_closed_forms():
    nodes, weights = hermite_e.hermegauss(120)
    weights /= weights.sum()
    gauss = hermite_e.hermevander(nodes, 8).T @ (weights * np.tanh(nodes))
    np.testing.assert_allclose(activation("tanh").hermite(8)[0], gauss, atol=2e-4)
    np.testing.assert_allclose(activation("tanh").hermite(8)[0][::2], 0, atol=1e-12)
    # E[sin(g) h_k(g)] = e^(-1/2) times the k-th derivative of sin at 0; erf by Stein: phi_1 = 2 / sqrt(3 pi), phi_3 = -4 / (3 sqrt(3 pi)).
    sine = activation("sin").hermite(6)[0]
    np.testing.assert_allclose(sine, math.exp(-0.5) * np.array([0, 1, 0, -1, 0, 1, 0]), atol=1e-12)
    erf = activation("erf").hermite(3)[0]
    np.testing.assert_allclose(erf, [0, 2 / math.sqrt(3 * math.pi), 0, -4 / (3 * math.sqrt(3 * math.pi))], atol=1e-12)
    np.testing.assert_allclose(activation("hermite3").hermite(4)[0], [0, 0, 0, 6, 0], atol=1e-11)


@pytest.mark.parametrize("name", ["tanh", "erf", "sin", "gelu", "silu", "hermite3"])
def test_derivatives_are_derivatives(name):
    phi, x, h = activation(name), np.linspace(-3, 3, 41), 1e-5
    slope = (phi.function(x + h) - phi.function(x - h)) / (2 * h)
    np.testing.assert_allclose(phi.derivative(x), slope, atol=1e-8)


# --- the loss ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phi", "rho", "overlaps"), [("tanh", 0.0, (0.3, 0.8)), ("gelu", 0.5, (0.6, -0.5)), ("sin", 1.0, (0.5, 0.5))]
)
def test_the_loss_depends_on_the_projection_alone(phi, rho, overlaps):
    model, d, n, gain, snr = MixedCumulant(correlation=rho), 4, 300_000, 0.7, 2.0
    rng = np.random.default_rng(0)
    w = np.array([*overlaps, math.sqrt(1 - sum(m * m for m in overlaps)), 0.0])
    (a,), (s,) = noise_levels(snr)
    x = model.sample(n, np.eye(2, d), rng)
    y = a * x + s * rng.standard_normal(x.shape)
    value = activation(phi).function(y @ w)
    losses = ((x - a * y - gain * value[:, None] * w) ** 2).sum(1)
    expected = population_loss(model, d, overlaps, phi=phi, snr=snr, gain=gain)
    assert losses.mean() == pytest.approx(expected, abs=4.5 * losses.std() / math.sqrt(n))


@pytest.mark.parametrize("phi", ["tanh", "erf", "sin", "relu", "gelu"])
@pytest.mark.parametrize("direction", ["covariance", "fourth"])
def test_coefficients_are_those_of_the_loss(phi, direction):
    model, snr, gain = MixedCumulant(beta_u=0.5, latent="laplace"), 0.7, 0.4
    found = diffusion_information_exponent(phi, snr, direction, model=model, gain=gain, max_order=20)
    for m in (0.1, 0.2):
        at = (m, 0.0) if direction == "covariance" else (0.0, m)
        change = population_loss(model, 5, at, phi=phi, snr=snr, gain=gain) - population_loss(
            model, 5, (0.0, 0.0), phi=phi, snr=snr, gain=gain
        )
        assert change == pytest.approx(found.coefficients @ m ** np.arange(21), abs=1e-9)


@pytest.mark.parametrize(("direction", "order"), [("covariance", 2), ("fourth", 4), ("correlated", 1)])
def test_the_leading_power_of_the_loss_is_the_exponent(direction, order):
    model = MixedCumulant(correlation=0.8 if direction == "correlated" else 0.0)
    at = {"covariance": lambda m: (m, 0.0), "fourth": lambda m: (0.0, m), "correlated": lambda m: (0.5, m)}[direction]
    m = np.geomspace(0.02, 0.06, 4)
    base = population_loss(model, 5, at(0.0))
    change = np.array([population_loss(model, 5, at(each)) - base for each in m])
    slope = np.polyfit(np.log(m), np.log(np.abs(change)), 1)[0]
    assert slope == pytest.approx(order, abs=0.05)
    found = diffusion_information_exponent("tanh", 1.0, direction, model=model)
    assert found.order == order
    assert change[0] / m[0] ** order == pytest.approx(found.coefficient, rel=0.05)
    assert (found.sign == "attractive") == (change[0] < 0)


def test_the_papers_three_statements_as_exponents():
    assert diffusion_information_exponent("tanh", 1.0, "covariance").sample_complexity == "d log d"
    assert diffusion_information_exponent("tanh", 1.0, "fourth").sample_complexity == "d^3"
    assert diffusion_information_exponent("tanh", 1.0, "correlated").sample_complexity == "d"
    independent = diffusion_information_exponent("tanh", 1.0, "correlated", model=MixedCumulant())
    assert independent.order == 4


def test_signs_follow_gain_and_cumulant():
    def sign(**options):
        model = MixedCumulant(latent=options.pop("latent", "rademacher"))
        return diffusion_information_exponent("tanh", 1.0, "fourth", model=model, **options)

    assert sign(gain=0.3).sign == "attractive"
    assert sign(gain=0.3, latent="laplace").sign == "repulsive"
    assert sign(gain=-0.3).sign == "repulsive"
    assert "pushes away" in sign(gain=-0.3).sample_complexity


def test_why_an_exponent_is_infinite():
    def reason(phi="tanh", **options):
        found = diffusion_information_exponent(phi, 1.0, "fourth", model=MixedCumulant(**options))
        assert math.isinf(found.order)
        assert found.sign == "none"
        return found.reason

    assert "beta_v is 0" in reason(beta_v=0.0)
    assert "latent is Gaussian" in reason(latent="gaussian")
    assert "'relu' does not couple" in reason("relu")
    assert "'identity' does not couple" in reason("identity")
    assert diffusion_information_exponent("relu", 1.0, "covariance").order == 2


def test_without_the_third_hermite_coefficient_the_square_still_couples():
    """phi_3 = 0 is not enough: the term of phi^2 has a fourth coefficient of its own, unless phi is piecewise linear."""
    third = activation("tanh").hermite(3)[0][3]

    def without(x):
        return np.tanh(x) - third * (x**3 - 3 * x) / 6

    assert abs(expectations(without, 3)[3]) < 1e-12
    assert diffusion_information_exponent(without, 1.0, "fourth").order == 4
    assert diffusion_information_exponent(without, 1.0, "fourth", gain=-0.5).sign == (
        diffusion_information_exponent(without, 1.0, "fourth").sign
    )


def test_averaging_noise_levels_can_cancel_a_degree():
    levels = [diffusion_information_exponent("hermite3", snr, "fourth", gain=0.05) for snr in (1.0, 400.0)]
    assert {level.sign for level in levels} == {"attractive", "repulsive"}
    weights = [abs(levels[1].coefficient), abs(levels[0].coefficient)]
    averaged = diffusion_information_exponent("hermite3", [1.0, 400.0], "fourth", gain=0.05, weights=weights)
    assert averaged.order > 4
    assert "cancels in the average" in averaged.reason
    assert [level.order for level in averaged.levels] == [4, 4]
    plain = diffusion_information_exponent("tanh", [0.5, 1.0, 2.0], "fourth")
    assert plain.coefficient == pytest.approx(np.mean([level.coefficient for level in plain.levels]))


def test_a_kink_off_the_nodes_is_known_as_well_as_it_says():
    found, off = activation(kink).hermite(2)
    density = math.exp(-0.045) / math.sqrt(2 * math.pi)
    exact = [density - 0.3 * norm.sf(0.3), norm.sf(0.3), density]
    assert (np.abs(found - exact) <= 10 * off).all()
    assert off.max() < 1e-3
    found = diffusion_information_exponent(kink, 1.0, "fourth", model=MixedCumulant(beta_v=0.0))
    assert math.isinf(found.order)


def test_a_coefficient_within_what_the_quadrature_may_be_off_by_does_not_count():
    coefficients, off = np.array([0.0, 1e-7, -1e-3]), np.array([0.0, 5e-8, 1e-9])
    found = _judged(coefficients, off, 1e-9, "", activation("tanh"), 1.0)
    assert (found.order, found.sign) == (2, "attractive")
    assert "only to" in found.reason
    assert _judged(coefficients, 0 * off, 1e-9, "", activation("tanh"), 1.0).order == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"phi": "swish2"}, "there is no activation"),
        ({"snr": -1.0}, "snr must be positive"),
        ({"direction": "w"}, "direction must be"),
        ({"gain": 0.0}, "neuron would not speak"),
        ({"snr": [1.0, 2.0], "weights": [1.0]}, "weights must be 2 numbers"),
        ({"max_order": 0}, "max_order"),
        ({"direction": "correlated", "overlap": 1.0}, "strictly between"),
        ({"direction": "correlated", "phi": np.tanh}, "derivative"),
        ({"phi": lambda x: 1 / (x - x)}, "finite"),
    ],
)
def test_what_is_refused(options, words):
    with pytest.raises(ValueError, match=words), np.errstate(all="ignore"):
        diffusion_information_exponent(**options)


# --- a user's directions -----------------------------------------------------------------------------------------------------


def test_directions_of_data_get_the_exponent_they_have():
    made = make_mixed_cumulant(20_000, 8, random_state=0, return_directions=True)
    u, v = made.directions
    along_u, along_v = empirical_exponent(3 * made.data + 1, u), empirical_exponent(made.data, v)
    assert (along_u.exponent.order, along_v.exponent.order) == (2, 4)
    assert along_u.moments[2] == pytest.approx(4, abs=0.3)
    assert along_v.moments[4] == pytest.approx(made.model.kappa4, abs=0.1)
    exact = diffusion_information_exponent("tanh", 1.0, "fourth").coefficient
    assert along_v.exponent.coefficient == pytest.approx(exact, rel=0.1)
    assert math.isinf(empirical_exponent(made.data, u, whiten=True).exponent.order)
    assert empirical_exponent(made.data, v, whiten=True).exponent.order == 4
    assert "does not couple" in empirical_exponent(made.data, v, phi="relu").exponent.reason


@pytest.mark.parametrize(("n", "d", "whiten"), [(800, 3, True), (60, 4, False), (200, 50, False), (120, 90, False)])
def test_gaussian_data_seldom_get_an_exponent(n, d, whiten):
    rng, first = np.random.default_rng(1), np.eye(1, d)[0]
    wrong = sum(
        math.isfinite(empirical_exponent(rng.standard_normal((n, d)), first, whiten=whiten).exponent.order)
        for _ in range(40)
    )
    assert wrong <= 7  # 5 per cent are allowed: 2 of 40, with room for chance and for tails that are not yet Gaussian


@pytest.mark.parametrize(("n", "d"), [(2_000, 5), (2_000, 20)])
def test_a_sign_has_the_order_of_a_sign(n, d):
    """The square of the projection is constant there: all that moves at second order is the unit, whose error must count."""
    rng, first = np.random.default_rng(2), np.eye(1, d)[0]
    orders = []
    for _ in range(30):
        X = rng.standard_normal((n, d))
        X[:, 0] = np.sign(X[:, 0])
        orders.append(empirical_exponent(X, first).exponent.order)
    assert orders.count(4) >= 26


def test_strong_spikes_do_not_move_the_unit():
    made = make_mixed_cumulant(3_000, 30, beta_u=50.0, random_state=1, return_directions=True)
    found = empirical_exponent(made.data, made.directions[1])
    assert abs(found.moments[2]) < 4 * found.standard_errors[2]
    assert found.exponent.order == 4


@pytest.mark.parametrize(
    ("X", "direction", "options", "words"),
    [
        (np.ones((5, 3)), [1, 0, 0], {}, "at least 50"),
        (np.random.default_rng(0).normal(size=(60, 3)), [1, 0], {}, "2 entries"),
        (np.random.default_rng(0).normal(size=(60, 3)), [0, 0, 0], {}, "points nowhere"),
        (np.full((60, 3), np.nan), [1, 0, 0], {}, "NaN"),
        (np.ones((60, 3)), [1, 0, 0], {}, "no bulk"),
        (np.random.default_rng(0).normal(size=(600, 9)) * 2.0 ** np.arange(9), np.eye(9)[0], {}, "no bulk"),
        (np.ones((60, 3)), [1, 0, 0], {"whiten": True}, "full rank"),
        (np.ones((60, 70)), np.eye(70)[0], {}, "more samples than features"),
        (np.random.default_rng(0).normal(size=(60, 2)), [1, 0], {}, "across"),
    ],
)
def test_data_that_tell_nothing_are_refused(X, direction, options, words):
    with pytest.raises(ValueError, match=words):
        empirical_exponent(X, direction, **options)


def test_images_get_clear_words_and_then_an_exponent_that_names_what_it_passes_over():
    """The first component of digits is skewed, which tanh, being odd, does not hear."""
    X = load_digits().images
    with pytest.raises(ValueError, match=r"\(images have none\): use whiten=True.*principal components"):
        empirical_exponent(X, np.ones(64))
    with pytest.raises(ValueError, match=r"as images do.*pca.components_ @ direction"):
        empirical_exponent(X, np.ones(64), whiten=True)
    found = empirical_exponent(PCA(20, random_state=0).fit_transform(X.reshape(-1, 64)), np.eye(20)[0], whiten=True)
    assert found.exponent.order == 4
    assert found.seen[3]
    assert "degree 3, 5 differs from a Gaussian's and is passed over: the activation 'tanh' does not" in str(found)
    assert "degree 2 is taken out by whiten=True" in found.exponent.reason
    assert "degree 2 could not" not in found.exponent.reason
    assert "1: 0 by construction, 2: 0 by construction, 3: " in str(found)


@pytest.mark.parametrize("name", [pytest.param("callback", marks=pytest.mark.torch), "empirical"])
def test_examples_say_what_they_print(name):
    module = importlib.import_module(f"cameraready.flows.mixed_cumulant.{name}")
    failed, tried = doctest.testmod(module)
    assert tried > 0
    assert failed == 0
