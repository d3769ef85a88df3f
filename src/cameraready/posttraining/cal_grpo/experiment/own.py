"""A user's own model: how it does over K attempts, and what each estimator makes of the same stored dialogues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cameraready.lm._tasks import Problem
from cameraready.models import LanguageModel, anatomy
from cameraready.posttraining._logprobs import token_logprobs
from cameraready.posttraining._rollouts import Dialogue, repeats, sample_attempts
from cameraready.posttraining.cal_grpo.advantages import credited
from cameraready.posttraining.cal_grpo.attempts import attempts_of, later_failures
from cameraready.posttraining.cal_grpo.verification import verification_at_k

#: What is compared on a model: no running estimate, which would need a history.
ARMS: Mapping[str, Mapping[str, Any]] = {
    "trajectory": {"method": "trajectory"},
    "naive": {"method": "naive"},
    "cal": {},
    "half": {"lam": 0.5},
    "whole": {"lam": 1.0},
}


def report(
    lm: LanguageModel,
    problems: Sequence[Problem],
    arms: Mapping[str, Any] = ARMS,
    *,
    attempts: int,
    n: int,
    group: int,
    max_new_tokens: int,
    seed: int = 0,
    batch: int = 16,
) -> Iterator[dict[str, Any]]:
    """A row for each problem and estimator.

    The variance is that of the estimated gradient of V@K with respect to one bias, shared by all positions, on the model's last hidden
    state: within a problem, over its ``n / group`` groups. V@k, p_k and w_1 are those of the model, with errors clustered by problem, and
    the same in all rows.

    Parameters
    ----------
    n, group : int
        Dialogues of each problem, in groups of this size; at least two groups.
    """
    if n % group or n < 2 * group:
        raise ValueError(f"n must be at least two groups, and whole ones: got n={n} and group={group}")
    found = sample_attempts(
        lm.model,
        lm.tokenizer,
        problems,
        n=n,
        attempts=attempts,
        max_new_tokens=max_new_tokens,
        seed=seed,
        batch=batch,
        progress=False,
    )
    rewards = np.stack([d.rewards.cpu().double().numpy() for dialogues in found for d in dialogues])
    owners = np.repeat(np.arange(len(found)), n)
    rates = verification_at_k(rewards, group_ids=owners)
    success = np.array([rate.success for rate in rates])
    w = later_failures(np.nan_to_num(success))
    again = [repeats(d) for dialogues in found for d in dialogues if len(d.texts) > 1]
    common = {
        "first_weight": float(w[0]),
        "weight": weight_text(float(w[0])),
        "repeats": float(np.mean(again)) if again else 0.0,
        **{f"v{rate.k}": rate.value for rate in rates},
        **{f"v{rate.k}_error": rate.standard_error for rate in rates},
        **{f"p{rate.k}": rate.success for rate in rates if not np.isnan(rate.success)},
    }
    scores = attempt_scores(lm, [d for dialogues in found for d in dialogues], attempts, batch)
    groups = np.arange(len(rewards)) // group
    own = attempts_of(rewards, group_ids=owners)
    for arm, options in arms.items():
        advantages = np.nan_to_num(credited(options, rewards, groups))
        slopes = np.einsum("tk,tkd->td", advantages, scores).reshape(len(found), n // group, group, -1).mean(2)
        for place in range(len(found)):
            yield {
                "arm": arm,
                "run": place,
                "variance": float(slopes[place].var(axis=0, ddof=1).sum()),
                "solved": float(own.solved[owners == place].mean()),
                **common,
            }


def weight_text(weight: float) -> str:
    """What the first attempt's weight says of a model, in words."""
    if weight > 0.95:
        return f"w_1 = {weight:.2f}, later attempts hardly ever help, so weights change little"
    return f"w_1 = {weight:.2f}, where naive credit gives first attempts {1 / max(weight, 1e-3):.1f} times their due"


def attempt_scores(lm: LanguageModel, dialogues: Sequence[Dialogue], attempts: int, batch: int) -> np.ndarray:
    """Gradient of each attempt's log-probability with respect to a bias on the last hidden state, float64 (T, K, d)."""
    norm, size = anatomy(lm.model).final_norm, anatomy(lm.model).hidden_size
    found = np.zeros((len(dialogues), attempts, size))
    was = [(p, p.requires_grad) for p in lm.model.parameters()]
    for p, _ in was:
        p.requires_grad_(False)
    try:
        for start in range(0, len(dialogues), batch):
            part = dialogues[start : start + batch]
            found[start : start + len(part)] = _scores(lm, norm, part, attempts, size).double().cpu().numpy()
    finally:
        for p, before in was:
            p.requires_grad_(before)
    return found


def _scores(lm: LanguageModel, norm: Any, part: Sequence[Dialogue], attempts: int, size: int) -> Tensor:
    length = max(len(d.ids) for d in part)
    ids = torch.zeros(len(part), length, dtype=torch.long, device=lm.device)
    owner, mask = torch.full_like(ids, -1), torch.zeros_like(ids)
    for row, dialogue in enumerate(part):
        ids[row, : len(dialogue.ids)], mask[row, : len(dialogue.ids)] = dialogue.ids, 1
        owner[row, : len(dialogue.ids)] = dialogue.attempt_ids
    bias = torch.zeros(len(part), attempts, size, device=lm.device, requires_grad=True)
    # The bias of the attempt that writes the next token.
    following = owner[:, 1:]
    place = torch.nn.functional.one_hot(following.clamp_min(0), attempts) * (following >= 0)[..., None]

    def add(_module: Any, _inputs: Any, hidden: Tensor) -> Tensor:
        shift = torch.zeros_like(hidden)
        shift[:, :-1] = (place.to(bias.dtype) @ bias).to(hidden.dtype)
        return hidden + shift

    handle = norm.register_forward_hook(add)
    try:
        with torch.enable_grad():
            logits = lm.model(input_ids=ids, attention_mask=mask).logits[:, :-1]
            targets = torch.where(following >= 0, ids[:, 1:], -100)
            token_logprobs(logits, targets).logps.sum().backward()
    finally:
        handle.remove()
    assert bias.grad is not None
    return bias.grad
