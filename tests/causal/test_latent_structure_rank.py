"""The rank test: closed forms, invariances, its size when things change, its power, and every kind of bad input."""

import warnings

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from cameraready.causal.latent_structure import RankTest
from cameraready.causal.latent_structure.domains import cut, read_matrix, stable_window, summarise
from cameraready.causal.latent_structure.rank_test import canonical_squares, lawley


def one_factor(rng, n, loadings):
    """Rows of one latent with the given loadings and unit noise."""
    return rng.normal(size=(n, 1)) * loadings + rng.normal(size=(n, len(loadings)))


def domains(rng, count, n, p=4, *, change=True):
    """`count` domains of one latent; loadings of absolute value 0.5 to 2, redrawn in each if `change`."""
    draw = lambda: rng.uniform(0.5, 2, p) * rng.choice([-1, 1], p)  # noqa: E731
    common = draw()
    data = np.concatenate([one_factor(rng, n, draw() if change else common) for _ in range(count)])
    return data, np.repeat(np.arange(count), n)


def rejections(replicates, make, *, level=0.05, **options):
    rng = np.random.default_rng(11)
    found = []
    for _ in range(replicates):
        data, labels = make(rng)
        half = data.shape[1] // 2
        found.append(RankTest(data, labels, **options).pvalue(range(half), range(half, data.shape[1]), 1) <= level)
    return float(np.mean(found))


# --- closed forms and equalities ------------------------------------------------------------------------------------


def test_canonical_correlations_are_those_of_statsmodels():
    from statsmodels.multivariate.cancorr import CanCorr

    data = np.random.default_rng(0).normal(size=(300, 7)) @ np.random.default_rng(1).normal(size=(7, 7))
    squares = canonical_squares(np.corrcoef(data.T)[None], np.array([[1, 4, 5]]))[0, 0]
    expected = CanCorr(data[:, [1, 4, 5]], data[:, [0, 2, 3, 6]]).cancorr
    np.testing.assert_allclose(np.sqrt(squares), expected, atol=1e-7)


def test_rank_zero_of_two_columns_is_the_correlation_test():
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(2, 4000))
    y = y + 0.03 * x
    exact = stats.pearsonr(x, y).pvalue
    assert RankTest(np.column_stack([x, y])).pvalue([0], [1], 0) == pytest.approx(exact, rel=5e-3)


def test_shared_columns_equal_regression_on_them():
    """Lawley's correction with a correlation of one is that of the smaller problem after regression on it."""
    squares, n, p, q = np.array([1.0 - 1e-15, 0.4, 0.05]), 90, 4, 3
    shared = lawley(squares, n, p, q, 2)
    regressed = lawley(squares[1:], n - 1, p - 1, q - 1, 1)
    assert shared[1] == regressed[1]
    np.testing.assert_allclose(shared[0], regressed[0], rtol=1e-9)
    rng = np.random.default_rng(3)
    test = RankTest(rng.normal(size=(100, 6)) @ rng.normal(size=(6, 6)))
    assert test.pvalue([0, 1, 2], [0, 3, 4], 2) == pytest.approx(test.pvalue([1, 2], [3, 4], 1, given=[0]), rel=1e-9)


def test_regression_on_given_columns_is_that_of_residuals():
    rng = np.random.default_rng(4)
    data = rng.normal(size=(80, 6)) @ rng.normal(size=(6, 6))
    design = np.column_stack([np.ones(80), data[:, 4:]])
    residuals = data[:, :4] - design @ np.linalg.lstsq(design, data[:, :4], rcond=None)[0]
    squares = canonical_squares(np.corrcoef(residuals.T)[None], np.array([[0, 1]]))[0]
    statistic, df = lawley(squares, np.array([80 - 2]), 2, 2, 0)
    result = RankTest(data).result([0, 1], [2, 3], 0, given=[4, 5])
    assert result.df == df
    assert result.statistic == pytest.approx(float(statistic[0]), rel=1e-6)


def test_the_sum_adds_the_domains_statistics():
    data, labels = domains(np.random.default_rng(5), 3, 100)
    together = RankTest(data, labels).result([0, 1], [2, 3], 1)
    apart = [RankTest(data[labels == c]).result([0, 1], [2, 3], 1) for c in range(3)]
    assert together.df == sum(r.df for r in apart) == 3
    assert together.statistic == pytest.approx(sum(r.statistic for r in apart), rel=1e-9)
    fisher = RankTest(data, labels, method="fisher").pvalue([0, 1], [2, 3], 1)
    assert fisher == pytest.approx(stats.combine_pvalues([r.pvalue for r in apart]).pvalue, rel=1e-9)


