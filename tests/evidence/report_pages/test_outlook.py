"""What would change a verdict: the sentence names the right end and limit, and the blocks it asks for settle it."""

import math
import re
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cameraready.evidence import (
    Claim,
    above,
    always,
    below,
    difference,
    rank_correlation,
    ratio,
    violations,
    win_rate,
    within,
)
from cameraready.evidence.measures.intervals import interval
from cameraready.evidence.outcomes import Verdict
from cameraready.evidence.report.outlook import MOST_TIMES, blocks_to_settle, outlook
from cameraready.evidence.rules import MIN_BLOCKS, Within, significant

RATIO, DIFFERENCE = ratio("error", "new", "old"), difference("error", "new", "old")
WINS, RANKS = win_rate("error", "new", "old"), rank_correlation("x", "y", "new")
NUMBER = r"-?[\d.,]*\d(?:e[-+]\d+)?"


def claim_of(measure, rule, scope="exact"):
    return Claim(1, paper="p", tested="t", scope=scope, source="s", measure=measure, rule=rule)


def verdict_of(claim, low, estimate, high, blocks, reason=""):
    """The verdict as the engine gives it for these numbers."""
    judgement = claim.rule.judge(estimate, low, high)
    broken = "fails" if claim.scope in ("exact", "ours") else "not seen"
    word = {"yes": "holds", "no": broken, "open": "inconclusive"}[judgement]
    word = "inconclusive" if blocks < MIN_BLOCKS else word
    numbers = {"estimate": estimate, "low": low, "high": high, "blocks": blocks}
    return Verdict("1", 1, "t", "p", claim.scope, word, "w", claim.rule.describe(), reason=reason, **numbers)


same_every_time = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
enough_blocks, any_blocks = st.integers(MIN_BLOCKS, 500), st.integers(2, 500)
three_digits = st.integers(1, 999).map(lambda n: float(f"{n * 10.0 ** (n % 5 - 3):.3g}"))
limits = st.one_of(
    three_digits.map(below),
    three_digits.map(above),
    st.tuples(three_digits, three_digits).filter(lambda p: p[0] < p[1]).map(lambda p: within(*p)),
)
scopes = st.sampled_from(["exact", "reduced", "proxy", "ours"])


@st.composite
def judged(draw, blocks=any_blocks):
    """A claim with one of the rules, and numbers as they come, on both sides of it and across."""
    claim = claim_of(draw(st.sampled_from([RATIO, DIFFERENCE])), draw(limits), draw(scopes))
    low, estimate, high = sorted(draw(st.tuples(three_digits, three_digits, three_digits)))
    return claim, verdict_of(claim, low, estimate, high, draw(blocks))


@same_every_time
@given(judged())
def test_every_tested_verdict_has_one_sentence_or_two_and_real_numbers(case):
    text = outlook(*case)
    assert text.endswith(".")
    assert 20 < len(text) < 260
    assert not re.search(r"nan|inf\b|not a number|None", text)


def numbers_of(text):
    return [float(found.replace(",", "")) for found in re.findall(rf"(?<![\w.]){NUMBER}(?![\w%])", text)]


@same_every_time
@given(judged(blocks=enough_blocks))
def test_what_holds_stops_holding_exactly_where_the_sentence_says(case):
    claim, verdict = case
    assume(verdict.verdict == "holds")
    text = outlook(claim, verdict)
    end, limit = numbers_of(text)
    name = "high" if "upper end" in text else "low"
    assert end == getattr(verdict, name)
    ends = {"low": verdict.low, "high": verdict.high}
    beyond = 1 + 1e-9 if name == "high" else 1 - 1e-9
    assert claim.rule.judge(verdict.estimate, **{**ends, name: limit * beyond}) != "yes"
    assert claim.rule.judge(verdict.estimate, **{**ends, name: limit / beyond}) == "yes"


