"""A task with several right answers that can all be listed: walk from one number to another in four allowed moves.

A prompt is (start, target, four allowed moves, a separator); an answer writes four times a move and the number that it leads to. All right
answers are known, so that the chance of a decoding rule to solve a problem is computed and not sampled.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch

VALUES = 24
MOVES: tuple[tuple[str, int, int], ...] = (  # name, factor, summand
    ("+1", 1, 1),
    ("+2", 1, 2),
    ("+5", 1, 5),
    ("-1", 1, -1),
    ("-3", 1, -3),
    ("*2", 2, 0),
)
ALLOWED, STEPS = 4, 4
SEPARATOR = VALUES + len(MOVES)
VOCABULARY = SEPARATOR + 1
PROMPT, ANSWER = 3 + ALLOWED, 2 * STEPS
#: Fewest right answers of a problem.
LEAST = 4


@dataclass(frozen=True)
class Walk:
    """One problem: `prompt` LongTensor (PROMPT,), `answers` LongTensor (C, ANSWER), every right answer once."""

    prompt: torch.Tensor
    answers: torch.Tensor


@functools.cache
def landing() -> torch.Tensor:
    """Where move m leads from value x, LongTensor (moves, values); -1 where it leaves the range."""
    x = torch.arange(VALUES)
    reached = torch.stack([factor * x + summand for _, factor, summand in MOVES])
    return torch.where((reached >= 0) & (reached < VALUES), reached, -1)


@functools.cache
def walks_from(start: int, allowed: tuple[int, ...]) -> dict[int, torch.Tensor]:
    """Every way of STEPS allowed moves from `start`, by the value it ends at: token rows (C, ANSWER)."""
    moves = torch.tensor(list(itertools.product(allowed, repeat=STEPS)))
    at = torch.full((len(moves),), start)
    alive = torch.ones(len(moves), dtype=torch.bool)
    columns = []
    for step in range(STEPS):
        at = landing()[moves[:, step], at.clamp_min(0)]
        alive &= at >= 0
        columns += [VALUES + moves[:, step], at]
    rows = torch.stack(columns, dim=1)[alive]
    return {int(end): rows[rows[:, -1] == end] for end in rows[:, -1].unique()}


def draw(n: int, generator: torch.Generator, avoid: frozenset[tuple[int, ...]] = frozenset()) -> list[Walk]:
    """`n` different problems of at least LEAST right answers, none of them with a prompt in `avoid`."""
    found: dict[tuple[int, ...], Walk] = {}
    while len(found) < n:
        start = int(torch.randint(VALUES, (1,), generator=generator))
        allowed = tuple(sorted(torch.randperm(len(MOVES), generator=generator)[:ALLOWED].tolist()))
        ends = {end: rows for end, rows in walks_from(start, allowed).items() if len(rows) >= LEAST}
        if not ends:
            continue
        target = sorted(ends)[int(torch.randint(len(ends), (1,), generator=generator))]
        prompt = (start, target, *(VALUES + move for move in allowed), SEPARATOR)
        if prompt not in avoid and prompt not in found:
            found[prompt] = Walk(torch.tensor(prompt), ends[target])
    return list(found.values())


def prompts_of(walks: list[Walk]) -> torch.Tensor:
    """LongTensor (n, PROMPT)."""
    return torch.stack([walk.prompt for walk in walks])


def right(ids: torch.Tensor) -> torch.Tensor:
    """Whether prompt and answer, LongTensor (n, PROMPT + ANSWER), go together: BoolTensor (n,)."""
    at, target, allowed = ids[:, 0], ids[:, 1], ids[:, 2 : 2 + ALLOWED]
    good = torch.ones(len(ids), dtype=torch.bool)
    for step in range(STEPS):
        move, value = ids[:, PROMPT + 2 * step], ids[:, PROMPT + 2 * step + 1]
        good &= (move[:, None] == allowed).any(1)
        reached = landing()[(move - VALUES).clamp(0, len(MOVES) - 1), at.clamp(0, VALUES - 1)]
        good &= (reached >= 0) & (value == reached)
        at = value
    return good & (at == target)
