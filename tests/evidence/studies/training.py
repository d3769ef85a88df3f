"""Miniature study 3, curves over steps: gradient descent with and without momentum on ill-conditioned quadratics."""

import numpy as np
import polars as pl

from cameraready.evidence import Answer, Claim, Figure, Study, below, growth, ratio, versus_best

STEPS = 60
MOMENTUM = {"momentum": 0.8, "plain": 0.0}


def plan(tier, workload):
    for arm in MOMENTUM:
        yield {"optimizer": arm}


def trial(condition_number, ctx, *, optimizer):
    generator = np.random.default_rng(ctx.seed)
    curvature = np.geomspace(1, condition_number, 20)
    point, velocity = generator.normal(size=20), np.zeros(20)
    rows = []
    for step in range(1, STEPS + 1):
        velocity = ctx.select(MOMENTUM)[optimizer] * velocity - curvature * point / condition_number
        point = point + velocity
        rows.append({"step": step, "loss": 0.5 * float(curvature @ point**2)})
    return rows


STUDY = Study(
    open=lambda spec: float(spec.name.removeprefix("kappa-")),
    workloads={"smoke": ["kappa-30"], "desk": ["kappa-30", "kappa-100"], "full": []},
    plan=plan,
    trial=trial,
    method="momentum",
    arms="optimizer",
    block="seed",
    seeds={"smoke": 1, "desk": 12, "full": 50},
    claims=[
        Claim(
            1,
            paper="Momentum speeds up descent in narrow valleys.",
            tested="Loss after 60 steps below half of that without.",
            scope="exact",
            source="textbook",
            measure=ratio("loss", "momentum", "plain"),
            rule=below(0.5),
            where=pl.col("step") == STEPS,
        ),
        Claim(
            2,
            paper="The loss falls.",
            tested="The slope of log loss on log steps is below -0.5 over the last half.",
            scope="exact",
            source="textbook",
            measure=growth("loss", "step", "momentum"),
            rule=below(-0.5),
            where=pl.col("step") > STEPS // 2,
        ),
    ],
    answer=Answer(
        measure=versus_best("loss", "momentum"),
        where=pl.col("step") == STEPS,
        better="use momentum on {workload}: loss {estimate} times [{low}, {high}] that of {peer}",
        worse="keep {peer} on {workload}",
        tie="no difference on {workload}",
    ),
    figures=[Figure("Loss", x="step", y="loss", log_x=False)],
)
