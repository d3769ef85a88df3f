"""What one trial of the study does, by part; and what is computed once for a workload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from cameraready.evidence import Context, Cost, Spec
from cameraready.lm._workload import LMWorkload
from cameraready.lm.watermark_power.calibrator import WatermarkCalibrator
from cameraready.lm.watermark_power.experiment import synthetic
from cameraready.lm.watermark_power.experiment.synthetic import FAMILIES, GRID, POSITIONS, TEXTS, VOCAB, Family
from cameraready.lm.watermark_power.plan import Plan
from cameraready.lm.watermark_power.theory.constraints import Infeasible
from cameraready.lm.watermark_power.theory.tails import normal_threshold, size, threshold_count

ALPHA, POWER = 1e-3, 0.9
#: Prompts that a real model is calibrated on.
CALIBRATION = 24
#: New tokens of a text.
TOKENS = 48


def prepared(workload: Any, device: str, dtype: str) -> dict[str, np.ndarray]:
    """Green masses of a family, windows of human text, or the distributions that a model samples from."""
    if workload in FAMILIES:
        p = synthetic.distributions(workload)
        return {"masses": synthetic.list_masses(p, synthetic.GAMMAS, synthetic.LISTS, FAMILIES.index(workload))}
    if isinstance(workload, LMWorkload):
        from cameraready.lm.watermark_power.experiment import generation

        lm = opened(workload, device, dtype)
        setting = setting_of(workload)
        sampled = generation.prompts_of(lm, workload.prompts, setting, keys=1)
        return generation.calibrate(lm, sampled.calibration, setting.tokens)
    if workload == "human-text":
        from cameraready.lm.watermark_power.experiment import human
        from cameraready.models import open_model

        lm = open_model(TOKENIZER)
        return {
            "windows": human.windows_of(lm.tokenizer, 12_000).numpy(),
            "vocab_size": np.array(lm.model.config.get_text_config().vocab_size),
        }
    return {}


#: Whose tokens human text is tested in.
TOKENIZER = "qwen2.5-coder-0.5b-instruct"


def opened(workload: LMWorkload, device: str, dtype: str) -> Any:
    """The model; the shipped ones in bfloat16, as they would be served, unless another type is asked for."""
    shipped = workload.spec.kind == "shipped" and not workload.is_tiny
    return workload.model(device, dtype or ("bfloat16" if shipped else None))


def setting_of(workload: LMWorkload) -> Any:
    """How much is generated on this model."""
    from cameraready.lm.watermark_power.experiment.generation import Setting

    if workload.is_tiny:
        return Setting(4, 2, 1, 8)
    return Setting(CALIBRATION, 18, 0 if workload.prompts else 6, TOKENS)


# --- simulated texts -------------------------------------------------------------------------------------------------


def grid(workload: str, ctx: Context, *, length: int, texts: int) -> Iterator[dict[str, Any]]:
    """Predicted and simulated power and divergence at thirty points; calibration and texts share their distributions."""
    family = Family(workload, synthetic.distributions(workload), ctx.prepared["masses"])
    calibrator = WatermarkCalibrator.from_probs(family.probabilities, texts=family.texts)
    closed = WatermarkCalibrator.high_entropy(VOCAB)
    for number, (gamma, delta) in enumerate(GRID):
        plan = calibrator.predict(gamma, delta, alpha=ALPHA, length=length)
        greens, kl = synthetic.simulate(
            family, np.arange(TEXTS), gamma, delta, length=length, n=texts, seed=1_000 * length + number
        )
        # Each prediction is held against its own test.
        for arm, said in (
            ("calibrated", plan),
            ("closed-form", closed.predict(gamma, delta, alpha=ALPHA, length=length, test="normal")),
            ("normal", calibrator.predict(gamma, delta, alpha=ALPHA, length=length, test="normal")),
        ):
            found = float((greens >= said.threshold_count).mean())
            error = np.sqrt(said.power * (1 - said.power) / texts)
            yield {
                "arm": arm,
                "block": f"{gamma:g}-{delta:g}-{length}",
                "gamma": gamma,
                "delta": delta,
                "power": found,
                "predicted": said.power,
                "covered": float(abs(found - said.power) <= 2 * error + 1 / texts),
                "kl": float(kl.mean()),
                "kl_ratio": float(kl.mean()) / said.kl,
            }


def choice(workload: str, ctx: Context, *, split: int, length: int, texts: int) -> Iterator[dict[str, Any]]:
    """Watermarks chosen on half of the texts, tried on the other half."""
    family = Family(workload, synthetic.distributions(workload), ctx.prepared["masses"])
    order = np.random.default_rng([ctx.seed, split, 4]).permutation(TEXTS)
    mine, theirs = order[: TEXTS // 2], order[TEXTS // 2 :]
    labels = np.repeat(np.arange(len(mine)), POSITIONS)
    calibrator = WatermarkCalibrator.from_probs(family.probabilities[family.rows(mine).ravel()], texts=labels)
    shortest = round(0.9 * length)
    seeds = iter(range(1_000 * split, 1_000 * (split + 1)))

    def on_others(gamma: float, delta: float, **options: Any) -> dict[str, float]:
        return tried(family, theirs, gamma, delta, n=texts, seed=next(seeds), **{"length": length, **options})

    plans = chosen(calibrator, length, shortest)
    grid_points = [{"gamma": gamma, **on_others(gamma, delta)} for gamma, delta in GRID]
    for arm, plan in plans.items():
        found = on_others(plan.gamma, plan.delta)
        row = {
            "arm": arm,
            "block": f"split-{split}",
            "gamma": plan.gamma,
            "delta": plan.delta,
            "power": found["power"],
            "kl": found["kl"],
            "predicted": plan.power,
            "power_worst": on_others(plan.gamma, plan.delta, length=shortest, kept=0.95)["power"],
            "dominated": sum(dominates(other, found, 2.0) for other in grid_points),
            "excess": excess(found, grid_points),
        }
        if arm == "nominal":
            row |= laws(calibrator, plan)
        if arm == "calibrated":
            values = synthetic.null(
                plan.to_transformers(hashing_key=15_485_863 + split), length=length, n=texts, seed=split
            )
            row["false_alarms_per_alpha"] = float((values <= 0.05).mean()) / 0.05
        yield row


def chosen(calibrator: WatermarkCalibrator, length: int, shortest: int) -> dict[str, Plan]:
    """The watermarks of a split, by arm."""
    task: dict[str, Any] = {"alpha": ALPHA, "length": length, "gammas": synthetic.GAMMAS}
    exactly: dict[str, Any] = {"shortest": length, "kept": 1.0}
    plans = {
        "calibrated": calibrator.minimise_distortion(power=POWER, **task),
        "nominal": calibrator.minimise_distortion(power=POWER, **task, **exactly),
        "normal": calibrator.minimise_distortion(power=POWER, **task, **exactly, test="normal"),
        "closed-form": calibrator.predict(*published(ALPHA, length, VOCAB, gamma=0.92), alpha=ALPHA, length=length),
    }
    for name, gamma in (("markllm", 0.5), ("lm-watermarking", 0.25)):
        default = calibrator.predict(gamma, 2.0, alpha=ALPHA, length=length, shortest=shortest, kept=0.95)
        power = min(max(default.least_power, 2 * ALPHA), 0.99)
        plans[name] = default
        plans[f"equal-power-{name}"] = calibrator.minimise_distortion(power=power, **task)
        plans[f"equal-kl-{name}"] = calibrator.maximise_power(max_kl=default.kl, **task)
    return plans


def published(alpha: float, length: int, vocab_size: int | None, gamma: float | None = None) -> tuple[float, float]:
    """(gamma, delta) by the authors' rule: a share just below ``n / (n + z^2)``, and the bias whose divergence is that share's -log.

    Their solver steps down by 0.0024 at alpha = 0.05 and 50 tokens; `gamma` may be another share below.
    """
    z = float(stats.norm.isf(alpha))
    base = length / (length + z**2)
    share = base - 0.0024 if gamma is None else gamma
    plan = WatermarkCalibrator.high_entropy(vocab_size).maximise_power(
        alpha=alpha, length=length, max_kl=-float(np.log(base)), gammas=[share]
    )
    return share, plan.delta


def tried(
    family: Family, texts: np.ndarray, gamma: float, delta: float, *, length: int, n: int, seed: int, kept: float = 1.0
) -> dict[str, float]:
    """Power under the exact test and divergence, with their standard errors."""
    greens, kl = synthetic.simulate(family, texts, gamma, delta, length=length, n=n, seed=seed, kept=kept)
    power = float((greens >= threshold_count(ALPHA, length, int(gamma * VOCAB) / VOCAB)).mean())
    return {
        "power": power,
        "power_error": float(np.sqrt(power * (1 - power) / n) + 0.5 / n),
        "kl": float(kl.mean()),
        "kl_error": float(kl.std() / np.sqrt(n)),
    }


def dominates(other: Mapping[str, float], one: Mapping[str, float], errors: float) -> bool:
    """Whether `other` has more power and less divergence than `one`, each by `errors` standard errors of the difference."""
    more = other["power"] - one["power"] > errors * np.hypot(other["power_error"], one["power_error"])
    less = one["kl"] - other["kl"] > errors * np.hypot(other["kl_error"], one["kl_error"])
    return bool(more and less)


def excess(one: Mapping[str, float], points: Sequence[Mapping[str, float]]) -> float | None:
    """The divergence of `one` over the least with which some gamma's curve through `points` has its power; None where no curve has it."""
    needed = []
    for gamma in {point["gamma"] for point in points}:
        curve = sorted((point["kl"], point["power"]) for point in points if point["gamma"] == gamma)
        kl, power = np.array(curve).T
        between = [i for i in range(len(kl) - 1) if power[i] < one["power"] <= power[i + 1]]
        if between:
            # Logarithm of the divergence against the normal score of the power: nearly a line.
            i = between[0]
            low, at, high = stats.norm.ppf(np.clip([power[i], one["power"], power[i + 1]], 1e-3, 1 - 1e-3))
            share = (at - low) / max(high - low, 1e-9)
            needed.append(np.exp(np.log(kl[i]) + share * np.log(kl[i + 1] / kl[i])))
    return float(one["kl"] / min(needed)) if needed else None


