"""Does a trimmed mean beat the mean when some measurements are wrong, and what does it cost when none is?"""

from __future__ import annotations

import numpy as np
import polars as pl
from cameraready.robust.trimmed_mean import TrimmedMean

from cameraready.evidence import Answer, Claim, Study, Untested, below, ratio, versus_best

PAPER = "Lugosi and Mendelson, 2021, arXiv:1907.11391"


def trimmed(sample):
    return TrimmedMean(trim=0.1).fit(sample[:, None]).location_[0]


ESTIMATORS = {"trimmed": trimmed, "mean": np.mean, "median": np.median}
WRONG = {"clean": 0.0, "dirty": 0.05}  # share of gross errors


def plan(tier, workload):
    for size in (50, 200):
        for estimator in ESTIMATORS:
            yield {"size": size, "estimator": estimator}


def trial(share, ctx, *, size, estimator):
    generator = np.random.default_rng([ctx.seed, size])
    wrong = generator.random(size) < share
    sample = generator.normal(size=size) + 20.0 * wrong
    return {"error": abs(ctx.select(ESTIMATORS)[estimator](sample))}


STUDY = Study(
    open=lambda spec: WRONG[spec.name],
    workloads={"smoke": ["dirty"], "desk": ["clean", "dirty"], "full": []},
    plan=plan,
    trial=trial,
    method="trimmed",
    arms="estimator",
    block="seed",
    seeds={"smoke": 2, "desk": 40, "full": 400},
    libraries={"*": ["numpy", "scikit-learn"]},
    own_arm="a callable sample (n,) -> number",
    claims=[
        Claim(
            1,
            paper="In one dimension, trimming protects the mean against contamination.",
            tested="With 5 % gross errors, the error is below a third of the mean's at 200 measurements.",
            scope="reduced",
            source=PAPER,
            measure=ratio("error", "trimmed", "mean"),
            rule=below(1 / 3),
            where=pl.col("size") == 200,
            workloads=["dirty"],
        ),
        Claim(
            2,
            paper="Without contamination it is about as good as the mean.",
            tested="On clean data the error is at most 1.5 times the mean's.",
            scope="reduced",
            source=PAPER,
            measure=ratio("error", "trimmed", "mean"),
            rule=below(1.5),
            workloads=["clean"],
        ),
        Untested(
            3,
            paper="A multivariate extension is optimal too.",
            needs="that extension; this is the version for one dimension",
            source=PAPER,
        ),
    ],
    answer=Answer(
        measure=versus_best("error", "trimmed"),
        better="trim on {workload}: error {estimate} times [{low}, {high}] that of the {peer}",
        worse="keep the {peer} on {workload}: trimming has {estimate} times [{low}, {high}] its error",
        tie="on {workload} the trimmed mean and the {peer} cannot be told apart ({estimate} [{low}, {high}])",
        by="size",
        by_label="with {level} measurements",
    ),
    covers="the drawing of the sample",
)
