"""What is claimed, by the paper and by us, and how each claim is judged; the first line of a finished run, and the figures."""

from __future__ import annotations

import polars as pl

from cameraready.evidence import (
    Answer,
    Claim,
    Figure,
    Untested,
    above,
    always,
    average,
    below,
    rank_correlation,
    ratio,
    versus_best,
    violations,
    within,
)  # fmt: skip
from cameraready.optim.sng.trials.rivals import ON_SAMPLES

PAPER = "Goldshlager, Hu and Lin, 2026, arXiv:2508.21022"
DERIVED = f"{PAPER}, through the formulas derived in the method's sheet"
RACES = ["poisson", "burgers", "least-squares"]
RIVALS = ("adam", "lbfgs", "muon", "singd", "randngd")
AT_END = (pl.col("part") == "race") & (pl.col("share") == 1.0)


def spectrum(part: str, decay: float | None = None) -> pl.Expr:
    rows = pl.col("part") == part
    return rows if decay is None else rows & (pl.col("decay") == decay)


CLAIMS: list[Claim | Untested] = [
    Claim(
        1,
        paper="Under squared-volume sampling the mean step is g(J'J) times the gradient, for every batch size, damping and residual.",
        tested="8 rows, batches of 1 to 4, damping 0 and 0.1: no entry of the mean over all batches is off by more than 1e-10.",
        scope="exact",
        source=DERIVED,
        measure=violations(pl.col("gap") > 1e-10, "a gap above 1e-10"),
        rule=always(),
        where=pl.col("arm") == "svs",
        workloads=["averages"],
    ),
    Claim(
        2,
        part="a",
        paper="Uniform batches have no such identity.",
        tested="The mean step's matrix does not commute with JJ', as a function of it would: relative commutator above 0.01.",
        scope="exact",
        source=DERIVED,
        measure=average("mixing", "uniform"),
        rule=above(0.01),
        workloads=["averages"],
    ),
    Claim(
        2,
        part="b",
        paper="So gradient and preconditioner from one batch differ from those of two independent batches.",
        tested="Damping 0.1: the mean step is more than 10 % of its length away from that with two independent batches.",
        scope="exact",
        source=DERIVED,
        measure=average("coupling", "uniform"),
        rule=above(0.1),
        workloads=["averages"],
    ),
    Claim(
        3,
        paper="SNG with eta = 1 contracts the mean squared error at least by 1 - alpha a step on consistent least squares.",
        tested="14 rows, 6 columns, singular values i^-p for p from 0 to 2, batches of 2 and 3: the exact gain a step is never below alpha.",
        scope="exact",
        source=PAPER,
        measure=violations(pl.col("over") < 1.0 - 1e-8, "a gain below the bound"),
        rule=always(),
        where=spectrum("exact") & (pl.col("arm") == "sng"),
        workloads=["spectra"],
    ),
    Claim(
        4,
        part="a",
        paper="SPRING reaches 1 - sqrt(alpha / beta).",
        tested="The same designs, mu and eta by the map: the exact gain a step is never below sqrt(alpha / beta).",
        scope="exact",
        source=DERIVED,
        measure=violations(pl.col("over") < 1.0 - 1e-8, "a gain below the bound"),
        rule=always(),
        where=spectrum("exact") & (pl.col("arm") == "spring"),
        workloads=["spectra"],
    ),
    Claim(
        4,
        part="b",
        paper="Its acceleration grows with the decay of the spectrum.",
        tested="500 rows, 40 columns, k = 10: rank correlation of the decay p and SPRING's gain over SNG's above 0.8.",
        scope="exact",
        source=PAPER,
        measure=rank_correlation("decay", "acceleration", "spring", across="rows"),
        rule=above(0.8),
        where=spectrum("simulated"),
        workloads=["spectra"],
    ),
    Claim(
        4,
        part="c",
        paper="With fast decay it is large.",
        tested="p = 2, k = 10: SPRING's gain a step is more than twice SNG's.",
        scope="exact",
        source=PAPER,
        measure=ratio("gain", "spring", "sng"),
        rule=above(2.0),
        where=spectrum("simulated", 2.0),
        workloads=["spectra"],
    ),
    Claim(
        5,
        part="a",
        paper="Without spectral decay SNG has no advantage over tuned SGD.",
        tested="p = 0: SNG's gain a step is between half and twice that of SGD with the best of 14 steps, at equal samples.",
        scope="exact",
        source=PAPER,
        measure=ratio("gain", "sng-anywhere", "sgd"),
        rule=within(0.5, 2.0),
        where=spectrum("simulated", 0.0),
        workloads=["spectra"],
    ),
    Claim(
        5,
        part="b",
        paper="With it the advantage is of orders of magnitude.",
        tested="p = 1.5: SNG's gain a step is more than ten times that of SGD with the best of 14 steps.",
        scope="exact",
        source=PAPER,
        measure=ratio("gain", "sng-anywhere", "sgd"),
        rule=above(10.0),
        where=spectrum("simulated", 1.5),
        workloads=["spectra"],
    ),
    Claim(
        6,
        part="a",
        paper="Acceleration persists in nonlinear problems with small samples.",
        tested="Networks of 1,200 parameters, batches of 128, equal wall time: SPRING's error below SNG's.",
        scope="reduced",
        source=PAPER,
        measure=ratio("error", "spring", "sng"),
        rule=below(1.0),
        where=AT_END,
        workloads=["poisson", "burgers", "own"],
        pooled=False,
    ),
    Untested(
        6,
        part="b",
        paper="The same for neural wavefunctions.",
        needs="a GPU and a package of wavefunctions (vmcnet, netket), for hours",
        source=PAPER,
    ),
    *(
        Claim(
            7,
            part=part,
            paper="(Ours.) A step costs a small multiple of one of Adam's.",
            tested=f"64 samples, 1,005,201 parameters, single precision: seconds of a step of {name} below 3 times Adam's.",
            scope="ours",
            source="this study",
            measure=ratio("step_seconds", name, "adam", repeats="median"),
            rule=below(3.0),
            where=pl.col("part") == "seconds",
            workloads=["perceptron"],
        )
        for part, name in (("a", "sng"), ("b", "spring"))
    ),
    *(
        Claim(
            7,
            part=part,
            paper="(Ours.) The same for a small physics-informed network, whichever way residuals are differentiated.",
            tested=f"Poisson, 128 points, 1,200 parameters, double precision, one thread: seconds of a step below {limit} times Adam's, {how}.",
            scope="ours",
            source="this study",
            measure=ratio("step_seconds", name, "adam", repeats="median"),
            rule=below(limit),
            where=pl.col("part") == "seconds",
            workloads=["poisson"],
        )
        for part, name, limit, how in (
            ("c", "spring", 5.0, "on the network that carries its derivatives"),
            ("d", ON_SAMPLES, 10.0, "by linearise"),
        )
    ),
    Claim(
        8,
        part="a",
        paper="(Ours.) At equal wall time it trains physics-informed networks further than other optimizers.",
        tested="A network that carries its derivatives forward, for all arms: error below half that of the best of Adam, L-BFGS, Muon and "
        "SINGD, each with the best of eight settings, and randngd.",
        scope="ours",
        source="this study",
        measure=versus_best("error", "spring", peers=RIVALS),
        rule=below(0.5),
        where=AT_END,
        workloads=["poisson", "burgers"],
        pooled=False,
    ),
    Claim(
        8,
        part="b",
        paper="(Ours.) It does so with residuals that are differentiated automatically, a sample at a time.",
        tested="With linearise and SPRING's setting, the others on the faster network: error below that of the best of them.",
        scope="ours",
        source="this study",
        measure=versus_best("error", ON_SAMPLES, peers=RIVALS),
        rule=below(1.0),
        where=AT_END,
        workloads=["poisson", "burgers"],
        pooled=False,
    ),
    Claim(
        8,
        part="c",
        paper="(Ours.) At equal wall time it solves consistent least squares further than other optimizers.",
        tested="4,000 rows, 400 columns, singular values i^-1, 0.4 s: error below that of the best of the others.",
        scope="ours",
        source="this study",
        measure=versus_best("error", "spring", peers=RIVALS, floor=1e-14),
        rule=below(1.0),
        where=AT_END,
        workloads=["least-squares"],
        pooled=False,
    ),
    *(
        Claim(
            9,
            part=part,
            paper="(Ours.) The predicted rates are tight enough to plan with.",
            tested=f"The small designs: {name}'s exact gain a step is on average at most {limit} times the predicted one.",
            scope="ours",
            source="this study",
            measure=average("over", name),
            rule=below(limit),
            where=spectrum("exact"),
            workloads=["spectra"],
        )
        for part, name, limit in (("a", "sng", 2.5), ("b", "spring", 2.0))
    ),
]
ANSWER = Answer(
    measure=versus_best("error", "spring", peers=RIVALS, floor=1e-14),
    where=AT_END,
    better="use SPRING on {workload}: at equal wall time its error is {estimate} times [{low}, {high}] that of {peer}, the best of the others",
    worse="keep {peer} on {workload}: at equal wall time SPRING's error is {estimate} times [{low}, {high}] its own",
    tie="on {workload} SPRING and {peer} end at about the same error at equal wall time: ratio {estimate} [{low}, {high}]",
    workloads=[*RACES, "own"],
)
FIGURES = [
    Figure(
        "Error against seconds, one thread",
        x="spent",
        y="error",
        source="this study",
        where=pl.col("part") == "race",
        workloads=RACES,
        x_title="seconds, the clock stopped for looking",
        y_title="relative error",
    ),
    Figure(
        "Error against samples",
        x="samples",
        y="error",
        source="this study",
        where=pl.col("part") == "race",
        workloads=RACES,
        x_title="rows seen",
        y_title="relative error",
    ),
    Figure(
        "Gain a step and the spectrum's decay",
        x="decay",
        y="gain",
        source=PAPER,
        where=spectrum("simulated"),
        workloads=["spectra"],
        log_x=False,
        x_title="decay p of the singular values i^-p",
        y_title="1 - factor of the mean squared error a step",
    ),
]
