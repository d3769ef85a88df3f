"""The study's worlds, in which a small recurrent policy tries up to K times: a key to guess, mazes, a key that the prompt hides, a number.

A dialogue has a fixed layout: K attempts of ``length`` tokens, each followed by one token of feedback. Prompts are features; whether an
attempt is right, and what is said after it, depend on the prompt's hidden truth alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Game:
    """P prompts, M words to choose from, K attempts of L words.

    ``features`` (P, F) is what the policy sees of a prompt; ``truth`` (P,) the hidden answer where an attempt is one word; ``walls``
    (P, cells, M) where a move leads to, in mazes. ``sees`` says whether the policy reads its earlier attempts and what was said.
    Words 0 to M - 1 are the policy's; M is the feedback "wrong", and what stands behind it says more: too low and too high where keys are
    ``ordered``, or which key it is where the last word ``asks`` for it.
    """

    name: str
    words: int
    attempts: int
    length: int
    features: Tensor
    truth: Tensor
    moves: Tensor | None = None
    sees: bool = True
    ordered: bool = False
    asks: bool = False
    #: Prompts of which a step draws, and how many.
    per_step: int = 16
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def prompts(self) -> int:
        return len(self.truth)

    @property
    def vocabulary(self) -> int:
        return self.words + 1 + (2 if self.ordered else self.words - 1 if self.asks else 0)

    def judge(self, prompts: Tensor, attempt: Tensor) -> tuple[Tensor, Tensor]:
        """Verdicts (...,) bool and feedback words (...,) on attempts (..., L) at prompts (...,)."""
        truth = self.truth[prompts]
        if self.moves is None:
            guess = attempt[..., 0]
            right = guess == truth
            said = torch.full_like(guess, self.words)
            if self.ordered:
                said = torch.where(guess < truth, self.words + 1, self.words + 2)
            if self.asks:
                said = torch.where(guess == self.words - 1, self.words + 1 + truth, said)
            return right, said
        place, right = torch.zeros_like(prompts), torch.zeros_like(prompts, dtype=torch.bool)
        for move in attempt.unbind(-1):
            place = self.moves[prompts, place, move]
            right |= place == truth
        return right, torch.full_like(prompts, self.words)


def key(prompts: int = 32, words: int = 10, attempts: int = 4) -> Game:
    """Guess the key: each prompt has one among `words`, to be learned by heart; wrong guesses stay in view."""
    generator = torch.Generator().manual_seed(11)
    truth = torch.randint(words, (prompts,), generator=generator)
    return Game("key", words, attempts, 1, torch.eye(prompts), truth)


def hidden(kinds: int = 4, attempts: int = 4) -> Game:
    """The prompt shows its kind only, and the key varies within it: one is twice as likely as the next, and so on.

    The policy does not see what it tried. V@1 wants the likeliest key, V@K a spread over several.
    """
    chances = torch.tensor([8, 4, 2, 1, 1])
    truth = torch.repeat_interleave(torch.arange(len(chances)), chances)
    generator = torch.Generator().manual_seed(12)
    truths = torch.cat([torch.randperm(len(chances), generator=generator)[truth] for _ in range(kinds)])
    features = torch.repeat_interleave(torch.eye(kinds), len(truth), dim=0)
    return Game("hidden", len(chances), attempts, 1, features, truths, sees=False)


def number(attempts: int = 4, size: int = 15) -> Game:
    """Guess a number in 1..15 that the prompt does not show, told after each guess whether it is higher or lower."""
    return Game("number", size, attempts, 1, torch.ones(size, 1), torch.arange(size), ordered=True, per_step=15)


def ask(keys: int = 6, attempts: int = 2) -> Game:
    """A key among six that the prompt does not show, and a seventh word that is never right, but after which the key is told."""
    return Game("ask", keys + 1, attempts, 1, torch.ones(keys, 1), torch.arange(keys), asks=True, per_step=keys)


def mazes(prompts: int = 12, side: int = 5, attempts: int = 3) -> Game:
    """5 x 5 mazes from one corner to the other in as many moves as the shortest way takes (eight); one wrong move, and it is missed."""
    generator = torch.Generator().manual_seed(13)
    steps, found = torch.tensor([[0, 1], [1, 0], [0, -1], [-1, 0]]), []
    while len(found) < prompts:
        open_edges = torch.rand(side * side, 4, generator=generator) < 0.75
        table = torch.arange(side * side)[:, None].repeat(1, 4)
        for cell in range(side * side):
            for move in (0, 1):
                row, column = cell // side + steps[move, 0], cell % side + steps[move, 1]
                if 0 <= row < side and 0 <= column < side and open_edges[cell, move]:
                    other = int(row * side + column)
                    table[cell, move], table[other, move + 2] = other, cell
        ways = _ways(table, 2 * side - 2)
        if 1 <= len(ways) <= 6:
            found.append((table, ways))
    moves = torch.stack([table for table, _ in found])
    truth = torch.full((prompts,), side * side - 1)
    ways = [torch.tensor(each) for _, each in found]
    return Game(
        "maze", 4, attempts, 2 * side - 2, torch.eye(prompts), truth, moves, per_step=prompts, extra={"ways": ways}
    )


def _ways(table: Tensor, length: int) -> list[list[int]]:
    """All strings of `length` moves from the first cell to the last."""
    goal = len(table) - 1
    paths = [(0, [])]
    for _ in range(length):
        # Within the shortest length only moves right and down can arrive.
        paths = [
            (int(table[cell, move]), [*path, move])
            for cell, path in paths
            for move in (0, 1)
            if table[cell, move] != cell
        ]
    return [path for cell, path in paths if cell == goal]


GAMES = {"key": key, "hidden": hidden, "maze": mazes, "number": number, "ask": ask}
