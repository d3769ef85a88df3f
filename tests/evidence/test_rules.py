"""Rules judge a whole interval; numbers are written with three significant digits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cameraready.evidence import above, always, below, within
from cameraready.evidence.rules import significant

NAN = math.nan
finite = st.floats(-1e6, 1e6)


@pytest.mark.parametrize(
    ("rule", "low", "high", "expected"),
    [
        (below(1.0), 0.5, 0.9, "yes"),
        (below(1.0), 1.1, 1.5, "no"),
        (below(1.0), 0.9, 1.1, "open"),
        (below(1.0), 1.0, 1.0, "no"),  # exactly on par is not below
        (above(2.0), 2.1, 3.0, "yes"),
        (above(2.0), 1.0, 1.9, "no"),
        (above(2.0), 1.9, 2.1, "open"),
        (above(2.0), 2.0, 2.0, "no"),
        (within(0.8, 1.25), 0.8, 1.25, "yes"),
        (within(0.8, 1.25), 0.79, 1.1, "open"),
        (within(0.8, 1.25), 0.5, 0.79, "no"),
        (within(0.8, 1.25), 1.26, 2.0, "no"),
        (within(0.8, 1.25), 0.5, 2.0, "open"),
    ],
)
def test_a_rule_is_obeyed_by_the_whole_interval_or_left_open(rule, low, high, expected):
    assert rule.judge((low + high) / 2, low, high) == expected


@given(finite, finite, finite)
def test_above_mirrors_below(limit, a, b):
    low, high = min(a, b), max(a, b)
    assert above(limit).judge(0.0, low, high) == below(-limit).judge(0.0, -high, -low)


@given(finite, finite, finite, finite)
def test_a_shorter_interval_never_contradicts_a_longer_one(limit, a, b, c):
    low, middle, high = sorted((a, b, c))
    outer = below(limit).judge(middle, low, high)
    inner = below(limit).judge(middle, middle, high)
    assert outer == "open" or inner == outer


@pytest.mark.parametrize("rule", [below(1.0), above(1.0), within(0.5, 2.0)])
def test_without_an_interval_nothing_is_decided(rule):
    assert rule.judge(1.0, NAN, NAN) == "open"


def test_a_census_looks_at_the_count_alone():
    assert always().judge(0.0, NAN, NAN) == "yes"
    assert always().judge(1.0, NAN, NAN) == "no"
    assert always().judge(NAN, NAN, NAN) == "open"


@pytest.mark.parametrize("make", [lambda: below(NAN), lambda: above("1"), lambda: within(0.0, math.inf)])
def test_a_limit_must_be_a_finite_number(make):
    with pytest.raises(ValueError, match="finite number"):
        make()


def test_an_empty_range_is_refused():
    with pytest.raises(ValueError, match="lo < hi"):
        within(2.0, 1.0)


def test_rules_describe_themselves():
    assert below(1 / 3).describe() == "below 0.333"
    assert above(6).describe() == "above 6"
    assert within(0.8, 1.25).describe() == "between 0.8 and 1.25"
    assert always().describe() == "no violation"


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (1 / 3, "0.333"),
        (1.0799, "1.08"),
        (12_345.6, "12,300"),
        (999.6, "1,000"),
        (0.00012345, "0.000123"),
        (3.14159e-7, "3.14e-07"),
        (-2.5, "-2.5"),
        (0.0, "0"),
        (100.0, "100"),
        (math.inf, "infinity"),
    ],
)
def test_numbers_have_three_significant_digits(x, text):
    assert significant(x) == text


@given(st.floats(1e-9, 1e9))
def test_a_written_number_is_within_half_a_unit_of_its_third_digit(x):
    assert abs(float(significant(x).replace(",", "")) - x) <= 0.0051 * x
