"""The study's plan, and what each of its trials runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cameraready.evidence import Context
from cameraready.stats.gp2scale import measurements
from cameraready.stats.gp2scale.measurements import FVGP
from cameraready.stats.gp2scale.rivals import MOST_DENSE, arms, fitted
from cameraready.stats.gp2scale.workloads import Workload

#: Seconds of processor time, on one thread, that every arm has to find its hyper-parameters, by workload of the desk tier.
SECONDS = {"wiggle": 6.0, "elevation": 5.0, "co2": 4.0, "ames": 10.0, "digits": 5.0, "own": 10.0}
REGRESSIONS = {
    "wiggle": ("gp2scale", "nonstationary", "matern", "svgp-10", "svgp-256", "ski-20", "ski-1000", "vecchia"),
    "elevation": ("gp2scale", "svgp-256", "ski-1000", "vecchia", "tapered"),
    "co2": ("gp2scale", "matern", "svgp-256", "ski-1000", "vecchia"),
    "ames": ("gp2scale", "matern", "svgp-256", "vecchia"),
    "digits": ("gp2scale", "svgp-256", "vecchia"),
    "own": ("gp2scale", "matern", "svgp-256", "vecchia"),
}
SMOKE = {"wiggle": ("gp2scale", "nonstationary", "mcmc", "matern"), "own": ("gp2scale", "matern")}
SIZES = {
    "smoke": [400, 800],
    "desk": [1_000, 2_000, 4_000, 8_000, 32_000],
    "full": [1_000, 5_000, 20_000, 50_000, 200_000],
}
SPEED = {
    "smoke": {},
    "desk": {5_000: list(FVGP), 20_000: list(FVGP)[1:]},
    "full": {5_000: list(FVGP), 20_000: list(FVGP)},
}


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    """A block is a seed: what is drawn, and which rows are held out."""
    small = tier == "smoke"
    if workload == "small":
        for dimension in (1, 2, 3):
            n = 120 if small else (1_500 if dimension == 2 and tier == "full" else 600)
            yield {"part": "exactness", "arm": "gp2scale", "dimension": dimension, "n": n}
        yield {"part": "indefinite", "arm": "gp2scale"}
    elif workload == "model":
        yield {"part": "coverage", "arm": "gp2scale", "n": 300 if small else 2_000}
    elif workload == "planted":
        yield {"part": "links", "n": 500 if small else 1_200}
    elif workload == "uniform":
        for name in FVGP if not small else ():
            yield {"part": "agreement", "arm": name, "n": 1_000}
        yield {"part": "growth", "sizes": SIZES[tier], "most_iterated": 800 if small else 4_000}
        for n, solvers in SPEED[tier].items():
            yield {"part": "speed", "n": n, "solvers": solvers}
    elif workload == "million":
        yield {"part": "million", "n": 1_000_000}
    else:
        names = SMOKE[workload] if small else REGRESSIONS[workload]
        names = (*names, "mcmc") if tier == "full" and workload == "wiggle" else names
        seconds = 0.5 if small else SECONDS[workload] * (10 if tier == "full" else 1)
        for name in names:
            yield {"part": "regression", "arm": name, "seconds": seconds, "n": 300 if small else 0}


def trial(
    workload: Workload,
    ctx: Context,
    *,
    part: str,
    arm: str = "",
    n: int = 0,
    dimension: int = 0,
    seconds: float = 0.0,
    sizes: list[int] | None = None,
    most_iterated: int = 0,
    solvers: list[str] | None = None,
) -> list[dict[str, Any]]:
    if part == "exactness":
        return list(measurements.gaps(ctx.seed, dimension, n))
    if part == "indefinite":
        return list(measurements.indefinite(ctx.seed))
    if part == "coverage":
        return [measurements.coverage_on_the_model(ctx.seed, n)]
    if part == "links":
        return list(measurements.far_field(ctx.seed, n))
    if part == "growth":
        return list(measurements.seconds_by_size(ctx.seed, sizes or [], most_iterated))
    if part == "agreement":
        return [row for row in measurements.against_fvgp(ctx, n, [arm]) if row["arm"] == arm]
    if part == "speed":
        return measurements.against_fvgp(ctx, n, solvers or [])
    if part == "million":
        return [measurements.a_million(ctx.seed, n)] if ctx.seed == 0 else []
    return regression(workload, ctx, arm, seconds, n)


def regression(workload: Workload, ctx: Context, arm: str, seconds: float, n: int) -> list[dict[str, Any]]:
    """Scores of one arm on this seed's split, in the same seconds for every arm."""
    assert workload.draw is not None
    rows = ctx.rows(len(workload.features)) if workload.features is not None else None
    split = workload.draw(ctx.seed, n or workload.n_train, rows)
    if arm == "matern" and len(split.y_train) > MOST_DENSE:
        return []  # a dense process of this size has no likelihood in the time
    if workload.name == "digits" and arm == "gp2scale":
        found = fitted(measurements.is_it_a_five(split), split, seconds)
    else:
        found = arms(ctx)[arm](split, seconds)
    mean, std = found.pop("mean"), found.pop("std")
    extra = {"brier": measurements.brier(split, mean)} if workload.name == "digits" else {}
    return [{"n_train": len(split.y_train), **measurements.scores(split, mean, std), **extra, **found}]
