"""ATC is the paper's rule: against a plain transcription of it, closed forms, invariances and trusted libraries."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from cameraready.stats.atc import ATC, atc


def transcribed(x, sigma=1.0, alpha=0.05, threshold=None):
    """The algorithm of arXiv:2602.11406 word by word, with times from 1, for samples (n, d)."""
    x = np.asarray(x, dtype=float)
    n, d = x.shape
    r, prediction, statistic, alarms, changes = 1, [np.full(d, np.nan)], [0.0], [], []
    for t in range(2, n + 2):
        past = x[r - 1 : t - 1]
        length = t - r
        found = [
            (
                math.sqrt((k - r) * (t - k) / length)
                * np.linalg.norm((past[: k - r].mean(0) - past[k - r :].mean(0)) / sigma),
                k,
            )
            for k in range(r + 1, t)
        ]
        best, where = max(found, default=(0.0, 0))
        if t > 2:
            statistic.append(best)
        alpha_r = 6 * alpha / (math.pi**2 * r**2)
        gamma = math.sqrt(6 * math.log(length) + 2 * math.log(1 / alpha_r) + 2 * math.log(math.pi**2 / 3))
        if d > 1:
            e = 3 * math.log(length) + math.log(1 / alpha_r) + math.log(math.pi**2 / 6)
            gamma = math.sqrt(d + 2 * math.sqrt(d * e) + 2 * e)
        if best >= (gamma if threshold is None else threshold):
            r = t - 1
            alarms.append(t - 2)
            changes.append(where - 1)
        prediction.append(x[r - 1 : t - 1].mean(0))
    return np.array(prediction[:n]), np.array(statistic), alarms, changes


def steps(seed, n=400, d=1):
    generator = np.random.default_rng(seed)
    level = np.cumsum(generator.normal(0, 2, (n, d)) * (generator.random((n, 1)) < 0.02), axis=0)
    return level + generator.normal(size=(n, d))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("d", [1, 3])
def test_it_is_the_papers_rule(seed, d):
    x = steps(seed, d=d)
    prediction, statistic, alarms, changes = transcribed(x)
    result = atc(x)
    assert len(alarms) >= 1
    assert result.alarms.tolist() == alarms
    assert result.changes.tolist() == changes
    np.testing.assert_allclose(result.prediction, prediction, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(result.statistic, statistic, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "x",
    [
        np.arange(300.0),
        -(np.arange(300.0) ** 2),
        np.tile([1.0, -1.0], 150),
        np.random.default_rng(0).integers(0, 2, 300).astype(float),
        np.random.default_rng(1).standard_cauchy(300),
        np.r_[np.zeros(200), 1.0, np.zeros(99)],
    ],
    ids=["trend", "parabola", "alternating", "coins", "cauchy", "spike"],
)
def test_the_hulls_hold_the_best_split_whatever_the_data(x):
    everything = np.array([[(k, n) for k in range(1, n)] for n in (2, 17, 150, 300)], dtype=object)
    result = atc(x, threshold=1e90)
    for splits in everything:
        n = splits[-1][1]
        sums = x[:n].cumsum()
        k = np.arange(1, n)
        value = np.abs(sums[:-1] - k / n * sums[-1]) / np.sqrt(k * (n - k) / n)
        assert result.statistic[n - 1] == pytest.approx(value.max(), rel=1e-9, abs=1e-9)


def test_the_squared_statistic_is_what_one_change_gains_in_ruptures():
    ruptures = pytest.importorskip("ruptures")
    x = steps(3, n=120)
    search = ruptures.Dynp(model="l2", min_size=1, jump=1).fit(x)
    gain = search.cost.sum_of_costs([120]) - search.cost.sum_of_costs(search.predict(n_bkps=1))
    assert atc(x, threshold=1e90).statistic[-1] ** 2 == pytest.approx(gain)


@pytest.mark.parametrize(("before", "jump"), [(50, 3.0), (200, 1.5), (1000, 1.0)])
def test_a_jump_without_noise_is_seen_at_the_first_sample_that_the_formula_says(before, jump):
    x = np.r_[np.zeros(before), np.full(1000, jump)]
    m = np.arange(1, 1001)
    gamma = np.sqrt(6 * np.log(before + m) + 2 * np.log(np.pi**2 / (6 * 0.05)) + 2 * np.log(np.pi**2 / 3))
    enough = before * m / (before + m) * jump**2 >= gamma**2
    result = atc(x)
    assert result.alarms[0] == before + m[enough][0] - 1
    assert result.changes[0] == before


def test_a_jump_too_small_for_its_past_is_never_seen():
    """n Delta^2 < gamma^2 whatever comes after: the selective part."""
    assert len(atc(np.r_[np.zeros(20), np.full(20_000, 1.0)]).alarms) == 0


@pytest.mark.parametrize("n_streams", [1, 2, 10])
def test_the_errors_of_all_tests_of_an_endless_run_sum_to_at_most_alpha(n_streams):
    """Union over restarts and lengths, with exact normal tails; what lies beyond L = 10^4 and r = 10^3 is bounded by its terms."""
    from cameraready.stats.atc.kernel import anytime_threshold

    alpha = 0.05
    lengths = np.unique(np.geomspace(2, 10_000, 200).astype(int))
    for restart in (1, 2, 30, 1000):
        alpha_r = 6 * alpha / (math.pi**2 * restart**2)
        for length in lengths:
            gamma = anytime_threshold(int(length), restart, alpha, n_streams)
            tail = (length - 1) * stats.chi2.sf(gamma**2, n_streams)
            assert tail <= alpha_r * 6 / (
                math.pi**2 * length**2
            )  # sums to alpha_r over lengths, to alpha over restarts


def test_alarms_on_pure_noise_are_as_rare_as_promised():
    """500 runs: more than 42 alarmed ones have a chance below 1 in 1,000 if the true rate is 5 %."""
    generator = np.random.default_rng(7)
    assert stats.binom.sf(42, 500, 0.05) < 1e-3
    for sigma, noise, scan in ((1.0, 1.0, "geometric"), ("mad", 1e-3, "exact")):
        runs = noise * generator.normal(size=(500, 1000))
        assert sum(ATC(sigma, scan=scan).learn_many(run).n_alarms > 0 for run in runs) <= 42


# --- invariances ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [1.0, "mad"])
@pytest.mark.parametrize("scan", ["exact", "geometric"])
def test_level_unit_and_sign_do_not_matter(sigma, scan):
    x = steps(11, n=1500)[:, 0]
    result = atc(x, sigma=sigma, scan=scan)
    assert len(result.alarms) >= 2
    for scale, shift in ((-1.0, 0.0), (1000.0, 3.0), (1.0, 1e9)):
        scaled = sigma if sigma == "mad" else sigma * abs(scale)
        again = atc(scale * x + shift, sigma=scaled, scan=scan)
        assert again.alarms.tolist() == result.alarms.tolist()
        assert again.changes.tolist() == result.changes.tolist()
        np.testing.assert_allclose((again.prediction - shift) / scale, result.prediction, atol=1e-6)


def test_a_rotation_of_equally_noisy_streams_changes_nothing():
    x = steps(5, d=4)
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0]
    result, rotated = atc(x), atc(x @ rotation)
    assert rotated.alarms.tolist() == result.alarms.tolist()
    np.testing.assert_allclose(rotated.statistic, result.statistic, rtol=1e-9)


def test_every_stream_has_its_own_noise():
    x = steps(5, d=3)
    scale = np.array([1.0, 10.0, 1e-3])
    np.testing.assert_allclose(atc(x * scale, sigma=scale).statistic, atc(x).statistic, rtol=1e-9)
    small = atc(x * scale, sigma="mad").detector.noise / scale
    np.testing.assert_allclose(small, 1.0, rtol=0.25)


def test_several_streams_see_a_change_that_none_sees_alone():
    generator = np.random.default_rng(2)
    x = generator.normal(size=(400, 25)) + np.r_[np.zeros((200, 25)), np.full((200, 25), 0.4)]
    assert all(len(atc(stream).alarms) == 0 for stream in x.T)
    joint = atc(x)
    assert len(joint.alarms) == 1
    assert abs(joint.changes[0] - 200) <= 3


# --- the geometric scan -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [2.0, -5.0])
def test_the_geometric_scan_loses_at_most_a_factor_of_root_two_on_a_jump(jump):
    for before, after in itertools.product((1, 3, 10, 77, 500), (1, 2, 5, 31, 300)):
        x = np.r_[np.zeros(before), np.full(after, jump)]
        exact = atc(x, threshold=1e90).statistic
        close = atc(x, scan="geometric", threshold=1e90).statistic
        assert (close <= exact * (1 + 1e-12)).all()
        assert close[-1] >= exact[-1] / math.sqrt(2) * (1 - 1e-12)


def test_a_million_samples_stay_within_a_logarithm_of_splits_and_memory():
    """Geometric: also on what is the worst case of the hulls, a steady trend (too flat for the threshold)."""
    n = 1_000_000
    detector = ATC(scan="geometric").learn_many(np.arange(n) * 1e-9)
    assert (detector.n_samples, detector.n_alarms) == (n, 0)
    assert detector.n_splits <= 3 * math.log2(n) + 3
    hulls = ATC().learn_many(np.random.default_rng(0).normal(size=n))
    assert hulls.n_splits < 100  # 2 log(n) = 28 on average
    for each in (detector, hulls):
        assert len(str(each.state_dict())) < 30_000
