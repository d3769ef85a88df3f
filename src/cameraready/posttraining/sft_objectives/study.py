"""Objectives beyond the log-likelihood put to the test: a synthetic continuum of priors, adapters on a real model, identities, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from cameraready.evidence import (
    Answer,
    Claim,
    Context,
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
    rank_correlation,
    ratio,
    versus_best,
    violations,
)
from cameraready.posttraining._workload import open_posttraining
from cameraready.posttraining.sft_objectives import ProbabilityObjective
from cameraready.posttraining.sft_objectives.experiment import trials
from cameraready.posttraining.sft_objectives.experiment.claims import (
    CLEAN,
    MISLED,
    NOISY,
    NONE,
    OF_OURS,
    PAPER,
    QWEN,
    RIGHT,
    STRONG,
)
from cameraready.posttraining.sft_objectives.experiment.synthetic import LEVELS, NOISE
from cameraready.posttraining.sft_objectives.experiment.trials import CONTINUUM, FORMULAS, MEMORY, QUICK, TASKS

SPLITS = 10


def open_workload(spec: Spec) -> Any:
    """The continuum, the formulas, the costs, or a language model with demonstrations."""
    workload = open_posttraining(spec, shipped=(CONTINUUM, QUICK, FORMULAS, MEMORY))
    prompts = getattr(workload, "prompts", None)
    different = len({prompt for prompt, _ in prompts or ()})
    if prompts is not None and different < trials.FEWEST:
        raise SpecError(
            f"{spec.options['data']} has {different} different prompts; to divide them ten times into trained and held out takes "
            f"{trials.FEWEST} or more"
        )
    return workload


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    smoke = tier == "smoke"
    if workload in (CONTINUUM, QUICK):
        for level in LEVELS if workload == CONTINUUM else ("none", "strong"):
            for noise in NOISE if workload == CONTINUUM else (0.1,):
                yield {"part": "synthetic_cell", "level": level, "noise": noise}
    elif workload == FORMULAS:
        yield {"part": "formulas", "blocks": 2 if smoke else 12}
    elif workload == MEMORY:
        yield {"part": "memory", "blocks": 1 if smoke else 10, "vocabulary": 4_000 if smoke else 151_936}
    else:
        shipped = workload == QWEN
        for split in range(1 if smoke else SPLITS):
            for task in TASKS if shipped else ("arithmetic",) if workload.startswith("tiny-") else ("own",):
                yield {"part": "adapters", "task": task, "split": split}


def trial(workload: Any, ctx: Context, *, part: str, **condition: Any) -> list[dict[str, Any]]:
    return list(getattr(trials, part)(workload, ctx, **condition))


def prepare(workload: Any, ctx: Context) -> Mapping[str, Any]:
    return trials.prepared(workload, ctx)


def component(workload: Any) -> ProbabilityObjective:
    """The objective of the paper's strong end, ready to use."""
    return ProbabilityObjective(alpha=1.0)


# --- claims ----------------------------------------------------------------------------------------------------------

SYNTHETIC: dict[str, Any] = {"workloads": [CONTINUUM], "pooled": False}
REDUCED: dict[str, Any] = {"scope": "reduced", **SYNTHETIC}
EXACT: dict[str, Any] = {"scope": "exact", "source": f"{PAPER}, Section 3", "workloads": [FORMULAS], "pooled": False}
CENSUS: dict[str, Any] = {"rule": always(), **EXACT}
ENDS = f"{PAPER}, Section 4"

