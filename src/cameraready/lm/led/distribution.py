"""The sampling law of latent exploration decoding: a mixture over the final layer's best tokens, in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from cameraready.lm.led.config import LEDConfig


@dataclass(frozen=True, eq=False)
class LEDStep:
    """The law of the next token, for each of B rows.

    Attributes
    ----------
    candidates : LongTensor (B, k)
        Token ids, the final layer's best first. Fewer than k where the vocabulary is smaller.
    log_probs : Tensor (B, k)
        log pi of the candidates, in nats; -inf for dropped ones. Sums to one over k. Differentiable where the logits are.
    confidence : Tensor (B,)
        Probability of the final layer's best token over the whole vocabulary: the chance to exploit.
    level : LongTensor (B,)
        i*, how many layers below the final one the chosen aggregate reaches (0: the final layer alone).
    entropy : Tensor (B, d)
        Entropy in nats over the candidates of each aggregate, the final layer's first.
    explores : BoolTensor (B,)
        False where the thinking phase is over and the law is plain top-k sampling.
    """

    candidates: torch.Tensor
    log_probs: torch.Tensor
    confidence: torch.Tensor
    level: torch.Tensor
    entropy: torch.Tensor
    explores: torch.Tensor

    def dense(self, vocab_size: int) -> torch.Tensor:
        """log pi over the whole vocabulary, (B, vocab_size), -inf outside the candidates."""
        out = self.log_probs.new_full((*self.log_probs.shape[:-1], vocab_size), -math.inf)
        return out.scatter(-1, self.candidates, self.log_probs)

    def draw(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """One token a row by a single multinomial draw: LongTensor (B,). A `generator` on another device is obeyed there."""
        probs = self.log_probs.detach().exp()
        if generator is not None:
            probs = probs.to(generator.device)
        picked = torch.multinomial(probs, 1, generator=generator).to(self.candidates.device)
        return self.candidates.gather(-1, picked).squeeze(-1)

    def best(self) -> torch.Tensor:
        """The token of largest pi in each row, LongTensor (B,); the final layer's order decides ties."""
        return self.candidates.gather(-1, self.log_probs.argmax(-1, keepdim=True)).squeeze(-1)


def led_distribution(
    logits: torch.Tensor,
    led: LEDConfig | None = None,
    *,
    temperature: float = 0.6,
    explores: torch.Tensor | None = None,
) -> LEDStep:
    """The law from logits of several layers: no model, no randomness (Tan et al., 2026, arXiv:2602.01698).

    With p^l the softmax of layer l's logits over the temperature and C the final layer's `led.top_k` best tokens:
    a^i = normalise over C of p^L + ... + p^i for i = L, ..., L-d+1; i* the one of largest entropy; and
    pi(v) = conf p^L(v) / p^L(C) + (1 - conf) a^{i*}(v), conf the largest p^L.

    Parameters
    ----------
    logits : Tensor (d, B, V)
        The final layer's first, then those of the layers below it, from the top down. The final ones may have passed logits processors: a token
        at -inf there counts as impossible in every layer. Computed in float32, or float64 if they are.
    led : LEDConfig, optional
        `depth` must be d.
    temperature : float
        T > 0, for every layer.
    explores : BoolTensor (B,), optional
        Rows still in the thinking phase; None means all.

    Returns
    -------
    LEDStep

    Raises
    ------
    ValueError
        For shapes that do not fit, a temperature that is not positive, or a row in which no token is possible.
    """
    led = LEDConfig() if led is None else led
    if logits.ndim != 3:
        raise ValueError(f"logits must be (d, B, V), the final layer first; got shape {tuple(logits.shape)}")
    if logits.shape[0] != led.depth:
        raise ValueError(f"there are logits of {logits.shape[0]} layers but led.depth is {led.depth}")
    final = Final(logits[0], led, temperature)
    lower = [final.at_candidates(layer, i) for i, layer in enumerate(logits[1:], 1)]
    return final.mix(lower, explores)


