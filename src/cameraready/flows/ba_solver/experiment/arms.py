"""The solvers that are compared, at equal evaluations of the network, each on the grid that was best for it on other noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cameraready.flows._samplers import grid, sample, scheduler_sample, steps_for
from cameraready.flows.ba_solver import BAConfig, ba_sample
from cameraready.flows.ba_solver.experiment.flows import Flow

METHOD = "ba"
PEERS = ("euler", "heun", "midpoint", "rk4", "ab2", "ab3", "dpm++2m", "dpm++3m", "unipc", "unipc3")
MULTISTEP = {
    "dpm++2m": ("DPMSolverMultistepScheduler", 2),
    "dpm++3m": ("DPMSolverMultistepScheduler", 3),
    "unipc": ("UniPCMultistepScheduler", 2),
    "unipc3": ("UniPCMultistepScheduler", 3),
}
#: Variants of the method, by what is changed.
CHANGED = {
    "ba-single": {"anchors": "single"},
    "ba-trapezoid": {"nodes": "trapezoid"},
    "ba-one-node": {"nodes": "simpson"},
    "ba-simpson38": {"nodes": "simpson38"},
}
UNTRAINED = "ba-untrained"
VARIANTS = (*CHANGED, UNTRAINED)
#: The grids that every arm may choose from: shifts of the noise level, 1 being uniform.
SHIFTS = (0.4, 0.6, 1.0, 1.7, 3.0)
#: Arms that run backwards too.
INVERTED = (METHOD, "euler", "heun", "ab2")


@dataclass(frozen=True)
class Solver:
    """Runs one arm: ``run(noise, times, y)`` -> samples, with the evaluations that it took."""

    run: Callable[[Tensor, Tensor, Tensor | None], Any]
    steps: int


def solver(flow: Flow, arm: str, nfe: int, side: nn.Module | None, own: Any = None) -> Solver | None:
    """The arm with a budget of `nfe` evaluations; None where the budget does not divide."""
    if own is not None:
        return Solver(lambda x, times, y: _own(flow, own, x, times, y), nfe)
    if arm == METHOD or arm in VARIANTS or arm.startswith("ba-rate"):
        config = replace(flow.config, **CHANGED.get(arm, {}))
        used = None if arm == UNTRAINED else side
        return Solver(lambda x, times, y: ba_sample(flow.raw, used, x, times=times, y=y, config=config), nfe)
    if arm in MULTISTEP:
        name, order = MULTISTEP[arm]
        return Solver(
            lambda x, times, y: scheduler_sample(flow.velocity, x, _multistep(name, order), times=times, y=y), nfe
        )
    if arm == "ab3":
        return Solver(lambda x, times, y: adams_bashforth(flow.velocity, x, times, y), nfe)
    if arm == "heun" and nfe % 2:  # diffusers', whose last step is Euler's
        steps = steps_for("heun", nfe, scheduler=True)
        return (
            None
            if steps is None
            else Solver(lambda x, times, y: scheduler_sample(flow.velocity, x, "heun", times=times, y=y), steps)
        )
    steps = steps_for(arm, nfe)
    return (
        None
        if steps is None
        else Solver(
            lambda x, times, y: sample(flow.velocity, x, times=times, method=arm, y=y),
            steps,  # type: ignore[arg-type]
        )
    )


def _multistep(name: str, order: int) -> Any:
    import diffusers

    return getattr(diffusers, name)(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0, solver_order=order
    )


def adams_bashforth(velocity: Callable[..., Tensor], x: Tensor, times: Tensor, y: Tensor | None) -> _Run:
    """Three-step Adams-Bashforth for unequal steps: the parabola through the last three velocities, integrated; begun with one and two."""
    past: list[tuple[float, Tensor]] = []
    grid_times = times.tolist()
    for t, after in pairwise(grid_times):
        with torch.no_grad():
            past = [*past[-2:], (t, velocity(x, t) if y is None else velocity(x, t, y))]
        nodes, h = np.array([at - t for at, _ in past]), after - t
        powers = np.arange(len(past))
        weights = np.linalg.solve(np.vander(nodes, increasing=True).T, h ** (powers + 1) / (powers + 1))
        x = x + sum(float(weight) * v for weight, (_, v) in zip(weights, past, strict=True))
    return _Run(x, len(grid_times) - 1)


def times_of(steps: int, shift: float) -> Tensor:
    return grid(steps, kind="shift", shift=shift)


def planned(flow: Flow) -> Iterator[tuple[str, int]]:
    """Every arm with its budgets; variants where they are compared."""
    for arm in (METHOD, *PEERS):
        for nfe in flow.budgets:
            yield arm, nfe
    for arm in VARIANTS:
        for nfe in flow.budgets:
            if nfe in (7, flow.budgets[0]):
                yield arm, nfe


def error(found: Tensor, reference: Tensor) -> float:
    """Root mean square over samples and entries."""
    return float((found.double() - reference.double()).square().mean().sqrt())


def chosen_shifts(
    flow: Flow, sides: dict[str, nn.Module], others: tuple[tuple[str, int], ...] = ()
) -> dict[tuple[str, int], float]:
    """The shift with the least error for each arm and budget, on noise that no verdict sees: two draws, of images one."""
    found: dict[tuple[str, int], list[float]] = {}
    for run in (-1, -2) if len(flow.shape) == 1 else (-1,):
        noise, y = flow.noise(run, min(flow.samples, 200))
        reference = flow.reference(noise, y)
        for arm, nfe in (*planned(flow), *others):
            made = solver(flow, arm, nfe, sides.get(arm, sides[METHOD]))
            if made is None:
                continue
            errors = [error(made.run(noise, times_of(made.steps, shift), y).x, reference) for shift in SHIFTS]
            found.setdefault((arm, nfe), []).append(errors)  # type: ignore[arg-type]
    return {key: SHIFTS[int(np.log(np.asarray(errors)).mean(0).argmin())] for key, errors in found.items()}


def packed(shifts: dict[tuple[str, int], float]) -> dict[str, np.ndarray]:
    """The choices as arrays, for a study's prepared values."""
    return {f"shift.{arm}.{nfe}": np.asarray(shift) for (arm, nfe), shift in shifts.items()}


