"""Miniature study 2, timing against each other: two ways to sort the same small integers."""

import numpy as np
import polars as pl

from cameraready.evidence import Answer, Claim, Study, always, below, interleave, ratio, versus_best, violations

SORTS = {"radix": lambda a: np.sort(a, kind="stable"), "timsort": lambda a: np.array(sorted(a.tolist()), dtype=a.dtype)}


def plan(tier, workload):
    yield {"n": 20_000 if tier == "smoke" else 100_000}


def trial(dtype, ctx, *, n):
    numbers = np.random.default_rng(ctx.seed).integers(0, 1_000, size=n).astype(dtype)
    sorts = ctx.select(SORTS)
    wrong = {name: int((np.diff(sort(numbers)) < 0).sum()) for name, sort in sorts.items()}
    timed = interleave(
        {name: lambda sort=sort: sort(numbers) for name, sort in sorts.items()}, repeats=3, arm_column="sort"
    )
    return [{**row, "wrong": wrong[row["sort"]]} for row in timed]


STUDY = Study(
    open=lambda spec: np.dtype(spec.name),
    workloads={"smoke": ["int16"], "desk": ["int16"], "full": []},
    plan=plan,
    trial=trial,
    method="radix",
    arms="sort",
    block="seed",
    seeds={"smoke": 1, "desk": 10, "full": 30},
    alone=True,
    libraries={"*": ["numpy"]},
    claims=[
        Claim(
            1,
            paper="Radix sort beats comparison sorts on short integers.",
            tested="Time at most half of Python's sort at 100,000 numbers.",
            scope="reduced",
            source="textbook",
            measure=ratio("seconds", "radix", "timsort"),
            rule=below(0.5),
        ),
        Claim(
            2,
            paper="It sorts.",
            tested="No neighbouring pair is out of order.",
            scope="exact",
            source="textbook",
            measure=violations(pl.col("wrong") > 0),
            rule=always(),
        ),
    ],
    answer=Answer(
        measure=versus_best("seconds", "radix"),
        better="use the radix sort: {estimate} times [{low}, {high}] the time of {peer}",
        worse="keep {peer}: the radix sort takes {estimate} times [{low}, {high}] its time",
        tie="the two sorts take the same time ({estimate} [{low}, {high}])",
    ),
)
