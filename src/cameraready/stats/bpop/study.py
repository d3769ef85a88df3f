"""BPOP put to the test: does it find the dependencies behind traces, better than counting and mining, and what does that save?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from cameraready.evidence import (
    Answer,
    Claim,
    Context,
    Figure,
    Peer,
    Study,
    Untested,
    above,
    always,
    average,
    below,
    difference,
    growth,
    rank_correlation,
    ratio,
    versus_best,
    violations,
    within,
)
from cameraready.stats.bpop import PartialOrderModel
from cameraready.stats.bpop.trials.measured import enumerated, own_traces, recovered, speed
from cameraready.stats.bpop.trials.planned import RIVALS, plan
from cameraready.stats.bpop.trials.rivals import MINERS
from cameraready.stats.bpop.trials.workloads import N_GENERATED, RECIPES, TASKS, Workload, open_workload

PAPER = "Li et al., 2026, arXiv:2602.02806"
PAGE = f"{PAPER}, project page"
# --- trials ---------------------------------------------------------------------------------------------------------


def trial(workload: Workload, ctx: Context, *, part: str, instance: int, **condition: Any) -> list[dict[str, Any]]:
    if part == "exact":
        return [enumerated(workload, ctx, instance)]
    if part == "speed":
        return speed(workload, ctx, instance)
    if part == "own":
        return [own_traces(workload, ctx, instance, **condition)]
    return [recovered(workload, ctx, instance, **condition)]


def prepare(workload: Workload, ctx: Context) -> Mapping[str, np.ndarray]:
    """Workflows of a WfCommons recipe; nothing for the other workloads."""
    if workload.name not in RECIPES:
        return {}
    low, high = TASKS[workload.name]
    sizes = np.linspace(low, high, N_GENERATED).round().astype(int).tolist()
    return ctx.peer("wfcommons").workflows(RECIPES[workload.name], sizes, 0)


# --- claims ---------------------------------------------------------------------------------------------------------


def where(draw: str, coverage: float = 1.0, noise: float = 0.0) -> pl.Expr:
    same = (pl.col("coverage") == coverage) & (pl.col("noise") == noise)
    return (pl.col("part") == "accuracy") & (pl.col("draw") == draw) & same


ACCURATE = pl.col("part") == "accuracy"
NOISELESS_KAHN = ACCURATE & (pl.col("draw") == "kahn") & (pl.col("noise") == 0.0)
CLOUD, SYNTHETIC = ["cloud-iac"], ["synthetic-k2", "synthetic-k5", "synthetic-k20"]


#: Re-created graphs and traces: a pass supports the paper's sentence, a miss does not refute it.
REDUCED: dict[str, Any] = {"scope": "reduced", "source": PAGE, "pooled": False}
SYNTHESIS: dict[str, Any] = {**REDUCED, "source": f"{PAPER}, synthetic experiments"}
ABLATION: dict[str, Any] = {**REDUCED, "source": f"{PAPER}, the likelihood; an ablation that reviewers asked for"}
OURS: dict[str, Any] = {"scope": "ours", "source": "this study", "pooled": False}

STUDY = Study(
    open=open_workload,
    workloads={
        "smoke": ["cloud-iac", "small"],
        "desk": ["small", "cloud-iac", *SYNTHETIC, "srasearch", "epigenomics", "latent"],
        "full": ["small", "cloud-iac", *SYNTHETIC, "srasearch", "epigenomics", "montage", "latent"],
    },
    plan=plan,
    trial=trial,
    prepare=prepare,
    method="bpop",
    arms="arm",
    block="instance",
    alone=lambda condition: condition["part"] == "speed",
    peers=[
        Peer("pm4py==2.7.23.11", script="pm4py_peer.py", lock="pm4py.lock"),
        Peer("wfcommons==1.6", script="wfcommons_peer.py", lock="wfcommons.lock"),
    ],
    libraries={"*": ["numpy", "scipy", "numba", "networkx"], **{name: ["pm4py"] for name in MINERS}},
    accepts=["object", "value"],
    own_arm="a callable (traces, n_actions, seed) -> boolean array (n_actions, n_actions), True where the row's action must come before the column's; traces are lists of numbers from 0 to n_actions - 1",
    covers="which procedure it is, and which traces of it were seen",
    covers_own="which half of your traces is shown, and which is held out",
    component=lambda workload: PartialOrderModel(),
    claims=[
        Claim(
            1,
            part="a",
            paper="On Cloud-IaC-6 edges are recovered with an F1 of .95 at high coverage.",
            tested="On six procedures of that kind, with traces drawn as the paper pads them until every free pair was seen both ways, F1 on the reduced edges above .9.",
            measure=average("edge_f1", "bpop"),
            rule=above(0.9),
            where=where("model"),
            workloads=CLOUD,
            **REDUCED,
        ),
        Claim(
            1,
            part="b",
            paper="A share of .85 of the traces is feasible under the inferred order.",
            tested="Of 50 held-out traces of the same kind a share above .8 is a linear extension of the inferred order.",
            measure=average("feasible", "bpop"),
            rule=above(0.8),
            where=where("model"),
            workloads=CLOUD,
            **REDUCED,
        ),
        Claim(
            1,
            part="c",
            paper="It beats intersection, majority with cycle breaking, the Inductive Miner and the Heuristics Miner.",
            tested="Its edge F1 is above that of the best of these four (pm4py 2.7 at its defaults).",
            measure=versus_best(
                "edge_f1",
                "bpop",
                peers=("intersection", "majority", "inductive", "heuristics"),
                kind="difference",
                lower_is_better=False,
            ),
            rule=above(0.0),
            where=where("model"),
            workloads=CLOUD,
            **REDUCED,
        ),
        Untested(
            1,
            part="d",
            paper="The same on the traces of language-model agents themselves, of which in one scenario 12.5 % of the free pairs are covered.",
            needs="the recorded traces of Cloud-IaC-6, which come without a licence",
            source=PAGE,
        ),
        Claim(
            2,
            part="a",
            paper="On WfCommons' SRASearch edge F1 is .91.",
            tested="On ten generated SRASearch workflows of 22 to 28 tasks, 20,000 steps of four chains give an edge F1 above .86.",
            measure=average("edge_f1", "bpop"),
            rule=above(0.86),
            workloads=["srasearch"],
            **REDUCED,
        ),
        Claim(
            2,
            part="b",
            paper="On WfCommons' Epigenomics edge F1 is .79.",
            tested="On ten generated Epigenomics workflows of 41 to 45 tasks, 20,000 steps of four chains give an edge F1 above .74.",
            measure=average("edge_f1", "bpop"),
            rule=above(0.74),
            workloads=["epigenomics"],
            **REDUCED,
        ),
        Claim(
            2,
            part="c",
            paper="The likelihood is polynomial: 41 tasks take hours where counting linear extensions would take over a thousand.",
            tested="From 8 to 64 actions the time of a step grows with an exponent below 3.",
            measure=growth("seconds_per_step", "n_actions", "bpop"),
            rule=below(3.0),
            workloads=["latent"],
            scope="proxy",
            source=PAGE,
            pooled=False,
        ),
        Untested(
            2,
            part="d",
            paper="About 5 hours for 41 tasks against over 1,000 for the exact queue-jump likelihood.",
            needs="that likelihood and its thousand hours",
            source=PAGE,
        ),
        Untested(
            3,
            paper="Tokens a task: 583 with the graph alone, 13,234 hybrid, 38,999 exploring, 63,632 with chain of thought; success 67, 100, 50 and 67 %.",
            needs="a language model that operates a cloud; claim 9 counts what the executor itself can save",
            source=PAGE,
        ),
        Claim(
            4,
            part="a",
            paper="Five actions, 20 traces, 5 % errors, two dimensions: F1 .889.",
            tested="Over 20 random orders the mean edge F1 is above .84.",
            measure=average("edge_f1", "bpop"),
            rule=above(0.84),
            workloads=["synthetic-k2"],
            **SYNTHESIS,
        ),
        Claim(
            4,
            part="b",
            paper="The same with five dimensions: F1 .667.",
            tested="Over 20 random orders the mean edge F1 is above .62.",
            measure=average("edge_f1", "bpop"),
            rule=above(0.62),
            workloads=["synthetic-k5"],
            **SYNTHESIS,
        ),
        Claim(
            4,
            part="c",
            paper="The same with twenty dimensions: F1 1.0 or .667.",
            tested="Over 20 random orders the mean edge F1 is above .62.",
            measure=average("edge_f1", "bpop"),
            rule=above(0.62),
            workloads=["synthetic-k20"],
            **SYNTHESIS,
        ),
        Claim(
            4,
            part="d",
            paper="Expected calibration error from .02 to .09.",
            tested="The mean expected calibration error of edge probabilities is below .09.",
            measure=average("ece", "bpop"),
            rule=below(0.09),
            workloads=SYNTHETIC,
            **SYNTHESIS,
        ),
        Claim(
            5,
            part="a",
            paper="Quality rises with coverage.",
            tested="Between coverage .1, .3, .6 and 1 of one procedure, edge F1 and coverage have a positive rank correlation.",
            measure=rank_correlation("edge_f1", "ip_cov", "bpop", across="rows"),
            rule=above(0.0),
            where=NOISELESS_KAHN,
            workloads=CLOUD,
            **REDUCED,
        ),
        Claim(
            5,
            part="b",
            paper="Falling back on the language model vanishes at high coverage.",
            tested="With every free pair seen both ways, less than 5 % of runs of the inferred graph need the fallback.",
            measure=average("fell_back", "bpop"),
            rule=below(0.05),
            where=where("kahn"),
            workloads=CLOUD,
            **REDUCED,
        ),
        Claim(
            6,
            part="a",
            paper="The preference for actions with many successors matters.",
            tested="On traces drawn with it, edge F1 is above that of the same model with beta = 0 (a uniform frontier).",
            measure=difference("edge_f1", "bpop", "beta-0"),
            rule=above(0.0),
            where=where("model"),
            workloads=CLOUD,
            **ABLATION,
        ),
        Claim(
            6,
            part="b",
            paper="The preference for actions with many successors matters.",
            tested="The same on traces of Kahn's algorithm, which has no such preference: it costs less than .02 of edge F1.",
            measure=difference("edge_f1", "bpop", "beta-0"),
            rule=above(-0.02),
            where=where("kahn"),
            workloads=CLOUD,
            **ABLATION,
        ),
        Claim(
            7,
            part="a",
            paper="(Ours.) The sampler's edge probabilities are those of all partial orders enumerated: no edge is off by more than .05.",
            tested="The sampler's edge probabilities are those of all partial orders enumerated: no edge is off by more than .05.",
            measure=violations(pl.col("edge_gap") > 0.05, "an edge probability off by more than .05"),
            rule=always(),
            workloads=["small"],
            **OURS,
        ),
        Claim(
            7,
            part="b",
            paper="(Ours.) A compiled step takes less than a twentieth of the time of the same step in NumPy.",
            tested="A compiled step takes less than a twentieth of the time of the same step in NumPy.",
            measure=ratio("seconds_per_step", "bpop", "numpy"),
            rule=below(1 / 20),
            workloads=["latent"],
            **OURS,
        ),
        Claim(
            8,
            part="a",
            paper="(Ours.) On clean traces that show every free pair both ways there is nothing to gain: edge F1 is within .05 of plain intersection's.",
            tested="On clean traces that show every free pair both ways there is nothing to gain: edge F1 is within .05 of plain intersection's.",
            measure=difference("edge_f1", "bpop", "intersection"),
            rule=within(-0.05, 0.05),
            where=where("kahn"),
            workloads=CLOUD,
            **OURS,
        ),
        Claim(
            8,
            part="b",
            paper="(Ours.) With one pair of neighbours in ten exchanged, edge F1 is above that of the best of seven rivals, tolerant intersection and POWL among them.",
            tested="With one pair of neighbours in ten exchanged, edge F1 is above that of the best of seven rivals, tolerant intersection and POWL among them.",
            measure=versus_best("edge_f1", "bpop", peers=RIVALS, kind="difference", lower_is_better=False),
            rule=above(0.0),
            where=where("kahn", noise=0.1),
            workloads=CLOUD,
            **OURS,
        ),
        Claim(
            8,
            part="c",
            paper="(Ours.) The same on traces that are uniform linear extensions, which are not of the model.",
            tested="The same on traces that are uniform linear extensions, which are not of the model.",
            measure=versus_best("edge_f1", "bpop", peers=RIVALS, kind="difference", lower_is_better=False),
            rule=above(0.0),
            where=where("extensions", noise=0.1),
            workloads=CLOUD,
            **OURS,
        ),
        Claim(
            8,
            part="d",
            paper="(Ours.) Inferring the rate of errors instead of fixing it helps where it is far from what is assumed.",
            tested="With one pair of neighbours in ten exchanged, edge F1 with a Beta(1, 19) prior on eps is above that with eps = .02.",
            measure=difference("edge_f1", "eps-inferred", "bpop"),
            rule=above(0.0),
            where=where("kahn", noise=0.1),
            workloads=CLOUD,
            **OURS,
        ),
        Claim(
            9,
            part="a",
            paper="(Ours.) Run by the executor, fallback included, the inferred graph takes less than four fifths of the serial time.",
            tested="Run by the executor, fallback included, the inferred graph takes less than four fifths of the serial time.",
            measure=average("time_ratio", "bpop"),
            rule=below(0.8),
            where=where("kahn"),
            workloads=CLOUD,
            **OURS,
        ),
        Claim(
            9,
            part="b",
            paper="(Ours.) It reads less than four fifths of the tokens of an agent that keeps everything in its context.",
            tested="It reads less than four fifths of the tokens of an agent that keeps everything in its context.",
            measure=average("token_ratio", "bpop"),
            rule=below(0.8),
            where=where("kahn"),
            workloads=CLOUD,
            **OURS,
        ),
    ],
    answer=Answer(
        measure=versus_best("loss_per_step", "bpop", exclude=("beta-0", "eps-inferred"), kind="difference"),
        better="use BPOP on {workload}: its order predicts new traces better than that of {peer}, the best of the others, by {low} to {high} nats a step",
        worse="use {peer} on {workload}: its order predicts new traces better than BPOP's, by {low} to {high} nats a step",
        tie="on {workload} BPOP's order and that of {peer} predict new traces alike (difference {estimate} [{low}, {high}] nats a step)",
        break_even=0.0,
        by="noise",
        by_label="with {level:.0%} of neighbouring steps exchanged",
        where=(ACCURATE & (pl.col("draw") == "kahn") & (pl.col("coverage") == 1.0)) | (pl.col("part") == "own"),
        workloads=[*CLOUD, "own"],
    ),
    figures=[
        Figure(
            "Edges found against coverage",
            x="coverage",
            y="edge_f1",
            source=f"{PAGE}, quality against IP-Cov",
            where=NOISELESS_KAHN,
            workloads=CLOUD,
            log_x=False,
            log_y=False,
            x_title="share of free pairs seen in both orders",
            y_title="F1 of reduced edges",
        ),
        Figure(
            "Edges found against noise",
            x="noise",
            y="edge_f1",
            source="this study",
            where=ACCURATE & (pl.col("draw") == "kahn") & (pl.col("coverage") == 1.0),
            workloads=CLOUD,
            log_x=False,
            log_y=False,
            x_title="share of neighbours exchanged",
            y_title="F1 of reduced edges",
        ),
    ],
    timeout=300.0,
    memory=3.0,
)
