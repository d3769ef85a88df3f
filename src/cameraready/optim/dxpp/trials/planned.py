"""The study's plan, and what each of its trials runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cameraready.evidence import Context
from cameraready.optim.dxpp.layer import qp_solve
from cameraready.optim.dxpp.trials import measured
from cameraready.optim.dxpp.trials.rivals import OPTIONS
from cameraready.optim.dxpp.trials.workloads import Data, Workload

INSTANCES = {"smoke": 1, "desk": 10, "full": 30}
#: Of training runs.
RUNS = {"smoke": 1, "desk": 10, "full": 20}
#: Of trials that measure time, all in one process so that it is started once.
TIMED = {"smoke": 1, "desk": 10, "full": 20}
SIZES = {"smoke": [20], "desk": [10, 20, 50, 100, 220, 450], "full": [10, 20, 50, 100, 220, 450, 1_000]}
DENSE_SPEED = {"smoke": [20], "desk": [50, 200, 450], "full": [50, 200, 450, 1_000, 2_000]}
SPARSE_SPEED = {
    "smoke": [200],
    "desk": [200, 1_000, 4_000, 10_000],
    "full": [200, 1_000, 4_000, 10_000, 100_000],
}
STEPS = {"smoke": 1, "desk": 20, "full": 1_000}
#: Programs larger than this are not given to the full KKT matrix.
MOST_FULL = 1_000
ARMS = {name: lambda *data, options=options: qp_solve(*data, **options) for name, options in OPTIONS.items()}


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    """A block is an instance: what is drawn."""
    smoke = tier == "smoke"
    if workload == "own":
        for i in range(12):
            # Without a size, which is the program's own.
            yield from ({"part": "layer", "instance": str(i), "arm": arm} for arm in OPTIONS)
        yield {"part": "speed", "instances": 10, "sizes": [0], "repeats": 5, "peers": False}
        return
    for i in map(str, range((RUNS if workload in ("portfolio", "sudoku") else INSTANCES)[tier])):
        if workload in ("portfolio", "sudoku"):
            for arm in ("dxpp", "kkt") if smoke else ("dxpp", "kkt", "cvxpylayers"):
                yield {"part": "training", "instance": i, "arm": arm, "steps": STEPS[tier]}
            continue
        if workload == "random-dense":
            yield {"part": "accuracy", "instance": i, "sizes": SIZES[tier]}
            yield {"part": "differences", "instance": i, "sizes": [10] if smoke else [10, 20, 50]}
            yield {"part": "repeated", "instance": i, "sizes": [20] if smoke else [20, 50, 100]}
        if workload == "simplex":
            yield {"part": "traps", "instance": i, "sizes": [20] if smoke else [30]}
        size = {"random-dense": 30, "simplex": 40, "chain": 200}[workload]
        yield {"part": "solvers", "instance": i, "sizes": [size]}
        if workload == "random-dense":
            yield from ({"part": "layer", "instance": i, "arm": arm, "n": 50} for arm in OPTIONS)
        if not smoke:
            names = ("libdqp", "libdqp-pardiso") if workload == "chain" else ("libdqp",)
            yield from ({"part": "libdqp", "instance": i, "arm": arm, "n": size} for arm in names)
    if workload in ("portfolio", "sudoku"):
        yield {"part": "step", "instances": TIMED[tier], "repeats": 1 if smoke else 2, "peers": not smoke}
        if workload == "portfolio" and not smoke:
            yield {"part": "diffqcp", "instance": "0", "arm": "diffqcp"}
            yield {"part": "products", "instances": TIMED[tier], "repeats": 3}
        return
    sizes = DENSE_SPEED[tier] if workload == "random-dense" else SPARSE_SPEED[tier]
    yield {"part": "speed", "instances": TIMED[tier], "sizes": sizes, "repeats": 2, "peers": not smoke}


def data_of(workload: Workload, n: int, seed: int) -> Data:
    if workload.own is not None:
        return workload.own
    assert workload.make is not None
    return workload.make(n, seed)


def trial(
    workload: Workload,
    ctx: Context,
    *,
    part: str,
    instance: str = "",
    instances: int = 0,
    arm: str = "",
    n: int = 0,
    sizes: list[int] | None = None,
    steps: int = 0,
    repeats: int = 0,
    peers: bool = False,
) -> list[dict[str, Any]]:
    first = 10_000 * (ctx.seed + 1)
    many = [first + i for i in range(instances)]
    if part == "speed":
        return timed(workload, ctx, many, sizes or [], repeats, peers)
    if part == "step":
        return [row for s in many for row in measured.step_seconds(ctx, workload.name, s, str(s), repeats, peers)]
    if part == "products":
        return [] if "diffqcp" in ctx.without else list(measured.against_diffqcp(ctx, workload.name, many, repeats))
    seed = first + int(instance)
    if part == "training":
        return [measured.trained(workload.name, seed, arm, steps)]
    if part == "layer":
        return [measured.layer_errors(data_of(workload, n, seed), seed, ctx.select(ARMS)[arm])]
    if part == "diffqcp":
        return [measured.diffqcp_errors(ctx, workload.name, seed)]
    if part == "libdqp":
        return [measured.libdqp_errors(ctx, data_of(workload, n, seed), seed, arm)]
    if part == "traps":
        return [row for size in sizes or [] for row in measured.traps(seed, size)]
    if part == "repeated":
        return [row for size in sizes or [] for row in measured.repeated_rows(seed, size)]
    made = {"accuracy": measured.accuracy, "differences": measured.finite_differences, "solvers": measured.solvers}[
        part
    ]
    return [row for size in sizes or [] for row in made(data_of(workload, size, seed), seed)]


def timed(
    workload: Workload, ctx: Context, seeds: list[int], sizes: list[int], repeats: int, peers: bool
) -> list[dict[str, Any]]:
    import torch

    torch.set_num_threads(1)
    rows = []
    for size in sizes:
        for seed in seeds:
            data = data_of(workload, size, seed)
            full = 0 < len(data["q"]) <= MOST_FULL and "h" in data
            rows += measured.speed(ctx, data, seed, str(seed), repeats, full, peers)
    return [{**row, "largest": max(row["n"] for row in rows)} for row in rows]
