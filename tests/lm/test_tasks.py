"""Tasks that a program can check: every right answer is taken, no wrong one is."""

import itertools
import operator
import re
import sys
from fractions import Fraction

import pytest

from cameraready.lm import _tasks
from cameraready.lm._problems import value
from cameraready.lm._tasks import Problem, accuracy, arithmetic, countdown, own, reasoning_gym, subset_sum, ways

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("digits", "terms", "operators"), [(1, 2, "+-"), (3, 4, "+-"), (2, 3, "+-*")])
def test_sums_are_right_and_only_the_result_is(digits, terms, operators):
    for problem in arithmetic(n=50, seed=1, digits=digits, terms=terms, operators=operators):
        expression = problem.extra["expression"]
        assert expression in problem.prompt
        assert problem.answer == str(eval(expression, {"__builtins__": {}}))
        drawn = re.findall(r"\d+", expression)
        assert len(drawn) == terms
        assert all(len(number) == digits for number in drawn)
        assert problem.check(f"{expression} = {problem.answer}")
        assert not problem.check(f"{expression} = {int(problem.answer) + 1}")
        assert not problem.check(f"{problem.answer} or rather {int(problem.answer) - 1}")
        assert not problem.check("I do not know")


def reachable(drawn):
    """All values by plain search over pairs of numbers that are joined: the independent check of `ways`."""
    found = set()

    def search(left):
        if len(left) == 1:
            found.add(left[0])
            return
        for i, j in itertools.permutations(range(len(left)), 2):
            rest = [left[k] for k in range(len(left)) if k not in (i, j)]
            for join in (operator.add, operator.sub, operator.mul, operator.truediv):
                if join is not operator.truediv or left[j] != 0:
                    search([*rest, join(left[i], left[j])])

    search([Fraction(number) for number in drawn])
    return found


@pytest.mark.parametrize("drawn", [(3, 7), (2, 3, 5), (4, 4, 9), (3, 3, 8, 8), (1, 5, 5, 5)])
def test_the_ways_reach_what_a_plain_search_reaches(drawn):
    found = ways(drawn)
    assert set(found) == reachable(drawn)
    for reached, expressions in found.items():
        for expression in expressions:
            got, used = value(expression)
            assert got == reached
            assert sorted(used) == sorted(drawn)


def test_famous_problems_of_the_24_game():
    assert ways((3, 3, 8, 8))[Fraction(24)] == {"8 / (3 - (8 / 3))"}
    assert Fraction(24) not in ways((1, 1, 1, 1))


@pytest.mark.parametrize(("count", "target"), [(2, None), (3, None), (4, 24)])
def test_countdown_takes_every_right_answer_and_no_wrong_one(count, target):
    for problem in countdown(n=6, seed=3, count=count, target=target, least=2):
        drawn, wanted = problem.extra["numbers"], problem.extra["target"]
        right = ways(drawn)[Fraction(wanted)]
        assert len(right) == problem.extra["ways"] >= 2
        assert problem.answer in right
        assert all(problem.check(expression) for expression in right)
        assert all(problem.check(f"We get {expression} = {wanted}.") for expression in right)
        other = next(result for result in ways(drawn) if result != wanted)
        assert not any(problem.check(expression) for expression in ways(drawn)[other])
        assert not problem.check(str(wanted))
        assert not problem.check(f"{problem.answer} + 0")
        assert not problem.check(f"{wanted} + 0")
        assert not problem.check(f"({problem.answer}) * 1 / 1")


def test_a_target_that_cannot_be_reached_ends_with_a_sentence():
    with pytest.raises(ValueError, match=r"in 10,000 draws 0 of 1 problems .* 2 numbers up to 3, target 1000"):
        countdown(n=1, count=2, largest=3, target=1000)
    with pytest.raises(ValueError, match="count must be from 2 to 5"):
        countdown(n=1, count=6)


