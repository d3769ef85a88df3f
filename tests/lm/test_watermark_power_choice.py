"""What the calibrator chooses: constraints, optima, monotonicity, published numbers, errors."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from cameraready.lm.watermark_power import FrontierPoint, Infeasible, WatermarkCalibrator
from cameraready.lm.watermark_power.theory.constraints import default_gammas
from cameraready.lm.watermark_power.theory.frontier import undominated


@pytest.fixture(scope="module")
def calibrator():
    rng = np.random.default_rng(0)
    p = np.concatenate([rng.dirichlet(np.full(300, a), size=40) for a in (0.02, 0.05, 0.1, 0.2, 0.02, 0.3)])
    return WatermarkCalibrator.from_probs(p, texts=np.arange(240) // 40)


# Sheet of expected numbers: exact test, high-entropy limit.
@pytest.mark.parametrize(
    ("alpha", "length", "gamma", "delta", "kl"),
    [
        (1e-4, 200, 0.05, 1.279, 0.0814),
        (1e-4, 200, 0.25, 0.816, 0.0766),
        (1e-4, 200, 0.50, 0.786, 0.0716),
        (1e-4, 200, 0.75, 1.084, 0.0710),
        (1e-3, 50, 0.25, 1.443, 0.252),
        (1e-3, 50, 0.75, 2.456, 0.191),
    ],
)
def test_smallest_bias_in_the_high_entropy_limit(alpha, length, gamma, delta, kl):
    plan = WatermarkCalibrator.high_entropy().minimise_distortion(
        alpha=alpha, power=0.95, length=length, shortest=length, kept=1, gammas=[gamma]
    )
    assert plan.delta == pytest.approx(delta, abs=6e-4)
    assert plan.kl == pytest.approx(kl, abs=6e-4)


def test_normal_test_is_the_published_formula():
    gamma, delta, alpha, n = 0.4, 1.2, 0.05, 80
    rate = gamma * math.exp(delta) / (1 + gamma * math.expm1(delta))
    z = (math.sqrt(n) * (rate - gamma) - stats.norm.isf(alpha) * math.sqrt(gamma * (1 - gamma))) / math.sqrt(
        rate * (1 - rate)
    )
    plan = WatermarkCalibrator.high_entropy().predict(gamma, delta, alpha=alpha, length=n, test="normal")
    assert plan.power == pytest.approx(stats.norm.cdf(z), abs=1e-5)


def test_minimum_distortion_meets_its_constraints_and_no_less_would(calibrator):
    plan = calibrator.minimise_distortion(alpha=1e-3, power=0.9, length=100, kept=1)
    assert plan.size <= 1e-3
    assert plan.power >= 0.9
    assert plan.kl <= min(point.kl for point in plan.ridge) * 1.02
    less = [calibrator.predict(plan.gamma, 0.97 * plan.delta, alpha=1e-3, length=n).power for n in range(90, 111)]
    assert min(less) < 0.9


def test_the_power_holds_at_every_length_provided_for(calibrator):
    plan = calibrator.minimise_distortion(alpha=1e-3, power=0.9, length=60, shortest=50, kept=1)
    powers = [calibrator.predict(plan.gamma, plan.delta, alpha=1e-3, length=n).power for n in range(50, 71)]
    assert min(powers) >= 0.9
    assert plan.least_power == pytest.approx(min(powers), abs=1e-3)
    assert plan.shortest == 50
    assert plan.spare == 60 - plan.threshold_count
    # Without that care the choice is lost at one token less.
    edge = calibrator.minimise_distortion(alpha=1e-3, power=0.9, length=60, shortest=60, kept=1)
    assert edge.spare == 0
    assert calibrator.predict(edge.gamma, edge.delta, alpha=1e-3, length=59).power == 0
    with pytest.raises(ValueError, match="shortest must be at most length"):
        calibrator.minimise_distortion(alpha=1e-3, power=0.9, length=60, shortest=61)


def test_no_bias_is_needed_for_a_power_below_the_size():
    plan = WatermarkCalibrator.high_entropy().minimise_distortion(alpha=0.5, power=0.01, length=50)
    assert plan.delta == 0
    assert plan.kl == 0


def test_selfhash_keeps_to_shares_with_which_transformers_generates():
    p = np.random.default_rng(0).dirichlet(np.full(200, 0.2), size=60)
    plan = WatermarkCalibrator.from_probs(p, scheme="selfhash").minimise_distortion(alpha=1e-2, power=0.9, length=60)
    assert plan.gamma >= 0.4
    assert plan.to_transformers().seeding_scheme == "selfhash"
    sparse = WatermarkCalibrator.from_probs(p, scheme="selfhash").predict(0.1, 2.0, alpha=1e-2, length=60)
    with pytest.raises(ValueError, match="stops generating"):
        sparse.to_transformers()


def test_chosen_point_is_not_dominated_on_a_grid(calibrator):
    plan = calibrator.minimise_distortion(alpha=1e-3, power=0.9, length=100, shortest=100, kept=1)
    for gamma in (0.1, 0.25, 0.5, 0.75, 0.9):
        for delta in (0.25, 0.5, 1.0, 2.0, 3.0, 5.0):
            other = calibrator.predict(gamma, delta, alpha=1e-3, length=100)
            assert not (other.power > plan.power + 1e-6 and other.kl < plan.kl - 1e-6), (gamma, delta)


def test_maximum_power_keeps_the_budget(calibrator):
    plan = calibrator.maximise_power(alpha=1e-3, length=100, max_kl=0.05)
    assert plan.kl <= 0.05 + 1e-9
    assert plan.least_power == pytest.approx(max(point.power for point in plan.ridge))
    more = calibrator.maximise_power(alpha=1e-3, length=100, max_kl=0.1)
    assert more.power > plan.power


def test_the_two_questions_answer_each_other(calibrator):
    plan = calibrator.minimise_distortion(alpha=1e-3, power=0.8, length=100, gammas=[0.5])
    back = calibrator.maximise_power(alpha=1e-3, length=100, max_kl=plan.kl, gammas=[0.5])
    assert back.delta == pytest.approx(plan.delta, rel=1e-3)


def test_required_length_is_enough_and_one_less_is_not(calibrator):
    length = calibrator.required_length(alpha=1e-3, power=0.9, max_kl=0.08)
    assert calibrator.maximise_power(alpha=1e-3, length=length, max_kl=0.08).least_power >= 0.9
    assert calibrator.maximise_power(alpha=1e-3, length=length - 1, max_kl=0.08).least_power < 0.9


def test_frontier_rises_and_brackets_its_estimates(calibrator):
    points = calibrator.frontier(alpha=1e-3, length=100, gammas=[0.25, 0.5, 0.75], seed=1)
    assert [p.kl for p in points] == sorted(p.kl for p in points)
    assert [p.power for p in points] == sorted(p.power for p in points)
    assert all(p.power_low <= p.power <= p.power_high and p.kl_low <= p.kl <= p.kl_high for p in points)
    assert points == calibrator.frontier(alpha=1e-3, length=100, gammas=[0.25, 0.5, 0.75], seed=1)


def test_undominated_by_hand():
    def point(power, kl):
        return FrontierPoint(0.5, 1.0, power, power, power, kl, kl, kl)

    points = [point(0.5, 0.1), point(0.4, 0.2), point(0.9, 0.3), point(0.5, 0.05), point(0.9, 0.4)]
    assert undominated(points) == [point(0.5, 0.05), point(0.9, 0.3)]


def test_unequal_texts_lower_power():
    rng = np.random.default_rng(1)
    flat, sharp = rng.dirichlet(np.full(300, 1.0), size=200), rng.dirichlet(np.full(300, 0.002), size=200)
    p = np.concatenate([flat, sharp])
    apart = WatermarkCalibrator.from_probs(p, texts=np.repeat([0, 0, 1, 1], 100))
    mixed = WatermarkCalibrator.from_probs(p)
    options = {"gamma": 0.5, "delta": 1.2, "alpha": 1e-3, "length": 100}
    assert apart.predict(**options).power < mixed.predict(**options).power - 0.1
    assert apart.predict(**options).kl == pytest.approx(mixed.predict(**options).kl)


def test_power_of_texts_is_that_of_simulated_ones():
    rng = np.random.default_rng(2)
    p = rng.dirichlet(np.full(200, 0.05), size=300)
    texts = np.arange(300) // 60
    gamma, delta, length, n = 0.5, 0.9, 60, 4000
    plan = WatermarkCalibrator.from_probs(p, texts=texts).predict(gamma, delta, alpha=1e-2, length=length)
    greens = np.zeros(n)
    which = rng.integers(5, size=n)
    for position in range(length):
        rows = p[which * 60 + position]
        green = np.argsort(rng.random(rows.shape), axis=1) < 100
        g = (rows * green).sum(axis=1)
        greens += rng.random(n) < g * math.exp(delta) / (1 + g * math.expm1(delta))
    found = (greens >= plan.threshold_count).mean()
    assert abs(found - plan.power) < 3 * math.sqrt(found * (1 - found) / n)


def test_the_default_choice_survives_edits_and_shorter_texts():
    high = WatermarkCalibrator.high_entropy()
    task = {"alpha": 1e-3, "power": 0.9, "length": 100}
    usual = high.minimise_distortion(**task)
    edge = high.minimise_distortion(**task, shortest=100, kept=1)
    assert edge.gamma == pytest.approx(1e-3 ** (1 / 100))  # all green, or nothing
    assert edge.spare == 0
    assert usual.spare > 0
    assert edge.kl < usual.kl
    worst = {"alpha": 1e-3, "length": 100, "shortest": 90, "kept": 0.95}
    assert high.predict(edge.gamma, edge.delta, **worst).least_power < 0.1
    assert usual.least_power == pytest.approx(high.predict(usual.gamma, usual.delta, **worst).least_power)
    assert usual.least_power >= 0.9
    assert usual.power > usual.least_power


def test_edited_tokens_are_green_by_chance():
    high = WatermarkCalibrator.high_entropy()
    plan = high.predict(0.5, 2.0, alpha=1e-2, length=80, kept=0.7)
    rate = 0.7 * math.exp(2) / (1 + math.exp(2)) + 0.3 * 0.5
    assert plan.least_power == pytest.approx(stats.binom.sf(plan.threshold_count - 1, 80, rate), abs=1e-4)
    assert plan.power == pytest.approx(high.predict(0.5, 2.0, alpha=1e-2, length=80).power)


def test_a_text_too_short_for_any_threshold_has_no_power():
    plan = WatermarkCalibrator.high_entropy().predict(0.5, 5.0, alpha=1e-6, length=10)
    assert plan.threshold_count == 11
    assert plan.power == 0.0
    assert plan.size == 0.0


def test_infeasible_says_how_near_one_comes():
    p = np.zeros((5, 100))
    p[:, 0] = 1.0
    with pytest.raises(Infeasible, match="the most is"):
        WatermarkCalibrator.from_probs(p).minimise_distortion(alpha=1e-3, power=0.9, length=100)
    with pytest.raises(Infeasible, match="texts of up to"):
        WatermarkCalibrator.from_probs(p).required_length(alpha=1e-3, power=0.9, max_kl=0.1, longest=200)


def test_default_gammas_hold_the_last_significant_one():
    grid = default_gammas(1e-3, 100, 1.0)
    assert max(g for g in grid if g**100 <= 1e-3) == pytest.approx(1e-3 ** (1 / 100))
    assert max(g for g in default_gammas(1e-3, 100, 0.95) if g**100 <= 1e-3) == 0.92


@pytest.mark.parametrize("gamma", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_gamma_outside_its_range(gamma):
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        WatermarkCalibrator.high_entropy().predict(gamma, 1.0, alpha=0.01, length=10)


@pytest.mark.parametrize("delta", [-1.0, math.inf, math.nan])
def test_delta_outside_its_range(delta):
    with pytest.raises(ValueError, match="delta"):
        WatermarkCalibrator.high_entropy().predict(0.5, delta, alpha=0.01, length=10)


def test_wrong_arguments_get_a_sentence():
    high = WatermarkCalibrator.high_entropy()
    with pytest.raises(ValueError, match="alpha"):
        high.predict(0.5, 1.0, alpha=0.0, length=10)
    with pytest.raises(ValueError, match="length"):
        high.predict(0.5, 1.0, alpha=0.1, length=0)
    with pytest.raises(ValueError, match="power"):
        high.minimise_distortion(alpha=0.1, power=1.0, length=10)
    with pytest.raises(ValueError, match="max_kl"):
        high.maximise_power(alpha=0.1, length=10, max_kl=0.0)
    with pytest.raises(ValueError, match="'exact' or 'normal'"):
        high.predict(0.5, 1.0, alpha=0.1, length=10, test="z")
    with pytest.raises(ValueError, match="gammas is empty"):
        high.maximise_power(alpha=0.1, length=10, max_kl=0.1, gammas=[])
    with pytest.raises(ValueError, match="kept"):
        high.minimise_distortion(alpha=0.1, power=0.5, length=10, kept=0.0)
    with pytest.raises(ValueError, match="scheme"):
        WatermarkCalibrator.high_entropy(scheme="righthash")
    with pytest.raises(ValueError, match="not logits"):
        WatermarkCalibrator.from_probs(np.array([[1.5, -0.5]]))
    with pytest.raises(ValueError, match="more than 1"):
        WatermarkCalibrator.from_probs(np.array([[0.8, 0.8]]))
    with pytest.raises(ValueError, match="pass vocab_size"):
        WatermarkCalibrator.from_probs(np.array([[0.5, 0.2]]))
    with pytest.raises(ValueError, match="shape"):
        WatermarkCalibrator.from_probs(np.array([[0.5, 0.5]]), texts=np.arange(3))
    with pytest.raises(ValueError, match="at least one resample"):
        high.frontier(alpha=0.1, length=10, n_resamples=0)
    with pytest.raises(ValueError, match="frontier takes deltas"):
        high.frontier(alpha=0.1, length=10, deltas=[])
    with pytest.raises(TypeError, match="alpha must be a number"):
        high.predict(0.5, 1.0, alpha="0.1", length=10)
    with pytest.raises(TypeError, match="gamma must be a number"):
        high.predict(None, 1.0, alpha=0.1, length=10)


def test_markllm_gets_json_with_its_own_place_for_the_bias():
    hot = WatermarkCalibrator.high_entropy(temperature=0.5).predict(0.25, 2.0, alpha=1e-3, length=100)
    config = json.loads(json.dumps(hot.to_markllm(hash_key=7)))
    assert config["algorithm_name"] == "KGW"
    assert config["delta"] == pytest.approx(1.0)  # added before the logits are divided by 0.5
    assert (config["gamma"], config["hash_key"], config["prefix_length"]) == (0.25, 7, 1)
    cut = WatermarkCalibrator.high_entropy(truncated=True).predict(0.25, 2.0, alpha=1e-3, length=100)
    with pytest.raises(ValueError, match="top-k or top-p"):
        cut.to_markllm()


def test_z_threshold_separates_the_counts():
    plan = WatermarkCalibrator.high_entropy().predict(0.25, 2.0, alpha=1e-3, length=100)
    deviation = math.sqrt(100 * 0.25 * 0.75)
    assert (plan.threshold_count - 25) / deviation > plan.z_threshold
    assert (plan.threshold_count - 1 - 25) / deviation < plan.z_threshold
