"""The bi-anchor solver put to the test: mixtures with exact velocities, networks on digits, orders, costs; at equal evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import polars as pl

from cameraready.evidence import (
    Answer,
    Claim,
    Context,
    Figure,
    Gallery,
    Study,
    Untested,
    above,
    always,
    below,
    difference,
    growth,
    ratio,
    versus_best,
    violations,
    within,
)
from cameraready.flows._workload import ACCEPTS
from cameraready.flows.ba_solver import ba_sample
from cameraready.flows.ba_solver.experiment import trials
from cameraready.flows.ba_solver.experiment.arms import METHOD, PEERS, UNTRAINED, VARIANTS
from cameraready.flows.ba_solver.experiment.flows import (
    DIGITS,
    MIXTURES,
    ORDERS,
    PLANE,
    QUICK,
    UNET,
    Flow,
    cached_side,
    open_workload,
    ready,
)

RUNS = 10


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    smoke = tier == "smoke"
    if workload == ORDERS:
        yield {"part": "orders", "blocks": 2 if smoke else 10}
        return
    for run in range(2 if smoke else RUNS):
        yield {"part": "quality", "run": run}
    if smoke or workload in (*DIGITS, "own"):
        yield {"part": "cost", "blocks": 2 if smoke else 10, "batch": 8 if smoke else 32}


def trial(workload: Any, ctx: Context, *, part: str, **condition: Any) -> list[dict[str, Any]]:
    return list(getattr(trials, part)(ready(workload), ctx, **condition))


def prepare(workload: Any, ctx: Context) -> Mapping[str, Any]:
    return trials.prepared(ready(workload), ctx)


def component(workload: Any) -> Any:
    """`ba_sample` with the workload's velocity and, for the room's networks, their SideNet."""
    flow = ready(workload)
    if not isinstance(flow, Flow):
        return ba_sample
    side = cached_side(flow) if flow.name in DIGITS else None
    return partial(ba_sample, flow.raw, side, config=flow.config)


# --- claims ----------------------------------------------------------------------------------------------------------

PAPER = "Chen, Li, Wang and Chen, 2026, arXiv:2601.21542"
ABLATION = f"{PAPER}, ablation at 7 evaluations on ImageNet 256"
FLOWS = [*MIXTURES, *DIGITS]
EACH: dict[str, Any] = {"workloads": FLOWS, "pooled": False}
OWN: dict[str, Any] = {"workloads": [*FLOWS, "own"], "pooled": False, "scope": "ours", "source": "this study"}
OURS: dict[str, Any] = {"scope": "ours", "source": "this study", "pooled": False}
RMSE = "root mean square error of the ends against Runge-Kutta in fine steps"
NO_PEERS = [*VARIANTS, *trials.RATES, trials.LONG]


def at(nfe: int) -> pl.Expr:
    return pl.col("nfe") == nfe


def later(nfe: int, peers: int) -> pl.Expr:
    """The method at `nfe` evaluations, all others at `peers`."""
    mine = pl.col("arm") == METHOD
    return (mine & at(nfe)) | (~mine & at(peers))


STUDY = Study(
    open=open_workload,
    workloads={"smoke": [QUICK, ORDERS], "desk": [*FLOWS, ORDERS], "full": [*FLOWS, ORDERS]},
    plan=plan,
    trial=trial,
    prepare=prepare,
    method=METHOD,
    arms="arm",
    block="run",
    alone=lambda condition: condition["part"] == "cost",
    libraries={"*": ["torch", "diffusers", "scikit-learn"]},
    accepts=ACCEPTS,
    own_arm="a callable (velocity, x, times, y) -> samples like x, which asks velocity(x, t, y) at most len(times) - 1 times; the times it gets are uniform, and it may take others",
    component=component,
    covers="noise and labels; on the mixtures the SideNet's training too",
    covers_own="noise and labels, with one SideNet",
    claims=[
        Untested(
            1,
            paper="ImageNet 256 with REPA SiT-XL/2: FID 2.84, 1.96 and 1.65 at 5, 7 and 15 evaluations; at 7, Euler has 7.56 and Flow-DPM 4.03.",
            needs="a GPU, the SiT-XL/2 weights, ImageNet's statistics and 50,000 samples a setting; claim 8 is what a small machine can say",
            source=f"{PAPER}, main table",
        ),
        Untested(
            2,
            paper="ImageNet 512: FID 5.18, 2.88 and 1.83 at 5, 7 and 15 evaluations.",
            needs="the same at 512 x 512",
            source=f"{PAPER}, main table",
        ),
        Claim(
            3,
            part="a",
            paper="Ten evaluations have the quality of 100 and more Euler steps.",
            tested=f"The {RMSE}: at 10 evaluations below that of Euler in 100 uniform steps.",
            scope="reduced",
            source=f"{PAPER}, abstract",
            measure=ratio("rmse", METHOD, trials.LONG),
            rule=below(1.0),
            where=at(10) | (pl.col("arm") == trials.LONG),
            **EACH,
        ),
        Claim(
            3,
            part="b",
            paper="The same, as samples.",
            tested="Energy distance to data: at 10 evaluations within 0.005 of Euler in 100 steps. Ten steps of Euler are nearly so themselves (0.002 away in"
            " the plane) but in 16 dimensions (0.02), and on digits such distances are noise: elsewhere this says little.",
            scope="reduced",
            source=f"{PAPER}, abstract",
            measure=difference("energy", METHOD, trials.LONG),
            rule=within(-0.005, 0.005),
            where=at(10) | (pl.col("arm") == trials.LONG),
            **EACH,
        ),
        Claim(
            4,
            part="a",
            paper="A single anchor is worse (FID 4.35 against 1.96).",
            tested=f"The {RMSE} at 7 evaluations: below that of forward predictions at two Gauss-Legendre nodes.",
            scope="reduced",
            source=ABLATION,
            measure=ratio("rmse", METHOD, "ba-single"),
            rule=below(1.0),
            where=at(7),
            **EACH,
        ),
        Claim(
            4,
            part="b",
            paper="Without intermediate velocities it is worse (3.54).",
            tested="The same against the rule with the two ends alone: below 1.",
            scope="reduced",
            source=ABLATION,
            measure=ratio("rmse", METHOD, "ba-trapezoid"),
            rule=below(1.0),
            where=at(7),
            **EACH,
        ),
        Claim(
            4,
            part="c",
            paper="The rule hardly matters: Simpson 1.97.",
            tested="Lobatto against Simpson's 3/8 rule: between 0.95 and 1.05 times the error.",
            scope="reduced",
            source=ABLATION,
            measure=ratio("rmse", METHOD, "ba-simpson38"),
            rule=within(0.95, 1.05),
            where=at(7),
            **EACH,
        ),
        Claim(
            4,
            part="d",
            paper="Nor does the number of inner nodes: one 1.89, two 1.96.",
            tested="Two inner nodes against one, predicted from both ends: between 0.9 and 1.1 times the error.",
            scope="reduced",
            source=ABLATION,
            measure=ratio("rmse", METHOD, "ba-one-node"),
            rule=within(0.9, 1.1),
            where=at(7),
            **EACH,
        ),
        Claim(
            5,
            paper="Training the SideNet is negligible: under 2 % of the backbone's.",
            tested="Seconds of 400 steps of SideNet training over those of the 2,500 steps that the backbone had (the paper's had a million and more, so"
            " that its share must be smaller): below 0.02.",
            scope="proxy",
            source=f"{PAPER}, training cost",
            measure=ratio("training_seconds", "train-side", "train-backbone"),
            rule=below(0.02),
            workloads=DIGITS,
            pooled=False,
        ),
        Claim(
            6,
            paper="The SideNet adds about 6 % to the time of sampling.",
            tested="Seconds of 7 steps on 32 samples, one core, over those of Euler's: below 1.1.",
            scope="proxy",
            source=f"{PAPER}, time on an H800",
            measure=ratio("seconds", METHOD, "euler"),
            rule=below(1.1),
            where=at(7),
            workloads=[*DIGITS, "own"],
            pooled=False,
        ),
        Claim(
            7,
            paper="Inverting and sampling again comes back closer than with Euler at equal evaluations.",
            tested="Ten evaluations each way: root mean square difference from the start below Euler's.",
            scope="reduced",
            source=f"{PAPER}, inversion",
            measure=ratio("round_trip", METHOD, "euler"),
            rule=below(1.0),
            where=at(10),
            **EACH,
        ),
        *(
            Claim(
                8,
                part=part,
                paper="(Ours.) It is more accurate than the best solver that needs no training, each on its best grid.",
                tested=f"The {RMSE} at {nfe} evaluations, against the best of all peers: below 1.",
                measure=versus_best("rmse", METHOD, exclude=NO_PEERS),
                rule=below(1.0),
                where=at(nfe),
                **(OWN if nfe != 16 else {**OURS, "workloads": [*MIXTURES, UNET]}),
            )
            for part, nfe in (("a", 5), ("b", 7), ("c", 10), ("d", 16))
        ),
        Claim(
            9,
            paper="(Ours.) It still is against solvers that have an evaluation more.",
            tested="Seven evaluations against the best peer's eight, whatever the SideNet's time (claim 6): below 1.",
            measure=versus_best("rmse", METHOD, exclude=NO_PEERS),
            rule=below(1.0),
            where=later(7, 8),
            **{**OURS, "workloads": [*MIXTURES, UNET]},
        ),
        Claim(
            10,
            part="a",
            paper="(Ours.) Samples are closer to the data than the best peer's.",
            tested="Energy distance to data at 5 evaluations, less the best peer's: below 0. On digits, 20 or 30 samples in turn of class, it is noise.",
            measure=versus_best("energy", METHOD, exclude=NO_PEERS, kind="difference"),
            rule=below(0.0),
            where=at(5),
            **OWN,
        ),
        Claim(
            10,
            part="b",
            paper="(Ours.) And what a classifier sees in them is closer to what it sees in the ends of fine steps.",
            tested="Root mean square error of the classifier's 64 features at 5 evaluations, over the best peer's: below 1.",
            measure=versus_best("feature_error", METHOD, exclude=NO_PEERS),
            rule=below(1.0),
            where=at(5),
            workloads=DIGITS,
            **OURS,
        ),
        Claim(
            11,
            part="a",
            paper="(Ours.) Without a SideNet it is two-step Adams-Bashforth, whatever the rule.",
            tested="Random fields, six steps, four rules: no difference above 1e-12.",
            measure=violations(pl.col("identity_gap") > 1e-12, "a difference above 1e-12"),
            rule=always(),
            where=pl.col("identity_gap").is_not_null(),
            workloads=[ORDERS],
            changed="the rule is the same; the rows that it is about were not named, and others counted as not evaluated",
            **OURS,
        ),
        Claim(
            11,
            part="b",
            paper="(Ours; the paper's bounds give both the same order.) With a SideNet that is wrong by a constant its order is two.",
            tested="Random fields, 8 to 32 steps, the true change and an error of order h: exponent of the error between -2.3 and -1.7.",
            measure=growth("order_error", "steps", METHOD),
            rule=within(-2.3, -1.7),
            workloads=[ORDERS],
            **OURS,
        ),
        Claim(
            11,
            part="c",
            paper="(Ours.) With a single anchor it is one.",
            tested="The same: between -1.2 and -0.8.",
            measure=growth("order_error", "steps", "ba-single"),
            rule=within(-1.2, -0.8),
            workloads=[ORDERS],
            **OURS,
        ),
        Claim(
            12,
            part="a",
            paper="(Ours.) What is gained is the SideNet's doing.",
            tested=f"The {RMSE} at 7 evaluations, against the same solver without a SideNet: below 1.",
            measure=ratio("rmse", METHOD, UNTRAINED),
            rule=below(1.0),
            where=at(7),
            **{**OURS, "workloads": FLOWS},
        ),
        Claim(
            12,
            part="b",
            paper="(Ours.) Training on steps of the length that is then taken (rate 10) is better than on a fifth of it, the paper's rate 50.",
            tested="Rate 50 over rate 10 at 7 evaluations: above 1.",
            measure=ratio("rmse", "ba-rate-50", METHOD),
            rule=above(1.0),
            where=at(7),
            workloads=[PLANE],
            **OURS,
        ),
        Claim(
            13,
            paper="(Ours.) A round trip is closer than with the best peer.",
            tested="Ten evaluations each way, against the best of Euler, Heun and Adams-Bashforth: below 1.",
            measure=versus_best("round_trip", METHOD, ["euler", "heun", "ab2"]),
            rule=below(1.0),
            where=at(10),
            **OWN,
        ),
    ],
    answer=Answer(
        measure=versus_best("rmse", METHOD, exclude=NO_PEERS),
        better="train a SideNet for {workload}: its error is {estimate} times [{low}, {high}] that of {peer}, the best solver without training, at {level} evaluations",
        worse="do not train a SideNet for {workload}: its error is {estimate} times [{low}, {high}] that of {peer}, which needs no training, at {level} evaluations",
        tie="a SideNet gains nothing that can be told on {workload}: its error is {estimate} times [{low}, {high}] that of {peer}, which needs no training, at {level} evaluations",
        by="nfe",
        by_label="at {level} evaluations",
        where=pl.col("nfe").is_in([5, 7, 10]),
        workloads=[UNET, "own"],
    ),
    figures=[
        Figure(
            "Error against evaluations of the network",
            x="nfe",
            y="rmse",
            source=f"{PAPER}, Figure 1; this study",
            where=pl.col("arm").is_in([METHOD, *PEERS]) & pl.col("nfe").is_not_null() & pl.col("rmse").is_not_null(),
            workloads=[*FLOWS, QUICK, "own"],
            x_title="evaluations of the network",
            y_title="root mean square error of the ends",
        ),
        Figure(
            "What the second anchor is worth: error against steps with a SideNet that is wrong by a constant",
            x="steps",
            y="order_error",
            source=f"{PAPER}, error analysis; this study",
            where=pl.col("order_error").is_not_null(),
            workloads=[ORDERS],
            x_title="steps",
            y_title="root mean square error of the ends",
        ),
    ],
    galleries=[
        Gallery(
            "What five evaluations give",
            picture="picture",
            alt="picture_alt",
            caption="picture_caption",
            source="this study",
            workloads=[PLANE, UNET, QUICK],
        )
    ],
    timeout=600.0,
    memory=6.0,
)
