"""Generate by latent exploration decoding, with exact log-probabilities; and score given sequences under the same law."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList

from cameraready.lm.led.config import LEDConfig
from cameraready.lm.led.distribution import Final, LEDStep, check_temperature
from cameraready.lm.led.layers import LowerLayers, parts_of
from cameraready.lm.led.processor import LEDProcessor
from cameraready.lm.led.thinking import ThinkEnd

#: What `led_generate` cannot do, by the setting that asks for it, and why.
_REFUSED = {
    "num_beams": "beams rank by the model's own scores",
    "guidance_scale": "guidance runs the model twice a step and mixes final logits alone",
    "prompt_lookup_num_tokens": "assisted generation accepts tokens by the model's own probabilities",
    "assistant_model": "assisted generation accepts tokens by the model's own probabilities",
    "assistant_early_exit": "assisted generation accepts tokens by the model's own probabilities",
    "penalty_alpha": "contrastive search is a decoding method of its own",
    "dola_layers": "DoLa is a decoding method of its own",
    "watermarking_config": "the watermark would come after the draw; pass its processor in logits_processor",
    "custom_generate": "it replaces the loop that LED works in",
}
_REPLACED = ("top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


@dataclass(frozen=True, eq=False)
class LEDOutput:
    """What `led_generate` made, for B prompts, n sequences each, and S new tokens.

    Attributes
    ----------
    sequences : LongTensor (B n, T + S)
        Prompts and what was generated, padded after their end as by `generate`; the n of a prompt follow each other.
    logprobs : Tensor (B n, S)
        log pi of each generated token in nats, under the law that it was drawn from; 0 after a row's end. Their sum over a row is the
        log-probability of the row: what importance ratios in reinforcement learning divide by.
    mask : BoolTensor (B n, S)
        True for generated tokens, end-of-sequence tokens included; False for padding after them.
    candidates, candidate_logprobs : (B n, S, k)
        All of the law of each step: token ids and log pi (-inf for impossible ones).
    confidence, level : (B n, S)
        As in `LEDStep`.
    generated : Any
        What `generate` itself returned.
    """

    sequences: torch.Tensor
    logprobs: torch.Tensor
    mask: torch.Tensor
    candidates: torch.Tensor
    candidate_logprobs: torch.Tensor
    confidence: torch.Tensor
    level: torch.Tensor
    generated: Any = None


def led_generate(
    model: Any,
    inputs: torch.Tensor | Mapping[str, Any],
    *,
    led: LEDConfig | None = None,
    temperature: float | None = None,
    do_sample: bool = True,
    generator: torch.Generator | None = None,
    tokenizer: Any = None,
    return_logprobs: bool = False,
    num_return_sequences: int | None = None,
    generation_config: GenerationConfig | None = None,
    **kwargs: Any,
) -> Any:
    """Sample from a language model by latent exploration decoding (Tan et al., 2026, arXiv:2602.01698).

    For those who draw several solutions of a problem and keep one that a verifier accepts, from a reasoning model that reinforcement learning has made
    too sure of itself. Costs `led.depth` - 1 more products with the head a token. Little is to be gained where a higher temperature still helps: try that first.

    Parameters
    ----------
    model : transformers.PreTrainedModel or LanguageModel
        Any decoder-only causal language model, or what `cameraready.models.open_model` returns (its tokenizer is then used).
    inputs : LongTensor (B, T) or mapping
        Token ids, or what a tokenizer returns (``input_ids``, ``attention_mask``); batches are padded on the left.
    led : LEDConfig, optional
    temperature : float, optional
        T > 0 for every layer. None takes that of `generation_config` where one is passed, else 0.6.
    do_sample : bool
        False takes the token of largest pi at each step: nothing is random then.
    generator : torch.Generator, optional
        The only source of randomness, with one draw a step for the batch. None makes a fresh, unpredictable one. The global random state is neither read nor changed.
    tokenizer : optional
        For `led.think_end` given as text, and for `generate`'s ``stop_strings``.
    return_logprobs : bool
        Return an `LEDOutput` instead of what `generate` returns.
    num_return_sequences : int, optional
        n sequences for each prompt.
    generation_config, **kwargs
        As for `generate`: ``max_new_tokens``, ``eos_token_id``, ``stopping_criteria``, ``streamer``, ``logits_processor``, ``repetition_penalty``,
        ``bad_words_ids``, ``prefix_allowed_tokens_fn``, ``cache_implementation`` ... top-k, top-p and min-p of a model's or a passed configuration are not used: the `led.top_k`
        candidates take their place.

    Returns
    -------
    What `generate` returns (LongTensor (B n, T + S)), or an `LEDOutput`.

    Raises
    ------
    ValueError
        For an empty prompt, a depth beyond the model's layers, a temperature that is not positive, or something that LED cannot be combined with
        (beams, guidance, assisted generation, watermarking after the draw).
    """
    model, tokenizer = parts_of(model, tokenizer)
    defaults = model.generation_config
    _refuse(kwargs, generation_config, defaults)
    if temperature is None:
        temperature = getattr(generation_config, "temperature", None)
        temperature = 0.6 if temperature is None else temperature
    check_temperature(temperature, "for the likeliest token pass do_sample=False")
    inputs = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    _check_prompt(inputs)
    n = _setting("num_return_sequences", {"num_return_sequences": num_return_sequences}, generation_config, defaults)
    n = 1 if n is None else n
    if n < 1:
        raise ValueError(f"num_return_sequences must be at least 1, got {n}")
    if n > 1:
        _refuse_cache({**inputs, **kwargs})
        batch = len(inputs.get("input_ids", inputs.get("inputs_embeds")))
        inputs, kwargs = _expanded(inputs, batch, n), _expanded(kwargs, batch, n)
    settings = {"do_sample": False, "num_return_sequences": 1, **_neutral()}
    if generation_config is not None:
        generation_config = copy.deepcopy(generation_config)
        generation_config.update(**settings)
        kwargs["generation_config"] = generation_config
    else:
        kwargs |= settings
    if tokenizer is not None:
        kwargs["tokenizer"] = tokenizer
    others = list(kwargs.pop("logits_processor", None) or [])
    processor = LEDProcessor(
        model,
        led,
        temperature=temperature,
        emit="draw" if do_sample else "best",
        generator=generator,
        tokenizer=tokenizer,
    )
    with processor:
        generated = model.generate(**inputs, **kwargs, logits_processor=LogitsProcessorList([*others, processor]))
    if not return_logprobs:
        return generated
    eos = _setting("eos_token_id", kwargs, generation_config, defaults)
    sequences = generated if isinstance(generated, torch.Tensor) else generated.sequences
    return _output(sequences, generated, processor, eos)


def led_logprobs(
    model: Any,
    sequences: torch.Tensor,
    prompt_length: int,
    *,
    led: LEDConfig | None = None,
    temperature: float = 0.6,
    attention_mask: torch.Tensor | None = None,
    tokenizer: Any = None,
    positions_at_once: int = 32,
) -> torch.Tensor:
    """log pi of given continuations, in one forward pass: of those of another model, or under weights that have moved on.

    Gradients flow to the model's parameters through the mixture's probabilities; the candidates and the level i* count as fixed.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    sequences : LongTensor (B, T + S)
        Prompts, padded on the left, and continuations.
    prompt_length : int
        T >= 1.
    led, temperature, tokenizer
        As in `led_generate`. Logits processors have no part in this: scores agree with `led_generate`'s where there were none. A model's own
        configuration may name one (Qwen 2.5 has a ``repetition_penalty``): for reinforcement learning pass ``repetition_penalty=1.0`` when you generate.
    attention_mask : Tensor (B, T + S) or (B, T), optional
        Needed where prompts are padded; continuations count as present.
    positions_at_once : int
        How many positions' logits of all layers are held at once.

    Returns
    -------
    Tensor (B, S), float32 (float64 for such a model); -inf for a token outside the candidates.

    Raises
    ------
    ValueError
        For shapes that do not fit, or a depth beyond the model's layers.
    """
    model, tokenizer = parts_of(model, tokenizer)
    check_temperature(temperature, "scores need a law that is no certainty")
    led = LEDConfig() if led is None else led
    batch, length = sequences.shape
    if not 1 <= prompt_length < length:
        raise ValueError(
            f"prompt_length must be from 1 to {length - 1} for sequences of {length} tokens, got {prompt_length}"
        )
    if positions_at_once < 1:
        raise ValueError(f"positions_at_once must be at least 1, got {positions_at_once}")
    explores = _exploring(sequences, prompt_length, ThinkEnd(led.think_end, tokenizer))
    arguments = _scoring_arguments(model, sequences, prompt_length, attention_mask)
    with LowerLayers(model, led, positions="all") as layers:
        logits = model(**arguments, use_cache=False).logits
        hidden = [layers.hidden[i] for i in range(led.depth - 1)]
    logits = logits[:, -(length - prompt_length) - 1 : -1]
    hidden = [states[:, prompt_length - 1 : -1] for states in hidden]
    out = []
    for start in range(0, length - prompt_length, positions_at_once):
        here = slice(start, start + positions_at_once)
        final = Final(logits[:, here].flatten(0, 1), led, temperature)
        lower = layers.at_candidates(final, [states[:, here].flatten(0, 1) for states in hidden])
        step = final.mix(lower, explores[:, here].flatten())
        token = sequences[:, prompt_length:][:, here].flatten().to(step.candidates.device)
        out.append(_log_prob_of(step, token).view(batch, -1))
    return torch.cat(out, dim=1)


def _log_prob_of(step: LEDStep, token: torch.Tensor) -> torch.Tensor:
    """log pi of one token a row, (B,); -inf outside the candidates."""
    return step.log_probs.masked_fill(step.candidates != token[:, None], -torch.inf).amax(-1)


def _exploring(sequences: torch.Tensor, prompt_length: int, end: ThinkEnd) -> torch.Tensor:
    """Whether each continuation's position was still in the thinking phase when it was drawn, BoolTensor (B, S)."""
    over = end.begin(sequences[:, :prompt_length])
    columns = [~over]
    for position in range(prompt_length + 1, sequences.shape[1]):
        over = end.update(over, sequences[:, prompt_length:position])
        columns.append(~over)
    return torch.stack(columns, dim=1)