def test_one_domain_is_the_classical_test_of_causal_learn():
    pytest.importorskip("causallearn")
    from causallearn.search.HiddenCausal.RLCD import Chi2RankTest

    rng = np.random.default_rng(6)
    agree = []
    for _ in range(60):
        data = np.column_stack([one_factor(rng, 150, np.ones(3)), one_factor(rng, 150, np.ones(3))])
        data[:, 3:] += 0.2 * data[:, :3]
        ours, theirs = RankTest(data), Chi2RankTest(data)
        agree += [
            ours.test([0, 1, 3], [2, 4, 5], r, 0.05) == bool(theirs.test([0, 1, 3], [2, 4, 5], r, 0.05))
            for r in range(3)
        ]
    assert np.mean(agree) > 0.97


# --- invariances ----------------------------------------------------------------------------------------------------


def test_order_scale_shift_and_domain_means_do_not_matter():
    rng = np.random.default_rng(7)
    data, labels = domains(rng, 4, 90, 6)
    base = RankTest(data, labels).pvalue([0, 1, 2], [3, 4, 5], 1)
    assert RankTest(data, labels).pvalue([5, 3, 4], [2, 0, 1], 1) == base  # sides and order within them
    order = rng.permutation(len(data))
    names = np.array(["w", "x", "y", "z"], dtype=object)[labels]
    moved = data * rng.uniform(0.1, 1e6, 6) + rng.normal(size=(4, 6))[labels] * 1e6
    for again in (RankTest(data[order], labels[order]), RankTest(moved, names)):
        assert again.pvalue([0, 1, 2], [3, 4, 5], 1) == pytest.approx(base, rel=1e-6)
    within = data * rng.uniform(0.5, 2, size=(4, 6))[labels]  # a scale of its own in each domain
    assert RankTest(within, labels).pvalue([0, 1, 2], [3, 4, 5], 1) == pytest.approx(base, rel=1e-6)


def test_scans_give_the_single_tests_pvalues():
    data, labels = domains(np.random.default_rng(8), 2, 120, 7)
    test = RankTest(data, labels)
    candidates = [(0, 1), (2, 3, 4), (5,), (1, 6)]
    universe = [0, 1, 2, 3, 4, 5, 6]
    scanned = test.scan(universe, candidates, 1)
    single = [test.pvalue(c, [j for j in universe if j not in c], 1) for c in candidates]
    np.testing.assert_allclose(scanned, single, rtol=1e-7)
    assert scanned[2] == 1.0  # one column has rank one at most


def test_a_data_frame_and_an_array_give_the_same():
    data, labels = domains(np.random.default_rng(9), 2, 60)
    frame = pd.DataFrame(data, columns=list("abcd"))
    assert RankTest(frame, pd.Series(labels)).pvalue("ab", "cd", 1) == RankTest(data, labels).pvalue([0, 1], [2, 3], 1)


# --- size and power -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "n"), [(8, 60), (4, 100), (3, 200)])
@pytest.mark.parametrize("change", [False, True])
def test_the_size_is_five_per_cent_in_small_domains_that_change_or_not(count, n, change):
    """Nominal .05 within four standard errors; the study repeats it with 5,000 replicates and more."""
    replicates = 500
    size = rejections(replicates, lambda rng: domains(rng, count, n, change=change))
    assert abs(size - 0.05) < 4 * np.sqrt(0.05 * 0.95 / replicates)


def test_pooling_keeps_its_size_only_where_coefficients_stay():
    assert rejections(200, lambda rng: domains(rng, 5, 200), method="pooled") > 0.6
    assert rejections(400, lambda rng: domains(rng, 5, 100, change=False), method="pooled") < 0.1


def test_a_higher_rank_is_rejected():
    def two_factors(rng):
        data = np.concatenate(
            [rng.normal(size=(100, 2)) @ rng.normal(size=(2, 6)) + 0.5 * rng.normal(size=(100, 6)) for _ in range(4)]
        )
        return data, np.repeat(np.arange(4), 100)

    assert rejections(60, two_factors) > 0.95


def test_a_rank_below_r_is_accepted_even_more_often():
    def independent(rng):
        return rng.normal(size=(240, 6)), np.repeat(np.arange(4), 60)

    assert rejections(300, independent) < 0.03


