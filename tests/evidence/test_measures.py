"""Measures: block tables account for every block, and reductions are vectorised and right."""

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
from cameraready.evidence.measures import MissingColumn
from tests.evidence.example_rows import failing, run_rows

NEW = [1.0, 4.0, 2.0, 8.0]
OLD = [2.0, 2.0, 2.0, 2.0]


def table(measure, rows):
    return measure.blocks(rows, "arm", "instance")


def estimate(measure, rows):
    found = table(measure, rows)
    assert not found.trouble
    return float(measure.reduce(found.values))


# --- what each measure is ---------------------------------------------------------------


def test_ratio_is_the_geometric_mean_of_block_ratios():
    assert estimate(ratio("error", "new", "old"), run_rows({"new": NEW, "old": OLD})) == pytest.approx(
        stats.gmean(np.array(NEW) / np.array(OLD))
    )


def test_ratio_of_sums_divides_totals():
    assert estimate(ratio_of_sums("error", "new", "old"), run_rows({"new": NEW, "old": OLD})) == pytest.approx(15 / 8)


def test_difference_is_the_mean_of_block_differences():
    assert estimate(difference("error", "new", "old"), run_rows({"new": NEW, "old": OLD})) == pytest.approx(1.75)


def test_win_rate_counts_ties_half():
    rows = run_rows({"new": [1.0, 4.0, 2.0, 8.0], "old": OLD})
    assert estimate(win_rate("error", "new", "old"), rows) == pytest.approx((1 + 0 + 0.5 + 0) / 4)
    assert estimate(win_rate("error", "new", "old", lower_is_better=False), rows) == pytest.approx(2.5 / 4)


def test_average_is_the_mean_over_blocks():
    assert estimate(average("error", "new"), run_rows({"new": NEW})) == pytest.approx(3.75)


def test_growth_recovers_the_exponent_of_a_power_law_in_every_block():
    rng = np.random.default_rng(0)
    rows = [
        {"arm": "new", "instance": block, "seconds": scale * size**1.7, "size": size}
        for block, scale in enumerate(rng.uniform(0.1, 10, size=12))
        for size in (10, 20, 50, 200)
    ]
    found = table(growth("seconds", "size", "new"), pl.DataFrame(rows))
    np.testing.assert_allclose(found.values, 1.7)


def test_growth_is_the_slope_that_scipy_fits():
    rng = np.random.default_rng(1)
    size, seconds = np.array([10.0, 20.0, 50.0]), rng.uniform(1, 9, 3)
    rows = pl.DataFrame({"arm": "new", "instance": 0, "size": size, "seconds": seconds})
    slope = stats.linregress(np.log(size), np.log(seconds)).slope
    assert table(growth("seconds", "size", "new"), rows).values[0, 0] == pytest.approx(slope)


def test_rank_correlation_over_blocks_agrees_with_scipy_also_with_ties():
    rng = np.random.default_rng(2)
    x = rng.integers(0, 5, 20).astype(float)
    y = x + rng.integers(0, 4, 20)
    rows = run_rows({"new": x}, column="x").with_columns(pl.Series("y", y))
    assert estimate(rank_correlation("x", "y", "new"), rows) == pytest.approx(stats.spearmanr(x, y).statistic)


def test_rank_correlation_within_blocks_ignores_differences_between_blocks():
    rows = pl.DataFrame(
        [
            {"arm": "new", "instance": block, "x": 100 * block + i, "y": 100 * block - i}
            for block in range(5)
            for i in range(6)
        ]
    )
    assert estimate(rank_correlation("x", "y", "new", across="rows"), rows) == pytest.approx(-1.0)
    assert estimate(rank_correlation("x", "y", "new"), rows) == pytest.approx(1.0)


def test_violations_are_counted_by_block():
    rows = run_rows({"new": [0.0, 2.0, 3.0], "old": [5.0, 0.0, 0.0]})
    found = table(violations(pl.col("error") > 1), rows)
    assert dict(zip(found.names, found.values[:, 0], strict=True)) == {"0": 1, "1": 1, "2": 1}
    assert violations(pl.col("error") > 1).reduce(found.values) == 3


