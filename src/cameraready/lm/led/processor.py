"""Latent exploration decoding as a logits processor of transformers' `generate`, fed by hooks on the last decoder layers."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from transformers import LogitsProcessor

from cameraready.lm.led.config import LEDConfig
from cameraready.lm.led.distribution import Final, LEDStep, check_temperature
from cameraready.lm.led.layers import LowerLayers, parts_of
from cameraready.lm.led.thinking import ThinkEnd

Emit = Literal["draw", "best", "log_probs"]


class LEDProcessor(LogitsProcessor):
    """Replaces the scores of each step by the law of latent exploration decoding (Tan et al., 2026, arXiv:2602.01698).

    A context manager: hooks on the model exist inside ``with`` only. Put it last among the logits processors: what
    earlier ones did to the final layer's scores decides on the candidates, and a token that they forbid is impossible in every layer.
    `led_generate` does all that; use the processor directly where you must call `model.generate` yourself.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder-only causal language model; the one whose `generate` is called.
    led : LEDConfig, optional
    temperature : float
        T > 0. It is applied here, to every layer: leave `generate`'s own temperature at 1.
    emit : {"draw", "best", "log_probs"}
        What the scores become. ``"draw"``: 0 for a token drawn here from pi and -inf elsewhere, for ``generate(do_sample=False)``, which then
        takes that token and touches no global random state. ``"best"``: the same for the token of largest pi. ``"log_probs"``: log pi, for ``generate(do_sample=True,
        temperature=1.0, top_k=0, top_p=1.0)``, which draws with the global random state.
    generator : torch.Generator, optional
        For ``"draw"``; one multinomial call a step. On any device. None makes a fresh, unpredictable one.
    tokenizer : optional
        Needed where `led.think_end` is text.

    Attributes
    ----------
    steps : list of LEDStep
        The law of every step since the last prompt (B rows each; finished rows included).
    prompt_length : int
        Length of the last prompt in tokens, padding included.
    tokens : list of LongTensor (B,)
        What was drawn at each step; empty for ``"log_probs"``.

    Notes
    -----
    A prompt is told from a continuation by its ids: scores for what is not the last call's ids with one token more start afresh. Not for
    beams (noticed once rows change places), nor for assisted generation and classifier-free guidance, which run the model more than once a step.
    """

    def __init__(
        self,
        model: Any,
        led: LEDConfig | None = None,
        *,
        temperature: float = 0.6,
        emit: Emit = "draw",
        generator: torch.Generator | None = None,
        tokenizer: Any = None,
    ) -> None:
        if emit not in get_args(Emit):
            raise ValueError(f"emit must be 'draw', 'best' or 'log_probs', got {emit!r}")
        check_temperature(temperature, "for the likeliest token use emit='best'")
        model, tokenizer = parts_of(model, tokenizer)
        if generator is None:
            generator = torch.Generator()
            generator.seed()
        self.led = LEDConfig() if led is None else led
        self.temperature = temperature
        self.emit = emit
        self.generator = generator
        self.end = ThinkEnd(self.led.think_end, tokenizer)
        self.layers = LowerLayers(model, self.led)
        self.reset()

    def reset(self) -> None:
        """Forget the last generation."""
        self.steps: list[LEDStep] = []
        self.tokens: list[torch.Tensor] = []
        self._ids: torch.Tensor | None = None
        self.prompt_length = 0
        self._over: torch.Tensor | None = None

    def __enter__(self) -> LEDProcessor:
        self.layers.__enter__()
        self.reset()
        return self

    def __exit__(self, *reason: object) -> None:
        self.layers.__exit__(*reason)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """From processed logits (B, V) of the final layer to scores (B, V); see `emit`."""
        if not self.layers.watching:
            raise RuntimeError(
                "LEDProcessor sees the model's layers only inside 'with LEDProcessor(...) as processor:'"
            )
        hidden = [self.layers.hidden.get(i) for i in range(len(self.layers.modules))]
        if any(states is None or len(states) != len(scores) for states in hidden):
            raise ValueError(
                "the model's layers and the scores are not of one forward pass: use LEDProcessor with the model it was made for, and"
                " without beams, guidance or assisted generation"
            )
        explores = ~self._thinking_over(input_ids)
        final = Final(scores, self.led, self.temperature)
        step = final.mix(self.layers.at_candidates(final, [h for h in hidden if h is not None]), explores)
        self.layers.hidden.clear()
        self.steps.append(step)
        if self.emit == "log_probs":
            return step.dense(scores.shape[-1]).to(scores.dtype)
        token = step.best() if self.emit == "best" else step.draw(self.generator)
        self.tokens.append(token)
        return torch.full_like(scores, -math.inf).scatter_(-1, token[:, None], 0.0)

    def _thinking_over(self, input_ids: torch.Tensor) -> torch.Tensor:
        before, self._ids = self._ids, input_ids
        continues = (
            before is not None
            and input_ids.shape == (before.shape[0], before.shape[1] + 1)
            and torch.equal(input_ids[:, :-1], before)
        )
        if not continues and before is not None and _reordered(before, input_ids):
            raise ValueError(
                "rows have changed places, as beams do: LEDProcessor is for sampling and greedy decoding, num_beams=1"
            )
        if not continues or self._over is None:
            self.reset()
            self._ids, self.prompt_length = input_ids, input_ids.shape[1]
            self._over = self.end.begin(input_ids)
        else:
            self._over = self.end.update(self._over, input_ids[:, self.prompt_length :])
        return self._over


def _reordered(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether all rows of `now` (B, T + 1) continue some row of `before` (B, T), though not each its own."""
    if len(before) < 2 or now.shape != (before.shape[0], before.shape[1] + 1):
        return False
    return bool((now[:, None, :-1] == before[None]).all(-1).any(-1).all())
