"""The band put to the test: its bounds against arbitrary precision, its cost, and policies trained by it and by other clips at equal measured KL."""

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
    difference,
    ratio,
    versus_best,
    violations,
    within,
)
from cameraready.posttraining._workload import ACCEPTS, open_posttraining
from cameraready.posttraining._workload import cost as cost_of_runs
from cameraready.posttraining.bandpo.experiment import trials
from cameraready.posttraining.bandpo.experiment.claims import (
    BAND,
    BANDS,
    CENSUS,
    CENSUS_CHANGED,
    END,
    MORE,
    ON_ALL,
    ON_BOUNDS,
    ON_TRAINED,
    TRAINED,
)
from cameraready.posttraining.bandpo.experiment.trials import BANDIT, BOUNDS, LARGE, QWEN, SHIPPED, STRATEGIES

PAPER = "Li et al., 2026, arXiv:2603.04918"

# --- trials ----------------------------------------------------------------------------------------------------------


def open_workload(spec: Spec) -> Any:
    """A shipped world, the user's own enumerable task, or a language model with problems."""
    if spec.kind == "shipped" and spec.name == LARGE:
        spec = Spec(f"hf:{spec.name}", "hf", spec.name, options=spec.options)
    return trials.opened(open_posttraining(spec, SHIPPED))


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    yield from trials.planned(tier, workload)


def prepare(workload: Any, ctx: Context) -> Mapping[str, np.ndarray]:
    return trials.prepared(workload)


def trial(workload: Any, ctx: Context, *, part: str, **condition: Any) -> list[dict[str, Any]]:
    return list(getattr(trials, part)(workload, ctx, **condition))


def cost(spec: Spec, conditions: Sequence[Mapping[str, Any]], device: str, dtype: str) -> Cost:
    """Hours, memory and downloads of runs on a language model: of the arms, band and clip train one."""
    runs = sum(each["part"] == "train" and each["arm"] in trials.ON_MODELS for each in conditions)
    return cost_of_runs(spec, runs=runs, device=device, dtype=dtype, **trials.OWN_RUN) if runs else Cost(0.0, 0.0)


# --- claims ----------------------------------------------------------------------------------------------------------

REDUCED: dict[str, Any] = {"scope": "reduced", "source": f"{PAPER}, abstract and README"}