def laws(calibrator: WatermarkCalibrator, plan: Plan) -> dict[str, float]:
    """How the divergence at equal power spreads over gamma, and the small-bias law at two biases."""
    small = [point.kl for point in plan.ridge if point.gamma <= 0.75]
    everywhere = [point.kl for point in plan.ridge]
    row = {"spread_small": max(small) / min(small), "spread_all": max(everywhere) / min(everywhere)}
    collision = float(calibrator.contexts.collision.mean())
    spread = (1 - collision) * VOCAB / (VOCAB - 1)
    for name, delta in (("law_small", 0.2), ("law_two", 2.0)):
        found = []
        for gamma in (0.1, 0.25, 0.5):
            said = calibrator.predict(gamma, delta, alpha=ALPHA, length=plan.length)
            signal = (said.green_rate - said.green_share) ** 2 / (said.green_share * (1 - said.green_share))
            found.append(signal / (2 * said.kl * spread))
        row[name] = float(np.mean(found))
    return row


def formulas(workload: str, ctx: Context) -> Iterator[dict[str, Any]]:
    """The size that tests really have at the gamma of the closed form, ``n / (n + z^2)``, and at the calibrator's choice."""
    for alpha in (0.05, 0.01, 1e-3, 1e-4):
        for length in (50, 100, 200):
            theirs, _ = published(alpha, length, None)
            mine = WatermarkCalibrator.high_entropy().minimise_distortion(alpha=alpha, power=0.95, length=length)
            block = f"{alpha:g}-{length}"
            normal = normal_threshold(alpha, length, theirs)
            yield {
                "arm": "closed-form",
                "block": block,
                "gamma": theirs,
                "size_per_alpha": size(normal, length, theirs) / alpha,
            }
            yield {"arm": "calibrated", "block": block, "gamma": mine.gamma, "size_per_alpha": mine.size / alpha}


