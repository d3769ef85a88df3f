"""The arms of the comparison at equal wall time: one loop, one schedule, one set of settings to choose from for each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cameraready.evidence import Peer
from cameraready.optim.sng.jacobian import Linearised, linearise
from cameraready.optim.sng.optimizer import SNG, SPRING
from cameraready.optim.sng.trials.problems import Problem

#: ``arm(model, settings) -> (step, groups)``; `step(residuals)` makes one update from a function that gives the batch's residuals.
Residuals = Callable[[], Any]
Arm = Callable[[nn.Module, Mapping[str, Any]], tuple[Callable[[Residuals], Any], list[dict[str, Any]]]]

#: Shares of the time at which the error is looked at.
MARKS = tuple(2.0**-i for i in range(5, -1, -1))
#: How many times its first value an error counts as at most; an arm that diverges stays there.
WORST = 10.0


def _scalar(optimizer: torch.optim.Optimizer, residuals: Residuals) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = residuals().square().mean() / 2
        loss.backward()
        return loss

    return closure


def first_order(optimizer: torch.optim.Optimizer) -> tuple[Callable[[Residuals], Any], list[dict[str, Any]]]:
    return lambda residuals: optimizer.step(_scalar(optimizer, residuals)), optimizer.param_groups


def adam(model: nn.Module, settings: Mapping[str, Any]) -> Any:
    return first_order(torch.optim.Adam(model.parameters(), lr=settings["lr"], foreach=True))


def lbfgs(model: nn.Module, settings: Mapping[str, Any]) -> Any:
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=settings["lr"], max_iter=5, history_size=settings["history"], line_search_fn="strong_wolfe",
        tolerance_grad=0.0, tolerance_change=0.0,
    )  # fmt: skip
    return first_order(optimizer)[0], []


def muon(model: nn.Module, settings: Mapping[str, Any]) -> Any:
    """Muon for hidden matrices, Adam with the same learning rate for the last one and for vectors, as its authors advise."""
    params = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in params if p.ndim == 2]
    hidden = matrices[:-1] or matrices
    rest = [p for p in params if all(p is not q for q in hidden)]
    parts: list[torch.optim.Optimizer] = [
        torch.optim.Muon(hidden, lr=settings["lr"], weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    ]
    parts += [torch.optim.Adam(rest, lr=settings["lr"], foreach=True)] if rest else []

    def step(residuals: Residuals) -> None:
        model.zero_grad()
        (residuals().square().mean() / 2).backward()
        for part in parts:
            part.step()

    return step, [group for part in parts for group in part.param_groups]


def singd(model: nn.Module, settings: Mapping[str, Any]) -> Any:
    from singd.optim.optimizer import SINGD

    optimizer = SINGD(
        model, lr=settings["lr"], damping=settings["damping"], momentum=0.9, T=1, lr_cov=1e-2, normalize_lr_cov=True,
        structures=("dense", "dense"), kfac_approx="expand",
    )  # fmt: skip

    def step(residuals: Residuals) -> None:
        model.zero_grad()
        (residuals().square().mean() / 2).backward()
        optimizer.step()

    return step, optimizer.param_groups


def sng(model: nn.Module, settings: Mapping[str, Any]) -> Any:
    optimizer = SNG(model.parameters(), lr=settings["lr"], damping=settings["damping"])
    return optimizer.step, optimizer.param_groups


def spring(model: nn.Module, settings: Mapping[str, Any]) -> Any:
    optimizer = SPRING(model.parameters(), lr=settings["lr"], mu=settings["mu"], damping=settings["damping"])
    return optimizer.step, optimizer.param_groups


ARMS: dict[str, Arm] = {
    "spring": spring, "sng": sng, "adam": adam, "lbfgs": lbfgs, "muon": muon, "singd": singd,
}  # fmt: skip
#: SPRING with residuals of one sample, differentiated automatically: no help from the network.
ON_SAMPLES = "spring-linearise"
#: Natural gradient for PDE networks by randomised preconditioners, in JAX; it runs in an environment of its own.
RANDNGD = Peer("randngd==0.1.1", script="peers/randngd_peer.py", lock="peers/randngd.lock")


def train(
    problem: Problem,
    name: str,
    arm: Arm,
    settings: Mapping[str, Any],
    seconds: float,
    seed: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[dict[str, Any]]:
    """Rows of (share of the time, steps, samples, error), the clock stopped while errors are looked at.

    The learning rate of arms without a line search follows half a cosine over the time, equal for all.
    """
    generator = torch.Generator().manual_seed(seed)
    model = problem.start(seed)
    first = problem.error(model)
    step, groups = arm(model, settings)
    rates = [group["lr"] for group in groups]
    everything = torch.arange(problem.n_rows)
    rows, spent, steps, samples, finite = [], 0.0, 0, 0, True
    for mark in MARKS:
        while finite and spent < mark * seconds:
            started = clock()
            fade = 0.5 * (1.0 + math.cos(math.pi * min(1.0, spent / seconds)))
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * fade
            if settings.get("batch") == "all":
                batch = everything
            else:
                batch = torch.randperm(problem.n_rows, generator=generator)[: problem.batch]
            evaluations = 0

            def residuals(batch: Tensor = batch) -> Any:
                nonlocal evaluations
                evaluations += 1
                if name == ON_SAMPLES:
                    return on_samples(problem, model, batch)
                return problem.residuals(model, batch)

            finite = _advance(step, residuals)
            spent += clock() - started
            steps, samples = steps + 1, samples + evaluations * len(batch)
        rows.append(
            {
                "arm": name,
                "share": mark,
                "spent": spent,
                "steps": steps,
                "samples": samples,
                "error": bounded(problem.error(model) if finite else math.inf, first),
            }
        )
    return rows


def on_samples(problem: Problem, model: nn.Module, rows: Tensor) -> Linearised:
    """The residuals of these rows by `linearise`."""
    if problem.sample is None:
        raise ValueError(f"{problem.name} has no residual of one sample")
    function, columns = problem.sample
    return linearise(function, dict(model.named_parameters()), *(column[rows] for column in columns))


def warm_up(problem: Problem, arm: Arm, settings: Mapping[str, Any]) -> None:
    """One step on a model that is thrown away, so that no arm's first step pays for what a library loads then."""
    model = problem.start(0)
    step, _ = arm(model, settings)
    _advance(step, lambda: problem.residuals(model, torch.arange(problem.batch)))