def test_close_fit_forgives_small_deviations_and_converges_to_the_exact_test():
    rng = np.random.default_rng(10)
    n = 4000
    data = one_factor(rng, n, np.ones(4))
    data[:, [0, 2]] += 0.4 * rng.normal(size=(n, 1))  # a small second dimension
    exact = RankTest(data).pvalue([0, 1], [2, 3], 1)
    assert exact < 0.01
    assert RankTest(data, close_fit=0.08).pvalue([0, 1], [2, 3], 1) > 0.05
    assert RankTest(data, close_fit=1e-6).pvalue([0, 1], [2, 3], 1) == pytest.approx(exact, rel=1e-3)


def test_many_columns_in_small_windows_are_tested_in_blocks_of_right_size():
    """60 rows and 30 columns: the approximation fails for the whole, holds for blocks, whose union still sees rank two."""
    result = RankTest(np.random.default_rng(12).normal(size=(240, 30)), np.repeat(np.arange(4), 60)).result(
        [0, 1], range(2, 30), 1
    )
    assert result.blocks > 1

    def under_one_latent(rng):
        return domains(rng, 4, 60, 20)

    assert rejections(120, under_one_latent) < 0.08

    def half_each(rng):
        data = np.concatenate(
            [np.column_stack([one_factor(rng, 60, np.full(10, 2.0)) for _ in range(2)]) for _ in range(4)]
        )
        order = np.r_[0, 10, 1:10, 11:20]
        return data[:, order], np.repeat(np.arange(4), 60)

    rng = np.random.default_rng(13)
    found = [RankTest(*half_each(rng)).pvalue([0, 1], range(2, 20), 1) < 0.01 for _ in range(30)]
    assert np.mean(found) > 0.95


# --- windows of time ------------------------------------------------------------------------------------------------


def drifting(rng, n, turns):
    t = np.linspace(0, 1, n)[:, None]
    loadings = 1 + np.sin(2 * np.pi * (turns * t + np.arange(4) / 4))
    return rng.normal(size=(n, 1)) * loadings + rng.normal(size=(n, 4)), t[:, 0]


def test_windows_grow_as_long_as_nothing_changes_and_stay_short_under_drift():
    rng = np.random.default_rng(14)
    steady, _ = drifting(rng, 960, 0)
    moving, _ = drifting(rng, 960, 2)
    assert stable_window([steady], 60) == 480 * 2
    assert stable_window([moving], 60) <= 120
    assert [len(part) for part in cut(np.arange(130), 60)] == [65, 65]


def test_the_order_of_rows_is_that_of_time():
    rng = np.random.default_rng(15)
    data, time = drifting(rng, 480, 2)
    shuffled = rng.permutation(480)
    sorted_test, other = RankTest(data, time=time), RankTest(data[shuffled], time=time[shuffled])
    assert len(sorted_test.domains.rows) > 1
    assert other.pvalue([0, 1], [2, 3], 1) == pytest.approx(sorted_test.pvalue([0, 1], [2, 3], 1), rel=1e-9)
    both = summarise(data, np.repeat(["a", "b"], 240), time, windows=80)
    assert both.labels == tuple((label, k) for label in "ab" for k in range(3))


# --- edges ----------------------------------------------------------------------------------------------------------


def test_trivial_ranks_and_bad_arguments():
    test = RankTest(np.random.default_rng(16).normal(size=(50, 4)))
    assert test.pvalue([0], [1, 2], 1) == 1.0
    assert test.pvalue([0, 1], [1, 2], 0) == 0.0  # a shared column has rank one by itself
    assert test.rank([0, 1], [1, 2], alpha=1e-12) == 1
    for bad, message in (([7], "no column 7"), (["z"], "no column 'z'")):
        with pytest.raises(ValueError, match=message):
            test.pvalue(bad, [1], 0)
    with pytest.raises(ValueError, match="integer of at least 0"):
        test.pvalue([0], [1], -1)
    for options, message in (
        ({"method": "mean"}, "method must be"),
        ({"close_fit": -1}, "close_fit"),
        ({"method": "fisher", "close_fit": 0.05}, "sum of statistics"),
        ({"time": np.arange(50), "windows": 1}, "windows must be"),
        ({"missing": "impute"}, "missing must be"),
    ):
        with pytest.raises(ValueError, match=message):
            RankTest(np.random.default_rng(0).normal(size=(50, 4)), **options)


