"""Tasks whose answers a program can check, and how answers and continuations are scored.

`passkey`, `key_value` and `multi_hop` hide facts in a context of an exact number of tokens; `arithmetic` has one right answer, `countdown`
and `subset_sum` have several; `reasoning_gym` wraps that package's generators, `own` the user's prompts. All are deterministic in
their seed. `perplexity_after`, `pass_at_k` and `accuracy` score.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from cameraready.lm._problems import Problem, last_expression, last_number, normalised, numbers, says, value
from cameraready.lm._retrieval import key_value, multi_hop, passkey
from cameraready.lm._scoring import accuracy, pass_at_k, perplexity_after

__all__ = [
    "Problem", "accuracy", "arithmetic", "countdown", "key_value", "multi_hop", "own", "pass_at_k", "passkey", "perplexity_after",
    "reasoning_gym", "subset_sum",
]  # fmt: skip

#: Texts longer than this are cut from the front before they are read: an answer stands at the end.
LONGEST = 20_000
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def arithmetic(*, n: int, seed: int = 0, digits: int = 2, terms: int = 2, operators: str = "+-") -> list[Problem]:
    """Sums to be worked out, such as "What is 47 + 82 - 13?".

    Right is a text whose last number is the result; so "12 - 5 = 7" is read as 7, and a remark with a number after the result as wrong.

    Parameters
    ----------
    n, seed : int
    digits : int
        Of each term, without a leading zero (with one digit, from 0 to 9).
    terms : int
        At least 2.
    operators : str
        Drawn from at random: some of ``"+-*"``; products go before sums, as usual.
    """
    _at_least(1, n=n, digits=digits)
    _at_least(2, terms=terms)
    if not operators or set(operators) - set("+-*"):
        raise ValueError(f"operators must be some of '+-*', got {operators!r}")
    generator = np.random.default_rng([seed, 11])
    low, high = (0, 10) if digits == 1 else (10 ** (digits - 1), 10**digits)
    problems = []
    for _ in range(n):
        drawn = [int(number) for number in generator.integers(low, high, terms)]
        signs = [operators[place] for place in generator.integers(len(operators), size=terms - 1)]
        expression = str(drawn[0]) + "".join(f" {s} {number}" for s, number in zip(signs, drawn[1:], strict=True))
        result = value(expression)[0]
        prompt = f"What is {expression}? Answer with the number alone."
        extra = {"expression": expression, "result": int(result)}
        problems.append(Problem(prompt, str(result), partial(_last_is, result), "arithmetic", extra))
    return problems


def countdown(
    *, n: int, seed: int = 0, count: int = 4, largest: int = 13, target: int | None = None, least: int = 1
) -> list[Problem]:
    """Numbers to be combined by ``+ - * /`` and brackets, each exactly once, to reach a target (the 24 game with ``target=24``).

    There are as a rule several right answers. Right is a text whose last arithmetic expression uses just these numbers and has the
    target's value, computed in fractions by a parser; what stands behind an equals sign is not read.

    Parameters
    ----------
    n, seed : int
    count : int
        Numbers in a problem, from 2 to 5; with 5 a draw takes about a second.
    largest : int
        Numbers are drawn from 1 to this.
    target : int, optional
        By default a number from 1 to 100 that can be reached.
    least : int
        Fewest different ways (`ways`) that a problem must have.

    Returns
    -------
    list of Problem
        ``extra`` holds ``numbers``, ``target`` and ``ways``.

    Raises
    ------
    ValueError
        No such problem was found in 10,000 draws, or an argument is out of range.
    """
    _at_least(1, n=n, largest=largest, least=least)
    if not 2 <= count <= 5:
        raise ValueError(f"count must be from 2 to 5, got {count}")
    generator = np.random.default_rng([seed, 12])
    problems: list[Problem] = []
    for _ in range(10_000 + n):
        drawn = tuple(int(number) for number in generator.integers(1, largest + 1, count))
        reached = ways(drawn)
        if target is None:
            options = sorted(
                int(r) for r, w in reached.items() if r.denominator == 1 and 1 <= r <= 100 and len(w) >= least
            )
            if not options:
                continue
            wanted = options[int(generator.integers(len(options)))]
        else:
            wanted = target
        found = reached.get(Fraction(wanted), ())
        if len(found) < least:
            continue
        names = ", ".join(map(str, drawn[:-1])) + f" and {drawn[-1]}"
        prompt = (
            f"Use each of the numbers {names} exactly once, with +, -, *, / and brackets, to make {wanted}. "
            "Answer with one expression."
        )
        extra = {"numbers": drawn, "target": wanted, "ways": len(found)}
        problems.append(
            Problem(prompt, min(found, key=lambda w: (len(w), w)), partial(_reaches, drawn, wanted), "countdown", extra)
        )
        if len(problems) == n:
            return problems
    raise ValueError(
        f"in 10,000 draws {len(problems)} of {n} problems were found with {count} numbers up to {largest}, target {target} and at least {least} ways"
    )


def ways(drawn: Sequence[int]) -> dict[Fraction, set[str]]:
    """All values that `drawn` can be combined to, with the expressions that reach each; sums and products are written in one order only."""
    ordered = tuple(sorted(drawn))
    known: dict[tuple[int, ...], dict[Fraction, set[str]]] = {}
    for size in range(1, len(ordered) + 1):
        for part in sorted(set(itertools.combinations(ordered, size))):
            known[part] = {Fraction(part[0]): {str(part[0])}} if size == 1 else _joined(part, known)
    return known[ordered]


def subset_sum(
    *, n: int, seed: int = 0, count: int = 8, pick: int = 3, largest: int = 30, least: int = 2
) -> list[Problem]:
    """Which `pick` of `count` numbers have a given sum? At least `least` answers are right in each problem.

    Right is a text whose last `pick` numbers are different members of the list (as often as they stand there) with that sum.

    Returns
    -------
    list of Problem
        ``extra`` holds ``numbers``, ``pick``, ``target`` and ``answers``, all the right ones as sorted tuples.
    """
    _at_least(1, n=n, least=least)
    if not 1 <= pick <= count <= 24:
        raise ValueError(f"pick must be from 1 to count, and count at most 24, got pick={pick} and count={count}")
    if largest < count:
        raise ValueError(f"there are no {count} different numbers up to {largest}")
    generator = np.random.default_rng([seed, 13])
    problems: list[Problem] = []
    for _ in range(10_000 + n):
        drawn = tuple(int(number) + 1 for number in generator.choice(largest, count, replace=False))
        sums: dict[int, list[tuple[int, ...]]] = {}
        for chosen in itertools.combinations(sorted(drawn), pick):
            sums.setdefault(sum(chosen), []).append(chosen)
        options = sorted(total for total, answers in sums.items() if len(answers) >= least)
        if not options:
            continue
        target = options[int(generator.integers(len(options)))]
        listed = ", ".join(map(str, drawn))
        prompt = f"Pick {pick} of the numbers {listed} that add up to {target}. Answer with these {pick} numbers alone."
        extra = {"numbers": drawn, "pick": pick, "target": target, "answers": sums[target]}
        answer = ", ".join(map(str, sums[target][0]))
        problems.append(Problem(prompt, answer, partial(_sums, drawn, pick, target), "subset_sum", extra))
        if len(problems) == n:
            return problems
    raise ValueError(f"in 10,000 draws {len(problems)} of {n} problems with at least {least} answers were found")


def reasoning_gym(name: str, *, n: int, seed: int = 0, **options: Any) -> list[Problem]:
    """Problems of a data set of the package reasoning-gym (Stojanovski et al., 2025, arXiv:2505.24760), with its own verifier.

    What stands in the last ``<answer>`` tags is the answer; without tags it is the whole text, or else its last line. Right is what the
    verifier gives its full score; what it cannot read is wrong. Verifiers differ in rigour: that of ``game_of_life_halting`` takes nearly
    any text. Some hand the text to SymPy's parser, which evaluates it: for models whose text you would not run, take the tasks above.

    Parameters
    ----------
    name : str
        Of a data set, such as ``"chain_sum"``.
    n, seed : int
    **options
        Of that data set (``min_terms=3``).

    Returns
    -------
    list of Problem
        ``extra`` holds ``metadata``.

    Raises
    ------
    ImportError
        The package is missing.
    ValueError
        There is no such data set (near misses are listed), or it does not take these options.
    """
    _at_least(1, n=n)
    try:
        import reasoning_gym as gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "reasoning_gym":
            raise
        raise ImportError(
            'tasks of reasoning-gym need it: pip install "cameraready[lm-tasks]"', name="reasoning_gym"
        ) from None
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.5)
        raise ValueError(
            f"reasoning-gym has no data set {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else "")
        )
    try:
        data = gym.create_dataset(name, size=n, seed=seed, **options)
    except (TypeError, AssertionError, ValueError) as error:
        raise ValueError(f"reasoning-gym's {name} does not take {options or 'these arguments'}: {error}") from error
    problems = []
    for place in range(n):
        entry = data[place]
        extra = {"metadata": entry.get("metadata", {})}
        check = partial(_scored, data, entry)
        answer = "" if entry["answer"] is None else str(entry["answer"])  # some sets only know how to check one
        problems.append(Problem(entry["question"], answer, check, f"reasoning_gym:{name}", extra))
    return problems


def own(prompts: Sequence[tuple[str, str | None]]) -> list[Problem]:
    """The user's prompts with their answers.

    Right is, for an answer that is a number, a text whose last number equals it ("1,000.0" is 1000); for any other, a text in which it
    stands as whole words, up to case, runs of spaces and punctuation around it. So a text that lists every option is right too.

    Raises
    ------
    ValueError
        There are no prompts, or one is empty or has no answer.
    """
    problems = []
    for place, (prompt, answer) in enumerate(prompts, 1):
        if not prompt.strip():
            raise ValueError(f"prompt {place} is empty")
        if answer is None or not normalised(answer):
            raise ValueError(f"prompt {place} has no answer that a text could be checked against")
        plain = answer.strip().removesuffix(".")
        found = numbers(plain)
        is_number = len(found) == 1 and re.fullmatch(r"[-−]?[\d,]*\.?\d+", plain) is not None
        check = partial(_last_is, found[0]) if is_number else partial(_contains, answer)
        problems.append(Problem(prompt, answer, check, "own"))
    if not problems:
        raise ValueError("there are no prompts")
    return problems


# --- verifiers -------------------------------------------------------------------------------------------------------


def _last_is(result: Fraction, text: str) -> bool:
    return last_number(text[-LONGEST:]) == result


def _contains(answer: str, text: str) -> bool:
    return says(text, answer)


def _reaches(drawn: Sequence[int], target: int, text: str) -> bool:
    found = last_expression(text[-LONGEST:])
    return found is not None and found[0] == target and sorted(found[1]) == sorted(drawn)


def _sums(drawn: Sequence[int], pick: int, target: int, text: str) -> bool:
    chosen = numbers(text[-LONGEST:])[-pick:]
    return len(chosen) == pick and len(set(chosen)) == pick and set(chosen) <= set(drawn) and sum(chosen) == target


def _scored(data: Any, entry: dict[str, Any], text: str) -> bool:
    text = text[-LONGEST:]
    tagged = _TAGGED.findall(text)
    answers = [tagged[-1].strip()] if tagged else [text.strip(), *text.strip().splitlines()[-1:]]
    return any(_score(data, entry, answer) >= 1.0 for answer in dict.fromkeys(answers))


def _score(data: Any, entry: dict[str, Any], answer: str) -> float:
    try:
        return float(data.score_answer(answer=answer, entry=entry))
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, SyntaxError, RecursionError):
        return 0.0  # verifiers of some sets raise where an answer has not the form they expect


def _joined(part: tuple[int, ...], known: dict[tuple[int, ...], dict[Fraction, set[str]]]) -> dict[Fraction, set[str]]:
    """Values of a sorted tuple of numbers, from those of the two parts of each way to divide it."""
    found: dict[Fraction, set[str]] = {}
    for size in range(1, len(part) // 2 + 1):
        for places in itertools.combinations(range(len(part)), size):
            left = tuple(part[i] for i in places)
            right = tuple(part[i] for i in range(len(part)) if i not in places)
            for (a, ways_a), (b, ways_b) in itertools.product(known[left].items(), known[right].items()):
                for x, y in itertools.product(ways_a, ways_b):
                    first, second = sorted((_bracketed(x), _bracketed(y)))
                    found.setdefault(a + b, set()).add(f"{first} + {second}")
                    found.setdefault(a * b, set()).add(f"{first} * {second}")
                    found.setdefault(a - b, set()).add(f"{_bracketed(x)} - {_bracketed(y)}")
                    found.setdefault(b - a, set()).add(f"{_bracketed(y)} - {_bracketed(x)}")
                    if b != 0:
                        found.setdefault(a / b, set()).add(f"{_bracketed(x)} / {_bracketed(y)}")
                    if a != 0:
                        found.setdefault(b / a, set()).add(f"{_bracketed(y)} / {_bracketed(x)}")
    return found


def _bracketed(expression: str) -> str:
    return f"({expression})" if " " in expression else expression


def _at_least(least: int, /, **counts: int) -> None:
    for name, count in counts.items():
        if count < least:
            raise ValueError(f"{name} must be at least {least}, got {count}")
