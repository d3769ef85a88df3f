"""Power-calibrated watermarks put to the test: predictions against simulated and generated texts, the choice against defaults, the null."""

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
    Peer,
    Spec,
    Study,
    Untested,
    above,
    always,
    average,
    below,
    difference,
    ratio,
    violations,
    within,
)
from cameraready.lm._workload import ACCEPTS, open_lm
from cameraready.lm.watermark_power.calibrator import WatermarkCalibrator
from cameraready.lm.watermark_power.experiment import trials
from cameraready.lm.watermark_power.experiment.claims import CHOICE, FORMULAS, HUMAN, JSON, MORE, ON_FAMILIES, OURS
from cameraready.lm.watermark_power.experiment.synthetic import FAMILIES

PAPER = "Wang, He, Liu and Li, 2026, arXiv:2607.05694"
#: KGW needs torch and transformers alone, which the peer takes from here; MarkLLM's other requirements are pinned to old releases.
MARKLLM = Peer("markllm==0.1.5", script="markllm_peer.py", dependencies=False)
GEMMA, QWEN = "gemma-3-270m", "qwen2.5-coder-0.5b-instruct"
REAL = [GEMMA, QWEN, "own"]

# --- trials ----------------------------------------------------------------------------------------------------------


def open_workload(spec: Spec) -> Any:
    """A family, the formulas, human text under a tokenizer, or a language model."""
    if spec.kind == "shipped" and spec.name in (*FAMILIES, FORMULAS, HUMAN, JSON):
        return spec.name
    return open_lm(spec)


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    smoke = tier == "smoke"
    if workload in FAMILIES:
        for length in (50, 120):
            yield {"part": "grid", "length": length, "texts": 200 if smoke else 2_000}
        for split in range(1 if smoke else 12):
            yield {"part": "choice", "split": split, "length": 120, "texts": 200 if smoke else 2_000}
    elif workload == FORMULAS:
        yield {"part": "formulas"}
    elif workload == JSON:
        for number in range(1 if smoke else 12):
            yield {"part": "markllm", "texts_number": number}
    elif workload == HUMAN:
        for number in range(1 if smoke else 12):
            yield {"part": "human", "key_number": number, "texts": 40 if smoke else 1_000}
    else:
        for number in range(1 if smoke else 10):
            yield {"part": "real", "key_number": number}


def prepare(workload: Any, ctx: Context) -> Mapping[str, np.ndarray]:
    return trials.prepared(workload, ctx.device, ctx.dtype)


def trial(workload: Any, ctx: Context, *, part: str, **condition: Any) -> list[dict[str, Any]]:
    return list(getattr(trials, part)(workload, ctx, **condition))


def component(workload: Any) -> WatermarkCalibrator:
    """A calibrator ready for the workload."""
    return trials.ready(workload)


def cost(spec: Spec, conditions: Sequence[Mapping[str, Any]], device: str, dtype: str) -> Cost:
    """Hours, memory and downloads of the language-model trials."""
    return trials.cost(spec, conditions, device, dtype)


# --- claims ----------------------------------------------------------------------------------------------------------

GRID, TEXT = pl.col("part") == "grid", pl.col("part") == "real"
ABSTRACT = f"{PAPER}, abstract"
ON_MODELS: dict[str, Any] = {"workloads": REAL, "where": TEXT, "pooled": False}
EXACT: dict[str, Any] = {"scope": "exact", "source": ABSTRACT}
REDUCED: dict[str, Any] = {"scope": "reduced", "source": ABSTRACT}

POWER, KL, CHOSEN = pl.col("power_stated"), pl.col("kl"), pl.col("arm") == "calibrated"


def standard_error(column: pl.Expr) -> pl.Expr:
    """Of the mean over the rows at hand."""
    return column.std() / column.count().sqrt()


#: By the means of all keys: more texts found, and less divergence, than the chosen watermark.
BEATS_THE_CHOSEN = (
    POWER.mean().over("arm") - POWER.filter(CHOSEN).mean()
    > 2 * (standard_error(POWER).over("arm") ** 2 + standard_error(POWER.filter(CHOSEN)) ** 2).sqrt()
) & (
    KL.filter(CHOSEN).mean() - KL.mean().over("arm")
    > 2 * (standard_error(KL).over("arm") ** 2 + standard_error(KL.filter(CHOSEN)) ** 2).sqrt()
)