# --- human text and language models --------------------------------------------------------------------------------------


def markllm(workload: str, ctx: Context, *, texts_number: int) -> Iterator[dict[str, Any]]:
    """Green tokens and z-scores by MarkLLM's own detector and by ours, every token counted."""
    import sys

    from cameraready.lm.watermark_power.detection import exact_detect

    remote = ctx.peer("markllm")
    places = [place for place in sys.path if place.endswith("-packages")]
    number = texts_number
    scheme, width = ("time", "additive", "skip", "min")[number % 4], 1 + number // 4
    plan = WatermarkCalibrator.high_entropy(VOCAB).predict(0.3, 2.0, alpha=ALPHA, length=60 - width)
    config = {**plan.to_markllm(hash_key=15_485_863 + 2 * number, prefix_length=width), "f_scheme": scheme}
    texts = np.random.default_rng([ctx.seed, number]).integers(VOCAB, size=(4, 60))
    theirs = remote.score(places, config, VOCAB, texts.tolist())
    mine = exact_detect(texts, config, VOCAB, count_repeats=True)
    same = (mine.green == np.array(theirs["green"])) & np.isclose(mine.z_score, theirs["z"], rtol=1e-9)
    yield {"arm": "kgw", "block": f"texts-{number}", "scheme": scheme, "width": width, "differ": int((~same).sum())}


