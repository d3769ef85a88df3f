"""pass@k with the error of its clusters, distinct answers up to how they are written, repeated attempts."""

import itertools
import math
import random

import numpy as np
import pytest

from cameraready.lm import _tasks
from cameraready.posttraining._rollouts import (
    canonical_expression,
    distinct_at_k,
    distinct_solutions,
    normaliser,
    pass_at,
    repeats,
)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_and_its_error_by_hand(k):
    correct = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0] * 5, [1] * 5]
    each = [np.mean([any(draw) for draw in itertools.combinations(flags, k)]) for flags in correct]
    found = pass_at(correct, k)
    assert found.mean == pytest.approx(np.mean(each))
    assert found.standard_error == pytest.approx(np.std(each, ddof=1) / 2)
    assert found.problems == 4


def test_its_standard_error_covers_problems_and_not_samples():
    # 40 problems, half of them always solved: 1,000 samples of each say nothing about other problems.
    found = pass_at([np.full(1000, place % 2) for place in range(40)], 1)
    assert found.mean == 0.5
    assert found.standard_error == pytest.approx(0.5 * math.sqrt(40 / 39) / math.sqrt(40))
    assert math.isnan(pass_at([[True, False]], 1).standard_error)


def test_its_intervals_cover_the_truth():
    generator = np.random.default_rng(0)
    truth, k, hits = 1 - (1 / 3), 2, 0  # of chances uniform in [0, 1]: E[1 - (1 - p)^2] = 2 / 3
    for _ in range(400):
        chances = generator.random(60)
        found = pass_at(list(generator.random((60, 4)) < chances[:, None]), k)
        hits += abs(found.mean - truth) < 2.0 * found.standard_error
    assert 0.92 < hits / 400 < 0.98


def test_groups_and_tensors_are_counted_too():
    torch = pytest.importorskip("torch")

    class Group:
        correct = torch.tensor([True, False])

    assert pass_at([Group(), torch.tensor([False, False])], 1).mean == 0.25


@pytest.mark.parametrize(("groups", "k"), [([], 1), ([[True]], 2), ([[True]], 0)])
def test_impossible_counts_are_refused(groups, k):
    with pytest.raises(ValueError, match=r"no problems|k must be"):
        pass_at(groups, k)


@pytest.mark.parametrize(
    "forms",
    [["a", "a", "b", "", "", "c"], ["", "", ""], ["a"] * 4, ["a", "b", "c"]],
)
def test_distinct_at_k_is_the_mean_over_all_draws(forms):
    for k in range(1, len(forms) + 1):
        draws = [len(set(draw) - {""}) for draw in itertools.combinations(forms, k)]
        assert distinct_at_k(forms, k) == pytest.approx(np.mean(draws))


def test_distinct_at_k_needs_as_many_samples():
    with pytest.raises(ValueError, match="k must be"):
        distinct_at_k(["a"], 2)


def test_distinct_solutions_are_right_ones():
    texts = ["Paris.", " paris", "PARIS!", "Lyon", "lyon"]
    assert distinct_solutions(texts, [True] * 5) == 2
    assert distinct_solutions(texts, [True, True, True, False, False]) == 1
    assert distinct_solutions(texts, [False] * 5) == 0
    assert distinct_solutions(texts, [True] * 5, canonical=str) == 5
    with pytest.raises(ValueError, match="5 texts but 2 flags"):
        distinct_solutions(texts, [True, False])


@pytest.mark.parametrize(
    "same",
    [
        [
            "(8 - 2) * 4",
            "4 * (8 - 2)",
            "4*(-2+8)",
            "-((2 - 8) * 4)",
            "So it is (8-2) × 4 = 24.",
            "+(8-2)*4",
            "-4*(2-8)",
        ],
        ["1 + 2 + 3", "3 + (1 + 2)", "(2+3)+1", "1 - (-2 - 3)", "01 + 002 + 3"],
        ["8 / (3 - 2) / 4", "8 / 4 / (3 - 2)", "8 / ((3 - 2) * 4)", "-8 / (4 * (2 - 3))", "8 ÷ 4 ÷ (3 − 2)"],
        ["5 - 3", "-3 + 5", "-(3 - 5)"],
        ["3 - 5", "-(5 - 3)", "-5 + 3"],
        ["6 * 5 / 3", "5 / 3 * 6", "6 / (3 / 5)", "(6 / 3) * 5"],
        ["(1 + 2) * (3 + 4)", "(4 + 3) * (2 + 1)"],
        ["(1 - 2) * (3 - 4)", "(2 - 1) * (4 - 3)"],
    ],
)
def test_orders_brackets_and_signs_do_not_make_another_solution(same):
    assert len(set(map(canonical_expression, same))) == 1


