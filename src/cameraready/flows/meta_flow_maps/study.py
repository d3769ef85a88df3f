"""Meta flow maps put to the test: posterior draws, gradients of the value, rewards against calls, where fine-tuning ends, few steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from cameraready.evidence import (
    Answer,
    Claim,
    Context,
    Figure,
    Gallery,
    Spec,
    SpecError,
    Study,
    Untested,
    above,
    average,
    below,
    difference,
    ratio,
    versus_best,
    within,
)
from cameraready.flows._workload import ACCEPTS, open_flow
from cameraready.flows.meta_flow_maps.experiment.claims import (
    BOARD,
    DIGITS,
    EIGHT,
    OF_OURS,
    PAPER,
    REWARD,
    SIXTEEN,
    SMOKE,
)

SHIPPED = (EIGHT, SIXTEEN, BOARD, DIGITS, SMOKE)
EXACT_LAWS = [EIGHT, SIXTEEN]
RUNS = 10
#: A reward of a single particle scatters: more blocks, where calls are cheap.
REWARDED = {EIGHT: 40, SIXTEEN: 40, BOARD: 40, DIGITS: 20}
#: Arms that take many calls, left out where a call is dear.
DEAR = ("smc-64", "mfm-g-16", "mfm-gf-64")
WAYS = (
    "base", "best-of-10", "best-of-100", "best-of-1000", "best-of-1000-fast", "dps", "smc-16", "smc-64", "mfm-g-1", "mfm-g", "mfm-g-16",
    "mfm-g-sde", "mfm-gf", "mfm-gf-64",
)  # fmt: skip
SMOKE_WAYS = ("base", "best-of-10", "dps", "smc-16", "mfm-g", "mfm-gf")
TUNED = ("finetune", "finetune-weights", "reward-weighted", "constant-sigma", "not-tuned")


def open_workload(spec: Spec) -> Any:
    """A shipped name, or the user's flow, which is asked without labels."""
    workload = open_flow(spec, shipped=SHIPPED)
    if not isinstance(workload, str) and workload.labels is not None and not workload.needs_training:
        try:
            workload.velocity(workload.train[:2], 0.5)
        except TypeError as error:
            raise SpecError(
                f"this study asks a velocity without labels, as v(x, t), and yours cannot be ({error}); give it a default, y=None, that stands for all classes"
            ) from error
    return workload


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    smoke = tier == "smoke"
    runs = 2 if smoke else RUNS
    yield {"part": "posterior", "runs": runs}
    yield {"part": "few", "runs": runs}
    if workload == "own":
        return
    if workload in (EIGHT, SIXTEEN, SMOKE):
        yield {"part": "gradient", "runs": 20 if workload == EIGHT else runs}
    for arm in SMOKE_WAYS if smoke else WAYS:
        if workload != DIGITS or arm not in DEAR:
            yield {"part": "reward", "runs": runs if smoke else REWARDED[workload], "way": arm}
    if workload in (EIGHT, SMOKE):
        yield {"part": "law", "runs": runs}
        for arm in TUNED:
            yield {"part": "tilt", "runs": 1 if smoke else RUNS, "way": arm}


def trial(workload: Any, ctx: Context, *, part: str, **condition: Any) -> list[dict[str, Any]]:
    from cameraready.flows.meta_flow_maps.experiment import trials

    return list(getattr(trials, part)(trials.opened(workload, ctx.prepared), ctx, **condition))


def prepare(workload: Any, ctx: Context) -> Mapping[str, Any]:
    """Shipped maps are trained once on a machine; a user's is trained here and goes to the trials as arrays."""
    from cameraready.flows.meta_flow_maps.experiment import problems, trials

    if isinstance(workload, str):
        problems.problem(workload)
        return {}
    mfm = problems.own_training(trials.own(workload, trials.of_own(workload)))
    return {name: value.numpy() for name, value in mfm.state_dict().items()}


