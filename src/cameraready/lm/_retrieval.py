"""Facts hidden in a context of an exact number of tokens: a pass key, the values of keys, a chain of variables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from cameraready.lm._haystack import Builder, Haystack, Template
from cameraready.lm._problems import Problem

UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
DIGITS = re.compile(r"\d+")
QUALITIES = re.findall(
    r"\w+",
    "amber bold brisk calm clever cosy crisp curious deep eager early fair fine gentle golden grand green happy hidden honest humble icy "
    "jolly keen kind late light little lively loud lucky merry mild misty narrow neat noble old pale plain proud quick quiet rapid red "
    "round rusty sharp shy silent silver simple slow small smooth soft spicy steady strong sunny sweet swift tall tidy warm wide wild wise",
)
THINGS = re.findall(
    r"\w+",
    "anchor apple arrow badger barn basket beacon bell boat bottle bridge brook candle canyon castle cedar cherry cloud comet coral crane "
    "desk dolphin door eagle engine falcon feather fern field forest fox garden glacier hammer harbor hill island ivory jacket kettle "
    "ladder lake lamp lantern leaf lemon maple meadow mirror moon mountain needle oak ocean orchard otter owl paper pebble pencil piano "
    "pine planet pocket pond quilt rabbit river rocket saddle sail shell spoon star stone table tiger tower tulip valley violin wagon",
)


def passkey(
    tokenizer: Any,
    *,
    length: int,
    n: int,
    seed: int = 0,
    depth: float | None = None,
    digits: int = 5,
    filler: str | Sequence[str] = "noise",
    template: Template | None = None,
) -> list[Problem]:
    """A number to be found again in a long text (Mohtashami and Jaggi, 2023, arXiv:2305.16300).

    Each prompt is exactly `length` tokens of `tokenizer`, with the special tokens that it puts in front. It ends in the words after
    which the number follows, so that models without instruction tuning can be tested.

    Parameters
    ----------
    tokenizer : transformers tokenizer
        A fast one, which knows where in the text a token stands.
    length, n : int
        Tokens of a prompt, with question and template; number of problems.
    seed : int
    depth : float, optional
        Share of the filler before the needle, in [0, 1]. By default spread evenly over the problems, in random order.
    digits : int
        Of the pass key, without a leading zero.
    filler : str or sequence of str
        ``"noise"`` (five sentences over and over), a kind of `_corpora.KINDS`, or texts of your own.
    template : callable, optional
        ``template(text) -> text`` wraps context and question (`LanguageModel.prompt`, for a chat model); the words that begin the
        answer come after it.

    Returns
    -------
    list of Problem
        ``extra`` holds ``ids`` (the prompt's tokens), ``needles`` (for each needle its first token and the one after its last, from
        left to right), ``question`` (the first token after the context: what comes before does not depend on the question),
        ``depths``. Right is what has the pass key as its first number.

    Raises
    ------
    ValueError
        `length` cannot hold question and needle, the filler is too short, or an argument is out of range.
    """
    _check_range(n=n, digits=digits)
    generator = np.random.default_rng([seed, length, 1])
    builder = Builder(tokenizer, length, filler, template, generator)
    problems = []
    for place in _depths(depth, n, generator):
        key = str(generator.integers(10 ** (digits - 1), 10**digits))
        fact = f"The pass key is {key}. Remember it. {key} is the pass key."
        haystack = Haystack(
            "A pass key is hidden in the following text. Memorise it; you will be asked for it.",
            [fact],
            [place],
            "What is the pass key?",
            "The pass key is",
        )
        prompt, extra = builder.build(haystack, [0], avoid=[key])
        problems.append(Problem(prompt, key, partial(_first_is, DIGITS, key), "passkey", extra))
    return problems


def key_value(
    tokenizer: Any,
    *,
    length: int,
    n: int,
    seed: int = 0,
    keys: int | None = None,
    needles: int = 1,
    form: Literal["word", "uuid"] = "word",
    depth: float | None = None,
    filler: str | Sequence[str] = "noise",
    template: Template | None = None,
) -> list[Problem]:
    """Values of keys to be found among those of many others (Liu et al., 2023, arXiv:2307.03172).

    Parameters
    ----------
    tokenizer, length, n, seed, filler, template
        As of `passkey`.
    keys : int, optional
        Pairs in a context, evenly spread over the filler; by default as many as fit, and filler only for the last tokens.
    needles : int
        How many of the keys are asked for. An answer is right if it has all their values.
    form : {"word", "uuid"}
        Keys of two words with values of five digits, or keys and values of 32 hexadecimal digits.
    depth : float, optional
        Of the (first) key that is asked for, among the pairs, in [0, 1]. By default spread evenly over the problems.

    Returns
    -------
    list of Problem
        As of `passkey`; ``extra["needles"]`` are the pairs that are asked for, ``extra["keys"]`` says how many pairs there are.
    """
    _check_range(n=n, needles=needles)
    if keys is not None and keys < needles:
        raise ValueError(f"{needles} needles cannot be among {keys} keys")
    if form not in ("word", "uuid"):
        raise ValueError(f"form must be 'word' or 'uuid', got {form!r}")
    generator = np.random.default_rng([seed, length, 2])
    builder = Builder(tokenizer, length, filler, template, generator)
    problems = []
    for place in _depths(depth, n, generator):
        count = keys or max(needles, min(length // (8 if form == "word" else 30), len(QUALITIES) * len(THINGS)))
        names, values = _pairs(count, form, generator)
        facts = [f"The value of {name} is {value}." for name, value in zip(names, values, strict=True)]
        while True:
            asked = _asked(count, needles, place, generator)
            haystack = _key_value_haystack(facts[:count], [names[i] for i in asked], spread=keys is not None)
            if keys is not None or count == needles:
                break
            over = builder.length_of(haystack) - length
            if over <= 0:
                break
            # What is over, in pairs; at least one, so that this ends.
            count = max(needles, count - max(1, over * count // builder.length_of(haystack)))
        wanted = [values[i] for i in asked]
        prompt, extra = builder.build(haystack, asked, avoid=[*names, *values])
        pattern = DIGITS if form == "word" else UUID
        check = partial(_first_is, pattern, wanted[0]) if needles == 1 else partial(_has_all, pattern, tuple(wanted))
        problems.append(Problem(prompt, ", ".join(wanted), check, "key_value", {**extra, "keys": count}))
    return problems


def multi_hop(
    tokenizer: Any,
    *,
    length: int,
    n: int,
    seed: int = 0,
    hops: int = 2,
    chains: int = 2,
    filler: str | Sequence[str] = "noise",
    template: Template | None = None,
) -> list[Problem]:
    """A number to be followed through a chain of variables, ``ABC = 123``, ``DEF = ABC`` ... (Hsieh et al., 2024, arXiv:2404.06654).

    Parameters
    ----------
    tokenizer, length, n, seed, filler, template
        As of `passkey`.
    hops : int
        Assignments of one variable to the next, after the first of a number.
    chains : int
        Chains of that length with other numbers, of which one is asked for; their statements alternate at random.

    Returns
    -------
    list of Problem
        As of `passkey`; ``extra["needles"]`` are the ``hops + 1`` statements of the chain that is asked for, in the order of the text,
        which is that of the chain.
    """
    _check_range(n=n, chains=chains)
    if hops < 0:
        raise ValueError(f"hops must be at least 0, got {hops}")
    generator = np.random.default_rng([seed, length, 3])
    builder = Builder(tokenizer, length, filler, template, generator)
    problems = []
    for _ in range(n):
        names = _variables(chains * (hops + 1), generator)
        numbers = [str(number) for number in generator.choice(90_000, chains, replace=False) + 10_000]
        # Whose turn it is; each chain's statements stay in order.
        turns = generator.permutation(np.repeat(np.arange(chains), hops + 1))
        step = [0] * chains
        facts = []
        for chain in turns:
            name, before = names[chain * (hops + 1) + step[chain]], names[chain * (hops + 1) + step[chain] - 1]
            facts.append(f"Let {name} = {numbers[chain] if step[chain] == 0 else before}.")
            step[chain] += 1
        places = sorted(float(place) for place in generator.random(len(facts)))
        last = names[hops]  # of the chain 0
        haystack = Haystack(
            "Variables are given their values in the following text. Keep track of them; you will be asked for one.",
            facts,
            places,
            f"Which number is the value of {last}?",
            f"The value of {last} is",
        )
        prompt, extra = builder.build(
            haystack, [i for i, chain in enumerate(turns) if chain == 0], avoid=[*numbers, *names]
        )
        problems.append(Problem(prompt, numbers[0], partial(_first_is, DIGITS, numbers[0]), "multi_hop", extra))
    return problems


# --- names and numbers -----------------------------------------------------------------------------------------------


def _check_range(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")


def _depths(depth: float | None, n: int, generator: np.random.Generator) -> list[float]:
    if depth is not None:
        if not 0.0 <= depth <= 1.0:
            raise ValueError(f"depth must be in [0, 1], got {depth}")
        return [float(depth)] * n
    return [float(place) for place in (generator.permutation(n) + 0.5) / n]


def _asked(count: int, needles: int, depth: float, generator: np.random.Generator) -> list[int]:
    """Which of `count` pairs are asked for: the first by its depth, the others after it, or before it where too few follow."""
    first = min(int(depth * count), count - 1)
    later = [i for i in generator.permutation(count) if i > first]
    earlier = [i for i in generator.permutation(count) if i < first]
    return sorted([first, *(int(i) for i in (later + earlier)[: needles - 1])])


def _key_value_haystack(facts: Sequence[str], asked: Sequence[str], *, spread: bool) -> Haystack:
    depths = [(i + 0.5) / len(facts) if spread else 0.0 for i in range(len(facts))]
    names = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])} and {asked[-1]}"
    several = len(asked) > 1
    return Haystack(
        "The following text gives the values of keys. Memorise them; you will be asked for some.",
        facts,
        depths,
        f"What are the values of {names}?" if several else f"What is the value of {names}?",
        f"The values of {names} are" if several else f"The value of {names} is",
    )


def _pairs(count: int, form: str, generator: np.random.Generator) -> tuple[list[str], list[str]]:
    if form == "uuid":
        drawn = [_uuid(generator) for _ in range(2 * count)]
        return drawn[:count], drawn[count:]
    few = len(QUALITIES) * len(THINGS)
    if count > min(few, 90_000):
        raise ValueError(f"there are {few} keys of two words, {count} were asked for; take form='uuid'")
    places = generator.choice(few, count, replace=False)
    names = [f"{QUALITIES[place // len(THINGS)]} {THINGS[place % len(THINGS)]}" for place in places]
    return names, [str(number) for number in generator.choice(90_000, count, replace=False) + 10_000]


def _uuid(generator: np.random.Generator) -> str:
    digits = generator.bytes(16).hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _variables(count: int, generator: np.random.Generator) -> list[str]:
    """Distinct names of four capitals."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    places = generator.choice(26**4, count, replace=False)
    return ["".join(letters[place // 26**power % 26] for power in range(4)) for place in places]


# --- verifiers -------------------------------------------------------------------------------------------------------


def _first_is(pattern: re.Pattern[str], answer: str, text: str) -> bool:
    found = pattern.search(text)
    return found is not None and found.group() == answer


def _has_all(pattern: re.Pattern[str], answers: tuple[str, ...], text: str) -> bool:
    return set(answers) <= set(pattern.findall(text))
