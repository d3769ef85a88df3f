"""Miniature study 4, a census that must have no violation: integer square roots of large numbers."""

import math
import random

import polars as pl

from cameraready.evidence import Claim, Study, always, violations

ROOTS = {"isqrt": math.isqrt, "float": lambda n: int(math.sqrt(n))}


def plan(tier, workload):
    for part in range(2 if tier == "smoke" else 12):
        for root in ROOTS:
            yield {"part": part, "root": root}


def trial(bits, ctx, *, part, root):
    draw = random.Random(part)
    for _ in range(50):
        n = draw.getrandbits(bits) ** 2 - draw.randint(0, 1)
        found = ctx.select(ROOTS)[root](n)
        yield {"bits": bits, "gap": float(not found * found <= n < (found + 1) * (found + 1))}


STUDY = Study(
    open=lambda spec: int(spec.name.removesuffix("-bit")),
    workloads={"smoke": ["20-bit"], "desk": ["20-bit", "90-bit"], "full": []},
    plan=plan,
    trial=trial,
    method="isqrt",
    arms="root",
    block="part",
    claims=[
        Claim(
            1,
            paper="isqrt is exact.",
            tested="r^2 <= n < (r + 1)^2 for every number drawn.",
            scope="exact",
            source="Python documentation",
            measure=violations((pl.col("gap") > 0) & (pl.col("root") == "isqrt")),
            rule=always(),
        ),
        Claim(
            2,
            paper="The floating-point root is exact as well (it is not, beyond 53 bits).",
            tested="r^2 <= n < (r + 1)^2 for every number drawn.",
            scope="exact",
            source="a common belief",
            measure=violations((pl.col("gap") > 0) & (pl.col("root") == "float")),
            rule=always(),
        ),
    ],
)
