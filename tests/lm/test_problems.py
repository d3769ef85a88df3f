"""How answers are read: numbers, words and expressions, as people write them and whatever models write instead."""

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cameraready.lm._problems import last_expression, last_number, numbers, says, value

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("12 - 5 = 7", [12, 5, 7]),
        ("12 -5", [12, 5]),
        ("it is -5", [-5]),
        ("(-5) and −7", [-5, -7]),
        ("3-4", [3, 4]),
        ("1,234,567.5 and 1, 2", [Fraction("1234567.5"), 1, 2]),
        ("12,34", [12, 34]),
        ("The answer is **42**.", [42]),
        ("\\boxed{-17}", [-17]),
        ("$1,000.00", [1000]),
        ("x2 and 3 kg, 5cm, v1.2", [3, 5]),
        ("0.5 + .5", [Fraction(1, 2), Fraction(1, 2)]),
        ("1e3 and 2.5E-1", [1000, Fraction(1, 4)]),
        ("1e999999999", [1]),
        ("9" * 5000, []),
        ("- 5 apples", [5]),
        ("x = - 5", [-5]),
        ("covid-19", [19]),
        ("2 \\times -3", [2, -3]),
        ("no number", []),
        ("007", [7]),
        ("range 3–5", [3, 5]),
        ("= -396", [-396]),
    ],
)
def test_numbers_are_read_as_people_do(written, found):
    assert numbers(written) == found
    assert last_number(written) == (found[-1] if found else None)


@pytest.mark.parametrize(
    ("written", "answer", "right"),
    [
        ("It is Paris.", "paris", True),
        ("It is Parisian.", "paris", False),
        ("new\n york", "New York", True),
        ("a C++ program", "C++", True),
        ("Nothing", "", False),
        ("(yes)", "yes", True),
        ("yesterday", "yes", False),
    ],
)
def test_says_finds_whole_words(written, answer, right):
    assert says(written, answer) is right


TREES = st.recursive(
    st.integers(0, 20).map(str),
    lambda inner: st.tuples(
        inner, st.sampled_from("+-*/"), inner, st.sampled_from(["{} {} {}", "({} {} {})", "({}{}{})"])
    ).map(lambda parts: parts[3].format(parts[0], parts[1], parts[2])),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(TREES)
def test_expressions_have_the_value_that_python_gives_them(written):
    exact = re.sub(r"\d+", lambda number: f"Fraction({number.group()})", written)
    try:
        wanted = eval(exact, {"__builtins__": {}, "Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="divides by zero"):
            value(written)
        return
    assert value(written) == (wanted, [int(number) for number in re.findall(r"\d+", written)])


@pytest.mark.parametrize(
    "written",
    [
        "",
        "1 +",
        "(1 + 2",
        "1 + 2)",
        "1 2",
        "2 ** 3",
        "__import__('os').getcwd()",
        "1 / 0",
        "x",
        "((" * 100 + "1" + "))" * 100,
        "1+" * 300 + "1",
    ],
)
def test_what_is_no_expression_is_refused(written):
    with pytest.raises(ValueError, match=r"\w+ \w+ \w+"):
        value(written)


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("so (8 - 2) * 4 = 24.", (24, [8, 2, 4])),
        ("First 1 + 2 = 3, then (3 + 5) × 3", (24, [3, 5, 3])),
        ("Answer: 3 * (4 + 4)", (24, [3, 4, 4])),
        ("8 / (3 - 8 / 3)", (24, [8, 3, 8, 3])),
        ("the result is 24", None),
        ("1. 2 + 3\n2. -4 + 28", (24, [4, 28])),
        ("`6*4`\n", (24, [6, 4])),
        ("**(8-2)*4**", (24, [8, 2, 4])),
        ("\\boxed{(8-2) \\times 4}", (24, [8, 2, 4])),
        ("24 = 6 · 4", (24, [6, 4])),
        ("3.5 * 2", None),
        ("nothing", None),
    ],
)
def test_the_last_expression_is_read(written, found):
    assert last_expression(written) == found
