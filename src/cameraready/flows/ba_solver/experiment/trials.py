"""What one trial measures: quality of all arms on one draw, costs, orders."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cameraready.evidence import Context, interleave
from cameraready.flows._toy.distances import energy_distance
from cameraready.flows.ba_solver import BAConfig, ba_sample
from cameraready.flows.ba_solver.experiment.arms import (
    CHANGED,
    INVERTED,
    METHOD,
    chosen_shifts,
    error,
    inverted,
    packed,
    planned,
    solver,
    times_of,
    unpacked,
)
from cameraready.flows.ba_solver.experiment.flows import (
    DIGITS,
    MIXTURES,
    PLANE,
    QUICK,
    STEPS,
    UNET,
    Flow,
    cached_side,
    generator,
)

#: Another rate of the step lengths, the paper's, tried in the plane.
RATES = {"ba-rate-50": 50.0}
LONG = "euler-100"


def prepared(flow: Flow | str, ctx: Context) -> Mapping[str, Any]:
    """Trained SideNets where they are shared by all runs, and the grid of each arm and budget."""
    if isinstance(flow, str):
        return {}
    arrays: dict[str, Any] = {}
    side = _shared_side(flow, ctx)
    if side is None:  # every run of a mixture trains its own; this one only chooses grids
        side = flow.trained_side(-1, steps=20 if flow.name == QUICK else STEPS)
    elif flow.name not in DIGITS:
        arrays |= {f"side.{name}": value.numpy() for name, value in side.state_dict().items()}
    sides: dict[str, nn.Module] = {METHOD: side}
    rates = tuple((arm, 7) for arm in RATES) if flow.name == PLANE else ()
    sides |= {arm: flow.trained_side(-1, rate=RATES[arm]) for arm, _ in rates}
    return arrays | packed(chosen_shifts(flow, sides, rates))


def quality(flow: Flow, ctx: Context, *, run: int) -> Iterator[dict[str, Any]]:
    """All arms at all budgets on one draw of noise."""
    noise, y = flow.noise(run)
    reference = flow.reference(noise, y)
    shifts = unpacked(ctx.prepared)
    sides = _sides(flow, ctx, run)
    arms = ctx.select(dict.fromkeys((METHOD, *(a for a, _ in planned(flow)), *sides)))
    jobs = [(arm, nfe, None) for arm, nfe in planned(flow) if arm in arms]
    jobs += [(arm, 7, None) for arm in RATES if arm in sides and arm in arms]
    jobs += [(arm, nfe, made) for arm, made in arms.items() if made is not None for nfe in flow.budgets]
    for arm, nfe, own in jobs:
        made = solver(flow, arm, nfe, sides.get(arm, sides[METHOD]), own)
        if made is None:
            continue
        shift = shifts.get((arm, nfe), 1.0)
        found = made.run(noise, times_of(made.steps, shift), y)
        row = {"arm": arm, "nfe": nfe, "shift": shift, "calls": found.calls, **_judged(flow, found.x, reference, run)}
        row["predictions"] = getattr(found, "predictions", 0)
        if nfe == 10 and arm in INVERTED:
            row["round_trip"] = error(inverted(flow, arm, nfe, sides[METHOD], reference.float(), shift, y), reference)
        yield row
    long = 100 if flow.name != QUICK else 10
    found = solver(flow, "euler", long, None).run(noise, times_of(long, 1.0), y)  # type: ignore[union-attr]
    yield {
        "arm": LONG,
        "nfe": long,
        "shift": 1.0,
        "calls": found.calls,
        "predictions": 0,
        **_judged(flow, found.x, reference, run),
    }
    if run == 0 and flow.name in (PLANE, UNET, QUICK):
        yield from _pictures(flow, ctx, sides[METHOD], noise, y, reference, shifts)


def cost(flow: Flow, ctx: Context, *, blocks: int, batch: int) -> Iterator[dict[str, Any]]:
    """Seconds of sampling with and without the SideNet, and of one training step of each network."""
    from cameraready.flows._toy.training import train_flow

    torch.set_num_threads(1)
    side = _sides(flow, ctx, 0)[METHOD]
    noise, y = flow.noise(0, batch)
    times = times_of(7, 1.0)
    arms = {
        "euler": lambda: solver(flow, "euler", 7, None).run(noise, times, y),  # type: ignore[union-attr]
        "ab2": lambda: solver(flow, "ab2", 7, None).run(noise, times, y),  # type: ignore[union-attr]
        METHOD: lambda: solver(flow, METHOD, 7, side).run(noise, times, y),  # type: ignore[union-attr]
    }
    for row in interleave(arms, warmup=1, repeats=blocks):
        yield {"arm": row["arm"], "run": row["repeat"], "nfe": 7, "seconds": row["seconds"]}
    if flow.name not in DIGITS:
        return
    from cameraready.flows._toy.trained import RECIPES, build

    backbone, steps = build(RECIPES[flow.name]), 4
    for block in range(blocks):
        backbone.requires_grad_(True).train()  # training leaves it frozen
        began = time.perf_counter()
        train_flow(
            backbone, flow.data, flow.labels, steps=steps, batch=64, lr=1e-3, generator=generator(block), progress=None
        )
        seconds = (time.perf_counter() - began) / steps * RECIPES[flow.name]["training"]["steps"]
        yield {"arm": "train-backbone", "run": block, "training_seconds": seconds}
        began = time.perf_counter()
        flow.trained_side(0, steps=1)
        yield {"arm": "train-side", "run": block, "training_seconds": (time.perf_counter() - began) * STEPS}


def orders(flow: str, ctx: Context, *, blocks: int) -> Iterator[dict[str, Any]]:
    """Random smooth fields: the identity with Adams-Bashforth, and errors against steps with SideNets that are wrong by a known amount."""
    from cameraready.flows._samplers import sample

    for block in range(blocks):
        field = _field(block)
        start = torch.randn(20, 3, generator=generator(21, block), dtype=torch.float64)
        plain = sample(field, start, steps=6, method="ab2").x
        gaps = [
            float((ba_sample(field, None, start, steps=6, config=BAConfig(nodes=nodes)).x - plain).abs().max())
            for nodes in ("lobatto", "simpson38", "simpson", "trapezoid")
        ]
        yield {"arm": METHOD, "run": block, "identity_gap": max(gaps)}
        reference = sample(field, start, steps=400, method="rk4").x
        off = torch.randn(3, generator=generator(22, block), dtype=torch.float64)
        for steps in (8, 16, 32):
            for arm in (METHOD, "ba-single"):
                config = BAConfig(**CHANGED.get(arm, {}))
                found = ba_sample(field, _oracle(field, off), start, steps=steps, config=config)
                yield {"arm": arm, "run": block, "steps": steps, "order_error": error(found.x, reference)}


def _field(block: int) -> Any:
    """A random field in three dimensions, smooth in state and time."""
    draw = generator(20, block)
    inward, outward = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((4, 8), (8, 3)))

    def field(x: Tensor, t: float | Tensor, y: Tensor | None = None) -> Tensor:
        time = torch.as_tensor(t, dtype=x.dtype).expand(len(x))[:, None]
        return torch.tanh(torch.cat([x, 2 * time], dim=1) @ inward / 2) @ outward / 2

    return field


def _oracle(field: Any, off: Tensor) -> Any:
    """The true change of velocity, by small Runge-Kutta steps along the flow, and an error of `off` for each unit of time."""

    def side(x: Tensor, v: Tensor, t: Tensor, h: Tensor, y: Tensor | None = None) -> Tensor:
        state, part = x, h[:, None] / 4
        for place in range(4):
            now = t + place * h / 4
            first = field(state, now)
            second = field(state + part / 2 * first, now + h / 8)
            third = field(state + part / 2 * second, now + h / 8)
            fourth = field(state + part * third, now + h / 4)
            state = state + part / 6 * (first + 2 * second + 2 * third + fourth)
        return field(state, t + h) - v + h[:, None] * off

    return side


def _judged(flow: Flow, found: Tensor, reference: Tensor, run: int) -> dict[str, float]:
    found_at = found.float()
    values = {"rmse": error(found, reference), "energy": float(energy_distance(found_at, flow.held))}
    if flow.features is not None:
        values["feature_error"] = error(flow.features(found_at), flow.features(reference.float()))
    return values


def _shared_side(flow: Flow, ctx: Context) -> nn.Module | None:
    """The one SideNet of all runs, or None where each run of a mixture trains its own."""
    if flow.name in DIGITS:
        return cached_side(flow)
    if flow.name in (*MIXTURES, QUICK):
        return None
    stored = {name.removeprefix("side."): value for name, value in ctx.prepared.items() if name.startswith("side.")}
    if stored:
        side = flow.untrained(0)
        side.load_state_dict({name: torch.from_numpy(np.asarray(value)) for name, value in stored.items()})
        return side.eval()
    return flow.trained_side(0, quiet=False)


def _sides(flow: Flow, ctx: Context, run: int) -> dict[str, nn.Module]:
    shared = _shared_side(flow, ctx)
    if shared is not None:
        return {METHOD: shared}
    sides = {METHOD: flow.trained_side(run, steps=20 if flow.name == QUICK else STEPS)}
    if flow.name == PLANE:
        sides |= {arm: flow.trained_side(run, rate=rate) for arm, rate in RATES.items()}
    return sides


def _pictures(
    flow: Flow,
    ctx: Context,
    side: nn.Module,
    noise: Tensor,
    y: Tensor | None,
    reference: Tensor,
    shifts: dict[tuple[str, int], float],
) -> Iterator[dict[str, Any]]:
    """What five evaluations (four in the quick workload) give, beside the reference."""
    from cameraready.flows._pictures import image_grid, plane

    nfe = 5 if 5 in flow.budgets else flow.budgets[0]
    shown = 20 if len(flow.shape) == 3 else 60
    for arm in (METHOD, "ab2", "unipc", "euler", "reference"):
        if arm == "reference":
            x, what = reference, f"Runge-Kutta in {flow.fine} steps"
        else:
            made = solver(flow, arm, nfe, side)
            assert made is not None
            x, what = (
                made.run(noise, times_of(made.steps, shifts.get((arm, nfe), 1.0)), y).x,
                f"{arm}, {nfe} evaluations",
            )
        if len(flow.shape) == 3:
            picture, seen = image_grid(x[:shown], columns=10, scale=3), "Digits 0 to 9 in two rows"
        else:
            picture, seen = (
                plane(reference[:shown], x[:shown], labels=("exact", what), size=200),
                "Points of eight clusters on a circle",
            )
        yield {"arm": arm, "picture": picture, "picture_alt": f"{seen}: {what}", "picture_caption": what}
