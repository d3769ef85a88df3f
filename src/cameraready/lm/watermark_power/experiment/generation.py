"""The study's real texts: calibration on half of the prompts, generation by transformers on the others, measured at every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, WatermarkingConfig

from cameraready.lm import _corpora
from cameraready.lm.watermark_power.calibrator import WatermarkCalibrator
from cameraready.lm.watermark_power.detection import exact_detect
from cameraready.lm.watermark_power.plan import Plan
from cameraready.lm.watermark_power.sampling import (
    left_padded,
    own_randomness,
    sampling_options,
    still_writing,
    written,
)
from cameraready.lm.watermark_power.theory.constraints import Infeasible
from cameraready.lm.watermark_power.theory.contexts import Contexts
from cameraready.models import LanguageModel

#: What a text must be found with.
ALPHA, POWER = 0.01, 0.9
#: Domain that calibration and the first half of the tests take, and the other one.
SEEN, OTHER = "prose", "code"
PROMPT = 24


@dataclass(frozen=True)
class Setting:
    """How much is generated: prompts to calibrate on, prompts a key to test on (of the same kind, and of the other), and new tokens of each."""

    calibration: int
    seen: int
    other: int
    tokens: int


@dataclass(frozen=True)
class Sampled:
    """Prompts of the three sets, as token ids."""

    calibration: list[list[int]]
    seen: list[list[int]]
    other: list[list[int]]


def prompts_of(lm: LanguageModel, own: Sequence[Any] | None, setting: Setting, keys: int) -> Sampled:
    """The user's prompts, half to calibrate on and half to test on; or windows of prose, and of code as the other domain.

    Raises ValueError for fewer than four prompts.
    """
    wanted = setting.seen * keys
    if own:
        ids = [lm.encode(lm.prompt(prompt[0]))[0].tolist() for prompt in own]
        if len(ids) < 4:
            raise ValueError(
                f"a calibration takes at least 4 prompts, half of them to test on, got {len(ids)}; 30 or more are better"
            )
        half = len(ids) // 2
        tests = ids[half:]
        return Sampled(ids[:half], [tests[i % len(tests)] for i in range(wanted)], [])
    start = lm.encode("x")[0].tolist()
    bos = start[:1] if start[:1] == [lm.tokenizer.bos_token_id] else []
    prose = _corpora.windows(lm.tokenizer, SEEN, length=PROMPT, n=setting.calibration + wanted, seed=0).tolist()
    code = _corpora.windows(lm.tokenizer, OTHER, length=PROMPT, n=setting.other * keys, seed=0).tolist()
    prose, code = [bos + row for row in prose], [bos + row for row in code]
    return Sampled(prose[: setting.calibration], prose[setting.calibration :], code)


# --- calibration, once a model -----------------------------------------------------------------------------------------


def calibrate(lm: LanguageModel, prompts: list[list[int]], tokens: int) -> dict[str, np.ndarray]:
    """What the model samples from on unwatermarked continuations, as arrays."""
    text = written(
        lm.model,
        None,
        prompts,
        max_new_tokens=tokens,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        seed=0,
        batch_size=24,
        top_tokens=1024,
    )
    arrays = {field.name: getattr(text.contexts, field.name) for field in fields(Contexts)}
    return {
        **arrays,
        "texts": text.texts,
        "vocab_size": np.array(text.vocab_size),
        "scored_share": np.array(text.scored_share),
        "lengths": text.lengths,
    }


def calibrator_of(prepared: Mapping[str, Any], **options: Any) -> WatermarkCalibrator:
    """From what `calibrate` returned."""
    contexts = Contexts(*(np.asarray(prepared[field.name]) for field in fields(Contexts)))
    made = WatermarkCalibrator(
        contexts, texts=np.asarray(prepared["texts"]), vocab_size=int(prepared["vocab_size"]), **options
    )
    made.scored_share, made.lengths = float(prepared["scored_share"]), np.asarray(prepared["lengths"])
    return made


def usual_lengths(calibrator: WatermarkCalibrator) -> tuple[int, int]:
    """Distinct scored n-grams of a middling text, and what nine in ten texts exceed."""
    low, middle = np.quantile(calibrator.lengths, [0.1, 0.5])
    return max(1, round(middle)), max(1, int(low))


def points(
    calibrator: WatermarkCalibrator, length: int, shortest: int, published: tuple[float, float]
) -> dict[str, Plan]:
    """The six watermarks that are compared, by arm; `published` is (gamma, delta) by the authors' rule.

    Raises Infeasible where the model's text cannot carry the power that is asked for.
    """
    task: dict[str, Any] = {"alpha": ALPHA, "length": length, "shortest": shortest}
    default = calibrator.predict(0.25, 2.0, alpha=ALPHA, length=length, shortest=shortest, kept=0.95)
    reachable = min(max(default.least_power, 2 * ALPHA), 0.99)
    return {
        "calibrated": calibrator.minimise_distortion(power=POWER, **task),
        "closed-form": calibrator.predict(*published, alpha=ALPHA, length=length),
        "markllm": calibrator.predict(0.5, 2.0, alpha=ALPHA, length=length),
        "lm-watermarking": default,
        "equal-kl": calibrator.maximise_power(max_kl=default.kl, **task),
        "equal-power": calibrator.minimise_distortion(power=reachable, **task),
    }


# --- generation -------------------------------------------------------------------------------------------------------


class Measured(LogitsProcessor):
    """transformers' own watermark, with what it did to each distribution: KL and the change of expected surprisal, in nats."""

    def __init__(self, watermark: LogitsProcessor) -> None:
        self.watermark = watermark
        self.kl: list[torch.Tensor] = []
        self.surprisal: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        after = self.watermark(input_ids, scores)
        before_log, after_log = torch.log_softmax(scores.float(), -1), torch.log_softmax(after.float(), -1)
        self.kl.append((after_log.exp() * (after_log - before_log)).sum(-1).cpu())
        self.surprisal.append(((before_log.exp() - after_log.exp()) * before_log).sum(-1).cpu())
        return after