def test_columns_that_tell_nothing_are_named():
    rng = np.random.default_rng(17)
    frame = pd.DataFrame(rng.normal(size=(60, 3)), columns=["a", "b", "c"])
    with pytest.raises(ValueError, match="'d' are constant in all rows"):
        RankTest(frame.assign(d=5.0))
    group = np.repeat([0, 1], 30)
    with pytest.raises(ValueError, match="'d' are constant in every domain"):
        RankTest(frame.assign(d=group), group)
    with pytest.raises(ValueError, match="linear combinations"):
        RankTest(frame.assign(d=frame["a"] + frame["b"]))
    with pytest.raises(ValueError, match="linear combinations"):
        RankTest(frame.assign(d=2 * frame["a"]))


def test_a_column_constant_in_one_domain_only_is_that_domains_perfect_intervention():
    rng = np.random.default_rng(18)
    data, labels = domains(rng, 2, 100)
    data[labels == 1, 3] = 4.2
    result = RankTest(data, labels).result([0, 1], [2, 3], 1)
    assert result.domains == 2
    assert np.isfinite(result.statistic)
    alone = RankTest(data[labels == 0]).result([0, 1], [2, 3], 1)
    assert result.statistic == pytest.approx(alone.statistic, abs=1e-6)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.zeros(5), "shape"),
        (np.zeros((5, 1)), "minimum of 2"),
        (np.zeros((2, 3)), "minimum of 3"),
        (np.array([["a", "b"]] * 4), "expected numbers"),
        (pd.DataFrame({"x": [1.0, 2, 3], "y": list("abc")}), "'y' holds"),
        (pd.DataFrame(np.eye(4), columns=list("aabc")), "several columns are named a"),
        (np.array([[1.0, np.inf]] * 4), "infinite"),
        (np.array([[1.0, np.nan], [2, 3], [3, 1], [4, 4]]), "missing='drop'"),
    ],
)
def test_unfit_tables_are_refused_with_a_sentence(table, message):
    with pytest.raises(ValueError, match=message):
        RankTest(table)


def test_rows_with_missing_values_are_left_out_on_demand_with_their_labels():
    data, labels = domains(np.random.default_rng(19), 2, 50)
    holes = data.copy()
    holes[::7, 1] = np.nan
    keep = ~np.isnan(holes).any(axis=1)
    with pytest.warns(UserWarning, match="15 of 100 rows"):
        dropped = RankTest(holes, labels, missing="drop").pvalue([0, 1], [2, 3], 1)
    assert dropped == RankTest(data[keep], labels[keep]).pvalue([0, 1], [2, 3], 1)


def test_labels_that_do_not_fit_are_refused():
    data = np.random.default_rng(20).normal(size=(40, 3))
    with pytest.raises(ValueError, match="one value for each of the 40 rows"):
        RankTest(data, np.zeros(39))
    with pytest.raises(ValueError, match="1 rows have no domain"):
        RankTest(data, [None, *"ab" * 19, "a"])
    with pytest.raises(ValueError, match="1 rows have no time"):
        RankTest(data, time=[np.nan, *range(39)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="no domain has three rows"):
            RankTest(data, np.arange(40))


def test_too_few_rows_for_a_test_say_so_and_tiny_domains_are_left_out():
    rng = np.random.default_rng(21)
    with pytest.raises(ValueError, match="needs at least 9 rows"):
        RankTest(rng.normal(size=(8, 4))).pvalue([0, 1], [2, 3], 1)
    data = rng.normal(size=(68, 4))
    assert RankTest(data, np.repeat([0, 1, 2], [30, 30, 8])).result([0, 1], [2, 3], 1).domains == 2
    with pytest.warns(UserWarning, match="2 row"):
        assert len(RankTest(data, np.repeat([0, 1, 2], [30, 36, 2])).domains.rows) == 2


def test_huge_values_do_not_overflow():
    data, labels = domains(np.random.default_rng(22), 2, 60)
    base = RankTest(data, labels).pvalue([0, 1], [2, 3], 1)
    assert RankTest(data * 1e200, labels).pvalue([0, 1], [2, 3], 1) == pytest.approx(base, rel=1e-6)


def test_numbers_and_booleans_are_read_as_they_are():
    values, names, kept = read_matrix(pd.DataFrame({"a": [1, 2, 3, 4], "b": [True, False, True, True]}))
    assert (values.dtype, names, kept.sum()) == (np.float64, ("a", "b"), 4)