def _scoring_arguments(
    model: Any, sequences: torch.Tensor, prompt_length: int, attention_mask: torch.Tensor | None
) -> dict[str, Any]:
    batch, length = sequences.shape
    arguments: dict[str, Any] = {"input_ids": sequences}
    accepted = inspect.signature(model.forward).parameters
    if "logits_to_keep" in accepted:
        arguments["logits_to_keep"] = length - prompt_length + 1
    if attention_mask is None:
        return arguments
    if attention_mask.shape not in ((batch, length), (batch, prompt_length)):
        raise ValueError(
            f"attention_mask must be {(batch, length)} or, for the prompts alone, {(batch, prompt_length)}; got"
            f" {tuple(attention_mask.shape)}"
        )
    mask = torch.ones_like(sequences)
    mask[:, :prompt_length] = attention_mask[:, :prompt_length].to(mask)
    arguments["attention_mask"] = mask
    if "position_ids" in accepted:
        arguments["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    return arguments


def _output(sequences: torch.Tensor, generated: Any, processor: LEDProcessor, eos: Any) -> LEDOutput:
    found = sequences[:, processor.prompt_length :]
    steps = processor.steps[: found.shape[1]]  # `generate` may run one step too many and take it back
    tokens = torch.stack(processor.tokens[: len(steps)], dim=1)
    # A row is over after an end-of-sequence token, or once `generate` put padding in the place of what was drawn.
    live = (found == tokens.to(found.device)).cumprod(1).bool()
    if eos is not None:
        ends = torch.isin(found, torch.as_tensor(eos, device=found.device).flatten())
        live[:, 1:] &= ~ends.cumsum(1).bool()[:, :-1]

    def stacked(name: str) -> torch.Tensor:
        return torch.stack([getattr(step, name) for step in steps], dim=1)

    logprobs = torch.stack([_log_prob_of(step, tokens[:, t]) for t, step in enumerate(steps)], dim=1)
    return LEDOutput(
        sequences=sequences,
        logprobs=logprobs.masked_fill(~live.to(logprobs.device), 0.0),
        mask=live,
        candidates=stacked("candidates"),
        candidate_logprobs=stacked("log_probs"),
        confidence=stacked("confidence"),
        level=stacked("level"),
        generated=generated,
    )


def _setting(name: str, kwargs: Mapping[str, Any], config: GenerationConfig | None, defaults: GenerationConfig) -> Any:
    """What `generate` would take for a setting: the argument, else the passed configuration's, else the model's."""
    if kwargs.get(name) is not None:
        return kwargs[name]
    passed = getattr(config, name, None)
    return getattr(defaults, name, None) if passed is None else passed


def _refuse(kwargs: Mapping[str, Any], config: GenerationConfig | None, defaults: GenerationConfig) -> None:
    for name, reason in _REFUSED.items():
        value = _setting(name, kwargs, config, defaults)
        neutral = value is None or value is False or (name in ("num_beams", "guidance_scale") and value == 1)
        if not neutral:
            shown = f"{name}={value!r}" if isinstance(value, str | int | float) else name
            raise ValueError(f"led_generate cannot be combined with {shown}: {reason}")
    for name in _REPLACED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} has no place in led_generate: the led.top_k candidates replace it; pass LEDConfig(top_k=...)"
            )


