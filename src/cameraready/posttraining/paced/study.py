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
    average,
    below,
    difference,
    ratio_of_sums,
    versus_best,
)
from cameraready.posttraining._workload import ACCEPTS, PosttrainingWorkload, open_posttraining
from cameraready.posttraining._workload import cost as cost_of_training
from cameraready.posttraining.paced.experiment import own, trials
from cameraready.posttraining.paced.experiment.arms import ARMS
from cameraready.posttraining.paced.experiment.claims import ALIKE, AT_BEST, COURSE, OURS, SLOW, TUNED
from cameraready.posttraining.paced.experiment.worlds import NAMES, POOL, SMALL, place_of

PAPER = "Kim et al., 2026, arXiv:2602.12642"
#: Arms that are tried with one small learning rate for all too.
ALL_ALIKE = (
    "selection",
    "paced",
    "running-average",
    "oracle",
    "uniform",
    "dynamic",
    "lilo",
    "grpo",
    "grpo-selection",
    "grpo-dynamic",
)

# --- trials ----------------------------------------------------------------------------------------------------------


def open_workload(spec: Spec) -> Any:
    """A shipped pool by its name, an enumerable task, or a language model with problems."""
    workload = open_posttraining(spec, NAMES)
    if isinstance(workload, PosttrainingWorkload):
        own.check_pool(workload)
    return workload


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
        # Of a user's enumerable task each trial holds a third of the runs; of a language model one.
        for number in range(1 if tier == "smoke" else 3):
            for arm in ("paced", "selection", "uniform") if tier == "smoke" else own.ARMS:
                yield {"part": "own", "arm": arm, "rate": TUNED, "number": number}


def prepare(workload: Any, ctx: Context) -> Mapping[str, np.ndarray]:
    return {} if isinstance(workload, PosttrainingWorkload) else place_of(workload).prepared()


def trial(
    workload: Any, ctx: Context, *, part: str, arm: str = "", rate: str = TUNED, number: int = 0
) -> list[dict[str, Any]]:
    if isinstance(workload, PosttrainingWorkload):
        if arm in ctx.own:
            raise ValueError(
                "an estimate of your own is compared on the shipped pool or an enumerable task; leave --on out for it"
            )
        return list(own.train(workload, arm=arm, number=number, device=ctx.device, dtype=ctx.dtype))
    place = place_of(workload)
    if part == "proposition":
        return list(trials.proposition(place, ctx.prepared))
    if part == "own":
        place = place.part(number)
    return list(trials.train(place, ctx.prepared, arm=arm, rate=rate, own=ctx.own.get(arm)))


def cost(spec: Spec, conditions: Sequence[Mapping[str, Any]], device: str, dtype: str) -> Cost:
    """Hours, memory and downloads of the trials on a language model."""
    scale = own.Scale()
    return cost_of_training(
        spec, steps=scale.steps, prompts=scale.prompts, group=scale.group, new_tokens=scale.new_tokens, lora_rank=scale.lora_rank,
        runs=len(conditions), device=device, dtype=dtype or None,
    )  # fmt: skip


# --- claims ----------------------------------------------------------------------------------------------------------

NOTES = f"{PAPER}, as summarised by others"
REDUCED: dict[str, Any] = {"scope": "reduced", "source": PAPER, "workloads": [POOL]}
#: The method in other forms, and the ground truth: no competitors.
VARIANTS = (
    "selection",
    "grpo-selection",
    "paced-weighted",
    "paced-naive",
    "uniform-replay",
    "uniform-replay-weighted",
    "oracle",
)
#: Ways to choose prompts that pay for what they reject.
FILTERS = ("dynamic", "lilo", "grpo-dynamic")

