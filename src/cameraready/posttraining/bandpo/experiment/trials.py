"""What the study's trials measure, by part: the census, room and cost of bounds; training on enumerable tasks; steps of a language model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from cameraready.evidence import Context
from cameraready.posttraining import _testbed
from cameraready.posttraining._workload import PosttrainingWorkload, is_enumerable
from cameraready.posttraining.bandpo.bounds import band_bounds
from cameraready.posttraining.bandpo.experiment import exactness, training
from cameraready.posttraining.bandpo.experiment.arms import ARMS, Own
from cameraready.posttraining.bandpo.experiment.bandit import Bandits, played, targets
from cameraready.posttraining.bandpo.experiment.training import Field

BOUNDS, BANDIT, STRATEGIES, ANSWERS = "bounds", "bandit", "two-strategies", "many-answers"
QWEN = "qwen2.5-coder-0.5b-instruct"
#: Of the paper's models the one that a single GPU trains.
LARGE = "Qwen/Qwen2.5-3B-Instruct"
#: The arms that train a language model; TRL's clip through the same trainer is the other.
ON_MODELS = ("band-kl", "clip")
#: Of the timed loss step: 64 x 1,024 tokens.
STEPS = {"sequences": 64, "length": 1024, "vocabulary": 1024}
#: A run on the user's own language model.
OWN_RUN: dict[str, Any] = {"steps": 20, "prompts": 4, "group": 8, "new_tokens": 64, "iterations": 2, "lora_rank": 8}
#: A run on one GPU: as `_runs.recipe`, with four optimizer steps on each batch.
FULL_RUN: dict[str, Any] = {
    "steps": 300,
    "prompts": 16,
    "group": 16,
    "new_tokens": 1024,
    "iterations": 4,
    "micro_batch": 8,
    "checkpointing": True,
}
#: Losses that differ from another one only over several tokens.
NOT_IN_BANDITS = ("dapo", "gspo")
AT_USUAL = ("band-kl", "clip", "clip-higher")

SHIPPED: dict[str, Any] = {
    BOUNDS: lambda: BOUNDS,
    BANDIT: lambda: Bandits(seeds=12, rounds=60, tuning_rounds=10),
    "bandit-small": lambda: Bandits(seeds=2, rounds=10, tuning_rounds=4),
    STRATEGIES: lambda: Field(
        _testbed.two_strategies(128, skill=(0.25, 0.5)), seeds=12, rounds=48, tuning_rounds=10, warm_up=120
    ),
    "two-strategies-small": lambda: Field(
        _testbed.two_strategies(8, digits=2, routes=2, features=4), seeds=2, rounds=4, tuning_rounds=2, warm_up=10
    ),
    ANSWERS: lambda: Field(_testbed.many_answers(128, base=6), seeds=12, rounds=48, tuning_rounds=10, warm_up=120),
}


def opened(found: Any) -> Any:
    """The user's own enumerable task as a field of twelve seeds; everything else as it is."""
    return Field(found, seeds=12, rounds=48, tuning_rounds=10, warm_up=120) if is_enumerable(found) else found


