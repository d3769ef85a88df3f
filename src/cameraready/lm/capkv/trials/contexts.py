"""Contexts to prune and what is asked of them: real text and what follows it, hidden facts, facts among copies, the user's prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cameraready.lm._corpora import KINDS, windows
from cameraready.lm._tasks import key_value, multi_hop, passkey
from cameraready.lm._workload import LM_EVAL, RETRIEVAL, LMWorkload
from cameraready.models import LanguageModel

#: Tokens at the end of a user's prompt that are read after the rest was pruned, as a question is.
ASKED = 16
#: Shortest context that is pruned: below it, sinks and a policy's window are all of it.
SHORTEST = 64


@dataclass(frozen=True)
class Asked:
    """A context (1, T), what follows it (1, S), and how many of its last tokens are scored."""

    context: torch.Tensor
    suffix: torch.Tensor
    scored: int


def asked_of(workload: LMWorkload, lm: LanguageModel, part: str, document: int, length: int, n: int) -> Asked | None:
    """The `document`-th of `n` contexts of a part; None where the user's own data has no such one."""
    if workload.prompts is not None or workload.tasks:
        return own_of(workload, lm, part, document, length, n)
    if part == "text":
        return continuation(lm, document, length)
    if part == "retrieval":
        if document % 2:
            made = key_value(lm.tokenizer, length=length, n=n, seed=0, keys=6, filler="prose")
        else:
            made = passkey(lm.tokenizer, length=length, n=n, seed=0, filler="prose")
    elif part == "copies":
        made = passkey(lm.tokenizer, length=length, n=n, seed=1, filler="noise")
    elif part == "logs":
        made = passkey(lm.tokenizer, length=length, n=n, seed=2, filler=[log_of(document, length)])
    else:
        raise ValueError(f"there is no part {part!r}; parts with contexts are text, retrieval, copies and logs")
    return retrieval(lm, made[document])


def log_of(document: int, length: int) -> str:
    """A server's log of more than `length` tokens: lines that differ in a time, a worker, a number and a duration."""
    generator = np.random.default_rng([document, 5])
    lines, clock = [], 36_000
    while len(lines) < length // 8:
        clock += int(generator.integers(1, 9))
        at = f"{clock // 3600:02d}:{clock // 60 % 60:02d}:{clock % 60:02d}"
        worker, number, took = (int(generator.integers(high)) for high in (16, 10_000, 90))
        lines.append(f"{at} INFO worker {worker} served request {number} in {took} ms.")
    return "\n".join(lines)


def continuation(lm: LanguageModel, document: int, length: int, suffix: int = 40) -> Asked:
    """A window of real text: `length` tokens of context, and the `suffix` that follow, all but the first of them scored."""
    begin = beginning(lm)
    kind = KINDS[document % len(KINDS)]
    size = length - len(begin) + suffix
    window = windows(lm.tokenizer, kind, length=size, n=document // len(KINDS) + 1, seed=0)[-1]
    ids = torch.cat([torch.tensor(begin, dtype=torch.long), window])[None]
    return Asked(ids[:, :length], ids[:, length:], suffix - 1)


def beginning(lm: LanguageModel) -> list[int]:
    """The token that the tokenizer puts before a text, if any."""
    ids, first = lm.tokenizer("a").input_ids, lm.tokenizer.bos_token_id
    return [first] if first is not None and ids[:1] == [first] else []


def retrieval(lm: LanguageModel, problem: Any) -> Asked:
    """A problem of `lm._tasks`: the context up to its question, then question and answer, of which the answer is scored."""
    ids, cut = torch.as_tensor(problem.extra["ids"]).reshape(1, -1), int(problem.extra["question"])
    answer, scored = answer_tokens(lm, problem.answer)
    return Asked(ids[:, :cut], torch.cat([ids[:, cut:], answer], dim=1), scored)


def answer_tokens(lm: LanguageModel, answer: str) -> tuple[torch.Tensor, int]:
    """Tokens of an answer after the words that lead to it, (1, A), and how many are left without a blank in front."""
    ids = lm.tokenizer(f" {answer}", add_special_tokens=False).input_ids
    if not ids:
        raise ValueError(f"the answer {answer!r} has no tokens")
    blank = len(ids) > 1 and not lm.tokenizer.decode(ids[:1]).strip()
    return torch.tensor([ids]), len(ids) - blank


def own_of(workload: LMWorkload, lm: LanguageModel, part: str, document: int, length: int, n: int) -> Asked | None:
    """The user's: prompts take the place of texts, tasks that of hidden facts; what is left is not run."""
    if part == "text":
        return continuation(lm, document, length) if workload.prompts is None else prompt_of(workload, lm, document)
    tasks = [task for task in workload.tasks if not task.startswith(LM_EVAL)]
    if part != "retrieval" or not tasks:
        return None
    task = tasks[document % len(tasks)]
    if task == "own":
        return prompt_of(workload, lm, document)
    if task not in RETRIEVAL:
        raise ValueError(
            f"the task {task} has no context that could be pruned; name {', '.join(RETRIEVAL)} or own, with your prompts as --data"
        )
    make = {"passkey": passkey, "key_value": key_value, "multi_hop": multi_hop}[task]
    return retrieval(lm, make(lm.tokenizer, length=length, n=n, seed=0, filler="prose")[document])


def prompt_of(workload: LMWorkload, lm: LanguageModel, document: int) -> Asked | None:
    """A prompt of the user's: its last tokens are read after pruning, and its answer, or else they, are scored."""
    prompts = workload.prompts or []
    if document >= len(prompts):
        return None
    prompt, answer = prompts[document]
    ids = lm.encode(prompt if answer is None else lm.prompt(prompt)).cpu()
    after = min(40, ids.shape[1] // 4) if answer is None else ASKED
    if ids.shape[1] - after < SHORTEST:
        raise ValueError(
            f"prompt {document + 1} has {ids.shape[1]} tokens; a context worth pruning has at least {SHORTEST + after}: give longer prompts"
        )
    if answer is None:
        return Asked(ids[:, :-after], ids[:, -after:], after - 1)
    told, scored = answer_tokens(lm, answer)
    return Asked(ids[:, :-after], torch.cat([ids[:, -after:], told], dim=1), scored)