def human(workload: str, ctx: Context, *, key_number: int, texts: int) -> Iterator[dict[str, Any]]:
    """False alarms under one key on its own thousand windows."""
    import torch

    from cameraready.lm.watermark_power.experiment import human as null

    rows = ctx.prepared["windows"][key_number * texts : (key_number + 1) * texts]
    windows = torch.from_numpy(np.array(rows))
    for row in null.false_alarms(windows, int(ctx.prepared["vocab_size"]), 15_485_863 + 7_919 * (key_number + 1)):
        yield {**row, "block": f"key-{key_number}"}


def real(workload: LMWorkload, ctx: Context, *, key_number: int) -> Iterator[dict[str, Any]]:
    """Six watermarks under one key on prompts of their own."""
    from cameraready.lm.watermark_power.experiment import generation

    lm = opened(workload, ctx.device, ctx.dtype)
    setting = setting_of(workload)
    sampled = generation.prompts_of(lm, workload.prompts, setting, keys=10)
    calibrator = generation.calibrator_of(ctx.prepared)
    length, shortest = generation.usual_lengths(calibrator)
    if workload.is_tiny:
        # Eight tokens carry no power: a smoke run shows that everything works.
        plans = {
            arm: calibrator.predict(gamma, 2.0, alpha=generation.ALPHA, length=length)
            for arm, gamma in (("calibrated", 0.6), ("lm-watermarking", 0.25), ("equal-power", 0.5), ("equal-kl", 0.7))
        }
    else:
        try:
            rule = published(generation.ALPHA, length, calibrator.vocab_size)
            plans = generation.points(calibrator, length, shortest, rule)
        except Infeasible as error:
            raise Infeasible(f"{workload.name} cannot be watermarked to order on these prompts: {error}") from error
    found = {
        arm: generation.measure(
            lm,
            calibrator,
            plan,
            sampled,
            setting,
            key_number,
            shortest,
            few=arm != "calibrated" and not workload.is_tiny,
        )
        for arm, plan in plans.items()
    }
    setting_text = generation.advice(plans["calibrated"])
    for arm, row in found.items():
        yield {
            "arm": arm,
            "block": f"key-{key_number}",
            **row,
            "kl_ratio": row["kl"] / row["kl_predicted"],
            "setting": setting_text,
        }


def ready(workload: Any) -> WatermarkCalibrator:
    """A calibrator on the workload's own text."""
    if isinstance(workload, LMWorkload):
        from cameraready.lm.watermark_power.experiment import generation

        arrays = prepared(workload, "cpu", "")
        return generation.calibrator_of(arrays)
    if workload in FAMILIES:
        p = synthetic.distributions(workload)
        return WatermarkCalibrator.from_probs(p, texts=np.repeat(np.arange(TEXTS), POSITIONS))
    return WatermarkCalibrator.high_entropy()


def cost(spec: Spec, conditions: Sequence[Mapping[str, Any]], device: str, dtype: str) -> Cost:
    """Of calibration and of every watermark under every key."""
    from cameraready.models.cost import cost_of

    name = spec.value if spec.kind == "value" else f"hf:{spec.name}" if spec.kind == "hf" else spec.path or spec.name
    sequences = CALIBRATION + (18 + 6 + 5 * 6) * len(conditions)
    found = cost_of(
        name,
        prompt_tokens=32,
        new_tokens=TOKENS,
        batch=8,
        passes=-(-sequences // 8),
        device=device,
        dtype=dtype or None,
    )
    return Cost(
        found.hours,
        found.memory_gib,
        found.downloads,
        (
            *found.notes,
            f"{sequences} continuations of {TOKENS} tokens each, in batches of 6 to 24; your prompts may be longer than the 32 tokens assumed",
        ),
    )
