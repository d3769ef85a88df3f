"""Intervals against scipy, their invariances, and their coverage by simulation."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from scipy import stats

from cameraready.evidence import (
    average,
    difference,
    growth,
    rank_correlation,
    ratio,
    ratio_of_sums,
    versus_best,
    violations,
    win_rate,
)
from cameraready.evidence.measures import intervals as construction
from cameraready.evidence.measures.intervals import interval

RATIO = ratio("error", "new", "old")
DIFFERENCE = difference("error", "new", "old")
SUMS = ratio_of_sums("error", "new", "old")
WINS = win_rate("error", "new", "old")
RANKS = rank_correlation("x", "y", "new")
BEST = versus_best("error", "new")
BEST_DIFFERENCE = versus_best("error", "new", kind="difference")


def misses(measure, draw, truth, replicates, strata=None):
    """Share of replicates whose interval lies wholly above the truth, and wholly below it."""
    above = below = 0
    for _ in range(replicates):
        _, low, high = interval(measure, draw(), strata)
        above += low > truth
        below += high < truth
    return above / replicates, below / replicates


def coverage(measure, draw, truth, replicates, strata=None):
    return 1 - sum(misses(measure, draw, truth, replicates, strata))


@pytest.fixture
def rng():
    return np.random.default_rng(20260101)


@pytest.fixture
def fewer_resamples(monkeypatch):
    """The critical value is then known a little less well in each replicate, and as well on average."""
    monkeypatch.setattr(construction, "RESAMPLES", 1_000)


# --- against scipy ---------------------------------------------------------------


def test_the_interval_of_a_ratio_is_students_t_on_logarithms(rng):
    logs = rng.normal(0.3, 1.0, size=12)
    expected = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    found = interval(RATIO, logs[:, None])
    np.testing.assert_allclose(found, np.exp([logs.mean(), expected.low, expected.high]))


def test_over_two_workloads_it_is_welchs(rng):
    one, two = rng.normal(1.0, 0.2, size=15), rng.normal(-2.0, 3.0, size=15)
    # The mean of both halves is half the difference between one and minus two.
    expected = stats.ttest_ind(one, -two, equal_var=False).confidence_interval(0.95)
    found = interval(RATIO, np.concatenate([one, two])[:, None], np.repeat([0, 1], 15))
    np.testing.assert_allclose(found[1:], np.exp([expected.low / 2, expected.high / 2]))


def test_without_skewness_the_interval_of_a_difference_is_students_t(rng):
    half = rng.normal(size=8)
    values = 0.7 + np.concatenate([half, -half])
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    np.testing.assert_allclose(interval(DIFFERENCE, values[:, None])[1:], [expected.low, expected.high], rtol=1e-5)


def test_skewness_stretches_the_interval_of_a_difference_on_its_long_side_alone():
    values = np.array([0.0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.8, 3.0])
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    _, low, high = interval(DIFFERENCE, values[:, None])
    assert low == pytest.approx(expected.low)
    assert high > expected.high + 0.2


def test_halls_limits_solve_his_cubic(rng):
    y, g = rng.normal(0, 2, 100), rng.normal(0, 0.5, 100)
    t = construction._untransformed(y, g)
    np.testing.assert_allclose(t + g * t**2 / 3 + g**2 * t**3 / 27 + g / 6, y, atol=1e-9)


def test_the_skewness_of_the_mean_is_scipys_unbiased_skewness_over_root_n(rng):
    values = rng.exponential(size=15)
    spread = construction._spread(values, [np.arange(15)])
    assert spread.skewness == pytest.approx(stats.skew(values, bias=False) / np.sqrt(15))
    assert spread.error == pytest.approx(stats.sem(values))


@pytest.mark.parametrize("wins", [0, 3, 7, 10])
def test_the_interval_of_a_win_rate_is_exact(wins):
    values = np.repeat([1.0, 0.0], [wins, 10 - wins])[:, None]
    expected = stats.binomtest(wins, 10).proportion_ci(0.95, method="exact")
    np.testing.assert_allclose(interval(WINS, values)[1:], [expected.low, expected.high], atol=1e-12)


def test_the_interval_of_a_rank_correlation_holds_that_of_fishers_z(rng):
    x = rng.normal(size=(25, 2)) @ np.array([[1.0, 0.6], [0.0, 0.8]])
    r = stats.spearmanr(x[:, 0], x[:, 1]).statistic
    reach = stats.norm.ppf(0.975) * np.sqrt((1 + r**2 / 2) / 22)
    found = interval(RANKS, x)
    assert found.estimate == pytest.approx(r)
    assert found.low <= np.tanh(np.arctanh(r) - reach) + 1e-12
    assert found.high >= np.tanh(np.arctanh(r) + reach) - 1e-12


def test_the_error_of_a_ratio_of_sums_is_the_jackknifes(rng):
    values = rng.exponential(size=(12, 2)) + 0.2
    logs = np.array(
        [np.log(kept[:, 0].sum() / kept[:, 1].sum()) for kept in (np.delete(values, i, 0) for i in range(12))]
    )
    jackknife = np.sqrt(11 / 12 * ((logs - logs.mean()) ** 2).sum())
    assert construction._spread(SUMS.influence(values), [np.arange(12)]).error == pytest.approx(jackknife)


def test_the_critical_value_for_the_best_of_seven_is_that_of_the_multivariate_normal(rng, monkeypatch):
    monkeypatch.setattr(construction, "RESAMPLES", 200_000)
    n, k = 4_000, 7
    correlation = np.full((k, k), 0.5) + 0.5 * np.eye(k)
    # Contrasts whose sample means are zero and whose sample covariance is exactly the correlation.
    raw = rng.normal(size=(n, k))
    raw -= raw.mean(axis=0)
    white = raw @ np.linalg.inv(np.linalg.cholesky(np.cov(raw.T))).T
    values = white @ np.linalg.cholesky(correlation).T
    critical = -interval(BEST_DIFFERENCE, values).low * np.sqrt(n)
    inside = stats.multivariate_normal(np.zeros(k), correlation).cdf(np.full(k, critical))
    assert inside == pytest.approx(1 - 0.025 * (1 - construction.SELECTION), abs=0.002)


# --- invariances ---------------------------------------------------------------


def test_exchanging_the_arms_turns_a_ratio_over(rng):
    logs = rng.normal(size=(11, 1))
    there, back = interval(RATIO, logs), interval(RATIO, -logs)
    np.testing.assert_allclose([there.low, there.high], [1 / back.high, 1 / back.low])
    sums = rng.exponential(size=(11, 2))
    there, back = interval(SUMS, sums), interval(SUMS, sums[:, ::-1])
    np.testing.assert_allclose([there.low, there.high], [1 / back.high, 1 / back.low])


def test_units_do_not_matter(rng):
    values = rng.exponential(size=(13, 1))
    np.testing.assert_allclose(interval(DIFFERENCE, 1e3 * values), 1e3 * np.array(interval(DIFFERENCE, values)))
    np.testing.assert_allclose(interval(DIFFERENCE, values + 5), 5 + np.array(interval(DIFFERENCE, values)))
    np.testing.assert_allclose(interval(DIFFERENCE, -values)[1:], -np.array(interval(DIFFERENCE, values))[:0:-1])
    sums = rng.exponential(size=(13, 2))
    np.testing.assert_allclose(interval(SUMS, 1e3 * sums), interval(SUMS, sums))


def test_the_order_of_the_blocks_does_not_matter(rng):
    values, order = rng.normal(size=(14, 4)), rng.permutation(14)
    np.testing.assert_allclose(interval(BEST, values), interval(BEST, values[order]))


def test_higher_is_better_mirrors_lower_is_better(rng):
    values = rng.normal(size=(12, 5))
    mirrored = versus_best("error", "new", kind="difference", lower_is_better=False)
    there, back = interval(BEST_DIFFERENCE, values), interval(mirrored, -values)
    np.testing.assert_allclose(there, [-back.estimate, -back.high, -back.low])


def test_against_a_single_peer_the_best_peer_is_that_peer(rng):
    values = rng.normal(size=(12, 1))
    np.testing.assert_allclose(interval(BEST, values), interval(RATIO, values))
    np.testing.assert_allclose(interval(BEST_DIFFERENCE, values), interval(DIFFERENCE, values))


def test_hopeless_peers_hardly_widen_the_interval_against_the_best(rng):
    contrast = rng.normal(size=(15, 1))
    hopeless = contrast - 50 + rng.normal(size=(15, 6))
    alone, crowd = interval(DIFFERENCE, contrast), interval(BEST_DIFFERENCE, np.hstack([contrast, hopeless]))
    assert crowd.high == pytest.approx(alone.high)
    assert alone.low - 0.1 * (alone.high - alone.low) < crowd.low <= alone.low


def test_spread_is_taken_within_workloads(rng):
    values = rng.normal(size=(20, 1)) + np.repeat([0.0, 100.0], 10)[:, None]
    apart = interval(DIFFERENCE, values, np.repeat([0, 1], 10))
    together = interval(DIFFERENCE, values)
    assert apart.high - apart.low < 3 < together.high - together.low
    assert apart.estimate == pytest.approx(together.estimate)


def test_a_correlation_between_workloads_is_none_within_them(rng):
    values = rng.normal(size=(40, 2)) + np.repeat([0.0, 50.0], 20)[:, None]
    assert interval(RANKS, values).estimate > 0.7
    within = interval(RANKS, values, np.repeat([0, 1], 20))
    assert within.low < 0 < within.high


def test_a_workload_of_one_block_is_pooled_with_the_others(rng):
    values = rng.normal(size=(12, 1))
    lonely = np.repeat([0, 1], [11, 1])
    np.testing.assert_allclose(interval(DIFFERENCE, values, lonely), interval(DIFFERENCE, values))


def test_the_interval_depends_on_its_arguments_alone(rng):
    values = rng.normal(size=(12, 6))
    state = np.random.get_state()[1].copy()  # noqa: NPY002 - the global generator must be left alone
    assert interval(BEST, values, seed=3) == interval(BEST, values, seed=3)
    np.testing.assert_array_equal(state, np.random.get_state()[1])  # noqa: NPY002


@pytest.mark.parametrize("measure", [RATIO, DIFFERENCE, average("error", "new"), growth("error", "size", "new"), BEST])
def test_a_higher_level_gives_a_wider_interval_around_the_same_estimate(measure, rng):
    values = rng.exponential(size=(15, 3 if measure is BEST else 1))
    narrow, wide = interval(measure, values, level=0.8), interval(measure, values, level=0.99)
    assert wide.low < narrow.low <= narrow.estimate <= narrow.high < wide.high
    assert narrow.estimate == wide.estimate


# --- limits ---------------------------------------------------------------


def test_equal_blocks_leave_no_doubt():
    np.testing.assert_allclose(interval(DIFFERENCE, np.full((10, 1), 2.0)), 2.0)
    np.testing.assert_allclose(interval(BEST_DIFFERENCE, np.full((10, 3), 2.0)), 2.0)


def test_one_block_has_no_interval_and_none_has_no_estimate():
    one = interval(RATIO, np.zeros((1, 1)))
    assert one.estimate == 1.0
    assert np.isnan([one.low, one.high]).all()
    assert np.isnan(interval(RATIO, np.empty((0, 1)))).all()


def test_a_census_has_no_interval():
    found = interval(violations(pl.col("x") > 0), np.array([[0.0], [2.0], [1.0]]))
    assert found.estimate == 3
    assert np.isnan([found.low, found.high]).all()


def test_a_perfect_rank_correlation_is_not_certain():
    values = np.arange(10.0)[:, None] * np.ones(2)
    found = interval(RANKS, values)
    assert found.estimate == found.high == 1.0
    assert 0.9 < found.low < 0.99
    assert interval(RANKS, values * [1, -1])[:2] == (-1.0, -1.0)


def test_win_rates_and_correlations_stay_in_their_range():
    assert interval(WINS, np.ones((10, 1))).high == 1.0
    within = rank_correlation("x", "y", "new", across="rows")
    found = interval(within, np.array([1.0] * 9 + [0.4])[:, None])
    assert -1 <= found.low <= found.estimate <= found.high <= 1


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (np.zeros(10), {}, "shape"),
        (np.full((10, 1), np.nan), {}, "finite"),
        (np.zeros((10, 1)), {"strata": [0, 1]}, "strata"),
        (np.zeros((10, 1)), {"level": 95}, "level"),
    ],
)
def test_values_that_are_no_blocks_are_refused(values, options, message):
    with pytest.raises(ValueError, match=message):
        interval(DIFFERENCE, values, **options)


# --- coverage of nominal 95 %; the standard error of 3,000 replicates is 0.4 points ----------


@pytest.mark.parametrize("n", [10, 30])
def test_coverage_for_ratios_of_log_normal_values(n, rng):
    assert 0.93 <= coverage(RATIO, lambda: rng.normal(0.4, 0.8, size=(n, 1)), np.exp(0.4), 3_000) <= 0.97


@pytest.mark.parametrize("n", [10, 30])
def test_coverage_for_differences_of_normal_values(n, rng):
    assert 0.93 <= coverage(DIFFERENCE, lambda: rng.normal(0.4, 2.0, size=(n, 1)), 0.4, 3_000) <= 0.97


SKEWED = {
    "exponential": (lambda rng, n: rng.exponential(size=(n, 1)), 1.0),
    "log-normal": (lambda rng, n: rng.lognormal(size=(n, 1)), np.exp(0.5)),
    "squared normal": (lambda rng, n: rng.normal(size=(n, 1)) ** 2, 1.0),
    "difference of exponentials": (lambda rng, n: 2 * rng.exponential(size=(n, 1)) - rng.exponential(size=(n, 1)), 1.0),
    "difference of log-normals": (lambda rng, n: rng.lognormal(size=(n, 1)) - rng.lognormal(size=(n, 1)), 0.0),
}


@pytest.mark.parametrize("kind", SKEWED)
def test_coverage_for_skewed_differences(kind, rng):
    draw, truth = SKEWED[kind]
    assert coverage(DIFFERENCE, lambda: draw(rng, 10), truth, 3_000) >= 0.90
    assert 0.93 <= coverage(DIFFERENCE, lambda: draw(rng, 30), truth, 3_000) <= 0.97


def test_coverage_for_pooled_workloads_of_unequal_spread(rng):
    strata = np.repeat([0, 1, 2], [5, 5, 10])
    scale, shift = np.array([0.1, 1.0, 3.0])[strata][:, None], np.array([0.0, 2.0, -1.0])[strata][:, None]
    normal = coverage(RATIO, lambda: shift + scale * rng.normal(size=(20, 1)), np.exp(shift.mean()), 3_000, strata)
    assert 0.93 <= normal <= 0.975
    skewed = coverage(
        DIFFERENCE, lambda: shift + scale * rng.exponential(size=(20, 1)), (shift + scale).mean(), 3_000, strata
    )
    assert 0.93 <= skewed <= 0.975


def test_coverage_for_ratios_of_sums(rng):
    def totals(n, spread):
        return np.exp(spread * rng.normal(size=(n, 1)) + 0.3 * rng.normal(size=(n, 2)))

    assert 0.93 <= coverage(SUMS, lambda: totals(10, 0.5), 1.0, 3_000) <= 0.97
    assert coverage(SUMS, lambda: totals(10, 1.0), 1.0, 3_000) >= 0.90
    assert 0.93 <= coverage(SUMS, lambda: totals(30, 0.5), 1.0, 3_000) <= 0.97


def test_coverage_for_rank_correlations(rng):
    truth = 6 / np.pi * np.arcsin(0.3)  # Spearman's correlation of a normal pair with correlation 0.6
    mix = np.array([[1.0, 0.6], [0.0, 0.8]])
    assert 0.94 <= coverage(RANKS, lambda: rng.normal(size=(10, 2)) @ mix, truth, 1_000) <= 0.985


def test_win_rates_err_on_each_side_in_at_most_two_and_a_half_percent_of_studies_whatever_the_chance():
    n = 12
    limits = [interval(WINS, np.repeat([1.0, 0.0], [k, n - k])[:, None]) for k in range(n + 1)]
    for chance in np.linspace(0.01, 0.99, 99):
        weight = stats.binom.pmf(np.arange(n + 1), n, chance)
        assert weight @ [chance < found.low for found in limits] <= 0.025
        assert weight @ [chance > found.high for found in limits] <= 0.025


@pytest.mark.parametrize(("n", "peers"), [(10, 6), (10, 7), (30, 6)])
def test_seven_identical_estimators_are_not_told_apart(n, peers, rng, fewer_resamples):
    def draw():
        return rng.normal(size=(n, 1)) - rng.normal(size=(n, peers))

    worse, better = misses(BEST, draw, 1.0, 1_000)
    assert worse <= 0.035  # nominal 2.5 %, and the bar is 5 %
    assert better <= 0.01


def test_seven_identical_skewed_estimators_are_not_told_apart(rng, fewer_resamples):
    worse, better = misses(
        BEST_DIFFERENCE, lambda: rng.exponential(size=(10, 1)) - rng.exponential(size=(10, 6)), 0.0, 1_000
    )
    assert worse <= 0.035
    assert better <= 0.01


def test_coverage_when_one_peer_is_clearly_the_best(rng, fewer_resamples):
    lead = np.array([0.0, -4.0, -4.0, -4.0, -5.0, -6.0])
    for n in (10, 30):
        found = coverage(BEST, lambda n=n: rng.normal(size=(n, 1)) - rng.normal(size=(n, 6)) + lead, 1.0, 1_500)
        assert 0.93 <= found <= 0.97


def test_coverage_is_never_short_when_peers_lie_close_together(rng, fewer_resamples):
    for gap in (0.2, 0.5, 1.0):
        truth = -gap * np.arange(6)
        draw = lambda truth=truth: rng.normal(size=(15, 1)) - rng.normal(size=(15, 6)) + truth  # noqa: E731
        assert coverage(BEST, draw, 1.0, 600) >= 0.94


def test_identical_estimators_over_several_workloads_are_not_told_apart(rng, fewer_resamples):
    strata, scale = np.repeat([0, 1], 8), np.repeat([1.0, 4.0], 8)[:, None]
    worse, better = misses(
        BEST, lambda: scale * (rng.normal(size=(16, 1)) - rng.normal(size=(16, 6))), 1.0, 800, strata
    )
    assert worse <= 0.04
    assert better <= 0.01
