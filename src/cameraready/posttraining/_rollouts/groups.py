"""Groups: several completions of each problem, as group-based policy gradients and pass@k need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from cameraready.lm._tasks import Problem
from cameraready.posttraining._logprobs import PADDING, PROMPT
from cameraready.posttraining._rollouts.sampling import Drawn, Sampler, Shown, uniforms
from cameraready.posttraining._rollouts.verifying import check_problems, score

if TYPE_CHECKING:
    from cameraready.posttraining._rollouts.dialogues import Dialogue


@dataclass(frozen=True, eq=False)
class Group:
    """A problem with the completions that a model sampled for it.

    Attributes
    ----------
    problem : Problem
    prompt_ids : LongTensor of shape (T,)
        The tokens that the model was given.
    completions : list of str
        Texts without special tokens: what the verifier saw.
    token_ids : list of LongTensor
        The tokens drawn, an end token included.
    logps : list of Tensor
        Their log-probabilities under the model at the temperature of sampling (before any cut by ``top_p``), in nats.
    rewards : Tensor of shape (n,), float32
        What the verifier gave.
    correct : BoolTensor of shape (n,)
        Rewards of at least 1.
    finished : BoolTensor of shape (n,)
        Whether an end token ended it, rather than the budget.
    """

    problem: Problem
    prompt_ids: Tensor
    completions: list[str]
    token_ids: list[Tensor]
    logps: list[Tensor]
    rewards: Tensor
    correct: Tensor
    finished: Tensor


def sample_groups(
    model: nn.Module,
    tokenizer: Any,
    problems: Sequence[Problem],
    *,
    n: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    batch: int = 16,
    progress: bool | None = None,
) -> list[Group]:
    """`n` completions of each problem, sampled from the model and checked by the problem's verifier.

    Parameters
    ----------
    model : nn.Module
        A causal language model of transformers, wrapped or not. It is sampled in evaluation mode and left as it was.
    tokenizer
        Its tokenizer. A missing padding token does no harm; without an end token completions run to `max_new_tokens`, with a warning.
    problems : sequence of Problem
        Prompts are given as they are: put a chat template around them first where the model needs one (`LanguageModel.prompt`).
    n, max_new_tokens : int
        Completions of each problem, and the most tokens of one.
    temperature : float
        Above 0.
    top_p : float
        Share of the probability that draws come from, as in nucleus sampling.
    seed : int
        Not negative. A completion depends on the seed, its prompt, its number in the group and how often the same prompt stood in the list
        before; neither on the other problems, nor on `n`, nor on whether `max_new_tokens` would allow more. Nor does it on `batch`, up to
        rounding: padding changes logits in their last digits, so that about one token in a million may fall on the other side in float32.
    batch : int
        Completions sampled side by side.
    progress : bool, optional
        Whether to show a bar; by default if standard error is a terminal.

    Returns
    -------
    list of Group
        In the order of the problems; tensors are on the model's device.

    Raises
    ------
    ValueError
        Nothing to sample, a prompt that is empty or does not fit into the model's context with `max_new_tokens`, numbers out of range, or a
        verifier that raised or gave no finite number.

    Notes
    -----
    A prompt is read once for all of its completions in a batch. Draws come from the model alone: penalties and cuts of its generation
    configuration are not applied, as a policy gradient needs it.
    """
    listed = check_problems(problems)
    check_counts(n=n, max_new_tokens=max_new_tokens)
    check_seed(seed)
    sampler = Sampler(model, tokenizer, temperature=temperature, top_p=top_p, batch=batch)
    prompts = encoded(sampler, listed, max_new_tokens)
    rows, numbers = [], []
    for prompt, occurrence in zip(prompts, occurrences(prompts), strict=True):
        for sample in range(n):
            rows.append(prompt)
            numbers.append(uniforms(seed, prompt, occurrence, sample, 0, max_new_tokens))
    with Shown(len(rows), "sampling", progress) as shown:
        drawn = sampler.draw(rows, numbers, [max_new_tokens] * len(rows), shown=shown)
    return [
        _group(sampler, problem, prompt, drawn[place * n : (place + 1) * n])
        for place, (problem, prompt) in enumerate(zip(listed, prompts, strict=True))
    ]


def _group(sampler: Sampler, problem: Problem, prompt: Tensor, drawn: list[Drawn]) -> Group:
    texts = [sampler.decode(row.ids) for row in drawn]
    rewards = torch.tensor([score(problem, text) for text in texts], device=prompt.device)
    return Group(
        problem,
        prompt,
        texts,
        [row.ids for row in drawn],
        [row.logps for row in drawn],
        rewards,
        rewards >= 1,
        torch.tensor([row.finished for row in drawn], device=prompt.device),
    )


def check_counts(**counts: int) -> None:
    """Raise where a count is below 1."""
    for name, count in counts.items():
        if isinstance(count, bool) or not hasattr(count, "__index__"):
            raise TypeError(f"{name} must be a whole number, got {count!r}")
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")


def check_seed(seed: int) -> None:
    """Raise where the seed is no whole number of at least 0."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__") or seed < 0:
        raise ValueError(f"seed must be a whole number of at least 0, got {seed!r}")


