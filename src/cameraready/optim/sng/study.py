"""Claims about averages, rates and training put to the test: by enumeration, on least squares, and at equal wall time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cameraready.evidence import Context, Study
from cameraready.optim.sng.claims import ANSWER, CLAIMS, FIGURES, RACES
from cameraready.optim.sng.optimizer import SPRING
from cameraready.optim.sng.trials.own import open_problem
from cameraready.optim.sng.trials.problems import PROBLEMS, Problem
from cameraready.optim.sng.trials.rates import (
    averages,
    exact_contraction,
    network_seconds,
    simulated_contraction,
    step_seconds,
)
from cameraready.optim.sng.trials.rivals import ARMS, ON_SAMPLES, RANDNGD, first_order, train, train_in_jax, warm_up
from cameraready.optim.sng.trials.settings import SECONDS, chosen

# --- trials -------------------------------------------------------------------------------------------------------------

DECAYS = (0.0, 1.0, 1.5, 2.0)


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    smoke = tier == "smoke"
    instances = 1 if smoke else 12
    if workload == "averages":
        yield {"part": "averages", "instances": instances, "n_rows": 6 if smoke else 8}
    elif workload == "spectra":
        for decay in (1.0,) if smoke else DECAYS:
            for k in (2,) if smoke else (2, 3):
                yield {"part": "exact", "instances": instances, "decay": decay, "k": k}
            size = {"n_rows": 100, "runs": 8, "longest": 60} if smoke else {"n_rows": 500, "runs": 32, "longest": 400}
            yield {"part": "simulated", "instances": instances, "decay": decay, "k": 10, **size}
    elif workload == "perceptron":
        width = 64 if smoke else 700 if tier == "desk" else 4_000
        yield {"part": "seconds", "instances": 1 if smoke else 10, "width": width, "repeats": 1 if smoke else 3}
    else:
        seconds = 0.05 if smoke else SECONDS.get(workload, SECONDS["burgers"]) * (10.0 if tier == "full" else 1.0)
        others = [ON_SAMPLES] if workload in ("poisson", "burgers") else []
        others += ["randngd"] if workload in PROBLEMS and not smoke else []
        if workload == "poisson":
            yield {"part": "seconds", "instances": 1 if smoke else 10, "repeats": 1 if smoke else 5}
        for arm in (*ARMS, *others):
            yield {"part": "race", "instances": 1 if smoke else 10, "seconds": seconds, "arm": arm}


def trial(
    workload: Problem | str,
    ctx: Context,
    *,
    part: str,
    instances: int,
    arm: str = "",
    seconds: float = 0.0,
    decay: float = 0.0,
    k: int = 0,
    n_rows: int = 0,
    runs: int = 0,
    longest: int = 0,
    width: int = 0,
    repeats: int = 0,
) -> list[dict[str, Any]]:
    """Rows of `instances` blocks, numbered by the trial's seed."""
    found = []
    for i in range(instances):
        seed = 100 * ctx.seed + i
        if part == "averages":
            rows = averages(seed, n_rows)
        elif part == "exact":
            rows = exact_contraction(seed, decay, k)
        elif part == "simulated":
            rows = simulated_contraction(seed, decay, k, n_rows, runs, longest)
        elif part == "seconds" and isinstance(workload, Problem):
            torch.set_num_threads(1)
            rows = network_seconds(workload, seed, repeats)
        elif part == "seconds":
            rows = step_seconds(seed, width, 64, repeats)
        else:
            assert isinstance(workload, Problem)
            torch.set_num_threads(1)
            rows = (in_jax if arm == "randngd" else race)(workload, ctx, arm, seconds, seed)
        found += [{"instance": seed, **row} for row in rows]
    return found


def race(problem: Problem, ctx: Context, arm: str, seconds: float, seed: int) -> list[dict[str, Any]]:
    """One arm in PyTorch; the user's own with the closure of ordinary optimizers."""
    if arm in (*ARMS, ON_SAMPLES):
        how, settings = ARMS["spring" if arm == ON_SAMPLES else arm], chosen(problem.name, arm)
    else:
        make, settings = ctx.select({})[arm], {}

        def how(model: torch.nn.Module, _: Any) -> Any:
            return first_order(make(model.parameters()))

    warm_up(problem, how, settings)
    return train(problem, arm, how, settings, seconds, seed)


def in_jax(problem: Problem, ctx: Context, arm: str, seconds: float, seed: int) -> list[dict[str, Any]]:
    return train_in_jax(problem, ctx.peer(arm), chosen(problem.name, arm), seconds, seed)


def ready_optimizer(workload: Problem | str) -> SPRING:
    """With the setting that was chosen, over the parameters of a fresh model (``param_groups`` holds them)."""
    if isinstance(workload, str):
        raise AttributeError(f"{workload} is a measurement, not a problem to train on")
    return SPRING(workload.start(0).parameters(), **chosen(workload.name, "spring"))


STUDY = Study(
    open=open_problem,
    workloads={
        "smoke": ["averages", "spectra", "perceptron", "poisson", "least-squares"],
        "desk": ["averages", "spectra", "perceptron", *RACES],
        "full": ["averages", "spectra", "perceptron", *RACES],
    },
    plan=plan,
    trial=trial,
    method="spring",
    arms="arm",
    block="instance",
    seeds={"smoke": 1, "desk": 1, "full": 4},
    alone=lambda condition: condition["part"] in ("race", "seconds"),
    libraries={"*": ["torch", "numpy"], "singd": ["singd"], "randngd": ["randngd"]},
    peers=[RANDNGD],
    accepts=["object", "value"],
    own_arm="a callable (parameters) -> torch.optim.Optimizer whose step takes a closure that returns the loss after backward()",
    component=ready_optimizer,
    covers="the first parameters and the drawing of the batches, and for rates the drawing of the matrix",
    covers_own="the first parameters that your function makes of a seed, and the drawing of the batches; settings are those chosen on burgers",
    claims=CLAIMS,
    answer=ANSWER,
    figures=FIGURES,
    timeout=300.0,
    memory=4.0,
)
