"""What a completion is worth by its problem's verifier, and the same as TRL takes it: a reward function and a data set."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from cameraready.lm import _tasks
from cameraready.lm._tasks import Problem


def score(problem: Problem, text: str) -> float:
    """What the problem's verifier gives a text: 1 for right and 0 for wrong, or what lies between if it grades.

    Raises
    ------
    ValueError
        The verifier raised, or what it gave is no finite number; the sentence says which problem's.
    """
    try:
        found = problem.check(text)
    except Exception as error:  # a verifier is the user's program
        raise ValueError(
            f"the verifier of {_named(problem)} raised {type(error).__name__} on the text {_short(text)}: {error}"
        ) from error
    try:
        value = math.nan if isinstance(found, str) else float(found)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(
            f"the verifier of {_named(problem)} gave {found!r} for the text {_short(text)}; it must give True, False or a finite number"
        )
    return value


def check_problems(problems: Sequence[Problem]) -> list[Problem]:
    """The problems as a list, each with a prompt and a verifier."""
    listed = list(problems)
    if not listed:
        raise ValueError("there are no problems")
    for place, problem in enumerate(listed):
        if not isinstance(getattr(problem, "prompt", None), str) or not callable(getattr(problem, "check", None)):
            raise TypeError(
                f"problem {place} is a {type(problem).__name__}; give Problem(prompt, answer, check, kind) of cameraready.lm"
            )
    return listed


def reward_func(source: Sequence[Problem] | str, *, column: str = "problem") -> Callable[..., list[float]]:
    """A reward function for ``GRPOTrainer(reward_funcs=...)`` of TRL.

    Parameters
    ----------
    source : sequence of Problem, or str
        The problems whose verifiers judge, found through the data set's `column` of their places (see `dataset`); or the name of a column of
        right answers, checked as `cameraready.lm`'s ``own`` checks them (the last number, or whole words).
    column : str
        Of the problems' places.

    Returns
    -------
    callable
        ``verified(completions, **columns) -> list of float``, one for each completion, which is a text or a list of messages of which the
        last one counts.

    Raises
    ------
    ValueError
        When called: the data set lacks the column, or a verifier raised or gave no finite number.
    """
    problems = [] if isinstance(source, str) else check_problems(source)
    name = source if isinstance(source, str) else column

    def verified(completions: Sequence[Any], **columns: Any) -> list[float]:
        if name not in columns:
            raise ValueError(f"the data set has no column {name!r}; make it with dataset(problems), or name another")
        given = columns[name]
        if len(given) != len(completions):
            raise ValueError(f"there are {len(completions)} completions, but {len(given)} entries of {name!r}")
        texts = [_text_of(completion) for completion in completions]
        if isinstance(source, str):
            judges = [_of_answer(answer, name) for answer in given]
        else:
            judges = [_of_place(problems, place, name) for place in given]
        return [score(judge, text) for judge, text in zip(judges, texts, strict=True)]

    return verified


def dataset(problems: Sequence[Problem], *, conversational: bool = False, column: str = "problem") -> Any:
    """The problems as a data set that TRL's trainers take.

    Parameters
    ----------
    problems : sequence of Problem
    conversational : bool
        Whether prompts become one turn of a user, around which TRL puts the model's chat template; not for prompts that have it already.
    column : str
        Name of the column of the problems' places, by which `reward_func` finds them.

    Returns
    -------
    datasets.Dataset
        With the columns ``prompt`` and `column`.

    Raises
    ------
    ImportError
        The package datasets is missing.
    """
    listed = check_problems(problems)
    try:
        from datasets import Dataset
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "datasets":
            raise
        raise ImportError(
            'a data set for TRL needs the package datasets: pip install "cameraready[posttraining]"', name="datasets"
        ) from None
    prompts: list[Any] = [problem.prompt for problem in listed]
    if conversational:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return Dataset.from_dict({"prompt": prompts, column: list(range(len(listed)))})


def _of_answer(answer: Any, name: str) -> Problem:
    if answer is None or not str(answer).strip():
        raise ValueError(f"the column {name!r} holds {answer!r}, but must hold right answers")
    return _tasks.own([("of the data set", str(answer))])[0]


def _of_place(problems: list[Problem], place: Any, name: str) -> Problem:
    if isinstance(place, bool) or not hasattr(place, "__index__") or not 0 <= int(place) < len(problems):
        raise ValueError(
            f"the column {name!r} holds {place!r}, but must hold places of problems, from 0 to {len(problems) - 1}"
        )
    return problems[int(place)]


def _text_of(completion: Any) -> str:
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and all(isinstance(message, dict) for message in completion):
        content = completion[-1].get("content") if completion else ""
        if content is None or isinstance(content, str):  # a message that only calls a tool has none
            return content or ""
        return "".join(part.get("text", "") for part in content)
    raise ValueError(f"a completion is a text or a list of messages, not a {type(completion).__name__}")


def _named(problem: Problem) -> str:
    return f"the problem {_short(problem.prompt)}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