def encoded(sampler: Sampler, problems: Sequence[Problem], room: int) -> list[Tensor]:
    """Tokens of all prompts, each short enough that `room` more tokens fit into the model's context."""
    prompts = [sampler.encode(problem.prompt, place) for place, problem in enumerate(problems)]
    for place, prompt in enumerate(prompts):
        if sampler.context is not None and len(prompt) + room > sampler.context:
            raise ValueError(
                f"the prompt of problem {place} has {len(prompt)} tokens, and with {room} new ones exceeds the model's context of "
                f"{sampler.context}; shorten it or lower max_new_tokens"
            )
    return prompts


def occurrences(prompts: Sequence[Tensor]) -> list[int]:
    """How often each prompt stood in the list before."""
    seen: dict[tuple[int, ...], int] = {}
    found = []
    for prompt in prompts:
        key = tuple(prompt.tolist())
        found.append(seen.get(key, 0))
        seen[key] = found[-1] + 1
    return found


class Packed(NamedTuple):
    """Rows side by side, as `completion_logprobs` takes them: prompts padded on the left, what follows on the right."""

    input_ids: Tensor
    attention_mask: Tensor
    completion_length: int
    attempt_ids: Tensor
    logps: Tensor


def pack(rollouts: Sequence[Group | Dialogue], pad_id: int = 0) -> Packed:
    """All completions or dialogues as one batch.

    Parameters
    ----------
    rollouts : sequence of Group or Dialogue
        Of a group each completion is a row, in order.
    pad_id : int
        Any token of the vocabulary; padding is masked.

    Returns
    -------
    Packed
        ``input_ids`` and ``attention_mask`` (B, T); ``completion_length`` L; of the last L tokens ``attempt_ids`` (B, L), `PROMPT`,
        `FEEDBACK`, `PADDING` or the attempt (0 for groups), and the sampler's ``logps`` (B, L), 0 where the model wrote nothing.
    """
    if not rollouts:
        raise ValueError("there are no rollouts to pack")
    rows = [row for rollout in rollouts for row in _rows(rollout)]
    before = max(len(prompt) for prompt, *_ in rows)
    length = max(len(ids) for _, ids, *_ in rows)
    device = rows[0][0].device
    input_ids = torch.full((len(rows), before + length), pad_id, dtype=torch.long, device=device)
    mask = torch.zeros_like(input_ids)
    attempts = torch.full((len(rows), length), PADDING, dtype=torch.long, device=device)
    logps = torch.zeros(len(rows), length, dtype=rows[0][3].dtype, device=device)
    for place, (prompt, ids, attempt_ids, scores) in enumerate(rows):
        here = slice(before - len(prompt), before + len(ids))
        input_ids[place, here] = torch.cat((prompt, ids))
        mask[place, here] = 1
        attempts[place, : len(ids)] = attempt_ids
        logps[place, : len(ids)] = scores
    return Packed(input_ids, mask, length, attempts, logps)


def _rows(rollout: Group | Dialogue) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    if isinstance(rollout, Group):
        return [
            (rollout.prompt_ids, ids, torch.zeros_like(ids), logps)
            for ids, logps in zip(rollout.token_ids, rollout.logps, strict=True)
        ]
    begin = int((rollout.attempt_ids == PROMPT).sum())
    parts = (rollout.ids, rollout.attempt_ids, rollout.logps)
    return [(rollout.ids[:begin], *(part[begin:] for part in parts))]
