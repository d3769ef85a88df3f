"""What the study says beyond the paper's claims, its first line, figures and pictures."""

from __future__ import annotations

from typing import Any

import polars as pl

from cameraready.evidence import (
    Answer,
    Claim,
    Figure,
    Gallery,
    always,
    average,
    below,
    difference,
    versus_best,
    violations,
    within,
)
from cameraready.flows.cfo.experiment import larger
from cameraready.flows.cfo.experiment.trials import GRIDS, MOLECULES, PLANE_NAME

PAPER = "Gutjahr, De Santi, Schaufelberger, Jorner and Krause, 2026, arXiv:2605.30610"
END = pl.col("stage") == "end"
#: A bound counts as met up to a twentieth of it: what a network and 4,000 samples can tell.
MET = below(0.05)
GRID: dict[str, Any] = {"workloads": [GRIDS], "pooled": False, "where": END}
PLANE: dict[str, Any] = {"workloads": [PLANE_NAME], "pooled": False, "where": END}
DRUGS: dict[str, Any] = {"workloads": [MOLECULES], "pooled": False, "where": END}
TOY = f"{PAPER}, two-dimensional example"
TABLE = f"{PAPER}, molecular design table"

OF_OURS = [
    Claim(
        7,
        part="a",
        paper="",
        tested="Networks in the plane: KL(p || p*), estimated along memoryless paths (its zero is off by up to 0.2), of the expectation form minus that of the paper's per-sample form, below 0.",
        scope="ours",
        source="this study",
        measure=difference("kl_to_optimum", "cfo-expectation", "cfo"),
        rule=below(0.0),
        **PLANE,
    ),
    Claim(
        7,
        part="b",
        paper="",
        tested="The same by energy distance of drawn samples to the optimum.",
        scope="ours",
        source="this study",
        measure=difference("energy", "cfo-expectation", "cfo"),
        rule=below(0.0),
        changed="added after the run, which had it among its columns",
        **PLANE,
    ),
    Claim(
        8,
        paper="",
        tested="cooper-optim's augmented Lagrangian with the same inner solver, rounds and growth does as well: energy distance to the optimum of the expectation form minus its, within 0.02.",
        scope="ours",
        source="this study",
        measure=difference("energy", "cfo-expectation", "cooper"),
        rule=within(-0.02, 0.02),
        changed="was KL(p || p*) by paths within 0.1 nats; the run showed its zero to be off by as much",
        **PLANE,
    ),
    Claim(
        9,
        paper="",
        tested="Against eight weights from 0.01 to 100 at the same total budget (a user who knows the range): energy distance to the optimum of CFO minus its, below 0.",
        scope="ours",
        source="this study",
        measure=difference("energy", "cfo", "8-weights"),
        rule=below(0.0),
        **PLANE,
    ),
    Claim(
        10,
        paper="",
        tested="Energy distance to the optimum: CFO minus the best of three without rounds, below 0: guidance at inference (DPS, the best of eight weights), rejection of all above the bound from adjoint matching alone, and resampling of the pretrained model at the price that meets the bound (20 draws for each sample).",
        scope="ours",
        source="this study",
        measure=versus_best("energy", "cfo", ["guidance", "rejection", "resampling"], kind="difference"),
        rule=below(0.0),
        **PLANE,
    ),
    Claim(
        11,
        paper="",
        tested="Molecules: the expectation form on rdkit itself, as a black box with NFT inside, at half the rounds and batch: E[SA] by rdkit at most 2 % above the bound.",
        scope="ours",
        source="this study",
        measure=average("true_excess", "cfo-rdkit"),
        rule=below(0.02),
        **DRUGS,
    ),
    Claim(
        13,
        part="a",
        paper="",
        tested="In no run in the plane E[c] of CFO (per-sample penalty) ends more than a twentieth above the bound.",
        scope="ours",
        source="this study",
        measure=violations((pl.col("arm") == "cfo") & (pl.col("excess") > 0.05), "E[c] above the bound"),
        rule=always(),
        changed="added after the run, which had it among its columns",
        **PLANE,
    ),
    Claim(
        13,
        part="b",
        paper="",
        tested="The same of the expectation form.",
        scope="ours",
        source="this study",
        measure=violations((pl.col("arm") == "cfo-expectation") & (pl.col("excess") > 0.05), "E[c] above the bound"),
        rule=always(),
        changed="added after the run, which had it among its columns",
        **PLANE,
    ),
    Claim(
        12,
        paper="",
        tested="On your flow: E[c] of the expectation form at most a twentieth above the bound.",
        scope="ours",
        source="this study",
        measure=average("excess", "cfo-expectation"),
        rule=MET,
        workloads=["own"],
        pooled=False,
        where=END,
    ),
]

ANSWER = Answer(
    measure=versus_best("energy", "cfo", exclude=["pretrained", "cfo-3-rounds", "cfo-100-rounds"], kind="difference"),
    better="tune with CFO's rounds on {workload}: the energy distance of its samples to the optimum less that of {peer}, the next best, is {estimate} [{low}, {high}]",
    worse="{peer} comes nearer to the optimum than CFO's rounds on {workload}: energy distances differ by {estimate} [{low}, {high}]",
    tie="CFO's rounds and {peer}, the best of the others, come equally near to the optimum on {workload}: energy distances differ by {estimate} [{low}, {high}]",
    break_even=0.0,
    where=END,
    workloads=[PLANE_NAME],
)

FIGURES = [
    Figure(
        "How far E[c] lies above the bound, round by round",
        x="round",
        y="excess",
        source=f"{PAPER}, budget split; this study",
        where=pl.col("stage") == "round",
        workloads=[PLANE_NAME, MOLECULES],
        log_x=False,
        log_y=False,
        x_title="round",
        y_title="(E[c] - B) / B",
    ),
    Figure(
        "Rounds solved exactly: the largest |G|",
        x="round",
        y="gap",
        source=f"{PAPER}, Theorem 5.2; this study",
        where=(pl.col("stage") == "round") & (pl.col("arm") != "18-weights"),
        workloads=[GRIDS],
        x_title="round",
        y_title="|E[c] - B|",
    ),
]

GALLERIES = [
    Gallery(
        "Samples against the optimum",
        alt="alt",
        caption="caption",
        where=pl.col("stage") == "picture",
        workloads=[PLANE_NAME],
        per_arm=1,
    ),
    Gallery(
        "Molecules drawn from the tuned flows",
        alt="alt",
        caption="caption",
        where=pl.col("stage") == "picture",
        workloads=[MOLECULES],
        per_arm=larger.PICTURES,
    ),
]
