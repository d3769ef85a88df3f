"""Verifiers as rewards: what they give, what is refused, and the same through TRL's data sets and reward functions."""

import math
import sys

import numpy as np
import pytest

from cameraready.lm import _tasks
from cameraready.lm._tasks import Problem
from cameraready.posttraining._rollouts import dataset, reward_func, score

PROBLEMS = _tasks.own([("2+2=", "4"), ("Capital of France?", "Paris")])


def judged(verdict):
    return Problem("What is " + "very " * 20 + "long?", "", lambda text: verdict, "own")


@pytest.mark.parametrize(
    ("verdict", "reward"),
    [(True, 1.0), (False, 0.0), (1, 1.0), (0.25, 0.25), (np.bool_(True), 1.0), (np.float32(0.5), 0.5), (-1, -1.0)],
)
def test_what_a_verifier_gives_is_the_reward(verdict, reward):
    assert score(judged(verdict), "x") == reward


@pytest.mark.parametrize("verdict", [math.nan, math.inf, None, "wrong", "1", [1, 2]])
def test_what_is_no_number_is_refused_with_the_problem_and_the_text(verdict):
    with pytest.raises(
        ValueError, match=r"the verifier of the problem 'What is very .*\.\.\.' gave .* for the text 'x'"
    ):
        score(judged(verdict), "x")


def test_a_verifier_that_raises_is_named():
    with pytest.raises(
        ValueError, match=r"the verifier of the problem 'What\?' raised ZeroDivisionError on the text 'x'"
    ) as caught:
        score(Problem("What?", "", lambda text: 1 / 0, "own"), "x")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_rewards_follow_the_column_of_places():
    judge = reward_func(PROBLEMS)
    completions = ["4", "It is Paris.", "5", "4"]
    assert judge(prompts=["..."] * 4, completions=completions, completion_ids=[[0]] * 4, problem=[0, 1, 0, 1]) == [
        1,
        1,
        0,
        0,
    ]
    assert judge.__name__ == "verified"


def test_messages_are_read():
    judge = reward_func(PROBLEMS)
    said = [
        [{"role": "assistant", "content": "It is 4"}],
        [
            {"role": "assistant", "content": "4"},
            {"role": "tool", "content": "?"},
            {"role": "assistant", "content": "3"},
        ],
        [{"role": "assistant", "content": [{"type": "text", "text": "It is "}, {"type": "text", "text": "4"}]}],
        [{"role": "assistant", "content": None}],
        [],
    ]
    assert judge(completions=said, problem=[0] * 5) == [1, 0, 1, 0, 0]


def test_a_column_of_answers_judges_too():
    judge = reward_func("answer")
    assert judge(completions=["so 1,000", "I say paris!", "7"], answer=["1000", "Paris", 8]) == [1, 1, 0]


@pytest.mark.parametrize(
    ("source", "columns", "match"),
    [
        (PROBLEMS, {}, "no column 'problem'"),
        (PROBLEMS, {"problem": [0]}, "2 completions, but 1 entries"),
        (PROBLEMS, {"problem": [0, 2]}, "holds 2, but must hold places of problems, from 0 to 1"),
        (PROBLEMS, {"problem": [0, -1]}, "holds -1"),
        (PROBLEMS, {"problem": [0, "1"]}, "holds '1'"),
        ("answer", {"problem": [0, 1]}, "no column 'answer'"),
        ("answer", {"answer": ["4", None]}, "holds None, but must hold right answers"),
        ([judged(math.nan)], {"problem": [0, 0]}, "gave nan"),
    ],
)
def test_what_cannot_be_judged_is_refused(source, columns, match):
    with pytest.raises(ValueError, match=match):
        reward_func(source)(completions=["4", "5"], **columns)


def test_completions_must_be_texts():
    with pytest.raises(ValueError, match="a text or a list of messages, not a int"):
        reward_func(PROBLEMS)(completions=[4], problem=[0])
    with pytest.raises(ValueError, match="there are no problems"):
        reward_func([])
    with pytest.raises(TypeError, match="problem 0 is a str"):
        reward_func(["2+2="])


def test_a_data_set_names_its_problems():
    pytest.importorskip("datasets")
    problems = _tasks.arithmetic(n=5, seed=0)
    plain = dataset(problems)
    assert plain["prompt"][:] == [problem.prompt for problem in problems]
    assert plain["problem"][:] == [0, 1, 2, 3, 4]
    turns = dataset(problems, conversational=True)
    assert turns[2]["prompt"] == [{"role": "user", "content": problems[2].prompt}]
    mixed = plain.shuffle(seed=1)
    answers = [problems[place].answer for place in mixed["problem"]]
    assert reward_func(problems)(completions=answers, problem=mixed["problem"][:]) == [1.0] * 5
    renamed = dataset(problems, column="key")
    assert reward_func(problems, column="key")(completions=["?"] * 5, key=renamed["key"][:]) == [0.0] * 5


def test_reasoning_gym_judges_through_it():
    pytest.importorskip("reasoning_gym")
    problems = _tasks.reasoning_gym("chain_sum", n=3, seed=1)
    texts = [f"<answer>{problem.answer}</answer>" for problem in problems]
    assert reward_func(problems)(completions=[*texts, "no"], problem=[0, 1, 2, 0]) == [1, 1, 1, 0]


def test_without_datasets_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'pip install "cameraready\[posttraining\]"'):
        dataset(PROBLEMS)
