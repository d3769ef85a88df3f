"""Dialogues: a model tries a problem, is told that it was wrong, and tries again in the same context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cameraready.lm._tasks import Problem
from cameraready.models import ModelError
from cameraready.posttraining._logprobs import FEEDBACK, PROMPT
from cameraready.posttraining._rollouts.groups import check_counts, check_seed, encoded, occurrences
from cameraready.posttraining._rollouts.sampling import Drawn, Sampler, Shown, uniforms
from cameraready.posttraining._rollouts.verifying import check_problems, score

#: What a model is told after a wrong attempt: the same words, or a function of the problem, the text and the number of the attempt.
Feedback = str | Callable[[Problem, str, int], str]
#: Stands in a chat template where the words of a turn go.
_MARK = "cameraready7words"


@dataclass(frozen=True, eq=False)
class Dialogue:
    """The attempts of one model at one problem, as the tokens that were given and drawn.

    Attributes
    ----------
    problem : Problem
    ids : LongTensor of shape (T,)
        Everything in order: prompt, attempts, and what was said between them.
    attempt_ids : LongTensor of shape (T,)
        Of each token `PROMPT`, `FEEDBACK`, or the attempt that wrote it; recorded as they were drawn, never searched for in the text.
    logps : Tensor of shape (T,)
        Log-probabilities of the tokens drawn, in nats; 0 for all others.
    rewards : Tensor of shape (K,), float32
        What the verifier gave each attempt; NaN for those that were not reached. Only the last one reached can be right.
    texts : list of str
        The attempts reached, without special tokens.
    cut : bool
        Whether the end of the model's context ended the last attempt, or left no room for another.
    """

    problem: Problem
    ids: Tensor
    attempt_ids: Tensor
    logps: Tensor
    rewards: Tensor
    texts: list[str]
    cut: bool

    @property
    def reached(self) -> Tensor:
        """Which attempts were made; bool of shape (K,)."""
        return ~self.rewards.isnan()

    @property
    def solved(self) -> bool:
        """Whether the last attempt was right."""
        return bool((self.rewards >= 1).any())


@dataclass
class _Open:
    """A dialogue that goes on."""

    problem: Problem
    prompt: Tensor
    occurrence: int
    sample: int
    between: _Between
    parts: list[Tensor] = field(default_factory=list)
    attempts: list[Tensor] = field(default_factory=list)
    logps: list[Tensor] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    cut: bool = False
    ended: bool = False

    @property
    def ids(self) -> Tensor:
        return torch.cat((self.prompt, *self.parts)) if self.parts else self.prompt

    def append(self, ids: Tensor, attempt: int, logps: Tensor) -> None:
        self.parts.append(ids)
        self.attempts.append(torch.full_like(ids, attempt))
        self.logps.append(logps)

    def closed(self, attempts: int) -> Dialogue:
        kept = torch.full((attempts,), float("nan"), device=self.prompt.device)
        kept[: len(self.rewards)] = torch.tensor(self.rewards, device=kept.device)
        before = torch.zeros(len(self.prompt), dtype=self.logps[0].dtype, device=self.prompt.device)
        return Dialogue(
            self.problem,
            self.ids,
            torch.cat((torch.full_like(self.prompt, PROMPT), *self.attempts)),
            torch.cat((before, *self.logps)),
            kept,
            self.texts,
            self.cut,
        )


def sample_attempts(
    model: nn.Module,
    tokenizer: Any,
    problems: Sequence[Problem],
    *,
    n: int,
    attempts: int,
    max_new_tokens: int,
    feedback: Feedback = "That is wrong. Try again.",
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    batch: int = 16,
    progress: bool | None = None,
) -> list[list[Dialogue]]:
    """`n` dialogues of at most `attempts` attempts at each problem; each stops at its first success.

    Parameters
    ----------
    model, tokenizer, problems, temperature, top_p, seed, batch, progress
        As for `sample_groups`; the first attempts are the completions that it samples with the same seed.
    n : int
        Dialogues for each problem.
    attempts : int
        K, the most attempts in one dialogue.
    max_new_tokens : int
        The most tokens of one attempt.
    feedback : str or callable
        What is said after a wrong attempt; a function is given the problem, the text and the number of the attempt (from 0). Where the prompt is
        written in the tokenizer's chat template it becomes a turn of the user, and the model's turn begins anew; elsewhere it is put on a
        line of its own behind the attempt.

    Returns
    -------
    list of list of Dialogue
        For each problem its dialogues.

    Raises
    ------
    ValueError
        As for `sample_groups`; the first attempt must fit into the model's context in full, later ones are cut by it.

    Notes
    -----
    What was drawn is never tokenized again. Before each attempt the recorded tokens are read anew, since keys and values that are kept over
    rows of different lengths would put gaps into sliding windows; reading is cheap beside drawing. Where an attempt ran out of tokens, the tokens
    that the template writes behind a turn count as feedback.
    """
    listed = check_problems(problems)
    check_counts(n=n, attempts=attempts, max_new_tokens=max_new_tokens)
    check_seed(seed)
    sampler = Sampler(model, tokenizer, temperature=temperature, top_p=top_p, batch=batch)
    prompts = encoded(sampler, listed, max_new_tokens)
    between = _Between(sampler)
    everyone = [
        _Open(problem, prompt, occurrence, sample, between)
        for problem, prompt, occurrence in zip(listed, prompts, occurrences(prompts), strict=True)
        for sample in range(n)
    ]
    with Shown(len(everyone) * attempts, "sampling", progress) as shown:
        for attempt in range(attempts):
            going = [one for one in everyone if not one.ended]
            shown.advance(len(everyone) - len(going))
            if not going:
                continue
            rows = [one.ids for one in going]
            budgets = [
                max_new_tokens if sampler.context is None else min(max_new_tokens, sampler.context - len(row))
                for row in rows
            ]
            numbers = [
                uniforms(seed, one.prompt, one.occurrence, one.sample, attempt, budget)
                for one, budget in zip(going, budgets, strict=True)
            ]
            drawn = sampler.draw(rows, numbers, budgets, shown=shown)
            for one, found, budget in zip(going, drawn, budgets, strict=True):
                _record(sampler, one, found, attempt, budget < max_new_tokens and not found.finished)
                if not one.ended and attempt + 1 < attempts:
                    _answer(sampler, one, found, feedback, attempt)
    closed = [one.closed(attempts) for one in everyone]
    return [closed[start : start + n] for start in range(0, len(closed), n)]


def _record(sampler: Sampler, one: _Open, drawn: Drawn, attempt: int, cut: bool) -> None:
    text = sampler.decode(drawn.ids)
    one.append(drawn.ids, attempt, drawn.logps)
    one.texts.append(text)
    one.rewards.append(score(one.problem, text))
    one.cut = cut
    one.ended = cut or one.rewards[-1] >= 1


def _answer(sampler: Sampler, one: _Open, drawn: Drawn, feedback: Feedback, attempt: int) -> None:
    """Feedback behind a wrong attempt, if it and one more token fit into the context; else the dialogue ends."""
    words = feedback if isinstance(feedback, str) else feedback(one.problem, one.texts[-1], attempt)
    if not isinstance(words, str):
        raise TypeError(f"feedback must be a text, or a function that gives one, got {type(words).__name__}")
    ids = one.between.tokens(one.problem.prompt, words, drawn)
    if sampler.context is not None and len(one.ids) + len(ids) >= sampler.context:
        one.cut = one.ended = True
        return
    one.append(ids, FEEDBACK, torch.zeros(len(ids), dtype=drawn.logps.dtype, device=ids.device))


class _Between:
    """The tokens between two attempts."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._turn: tuple[str, str] | None = None
        if sampler.tokenizer.chat_template:
            before, _, behind = self._rendered([_turn("user", _MARK)]).partition(_MARK)
            self._turn = before, behind
        self._known: dict[tuple[bool, str], Tensor] = {}

    def tokens(self, prompt: str, words: str, drawn: Drawn) -> Tensor:
        """What is said to the model after `drawn`; an end token that it drew itself is not written again."""
        chat = self._turn is not None and prompt.startswith(self._turn[0]) and prompt.endswith(self._turn[1])
        if (chat, words) not in self._known:
            self._known[chat, words] = self._sampler.encode_further(self._turn_of(words) if chat else f"\n{words}\n")
        ids = self._known[chat, words]
        if drawn.finished and len(ids) and ids[0] == drawn.ids[-1]:
            ids = ids[1:]
        return ids

    def _turn_of(self, words: str) -> str:
        """What the chat template writes behind a turn of the model's: its end, the user's turn, the beginning of the next."""
        written = self._rendered([_turn("user", "?"), _turn("assistant", _MARK), _turn("user", words)])
        if _MARK not in written:
            raise ModelError("the chat template leaves out what the model said, so attempts cannot follow each other")
        return written.rpartition(_MARK)[2]

    def _rendered(self, turns: list[dict[str, str]]) -> str:
        try:
            return str(self._sampler.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # the template is a program of the model's author, in Jinja
            raise ModelError(f"the tokenizer's chat template failed on a plain dialogue: {error}") from error


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