def unpacked(prepared: Any) -> dict[tuple[str, int], float]:
    found = {}
    for name in prepared:
        if name.startswith("shift."):
            _, rest = name.split(".", 1)
            arm, nfe = rest.rsplit(".", 1)
            found[arm, int(nfe)] = float(prepared[name])
    return found


class _Run:
    """What a user's own arm returned, with its evaluations."""

    def __init__(self, x: Tensor, calls: int) -> None:
        self.x, self.calls = x, calls


def _own(flow: Flow, own: Any, x: Tensor, times: Tensor, y: Tensor | None) -> _Run:
    calls = 0

    def velocity(x: Tensor, t: float | Tensor, y: Tensor | None = None) -> Tensor:
        nonlocal calls
        calls += 1
        return flow.velocity(x, t) if y is None else flow.velocity(x, t, y)

    with torch.no_grad():
        found = own(velocity, x, times, y)
    found = getattr(found, "x", found)
    if not isinstance(found, Tensor) or found.shape != x.shape:
        raise ValueError(
            f"your method must return samples {tuple(x.shape)}, got {getattr(found, 'shape', type(found).__name__)}"
        )
    if calls > len(times) - 1:
        raise ValueError(f"your method asked the velocity {calls} times with a budget of {len(times) - 1}")
    return _Run(found, calls)


def inverted(flow: Flow, arm: str, nfe: int, side: nn.Module, data: Tensor, shift: float, y: Tensor | None) -> Tensor:
    """Data taken to noise and back, with `nfe` evaluations each way."""
    steps = nfe // 2 if arm == "heun" else nfe
    times = times_of(steps, shift)
    if arm == METHOD:
        config: BAConfig = flow.config
        there = ba_sample(flow.raw, side, data, times=times.flip(0), y=y, config=config).x
        return ba_sample(flow.raw, side, there, times=times, y=y, config=config).x
    there = sample(flow.velocity, data, times=times.flip(0), method=arm, y=y).x  # type: ignore[arg-type]
    return sample(flow.velocity, there, times=times, method=arm, y=y).x  # type: ignore[arg-type]