def test_other_ways_are_other_solutions():
    different = [
        "(8 - 2) * 4", "8 * 4 - 2 * 4", "6 * 4", "4 + 4 * 5", "8 * (4 - 2)", "8 * 3", "5 - 3", "3 - 5", "1 + 2 + 3", "1 * 2 + 3", "8 / 4",
        "4 / 8", "4 * 8", "4 * 8 / 1", "4 * 8 * 1", "8 - 4 - 2", "8 - (4 - 2)", "(1 + 2) * (3 + 4)", "(1 + 3) * (2 + 4)",
    ]  # fmt: skip
    assert len(set(map(canonical_expression, different))) == len(different)


def test_a_text_without_an_expression_counts_by_its_words():
    assert canonical_expression("No  way.") == canonical_expression("no way")
    assert canonical_expression("24") == "24"


def shuffled(text, generator):
    """An expression in another order, by Python's grammar, with more brackets and with signs moved."""
    import ast

    def written(node):
        if isinstance(node, ast.Constant):
            return str(node.value)
        assert isinstance(node, ast.BinOp)
        left, right = f"({written(node.left)})", f"({written(node.right)})"
        swap = generator.random() < 0.5
        if isinstance(node.op, ast.Add):
            return f"{right} + {left}" if swap else f"{left} + {right}"
        if isinstance(node.op, ast.Mult):
            return f"{right} * {left}" if swap else f"-{left} * -{right}"
        if isinstance(node.op, ast.Sub):
            return f"-{right} + {left}" if swap else f"-({right} - {left})"
        return f"-{left} / -{right}" if swap else f"{left} / {right}"

    return written(ast.parse(text, mode="eval").body)


def test_every_way_of_a_countdown_problem_keeps_its_form_and_its_value():
    generator = random.Random(0)
    for target, found in _tasks.ways((2, 3, 5, 7)).items():
        for text in sorted(found)[:3]:
            other = shuffled(text, generator)
            assert _tasks.value(other)[0] == target
            assert canonical_expression(other) == canonical_expression(text), (text, other)


def test_equal_forms_have_equal_values():
    values = {}
    for target, found in _tasks.ways((1, 4, 4, 6)).items():
        for text in found:
            assert values.setdefault(canonical_expression(text), target) == target


def test_forms_of_the_right_ways_of_a_problem():
    (problem,) = _tasks.countdown(n=1, seed=3, count=4, least=9)
    right = sorted(w for w in _tasks.ways(problem.extra["numbers"])[problem.extra["target"]])
    assert all(problem.check(text) for text in right)
    assert 1 < distinct_solutions(right, [True] * len(right), normaliser(problem)) <= len(right)


def test_each_kind_of_problem_has_its_form():
    (problem,) = _tasks.subset_sum(n=1, seed=1)
    a, b, c = problem.extra["answers"][0]
    form = normaliser(problem)
    assert form(f"Of 8 numbers: {a}, {b} and {c}") == form(f"{c} {a} {b}")
    assert form(f"{a} {b} {c}") != form(", ".join(map(str, problem.extra["answers"][1])))
    assert normaliser("subset_sum")("3 1 2") == "1, 2, 3"
    assert normaliser("arithmetic")("It is 12.0") == normaliser("arithmetic")("7 + 5 = 12")
    assert normaliser("own")("Paris.") == "paris"


@pytest.mark.parametrize(
    ("texts", "rate"),
    [(["a", "b", "c"], 0.0), (["a", "A.", "b"], 0.5), (["a", "a", "a"], 1.0), (["a", "b", "a", "b"], 2 / 3)],
)
def test_repeats_are_the_attempts_that_were_made_before(texts, rate):
    assert repeats(texts) == pytest.approx(rate)

    class Dialogue:
        pass

    dialogue = Dialogue()
    dialogue.texts = texts
    assert repeats(dialogue) == pytest.approx(rate)


@pytest.mark.parametrize("texts", [[], ["a"]])
def test_one_attempt_repeats_nothing(texts):
    assert math.isnan(repeats(texts))


@pytest.mark.parametrize("scores", [[0.5, 0.7], [float("nan"), 0.0], ["yes", "no"], [[1, 0]]])
def test_what_is_neither_right_nor_wrong_is_not_counted(scores):
    with pytest.raises(ValueError, match="a row of 0 and 1 for each problem"):
        pass_at([scores], 1)