@pytest.mark.parametrize(
    ("measure", "columns"),
    [
        (ratio("error", "new", "old"), 1),
        (ratio_of_sums("error", "new", "old"), 2),
        (difference("error", "new", "old"), 1),
        (win_rate("error", "new", "old"), 1),
        (average("error", "new"), 1),
        (growth("error", "size", "new"), 1),
        (rank_correlation("x", "y", "new"), 2),
        (rank_correlation("x", "y", "new", across="rows"), 1),
        (violations(pl.col("error") > 1), 1),
        (versus_best("error", "new"), 4),
        (versus_best("error", "new", kind="difference", lower_is_better=False), 4),
    ],
)
def test_reductions_are_vectorised_over_resamples(measure, columns):
    values = np.random.default_rng(3).uniform(0.0, 1.0, size=(2, 5, 11, columns))
    together = measure.reduce(values)
    assert together.shape == (2, 5)
    for index in np.ndindex(2, 5):
        assert together[index] == pytest.approx(float(measure.reduce(values[index])), rel=1e-12)


# --- the best peer ---------------------------------------------------------------


def test_the_best_peer_is_one_peer_over_all_blocks_never_the_best_of_each_block():
    rows = run_rows({"new": [1.0, 1.0], "left": [0.1, 10.0], "right": [5.0, 0.4]})
    measure = versus_best("error", "new")
    found = table(measure, rows)
    # left is best overall (geometric mean 1 against sqrt 2); block by block one would take 0.1 and 0.4.
    assert measure.chosen(found.values, found.arms) == "left"
    assert float(measure.reduce(found.values)) == pytest.approx(1.0)


def test_the_best_peer_is_chosen_again_in_every_resample():
    rows = run_rows({"new": [1.0, 1.0], "left": [0.1, 10.0], "right": [5.0, 0.4]})
    measure = versus_best("error", "new")
    found = table(measure, rows)
    resamples = found.values[np.array([[0, 0], [1, 1]])]
    np.testing.assert_allclose(measure.reduce(resamples), [1 / 0.1, 1 / 0.4])
    assert [measure.chosen(values, found.arms) for values in resamples] == ["left", "right"]


@pytest.mark.parametrize("kind", ["ratio", "difference"])
def test_where_higher_is_better_the_best_peer_is_the_largest(kind):
    rows = run_rows({"new": [4.0, 4.0], "left": [1.0, 1.0], "right": [2.0, 2.0]})
    measure = versus_best("error", "new", kind=kind, lower_is_better=False)
    found = table(measure, rows)
    assert measure.chosen(found.values, found.arms) == "right"
    assert float(measure.reduce(found.values)) == pytest.approx(2.0)


def test_every_other_arm_is_a_peer_unless_excluded_a_users_own_included():
    rows = run_rows({"new": NEW, "old": OLD, "mine": OLD, "new-variant": NEW})
    assert table(versus_best("error", "new", exclude=["new-variant"]), rows).arms == ("old", "mine")
    assert table(versus_best("error", "new", ["old"]), rows).arms == ("old",)


def test_a_peer_that_mostly_fails_is_set_aside_by_name_one_that_fails_once_costs_a_block():
    rows = run_rows({"new": [1.0] * 10, "old": [2.0] * 10, "flaky": [0.1] * 10})
    once = table(versus_best("error", "new"), failing(rows, "flaky", [3]))
    assert once.arms == ("old", "flaky")
    assert set(once.lost) == {"3"}
    mostly = table(versus_best("error", "new"), failing(rows, "flaky", range(6)))
    assert mostly.arms == ("old",)
    assert not mostly.lost
    assert "flaky was set aside" in mostly.notes[0]
    assert "6 of 10" in mostly.notes[0]


# --- blocks that do not count are accounted for ---------------------------------------------------------------


def test_arms_are_paired_by_block_whatever_the_order_of_the_rows():
    rows = run_rows({"new": NEW, "old": [1.0, 2.0, 3.0, 4.0]})
    shuffled = rows.sample(fraction=1.0, shuffle=True, seed=0)
    measure = ratio("error", "new", "old")
    straight, mixed = table(measure, rows), table(measure, shuffled)
    expected = dict(zip(straight.names, straight.values[:, 0], strict=True))
    assert dict(zip(mixed.names, mixed.values[:, 0], strict=True)) == expected


@pytest.mark.parametrize(("repeats", "value"), [("mean", 4.0), ("median", 2.0), ("min", 1.0)])
def test_several_rows_of_a_block_become_one_number_first(repeats, value):
    rows = pl.concat([run_rows({"new": [x, x], "old": [1.0, 1.0]}, repeat=i) for i, x in enumerate((1.0, 2.0, 9.0))])
    assert estimate(difference("error", "new", "old", repeats=repeats), rows) == pytest.approx(value - 1.0)


def test_a_peers_failure_loses_the_block_and_is_told():
    found = table(ratio("error", "new", "old"), failing(run_rows({"new": NEW, "old": OLD}), "old", [1]))
    assert found.names == ("0", "2", "3")
    assert found.lost == {"1": "old failed"}
    assert not found.broken