def component(workload: Any) -> Any:
    """The trained map of a shipped workload, or a new one for a user's data."""
    from cameraready.flows.meta_flow_maps.experiment import problems, trials

    return problems.problem(workload).mfm if isinstance(workload, str) else trials.of_own(workload)


REDUCED: dict[str, Any] = {"scope": "reduced", "source": PAPER}
POSTERIOR: dict[str, Any] = {"workloads": [EIGHT, SIXTEEN], "pooled": False}
PAPERS_DRAWS = "A draw X_{0,1}(eps; t, x) in one call has the law of the data given the noisy state."

STUDY = Study(
    open=open_workload,
    workloads={"smoke": [SMOKE], "desk": [EIGHT, SIXTEEN, BOARD, DIGITS], "full": [EIGHT, SIXTEEN, BOARD, DIGITS]},
    plan=plan,
    trial=trial,
    prepare=prepare,
    method="mfm",
    arms="arm",
    block="run",
    libraries={"*": ["torch"]},
    accepts=ACCEPTS,
    own_arm="a `MetaFlowMap` of the workload's data, or a callable draw(x_t, t, n, generator) -> (n, B, ...), as --with package.module:object",
    component=component,
    covers="noisy states, noises and samples, and for fine-tuning the training; the map of each workload was trained once",
    covers_own="noisy states, noises and samples; the map was trained once",
    claims=[
        Claim(
            1,
            part="a",
            paper=PAPERS_DRAWS,
            tested="Squared energy distance of one-call draws to draws of the exact posterior, at the worst of six times, below 0.05 of the mean distance between two draws.",
            measure=average("worst_energy", "mfm"),
            rule=below(0.05),
            where=pl.col("part") == "posterior",
            **REDUCED,
            **POSTERIOR,
        ),
        Claim(
            1,
            part="b",
            paper="The same of the conditional mean.",
            tested="The mean of one-call draws off by less than a quarter of the posterior's spread, on average over times.",
            measure=average("mean_error", "mfm"),
            rule=below(0.25),
            where=pl.col("part") == "posterior",
            **REDUCED,
            **POSTERIOR,
        ),
        Claim(
            1,
            part="c",
            paper="The same of the conditional covariance.",
            tested="Root mean square spread of one-call draws within 10 % of the posterior's.",
            measure=average("spread_ratio", "mfm"),
            rule=within(0.9, 1.1),
            where=pl.col("part") == "posterior",
            **REDUCED,
            **POSTERIOR,
        ),
        Claim(
            1,
            part="d",
            paper="The same of the weights of modes.",
            tested="Total variation between the modes of one-call draws and of the exact posterior below 0.1 (for draws of the exact posterior itself see the arm `exact`).",
            measure=average("weight_error", "mfm"),
            rule=below(0.1),
            where=pl.col("part") == "posterior",
            **REDUCED,
            **POSTERIOR,
        ),
        Claim(
            2,
            part="a",
            paper="The gradient of the value from N draws is consistent.",
            tested="With draws of the teacher's own inner flow the squared bias from 16 draws less 1/16 of that from one is below 0: it falls faster than N^-0.5.",
            measure=difference("scaled_bias", "flow-16", "flow-1"),
            rule=below(0.0),
            where=pl.col("part") == "gradient",
            workloads=EXACT_LAWS,
            pooled=False,
            **REDUCED,
        ),
        Claim(
            2,
            part="b",
            paper="DPS is biased where the posterior has several modes.",
            tested="Squared bias of the trained map's gradient from 16 draws less a quarter of that of DPS, below 0.",
            measure=difference("scaled_bias", "map-16", "dps"),
            rule=below(0.0),
            where=pl.col("part") == "gradient",
            workloads=EXACT_LAWS,
            pooled=False,
            **REDUCED,
        ),
        Claim(
            3,
            part="a",
            paper="A single steered particle beats the best of 1000 samples (ImageNet, several rewards).",
            tested="Reward of one particle of MFM-G with four draws a step minus that of the best of 1000 samples of the base flow, above 0.",
            measure=difference("reward", "mfm-g", "best-of-1000"),
            rule=above(0.0),
            where=pl.col("part") == "reward",
            **REDUCED,
            **REWARD,
        ),
        Claim(
            3,
            part="b",
            paper="It does so with over 100 times fewer evaluations.",
            tested="Calls of network and reward together, MFM-G against the best of 1000 samples, below 1/100.",
            measure=ratio("calls", "mfm-g", "best-of-1000"),
            rule=below(0.01),
            where=pl.col("part") == "reward",
            **REDUCED,
            **REWARD,
        ),
        Untested(
            3,
            part="c",
            paper="The same on ImageNet 256 with HPSv2 and other reward models.",
            needs="the DiT-XL/2 checkpoint, the reward models and a GPU",
            source=PAPER,
        ),
        Claim(
            4,
            paper="Fine-tuning from one posterior draw a state ends in p exp(r) / Z.",
            tested="300 steps from an exact base: squared energy distance to the exact tilt below a tenth of the base's.",
            measure=average("remaining", "finetune"),
            rule=below(0.1),
            where=pl.col("part") == "tilt",
            workloads=[EIGHT],
            pooled=False,
            **REDUCED,
        ),
        Claim(
            5,
            part="a",
            paper="Quality of unconditional samples in few steps is kept.",
            tested="Energy distance to data of four-call samples at most 0.02 (of the mean distance between data) above that of 32 Euler steps of the teacher.",
            measure=difference("distance", "mfm", "teacher-many"),
            rule=below(0.02),
            where=(pl.col("part") == "few") & (pl.col("budget") == 4),
            workloads=[EIGHT, SIXTEEN, BOARD, DIGITS],
            pooled=False,
            scope="proxy",
            source=PAPER,
        ),
        Untested(
            5,
            part="b",
            paper="FID on ImageNet 256 at 1, 2 and 4 steps.",
            needs="the DiT-XL/2 checkpoint, 50,000 samples and a GPU",
            source=PAPER,
        ),
        *OF_OURS,
    ],
    answer=Answer(
        measure=versus_best("worst_energy", "mfm", ["teacher-1", "teacher-4"]),
        better="draw posteriors on {workload} with a trained map: its one-call draws are {estimate} times [{low}, {high}] as far from the truth as {peer}",
        worse="draw posteriors on {workload} by the inner flow of your velocity: one-call draws of the map are {estimate} times [{low}, {high}] as far from the truth as {peer}",
        tie="it matters little on {workload}: one-call draws of the map are {estimate} times [{low}, {high}] as far from the truth as {peer}",
        where=pl.col("part") == "posterior",
    ),
    figures=[
        Figure(
            "Reward against calls of network and reward",
            x="calls",
            y="reward",
            source=f"{PAPER}; this study",
            where=pl.col("part") == "reward",
            log_y=False,
            x_title="calls of network and reward for one answer",
            y_title="reward",
        ),
        Figure(
            "Posterior draws by time of the state",
            x="time",
            y="energy",
            source="this study",
            where=(pl.col("part") == "posterior") & (pl.col("arm") != "exact"),
            log_x=False,
            log_y=False,
            x_title="time of the noisy state",
            y_title="energy distance to the posterior, share of its spread",
        ),
        Figure(
            "Unconditional samples in few calls",
            x="budget",
            y="distance",
            source="this study",
            where=pl.col("part") == "few",
            log_y=False,
            x_title="calls",
            y_title="energy distance to data",
        ),
    ],
    galleries=[
        Gallery(
            "Samples by way to a high reward",
            picture="picture",
            alt="alt",
            caption="caption",
            source="this study",
            where=pl.col("part") == "reward",
        )
    ],
    timeout=900.0,
    memory=6.0,
)
