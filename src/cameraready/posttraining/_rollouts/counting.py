"""What is counted in rollouts: pass@k with its error, different right answers, attempts that say the same again."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cameraready.lm import _problems
from cameraready.lm._problems import normalised, numbers, plain, value
from cameraready.lm._tasks import Problem, pass_at_k

#: A text's canonical form: two texts with one form count as one solution.
Canonical = Callable[[str], str]


class Estimate(NamedTuple):
    """A mean over problems, its standard error (NaN for a single problem) and the number of problems."""

    mean: float
    standard_error: float
    problems: int


def pass_at(groups: Sequence[Any], k: int) -> Estimate:
    """pass@k over problems, with a standard error clustered by problem.

    The chance that at least one of `k` samples is right, unbiased for each problem (Chen et al., 2021, arXiv:2107.03374, Eq. 1). The
    standard error is that of the mean over problems, each of which is one cluster: samples of one problem are no independent evidence
    about others (Miller, 2024, arXiv:2411.00640). It covers the choice of problems as well as sampling.

    Parameters
    ----------
    groups : sequence of Group, or of arrays of bool
        One for each problem, with at least `k` samples.
    k : int

    Raises
    ------
    ValueError
        There are no problems, one has fewer than `k` samples, or a sample is neither right (1) nor wrong (0).
    """
    rows = [_right(group) for group in groups]
    if not rows:
        raise ValueError("there are no problems to take a mean over")
    found = pass_at_k(np.array([len(row) for row in rows]), np.array([int(row.sum()) for row in rows]), k)
    return _estimate(found)


def distinct_at_k(forms: Sequence[str], k: int) -> float:
    """Expected number of different right answers among `k` of the samples drawn without replacement; unbiased for `k` fresh samples.

    Parameters
    ----------
    forms : sequence of str
        The canonical form of each sample, empty where it is wrong.
    k : int
        At most the number of samples.

    Raises
    ------
    ValueError
        `k` is out of range.
    """
    counts = Counter(form for form in forms if form)
    if not 1 <= k <= len(forms):
        raise ValueError(f"k must be from 1 to the number of samples, got k={k} and n={len(forms)}")
    return float(sum(pass_at_k(len(forms), count, k) for count in counts.values()))


def distinct_solutions(texts: Sequence[str], correct: Iterable[Any], canonical: Canonical = normalised) -> int:
    """Number of different right answers.

    Parameters
    ----------
    texts : sequence of str
    correct : sequence of bool, array or Tensor
        Which of them are right.
    canonical : callable
        Gives the form in which equal answers are equal; `normaliser` has one for each kind of problem. By default the text up to case, spaces and
        punctuation around it.

    Raises
    ------
    ValueError
        There are not as many flags as texts.
    """
    flags = [bool(flag) for flag in correct]
    if len(flags) != len(texts):
        raise ValueError(f"there are {len(texts)} texts but {len(flags)} flags of which are right")
    return len({canonical(text) for text, right in zip(texts, flags, strict=True) if right})


def normaliser(problem: Problem | str) -> Canonical:
    """The canonical form of answers to a problem, or to a kind of problem (`Problem.kind`).

    ``countdown``: `canonical_expression`. ``subset_sum``: the numbers that the verifier reads (all numbers of the text where only the kind
    is given), in increasing order. ``arithmetic``: the last number. Others: the text up to case, spaces and punctuation around it.
    """
    kind = problem if isinstance(problem, str) else problem.kind
    if kind == "subset_sum":
        pick = 0 if isinstance(problem, str) else int(problem.extra["pick"])
        return lambda text: ", ".join(map(str, sorted(numbers(text)[-pick:])))
    return {"countdown": canonical_expression, "arithmetic": _last_number}.get(kind, normalised)


def repeats(dialogue: Any, canonical: Canonical = normalised) -> float:
    """Duplicate rate: the share of the attempts after the first that say again what an earlier one said; NaN where there is only one.

    Parameters
    ----------
    dialogue : Dialogue, or sequence of str
        Its attempts' texts count.
    canonical : callable
        As for `distinct_solutions`.
    """
    forms = [canonical(text) for text in getattr(dialogue, "texts", dialogue)]
    if len(forms) < 2:
        return math.nan
    return sum(form in forms[:place] for place, form in enumerate(forms)) / (len(forms) - 1)


def canonical_expression(text: str) -> str:
    """The last arithmetic expression of a text in a form in which two ways of writing it are one.

    Equal are expressions that differ by the order and brackets within sums and within products, where ``a - b`` is a sum with a negative term
    and ``a / b`` a product with an inverse factor, and by signs moved through products: ``(8 - 2) * 4``, ``4 * (-2 + 8)`` and
    ``-((2 - 8) * 4)`` are one. Nothing is multiplied out or computed: ``8 * 4 - 2 * 4`` and ``6 * 4`` are others. A text without an expression is
    given up to case and spaces.
    """
    found = _last_written(text)
    if found is None:
        return normalised(text)
    tree = ast.parse(re.sub(r"(?<!\d)0+(?=\d)", "", found), mode="eval").body
    sign, form = _form(tree)
    return form if sign > 0 else f"-({form})"


def _last_written(text: str) -> str | None:
    """The expression that `cameraready.lm`'s verifier of countdown reads."""
    for match in reversed(list(_problems._EXPRESSION.finditer(plain(text)))):
        written = match.group().rstrip(" \t.+-*/")
        for candidate in (written, _problems._ITEM.sub("", written, count=1)):
            try:
                _, used = value(candidate)
            except ValueError:
                continue
            if len(used) > 1:
                return candidate.strip()
    return None