def test_the_methods_failure_breaks_the_block():
    found = table(ratio("error", "new", "old"), failing(run_rows({"new": NEW, "old": OLD}), "new", [1]))
    assert found.broken == {"1": "new failed"}
    assert not found.lost


def test_a_block_with_one_failed_trial_of_several_does_not_count():
    rows = pl.concat([run_rows({"new": NEW, "old": OLD}, budget=b) for b in (10, 20)])
    hit = (pl.col("arm") == "old") & (pl.col("instance") == 2) & (pl.col("budget") == 20)
    rows = rows.with_columns(
        pl.when(hit).then(pl.lit("timeout")).otherwise("status").alias("status"),
        pl.when(hit).then(None).otherwise("error").alias("error"),
    )
    assert table(ratio("error", "new", "old"), rows).lost == {"2": "old failed"}


def test_a_failed_trial_that_names_no_arm_counts_for_all_of_them():
    rows = run_rows({"new": NEW, "old": OLD})
    crash = {"workload": "digits", "trial": "crash", "status": "died", "instance": 4}
    rows = pl.concat([rows, pl.DataFrame([crash])], how="diagonal_relaxed")
    assert set(table(ratio("error", "new", "old"), rows).broken) == {"4"}


def test_a_failed_trial_that_names_no_block_explains_the_missing_ones():
    rows = run_rows({"new": NEW, "old": OLD}).filter(~((pl.col("arm") == "old") & (pl.col("instance") == 3)))
    crash = {"workload": "digits", "trial": "crash", "status": "died", "arm": "old"}
    found = table(ratio("error", "new", "old"), pl.concat([rows, pl.DataFrame([crash])], how="diagonal_relaxed"))
    assert found.lost == {"3": "old failed"}
    assert not found.unfinished


def test_blocks_that_have_not_run_yet_are_unfinished_not_lost():
    rows = run_rows({"new": NEW, "old": OLD}).filter(~((pl.col("arm") == "old") & (pl.col("instance") == 3)))
    found = table(ratio("error", "new", "old"), rows)
    assert found.unfinished == ("3",)
    assert not found.lost


def test_a_block_half_done_is_unfinished_because_its_mean_would_not_be_comparable():
    rows = pl.concat([run_rows({"new": NEW, "old": OLD}, budget=b) for b in (10, 20)])
    rows = rows.filter(~((pl.col("arm") == "old") & (pl.col("instance") == 3) & (pl.col("budget") == 20)))
    found = table(ratio("error", "new", "old"), rows)
    assert found.unfinished == ("3",)
    assert found.names == ("0", "1", "2")


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_counted_and_explained(odd):
    mine = table(difference("error", "new", "old"), run_rows({"new": [1.0, odd, 2.0], "old": [1.0, 1.0, 1.0]}))
    assert mine.broken == {"1": "new returned NaN or infinity"}
    theirs = table(difference("error", "new", "old"), run_rows({"new": [1.0, 1.0, 2.0], "old": [1.0, odd, 1.0]}))
    assert theirs.lost == {"1": "old returned NaN or infinity"}
    assert theirs.names == ("0", "2")


def test_rows_without_the_column_belong_to_other_measures():
    timing = run_rows({"new": [0.1, 0.1], "old": [0.2, 0.2]}, column="seconds")
    accuracy = run_rows({"new": [3.0, 5.0], "old": [1.0, 1.0]})
    both = pl.concat([timing, accuracy], how="diagonal_relaxed")
    assert estimate(difference("error", "new", "old"), both) == pytest.approx(3.0)
    assert estimate(ratio("seconds", "new", "old"), both) == pytest.approx(0.5)


# --- zeros and negative values ---------------------------------------------------------------


def test_exact_zeros_on_both_sides_count_as_ratio_one_with_a_note():
    rows = run_rows({"new": [0.0, 2.0], "old": [0.0, 1.0]})
    found = table(ratio("error", "new", "old"), rows)
    assert float(ratio("error", "new", "old").reduce(found.values)) == pytest.approx(np.sqrt(2))
    assert "exactly zero on both sides" in found.notes[0]
    assert "1 of 2" in found.notes[0]


@pytest.mark.parametrize("measure", [ratio("error", "new", "old"), versus_best("error", "new")])
def test_a_zero_on_one_side_leaves_a_geometric_ratio_undefined_and_says_what_to_do(measure):
    found = table(measure, run_rows({"new": [0.0, 1.0], "old": [1.0, 1.0]}))
    assert "exactly zero on one side only in 1 of 2 blocks" in found.trouble
    assert "floor" in found.trouble


