"""What a problem is, and how answers are read in what a language model wrote. Nothing is evaluated as code."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

#: What stands for a sign of arithmetic in print and in LaTeX.
SIGNS = (
    ("−", "-"),
    ("–", "-"),
    ("×", "*"),
    ("·", "*"),
    ("⋅", "*"),
    ("÷", "/"),
    ("\\times", "*"),
    ("\\cdot", "*"),
    ("\\div", "/"),
)
#: Longest expression that is read, in characters; deepest nesting of brackets.
LONGEST, DEEPEST = 400, 40

# Commas part thousands only in threes. Numbers of hundreds of digits, which nobody means, are not read.
_NUMBER = re.compile(
    r"(?<![\w.])(?:(?:\d{1,3}(?:,\d{3})+(?![\d,]*\d)|\d{1,300})(?:\.\d{1,300})?|\.\d{1,300})(?:[eE][+-]?\d{1,2}\b)?(?!\d)"
)
_EXPRESSION = re.compile(r"[\d(+\-][\d \t+\-*/().]*")
_ITEM = re.compile(r"\d+[.)]\s+")


@dataclass(frozen=True)
class Problem:
    """A prompt whose answer a program can check.

    Attributes
    ----------
    prompt : str
        What the model is given, as it is: where a template was asked for, it is already applied.
    answer : str
        The right answer, or one of them.
    check : callable
        ``check(text) -> bool``: whether the text that the model wrote after the prompt answers it.
    kind : str
        ``"passkey"``, ``"arithmetic"`` ...
    extra : mapping
        What else is known; of the retrieval tasks the tokens and where the needles stand in them.
    """

    prompt: str
    answer: str
    check: Callable[[str], bool]
    kind: str
    extra: Mapping[str, Any] = field(default_factory=dict)


def numbers(text: str) -> list[Fraction]:
    """All numbers in `text`, in order: ``"-1,234.5 and 7"`` gives -2469/2 and 7.

    A minus is a sign where it follows no number, word or closing bracket: "12 -5" are 12 and 5, "it is -5" is -5.
    """
    text = plain(text)
    found = []
    for match in _NUMBER.finditer(text):
        size = Fraction(match.group().replace(",", ""))
        found.append(-size if _is_negative(text[max(0, match.start() - 20) : match.start()]) else size)
    return found


def plain(text: str) -> str:
    """`text` with the signs of arithmetic as keyboards have them."""
    for written, meant in SIGNS:
        text = text.replace(written, meant)
    return text


def _is_negative(before: str) -> bool:
    """Whether the number after `before` has a sign."""
    apart = before.endswith(" ")
    before = before.rstrip(" ")
    if not before.endswith("-") or before[-2:-1].isalnum():
        return False
    earlier = before[:-1].rstrip(" ")[-1:]
    # "- 5" at the start of a line is an item of a list.
    return earlier in ("=", "(") if apart else not (earlier.isdigit() or earlier in (")", "]"))


def last_number(text: str) -> Fraction | None:
    """The last number in `text`, None where there is none."""
    found = numbers(text)
    return found[-1] if found else None


def normalised(text: str) -> str:
    """`text` in lower case, runs of spaces as one space, without quotes and full stops around it."""
    return " ".join(text.casefold().split()).strip(" \"'`.,;:!?*")


def says(text: str, answer: str) -> bool:
    """Whether `answer` stands in `text` as whole words, up to case, spaces and punctuation around it."""
    wanted = normalised(answer)
    if not wanted:
        return False
    begin, end = (r"(?<!\w)" if wanted[0].isalnum() else ""), (r"(?!\w)" if wanted[-1].isalnum() else "")
    return re.search(begin + re.escape(wanted) + end, " ".join(text.casefold().split())) is not None


def value(expression: str) -> tuple[Fraction, list[int]]:
    """Value of an arithmetic expression of whole numbers, ``+ - * /`` and brackets, exactly, and the numbers it uses, in order.

    A recursive-descent parser. Signs before a bracket or a number are understood and do not change the number that is used.

    Raises
    ------
    ValueError
        It is no such expression, divides by zero, or is longer than 400 characters.
    """
    expression = plain(expression)
    if len(expression) > LONGEST:
        raise ValueError(f"an expression of {len(expression)} characters is too long")
    tokens = re.findall(r"\d+|[-+*/()]|\S", expression)
    used: list[int] = []
    place = 0

    def peek() -> str:
        return tokens[place] if place < len(tokens) else ""

    def take() -> str:
        nonlocal place
        place += 1
        return tokens[place - 1]

    def total(depth: int) -> Fraction:
        result = product(depth)
        while peek() in ("+", "-"):
            result = result + product(depth) if take() == "+" else result - product(depth)
        return result

    def product(depth: int) -> Fraction:
        result = factor(depth)
        while peek() in ("*", "/"):
            if take() == "*":
                result *= factor(depth)
            else:
                divisor = factor(depth)
                if divisor == 0:
                    raise ValueError("the expression divides by zero")
                result /= divisor
        return result

    def factor(depth: int) -> Fraction:
        if depth > DEEPEST:
            raise ValueError("the expression is nested too deeply")
        if peek() in ("+", "-"):
            return factor(depth + 1) if take() == "+" else -factor(depth + 1)
        if peek() == "(":
            take()
            result = total(depth + 1)
            if peek() != ")":
                raise ValueError("a bracket is not closed")
            take()
            return result
        if not peek().isdecimal():
            raise ValueError(f"a number was expected, not {peek() or 'the end'!r}")
        used.append(int(take()))
        return Fraction(used[-1])

    result = total(0)
    if place < len(tokens):
        raise ValueError(f"{peek()!r} cannot follow a whole expression")
    return result, used


def last_expression(text: str) -> tuple[Fraction, list[int]] | None:
    """Value and numbers of the last arithmetic expression in `text` that uses at least two numbers; None where there is none.

    ``"so (8 - 2) * 4 = 24."`` gives 24 and [8, 2, 4]: what stands behind an equals sign is a number, not an expression.
    """
    for found in reversed(list(_EXPRESSION.finditer(plain(text)))):
        written = found.group().rstrip(" \t.+-*/")
        for candidate in (written, _ITEM.sub("", written, count=1)):  # "2. 3 + 4" may be the second of a list
            try:
                result, used = value(candidate)
            except ValueError:
                continue
            if len(used) > 1:
                return result, used
    return None