@same_every_time
@given(judged(blocks=enough_blocks))
def test_what_is_refuted_comes_into_doubt_and_then_holds_where_the_sentence_says(case):
    claim, verdict = case
    assume(verdict.verdict in ("fails", "not seen"))
    text = outlook(claim, verdict)
    first, limit, second = numbers_of(text)
    falls = "fall below" in text
    assert (first, second) == ((verdict.low, verdict.high) if falls else (verdict.high, verdict.low))
    inside = limit * (1 - 1e-9 if falls else 1 + 1e-9)
    doubt = {"low": inside, "high": verdict.high} if falls else {"low": verdict.low, "high": inside}
    assert claim.rule.judge(verdict.estimate, **doubt) == "open"
    assert claim.rule.judge(inside, low=inside, high=inside) == "yes"


# --- how many blocks ------------------------------------------------------------------------------------------------


def blocks_like(mean, spread, n):
    """`n` values with exactly this mean and standard deviation, symmetric."""
    pattern = np.linspace(-1, 1, n)
    return mean + spread * (pattern - pattern.mean()) / pattern.std(ddof=1)


@same_every_time
@given(
    st.sampled_from([RATIO, DIFFERENCE]),
    limits,
    st.floats(-1, 1),
    st.floats(0.05, 1.5),
    st.integers(MIN_BLOCKS, 60),
)
def test_so_many_blocks_of_the_same_kind_settle_it_and_fewer_do_not(measure, rule, shift, spread, n):
    """Against the engine's own intervals, of made-up blocks with the same mean and spread."""
    claim = claim_of(measure, rule)
    limit = rule.lo if isinstance(rule, Within) else rule.limit
    centre = math.log(limit) + shift if measure is RATIO else limit + shift

    def found(blocks):
        estimate, low, high = interval(measure, blocks_like(centre, spread, blocks)[:, None])
        return rule.judge(estimate, low, high), verdict_of(claim, low, estimate, high, blocks)

    judgement, verdict = found(n)
    assume(judgement == "open")
    needed = blocks_to_settle(claim, verdict)
    if needed is None:
        assert found(MOST_TIMES * n)[0] == "open"
        assert f"even {MOST_TIMES * n:,} blocks" in outlook(claim, verdict)
        return
    assert n < needed <= MOST_TIMES * n
    assert found(needed + 1)[0] != "open"  # one more, for rounding
    if needed - 2 >= n:
        assert found(needed - 2)[0] == "open"
    holds = found(needed + 1)[0] == "yes"
    assert outlook(claim, verdict).endswith("it would hold." if holds else "it would fail.")


@same_every_time
@given(st.floats(0, 1), st.integers(MIN_BLOCKS, 40), st.floats(-0.2, 0.2), st.sampled_from([below, above]))
def test_a_share_is_settled_by_its_exact_interval(share, n, shift, rule):
    wins = round(share * n)
    limit = min(max(wins / n + shift, 0.02), 0.98)
    claim = claim_of(WINS, rule(limit))

    def judgement(blocks):
        result = interval(WINS, np.full((blocks, 1), wins / n))
        return claim.rule.judge(*result), result

    word, (estimate, low, high) = judgement(n)
    assume(word == "open")
    needed = blocks_to_settle(claim, verdict_of(claim, low, estimate, high, n))
    if needed is None:
        assert judgement(MOST_TIMES * n)[0] == "open"
        return
    assert judgement(needed)[0] != "open"
    assert needed == n + 1 or judgement(needed - 1)[0] == "open"


@same_every_time
@given(st.floats(-0.9, 0.9), st.integers(MIN_BLOCKS, 80), st.floats(-0.3, 0.3))
def test_a_correlation_shrinks_on_fishers_scale(r, n, shift):
    """Bonett and Wright's interval, written out."""

    def ends(blocks):
        reach = 1.959964 * math.sqrt((1 + r**2 / 2) / (blocks - 3))
        return math.tanh(math.atanh(r) - reach), math.tanh(math.atanh(r) + reach)

    claim = claim_of(RANKS, above(r + shift))
    assume(claim.rule.judge(r, *ends(n)) == "open")
    low, high = ends(n)
    needed = blocks_to_settle(claim, verdict_of(claim, low, r, high, n))
    if needed is None:
        assert claim.rule.judge(r, *ends(MOST_TIMES * n - 1)) == "open"
        return
    assert claim.rule.judge(r, *ends(needed + 1)) != "open"
    assert needed - 2 < n or claim.rule.judge(r, *ends(needed - 2)) == "open"


