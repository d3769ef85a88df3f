"""Enumerable tasks: every completion of every prompt is known and judged, so that a policy's accuracy has no sampling error."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cameraready.posttraining._testbed.trie import Trie


class EnumerableTask:
    """Prompts with a common finite set of completions and a verdict on each.

    Parameters
    ----------
    name : str
    tokens : (N, T) int64
        All completions, padded after their lengths with any token.
    lengths : (N,) int64
        Number of tokens of each, the end token included.
    correct : (P, N) bool
        Which completion is right for which prompt.
    features : (P, F) float
        What the policy is told of each prompt; F may be 0.
    kinds : dict of str to (P, N) bool or (N,) bool
        Named sets of completions, such as a rare strategy.
    reward : (P, N) float, optional
        Reward of each completion; by default 1.0 where right, else 0.0.
    start : (P, N) float, optional
        The distribution to which a policy is warmed up before reinforcement learning.
    visit : (P, N) float, optional
        Distribution of the demonstrations in that warm-up, by default `start`: one that visits rare prefixes more often teaches sooner what follows them.
    vocabulary : int, optional
        By default one more than the largest token.

    Raises
    ------
    ValueError
        If shapes disagree, a reward is NaN, no completion is given, or two completions are equal or one begins another.
    """

    def __init__(
        self,
        name: str,
        tokens: Tensor,
        lengths: Tensor,
        correct: Tensor,
        features: Tensor,
        kinds: dict[str, Tensor] | None = None,
        *,
        reward: Tensor | None = None,
        start: Tensor | None = None,
        visit: Tensor | None = None,
        vocabulary: int | None = None,
    ):
        tokens, lengths, correct = torch.as_tensor(tokens), torch.as_tensor(lengths), torch.as_tensor(correct)
        features = torch.as_tensor(features)
        if tokens.dim() != 2 or not tokens.numel():
            raise ValueError(
                f"tokens must be a table (completions, length) with at least one entry, got shape {tuple(tokens.shape)}"
            )
        n = len(tokens)
        if lengths.shape != (n,):
            raise ValueError(
                f"lengths must have one number for each of the {n} completions, got shape {tuple(lengths.shape)}"
            )
        if bool((lengths < 1).any()) or bool((lengths > tokens.shape[1]).any()):
            raise ValueError(
                f"lengths must be between 1 and the table's width {tokens.shape[1]}, got {int(lengths.min())} to {int(lengths.max())}"
            )
        if correct.dim() != 2 or correct.shape[1] != n or not len(correct):
            raise ValueError(
                f"correct must have shape (prompts, {n}) with at least one prompt, got {tuple(correct.shape)}"
            )
        prompts = len(correct)
        if features.dim() != 2 or len(features) != prompts:
            raise ValueError(f"features must have shape ({prompts}, F), got {tuple(features.shape)}")
        if not bool(torch.isfinite(features).all()):
            raise ValueError("features must be finite numbers")
        self.name = name
        self.tokens = tokens.to(torch.int64)
        self.lengths = lengths.to(torch.int64)
        self.mask = torch.arange(tokens.shape[1]) < self.lengths[:, None]
        used = self.tokens[self.mask]
        if int(used.min()) < 0:
            raise ValueError(f"tokens must not be negative, got {int(used.min())}")
        self.vocabulary = int(used.max()) + 1 if vocabulary is None else vocabulary
        if int(used.max()) >= self.vocabulary:
            raise ValueError(f"token {int(used.max())} is outside the vocabulary of {self.vocabulary}")
        self.tokens = torch.where(self.mask, self.tokens, torch.zeros_like(self.tokens))
        self.correct = correct.to(torch.bool)
        self.features = features if features.is_floating_point() else features.to(torch.float32)
        self.kinds = {
            key: torch.as_tensor(kind).to(torch.bool).expand(prompts, n) for key, kind in (kinds or {}).items()
        }
        self.reward = self._per_completion("reward", self.correct.to(torch.float32) if reward is None else reward)
        self.start = None if start is None else self._per_completion("start", start)
        self.visit = None if visit is None else self._per_completion("visit", visit)
        self.trie  # noqa: B018  (equal completions are refused here, not at first use)

    def _per_completion(self, what: str, values: Tensor) -> Tensor:
        values = torch.as_tensor(values)
        if values.shape != self.correct.shape:
            raise ValueError(
                f"{what} must have shape {tuple(self.correct.shape)} as correct has, got {tuple(values.shape)}"
            )
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"{what} must be finite: a NaN cannot be learnt from")
        return values

    def __repr__(self) -> str:
        return f"EnumerableTask({self.name!r}, prompts={self.prompts}, completions={self.completions}, vocabulary={self.vocabulary})"

    @property
    def prompts(self) -> int:
        """Number of prompts P."""
        return len(self.correct)

    @property
    def completions(self) -> int:
        """Number of completions N."""
        return len(self.tokens)

    @cached_property
    def trie(self) -> Trie:
        """The prefix tree of the completions."""
        return Trie(self.tokens, self.lengths, self.vocabulary)


def from_function(
    name: str,
    completions: Iterable[Sequence[int]],
    right: Callable[[Any, tuple[int, ...]], bool | float],
    prompts: Sequence[Any],
    *,
    features: Tensor | None = None,
    kinds: dict[str, Callable[[Any, tuple[int, ...]], bool]] | None = None,
    vocabulary: int | None = None,
) -> EnumerableTask:
    """A task of one's own from a Python function.

    Parameters
    ----------
    name : str
    completions : iterable of token sequences
        All of them, with their end token; none may begin another.
    right : callable(prompt, completion) -> bool or float
        The verdict; a number other than 0 and 1 becomes the reward, and counts as right from 0.5.
    prompts : sequence
        Anything ``right`` understands.
    features : (P, F) float, optional
        By default the identity: each prompt is told apart, nothing carries over between prompts.
    kinds : dict of callable(prompt, completion) -> bool, optional
    vocabulary : int, optional

    Raises
    ------
    ValueError
        If the function returns NaN, or for any reason of `EnumerableTask`.
    """
    rows = [tuple(map(int, completion)) for completion in completions]
    if not rows or not len(prompts):
        raise ValueError("a task needs at least one completion and at least one prompt")
    if not all(rows):
        raise ValueError("a completion needs at least one token")
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    reward = torch.tensor([[float(right(prompt, row)) for row in rows] for prompt in prompts])
    if not bool(torch.isfinite(reward).all()):
        where = torch.nonzero(~torch.isfinite(reward))[0].tolist()
        raise ValueError(
            f"the verdict on completion {rows[where[1]]} of prompt {prompts[where[0]]!r} is not a finite number"
        )
    return EnumerableTask(
        name,
        tokens,
        torch.tensor([len(row) for row in rows]),
        reward >= 0.5,
        torch.eye(len(prompts)) if features is None else features,
        {
            key: torch.tensor([[bool(kind(p, row)) for row in rows] for p in prompts])
            for key, kind in (kinds or {}).items()
        },
        reward=reward,
        vocabulary=vocabulary,
    )
