"""Paced selection put to the test: the estimate against exact accuracies, and rollouts until an accuracy against every way to choose prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from cameraready.evidence import (
    Answer,
    Claim,
    Context,
    Cost,
    Figure,
    Spec,
    Study,
    Untested,
    above,
    always,
    average,
    below,
    difference,
    ratio,
    ratio_of_sums,
    versus_best,
    violations,
    within,
)
from cameraready.posttraining._workload import ACCEPTS, PosttrainingWorkload, open_posttraining
from cameraready.posttraining._workload import cost as cost_of_training
from cameraready.posttraining.paced.experiment import own, trials
from cameraready.posttraining.paced.experiment.arms import ARMS
from cameraready.posttraining.paced.experiment.worlds import NAMES, POOL, SMALL, place_of

PAPER = "Kim et al., 2026, arXiv:2602.12642"
TUNED, SLOW = "tuned", "slow"
#: Arms that are tried with one small learning rate for all too.
ALL_ALIKE = ("selection", "paced", "running-average", "oracle", "uniform", "dynamic", "lilo", "grpo", "grpo-selection", "grpo-dynamic")

# --- trials ----------------------------------------------------------------------------------------------------------


def open_workload(spec: Spec) -> Any:
    """A shipped pool by its name, an enumerable task, or a language model with problems."""
    return open_posttraining(spec, NAMES)


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    if workload == SMALL:
        yield {"part": "proposition"}
        for arm in ("paced", "uniform", "dynamic"):
            yield {"part": "train", "arm": arm, "rate": TUNED}
    elif workload == POOL:
        yield {"part": "proposition"}
        for arm in ARMS:
            yield {"part": "train", "arm": arm, "rate": TUNED}
        for arm in ALL_ALIKE:
            yield {"part": "train", "arm": arm, "rate": SLOW}
    else:
        # A user's enumerable task runs all arms at once; a language model one arm after the other, with one order of prompts each.
        for number in range(1 if tier == "smoke" else 3):
            for arm in own.ARMS:
                yield {"part": "own", "arm": arm, "number": number}


def prepare(workload: Any, ctx: Context) -> Mapping[str, np.ndarray]:
    return {} if isinstance(workload, PosttrainingWorkload) else place_of(workload).prepared()


def trial(workload: Any, ctx: Context, *, part: str, arm: str = "", rate: str = TUNED, number: int = 0) -> list[dict[str, Any]]:
    if isinstance(workload, PosttrainingWorkload):
        return list(own.train(workload, arm=arm, number=number, device=ctx.device, dtype=ctx.dtype))
    place = place_of(workload)
    if part == "proposition":
        return list(trials.proposition(place, ctx.prepared))
    if part == "own":  # an enumerable task holds all its runs in one trial
        return list(trials.train(place, ctx.prepared, arm=arm, rate=TUNED)) if number == 0 else []
    return list(trials.train(place, ctx.prepared, arm=arm, rate=rate))


def cost(spec: Spec, conditions: Sequence[Mapping[str, Any]], device: str, dtype: str) -> Cost:
    """Hours, memory and downloads of the trials on a language model."""
    scale = own.Scale()
    return cost_of_training(
        spec, steps=scale.steps, prompts=scale.prompts, group=scale.group, new_tokens=scale.new_tokens, lora_rank=scale.lora_rank,
        runs=len(conditions), device=device, dtype=dtype or None,
    )  # fmt: skip