STUDY = Study(
    open=open_workload,
    workloads={"smoke": [SMALL, "tiny-llama"], "desk": [POOL], "full": [POOL]},
    plan=plan,
    trial=trial,
    prepare=prepare,
    method="paced",
    arms="arm",
    block="run",
    libraries={"*": ["numpy", "scipy", "torch"]},
    accepts=ACCEPTS,
    takes=("data", "tasks"),
    cost=cost,
    own_arm="a callable (embeddings (P, F), seed) -> an estimate of difficulty, with update(prompt_ids (B,), rewards (B, G)) after each batch and accuracy() -> (P,)",
    covers="initial weights, choice of prompts and sampling of answers (16 seeds)",
    covers_own="seeds on an enumerable task; on a language model three orders of your prompts",
    claims=[
        Claim(
            1,
            part="a",
            paper="beta times the learned log-partition tracks the present accuracy of a prompt with small error.",
            tested="Mean absolute error over 300 prompts, exact accuracies, while they are learned by PACED with small steps: below 0.1.",
            measure=average("mae", "paced"),
            rule=below(0.1),
            where=ALIKE,
            **REDUCED,
        ),
        Claim(
            1,
            part="b",
            paper="The same.",
            tested="The same where prompts are chosen at random, so that all are visited.",
            measure=average("mae", "uniform"),
            rule=below(0.1),
            where=ALIKE,
            **REDUCED,
        ),
        Claim(
            1,
            part="c",
            paper="The term that is left out, beta KL(old || new), stays below 4e-3.",
            tested="Mean of beta KL over a step's two updates, small steps: below 4e-3.",
            measure=average("beta_kl", "paced"),
            rule=below(4e-3),
            where=ALIKE,
            **REDUCED,
        ),
        Claim(
            1,
            part="d",
            paper="The same.",
            tested="The same at the learning rate that needs the fewest rollouts.",
            measure=average("beta_kl", "paced"),
            rule=below(4e-3),
            where=AT_BEST,
            **REDUCED,
        ),
        Untested(
            2,
            paper="AIME pass@1 up to 29 % above GRPO and 40 % above FlowRL, pass@k 14 % and 9 %.",
            needs="GPUs for days: 1.5B and 7B models, 150 steps of 3,072 tokens, and FlowRL's code",
            source=NOTES,
        ),
        Claim(
            3,
            part="a",
            paper="Selection by the free estimate reaches an accuracy with fewer rollouts than uniform sampling.",
            tested="Rollouts until 0.8 of held-out prompts are right (restricted mean), trajectory balance, one small learning rate: selection below uniform.",
            measure=ratio_of_sums("rollouts", "selection", "uniform"),
            rule=below(1.0),
            where=ALIKE,
            **REDUCED,
        ),
        Claim(
            3,
            part="b",
            paper="The same.",
            tested="The same, each arm at the best of five learning rates.",
            measure=ratio_of_sums("rollouts", "selection", "uniform"),
            rule=below(1.0),
            where=AT_BEST,
            **REDUCED,
        ),
        Claim(
            3,
            part="c",
            paper="It needs fewer than dynamic sampling, whose rejected rollouts count.",
            tested="Rollouts until 0.8, each arm at its best rate: selection below dynamic sampling.",
            measure=ratio_of_sums("rollouts", "selection", "dynamic"),
            rule=below(1.0),
            where=AT_BEST,
            **REDUCED,
        ),
        Claim(
            3,
            part="d",
            paper="It needs fewer than LILO's choice by p (1 - p) among twice as many.",
            tested="Rollouts until 0.8, each arm at its best rate: selection below LILO.",
            measure=ratio_of_sums("rollouts", "selection", "lilo"),
            rule=below(1.0),
            where=AT_BEST,
            **REDUCED,
        ),
        Claim(
            4,
            part="a",
            paper="Replay by estimate error improves the estimate more than uniform replay.",
            tested="Mean absolute error, replayed groups taught to the estimate by their means: error replay below uniform replay.",
            measure=difference("mae", "paced-weighted", "uniform-replay-weighted"),
            rule=below(0.0),
            where=AT_BEST,
            **REDUCED,
        ),
        Claim(
            4,
            part="b",
            paper="It reaches an accuracy with fewer rollouts than uniform replay.",
            tested="Rollouts until 0.8, replay left out of the estimate: error replay below uniform replay.",
            measure=ratio_of_sums("rollouts", "paced", "uniform-replay"),
            rule=below(1.0),
            where=AT_BEST,
            **REDUCED,
        ),
        Claim(
            4,
            part="c",
            paper="Replay helps at all.",
            tested="Rollouts until 0.8: with error replay below selection alone.",
            measure=ratio_of_sums("rollouts", "paced", "selection"),
            rule=below(1.0),
            where=AT_BEST,
            **REDUCED,
        ),
        Claim(
            5,
            part="a",
            paper="(Counter-evidence.) On some benchmarks oversampling and filtering equals or beats it.",
            tested="Held-out accuracy after 10,240 rollouts less that of the best of dynamic sampling (both losses) and LILO, best rates: below 0.01.",
            measure=versus_best("accuracy", "paced", FILTERS, kind="difference", lower_is_better=False),
            rule=below(0.01),
            where=AT_BEST,
            **REDUCED,
        ),
        Claim(
            5,
            part="b",
            paper="(Counter-evidence.) The same.",
            tested="The same after 1,280 rollouts.",
            measure=versus_best("accuracy_early", "paced", FILTERS, kind="difference", lower_is_better=False),
            rule=below(0.01),
            where=AT_BEST,
            **REDUCED,
        ),
        Claim(
            6,
            part="a",
            paper="More different right answers than GRPO at equal accuracy.",
            tested="Different right answers among 8 to held-out prompts when 0.8 are right: PACED above GRPO.",
            measure=difference("distinct8_at", "paced", "grpo"),
            rule=above(0.0),
            where=AT_BEST,
            **REDUCED,
        ),
        Claim(
            6,
            part="b",
            paper="The loss itself keeps more of them.",
            tested="The same, trajectory balance against GRPO, both with uniform prompts and one small learning rate.",
            measure=difference("distinct8_at", "uniform", "grpo"),
            rule=above(0.0),
            where=ALIKE,
            **REDUCED,
        ),
        Claim(
            6,
            part="c",
            paper="More entropy than GRPO at equal accuracy.",
            tested="Entropy of answers to held-out prompts when 0.8 are right: PACED above GRPO.",
            measure=difference("entropy_at", "paced", "grpo"),
            rule=above(0.0),
            where=AT_BEST,
            **REDUCED,
        ),
        Claim(
            6,
            part="d",
            paper="More pass@8 than GRPO at equal accuracy.",
            tested="pass@8 of held-out prompts when 0.8 are right: PACED above GRPO.",
            measure=difference("pass8_at", "paced", "grpo"),
            rule=above(0.0),
            where=AT_BEST,
            **REDUCED,
        ),
        *OURS,
    ],
    answer=Answer(
        measure=versus_best("rollouts", "paced", exclude=VARIANTS),
        where=AT_BEST,
        better="train with paced selection and replay on {workload}: it needs {estimate} times [{low}, {high}] the rollouts of {peer} to the same held-out accuracy",
        worse="keep {peer} on {workload}: paced selection and replay need {estimate} times [{low}, {high}] its rollouts to the same held-out accuracy",
        tie="paced selection and replay need about the rollouts of {peer} on {workload}: {estimate} times [{low}, {high}]",
        workloads=[POOL, "own"],
    ),
    figures=[
        *(
            Figure(title, x="after", y=column, source="this study", where=COURSE, workloads=[POOL],
                   log_x=False, log_y=False, x_title="rollouts, rejected ones included", y_title=label)
            for title, column, label in (
                ("Held-out accuracy", "accuracy_now", "share right"),
                ("Error of the estimate over the pool", "mae_now", "mean absolute error"),
                ("Groups that teach: with right and wrong answers", "mixed_now", "share of the groups trained on"),
                ("Groups that are all right", "all_right_now", "share of the groups trained on"),
                ("Groups that are all wrong", "all_wrong_now", "share of the groups trained on"),
                ("pass@8 of held-out prompts", "pass8_now", "share solved in 8 tries"),
                ("Different right answers to held-out prompts", "distinct8_now", "number among 8"),
                ("Entropy of held-out answers", "entropy_now", "nats a completion"),
            )
        ),
        Figure(
            "On your model: groups that teach, with right and wrong answers",
            x="after",
            y="mixed_now",
            source="this study",
            where=pl.col("part").cast(pl.String) == "own",
            workloads=["own"],
            log_x=False,
            log_y=False,
            x_title="rollouts",
            y_title="share of the groups trained on",
        ),
    ],
    timeout=900.0,
    memory=4.0,
)  # fmt: skip