STUDY = Study(
    open=open_workload,
    workloads={
        "smoke": ["zipf", FORMULAS, "tiny-llama"],
        "desk": [*FAMILIES, FORMULAS, JSON, HUMAN, GEMMA, QWEN],
        "full": [*FAMILIES, FORMULAS, JSON, HUMAN, GEMMA, QWEN],
    },
    plan=plan,
    trial=trial,
    prepare=prepare,
    method="calibrated",
    arms="arm",
    block="block",
    libraries={"*": ["numpy", "scipy", "torch", "transformers"]},
    peers=[
        MARKLLM
    ],  # opened by the trials that need it: rows name the arms, and a run on a model of one's own needs none
    accepts=ACCEPTS,
    takes=("data",),
    component=component,
    cost=cost,
    covers="the texts, the random green lists and, on language models, the keys",
    covers_own="your prompts and the keys",
    claims=[
        Claim(
            1,
            part="a",
            paper="Explicit relations give the detection power from the hyper-parameters.",
            tested="Of 60 (gamma, delta, length), 2,000 simulated texts each, more than 85 in a hundred have a power within two standard errors of the calibrator's.",
            measure=average("covered", "calibrated"),
            rule=above(0.85),
            where=GRID,
            **ON_FAMILIES,
            **EXACT,
        ),
        Claim(
            1,
            part="b",
            paper="The closed form says the power.",
            tested="The same of the authors' formula (green share equal to gamma in every context, normal law).",
            measure=average("covered", "closed-form"),
            rule=above(0.85),
            where=GRID,
            **ON_FAMILIES,
            **EXACT,
        ),
        Claim(
            1,
            part="c",
            paper="Predicted and empirical power agree on language models and data sets.",
            tested="Texts that a small model writes on prompts it was not calibrated on, the chosen watermark, ten keys: share found minus predicted power within 0.1.",
            measure=average("gap", "calibrated"),
            rule=within(-0.1, 0.1),
            **ON_MODELS,
            **REDUCED,
        ),
        Claim(
            1,
            part="d",
            paper="Predicted and empirical green-token rates agree.",
            tested="The same of the share of green tokens under (0.25, 2): within 0.03.",
            measure=average("green_gap", "lm-watermarking"),
            rule=within(-0.03, 0.03),
            **ON_MODELS,
            **REDUCED,
        ),
        Claim(
            2,
            part="a",
            paper="Explicit relations give the distortion.",
            tested="KL per token of simulated texts within 2 % of the prediction, mean over 60 points.",
            measure=average("kl_ratio", "calibrated"),
            rule=within(0.98, 1.02),
            where=GRID,
            **ON_FAMILIES,
            **EXACT,
        ),
        Claim(
            2,
            part="b",
            paper="The distortion of generated text is the predicted one.",
            tested="KL per token, measured at every token that a small model writes, within 10 % of the prediction from other prompts.",
            measure=average("kl_ratio", "calibrated"),
            rule=within(0.9, 1.1),
            **ON_MODELS,
            **REDUCED,
        ),
        Claim(
            2,
            part="c",
            paper="So is its perplexity.",
            tested="The expected log-perplexity under the unwatermarked model changes by what was predicted, within 0.05 nats a token.",
            measure=average("surprisal_gap", "calibrated"),
            rule=within(-0.05, 0.05),
            **ON_MODELS,
            **REDUCED,
        ),
        Claim(
            3,
            part="a",
            paper="The procedure consistently identifies Pareto-optimal points.",
            tested="Of 30 (gamma, delta), none has more power and less divergence than the least distorting choice on held-out simulated texts, by two standard errors of both.",
            measure=violations(
                (pl.col("dominated") > 0) & (pl.col("arm") == "nominal"), "points that beat the chosen one"
            ),
            rule=always(),
            where=CHOICE,
            **ON_FAMILIES,
            **EXACT,
        ),
        Claim(
            3,
            part="b",
            paper="No other choice gives as much power with less distortion.",
            tested="The choice's divergence over the least with which one of six gammas has the power that the choice turned out to have: below 1.05.",
            measure=average("excess", "nominal"),
            rule=below(1.05),
            where=CHOICE,
            **ON_FAMILIES,
            **EXACT,
        ),
        Claim(
            3,
            part="c",
            paper="It improves on heuristic parameters: less distortion at equal power.",
            tested="KL per token of generated text, chosen for the power of (0.25, 2) on edited text of the usual lengths, below that of (0.25, 2).",
            measure=ratio("kl", "equal-power", "lm-watermarking"),
            rule=below(1.0),
            **ON_MODELS,
            **REDUCED,
        ),
        Claim(
            3,
            part="d",
            paper="It improves on heuristic parameters: more power at equal distortion.",
            tested="Share of generated texts that are found, of those at least as long as nine in ten, chosen for the divergence of (0.25, 2), above that of (0.25, 2).",
            measure=difference("power_stated", "equal-kl", "lm-watermarking"),
            rule=above(0.0),
            **ON_MODELS,
            **REDUCED,
        ),
        Claim(
            3,
            part="e",
            paper="The chosen points are Pareto-optimal among all that were tried.",
            tested="Over all keys together, none of five other watermarks finds more generated texts of such lengths with less divergence, by two standard errors of both.",
            measure=violations(BEATS_THE_CHOSEN, "rows of watermarks that beat the chosen one"),
            rule=always(),
            **ON_MODELS,
            **REDUCED,
        ),
        Claim(
            4,
            part="a",
            paper="Constraints are met.",
            tested="Power 0.9 asked for, calibrated on half of the texts: above 0.88 on the other half, simulated.",
            measure=average("power", "calibrated"),
            rule=above(0.88),
            where=CHOICE,
            **ON_FAMILIES,
            **EXACT,
        ),
        Claim(
            4,
            part="b",
            paper="The false-positive rate is kept.",
            tested="Of 24,000 texts of random tokens with real green lists, a key for each 2,000, a share of less than 1.05 alpha is found, alpha = 0.05.",
            measure=average("false_alarms_per_alpha", "calibrated"),
            rule=below(1.05),
            where=CHOICE,
            **ON_FAMILIES,
            **EXACT,
        ),
        Claim(
            4,
            part="c",
            paper="Constraints are met on held-out prompts.",
            tested="Power 0.9 asked for at the lengths that nine in ten texts exceed: above 0.85 among such texts on other prompts of the same kind.",
            measure=average("power_stated", "calibrated"),
            rule=above(0.85),
            **ON_MODELS,
            **REDUCED,
        ),
        Claim(
            4,
            part="d",
            paper="Constraints are met on another domain.",
            tested="The same watermark on prompts from source code, texts of any length: above 0.85.",
            measure=average("power_elsewhere", "calibrated"),
            rule=above(0.85),
            workloads=[GEMMA, QWEN],
            where=TEXT,
            pooled=False,
            **REDUCED,
        ),
        Claim(
            5,
            part="a",
            paper="(Ours.) At equal power the divergence hardly depends on gamma, as long as it is at most 0.75.",
            tested="The largest divergence over the least, gamma from 0.05 to 0.75, power 0.9 at 120 tokens and alpha = 0.001: below 1.25.",
            measure=average("spread_small", "nominal"),
            rule=below(1.25),
            where=CHOICE,
            **ON_FAMILIES,
            **OURS,
        ),
        Claim(
            5,
            part="b",
            paper="(Ours.) Nor does it beyond: most advice on gamma is noise.",
            tested="The same over all gammas, up to the largest at which all-green text is significant: below 1.25.",
            measure=average("spread_all", "nominal"),
            rule=below(1.25),
            where=CHOICE,
            **ON_FAMILIES,
            **OURS,
        ),
        Claim(
            5,
            part="c",
            paper="(Ours.) The exact test, not the normal law, must decide.",
            tested="Chosen by the normal law for power 0.9, the exact test finds less than 0.88.",
            measure=average("power", "normal"),
            rule=below(0.88),
            where=CHOICE,
            **ON_FAMILIES,
            **OURS,
        ),
        *MORE,
        Untested(
            1,
            part="e",
            paper="Green-token rates of OPT-125M, GPT-2 and Pythia-160M on C4, LFQA and Wikipedia follow the closed form with R^2 above 0.98.",
            needs="these models and data sets from the hub, 45 settings with 100 texts of 200 tokens each: a GPU for a day",
            source=f"{PAPER}, the authors' repository",
        ),
        Untested(
            3,
            part="f",
            paper="It improves on optimal threshold watermarks and DiPmark as well.",
            needs="implementations of both that can be calibrated alike, and the models above",
            source=f"{PAPER}, the authors' repository",
        ),
    ],
    answer=Answer(
        measure=ratio("kl", "equal-power", "lm-watermarking"),
        where=TEXT,
        better="watermark {workload} with {level}: at the power of the customary (0.25, 2), edits allowed for, the calibrated choice costs {estimate} times [{low}, {high}] its divergence",
        worse="keep the customary (0.25, 2) on {workload}: at its power, edits allowed for, the calibrated choice costs {estimate} times [{low}, {high}] its divergence",
        tie="watermark {workload} with {level}: at the power of the customary (0.25, 2), edits allowed for, the calibrated choice costs about the same divergence, {estimate} times [{low}, {high}]",
        by="setting",
        by_label="with {level}",
        workloads=REAL,
    ),
    figures=[
        Figure(
            "Power against divergence on simulated texts of 50 and 120 tokens",
            x="kl",
            y="power",
            source="this study",
            where=GRID & (pl.col("arm") == "calibrated"),
            workloads=list(FAMILIES),
            log_y=False,
            x_title="KL per token (nats)",
            y_title="share of texts found",
        ),
    ],
    timeout=900.0,
    memory=6.0,
)
