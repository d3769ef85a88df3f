"""Verdicts: the right word, fair to every arm, with the reason where it is not plain."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from cameraready.evidence import (
    Claim,
    Untested,
    above,
    always,
    average,
    below,
    difference,
    growth,
    ratio,
    versus_best,
    violations,
    within,
)
from cameraready.evidence.measures.intervals import interval
from cameraready.evidence.verdicts import judge
from tests.evidence.example_rows import failing, run_rows, study_of

HALF = ratio("error", "new", "old")


def claim(measure=HALF, rule=None, scope="exact", number=1, **more):
    return Claim(
        number,
        paper="The new method is better.",
        tested="Its error is below that of the old one.",
        scope=scope,
        source="Somebody et al., 2026, arXiv:2601.00001, Table 1",
        measure=measure,
        rule=rule or below(1.0),
        **more,
    )


def noisy(new, old, n=15, seed=0, **more):
    """Errors of two arms around `new` and `old`, paired by a block effect."""
    rng = np.random.default_rng(seed)
    block = rng.lognormal(size=n)
    return run_rows(
        {"new": new * block * rng.lognormal(0, 0.1, n), "old": old * block * rng.lognormal(0, 0.1, n)}, **more
    )


def verdicts(rows, *claims, **options):
    return judge(study_of(*(claims or (claim(),))), rows, **options)


def verdict(rows, *claims, **options):
    (found,) = verdicts(rows, *claims, **options)
    return found


# --- the word ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "better", "worse"),
    [
        ("exact", "holds", "fails"),
        ("ours", "holds", "fails"),
        ("reduced", "holds", "not seen"),
        ("proxy", "holds", "not seen"),
    ],
)
def test_a_small_test_never_refutes_a_claim_about_a_large_one(scope, better, worse):
    assert verdict(noisy(1.0, 2.0), claim(scope=scope)).verdict == better
    assert verdict(noisy(2.0, 1.0), claim(scope=scope)).verdict == worse
    assert verdict(noisy(1.0, 1.0, seed=3), claim(scope=scope)).verdict == "inconclusive"


def test_an_open_verdict_says_that_the_interval_reaches_both_sides():
    found = verdict(noisy(1.0, 1.0, seed=3))
    assert found.low < 1.0 < found.high
    assert found.reason == "the interval reaches both sides of the rule (below 1)"


def test_on_par_needs_the_whole_interval_within_the_limits():
    assert verdict(noisy(1.0, 1.0), claim(rule=within(0.8, 1.25))).verdict == "holds"
    assert verdict(noisy(1.0, 1.0), claim(rule=within(0.999, 1.001))).verdict == "inconclusive"
    assert verdict(noisy(1.0, 2.0), claim(rule=within(0.8, 1.25))).verdict == "fails"


def test_a_verdict_carries_its_numbers_its_rule_and_its_source():
    rows = noisy(1.0, 2.0)
    found = verdict(rows, claim(part="b", changed="was below 0.9 until the first run: a typing error"))
    values = HALF.blocks(rows, "arm", "instance").values
    assert (found.estimate, found.low, found.high) == tuple(interval(HALF, values))
    assert found.label == "1b"
    assert found.blocks == 15
    assert found.workload == "digits"
    assert found.rule == "below 1"
    assert found.measure == HALF.describe()
    assert found.source.endswith("Table 1")
    assert found.changed == "was below 0.9 until the first run: a typing error"
    assert found.seconds == pytest.approx(15 * 2 * 0.5)
    assert not found.provisional
    assert found.reason == ""


def test_the_time_of_a_trial_with_several_rows_counts_once():
    rows = pl.concat([noisy(1.0, 2.0), noisy(1.0, 2.0)])
    assert verdict(rows).seconds == pytest.approx(15 * 2 * 0.5)


@pytest.mark.parametrize("rule", [below(1.0), above(1.0), within(0.5, 2.0)])
@pytest.mark.parametrize("new", [0.01, 1.0, 100.0])
def test_there_is_no_verdict_under_ten_blocks(new, rule):
    found = verdict(noisy(new, 1.0, n=9), claim(rule=rule))
    assert found.verdict == "inconclusive"
    assert found.reason == "9 blocks; 10 are needed"
    assert verdict(noisy(0.01, 1.0, n=10)).verdict == "holds"


def test_a_measure_that_is_not_defined_gives_no_number_but_a_sentence():
    rows = run_rows({"new": [0.0] * 3 + [1.0] * 12, "old": [2.0] * 15})
    found = verdict(rows)
    assert found.verdict == "inconclusive"
    assert found.estimate is None
    assert found.low is None
    assert "exactly zero on one side only in 3 of 15 blocks" in found.reason


# --- fairness ---------------------------------------------------------------


def test_a_failed_trial_of_the_method_forbids_holds():
    found = verdict(failing(noisy(1.0, 2.0), "new", [4]))
    assert found.verdict == "inconclusive"
    assert found.failed_trials == 1
    assert found.blocks == 14
    assert "1 trial of new failed" in found.reason
    assert "forbid 'holds'" in found.reason


def test_a_failed_trial_of_the_method_does_not_save_it_from_failing():
    assert verdict(failing(noisy(2.0, 1.0), "new", [4])).verdict == "fails"


def test_a_method_that_returns_nan_cannot_hold_either():
    rows = noisy(1.0, 2.0).with_columns(
        pl.when((pl.col("arm") == "new") & (pl.col("instance") == 2)).then(np.nan).otherwise("error").alias("error")
    )
    found = verdict(rows)
    assert found.verdict == "inconclusive"
    assert "1 block left out: new returned NaN or infinity" in found.reason


def test_a_peers_failures_are_shown_and_cost_the_block_not_the_verdict():
    found = verdict(failing(noisy(1.0, 2.0), "old", [4, 7]))
    assert found.verdict == "holds"
    assert found.lost_blocks == 2
    assert found.blocks == 13
    assert found.reason == "2 blocks lost: old failed (2)"
    assert found.failed_trials == 0


def test_a_peer_that_failed_everywhere_leaves_nothing_to_compare():
    found = verdict(failing(noisy(1.0, 2.0), "old", range(15)))
    assert found.verdict == "inconclusive"
    assert found.blocks == 0
    assert "15 blocks lost: old failed (15)" in found.reason


def test_a_method_that_failed_everywhere_is_not_untested():
    found = verdict(failing(noisy(1.0, 2.0), "new", range(15)))
    assert found.verdict == "inconclusive"
    assert found.failed_trials == 15


def test_failures_count_where_the_rows_could_not_say_whether_they_count():
    rows = pl.concat([noisy(1.0, 2.0, budget=100, part="accuracy"), noisy(1.0, 2.0, budget=300, part="accuracy")])
    hit = (pl.col("arm") == "new") & (pl.col("instance") == 5)
    broken = rows.with_columns(
        pl.when(hit).then(pl.lit("timeout")).otherwise("status").alias("status"),
        pl.when(hit).then(None).otherwise("error").alias("error"),
        pl.when(hit).then(None).otherwise("part").alias("part"),  # a column that only a finished trial returns
    )
    where = (pl.col("part") == "accuracy") & (pl.col("budget") == 300)
    found = verdict(broken, claim(where=where))
    assert found.failed_trials == 1  # the one at 300; the condition rules the other one out
    assert found.verdict == "inconclusive"


def test_a_trial_that_died_without_naming_its_arm_is_the_methods_failure():
    crash = pl.DataFrame([{"workload": "digits", "trial": "crash", "status": "died", "instance": 3}])
    found = verdict(pl.concat([noisy(1.0, 2.0), crash], how="diagonal_relaxed"))
    assert found.failed_trials == 1
    assert found.verdict == "inconclusive"


def test_a_run_in_which_every_trial_failed_is_inconclusive_not_an_error():
    rows = failing(noisy(1.0, 2.0), "new", range(15)).filter(pl.col("arm") == "new").drop("error")
    found = verdict(rows, claim(measure=average("error", "new"), where=pl.col("error") < 5))
    assert found.verdict == "inconclusive"
    assert found.failed_trials == 15


def test_failures_on_one_workload_forbid_the_pooled_verdict_to_hold():
    good = noisy(1.0, 2.0, workload="digits")
    bad = failing(noisy(1.0, 2.0, workload="wine", seed=1), "new", range(15))
    third = noisy(1.0, 2.0, workload="iris", seed=2)
    found = {v.workload: v for v in verdicts(pl.concat([good, bad, third]))}
    assert found["digits"].verdict == found["iris"].verdict == "holds"
    assert found["all"].verdict == "inconclusive"
    assert found["all"].failed_trials == 15
    assert "wine" in found["all"].reason


# --- the census ---------------------------------------------------------------


def census(values, **more):
    return verdict(run_rows({"new": values}, column="gap"), claim(violations(pl.col("gap") > 1e-9), always()), **more)


def test_a_census_without_violation_holds_and_has_no_interval():
    found = census([0.0] * 10)
    assert found.verdict == "holds"
    assert found.estimate == 0
    assert found.low is None
    assert found.high is None
    assert found.rule == "no violation"


@pytest.mark.parametrize("n", [3, 20])
def test_one_violation_refutes_a_census_however_many_blocks(n):
    found = census([0.0] * (n - 1) + [1.0])
    assert found.verdict == "fails"
    assert found.reason == "1 violation"


def test_a_census_of_nine_blocks_does_not_hold():
    assert census([0.0] * 9).verdict == "inconclusive"


def test_a_census_does_not_hold_where_it_could_not_look():
    found = census([0.0] * 14 + [None])
    assert found.verdict == "inconclusive"
    assert "could not be evaluated" in found.reason


def test_a_census_with_a_failed_trial_does_not_hold():
    rows = failing(run_rows({"new": [0.0] * 15}, column="gap"), "new", [0])
    assert verdict(rows, claim(violations(pl.col("gap") > 1e-9), always())).verdict == "inconclusive"


@pytest.mark.parametrize("pair", [(violations(pl.col("error") > 0), below(1.0)), (HALF, always())])
def test_a_census_and_its_rule_belong_together(pair):
    found = verdict(noisy(1.0, 2.0), claim(*pair))
    assert found.verdict == "untested"
    assert found.reason == "violations() goes with always(), and always() with nothing else"


# --- untested, with what it would need ---------------------------------------------------------------


def test_an_untested_claim_says_what_it_needs():
    found = verdict(noisy(1.0, 2.0), Untested(7, paper="It scales.", needs="a GPU", source="Figure 9"))
    assert found.verdict == "untested"
    assert found.reason == "needs a GPU"
    assert found.label == "7"


def test_an_arm_that_could_not_take_part_leaves_the_claim_untested():
    rows = noisy(1.0, 2.0).filter(pl.col("arm") == "new")
    assert verdict(rows).reason == "old: it has no rows in this run"
    found = verdict(rows, unavailable={"old": "left out"})
    assert found.verdict == "untested"
    assert found.reason == "old: left out"


def test_the_best_of_named_peers_is_untested_when_one_of_them_is_missing():
    best = claim(versus_best("error", "new", ["old", "other"]))
    found = verdict(noisy(1.0, 2.0), best, unavailable={"other": "its environment could not be built"})
    assert found.verdict == "untested"
    assert "other: its environment could not be built" in found.reason


def test_the_best_of_all_others_names_those_that_could_not_take_part():
    found = verdict(noisy(1.0, 2.0), claim(versus_best("error", "new")), unavailable={"other": "left out"})
    assert found.verdict == "holds"
    assert found.peer == "old"
    assert found.reason == "not compared with other: left out"


def test_a_condition_that_no_row_meets_leaves_the_claim_untested():
    found = verdict(noisy(1.0, 2.0, budget=100), claim(where=pl.col("budget") == 10_000))
    assert found.verdict == "untested"
    assert "no row of this run meets the claim's condition" in found.reason


def test_a_column_that_no_row_has_leaves_the_claim_untested_and_names_the_near_misses():
    for spoiled in (claim(ratio("eror", "new", "old")), claim(where=pl.col("eror") > 0)):
        found = verdict(noisy(1.0, 2.0), spoiled)
        assert found.verdict == "untested"
        assert "'eror'" in found.reason
        assert "did you mean error" in found.reason


def test_a_claim_about_other_workloads_is_not_silently_dropped():
    rows = noisy(1.0, 2.0, workload="iris")
    found = verdict(rows, claim(workloads=["digits"]))
    assert found.verdict == "untested"
    assert found.reason == "this run has none of its workloads: digits"


# --- workloads, pooled and provisional ---------------------------------------------------------------


def test_one_verdict_per_workload_and_a_pooled_one():
    rows = pl.concat([noisy(1.0, 2.0, workload="digits"), noisy(1.0, 3.0, workload="wine", seed=1)])
    found = {v.workload: v for v in verdicts(rows)}
    assert list(found) == ["digits", "wine", "all"]
    assert found["all"].blocks == 30
    assert found["all"].value == {w: found[w].estimate for w in ("digits", "wine")}
    assert found["all"].estimate == pytest.approx(np.sqrt(found["digits"].estimate * found["wine"].estimate))
    assert found["all"].seconds == pytest.approx(found["digits"].seconds + found["wine"].seconds)


def test_the_pooled_interval_takes_spread_within_workloads_only():
    rows = pl.concat([noisy(1.0, 2.0, workload="digits"), noisy(100.0, 2.0, workload="wine", seed=1)])
    pooled = verdicts(rows)[-1]
    values = np.concatenate([HALF.blocks(part, "arm", "instance").values for part in rows.partition_by("workload")])
    assert (pooled.low, pooled.high) == tuple(interval(HALF, values, np.repeat([0, 1], 15)))[1:]
    assert pooled.high / pooled.low < 1.3 < np.divide(*interval(HALF, values)[:0:-1])


def test_a_claim_can_do_without_a_pooled_verdict():
    rows = pl.concat([noisy(1.0, 2.0, workload="digits"), noisy(1.0, 3.0, workload="wine", seed=1)])
    assert [v.workload for v in verdicts(rows, claim(pooled=False))] == ["digits", "wine"]


def test_the_best_peer_of_all_workloads_is_one_that_took_part_on_all_of_them():
    rng = np.random.default_rng(4)
    one = run_rows({a: s * rng.lognormal(0, 0.1, 12) for a, s in {"new": 1, "old": 2, "local": 0.1}.items()})
    two = run_rows({a: s * rng.lognormal(0, 0.1, 12) for a, s in {"new": 1, "old": 2}.items()}, workload="wine")
    found = {v.workload: v for v in verdicts(pl.concat([one, two]), claim(versus_best("error", "new")))}
    assert found["digits"].peer == "local"
    assert found["all"].peer == "old"
    assert "local took part on some workloads only" in found["all"].reason


def test_fewer_blocks_than_planned_make_a_verdict_provisional():
    rows = noisy(1.0, 2.0)
    assert verdict(rows, planned={"digits": 30}).provisional
    assert not verdict(rows, planned={"digits": 15}).provisional
    assert not verdict(rows, planned={("digits", "1"): 15, ("digits", "2"): 30}).provisional
    assert verdict(rows, planned={("digits", "1"): 16}).provisional


def test_failed_blocks_are_done_and_unfinished_ones_are_not():
    rows = noisy(1.0, 2.0)
    assert not verdict(failing(rows, "old", [3]), planned={"digits": 15}).provisional
    unfinished = rows.filter(~((pl.col("arm") == "old") & (pl.col("instance") == 14)))
    assert verdict(unfinished).provisional


def test_a_pooled_plan_is_the_sum_of_the_workloads_plans():
    rows = pl.concat([noisy(1.0, 2.0, workload="digits"), noisy(1.0, 3.0, workload="wine", seed=1)])
    assert not verdicts(rows, planned={"digits": 15, "wine": 15})[-1].provisional
    assert verdicts(rows, planned={"digits": 15, "wine": 20})[-1].provisional


def test_verdicts_can_be_recomputed_from_the_rows_in_a_parquet_file(tmp_path):
    rows = pl.concat([failing(noisy(1.0, 2.0), "old", [2]), noisy(1.0, 3.0, workload="wine", seed=1)])
    rows.write_parquet(tmp_path / "rows.parquet")
    claims = (
        claim(),
        claim(versus_best("error", "new"), number=2),
        claim(growth("error", "instance", "new"), number=3),
    )
    assert verdicts(pl.read_parquet(tmp_path / "rows.parquet"), *claims) == verdicts(rows, *claims)


def test_no_rows_at_all_leave_every_claim_untested():
    empty = noisy(1.0, 2.0).head(0)
    assert [v.verdict for v in verdicts(empty, claim(), Untested(2, paper="", needs="time"))] == [
        "untested",
        "untested",
    ]


def test_a_claim_is_recovered_from_noise_when_it_is_true():
    rng = np.random.default_rng(5)
    rows = run_rows({"new": rng.normal(1.0, 1.0, 60), "old": rng.normal(3.0, 1.0, 60)})
    found = verdict(rows, claim(difference("error", "new", "old"), below(-1.0)))
    assert found.verdict == "holds"
    assert found.low < -2.0 < found.high


@pytest.mark.parametrize("dtype", [pl.Float64, pl.String, pl.Null])
@pytest.mark.parametrize("about", [pl.col("kind") == "end", pl.col("kind") > 1.5, pl.col("kind").str.contains("e")])
def test_a_column_without_a_value_is_unknown_whatever_its_type(about, dtype):
    """Nobody who tries a model of theirs is to read what a data frame library says of a column that has no value."""
    rows = noisy(1.0, 2.0, budget=100).with_columns(pl.lit(None, dtype=dtype).alias("kind"))
    found = verdict(rows, claim(where=(pl.col("budget") == 100) & about))
    assert (found.verdict, found.reason) == ("untested", "no row of this run meets the claim's condition")
    failed = failing(rows, "new", range(15)).filter(pl.col("arm") == "new")
    for column in ("kind", "error"):  # returned by no trial, and empty
        found = verdict(failed.drop(column), claim(average("error", "new"), where=(pl.col("budget") == 100) & about))
        assert (found.verdict, found.failed_trials) == ("inconclusive", 15)
    found = verdict(failed, claim(average("error", "new"), where=(pl.col("budget") == 300) & (pl.col("kind") == "end")))
    assert (found.verdict, found.reason) == ("untested", "no row of this run meets the claim's condition")


# --- a claim that cannot be computed ----------------------------------------


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (claim(ratio("label", "new", "old"), number=2), "column 'label' holds String, a measure needs numbers"),
        (claim(where=pl.col("seed") + 1, number=2), "its `where` is no condition: it gives"),
        (claim(where=pl.col("label") > 3, number=2), "it cannot be computed from the rows: cannot compare string"),
        (claim(violations(pl.col("error") > 1), below(1.0), number=2), "violations() goes with always()"),
    ],
)
def test_one_claim_that_cannot_be_computed_leaves_the_others(bad, reason):
    rows = noisy(1.0, 2.0).with_columns(pl.lit("x").alias("label"))
    good, broken = verdicts(rows, claim(), bad)
    assert good.verdict == "holds"
    assert broken.verdict == "untested"
    assert broken.reason.startswith(reason)
    assert "\n" not in broken.reason