def train_in_jax(
    problem: Problem, remote: Any, settings: Mapping[str, Any], seconds: float, seed: int
) -> list[dict[str, Any]]:
    """randngd from the same parameters, on all rows of the same residuals and on one thread; its errors are computed here."""
    model = problem.start(seed)
    first = problem.error(model)
    start = [p.detach().numpy().copy() for p in model.parameters()]
    found = remote.train(
        problem.points, start, settings["solver"], settings["damping"], settings["sketch"], seconds, list(MARKS)
    )
    rows = []
    for mark, at in zip(MARKS, found, strict=True):
        with torch.no_grad():
            for p, weight in zip(model.parameters(), at["weights"], strict=True):
                p.copy_(torch.from_numpy(weight.copy()))
        steps = int(at["steps"])
        rows.append(
            {
                "arm": "randngd",
                "share": mark,
                "spent": float(at["seconds"]),
                "steps": steps,
                "samples": steps * problem.n_rows,
                "error": bounded(problem.error(model), first),
            }
        )
    return rows


def _advance(step: Callable[[Residuals], Any], residuals: Residuals) -> bool:
    """One update; False where numbers stopped being finite, which ours say by an error."""
    try:
        step(residuals)
    except ValueError as error:
        if "not finite" not in str(error):
            raise
        return False
    return True


def bounded(error: float, first: float) -> float:
    """At most `WORST` times the error of the first parameters."""
    return min(error, WORST * first) if math.isfinite(error) else WORST * first
