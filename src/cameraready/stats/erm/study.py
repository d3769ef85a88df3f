"""The theory put to the test: predictions from a known law against simulation, and errors estimated from data alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
from sklearn.base import clone

from cameraready.evidence import (
    Answer,
    Claim,
    Context,
    Figure,
    Study,
    above,
    average,
    below,
    interleave,
    ratio,
    ratio_of_sums,
    versus_best,
    within,
)  # fmt: skip
from cameraready.stats.erm.estimator import AsymptoticErrorEstimator
from cameraready.stats.erm.losses import log_cosh_penalty, pseudo_huber_penalty
from cameraready.stats.erm.workloads import (
    ALPHA,
    ARMS,
    SmoothPenaltyClassifier,
    Workload,
    distance,
    linear_model,
    loss_of,
    open_workload,
    predicted,
    signal,
    simulate,
)

PAPER = "Yaakoubi et al., 2026, arXiv:2604.03146"
DERIVED = f"{PAPER}, through the system derived in the method's sheet"

# --- trials ----------------------------------------------------------------------------------------------------------

KNOWN = ("rademacher", "gaussian", "dense", "elliptical", "regression")
TABLES = ("breast-cancer", "digits-3-8", "cells", "ames", "diabetes")
LAW = {
    "rademacher": ("logistic", "hinge", "squared", "pseudo-huber", "log-cosh"),
    "gaussian": ("logistic", "hinge"),
    "dense": ("logistic",),
    "elliptical": ("logistic",),
    "regression": ("squared", "huber"),
}
LARGE = {"rademacher": ("logistic", "squared", "squared_hinge"), "regression": ("squared", "huber")}
PENALTIES = {"pseudo-huber": pseudo_huber_penalty(ALPHA), "log-cosh": log_cosh_penalty(ALPHA)}
#: Known laws on which errors are estimated from samples, and with which losses.
DATA = {
    "rademacher": ("logistic",),
    "gaussian": ("logistic", "hinge"),
    "elliptical": ("logistic",),
    "regression": ("squared", "huber"),
}


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    smoke = tier == "smoke"
    if workload in KNOWN:
        for loss in LAW[workload]:
            yield {"part": "law", "loss": loss, "p": 60 if smoke else 200, "refits": 8 if smoke else 40}
        if not smoke:
            for loss in LARGE.get(workload, ()):
                yield {"part": "law", "loss": loss, "p": 400 if tier == "desk" else 1_000, "refits": 20}
        if workload == "rademacher":
            for p, refits in ((20, 20),) if smoke else ((25, 600), (50, 500), (100, 400)):
                yield {"part": "rate", "loss": "logistic", "p": p, "refits": refits}
        for loss in DATA.get(workload, ()):
            yield from data_conditions(loss, smoke)
        if workload in ("gaussian", "regression") and not smoke:
            yield {"part": "speed", "loss": DATA[workload][0]}
        return
    yield from data_conditions("", smoke)


def data_conditions(loss: str, smoke: bool) -> Iterator[dict[str, Any]]:
    for name in ARMS:
        # Leave-one-out by a Newton step needs a second derivative; sample moments need more rows than features.
        if not (name == "alo" and loss == "hinge") and not (name == "plug-in" and not loss):
            repeats = 1 if smoke else 2 if name in ("plug-in", "training") else 8
            yield {"part": "data", "loss": loss, "repeats": repeats, "estimator": name}


def trial(
    workload: Workload,
    ctx: Context,
    *,
    part: str,
    loss: str,
    estimator: str = "",
    p: int = 0,
    refits: int = 0,
    repeats: int = 0,
) -> list[dict[str, Any]]:
    loss = loss or workload.losses[0]
    if part == "data":
        return [estimated(workload, ctx, loss, repeats, estimator)]
    if part == "speed":
        return timed(workload, ctx, loss)
    return against_simulation(workload, ctx, loss, p, refits)


def against_simulation(workload: Workload, ctx: Context, loss: str, p: int, refits: int) -> list[dict[str, Any]]:
    """One row an arm: the theory with the features' own law, as the paper writes it, with normal features, and the simulation."""
    assert workload.design is not None
    design, n = workload.design(p), 2 * p
    if loss in PENALTIES:
        model: Any = SmoothPenaltyClassifier(PENALTIES[loss])
    else:
        model = linear_model(loss, n, workload.is_classification)
    seen = simulate(design, model, n, refits, 1_000 * p + ctx.seed, 2_000 if p > 100 else 500)
    rows = [{"estimator": "simulation", "error": seen.error, "alignment": seen.alignment, "trace": seen.trace}]
    answers = {
        "erm": predicted(design, model, n),
        "common": predicted(design, model, n, fluctuations="common"),
        "gaussian": predicted(design.gaussian_equivalent(), model, n),
    }
    for name, found in answers.items():
        alignment = float(found.coef_mean @ signal(design))
        rows.append(
            {
                "estimator": name,
                "error": found.test_error,
                "alignment": alignment,
                "trace": found.coef_trace,
                "ks": distance(found, seen.margins),
                "alignment_bias": p * (seen.alignment / alignment - 1.0),
                "trace_bias": p * (seen.trace / found.coef_trace - 1.0),
            }
        )
    return rows