class Final:
    """The final layer's candidates of one step, against which lower layers are read; `mix` makes the law."""

    def __init__(self, scores: torch.Tensor, led: LEDConfig, temperature: float) -> None:
        check_temperature(temperature, "take LEDStep.best() for the likeliest token")
        self.led = led
        self.temperature = temperature
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if torch.isnan(scores).any() or (scores.amax(-1) == math.inf).any():
            raise ValueError("the final logits hold NaN or +inf")
        self.masked = scores == -math.inf
        if self.masked.all(-1).any():
            raise ValueError("in some row every token is masked; loosen the logits processors that forbid tokens")
        self.any_masked = bool(self.masked.any())
        log_p, self.candidates = _over(scores, temperature).log_softmax(-1).topk(min(led.top_k, scores.shape[-1]))
        self.log_p = log_p.masked_fill(log_p.exp() == 0, -math.inf)  # also what underflows counts as impossible

    def at_candidates(self, logits: torch.Tensor, below: int = 1) -> torch.Tensor:
        """log p^l of the candidates, (B, k), from logits (B, V) of the layer `below` the final one, normalised as the config says."""
        logits = logits.to(self.log_p.dtype)
        if self.led.normaliser == "candidates":
            return self.over_candidates(logits.gather(-1, self.candidates), below)
        if self.any_masked:
            logits = logits.masked_fill(self.masked, -math.inf)
        _check_finite(logits.amax(-1), below)
        return _over(logits, self.temperature).log_softmax(-1).gather(-1, self.candidates)

    def over_candidates(self, logits: torch.Tensor, below: int = 1) -> torch.Tensor:
        """The same from logits of the candidates alone, (B, k), normalised over those that are possible."""
        logits = logits.to(self.log_p.dtype).masked_fill(self.log_p == -math.inf, -math.inf)
        _check_finite(logits.amax(-1), below)
        return _over(logits, self.temperature).log_softmax(-1)

    def mix(self, lower: list[torch.Tensor], explores: torch.Tensor | None = None) -> LEDStep:
        """The law, from log p^l of the candidates in the lower layers, each (B, k), from the top down."""
        possible = self.log_p > -math.inf
        exploit = self.log_p.log_softmax(-1)
        confidence = self.log_p[:, 0].exp()
        floored = torch.stack([self.log_p, *lower]).exp().clamp_min(self.led.floor) * possible
        aggregates = floored.cumsum(0)
        aggregates = aggregates / aggregates.sum(-1, keepdim=True)
        entropy = torch.special.entr(aggregates).sum(-1)
        level = entropy.argmax(0)
        if len(floored) == 1:
            log_explore = exploit  # nothing to explore, and no floor to disturb plain top-k sampling
        else:
            chosen = aggregates.gather(0, level[None, :, None].expand(1, *possible.shape)).squeeze(0)
            log_explore = chosen.clamp_min(torch.finfo(chosen.dtype).tiny).log().masked_fill(~possible, -math.inf)
        if self.led.exploit == "never":
            log_pi = log_explore
        else:
            log_pi = _log_mixture(confidence[:, None], exploit, log_explore)
        if explores is None:
            explores = torch.ones_like(confidence, dtype=torch.bool)
        log_pi = torch.where(explores[:, None], log_pi, exploit)
        return LEDStep(self.candidates, log_pi, confidence, level, entropy.T, explores)


def check_temperature(temperature: float, instead: str) -> None:
    """Raise a ValueError unless it is a positive, finite number; `instead` says what to do for zero."""
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not (number and temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be positive and finite, got {temperature!r}; {instead}")


def _over(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits over the temperature, shifted first: no temperature is so low that they overflow."""
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def _check_finite(largest: torch.Tensor, below: int) -> None:
    if not bool(largest.isfinite().all()):
        raise ValueError(
            f"logits of the layer {below} below the final one hold NaN, +inf or nothing else than -inf; use bfloat16 or float32, or"
            " apply_final_norm=True where it is off"
        )


def _log_mixture(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """log(weight e^a + (1 - weight) e^b); finite gradients where both are -inf."""
    weight = weight.clamp(0, 1)
    mixed = weight * a.exp() + (1 - weight) * b.exp()
    tiny = torch.finfo(mixed.dtype).tiny
    return mixed.clamp_min(tiny).log().masked_fill(a == -math.inf, -math.inf)