class MeasuringConfig(WatermarkingConfig):
    """A watermarking config whose processor is wrapped in `Measured`; it generates the same text as the config itself."""

    def __init__(self, config: WatermarkingConfig) -> None:
        super().__init__(**config.to_dict())
        self.found: Measured | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> MeasuringConfig:
        return self

    def construct_processor(self, vocab_size: int, device: Any) -> Measured:
        self.found = Measured(super().construct_processor(vocab_size, device))
        return self.found


def generate(
    lm: LanguageModel, plan: Plan, prompts: list[list[int]], tokens: int, *, key: int, seed: int
) -> dict[str, np.ndarray]:
    """Watermarked continuations of `prompts` under one key, and what was measured of each; arrays (prompts,).

    `detected` at `ALPHA` by the exact test, `scored` tokens, `green` ones, mean `kl` and `surprisal` per token.
    """
    options = sampling_options(lm.model, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens)
    batch, mask = left_padded(prompts, options.pad_token_id, lm.model.device)
    config = plan.to_transformers(hashing_key=key)
    measuring = MeasuringConfig(config)
    options.watermarking_config = measuring
    with own_randomness(lm.model, seed), torch.no_grad():
        out = lm.model.generate(batch, attention_mask=mask, generation_config=options).cpu()
    new = out[:, batch.shape[1] :]
    alive = still_writing(new, options.eos_token_id)
    texts = [
        torch.cat([out[row, batch.shape[1] - 1 : batch.shape[1]], new[row][alive[row]]]).numpy()
        for row in range(len(new))
    ]
    found = exact_detect(texts, config, plan.vocab_size, skip=1, device=str(lm.model.device))
    assert measuring.found is not None
    weight = alive.double() / alive.double().sum(dim=1, keepdim=True)
    kl, surprisal = (torch.stack(values, dim=1).double() for values in (measuring.found.kl, measuring.found.surprisal))
    return {
        "detected": found.is_watermarked(ALPHA),
        "scored": found.scored,
        "green": found.green,
        "kl": (kl * weight).sum(dim=1).numpy(),
        "surprisal": (surprisal * weight).sum(dim=1).numpy(),
    }


def measure(
    lm: LanguageModel,
    calibrator: WatermarkCalibrator,
    plan: Plan,
    sampled: Sampled,
    setting: Setting,
    block: int,
    shortest: int,
    *,
    few: bool,
) -> dict[str, Any]:
    """One point under one key on the tests of both domains: what was predicted and what was found.

    `few` takes a third of the prompts. Power is predicted at the lengths that the texts turned out to have; `power_stated` is that of texts of at least `shortest`.
    """
    seen = sampled.seen[block * setting.seen : (block + 1) * setting.seen]
    other = sampled.other[block * setting.other : (block + 1) * setting.other]
    if few:  # the first third, on the calibration's domain alone
        seen, other = seen[: max(1, len(seen) // 3)], []
    found = generate(lm, plan, seen + other, setting.tokens, key=15_485_863 + 7_919 * (block + 1), seed=10_007 + block)
    lengths, where = np.unique(np.maximum(found["scored"][: len(seen)], 1), return_inverse=True)
    powers = np.array(
        [calibrator.predict(plan.gamma, plan.delta, alpha=ALPHA, length=int(length)).power for length in lengths]
    )[where]
    first, second = slice(0, len(seen)), slice(len(seen), None)
    stated = found["detected"][first][found["scored"][first] >= shortest]
    row = {
        "gamma": plan.gamma,
        "delta": plan.delta,
        "power": float(found["detected"][first].mean()),
        "power_stated": float(stated.mean()) if len(stated) else None,
        "predicted": float(powers.mean()),
        "gap": float(found["detected"][first].mean() - powers.mean()),
        "green_gap": float(found["green"][first].sum() / max(found["scored"][first].sum(), 1) - plan.green_rate),
        "kl": float(found["kl"][first].mean()),
        "kl_predicted": plan.kl,
        "surprisal": float(found["surprisal"][first].mean()),
        "surprisal_gap": float(found["surprisal"][first].mean() - plan.log_perplexity_shift),
        "scored": float(found["scored"][first].mean()),
    }
    if other:
        row["power_elsewhere"] = float(found["detected"][second].mean())
        row["kl_elsewhere"] = float(found["kl"][second].mean())
    return row


def advice(plan: Plan) -> str:
    """A plan as the first line of a report names it."""
    return f"gamma {plan.gamma:.2f} and delta {plan.delta:.2f} for texts of {plan.shortest} scored tokens or more"


__all__ = [
    "ALPHA",
    "POWER",
    "Infeasible",
    "Setting",
    "advice",
    "calibrate",
    "calibrator_of",
    "measure",
    "points",
    "prompts_of",
]