def test_subset_sums_have_several_answers_and_all_of_them_are_taken():
    for problem in subset_sum(n=5, seed=1, count=7, pick=3, largest=20):
        drawn, wanted = problem.extra["numbers"], problem.extra["target"]
        right = {chosen for chosen in itertools.combinations(sorted(drawn), 3) if sum(chosen) == wanted}
        assert set(problem.extra["answers"]) == right
        assert len(right) >= 2
        for chosen in itertools.combinations(drawn, 3):
            assert problem.check(f"They are {chosen[0]}, {chosen[1]} and {chosen[2]}.") is (sum(chosen) == wanted)
        assert not problem.check(", ".join([str(wanted - 2), "1", "1"]))
        assert not problem.check("12")


def test_seeds_decide_and_other_seeds_give_other_problems():
    for make in (arithmetic, countdown, subset_sum):
        first = [problem.prompt for problem in make(n=5, seed=1)]
        assert first == [problem.prompt for problem in make(n=5, seed=1)]
        assert first != [problem.prompt for problem in make(n=5, seed=2)]
        assert first[:3] == [problem.prompt for problem in make(n=3, seed=1)]


# --- reasoning-gym and own -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chain_sum", "spell_backward", "leg_counting", "basic_arithmetic"])
def test_reasoning_gym_checks_with_its_own_verifier(name):
    pytest.importorskip("reasoning_gym")
    problems = reasoning_gym(name, n=4, seed=2)
    assert [p.prompt for p in problems] == [p.prompt for p in reasoning_gym(name, n=4, seed=2)]
    for problem in problems:
        assert problem.check(problem.answer)
        assert problem.check(f"Let me think.\n{problem.answer}")
        assert problem.check(f"<answer>no</answer> or <answer> {problem.answer} </answer>, I am sure")
        assert not problem.check(f"{problem.answer}\n<answer>certainly not</answer>")
        assert not problem.check("I do not know")
        assert not problem.check("")


def test_what_a_verifier_cannot_read_is_wrong():
    pytest.importorskip("reasoning_gym")
    # The verifier of this set raises on what is no product of numbers.
    problem = reasoning_gym("prime_factorization", n=1, seed=1)[0]
    assert problem.check(problem.answer)
    assert not any(problem.check(text) for text in ("junk text ((", "None", "1/0", "9" * 5000, "[1, 2"))


def test_an_unknown_set_or_option_of_reasoning_gym_is_named():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=r"no data set 'chain_sums'; did you mean chain_sum"):
        reasoning_gym("chain_sums", n=1)
    with pytest.raises(ValueError, match="chain_sum does not take"):
        reasoning_gym("chain_sum", n=1, no_such_option=3)


def test_without_reasoning_gym_the_command_to_install_it_is_told(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r'pip install "cameraready\[lm-tasks\]"'):
        reasoning_gym("chain_sum", n=1)


def test_own_prompts_are_checked_by_number_or_by_words():
    number, words, minus = own([("6 times 7?", "42."), ("Capital of France?", "Paris"), ("Below zero?", "-1,000")])
    assert number.check("6 * 7 = 42.0")
    assert not number.check("42 is not 43")
    assert words.check("It is PARIS, of course.")
    assert not words.check("It is Parisian")
    assert minus.check("It has −1000 degrees")
    assert not minus.check("1000")
    assert number.kind == "own"


@pytest.mark.parametrize(
    ("prompts", "complaint"),
    [
        ([], "no prompts"),
        ([("a", "b"), (" ", "c")], "prompt 2 is empty"),
        ([("a", None)], "prompt 1 has no answer"),
        ([("a", " . ")], "prompt 1 has no answer"),
    ],
)
def test_own_prompts_without_a_question_or_an_answer_are_refused(prompts, complaint):
    with pytest.raises(ValueError, match=complaint):
        own(prompts)


def test_accuracy_is_the_share_of_right_texts():
    problem = Problem("?", "yes", lambda text: text == "yes", "own")
    assert accuracy(problem, "yes") == 1.0
    assert accuracy(problem, ["yes", "no", "no", "yes", "no"]) == 0.4
    with pytest.raises(ValueError, match="no text"):
        accuracy(problem, [])


def test_the_module_offers_what_it_lists():
    assert all(hasattr(_tasks, name) for name in _tasks.__all__)
