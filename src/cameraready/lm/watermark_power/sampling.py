"""Letting a transformers model write, while the distributions that it samples from are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor
from transformers.generation.configuration_utils import BaseWatermarkingConfig

from cameraready.lm.watermark_power.theory.contexts import Contexts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Written:
    """Contexts of generated texts, the text of each, the width of the logits, distinct bigrams a generated token, and of each text."""

    contexts: Contexts
    texts: np.ndarray
    vocab_size: int
    scored_share: float
    lengths: np.ndarray


class Recorder(LogitsProcessor):
    """Keeps what reaches it: the logits after temperature, top-k and top-p, which transformers hands to a watermark last of all."""

    def __init__(self, top_tokens: int) -> None:
        self.top_tokens = top_tokens
        self.steps: list[Contexts] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        log_p = torch.log_softmax(scores.float(), dim=-1)
        if torch.isnan(log_p).any():
            raise ValueError("the model's logits are not numbers (NaN); try another dtype")
        p = log_p.exp()
        top = torch.topk(p, min(self.top_tokens, p.shape[-1]), dim=-1).values
        surprisal = -torch.where(p > 0, p * log_p, 0.0).sum(dim=-1)
        tail = surprisal + torch.where(top > 0, top * top.clamp_min(1e-45).log(), 0.0).sum(dim=-1)
        self.steps.append(
            Contexts.of(top.double().cpu().numpy(), p.shape[-1], np.maximum(tail.double().cpu().numpy(), 0.0))
        )
        return scores


class RecordingConfig(BaseWatermarkingConfig):
    """Stands where a watermark would: `generate` builds the processor from it, and puts it last."""

    def __init__(self, top_tokens: int) -> None:
        self.recorder = Recorder(top_tokens)

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordingConfig:
        return self  # `generate` copies its options; what it records must come back

    def validate(self) -> None:
        """Nothing can be wrong with it."""

    def construct_processor(self, vocab_size: int, device: Any) -> Recorder:
        return self.recorder


def written(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    batch_size: int,
    top_tokens: int,
) -> Written:
    """Sample a continuation of each prompt and keep the distributions. See `WatermarkCalibrator.from_model`."""
    for name, value, least in (
        ("max_new_tokens", max_new_tokens, 1),
        ("batch_size", batch_size, 1),
        ("top_tokens", top_tokens, 40),
    ):
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    if not hasattr(model, "generate"):
        raise TypeError(
            f"model must be a transformers causal language model, which can generate; got {type(model).__name__}"
        )
    width = int(model.config.get_text_config().vocab_size)
    ids = token_ids(tokenizer, prompts, width)
    parts, labels, distinct, total = [], [], [], 0
    options = sampling_options(model, temperature=temperature, top_k=top_k, top_p=top_p, max_new_tokens=max_new_tokens)
    with own_randomness(model, seed), evaluating(model):
        for start in range(0, len(ids), batch_size):
            batch, mask = left_padded(ids[start : start + batch_size], options.pad_token_id, model.device)
            recording = RecordingConfig(top_tokens)
            options.watermarking_config = recording
            with torch.no_grad():
                out = model.generate(batch, attention_mask=mask, generation_config=options)
            new = out[:, batch.shape[1] :].cpu()
            alive = still_writing(new, options.eos_token_id)
            for step, contexts in enumerate(recording.recorder.steps):
                rows = np.flatnonzero(alive[:, step].numpy())
                parts.append(contexts[rows])
                labels.append(start + rows)
            before = torch.cat([batch[:, -1:].cpu(), new[:, :-1]], dim=1)
            for row in range(len(new)):
                pairs = torch.stack([before[row], new[row]], dim=1)[alive[row]]
                distinct.append(len(torch.unique(pairs, dim=0)))
                total += int(alive[row].sum())
    width = int(model.config.get_text_config().vocab_size)
    lengths = np.array(distinct)
    return Written(Contexts.joined(parts), np.concatenate(labels), width, lengths.sum() / total, lengths)


def sampling_options(
    model: PreTrainedModel, *, temperature: float, top_k: int, top_p: float, max_new_tokens: int
) -> Any:
    """A generation config with these transforms alone: what the model's own adds (a repetition penalty, min-p) is left out.

    Raises ValueError for values that `generate` would refuse or misread.
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature must be above 0, got {temperature!r}; greedy decoding has no distribution to calibrate on"
        )
    if top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(f"top_k must be >= 0 (0: all tokens) and top_p in (0, 1], got {top_k!r} and {top_p!r}")
    theirs = getattr(model, "generation_config", None)
    end = getattr(theirs, "eos_token_id", None)
    if end is None:
        end = model.config.get_text_config().eos_token_id
    pad = getattr(theirs, "pad_token_id", None)
    if pad is None:
        pad = end[0] if isinstance(end, list) else end
    return GenerationConfig(
        do_sample=True,
        temperature=float(temperature),
        top_k=int(top_k),
        top_p=float(top_p),
        max_new_tokens=max_new_tokens,
        eos_token_id=end,
        pad_token_id=0 if pad is None else pad,
        bos_token_id=getattr(theirs, "bos_token_id", None),
    )


def token_ids(
    tokenizer: PreTrainedTokenizerBase | None, prompts: Sequence[str] | Sequence[Sequence[int]], vocab_size: int
) -> list[list[int]]:
    """Prompts as lists of ids; a sentence for an empty one, for strings without a tokenizer, and for what is no token."""
    if isinstance(prompts, str):
        raise ValueError("prompts must be a list of prompts, got one string")
    found = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ValueError("prompts are strings, so that a tokenizer is needed; pass it, or pass token ids")
            prompt = tokenizer(prompt)["input_ids"]
        ids = [int(i) for i in prompt]
        if any(i != given or not 0 <= i < vocab_size for i, given in zip(ids, prompt, strict=True)):
            raise ValueError(f"prompt {number} holds something else than token ids from 0 to {vocab_size - 1}")
        if not ids:
            raise ValueError(f"prompt {number} is empty: there is nothing to continue; give it at least one token")
        found.append(ids)
    if not found:
        raise ValueError("there are no prompts to calibrate on; give 30 or more of the kind that you serve")
    return found


def left_padded(ids: list[list[int]], pad: int, device: Any) -> tuple[torch.LongTensor, torch.LongTensor]:
    """Prompts side by side, padded on the left, with their attention mask."""
    longest = max(map(len, ids))
    rows = torch.tensor([[pad] * (longest - len(row)) + row for row in ids], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids], device=device)
    return rows, mask


def still_writing(new: torch.Tensor, end: int | list[int] | None) -> torch.Tensor:
    """Which generated tokens are the text's own (its end token included), and not padding after it: booleans like `new`."""
    if end is None:
        return torch.ones_like(new, dtype=torch.bool)
    ended = torch.isin(new, torch.tensor([end] if isinstance(end, int) else list(end)))
    return (ended.long().cumsum(dim=1) - ended.long()) == 0


@contextmanager
def own_randomness(model: PreTrainedModel, seed: int) -> Iterator[None]:
    """Sampling in `generate` takes the global generator; give it a seed of ours and put the old state back."""
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Without dropout; modules that were training do so again afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