def estimated(workload: Workload, ctx: Context, loss: str, repeats: int, name: str) -> dict[str, Any]:
    """What an arm says of the error of models fitted to fresh samples, against their error on rows they have not seen."""
    gaps, seconds, distrusted, scaled = [], [], [], []
    estimate = ctx.select(ARMS)[name]
    for repeat in range(repeats):
        seed = 100 * ctx.seed + repeat
        X, y, fresh, fresh_y = workload.sample(loss, seed)
        if len(np.unique(y)) < 2:
            raise ValueError(f"the training rows of split {seed} have a single value of the target")
        model = workload.estimator(loss)
        truth = loss_of(clone(model).fit(X, y), fresh, fresh_y)
        started = time.perf_counter()
        value = float(estimate(clone(model), X, y, seed))
        seconds.append(time.perf_counter() - started)
        if not np.isfinite(value):
            raise ValueError(f"{name} returned {value}, which is no error")
        gaps.append((value - truth) / workload.unit)
        if name == "erm":
            check = AsymptoticErrorEstimator(model).fit(X, y).universality_
            distrusted.append(not check.trusted)
            scaled.append(not check.concentrates)
    row = {
        "gap": float(np.mean(np.abs(gaps))),
        "squared_gap": float(np.mean(np.square(gaps))),
        "signed_gap": float(np.mean(gaps)),
        "seconds": float(np.mean(seconds)),
    }
    return {**row, "distrusted": float(np.mean(distrusted)), "scaled": float(np.mean(scaled))} if distrusted else row


def timed(workload: Workload, ctx: Context, loss: str) -> list[dict[str, Any]]:
    """Fit and estimate, in turn, one thread each."""
    X, y, _, _ = workload.sample(loss, 100 * ctx.seed)
    model = workload.estimator(loss)
    arms = {name: arm for name, arm in ctx.select(ARMS).items() if name in ("erm", "cv5", "alo")}
    calls = {name: lambda arm=arm: arm(clone(model), X, y, ctx.seed) for name, arm in arms.items()}
    rows = interleave(calls, warmup=2, repeats=5, arm_column="estimator")
    return [{"estimator": row["estimator"], "repeat": row["repeat"], "own_seconds": row["seconds"]} for row in rows]


# --- claims ----------------------------------------------------------------------------------------------------------


def law(p: int, *losses: str) -> pl.Expr:
    """Rows of known laws with 200 features, or from 400 on (the full tier has more)."""
    size = pl.col("p") == p if p < 400 else pl.col("p") >= p
    return (pl.col("part") == "law") & size & pl.col("loss").is_in(losses)


def ready_estimator(workload: Workload) -> AsymptoticErrorEstimator:
    """Fitted to the whole table."""
    if workload.rows is None:
        raise AttributeError(f"{workload.name} is a law to draw samples from; there is no table to fit an estimator to")
    return AsymptoticErrorEstimator(workload.estimator(workload.losses[0])).fit(*workload.rows)


