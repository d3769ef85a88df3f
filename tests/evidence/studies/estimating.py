"""Miniature study 1, many cheap trials: does a trimmed mean beat the mean when some measurements are wrong?"""

import numpy as np
import polars as pl

from cameraready.evidence import Answer, Claim, Study, Untested, below, ratio, versus_best


def trimmed(sample):
    cut = len(sample) // 10
    return np.sort(sample)[cut:-cut].mean()


ESTIMATORS = {"trimmed": trimmed, "mean": np.mean, "median": np.median}


def plan(tier, workload):
    for size in (50, 200):
        for estimator in ESTIMATORS:
            yield {"size": size, "estimator": estimator}


def trial(contamination, ctx, *, size, estimator):
    generator = np.random.default_rng([ctx.seed, size])
    wrong = generator.random(size) < contamination
    sample = generator.normal(size=size) + 20.0 * wrong
    return {"error": abs(ctx.select(ESTIMATORS)[estimator](sample))}


STUDY = Study(
    open=lambda spec: {"clean": 0.0, "dirty": 0.05}[spec.name],
    workloads={"smoke": ["dirty"], "desk": ["clean", "dirty"], "full": []},
    plan=plan,
    trial=trial,
    method="trimmed",
    arms="estimator",
    block="seed",
    seeds={"smoke": 2, "desk": 40, "full": 400},
    libraries={"*": ["numpy"]},
    own_arm="a callable sample (n,) -> number",
    claims=[
        Claim(
            1,
            paper="Trimming protects the mean against gross errors.",
            tested="With 5 % gross errors, the error is below a third of the mean's at 200 measurements.",
            scope="exact",
            source="textbook",
            measure=ratio("error", "trimmed", "mean"),
            rule=below(1 / 3),
            where=pl.col("size") == 200,
            workloads=["dirty"],
        ),
        Claim(
            2,
            paper="Without errors it loses next to nothing.",
            tested="On clean data the error is at most 1.5 times the mean's.",
            scope="exact",
            source="textbook",
            measure=ratio("error", "trimmed", "mean"),
            rule=below(1.5),
            workloads=["clean"],
        ),
        Untested(3, paper="The same in high dimension.", needs="a multivariate trimming rule"),
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