def test_an_estimate_on_the_limit_is_never_settled():
    for rule in (below(2.0), above(2.0), within(1.0, 2.0), within(2.0, 3.0)):
        claim = claim_of(RATIO, rule)
        verdict = verdict_of(claim, 1.5, 2.0, 2.6, 20)
        assert blocks_to_settle(claim, verdict) is None
        assert "so near to it that even 2,000 blocks (now 20) would not settle it" in outlook(claim, verdict)


def test_the_width_shrinks_on_the_logarithmic_scale_for_ratios():
    """From 1/4 to 1 around 1/2, to stay below 0.9: the same as from -1.39 to 0 around -0.69, to stay below -0.105."""
    claim, plain = claim_of(RATIO, below(0.9)), claim_of(DIFFERENCE, below(math.log(0.9)))
    numbers = (0.25, 0.5, 1.0)
    expected = blocks_to_settle(plain, verdict_of(plain, *map(math.log, numbers), 12))
    assert blocks_to_settle(claim, verdict_of(claim, *numbers, 12)) == expected


def test_only_an_open_interval_can_be_settled():
    claim = claim_of(RATIO, below(1))
    with pytest.raises(ValueError, match="both sides"):
        blocks_to_settle(claim, verdict_of(claim, 0.1, 0.2, 0.3, 12))


# --- where numbers are not what is in the way -----------------------------------------------------------------------


def test_too_few_blocks_come_first():
    claim = claim_of(RATIO, below(1))
    assert outlook(claim, verdict_of(claim, 0.1, 0.2, 0.3, 7)) == "A verdict needs 10 blocks; 3 more are missing."


def test_failures_that_forbid_holds_are_named():
    claim = claim_of(RATIO, below(1))
    reason = "the numbers obey the rule, but failures forbid 'holds'; 2 trials of new failed"
    verdict = replace(verdict_of(claim, 0.1, 0.2, 0.3, 12, reason), verdict="inconclusive")
    assert outlook(claim, verdict) == f"The numbers obey the rule; in the way is this: {reason}."


def test_without_an_interval_the_reason_says_what_is_missing():
    claim = claim_of(RATIO, below(1))
    verdict = replace(verdict_of(claim, 0.1, 2.0, 3.0, 12), estimate=None, low=None, high=None, reason="a zero")
    assert outlook(claim, verdict) == "More blocks would not help: a zero."


@pytest.mark.parametrize(
    ("word", "text"), [("holds", "A single violation would refute it."), ("fails", "More blocks cannot undo")]
)
def test_a_census_is_settled_by_one_violation(word, text):
    claim = claim_of(violations(pl.col("gap") > 0), always())
    verdict = Verdict("1", 1, "t", "p", "exact", word, "w", "no violation", estimate=float(word == "fails"), blocks=12)
    assert outlook(claim, verdict).startswith(text)


def test_a_rule_that_has_changed_since_is_not_judged_by():
    claim = claim_of(RATIO, below(1))
    verdict = replace(verdict_of(claim, 0.1, 0.2, 0.3, 12), rule="below 0.9")
    expected = "The rule has changed since (below 0.9 then, below 1 now): run the study again."
    assert outlook(claim, verdict) == expected


def test_what_was_not_tested_has_no_outlook():
    claim = claim_of(RATIO, below(1))
    assert outlook(claim, Verdict("1", 1, "t", "p", "exact", "untested", "w", reason="no rows")) == ""


def test_the_numbers_are_written_as_everywhere():
    claim = claim_of(RATIO, below(1 / 3))
    text = outlook(claim, verdict_of(claim, 0.1, 0.1234, 0.15876, 12))
    assert f"{significant(0.15876)}, would have to rise to {significant(1 / 3)}" in text
