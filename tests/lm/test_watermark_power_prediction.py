"""Green mass, thresholds and power: closed forms, limits, and brute force."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from cameraready.lm.watermark_power import Contexts, WatermarkCalibrator, threshold_count
from cameraready.lm.watermark_power.theory.greenmass import GreenMass, realised
from cameraready.lm.watermark_power.theory.tails import matched_tail, normal_threshold, poisson_binomial_tail, size

pytestmark = pytest.mark.torch

V = 400


def families(rng):
    zipf = 1 / np.arange(1, V + 1)
    peaked = np.full(V, 0.2 / (V - 1))
    peaked[0] = 0.8
    top20 = np.zeros(V)
    top20[:20] = 0.05
    return np.stack([zipf / zipf.sum(), peaked, top20, rng.dirichlet(np.full(V, 0.02))])


def drawn_masses(p, green, rng, n=4000):
    """Green probability of each row under n random lists of `green` tokens, (rows, n), and the lists."""
    lists = np.argsort(rng.random((n, V)), axis=1)[:, :green]
    return np.stack([row[lists].sum(axis=1) for row in p]).clip(0, 1), lists


# --- green mass ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.05, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("delta", [0.1, 1.0, 3.0, 8.0])
def test_effect_is_that_of_random_lists(gamma, delta):
    rng = np.random.default_rng(0)
    p = families(rng)
    green = int(gamma * V)
    g, lists = drawn_masses(p, green, rng)
    z = 1 + g * math.expm1(delta)
    q = g * math.exp(delta) / z
    surprisal = -np.log(np.where(p > 0, p, 1))
    weighted = np.stack([(row * s)[lists].sum(axis=1) for row, s in zip(p, surprisal, strict=True)])
    whole = (p * surprisal).sum(axis=1)[:, None]
    brute = {
        "rate": q,
        "kl": delta * q - np.log(z),
        "reverse_kl": np.log(z) - delta * g,
        "variation": np.abs(q - g),
        "surprisal": (whole + weighted * math.expm1(delta)) / z - whole,
    }
    found = GreenMass(Contexts.of(p), green / V, V).effect(delta)
    for name, values in brute.items():
        error = values.std(axis=1) / math.sqrt(values.shape[1])
        # Four standard errors of the brute force, the 1/V error of fixed-size lists, and the integrals'.
        allowed = 4 * error + 2 / V * np.abs(values.mean(axis=1)).max() + 1e-5
        assert (np.abs(getattr(found, name) - values.mean(axis=1)) < allowed).all(), name


def test_high_entropy_limit_is_the_closed_form():
    gamma, delta = 0.3, 1.7
    z = 1 + gamma * math.expm1(delta)
    rate = gamma * math.exp(delta) / z
    plan = WatermarkCalibrator.high_entropy().predict(gamma, delta, alpha=0.01, length=100)
    assert plan.green_rate == pytest.approx(rate, abs=1e-5)
    assert plan.kl == pytest.approx(delta * rate - math.log(z), abs=1e-5)
    assert plan.reverse_kl == pytest.approx(math.log(z) - delta * gamma, abs=1e-5)
    assert plan.total_variation == pytest.approx(rate - gamma, abs=1e-5)
    assert plan.power == pytest.approx(stats.binom.sf(plan.threshold_count - 1, 100, rate), abs=1e-5)


@pytest.mark.parametrize("vocab", [2, 3, 4, 8, 12])
@pytest.mark.parametrize("delta", [0.5, 2.0, 15.0])
def test_small_vocabularies_are_exact(vocab, delta):
    p = np.stack([np.full(vocab, 1 / vocab), np.random.default_rng(vocab).dirichlet(np.full(vocab, 0.5))])
    for green in range(1, vocab):
        lists = [list(chosen) for chosen in itertools.combinations(range(vocab), green)]
        g = np.stack([p[:, chosen].sum(axis=1) for chosen in lists], axis=1)
        z = 1 + g * math.expm1(delta)
        q = g * math.exp(delta) / z
        rate, kl = GreenMass(Contexts.of(p), green / vocab, vocab).rate_and_kl(delta)
        np.testing.assert_allclose(rate, q.mean(axis=1), atol=2e-3)
        np.testing.assert_allclose(kl, (delta * q - np.log(z)).mean(axis=1), atol=5e-3)


def test_small_bias_law():
    rng = np.random.default_rng(1)
    contexts = Contexts.of(families(rng))
    gamma, delta = 0.5, 0.02
    spread = (contexts.collision - 1 / V) * V / (V - 1)
    expected = gamma * (1 - gamma) * (1 - spread)
    rate, kl = GreenMass(contexts, gamma, V).rate_and_kl(delta)
    np.testing.assert_allclose((rate - gamma) / delta, expected, rtol=0.03)
    np.testing.assert_allclose(kl / (delta**2 / 2), expected, rtol=0.03)


def test_a_certain_token_cannot_be_watermarked():
    p = np.zeros((1, V))
    p[0, 3] = 1.0
    rate, kl = GreenMass(Contexts.of(p), 0.25, V).rate_and_kl(5.0)
    assert rate[0] == pytest.approx(0.25, abs=1e-5)
    assert kl[0] == pytest.approx(0.0, abs=1e-5)


def test_rate_and_divergence_grow_with_delta_up_to_any_size():
    mass = GreenMass(Contexts.of(families(np.random.default_rng(2))), 0.25, V)
    deltas = [0.0, 0.01, 0.5, 2.0, 10.0, 50.0, 1e4, 1e300]
    rates, kls = zip(*(mass.rate_and_kl(d) for d in deltas), strict=True)
    assert np.isfinite(rates).all()
    assert np.isfinite(kls).all()
    assert (np.diff(rates, axis=0) >= -1e-9).all()
    assert (np.diff(kls, axis=0) >= -1e-6).all()
    assert (np.array(rates) <= 1).all()
    assert rates[0] == pytest.approx(0.25)


def test_a_forced_list_costs_minus_log_gamma():
    plan = WatermarkCalibrator.high_entropy().predict(0.9, 700.0, alpha=0.01, length=50)
    assert plan.kl == pytest.approx(-math.log(0.9), abs=1e-4)
    assert plan.green_rate == pytest.approx(1.0, abs=1e-5)


def test_selfhash_favours_no_more_than_forty_tokens():
    rng = np.random.default_rng(3)
    p = np.full((1, V), 1 / V)
    gamma, delta, n = 0.4, 2.0, 200_000
    # Memberships are independent; 40 tokens can be favoured, the others are green with probability gamma for the detector.
    g = rng.binomial(40, gamma, size=n) / V
    z = 1 + g * math.expm1(delta)
    rate, kl = GreenMass(Contexts.of(p), gamma, V, "selfhash").rate_and_kl(delta)
    assert rate[0] == pytest.approx(((g * math.exp(delta) + gamma * (1 - 40 / V)) / z).mean(), abs=2e-4)
    assert kl[0] == pytest.approx((delta * g * math.exp(delta) / z - np.log(z)).mean(), abs=2e-4)


def test_top_tokens_and_remainder_say_the_same_as_all_tokens():
    p = np.sort(np.random.default_rng(4).dirichlet(np.full(5000, 0.3), size=3))[:, ::-1]
    whole = GreenMass(Contexts.of(p), 0.25, 5000).effect(2.0)
    part = GreenMass(Contexts.of(p[:, :1024], 5000), 0.25, 5000).effect(2.0)
    np.testing.assert_allclose(part.rate, whole.rate, atol=2e-4)
    np.testing.assert_allclose(part.kl, whole.kl, atol=2e-4)


def test_probabilities_may_be_tensors_of_any_dtype():
    p = np.random.default_rng(6).dirichlet(np.full(100, 0.2), size=4)
    tensor = torch.tensor(p, dtype=torch.float32, requires_grad=True)
    np.testing.assert_allclose(Contexts.of(tensor).collision, Contexts.of(p).collision, rtol=1e-5)
    coarse = torch.tensor(p / p.sum(axis=1, keepdims=True)).to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"softmax in float32|vocab_size"):
        Contexts.of(coarse)


def test_entropy_and_collision_are_exact():
    p = np.random.default_rng(5).dirichlet(np.full(300, 0.2), size=4)
    contexts = Contexts.of(p)
    np.testing.assert_allclose(contexts.collision, (p**2).sum(axis=1))
    np.testing.assert_allclose(contexts.entropy, -(p * np.log(np.where(p > 0, p, 1))).sum(axis=1), rtol=1e-9)


# --- thresholds and tails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.05, 0.25, 0.5, 0.946])
@pytest.mark.parametrize("length", [1, 7, 25, 50, 200])
@pytest.mark.parametrize("alpha", [0.05, 1e-3, 1e-6])
def test_threshold_is_the_smallest_that_keeps_alpha(gamma, length, alpha):
    k = threshold_count(alpha, length, gamma)
    assert size(k, length, gamma) <= alpha
    assert k == 0 or size(k - 1, length, gamma) > alpha
    assert k <= length + 1


def test_poisson_binomial_is_the_convolution():
    rates = np.random.default_rng(0).random((3, 12))
    for row, tails in zip(rates, np.stack([poisson_binomial_tail(rates, k) for k in range(15)]).T, strict=True):
        law = np.ones(1)
        for rate in row:
            law = np.convolve(law, [1 - rate, rate])
        np.testing.assert_allclose(tails, [law[k:].sum() for k in range(15)], atol=1e-12)


def test_matched_tail_is_near_the_exact_one():
    rng = np.random.default_rng(1)
    rates = rng.beta(2, 3, size=(50, 100))
    mean, variance = rates.sum(axis=1), (rates * (1 - rates)).sum(axis=1)
    for k in (30, 40, 50):
        np.testing.assert_allclose(matched_tail(mean, variance, k), poisson_binomial_tail(rates, k), atol=3e-3)


def test_matched_tail_of_equal_rates_is_binomial():
    mean, variance = np.array([30.0]), np.array([30.0 * 0.7])
    assert matched_tail(mean, variance, 40)[0] == pytest.approx(stats.binom.sf(39, 100, 0.3), rel=1e-9)


def test_realised_share_is_cut_off():
    assert realised(0.25, 10) == 0.2
    assert realised(0.25, None) == 0.25
    with pytest.raises(ValueError, match="no green token"):
        realised(0.05, 10)


def test_z_of_four_is_not_its_normal_size_on_short_texts():
    # Four standard deviations at 25 tokens and gamma 0.25 are 15 green tokens.
    count = math.ceil(0.25 * 25 + 4 * math.sqrt(25 * 0.25 * 0.75))
    assert size(count, 25, 0.25) > 5 * stats.norm.sf(4)


def test_the_published_operating_point_exceeds_its_false_positive_rate():
    # optimal_power_results_combined.csv of the authors: alpha = 0.05, 50 tokens.
    gamma = 0.9462668142137298
    assert normal_threshold(0.05, 50, gamma) == 50
    assert size(50, 50, gamma) == pytest.approx(gamma**50)
    assert size(50, 50, gamma) > 0.06
    assert threshold_count(0.05, 50, gamma) == 51  # not even all green is significant