def _form(node: ast.expr) -> tuple[int, str]:
    """Sign and canonical form without it."""
    if isinstance(node, ast.Constant):
        return 1, str(node.value)
    if isinstance(node, ast.UnaryOp):
        sign, form = _form(node.operand)
        return (-sign if isinstance(node.op, ast.USub) else sign), form
    assert isinstance(node, ast.BinOp)
    if isinstance(node.op, ast.Add | ast.Sub):
        terms = _terms(node, 1)
        # Of a sum and its negative one form is kept; the sign goes outside.
        ways = [(sign, sorted((-sign * s, form) for s, form in terms)) for sign in (1, -1)]
        sign, ordered = min(ways, key=lambda way: way[1])
        return sign, "(" + " ".join(f"{'-' if s > 0 else '+'} {form}" for s, form in ordered) + ")"
    factors = _factors(node, 1)
    sign = math.prod(s for s, _, _ in factors)
    ordered_factors = sorted((-power, form) for _, power, form in factors)
    return sign, "(" + " ".join(f"{'/' if power > 0 else '*'} {form}" for power, form in ordered_factors) + ")"


def _terms(node: ast.expr, sign: int) -> list[tuple[int, str]]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        right = sign if isinstance(node.op, ast.Add) else -sign
        return _terms(node.left, sign) + _terms(node.right, right)
    if isinstance(node, ast.UnaryOp):
        return _terms(node.operand, -sign if isinstance(node.op, ast.USub) else sign)
    own, form = _form(node)
    return [(sign * own, form)]


def _factors(node: ast.expr, power: int) -> list[tuple[int, int, str]]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
        right = power if isinstance(node.op, ast.Mult) else -power
        return _factors(node.left, power) + _factors(node.right, right)
    if isinstance(node, ast.UnaryOp):
        sign = -1 if isinstance(node.op, ast.USub) else 1
        first, *others = _factors(node.operand, power)
        return [(sign * first[0], *first[1:]), *others]
    sign, form = _form(node)
    return [(sign, power, form)]


def _last_number(text: str) -> str:
    found = numbers(text)
    return str(found[-1]) if found else normalised(text)


def _right(group: Any) -> np.ndarray:
    flags = getattr(group, "correct", group)
    flags = flags.cpu().numpy() if hasattr(flags, "cpu") else np.asarray(flags)
    if flags.ndim != 1 or flags.dtype.kind not in "biuf" or not np.isin(flags, (0, 1)).all():
        raise ValueError(f"whether samples are right must be a row of 0 and 1 for each problem, got {flags!r}"[:200])
    return flags.astype(bool)


def _estimate(values: np.ndarray) -> Estimate:
    count = len(values)
    error = float(values.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan
    return Estimate(float(values.mean()), error, count)
