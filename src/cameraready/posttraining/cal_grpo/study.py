"""Credit by attempt put to the test: exact gradients, small policies trained in five worlds, and the user's own model."""

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
    SpecError,
    Study,
    Untested,
    above,
    always,
    average,
    below,
    difference,
    ratio,
    violations,
)
from cameraready.posttraining._workload import ACCEPTS, is_enumerable, open_posttraining
from cameraready.posttraining._workload import cost as training_cost
from cameraready.posttraining.cal_grpo.experiment import trials
from cameraready.posttraining.cal_grpo.experiment.claims import EXTRA, VarianceRatio
from cameraready.posttraining.cal_grpo.experiment.games import GAMES
from cameraready.posttraining.cal_grpo.experiment.training import ARMS

PAPER = "Ildiz, Gozeten, Taga and Oymak, 2026, arXiv:2604.17912"
GRADIENTS, MODEL = "gradients", "qwen2.5-coder-0.5b-instruct"
#: Dialogues of each problem on a language model, in groups of this size; attempts; problems.
OWN = {"n": 16, "group": 4, "attempts": 3, "problems": 24, "tokens": 32}

# --- trials ----------------------------------------------------------------------------------------------------------


def open_workload(spec: Spec) -> Any:
    """The enumeration, a game, or a language model with problems."""
    found = open_posttraining(spec, shipped=(GRADIENTS, *GAMES))
    if is_enumerable(found):
        raise SpecError(
            "an EnumerableTask has one attempt only, and credit by attempt needs several: give a language model, as (model, tokenizer)"
        )
    return found


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    smoke = tier == "smoke"
    if workload == GRADIENTS:
        yield {"part": "gradient", "draws": 1 if smoke else 12, "most": 4 if smoke else 16}
    elif workload in GAMES:
        steps = 3 if smoke else trials.STEPS[workload]
        for arm in ARMS:
            yield {
                "part": "train",
                "arm": arm,
                "steps": steps,
                "tuning": 0 if smoke else 3,
                "seeds": 2 if smoke else 12,
            }
        if workload != "ask":
            yield {
                "part": "variance",
                "seeds": 2 if smoke else 12,
                "repeats": 4 if smoke else trials.REPEATS,
                "warm": 0 if smoke else trials.WARM,
            }
    else:
        yield {"part": "own", **(OWN if not smoke else {"n": 8, "group": 4, "attempts": 3, "problems": 4, "tokens": 4})}


def prepare(workload: Any, ctx: Context) -> Mapping[str, np.ndarray]:
    return trials.prepared(workload, ctx)


def trial(workload: Any, ctx: Context, *, part: str, **condition: Any) -> list[dict[str, Any]]:
    return list(getattr(trials, part)(workload, ctx, **condition))


def cost(spec: Spec, conditions: Sequence[Mapping[str, Any]], device: str, dtype: str) -> Cost:
    """Hours, memory and downloads of sampling and scoring dialogues on a language model."""
    return training_cost(
        spec,
        steps=len(conditions),
        prompts=OWN["problems"],
        group=OWN["n"],
        prompt_tokens=128,
        new_tokens=OWN["tokens"] * OWN["attempts"],
        micro_batch=16,
        device=device,
        dtype=dtype or None,
    )


# --- claims ----------------------------------------------------------------------------------------------------------

ABSTRACT = f"{PAPER}, abstract"
EXACT: dict[str, Any] = {"scope": "exact", "source": ABSTRACT, "workloads": [GRADIENTS]}
REDUCED: dict[str, Any] = {"scope": "reduced", "source": ABSTRACT, "pooled": False}
SEVERAL = pl.col("tries") > 1
#: With two answers a group's own weights give exactly what the outcome gives; with w = 1 there is nothing to calibrate.
GAINS = SEVERAL & (pl.col("answers") > 2)
TRAINED, MEASURED = pl.col("part") == "train", pl.col("part") == "variance"
HIGHER = (pl.col("variance_ratio") > 1 + 1e-9) & (pl.col("smallest_w") < 1 - 1e-9)

CURVES: dict[str, Any] = {
    "x": "step",
    "x_title": "optimizer steps, 8 dialogues of each prompt",
    "source": "this study",
    "workloads": list(GAMES),
    "log_x": False,
    "log_y": False,
}