@pytest.mark.parametrize("measure", [ratio("error", "new", "old"), ratio_of_sums("error", "new", "old")])
def test_a_ratio_of_negative_values_is_refused(measure):
    assert "negative in 1 of 2 blocks" in table(measure, run_rows({"new": [-1.0, 1.0], "old": [1.0, 1.0]})).trouble


def test_a_floor_is_the_resolution_of_the_measurement():
    rows = run_rows({"new": [0.0, 1e-30, 4.0], "old": [1e-16, 1e-20, 1.0]})
    found = table(ratio("error", "new", "old", floor=1e-12), rows)
    np.testing.assert_allclose(np.exp(found.values[:, 0]), [1.0, 1.0, 4.0])
    assert "2 of 3 blocks" in found.notes[0]


def test_sums_of_zeros_have_no_ratio():
    rows = run_rows({"new": [0.0, 0.0, 0.0], "old": [1.0, 1.0, 1.0]})
    assert "error of new is zero" in table(ratio_of_sums("error", "new", "old"), rows).trouble


def test_growth_of_what_has_no_logarithm_is_explained():
    rows = pl.DataFrame({"arm": "new", "instance": 0, "size": [1.0, 2.0], "seconds": [0.0, 1.0]})
    assert "not positive" in table(growth("seconds", "size", "new"), rows).trouble
    rows = pl.DataFrame({"arm": "new", "instance": 0, "size": [2.0, 2.0], "seconds": [1.0, 1.0]})
    assert "only one value of size" in table(growth("seconds", "size", "new"), rows).trouble


def test_a_constant_column_has_no_ranks():
    rows = run_rows({"new": [1.0, 1.0, 1.0]}, column="x").with_columns(pl.Series("y", [1.0, 2.0, 3.0]))
    assert "x is the same in every block" in table(rank_correlation("x", "y", "new"), rows).trouble


def test_a_census_does_not_take_missing_values_or_nan_for_obedience():
    rows = run_rows({"new": [0.0, np.nan, 0.0, 5.0]}).with_columns(
        pl.when(pl.col("instance") == 2).then(None).otherwise("error").alias("error")
    )
    found = table(violations(pl.col("error") < -1), rows)
    assert set(found.broken) == {"1", "2"}
    assert found.names == ("0", "3")


# --- errors ---------------------------------------------------------------


def test_a_missing_column_names_the_near_misses():
    with pytest.raises(MissingColumn, match="did you mean error"):
        table(ratio("eror", "new", "old"), run_rows({"new": NEW, "old": OLD}))


def test_text_is_no_measurement():
    rows = run_rows({"new": NEW, "old": OLD}).with_columns(pl.col("error").cast(pl.String))
    with pytest.raises(ValueError, match="needs numbers"):
        table(ratio("error", "new", "old"), rows)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ratio("error", "new", "new"), ValueError, "'new' twice"),
        (lambda: ratio("error", "new", "old", floor=-1.0), ValueError, "floor"),
        (lambda: versus_best("error", "new", "old"), TypeError, "sequences of arm names"),
        (lambda: versus_best("error", "new", []), ValueError, "at least one arm"),
        (lambda: versus_best("error", "new", ["new"]), ValueError, "other than 'new'"),
        (lambda: versus_best("error", "new", kind="quotient"), ValueError, "'ratio' or 'difference'"),
        (lambda: rank_correlation("x", "y", "new", across="columns"), ValueError, "'blocks' or 'rows'"),
        (lambda: violations("error > 1"), TypeError, "polars expression"),
    ],
)
def test_a_measure_that_makes_no_sense_is_refused_at_once(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("measure", "text"),
    [
        (ratio("mse", "new", "old"), "mse of new / mse of old, geometric mean over blocks"),
        (difference("mse", "new", "old"), "mse of new - mse of old, mean over blocks"),
        (versus_best("mse", "new"), "mse of new / mse of the best other arm over all blocks, geometric mean"),
        (average("mse", "new"), "mse of new, mean over blocks"),
    ],
)
def test_measures_say_what_they_are(measure, text):
    assert measure.describe() == text


def test_measures_name_the_arms_whose_rows_they_need():
    assert set(ratio("mse", "new", "old").named_arms()) == {"new", "old"}
    assert set(versus_best("mse", "new", ["a", "b"]).named_arms()) == {"new", "a", "b"}
    assert versus_best("mse", "new").named_arms() is None
    assert violations(pl.col("mse") > 0).named_arms() is None
