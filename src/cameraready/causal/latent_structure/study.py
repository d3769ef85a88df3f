"""Latent structure put to the test: the rank test's size and power, the graphs found, the shifts found, and real questionnaires."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from cameraready.causal.latent_structure.trials import ready, trial
from cameraready.causal.latent_structure.workloads import open_workload
from cameraready.evidence import (
    Answer,
    Claim,
    Figure,
    Study,
    Untested,
    above,
    always,
    average,
    below,
    difference,
    ratio,
    versus_best,
    violations,
    within,
)

PAPER = "Dong et al., 2026, OpenReview NpreoXT7O7"
CAUSAL_LEARN = ("rlcd", "rlcd-single", "fci")
SIMULATED = ("sum", "pooled", "single", "rlcd", "rlcd-single", "rlcd-sum", "fci")

# --- plan -----------------------------------------------------------------------------------------------------------


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    if workload == "random-graphs":
        yield {"part": "constraints", "graphs": {"smoke": 3, "desk": 17, "full": 100}[tier]}
    elif workload in ("stationary", "shifting", "drifting"):
        for length in (60,) if tier == "smoke" else (60, 100, 200):
            yield {"part": "size", "length": length, "replicates": {"smoke": 25, "desk": 420, "full": 2000}[tier]}
        if workload != "drifting":
            yield {"part": "power", "length": 200, "replicates": {"smoke": 10, "desk": 60, "full": 500}[tier]}
    elif workload == "changed-indicators":
        for n_domains, n_changed in ((5, 1),) if tier == "smoke" else ((5, 0), (2, 1), (5, 1), (10, 1), (5, 2)):
            for arm in ("sum", "equal-variances"):
                yield {"part": "shifts", "n_domains": n_domains, "n_changed": n_changed, "arm": arm}
    else:
        yield from _graph_conditions(tier, workload)


def _graph_conditions(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    if workload in ("holzinger-swineford", "personality", "personality-25", "own"):
        for arm in ("sum", "close", "pooled", "rlcd", "fci", "factor-analysis"):
            yield {"part": "rows", "arm": arm}
        return
    changes: tuple[str, ...] = ("none", "noise", "coefficients") if tier != "smoke" else ("coefficients",)
    arms: tuple[str, ...] = SIMULATED
    if workload == "two-latents-500":
        changes, arms = ("coefficients",), (*SIMULATED, "gin")
    if workload == "one-latent":
        changes, arms = ("coefficients",), ("sum", "pooled", "single")
    if workload == "ten-latents":  # the others take minutes a graph
        changes, arms = ("coefficients",), ("sum",)
    for change in changes:
        for arm in arms:
            yield {"part": "graph", "change": change, "arm": arm}
    if workload == "two-latents" and tier != "smoke":
        yield {"part": "speed"}


# --- claims ---------------------------------------------------------------------------------------------------------

STRUCTURES = ("two-latents", "wide-cover", "observed-cause")
EVERYWHERE = (
    *("random-graphs", "stationary", "shifting", "drifting", *STRUCTURES),
    *("ten-latents", "changed-indicators", "holzinger-swineford"),
)
CHANGING = pl.col("change") == "coefficients"


def sized(length: int) -> pl.Expr:
    return (pl.col("part") == "size") & (pl.col("length") == length)


def changed(n_domains: int, n_changed: int) -> pl.Expr:
    return (pl.col("n_domains") == n_domains) & (pl.col("n_changed") == n_changed)


def size_claim(part: str, length: int) -> Claim:
    return Claim(
        6,
        part=part,
        paper="(Ours.) The test keeps its level in short windows, stationary or not.",
        tested=f"In windows of {length} rows a true rank is rejected at 5 % in 3.5 to 6.5 % of 5,040 tables.",
        scope="ours",
        source="this study",
        measure=average("rejected", "sum"),
        rule=within(0.035, 0.065),
        where=sized(length),
        workloads=["stationary", "shifting", "drifting"],
        pooled=False,
    )


def questionnaire_claims(first: str, second: str, workload: str, arm: str, how: str) -> list[Claim]:
    """Items are grouped as their authors did: better than by RLCD, about as well as by factor analysis."""
    common: dict[str, Any] = {"number": 9, "scope": "ours", "source": "this study", "where": pl.col("part") == "rows"}
    return [
        Claim(
            **common,
            part=first,
            paper="(Ours.) On questionnaires it groups items as their authors did, better than the ancestor.",
            tested=f"{how[0].upper()}{how[1:]}: adjusted Rand index with the published scales, from half of the rows, above RLCD's.",
            measure=difference("agreement", arm, "rlcd"),
            rule=above(0.0),
            workloads=[workload],
        ),
        Claim(
            **common,
            part=second,
            paper="(Ours.) ... and as well as factor analysis.",
            tested=f"{how[0].upper()}{how[1:]}: the same index at most 0.1 below that of varimax factors by Kaiser's rule.",
            measure=difference("agreement", arm, "factor-analysis"),
            rule=above(-0.1),
            workloads=[workload],
        ),
    ]


STUDY = Study(
    open=open_workload,
    workloads={
        "smoke": ["random-graphs", "shifting", "two-latents", "changed-indicators", "holzinger-swineford"],
        "desk": [*EVERYWHERE, "one-latent", "two-latents-500", "personality"],
        "full": [*EVERYWHERE, "three-wide", "personality-25"],
    },
    plan=plan,
    trial=trial,
    method="sum",
    arms="arm",
    block="seed",
    seeds={"smoke": 1, "desk": 12, "full": 50},
    alone=lambda condition: condition["part"] == "speed",
    libraries={
        "*": ["numpy", "scipy", "scikit-learn", "networkx"],
        **{name: ["causal-learn"] for name in ("rlcd", "rlcd-single", "rlcd-sum", "fci", "gin", "classical")},
    },
    accepts=["table"],
    own_arm="a callable (values (n, p), names, labels of domains (n,)) -> networkx.DiGraph over the names and latent nodes marked latent=True",
    component=ready,
    covers="the drawing of the model and of its rows; for questionnaires, which half of the rows was used",
    covers_own="which half of the rows the graph was made from",
    claims=[
        Claim(
            1,
            paper="The rank constraints of heterogeneous data are those of homogeneous data.",
            tested="The rank of the population covariance in each of three domains that differ in all coefficients and variances equals"
            " the t-separation number of the common graph, for 60 pairs of sets in each of 204 random graphs of 4 to 9 variables.",
            scope="exact",
            source=f"{PAPER}, abstract; Sullivant et al., 2010, Theorem 2.8",
            measure=violations(pl.col("mismatches") > 0, "a rank other than the t-separation number"),
            rule=always(),
            workloads=["random-graphs"],
        ),
        Claim(
            2,
            part="a",
            paper="A rank test for heterogeneous and nonstationary data keeps its level.",
            tested="With coefficients that jump or drift, a true rank is rejected at 5 % in fewer than 8 % of the tables, windows of 60 rows and more.",
            scope="reduced",
            source=f"{PAPER}, abstract",
            measure=average("rejected", "sum"),
            rule=below(0.08),
            where=pl.col("part") == "size",
            workloads=["shifting", "drifting"],
        ),
        Claim(
            2,
            part="b",
            paper="The test for homogeneous data does not: pooling breaks the constraints.",
            tested="With coefficients that change between windows of 200 rows, the pooled test rejects a true rank in more than 20 % of the tables.",
            scope="reduced",
            source=f"{PAPER}, abstract",
            measure=average("rejected", "pooled"),
            rule=above(0.2),
            where=sized(200),
            workloads=["shifting"],
        ),
        Claim(
            2,
            part="c",
            paper="Little is lost where data are homogeneous after all.",
            tested="Without any change, power at 5 % is at most 0.1 below that of the pooled test (six windows of 200 rows).",
            scope="reduced",
            source=f"{PAPER}, abstract",
            measure=difference("power", "sum", "pooled"),
            rule=above(-0.1),
            where=pl.col("part") == "power",
            workloads=["stationary"],
        ),
        Claim(
            3,
            part="a",
            paper="Graphs with latents are recovered from heterogeneous data where methods for homogeneous data fail.",
            tested="When coefficients change between five domains, F1 of edges, latent ones included, above that of the best of causal-learn's"
            " RLCD on all rows, RLCD on one domain, and FCI.",
            scope="reduced",
            source=f"{PAPER}, abstract",
            measure=versus_best("f1", "sum", peers=CAUSAL_LEARN, kind="difference", lower_is_better=False),
            rule=above(0.0),
            where=CHANGING,
            workloads=list(STRUCTURES),
        ),
        Claim(
            3,
            part="b",
            paper="Nothing is lost where coefficients do not change.",
            tested="Without change, or with noise variances alone changing, F1 within 0.1 of that of the same search with the pooled test.",
            scope="reduced",
            source=f"{PAPER}, abstract",
            measure=difference("f1", "sum", "pooled"),
            rule=within(-0.1, 0.1),
            where=pl.col("change").is_in(["none", "noise"]),
            workloads=list(STRUCTURES),
        ),
        Claim(
            3,
            part="c",
            paper="When coefficients change, one domain alone is better than all of them pooled.",
            tested="F1 of RLCD on the rows of one domain above that of RLCD on all rows.",
            scope="reduced",
            source=f"{PAPER}, abstract",
            measure=difference("f1", "rlcd-single", "rlcd"),
            rule=above(0.0),
            where=CHANGING,
            workloads=list(STRUCTURES),
        ),
        Claim(
            3,
            part="d",
            paper="The same against a method for non-Gaussian data.",
            tested="With 500 rows in five domains and Laplace noise, F1 above that of GIN on all rows.",
            scope="reduced",
            source=f"{PAPER}, abstract",
            measure=difference("f1", "sum", "gin"),
            rule=above(0.0),
            where=CHANGING,
            workloads=["two-latents-500"],
        ),
        Claim(
            3,
            part="e",
            paper="The same where latents are not counted.",
            tested="F1 of pairs of observed variables that are adjacent or share a latent above that of FCI, when coefficients change.",
            scope="reduced",
            source=f"{PAPER}, abstract",
            measure=difference("projected_f1", "sum", "fci"),
            rule=above(0.0),
            where=CHANGING,
            workloads=list(STRUCTURES),
        ),
        Claim(
            4,
            part="a",
            paper="The shifted variables are identified.",
            tested="With one of five indicators changing, in five domains of 200 rows, exactly it is found in more than 85 % of the families.",
            scope="reduced",
            source=f"{PAPER}, abstract",
            measure=average("exact", "sum"),
            rule=above(0.85),
            where=changed(5, 1),
            workloads=["changed-indicators"],
        ),
        Claim(
            4,
            part="b",
            paper="The shifted variables are told from those that only follow.",
            tested="With two of five changing, F1 of the set found above that of Levene's test of equal variances, column by column.",
            scope="reduced",
            source=f"{PAPER}, abstract",
            measure=difference("shift_f1", "sum", "equal-variances"),
            rule=above(0.0),
            where=changed(5, 2),
            workloads=["changed-indicators"],
        ),
        Untested(
            5,
            paper="Real data: the questionnaires on multitasking and on teachers' burnout of the ancestor's repository.",
            needs="those two tables, which no package carries; claims 9 use other questionnaires",
            source=PAPER,
        ),
        size_claim("a", 60),
        size_claim("b", 100),
        size_claim("c", 200),
        Claim(
            7,
            paper="(Ours.) More power than any test that is valid, or commonly used, when coefficients change.",
            tested="P-values tell false from true ranks better than those of the best of the pooled test, causal-learn's test on all rows,"
            " one domain alone, and the best domain with Bonferroni's correction (area under the curve).",
            scope="ours",
            source="this study",
            measure=versus_best(
                "told_apart",
                "sum",
                peers=("pooled", "classical", "single", "best-single"),
                kind="difference",
                lower_is_better=False,
            ),
            rule=above(0.0),
            where=pl.col("part") == "power",
            workloads=["shifting"],
        ),
        Claim(
            8,
            part="a",
            paper="(Ours.) The search is no worse than the ancestor's with the same test.",
            tested="F1 at most 0.05 below that of causal-learn's RLCD run with our rank test.",
            scope="ours",
            source="this study",
            measure=difference("f1", "sum", "rlcd-sum"),
            rule=above(-0.05),
            where=pl.col("part") == "graph",
            workloads=list(STRUCTURES),
        ),
        Claim(
            8,
            part="b",
            paper="(Ours.) It is faster.",
            tested="At most half the time of causal-learn's RLCD on the same 2,000 rows of eight columns, one thread each.",
            scope="ours",
            source="this study",
            measure=ratio("seconds", "sum", "rlcd", repeats="median"),
            rule=below(0.5),
            where=pl.col("part") == "speed",
            workloads=["two-latents"],
        ),
        *questionnaire_claims("a", "b", "holzinger-swineford", "sum", "301 pupils, as it comes"),
        *questionnaire_claims("c", "d", "personality", "close", "2,500 people, asking for close fit (0.05)"),
        Claim(
            10,
            paper="(Ours.) From five columns to fifty.",
            tested="When coefficients change, F1 of edges, latent ones included, above 0.9.",
            scope="ours",
            source="this study",
            measure=average("f1", "sum"),
            rule=above(0.9),
            where=CHANGING,
            workloads=["one-latent", "ten-latents"],
            pooled=False,
        ),
        Claim(
            11,
            paper="(Ours.) The graph says as much about rows that were not seen as the best of the others'.",
            tested="Negative log-likelihood a column of the other half of the rows at most 0.01 above that of the best of RLCD, FCI and"
            " factor analysis, mechanisms fitted to each domain.",
            scope="ours",
            source="this study",
            measure=versus_best("loss", "sum", peers=("rlcd", "fci", "factor-analysis"), kind="difference"),
            rule=below(0.01),
            where=pl.col("part") == "rows",
            workloads=["holzinger-swineford", "personality", "own"],
        ),
    ],
    answer=Answer(
        measure=versus_best("loss", "sum", exclude=("close", "pooled", "single", "rlcd-sum"), kind="difference"),
        better="use LatentStructure on {workload}: its error minus that of {peer}, the best of the others, is {estimate} [{low}, {high}]",
        worse="keep {peer} on {workload}: the error of LatentStructure minus its own is {estimate} [{low}, {high}]",
        tie="on {workload} LatentStructure and {peer} cannot be told apart: difference of error {estimate} [{low}, {high}]",
        break_even=0.0,
        where=pl.col("part").is_in(["graph", "rows"]),
        workloads=["own", "holzinger-swineford", "personality", *STRUCTURES],
    ),
    figures=[
        Figure(
            "Size of the test at 5 % against the length of the windows",
            x="length",
            y="rejected",
            where=pl.col("part") == "size",
            workloads=["stationary", "shifting", "drifting"],
            log_y=False,
            x_title="rows of a window",
            y_title="share of true ranks rejected",
        ),
        Figure(
            "Shifted indicators found, by the number of domains",
            x="n_domains",
            y="shift_f1",
            where=(pl.col("part") == "shifts") & (pl.col("n_changed") == 1),
            workloads=["changed-indicators"],
            log_y=False,
            x_title="domains of 200 rows",
            y_title="F1 of the set of shifted indicators",
        ),
    ],
    timeout=300.0,
    memory=4.0,
)