STUDY = Study(
    open=open_workload,
    workloads={
        "smoke": [BOUNDS, "bandit-small", "two-strategies-small"],
        "desk": [BOUNDS, BANDIT, *TRAINED, QWEN],
        "full": [BOUNDS, BANDIT, *TRAINED, LARGE],
    },
    plan=plan,
    trial=trial,
    prepare=prepare,
    method=BAND,
    arms="arm",
    block="run",
    alone=lambda condition: condition["part"] == "cost",
    libraries={"*": ["torch", "numpy"]},
    accepts=ACCEPTS,
    takes=("data", "tasks"),
    own_arm="a callable (logps, old_logps, advantages, mask, setting) -> losses (S,), differentiable; tensors (S, B, n, T), advantages "
    "(S, B, n), setting (S,), swept around 1 to reach equal KL",
    cost=cost,
    covers="the sampling, the policies' initial weights and, in the bandit, the instance",
    covers_own="the sampling and the policies' initial weights",
    claims=[
        Claim(
            1,
            part="a",
            paper="The solvers give the exact bounds within 1e-6 for all p.",
            tested="KL, total variation and chi-square, delta from 1e-6 to 0.5, p from 1e-12 to 1 - 1e-12: no bound of the default solver is off by a relative 1e-6 from 40-digit roots.",
            scope="exact",
            source=f"{PAPER}, the authors' repository",
            measure=violations(pl.col("newton") > 1e-6, "a bound off by more than 1e-6"),
            rule=always(),
            where=CENSUS,
            **ON_BOUNDS,
            changed=CENSUS_CHANGED,
        ),
        Claim(
            1,
            part="b",
            paper="So does bisection.",
            tested="The same of bisection, and of the three divergences given as functions of the user's.",
            scope="exact",
            source=f"{PAPER}, the authors' repository",
            measure=violations(pl.max_horizontal("bisect", "given") > 1e-6, "a bound off by more than 1e-6"),
            rule=always(),
            where=CENSUS,
            **ON_BOUNDS,
            changed=CENSUS_CHANGED,
        ),
        Claim(
            2,
            paper="The upward move of a rare token expands: at p = 0.08 and delta 0.05 by 0.1128 instead of 0.016.",
            tested="Room p (upper - 1) of KL 0.05 over that of clip 0.2: 0.1128 at p = 0.08, and at twelve p from there down to 0.0008 at least 7 times clip's.",
            scope="exact",
            source=f"{PAPER}, Section 1",
            measure=violations(
                (pl.col("arm") == BAND)
                & (
                    (pl.col("room") < 7 * 0.2 * pl.col("p"))
                    | ((pl.col("run") == 0) & ((pl.col("room") - 0.1128).abs() > 1e-4))
                ),
                "less room",
            ),
            rule=always(),
            where=pl.col("part") == "room",
            **ON_BOUNDS,
        ),
        Claim(
            3,
            part="a",
            paper="mean@32 rises by at least 2 points over GRPO with its symmetric clip.",
            tested="Exact accuracy after the last round, at equal measured KL, above that of clip by 0.02.",
            measure=difference("accuracy", BAND, "clip"),
            rule=above(0.02),
            **ON_TRAINED,
            **REDUCED,
        ),
        Claim(
            3,
            part="b",
            paper="pass@32 rises, by up to 28.9 %.",
            tested="Exact pass@16 after the last round, at equal measured KL, above that of clip.",
            measure=difference("pass16", BAND, "clip"),
            rule=above(0.0),
            **ON_TRAINED,
            **REDUCED,
        ),
        Untested(
            3,
            part="c",
            paper="mean@32 at least +2.0 over GRPO for Qwen2.5-3B, 7B and Llama 8B, about +10 on AMC23 for the 3B; pass@32 up to +28.9 % relative.",
            needs="eight GPUs for days (the authors' scripts), DAPO-Math-17k from the hub; `full` trains a 3B model by band and clip on one GPU",
            source=f"{PAPER}, the authors' repository",
        ),
        Claim(
            4,
            part="a",
            paper="Entropy stays an order of magnitude higher (0.2 against 0.02).",
            tested="Entropy of a token after the last round, at equal measured KL, over that of clip: above 10.",
            measure=ratio("token_entropy", BAND, "clip", floor=1e-6),
            rule=above(10.0),
            **ON_ALL,
            **REDUCED,
        ),
        Claim(
            4,
            part="b",
            paper="Entropy stays higher.",
            tested="The same, above 1.",
            measure=ratio("token_entropy", BAND, "clip", floor=1e-6),
            rule=above(1.0),
            **ON_ALL,
            **REDUCED,
        ),
        Claim(
            5,
            part="a",
            paper="The relaxed band, widened to hold [0.8, 1.28], is worse than the pure one.",
            tested="Mean exact accuracy over the run, pure less relaxed, at the nearest KL that the relaxed band can be brought to: above 0.",
            measure=difference("accuracy_mean", BAND, "band-relaxed"),
            rule=above(0.0),
            **ON_ALL,
            **REDUCED,
        ),
        Claim(
            5,
            part="b",
            paper="It is worse.",
            tested="The same of pass@16 after the last round.",
            measure=difference("pass16", BAND, "band-relaxed"),
            rule=above(0.0),
            **ON_TRAINED,
            **REDUCED,
        ),
        Claim(
            6,
            part="a",
            paper="KL, total variation and chi-square are all offered; which is best is not said. (We test that they are on par.)",
            tested="Mean exact accuracy over the run at equal measured KL, total variation less KL: within 0.02.",
            measure=difference("accuracy_mean", "band-tv", BAND),
            rule=within(-0.02, 0.02),
            **ON_ALL,
            **REDUCED,
        ),
        Claim(
            6,
            part="b",
            paper="The same of chi-square.",
            tested="Chi-square less KL: within 0.02.",
            measure=difference("accuracy_mean", "band-chi2", BAND),
            rule=within(-0.02, 0.02),
            **ON_ALL,
            **REDUCED,
        ),
        *MORE,
    ],
    answer=Answer(
        measure=versus_best("rounds_to_goal", BAND, exclude=BANDS),
        where=END,
        workloads=[BANDIT, *TRAINED, "own"],
        better="use the band on {workload}: it reaches the goal in {estimate} times [{low}, {high}] the rounds of {peer}, at equal KL per update",
        worse="keep {peer} on {workload}: at equal KL per update the band takes {estimate} times [{low}, {high}] its rounds to the goal",
        tie="on {workload} the band is no sooner at the goal than {peer} at equal KL per update ({estimate} times the rounds [{low}, {high}]): take it for one radius in nats for all tokens, or for entropy where many answers are right (claim 4b), not for speed",
    ),
    figures=[
        Figure(
            "Bounds on the ratio by old probability, delta = 0.05",
            x="p_old",
            y="bound",
            source=f"{PAPER}, Figure 2",
            where=pl.col("part") == "curves",
            workloads=[BOUNDS],
            x_title="old probability",
            y_title="upper bound",
        ),
        Figure(
            "Entropy over KL spent, at equal KL per round",
            x="spent",
            y="entropy_now",
            source="this study",
            where=pl.col("kind") == "curve",
            workloads=[BANDIT, *TRAINED, "own"],
            log_x=False,
            log_y=False,
            x_title="KL(old || new) spent (nats, mean of the arm's runs)",
            y_title="entropy of a token (nats)",
        ),
        Figure(
            "Probability of the rare strategy, at equal KL per round",
            x="round",
            y="rare_now",
            source="this study",
            where=pl.col("kind") == "curve",
            workloads=[BANDIT, STRATEGIES, "own"],
            log_x=False,
            log_y=False,
            x_title="round",
            y_title="probability of the rare strategy",
        ),
        Figure(
            "pass@16 over rounds, at equal KL per round",
            x="round",
            y="pass16_now",
            source="this study",
            where=pl.col("kind") == "curve",
            workloads=[BANDIT, *TRAINED, "own"],
            log_x=False,
            log_y=False,
            x_title="round",
            y_title="pass@16",
        ),
        Figure(
            "Share of tokens cut by the upper bound over rounds",
            x="round",
            y="clip_up_now",
            source="this study",
            where=pl.col("kind") == "curve",
            workloads=[BANDIT, *TRAINED, "own"],
            log_x=False,
            log_y=False,
            x_title="round",
            y_title="share of tokens with A > 0 and ratio above the bound",
        ),
        Figure(
            "Share of tokens cut by the upper bound, by old probability",
            x="p_up_to",
            y="share_up",
            source="this study",
            where=pl.col("kind") == "bucket",
            workloads=[BANDIT, *TRAINED, "own"],
            log_x=True,
            log_y=False,
            x_title="old probability up to",
            y_title="share of tokens with A > 0 and ratio above the bound",
        ),
        Figure(
            "Five steps of GRPO on a language model (no verdict)",
            x="optimizer_step",
            y="kl_now",
            source="this study",
            where=pl.col("kind") == "step",
            workloads=[QWEN, LARGE, "own"],
            log_x=False,
            log_y=False,
            x_title="optimizer step",
            y_title="KL(old || new) a token (nats)",
        ),
    ],
    timeout=900.0,
    memory=11.0,
)