ON_DATA = pl.col("part") == "data"
TWO_PERCENT = within(0.98, 1.02)
STUDY = Study(
    open=open_workload,
    workloads={"smoke": ["rademacher", "digits-3-8"], "desk": [*KNOWN, *TABLES], "full": [*KNOWN, *TABLES]},
    plan=plan,
    trial=trial,
    method="erm",
    arms="estimator",
    block="seed",
    seeds={"smoke": 2, "desk": 12, "full": 40},
    alone=lambda condition: condition["part"] == "speed",
    libraries={"*": ["numpy", "scipy", "scikit-learn"]},
    accepts=["table"],
    own_arm="a callable (estimator, X, y, seed) -> estimated error on fresh rows; estimator is an unfitted scikit-learn estimator or pipeline",
    component=ready_estimator,
    covers="the drawing of the samples",
    covers_own="which rows of this table are used for training, not the drawing of the table itself",
    claims=[
        Claim(
            1,
            part="a",
            paper="For fresh x the score is close in law to mu'x plus an independent N(0, tr(C E[xx'])).",
            tested="At p = 400, n = 800 the Kolmogorov distance of pooled margins of 20 refits is below 0.01: square, logistic, squared hinge.",
            scope="exact",
            source=DERIVED,
            measure=average("ks", "common"),
            rule=below(0.01),
            where=law(400, "logistic", "squared", "squared_hinge"),
            workloads=["rademacher"],
        ),
        Claim(
            1,
            part="b",
            paper="The same for regression losses.",
            tested="At p = 400, n = 800, correlated normal features and Laplace noise, the distance is below 0.01: square, Huber with scale.",
            scope="exact",
            source=DERIVED,
            measure=average("ks", "common"),
            rule=below(0.01),
            where=law(400, "squared", "huber"),
            workloads=["regression"],
        ),
        Claim(
            2,
            part="a",
            paper="Where mu'x is not normal, the score keeps its law: universality breaks, in a predicted way.",
            tested="Mean 1.2 in one Rademacher coordinate, logistic, p = 200: predicted / simulated error within 2 % of one.",
            scope="exact",
            source=DERIVED,
            measure=ratio("error", "common", "simulation"),
            rule=TWO_PERCENT,
            where=law(200, "logistic"),
            workloads=["rademacher"],
        ),
        Claim(
            2,
            part="b",
            paper="There the prediction for normal features of the same moments is wrong.",
            tested="The same design: the error predicted for normal features is more than 2 % below the simulated one.",
            scope="exact",
            source=DERIVED,
            measure=ratio("error", "gaussian", "simulation"),
            rule=below(0.98),
            where=law(200, "logistic"),
            workloads=["rademacher"],
        ),
        Claim(
            3,
            paper="Where mu'x is normal by averaging, universality holds.",
            tested="The same Rademacher coordinates with a dense mean: the error predicted for normal features is within 2 % of the simulated one.",
            scope="exact",
            source=DERIVED,
            measure=ratio("error", "gaussian", "simulation"),
            rule=TWO_PERCENT,
            where=law(200, "logistic"),
            workloads=["dense"],
        ),
        Claim(
            4,
            part="a",
            paper="mu is the mean of the estimator.",
            tested="Alignment mu'm / |m| within 2 % of the mean over 40 refits, logistic, p = 200.",
            scope="exact",
            source=DERIVED,
            measure=ratio("alignment", "common", "simulation"),
            rule=TWO_PERCENT,
            where=law(200, "logistic"),
            workloads=["rademacher", "gaussian"],
        ),
        Claim(
            4,
            part="b",
            paper="C is the covariance of the estimator.",
            tested="tr C within 2 % of the summed variances over 40 refits, logistic, p = 200.",
            scope="exact",
            source=DERIVED,
            measure=ratio("trace", "common", "simulation"),
            rule=TWO_PERCENT,
            where=law(200, "logistic"),
            workloads=["rademacher", "gaussian"],
        ),
        *(
            Claim(
                4,
                part=part,
                paper="Their error falls like 1/p.",
                tested=f"p times the relative error of {what} lies between -2 and 2 at p = {p}, logistic.",
                scope="exact",
                source="the method's sheet",
                measure=average(column, "common"),
                rule=within(-2.0, 2.0),
                where=(pl.col("part") == "rate") & (pl.col("p") == p),
                workloads=["rademacher"],
            )
            for part, column, what, p in (
                ("c", "alignment_bias", "the alignment", 25),
                ("d", "alignment_bias", "the alignment", 100),
                ("e", "trace_bias", "tr C", 25),
                ("f", "trace_bias", "tr C", 100),
            )
        ),
        Claim(
            5,
            part="a",
            paper="A smooth regulariser acts through its curvature at zero and its gradient at the mean.",
            tested="Pseudo-Huber and log-cosh penalties, p = 200: predicted alignment within 2 % of the simulated one.",
            scope="exact",
            source=f"{PAPER}, abstract",
            measure=ratio("alignment", "common", "simulation"),
            rule=TWO_PERCENT,
            where=law(200, "pseudo-huber", "log-cosh"),
            workloads=["rademacher"],
        ),
        Claim(
            5,
            part="b",
            paper="The same for the fluctuations.",
            tested="Pseudo-Huber and log-cosh penalties, p = 200: predicted tr C within 2 % of the simulated one.",
            scope="exact",
            source=f"{PAPER}, abstract",
            measure=ratio("trace", "common", "simulation"),
            rule=TWO_PERCENT,
            where=law(200, "pseudo-huber", "log-cosh"),
            workloads=["rademacher"],
        ),
        Claim(
            6,
            paper="Concentration of the rows is needed (negative control).",
            tested="Student rows x = r z (5 degrees of freedom): the Kolmogorov distance of the convolution form is above 0.01.",
            scope="exact",
            source=DERIVED,
            measure=average("ks", "common"),
            rule=above(0.01),
            where=law(200, "logistic"),
            workloads=["elliptical"],
        ),
        *(
            Claim(
                7,
                part=part,
                paper="(Ours.) Test errors are predicted from the law of the features without training.",
                tested=f"{loss}, n = 400, 200 features: predicted / simulated test error within 2 % of one.",
                scope="ours",
                source="this study",
                measure=ratio("error", "erm", "simulation"),
                rule=TWO_PERCENT,
                where=law(200, loss),
                workloads=names,
                pooled=False,
            )
            for part, loss, names in (
                ("a", "squared", ["regression", "rademacher"]),
                ("b", "logistic", ["rademacher", "gaussian", "dense"]),
                ("c", "hinge", ["rademacher", "gaussian"]),
                ("d", "huber", ["regression"]),
            )
        ),
        Claim(
            7,
            part="e",
            paper="(Ours.) And so is the law of the margins.",
            tested="n = 400, 200 features: Kolmogorov distance of predicted and simulated margins below 0.02, mean over losses.",
            scope="ours",
            source="this study",
            measure=average("ks", "erm"),
            rule=below(0.02),
            where=law(200, "squared", "logistic", "hinge", "huber"),
            workloads=["rademacher", "gaussian", "dense", "regression"],
            pooled=False,
        ),
        Claim(
            8,
            part="a",
            paper="(Ours.) Random scales are predictable if the fluctuations follow a row's scale.",
            tested="Student rows, logistic, p = 200: predicted / simulated error within 2 % of one.",
            scope="ours",
            source="this study",
            measure=ratio("error", "erm", "simulation"),
            rule=TWO_PERCENT,
            where=law(200, "logistic"),
            workloads=["elliptical"],
        ),
        Claim(
            8,
            part="b",
            paper="(Ours.) So is the law of the margins.",
            tested="Student rows: the Kolmogorov distance is at most half of that with a common variance.",
            scope="ours",
            source="this study",
            measure=ratio("ks", "erm", "common"),
            rule=below(0.5),
            where=law(200, "logistic"),
            workloads=["elliptical"],
        ),
        Claim(
            9,
            part="a",
            paper="(Ours.) From data alone, one fit estimates the test error better than five-fold cross-validation.",
            tested="Mean squared deviation from the error on held-out rows below that of five-fold cross-validation.",
            scope="ours",
            source="this study",
            measure=ratio_of_sums("squared_gap", "erm", "cv5"),
            rule=below(1.0),
            where=ON_DATA,
            workloads=[*DATA, *TABLES, "own"],
            pooled=False,
        ),
        Claim(
            9,
            part="b",
            paper="(Ours.) It is not worse than approximate leave-one-out.",
            tested="Mean squared deviation at most 1.1 times that of approximate leave-one-out.",
            scope="ours",
            source="this study",
            measure=ratio_of_sums("squared_gap", "erm", "alo"),
            rule=below(1.1),
            where=ON_DATA & (pl.col("loss") != "hinge"),
            workloads=[*DATA, *TABLES, "own"],
            pooled=False,
        ),
        Claim(
            9,
            part="c",
            paper="(Ours.) The theory with plugged-in sample moments is inconsistent.",
            tested="At n = 400 with 200 features its estimate of the share of wrong classes is on average at least 0.05 too low.",
            scope="ours",
            source="this study",
            measure=average("signed_gap", "plug-in"),
            rule=below(-0.05),
            where=ON_DATA,
            workloads=["rademacher", "gaussian"],
            pooled=False,
        ),
        Claim(
            10,
            part="a",
            paper="(Ours.) It costs a fraction of cross-validation.",
            tested="n = 400, 200 features: time of fit and estimate at most half of five-fold cross-validation's.",
            scope="ours",
            source="this study",
            measure=ratio("own_seconds", "erm", "cv5"),
            rule=below(0.5),
            where=pl.col("part") == "speed",
            workloads=["gaussian", "regression"],
            pooled=False,
        ),
        Claim(
            10,
            part="b",
            paper="(Ours.) With its checks it costs at most twice what approximate leave-one-out does.",
            tested="n = 400, 200 features: time of fit, estimate and checks at most twice that of fit and approximate leave-one-out.",
            scope="ours",
            source="this study",
            measure=ratio("own_seconds", "erm", "alo"),
            rule=below(2.0),
            where=pl.col("part") == "speed",
            workloads=["gaussian", "regression"],
            pooled=False,
        ),
        Claim(
            11,
            part="a",
            paper="(Ours.) The check trusts normal features.",
            tested="Share of samples (n = 400, p = 200) that are distrusted below 0.1.",
            scope="ours",
            source="this study",
            measure=average("distrusted", "erm"),
            rule=below(0.1),
            where=ON_DATA,
            workloads=["gaussian"],
        ),
        Claim(
            11,
            part="b",
            paper="(Ours.) It finds rows of random scale.",
            tested="Share of samples of Student rows in which the scale is found above 0.9.",
            scope="ours",
            source="this study",
            measure=average("scaled", "erm"),
            rule=above(0.9),
            where=ON_DATA,
            workloads=["elliptical"],
        ),
        Claim(
            11,
            part="c",
            paper="(Ours.) It finds a localised coordinate that is not normal.",
            tested="Share of samples with one informative Rademacher coordinate that are distrusted above 0.5.",
            scope="ours",
            source="this study",
            measure=average("distrusted", "erm"),
            rule=above(0.5),
            where=ON_DATA,
            workloads=["rademacher"],
        ),
    ],
    answer=Answer(
        measure=versus_best("gap", "erm", peers=("cv5", "alo"), floor=1e-3),
        where=ON_DATA,
        better="estimate the test error from one fit on {workload}: its deviation is {estimate} times [{low}, {high}] that of {peer}",
        worse="keep {peer} on {workload}: one fit's error estimate deviates {estimate} times [{low}, {high}] as much",
        tie="on {workload} one fit and {peer} estimate the test error equally well: ratio of deviations {estimate} [{low}, {high}]",
        workloads=[*TABLES, "own"],
    ),
    figures=[
        Figure(
            "Test error predicted and simulated, one informative Rademacher coordinate",
            x="p",
            y="error",
            source="this study",
            where=pl.col("part").is_in(["law", "rate"]) & (pl.col("loss") == "logistic"),
            workloads=["rademacher"],
            log_y=False,
            x_title="features, half as many as rows",
            y_title="test error of logistic regression",
        ),
    ],
    timeout=120.0,
    memory=3.0,
)