STUDY = Study(
    open=open_workload,
    workloads={
        "smoke": [QUICK, FORMULAS, MEMORY, "tiny-llama"],
        "desk": [CONTINUUM, FORMULAS, MEMORY, QWEN],
        "full": [CONTINUUM, FORMULAS, MEMORY, QWEN],
    },
    plan=plan,
    trial=trial,
    prepare=prepare,
    method="alpha=1",
    arms="arm",
    block="run",
    alone=lambda condition: condition["part"] == "memory",
    libraries={"*": ["torch", "transformers", "trl", "peft"]},
    accepts=("hf", "checkpoint", "value"),
    takes=("data", "tasks"),
    own_arm="a `ProbabilityObjective` of yours, as --with package.module:objective",
    component=component,
    cost=trials.cost,
    covers="sources, networks and demonstrations of the continuum, and draws of demonstrations on the model",
    covers_own="the division of your demonstrations into those trained on and those held out",
    claims=[
        Untested(
            1,
            paper="Mathematics: with Qwen2.5-Math-1.5B the mean of five benchmarks is 17.0 for the log-likelihood, 32.0 for it on tokens with p >= 0.2, 32.8 for 1 - p; with 7B 22.7, 38.2 and 36.5.",
            needs="these models, 67,000 NuminaMath demonstrations and two GPUs for hours a run; claims 9 and 12 are what a small machine can say",
            source=f"{PAPER}, tables of Section 4",
        ),
        Claim(
            2,
            part="a",
            paper="At the weak end (words in a font that the model cannot read) the log-likelihood clearly wins.",
            tested="Clean demonstrations, networks pre-trained on other sources: greedy exact answers of alpha = 1 minus those of the log-likelihood below 0.",
            measure=difference("greedy", "alpha=1", "nll"),
            rule=below(0.0),
            where=MISLED & CLEAN,
            source=ENDS,
            **REDUCED,
        ),
        Claim(
            2,
            part="b",
            paper="1 - p stays near 0 there.",
            tested="The same: greedy exact answers of alpha = 1 below 0.05.",
            measure=average("greedy", "alpha=1"),
            rule=below(0.05),
            where=MISLED & CLEAN,
            source=ENDS,
            **REDUCED,
        ),
        Claim(
            2,
            part="c",
            paper="At the weak end the log-likelihood clearly wins.",
            tested="The same from networks that were not trained at all.",
            measure=difference("greedy", "alpha=1", "nll"),
            rule=below(0.0),
            where=NONE & CLEAN,
            source=ENDS,
            **REDUCED,
        ),
        Untested(
            3,
            paper="In the middle (medicine) the gap is below two points.",
            needs="models of 1.5B parameters or more and the m23k demonstrations: a GPU; claim 14 is its counterpart here",
            source=f"{PAPER}, tables of Section 4",
        ),
        Claim(
            4,
            part="a",
            paper="At the strong end accuracy rises with alpha from 0.1 to 10.",
            tested=f"Strong prior, a tenth of answers' tokens replaced: rank correlation of alpha and the {RIGHT} above 0.5.",
            measure=rank_correlation("alpha", "accuracy", "family", across="rows"),
            rule=above(0.5),
            where=STRONG & (pl.col("noise") == 0.1),
            source=ENDS,
            **REDUCED,
        ),
        Claim(
            4,
            part="b",
            paper="At the weak end it falls.",
            tested="The same from other sources: below -0.5.",
            measure=rank_correlation("alpha", "accuracy", "family", across="rows"),
            rule=below(-0.5),
            where=MISLED & (pl.col("noise") == 0.1),
            source=ENDS,
            **REDUCED,
        ),
        Claim(
            4,
            part="c",
            paper="At the weak end it falls.",
            tested="The same from untrained networks: below -0.5.",
            measure=rank_correlation("alpha", "accuracy", "family", across="rows"),
            rule=below(-0.5),
            where=NONE & (pl.col("noise") == 0.1),
            source=ENDS,
            **REDUCED,
        ),
        Claim(
            5,
            paper="At the strong end, training on the most probable tenth of tokens alone beats the log-likelihood on all.",
            tested=f"Strong prior, noise: the {RIGHT}, log-likelihood on tokens above the base model's ninth decile minus that on all, above 0.",
            measure=difference("accuracy", "top-tenth", "nll"),
            rule=above(0.0),
            where=STRONG & NOISY,
            source=f"{PAPER}, Figure 5",
            **REDUCED,
        ),
        Claim(
            6,
            paper="Keeping only improbable tokens is the worst choice at the strong end.",
            tested="The same: log-likelihood on tokens with p <= 0.2 minus the worst of all tokens, p >= 0.2, the top tenth and alpha = 1, below 0.",
            measure=versus_best(
                "accuracy", "bottom", ["nll", "top", "top-tenth", "alpha=1"], kind="difference", lower_is_better=True
            ),
            rule=below(0.0),
            where=STRONG & NOISY,
            source=f"{PAPER}, Figure 5",
            **REDUCED,
        ),
        Untested(
            7,
            paper="In general instruction tuning the advantage of 1 - p appears only as the model grows, from 3B to 14B.",
            needs="models up to 14B and several GPUs; claim 15 is what strength of prior does on the continuum",
            source=PAPER,
        ),
        Claim(
            8,
            part="a",
            paper="The gradient at the logits is p^alpha (pi - 1[j = y]).",
            tested="No deviation above 1e-9 of autograd in float64, alpha from 0 to 10, 12 random batches.",
            measure=violations(pl.col("weight_gap") > 1e-9, "a deviation above 1e-9"),
            **CENSUS,
        ),
        Claim(
            8,
            part="b",
            paper="Its size W_f is largest at p = alpha / (1 + alpha).",
            tested="On a million points no other peak, to 1e-6.",
            measure=violations(pl.col("peak_gap") > 1e-6, "a peak elsewhere"),
            **CENSUS,
        ),
        Claim(
            8,
            part="c",
            paper="Dynamic fine-tuning has the gradient of 1 - p.",
            tested="Against sg(p) * -log p in torch alone (float64, to 1e-9 of its norm) and against TRL's trainer with loss_type='dft' (float32, to 1e-6).",
            measure=violations((pl.col("dft_gap") > 1e-9) | (pl.col("trl_dft_gap") > 1e-6), "another gradient"),
            **CENSUS,
        ),
        Claim(
            8,
            part="d",
            paper="The family is generalized cross-entropy, and the log-likelihood at alpha = 0.",
            tested="No deviation above 1e-9 from (1 - p^q) / q, nor above 1e-6 of its norm from the gradient of TRL's own loss.",
            measure=violations((pl.col("gce_gap") > 1e-9) | (pl.col("trl_nll_gap") > 1e-6), "another value"),
            **CENSUS,
        ),
        *OF_OURS,
    ],
    answer=Answer(
        measure=ratio("nll_held_out", "recommended", "alternative"),
        better="train with {level}: held-out log-loss is {estimate} times [{low}, {high}] as large on {workload}",
        worse="do not train with {level}, though the prior speaks for it: held-out log-loss is {estimate} times [{low}, {high}] as large on {workload}",
        tie="it matters little whether you train with {level}: held-out log-loss is {estimate} times [{low}, {high}] as large on {workload}",
        by="setting",
        by_label="and",
        workloads=[QWEN, "own"],
    ),
    figures=[
        Figure(
            "The right answer against strength of prior, a tenth of tokens replaced",
            x="prior",
            y="accuracy",
            source=f"{PAPER}, Figure 1; this study",
            where=(pl.col("noise") == 0.1)
            & pl.col("arm").is_in(["nll", "alpha=0.5", "alpha=1", "alpha=3", "alpha=10", "top", "untrained"]),
            workloads=[CONTINUUM],
            log_x=False,
            log_y=False,
            x_title="mean probability of demonstrated tokens before training",
            x_mean_by="level",
            y_title="probability of the right answer",
        ),
    ],
    timeout=600.0,
    memory=6.0,
)
