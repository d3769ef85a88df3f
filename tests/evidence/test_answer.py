"""The answer: one sentence of advice with its number, and no advice where it is too early."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from cameraready.evidence import Answer, Claim, Untested, below, difference, ratio, versus_best
from cameraready.evidence.answer import answer
from cameraready.evidence.rules import significant
from cameraready.evidence.verdicts import judge
from tests.evidence.example_rows import failing, run_rows, study_of

ADVICE = {
    "better": "use New here: its error is {estimate} times [{low}, {high}] that of {peer}",
    "worse": "keep {peer} here: New's error is {estimate} times [{low}, {high}]",
    "tie": "take either: New's error is {estimate} times [{low}, {high}] that of {peer}",
}


def noisy(scale, n=15, seed=0, **more):
    """Errors of some arms around their `scale`, paired by a block effect."""
    rng = np.random.default_rng(seed)
    block = rng.lognormal(size=n)
    return run_rows({arm: s * block * rng.lognormal(0, 0.1, n) for arm, s in scale.items()}, **more)


def asked(measure=None, **more):
    measure = measure or versus_best("error", "new")
    return study_of(answer=Answer(measure, **{**ADVICE, **more}))


BETTER = {"new": 1.0, "old": 2.0, "older": 3.0}
WORSE = {"new": 2.0, "old": 1.0, "older": 3.0}


def test_the_sentence_gives_advice_with_the_number_and_its_interval():
    rows = noisy(BETTER)
    study = study_of(
        Claim(1, "", "", "exact", "", versus_best("error", "new"), below(1.0)),
        answer=Answer(versus_best("error", "new"), **ADVICE),
    )
    (verdict,) = judge(study, rows)
    numbers = [significant(x) for x in (verdict.estimate, verdict.low, verdict.high)]
    expected = f"Use New here: its error is {numbers[0]} times [{numbers[1]}, {numbers[2]}] that of old."
    assert answer(study, rows) == expected


def test_where_a_peer_is_better_it_is_named():
    assert answer(asked(), noisy(WORSE)).startswith("Keep old here: New's error is ")


def test_where_the_interval_holds_parity_neither_is_advised():
    assert answer(asked(), noisy({"new": 1.0, "old": 1.0}, seed=3)).startswith("Take either")


def test_the_largest_level_leads_and_smaller_ones_are_named_where_they_advise_otherwise():
    rows = pl.concat(
        [noisy(scale, budget=b) for b, scale in ((300, WORSE), (1_000, WORSE), (3_000, BETTER), (9_000, BETTER))]
    )
    sentence = answer(asked(by="budget", by_label="at {level:,} calls"), rows)
    assert sentence.startswith("Use New here: its error is ")
    assert "that of old at 9,000 calls, at 300 and 1,000 calls keep old here" in sentence
    assert "3,000" not in sentence


def test_a_lone_level_that_advises_otherwise_comes_with_its_number():
    rows = pl.concat([noisy(WORSE, budget=300), noisy(BETTER, budget=3_000)])
    sentence = answer(asked(by="budget", by_label="at {level:,} calls"), rows)
    at_300 = versus_best("error", "new").blocks(noisy(WORSE, budget=300), "arm", "instance").values
    estimate = significant(float(versus_best("error", "new").reduce(at_300)))
    assert f"at 300 calls keep old here ({estimate} [" in sentence


def test_the_largest_level_with_enough_blocks_leads():
    rows = pl.concat([noisy(BETTER, budget=300), noisy(WORSE, n=4, budget=3_000)])
    assert "at 300 calls" in answer(asked(by="budget", by_label="at {level} calls"), rows)


@pytest.mark.parametrize("by", ["", "budget"])
def test_with_fewer_than_ten_blocks_it_is_too_early_to_say(by):
    assert answer(asked(by=by), noisy(BETTER, n=7, budget=300)) == "Too early to say: 7 of the 10 blocks needed."


def test_every_workload_gets_a_clause_and_those_with_advice_come_first():
    rows = pl.concat(
        [
            noisy(BETTER, n=3, workload="iris"),
            noisy(BETTER, workload="digits"),
            noisy(WORSE, workload="wine", seed=1),
        ]
    )
    first, second, third = answer(asked(), rows).split("; ")
    assert first.startswith("On digits use New here: its error is ")
    assert second.startswith("on wine keep old here (")
    assert third == "too early to say on iris: 3 of the 10 blocks needed."


def test_a_template_that_names_the_workload_is_left_to_it():
    rows = pl.concat([noisy(BETTER, workload="digits"), noisy(BETTER, workload="wine", seed=1)])
    sentence = answer(asked(better="use New on {workload}: {estimate}"), rows)
    assert sentence.startswith("Use New on digits: 0.")
    assert "; use New on wine (0." in sentence


def test_braces_in_names_are_text():
    assert "{estimate}" in answer(
        asked(ratio("error", "new", "{estimate}"), better="use New, not {peer}"), noisy({"new": 1, "{estimate}": 2})
    )


def test_the_methods_failures_are_told():
    assert "but new failed in 2 trials" in answer(asked(), failing(noisy(BETTER), "new", [1, 2]))


def test_peers_that_could_not_take_part_are_told():
    sentence = answer(asked(), noisy(BETTER), unavailable={"oldest": "its environment could not be built"})
    assert sentence.endswith("(without oldest, not available here).")


def test_break_even_is_the_studys_for_a_difference_it_is_zero():
    measure = difference("error", "new", "old")
    advice = {"better": "use New", "worse": "keep Old", "tie": "take either", "break_even": 0.0}
    assert answer(asked(measure, **advice), noisy(BETTER)) == "Use New."
    assert answer(asked(measure, **advice), noisy(WORSE)) == "Keep Old."


def test_where_higher_is_better_the_advice_turns_round():
    measure = versus_best("error", "new", lower_is_better=False)
    assert answer(asked(measure), noisy({"new": 4.0, "old": 2.0, "older": 1.0})).startswith("Use New here")
    assert answer(asked(measure), noisy({"new": 1.0, "old": 2.0, "older": 4.0})).startswith("Keep older here")


def test_a_measure_that_is_not_defined_gives_its_reason():
    rows = run_rows({"new": [0.0] * 15, "old": [1.0] * 15})
    assert "exactly zero on one side only" in answer(asked(), rows)


def test_a_run_that_has_none_of_the_answers_workloads_says_so():
    assert answer(asked(workloads=["wine"]), noisy(BETTER)).startswith("Nothing to say yet")


def test_a_study_without_an_answer_counts_its_verdicts():
    study = study_of(
        Claim(1, "", "", "exact", "", ratio("error", "new", "old"), below(1.0)),
        Claim(2, "", "", "exact", "", ratio("error", "new", "old"), below(0.1)),
        Claim(3, "", "", "exact", "", ratio("error", "new", "older"), below(1.0)),
        Untested(4, paper="", needs="a GPU"),
    )
    rows = noisy(BETTER)
    assert answer(study, rows, verdicts=judge(study, rows)) == "Of 4 verdicts 2 hold, 1 fails and 1 is untested."


@pytest.mark.parametrize("where", [pl.col("label") > 3, pl.col("absent") > 3])
def test_an_answer_that_cannot_be_computed_says_why(where):
    rows = noisy(BETTER, budget=300).with_columns(pl.lit("x").alias("label"))
    told = answer(asked(where=where, by="budget"), rows)
    assert told.startswith("There is no answer: ")
    assert "\n" not in told


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ({"better": "use {best}"}, "'better' has the unknown {best}; known: {estimate}, {low}"),
        ({"by_label": "at {estimate}"}, "'by_label' has the unknown {estimate}; known: {level}"),
        ({"tie": "either {peer"}, "'tie' cannot be read"),
    ],
)
def test_templates_are_checked_when_the_study_is_made(template, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        asked(**template)


def test_claims_and_seeds_are_checked_when_the_study_is_made():
    about = Claim(1, "", "", "exact", "", ratio("e", "new", "old"), below(1), workloads=["nowhere"])
    with pytest.raises(ValueError, match="claim 1 is about nowhere, which the study does not have"):
        study_of(about)
    study_of(replace(about, workloads=["own", "rows.csv:y"]))  # as a run on a user's table states it
    with pytest.raises(ValueError, match="seeds of tier 'desk' must be at least 1, got 0"):
        replace(study_of(), seeds={"desk": 0})