STUDY = Study(
    open=open_workload,
    workloads={
        "smoke": [GRADIENTS, "key", "ask", "tiny-llama"],
        "desk": [GRADIENTS, *GAMES],
        "full": [GRADIENTS, *GAMES, MODEL],
    },
    plan=plan,
    trial=trial,
    prepare=prepare,
    method="cal",
    arms="arm",
    block="run",
    libraries={"*": ["numpy", "torch"]},
    accepts=ACCEPTS,
    takes=("data", "tasks"),
    cost=cost,
    own_arm="a callable (rewards (T, K) of 0, 1 and NaN where not reached, group_ids (T,)) -> advantages (T, K), float arrays",
    covers="random probabilities in the enumeration, and seeds of initial weights and of sampling in training",
    covers_own="your problems",
    claims=[
        Claim(
            1,
            part="a",
            paper="Weighing attempts by their own pass or fail gives biased gradients.",
            tested="Relative bias of the naive gradient of V@K at 12 random draws of probabilities, two and three attempts, up to 10 answers and 16 trajectories, enumerated: above 0.05.",
            measure=average("relative_bias", "naive"),
            rule=above(0.05),
            where=SEVERAL,
            **EXACT,
        ),
        Claim(
            1,
            part="b",
            paper="Calibrated attempts give unbiased gradients.",
            tested="With known weights no component of the mean differs from the exact gradient by more than 1e-10, in any of the settings.",
            measure=violations(
                (pl.col("arm") == "known-w") & (pl.col("bias") > 1e-10), "settings with a bias above 1e-10"
            ),
            rule=always(),
            **EXACT,
        ),
        Claim(
            1,
            part="c",
            paper="Calibrated attempts give unbiased gradients.",
            tested="The same with weights from the group itself, where no other group can stand in: relative bias below 0.05 on average.",
            measure=average("relative_bias", "cal"),
            rule=below(0.05),
            where=SEVERAL,
            **EXACT,
        ),
        Claim(
            2,
            part="a",
            paper="Calibration keeps the variance small: smaller than the trajectory's.",
            tested="Total variance over that of trajectory-level GRPO (leave-one-out), weights from the group, at least three answers, geometric mean: below 1.",
            measure=ratio("variance_ratio", "cal", "trajectory"),
            rule=below(1.0),
            where=GAINS,
            **EXACT,
        ),
        Claim(
            2,
            part="b",
            paper="Calibration keeps the variance small: smaller than the trajectory's.",
            tested="In no setting with a weight below 1 and at least three answers is the total variance higher (weights from the group).",
            measure=violations(HIGHER & (pl.col("arm") == "cal"), "settings with a higher variance"),
            rule=always(),
            where=GAINS,
            **EXACT,
        ),
        Claim(
            2,
            part="c",
            paper="Calibration keeps the variance small: smaller than the trajectory's.",
            tested="The same with known weights and known baselines.",
            measure=violations(HIGHER & (pl.col("arm") == "known"), "settings with a higher variance"),
            rule=always(),
            where=GAINS,
            **EXACT,
        ),
        Claim(
            2,
            part="d",
            paper="Calibration keeps the variance small: smaller than the trajectory's.",
            tested="Total variance of a recurrent policy's gradient at a checkpoint of each seed, all estimators on the same dialogues, over the trajectory's: below 1.",
            measure=ratio("variance", "cal", "trajectory"),
            rule=below(1.0),
            where=MEASURED,
            workloads=["key", "hidden", "maze", "number"],
            **REDUCED,
        ),
        Claim(
            2,
            part="e",
            paper="Calibration keeps the variance small: smaller than the trajectory's.",
            tested="The same of a language model's gradient with respect to a bias on its last hidden state, summed over problems.",
            measure=VarianceRatio("variance", "cal", "trajectory"),
            rule=below(1.0),
            where=pl.col("part") == "own",
            workloads=[MODEL, "own"],
            **REDUCED,
        ),
        Claim(
            3,
            part="a",
            paper="CAL-GRPO beats vanilla GRPO in Verification@K on synthetic tasks.",
            tested="V@K over training, equal rollouts, a learning-rate sweep of equal size for each arm, minus that of trajectory-level GRPO: above 0.",
            measure=difference("verified_mean", "cal", "trajectory"),
            rule=above(0.0),
            where=TRAINED,
            workloads=["key", "hidden", "maze"],
            **REDUCED,
        ),
        Claim(
            3,
            part="b",
            paper="CAL-GRPO beats naive weighting in Verification@K on synthetic tasks.",
            tested="The same, minus that of naive weighting: above 0.",
            measure=difference("verified_mean", "cal", "naive"),
            rule=above(0.0),
            where=TRAINED,
            workloads=["key", "hidden", "maze"],
            **REDUCED,
        ),
        Claim(
            3,
            part="c",
            paper="CAL-GRPO beats vanilla GRPO in Verification@K on synthetic tasks.",
            tested="V@K when as many words were written as one attempt a rollout takes, minus that of trajectory-level GRPO: above 0.",
            measure=difference("verified_at_tokens", "cal", "trajectory"),
            rule=above(0.0),
            where=TRAINED,
            workloads=["key", "hidden", "maze"],
            **REDUCED,
        ),
        Untested(
            3,
            part="d",
            paper="CAL-GRPO beats vanilla GRPO and naive weighting in Verification@K on mathematics (MATH-like problems).",
            needs="Qwen2.5-1.5B or Qwen3-1.7B, MATH levels 3 to 5, K = 3 and 8 dialogues a problem of 8k tokens: a GPU for days",
            source=ABSTRACT,
        ),
        Claim(
            4,
            part="a",
            paper="Naive weighting improves V@1 at the expense of V@K.",
            tested="V@1 after training, minus that of CAL: above 0.",
            measure=difference("first", "naive", "cal"),
            rule=above(0.0),
            where=TRAINED,
            workloads=["key", "hidden", "maze"],
            **REDUCED,
        ),
        Claim(
            4,
            part="b",
            paper="Naive weighting improves V@1 at the expense of V@K.",
            tested="V@K after training, minus that of CAL: below 0.",
            measure=difference("verified", "naive", "cal"),
            rule=below(0.0),
            where=TRAINED,
            workloads=["key", "hidden", "maze"],
            **REDUCED,
        ),
        Claim(
            5,
            part="a",
            paper="(Ours.) Where failures inform, CAL stalls: it cannot praise a failure that taught something.",
            tested="A number from 1 to 15 in four guesses, told higher or lower: V@4 after training, minus that with the whole rest (lam = 1): below 0.",
            measure=difference("verified", "cal", "whole"),
            rule=below(0.0),
            where=TRAINED,
            workloads=["number"],
            scope="ours",
            source="this study",
        ),
        Claim(
            5,
            part="b",
            paper="(Ours.) lam = 1 repairs it: the whole outcome learns to probe.",
            tested="The same game, lam = 1 minus trajectory-level GRPO, V@4 after training: between -0.05 and 0.05, or better.",
            measure=difference("verified", "whole", "trajectory"),
            rule=above(-0.05),
            where=TRAINED,
            workloads=["number"],
            scope="ours",
            source="this study",
        ),
        Claim(
            5,
            part="c",
            paper="(Ours.) Where failures inform, CAL stalls: it cannot praise a failure that taught something.",
            tested="A key among six, and a word that is never right but after which the key is told: V@2 after training, minus that of trajectory-level GRPO: below -0.2.",
            measure=difference("verified", "cal", "trajectory"),
            rule=below(-0.2),
            where=TRAINED,
            workloads=["ask"],
            scope="ours",
            source="this study",
        ),
        Claim(
            5,
            part="d",
            paper="(Ours.) lam = 1 repairs it: the whole outcome learns to probe.",
            tested="The same game, lam = 1: V@2 after training above 0.9.",
            measure=average("verified", "whole"),
            rule=above(0.9),
            where=TRAINED,
            workloads=["ask"],
            scope="ours",
            source="this study",
        ),
        *EXTRA,
    ],
    answer=Answer(
        measure=VarianceRatio("variance", "cal", "trajectory"),
        where=pl.col("part").is_in(["own", "variance"]),
        better="calibrate attempts on {workload} ({level}): the variance of the gradient is {estimate} times [{low}, {high}] that of one advantage a dialogue",
        worse="keep one advantage a dialogue on {workload} ({level}): calibrated, the variance of the gradient is {estimate} times [{low}, {high}] as large",
        tie="calibration hardly matters on {workload} ({level}): the variance of the gradient is {estimate} times [{low}, {high}] that of one advantage a dialogue",
        by="weight",
        by_label="with {level}",
        workloads=["key", "hidden", "maze", "number", MODEL, "own"],
    ),
    figures=[
        Figure("V@K in training, by credit rule", y="curve", y_title="V@K, exact where it can be listed", **CURVES),
        Figure("V@1 in training, by credit rule", y="curve_first", y_title="V@1", **CURVES),
        Figure(
            "Groups without signal: all eight dialogues solved, or none",
            y="silent",
            y_title="share of groups",
            **CURVES,
        ),
        Figure(
            "Later attempts that repeat an earlier one", y="curve_repeats", y_title="share of later attempts", **CURVES
        ),
    ],
)
