"""The decoding rules that are compared: as laws over the vocabulary, and as ways to generate with transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cameraready.lm.led.config import LEDConfig
from cameraready.lm.led.distribution import led_distribution
from cameraready.lm.led.generation import led_generate
from cameraready.lm.led.sharpening import cache_argument
from cameraready.models import anatomy

#: Settings of transformers' sampling, by the rule's name. All are given at the same temperatures.
PLAIN: Mapping[str, dict[str, Any]] = {
    "temperature": {},
    "top-p": {"top_p": 0.95},
    "min-p": {"min_p": 0.1},
    "top-k": {"top_k": 8},
}
#: Layers below the final one that are looked at.
NEAR, LOWER = 4, 7
_NONE = {"top_k": 0, "top_p": 1.0, "min_p": None}


@dataclass(frozen=True)
class Rule:
    """A decoding rule at a temperature. `kind` is a key of PLAIN, "dola" or "led"."""

    kind: str
    temperature: float = 0.6
    led: LEDConfig = field(default_factory=LEDConfig)


class Layers:
    """What every layer predicts at n positions: hidden states behind layer 0 (the embedding) ... L, each (n, D); the last is normed already."""

    def __init__(self, model: Any, hidden: list[torch.Tensor]) -> None:
        self.anatomy, self.hidden = anatomy(model), hidden

    def final(self) -> torch.Tensor:
        return self.anatomy.logits(self.hidden[-1], normed=True).float()

    def below(self, steps: int, *, norm: bool = True) -> torch.Tensor:
        """Logits (n, V) of the layer `steps` >= 1 below the final one."""
        return self.anatomy.logits(self.hidden[-1 - steps], normed=not norm).float()


def law(rule: Rule, layers: Layers) -> torch.Tensor:
    """log-probabilities of the next token under `rule`: (n, V)."""
    final = layers.final()
    if rule.kind == "led":
        lower = [layers.below(i, norm=rule.led.apply_final_norm) for i in range(1, rule.led.depth)]
        step = led_distribution(torch.stack([final, *lower]), rule.led, temperature=rule.temperature)
        return step.dense(final.shape[-1])
    warped = final
    if rule.kind == "dola":
        n = len(layers.hidden) - 1
        early = [layers.below(n - layer, norm=False) for layer in dola_layers(n, layers.anatomy.tied)]
        warped = dola_contrast(final, torch.stack(early))
    for warper in warpers(rule):
        warped = warper(None, warped)
    return warped.log_softmax(-1)


def warpers(rule: Rule) -> list[LogitsProcessor]:
    """transformers' own, in the order in which its `generate` applies them."""
    chosen: list[LogitsProcessor] = [TemperatureLogitsWarper(rule.temperature)]
    settings = PLAIN.get(rule.kind, {})
    if "top_k" in settings:
        chosen.append(TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        chosen.append(TopPLogitsWarper(settings["top_p"]))
    if "min_p" in settings:
        chosen.append(MinPLogitsWarper(settings["min_p"]))
    return chosen


def generate(
    rule: Rule, model: Any, ids: torch.Tensor, *, cache: Any, new_tokens: int, seed: int, pad: int
) -> torch.Tensor:
    """Continuations of `ids` (n, T), whose first T - 1 tokens `cache` holds: LongTensor (n, T + S)."""
    common = {
        cache_argument(model): cache,
        "max_new_tokens": new_tokens,
        "repetition_penalty": 1.0,
        "pad_token_id": pad,
    }
    generator = torch.Generator().manual_seed(seed)
    if rule.kind == "led":
        return led_generate(model, ids, led=rule.led, temperature=rule.temperature, generator=generator, **common)
    settings = {**common, **_NONE, **PLAIN.get(rule.kind, {}), "do_sample": True, "temperature": rule.temperature}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[ids.device] if ids.is_cuda else []))
        torch.manual_seed(seed)  # of the fork: transformers' sampling knows no generator
        if rule.kind == "dola":
            settings["logits_processor"] = LogitsProcessorList([stack.enter_context(DoLa(model))])
        return model.generate(ids, **settings)