def planned(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    smoke = tier == "smoke"
    if workload == BOUNDS:
        for block in range(1 if smoke else exactness.BLOCKS):
            yield {"part": "census", "block": block, "count": 6 if smoke else 100}
            yield {"part": "room", "block": block}
        yield {"part": "curves"}
        yield {
            "part": "cost",
            **(STEPS if not smoke else {"sequences": 4, "length": 64, "vocabulary": 64}),
            "blocks": 1 if smoke else 12,
        }
    elif workload in (BANDIT, "bandit-small"):
        for arm in ARMS:
            if arm not in NOT_IN_BANDITS:
                yield {"part": "train", "arm": arm}
        for arm in AT_USUAL:
            yield {"part": "usual", "arm": arm}
    elif workload in SHIPPED:
        for arm in ("band-kl", "clip", "gspo", "cispo") if smoke else ARMS:
            yield {"part": "train", "arm": arm}
        for arm in AT_USUAL:
            yield {"part": "usual", "arm": arm}
        for arm in ("band-kl", "clip"):
            yield {"part": "gentle", "arm": arm}
    elif workload == "own":
        # What of these a workload is for is known once it is open: `train` and `usual` give a language model's steps and nothing.
        for arm in ARMS:
            yield {"part": "train", "arm": arm}
        for arm in AT_USUAL:
            yield {"part": "usual", "arm": arm}
    else:
        for arm in ON_MODELS[:1] if workload == QWEN else ON_MODELS:
            yield {"part": "model", "arm": arm}


def prepared(workload: Any) -> dict[str, np.ndarray]:
    """Warmed-up policies and the KL that all arms are brought to."""
    if isinstance(workload, Field):
        return training.prepared(workload)
    if isinstance(workload, Bandits):
        return targets(workload)
    return {}


# --- bounds ----------------------------------------------------------------------------------------------------------


def census(workload: Any, ctx: Context, *, block: int, count: int) -> Iterator[dict[str, Any]]:
    yield from exactness.census(block, count)


def room(workload: Any, ctx: Context, *, block: int) -> Iterator[dict[str, Any]]:
    yield from exactness.rooms(block)


def curves(workload: Any, ctx: Context) -> Iterator[dict[str, Any]]:
    """Upper bounds at delta = 0.05, eps = 0.2 and 0.28, by old probability."""
    p = torch.logspace(-4, -0.002, 33, dtype=torch.float64)
    for arm in ("band-kl", "band-tv", "band-chi2"):
        _, upper = band_bounds(p.log(), divergence=arm.removeprefix("band-"))
        for at, bound in zip(p.tolist(), upper.tolist(), strict=True):
            yield {"run": 0, "arm": arm, "p_old": at, "bound": bound}
    for arm, bound in (("clip", 1.2), ("clip-higher", 1.28)):
        for at in p.tolist():
            yield {"run": 0, "arm": arm, "p_old": at, "bound": bound}


def cost(
    workload: Any, ctx: Context, *, sequences: int, length: int, vocabulary: int, blocks: int
) -> Iterator[dict[str, Any]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from exactness.step_times(blocks, sequences, length, vocabulary, rounds=2)
    finally:
        torch.set_num_threads(before)


# --- training --------------------------------------------------------------------------------------------------------


def train(workload: Any, ctx: Context, *, arm: str) -> list[dict[str, Any]]:
    """One arm, all its seeds, at the KL that all arms are brought to; of a language model some steps, for band and clip."""
    if isinstance(workload, PosttrainingWorkload):
        return model(workload, ctx, arm=arm) if arm in ON_MODELS else []
    chosen = selected(ctx, arm)
    if isinstance(workload, Bandits):
        return played(workload, chosen, float(ctx.prepared["target"]))
    return training.trained(workload, chosen, ctx.prepared)


def selected(ctx: Context, arm: str) -> Any:
    """A shipped arm, or the user's loss as one."""
    chosen = ctx.select(ARMS)[arm]
    return Own(chosen) if arm in ctx.own else chosen


def usual(workload: Any, ctx: Context, *, arm: str) -> list[dict[str, Any]]:
    """One arm at its usual setting, at whatever KL; ends only."""
    if isinstance(workload, PosttrainingWorkload):
        return []
    chosen = selected(ctx, arm)
    if isinstance(workload, Bandits):
        rows = played(workload, chosen, float(ctx.prepared["target"]), multiple=1.0)
    else:
        rows = training.trained(workload, chosen, ctx.prepared, multiple=1.0)
    return [row for row in rows if row["kind"] == "end"]


def gentle(workload: Field, ctx: Context, *, arm: str) -> list[dict[str, Any]]:
    """One arm where ratios hardly leave 1."""
    return training.gentle(workload, selected(ctx, arm), ctx.prepared)


# --- a language model ------------------------------------------------------------------------------------------------


def model(workload: PosttrainingWorkload, ctx: Context, *, arm: str) -> list[dict[str, Any]]:
    """Steps of GRPO by TRL, the clip its own or the band; a demonstration of five on the packaged model, twenty on the user's problems."""
    from cameraready.posttraining import _runs
    from cameraready.posttraining.bandpo import BandGRPOTrainer

    def made(language_model: Any, tokenizer: Any, args: Any, dataset: Any, reward_funcs: Any) -> Any:
        return BandGRPOTrainer(
            model=language_model,
            processing_class=tokenizer,
            args=args,
            train_dataset=dataset,
            reward_funcs=reward_funcs,
            divergence="kl" if arm == "band-kl" else None,
        )

    lm = workload.model(ctx.device, ctx.dtype)
    if workload.name == QWEN and not ctx.is_own_workload:
        return [_shown(row) for row in _runs.demonstration(lm, trainer=made, seed=ctx.seed)]
    shape = dict(OWN_RUN if ctx.is_own_workload else FULL_RUN)
    if workload.is_tiny:
        shape |= {"steps": 2, "prompts": 2, "group": 4, "lora_rank": 0, "new_tokens": 8}
    wanted = shape["prompts"] * shape["steps"]
    if workload.prompts is not None:  # the user's are gone round again where they are few
        wanted = min(wanted, len({prompt for prompt, _ in workload.prompts}))
    problems, _ = workload.split(lm, train=wanted, test=0, seed=ctx.seed)
    steps = _runs.grpo_run(lm, problems, trainer=made, max_new_tokens=shape.pop("new_tokens"), seed=ctx.seed, **shape)
    return [_shown(row) for row in steps]


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    kept = {
        "step": "optimizer_step",
        "reward": "reward",
        "entropy": "entropy_now",
        "clip_low": "clip_down",
        "clip_high": "clip_up",
        "kl": "kl_now",
    }
    return {
        "run": 0,
        "kind": "step",
        **{to: None if row[name] is None else float(row[name]) for name, to in kept.items()},
    }
