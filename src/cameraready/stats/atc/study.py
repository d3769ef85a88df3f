"""ATC put to the test: regret on the paper's scenarios, false alarms, real annotated series, and its speed."""

from __future__ import annotations

import polars as pl

from cameraready.evidence import (
    Answer,
    Claim,
    Figure,
    Peer,
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
from cameraready.stats.atc.rivals import DEPLOYABLE, PASSIVE, UNINFORMED_PASSIVE
from cameraready.stats.atc.trials import open_workload, plan, ready_detector, trial

PAPER = "Gafni et al., 2026, arXiv:2602.11406"
OURS = "this study"
SCENARIOS = ["easy", "missed", "adversarial"]
LONGEST = (pl.col("part") == "regret") & (pl.col("horizon") == 9_000)
REGRET = pl.col("part") == "regret"
INFORMED = ("clocked-constant", "cusum-tuned", "bocpd-tuned")


def null(arm: str) -> pl.Expr:
    return (pl.col("part") == "alarms") & (pl.col("arm") == arm)


def timed(how: str) -> pl.Expr:
    return (pl.col("part") == "speed") & (pl.col("how") == how)


PAPERS: list[Claim | Untested] = [
    Claim(
        1,
        paper="With a fixed number of changes the regret grows like log T.",
        tested="Regret / log T grows with an exponent below 0.1 in T from 600 to 9,000 (predictions; a square root would give 0.37).",
        scope="exact",
        source=f"{PAPER}, upper bound and experiments",
        measure=growth("loss_per_log", "horizon", "atc"),
        rule=below(0.1),
        where=REGRET,
        workloads=SCENARIOS,
    ),
    *(
        Claim(
            2,
            part=part,
            paper="Passive methods (sliding and discounted means) grow much faster, also with their best tuning.",
            tested=f"The regret of the {what}, told T and S, grows with an exponent above 0.25 in T (log T itself: 0.13).",
            scope="exact",
            source=f"{PAPER}, experiments",
            measure=growth("loss", "horizon", arm),
            rule=above(0.25),
            where=REGRET,
            workloads=SCENARIOS,
        )
        for part, what, arm in (("a", "sliding mean", "window-tuned"), ("b", "discounted mean", "discount-tuned"))
    ),
    Claim(
        2,
        part="c",
        paper="ATC's regret is below that of passive methods.",
        tested="At T = 9,000 its regret is below that of the best of four passive means (fixed, and told T and S).",
        scope="exact",
        source=f"{PAPER}, experiments",
        measure=versus_best("loss", "atc", peers=PASSIVE),
        rule=below(1.0),
        where=LONGEST,
        workloads=SCENARIOS,
    ),
    Claim(
        2,
        part="d",
        paper="On real data (CPU load, NAB) ATC's error is below that of passive methods.",
        tested="On real series (shipped: ten annotated ones) its mean squared prediction error is below that of the better of two passive means.",
        scope="proxy",
        source=f"{PAPER}, experiment on NAB",
        measure=versus_best("loss", "atc", peers=UNINFORMED_PASSIVE),
        rule=below(1.0),
        where=pl.col("part").is_in(["annotated", "own"]),
        workloads=["annotated", "own"],
    ),
    Untested(
        2,
        part="e",
        paper="On NAB's ec2_cpu_utilization_ac20cd ATC's cumulative error is the lowest.",
        needs="that series, which no package carries; with the file at hand: --on ec2_cpu_utilization_ac20cd.csv:value",
        source=f"{PAPER}, experiment on NAB",
    ),
    Claim(
        3,
        paper="The probability of any false alarm in an endless run is at most alpha.",
        tested="On pure noise, over 10,000 samples, no block's share of alarmed streams has an upper limit (joint 95 %) above 5 %.",
        scope="reduced",
        source=f"{PAPER}, threshold",
        measure=violations(pl.col("alarm_bound") > 0.05, "an upper limit above 5 %"),
        rule=always(),
        where=null("atc"),
        workloads=["noise"],
    ),
    *(
        Claim(
            4,
            part=part,
            paper="A constant threshold is worse.",
            tested=f"At T = 9,000 the regret with the constant threshold {value} is above that with the anytime threshold.",
            scope="exact",
            source=f"{PAPER}, experiments (the official code's default is 6)",
            measure=ratio("loss", f"constant-{value}", "atc"),
            rule=above(1.0),
            where=LONGEST,
            workloads=SCENARIOS,
        )
        for part, value in (("a", 6), ("b", 3), ("c", 12))
    ),
    Claim(
        5,
        part="a",
        paper="The efficient scan has nearly the same regret as the exact one.",
        tested="At T = 9,000 the regret of the geometric scan is below 1.1 times that of the exact one.",
        scope="exact",
        source=f"{PAPER}, efficient variant",
        measure=ratio("loss", "atc-geometric", "atc"),
        rule=below(1.1),
        where=LONGEST,
        workloads=SCENARIOS,
    ),
    Claim(
        5,
        part="b",
        paper="Its work is O(log L) per step.",
        tested="The processor time per sample grows with an exponent below 0.25 in the segment's length from 1,000 to 100,000 (linear: 1).",
        scope="exact",
        source=f"{PAPER}, efficient variant",
        measure=growth("micros", "length", "atc-geometric"),
        rule=below(0.25),
        where=timed("growth"),
        workloads=["speed"],
    ),
    Claim(
        6,
        part="a",
        paper="Small changes that a classical CUSUM misses make its error grow linearly, since its reference is never tracked.",
        tested="With four jumps of 0.3 and one of 2 its regret grows with an exponent above 0.75 in T from 20,000 to 160,000.",
        scope="reduced",
        source=f"{PAPER}, endogenous confounding",
        measure=growth("loss", "horizon", "cusum-frozen"),
        rule=above(0.75),
        where=REGRET,
        workloads=["confounded"],
    ),
    Claim(
        6,
        part="b",
        paper="ATC's does not (Proposition 3.1).",
        tested="On the same streams ATC's regret grows with an exponent below 0.25.",
        scope="reduced",
        source=f"{PAPER}, Proposition 3.1",
        measure=growth("loss", "horizon", "atc"),
        rule=below(0.25),
        where=REGRET,
        workloads=["confounded"],
    ),
    Claim(
        7,
        part="a",
        paper="The regret is proportional to the number of segments S + 1, up to logarithms.",
        tested="At T = 10,000 the regret per segment has an exponent between -0.25 and 0.25 in S + 1, for S = 1 to 50.",
        scope="exact",
        source=f"{PAPER}, upper bound",
        measure=growth("loss_per_segment", "segments", "atc"),
        rule=within(-0.25, 0.25),
        where=pl.col("part") == "sweep",
        workloads=["many"],
    ),
    Untested(
        7,
        part="b",
        paper="No method's worst regret is below a constant times (S + 1) log(T / (S + 1)).",
        needs="a proof: a statement about all methods and the worst level cannot be tried out",
        source=f"{PAPER}, lower bound",
    ),
]

OURS_BEYOND: list[Claim | Untested] = [
    Claim(
        8,
        part="a",
        paper="(Ours.) It tracks better than what is in use today, untuned.",
        tested="At T = 9,000 its regret is below that of the best of ADWIN, Page-Hinkley, Bayesian online detection and two passive means.",
        scope="ours",
        source=OURS,
        measure=versus_best("loss", "atc", peers=DEPLOYABLE),
        rule=below(1.0),
        where=LONGEST,
        workloads=SCENARIOS,
    ),
    Claim(
        8,
        part="b",
        paper="(Ours.) It tracks as well as methods that are told the horizon and the number of changes, or tuned.",
        tested="At T = 9,000 its regret is below 1.1 times that of the best of clocked constant, tuned CUSUM and tuned Bayesian detection.",
        scope="ours",
        source=OURS,
        measure=versus_best("loss", "atc", peers=INFORMED),
        rule=below(1.1),
        where=LONGEST,
        workloads=SCENARIOS,
    ),
    Claim(
        8,
        part="c",
        paper="(Ours.) It predicts real series better than what is in use today, untuned.",
        tested="Its mean squared prediction error is below that of the best of the same five.",
        scope="ours",
        source=OURS,
        measure=versus_best("loss", "atc", peers=DEPLOYABLE),
        rule=below(1.0),
        where=pl.col("part").is_in(["annotated", "own"]),
        workloads=["annotated", "own"],
    ),
    Claim(
        9,
        part="a",
        paper="(Ours.) The exact scan at a fraction of the cost.",
        tested="For all statistics of 100,000 samples it takes less than half of focus-cpt 0.1.11's processor time, one thread each.",
        scope="ours",
        source=OURS,
        measure=ratio("micros", "atc", "focus-cpt"),
        rule=below(0.5),
        where=timed("batch"),
        workloads=["speed"],
    ),
    *(
        Claim(
            9,
            part=part,
            paper="(Ours.) One sample at a time it is no slower either.",
            tested=f"update() and the statistic take less processor time than {peer}'s.",
            scope="ours",
            source=OURS,
            measure=ratio("micros", "atc", peer),
            rule=below(1.0),
            where=timed("stream"),
            workloads=["speed"],
        )
        for part, peer in (("b", "focus-cpt"), ("c", "changepoint-online"))
    ),
    Claim(
        10,
        part="a",
        paper="(Ours.) The noise need not be known: false alarms stay rare.",
        tested='With sigma="mad", no block\'s share of alarmed streams of pure noise has an upper limit (joint 95 %) above 5 %.',
        scope="ours",
        source=OURS,
        measure=violations(pl.col("alarm_bound") > 0.05, "an upper limit above 5 %"),
        rule=always(),
        where=null("atc-mad"),
        workloads=["noise"],
    ),
    Claim(
        10,
        part="b",
        paper="(Ours.) Nor does it cost much regret.",
        tested='At T = 9,000 the regret with sigma="mad" is below 1.25 times that with the true standard deviation.',
        scope="ours",
        source=OURS,
        measure=ratio("loss", "atc-mad", "atc"),
        rule=below(1.25),
        where=LONGEST,
        workloads=SCENARIOS,
    ),
    Claim(
        11,
        paper="(Ours.) Online, it finds what people annotated about as well as PELT with the whole series at hand.",
        tested="On ten annotated series its F1 (margin 5) is at most 0.1 below that of ruptures' PELT.",
        scope="ours",
        source=OURS,
        measure=difference("f1", "atc", "pelt"),
        rule=above(-0.1),
        where=pl.col("part") == "annotated",
        workloads=["annotated"],
    ),
    Claim(
        12,
        paper="(Ours.) Several streams that jump together are tracked better by one detector than by one each.",
        tested="With ten streams and jumps of 0.7 its regret is below that of ten detectors that share alpha.",
        scope="ours",
        source=OURS,
        measure=ratio("loss", "atc", "atc-each"),
        rule=below(1.0),
        where=pl.col("part") == "dense",
        workloads=["dense"],
    ),
]

ANSWER = Answer(
    measure=versus_best("loss", "atc", peers=DEPLOYABLE),
    where=pl.col("part").is_in(["regret", "annotated", "own"]),
    better="use ATC on {workload}: its squared error is {estimate} times [{low}, {high}] that of {peer}, the best of the others",
    worse="keep {peer} on {workload}: ATC's squared error is {estimate} times [{low}, {high}] its own",
    tie="on {workload} ATC and {peer} cannot be told apart: squared errors in the ratio {estimate} [{low}, {high}]",
    workloads=[*SCENARIOS, "annotated", "own"],
)

FIGURES = [
    Figure(
        "Regret against the horizon",
        x="horizon",
        y="loss",
        source=f"{PAPER}, experiments",
        where=REGRET,
        x_title="samples T",
        y_title="regret, in units of the noise's variance",
    ),
    Figure(
        "Regret against the number of segments",
        x="segments",
        y="loss",
        source=f"{PAPER}, upper bound",
        where=pl.col("part") == "sweep",
        workloads=["many"],
        x_title="segments S + 1",
        y_title="regret at T = 10,000",
    ),
]

STUDY = Study(
    open=open_workload,
    workloads={
        "smoke": ["missed", "noise"],
        "desk": [*SCENARIOS, "confounded", "noise", "many", "dense", "annotated", "speed"],
        "full": [*SCENARIOS, "confounded", "noise", "many", "dense", "annotated", "speed"],
    },
    plan=plan,
    trial=trial,
    method="atc",
    arms="arm",
    block="block",
    alone=lambda condition: condition["part"] == "speed",
    peers=[
        Peer("focus-cpt==0.1.11", script="focus_peer.py", lock="focus.lock"),
        Peer("changepoint-online==1.2.1", script="focus_peer.py", lock="changepoint.lock"),
    ],
    libraries={
        "*": ["numpy", "scipy", "numba"],
        "adwin": ["river"],
        "page-hinkley": ["river"],
        "pelt": ["ruptures"],
        "focus-cpt": ["focus-cpt"],
        "changepoint-online": ["changepoint-online"],
    },
    accepts=["table"],
    own_arm="a callable (x: array (n,) with noise of standard deviation 1) -> array (n,) of predictions, each made from earlier samples only",
    component=ready_detector,
    covers="the drawing of the noise; on annotated series, which series is looked at",
    covers_own="which stretch of time of the series is looked at",
    claims=[*PAPERS, *OURS_BEYOND],
    answer=ANSWER,
    figures=FIGURES,
    timeout=300.0,
    memory=4.0,
)