def _neutral() -> dict[str, Any]:
    """Settings of sampling at the values that do nothing: what a model's configuration says of them does not concern LED."""
    values = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None, "top_h": None, "typical_p": 1.0}
    values |= {"epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
    known = GenerationConfig()
    return {name: value for name, value in values.items() if hasattr(known, name)}


def _check_prompt(inputs: Mapping[str, Any]) -> None:
    ids = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if not isinstance(ids, torch.Tensor):
        raise TypeError(
            "inputs must be token ids, a LongTensor (B, T), or a mapping with input_ids, as tokenizers return it"
        )
    if ids.ndim < 2:
        raise ValueError(f"token ids must be (B, T), got shape {tuple(ids.shape)}; for one prompt pass ids[None]")
    if ids.shape[0] == 0 or ids.shape[1] == 0:
        raise ValueError("the prompt is empty; give at least one token, such as the tokenizer's bos token")


def _refuse_cache(arguments: Mapping[str, Any]) -> None:
    for name in ("past_key_values", "cache"):
        if arguments.get(name) is not None:
            raise ValueError(
                f"num_return_sequences > 1 with {name}: the cache is of one sequence a prompt; repeat it beforehand"
            )


def _expanded(arguments: Mapping[str, Any], batch: int, n: int) -> dict[str, Any]:
    """Tensors with a row for each prompt, each row n times."""
    return {
        name: value.repeat_interleave(n, dim=0)
        if isinstance(value, torch.Tensor) and value.ndim and len(value) == batch
        else value
        for name, value in arguments.items()
    }