def looks(log_p: torch.Tensor, top: torch.Tensor) -> dict[str, float]:
    """Entropies in nats over the vocabulary and over the final layer's candidates, and the share of these among the layer's own best."""
    candidates = log_p.gather(-1, top).log_softmax(-1)
    own = log_p.topk(top.shape[-1]).indices
    shared = (own[:, :, None] == top[:, None, :]).any(-1).float().mean()
    return {
        "entropy": float(-(log_p.exp() * log_p).sum(-1).mean()),
        "candidate_entropy": float(-(candidates.exp() * candidates).sum(-1).mean()),
        "coverage": float(shared),
    }


def asymmetry(curves: Sequence[dict[str, float]]) -> dict[str, float]:
    """How the final layer's uncertainty compares with that of the LOWER layers below it; `curves` from the top down, as `looks` gives them."""
    lower = curves[1 : 1 + LOWER]
    found = {
        "entropy_ratio": curves[0]["entropy"] / sum(c["entropy"] for c in lower) * len(lower),
        "candidate_gain": max(c["candidate_entropy"] for c in lower) - curves[0]["candidate_entropy"],
    }
    if len(lower) >= NEAR:  # a smaller model has no four layers to speak of
        found["coverage_near"] = sum(c["coverage"] for c in lower[:NEAR]) / NEAR
    return found


# --- DoLa ------------------------------------------------------------------------------------------------------------


def dola_layers(n_layers: int, tied: bool) -> list[int]:
    """The early layers of the setting "low" (0 is the embedding): every second one of the lower half, as in transformers up to version 4.56.

    Its code for deeper models than 40 layers is not needed here.
    """
    begin = 0 if not tied else 2 if n_layers > 2 else 1
    return list(range(begin, n_layers // 2, 2)) or [begin]


def dola_contrast(final: torch.Tensor, early: torch.Tensor, relative_top: float = 0.1) -> torch.Tensor:
    """Contrast of the final layer with the early layer that differs most from it (Chuang et al., 2024, arXiv:2309.03883).

    Written anew after the description in the paper and transformers' documentation: its code has moved to a hub repository. The early layer is the one of largest Jensen-Shannon
    divergence, chosen for each row (transformers chooses one for a whole batch). Tokens of less than a tenth of the best one's probability are cut off.

    Parameters
    ----------
    final : Tensor (B, V)
    early : Tensor (m, B, V)
        Logits of early layers, without the final norm as in transformers.

    Returns
    -------
    Tensor (B, V)
        Differences of log-probabilities, -inf for what is cut off.
    """
    p, q = final.log_softmax(-1), early.log_softmax(-1)
    mean = (p.exp() + q.exp()) / 2
    log_mean = mean.clamp_min(torch.finfo(mean.dtype).tiny).log()
    divergence = (mean * (log_mean - (p + q) / 2)).mean(-1)
    chosen = q.gather(0, divergence.argmax(0)[None, :, None].expand(1, *p.shape)).squeeze(0)
    return (p - chosen).masked_fill(p < p.amax(-1, keepdim=True) + math.log(relative_top), -math.inf)


class DoLa(LogitsProcessor):
    """DoLa inside `generate`, by hooks on the embedding and the early layers; a context manager."""

    def __init__(self, model: Any) -> None:
        self.anatomy = anatomy(model)
        parts = [self.anatomy.embedding, *(layer.module for layer in self.anatomy.layers)]
        self.modules = [parts[i] for i in dola_layers(self.anatomy.n_layers, self.anatomy.tied)]
        self.hidden: dict[int, torch.Tensor] = {}

    def __enter__(self) -> DoLa:
        self.hooks = [module.register_forward_hook(self._keep(i)) for i, module in enumerate(self.modules)]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hidden.clear()

    def _keep(self, i: int) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            self.hidden[i] = (output[0] if isinstance(output, tuple) else output)[:, -1]

        return hook

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        early = [self.anatomy.logits(self.hidden[i], normed=True).to(scores) for i in range(len(self.modules))]
        return dola_contrast(scores, torch.stack(early))
