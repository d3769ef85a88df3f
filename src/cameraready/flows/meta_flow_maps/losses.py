"""What a meta flow map is trained on: its inner velocity on the diagonal, and four ways to make averages agree with it.

All take the average velocity of a fixed batch of conditions as ``average(s, u, y)`` with `s`, `u` (B,) and `y` (B, ...), and give the squared
error of each state, summed over its numbers, (B,). Losses and their names: Potaptchik et al., 2026, arXiv:2601.14430, after Geng et al., 2025,
arXiv:2505.13447 (MeanFlow), and Boffi et al., 2025, arXiv:2505.18825 (Lagrangian and progressive self-distillation).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from cameraready.flows._paths import time_like

Average = Callable[[Tensor, Tensor, Tensor], Tensor]
Derivative = Literal["forward", "double-backward"]


def diagonal(average: Average, s: Tensor, y: Tensor, velocity: Tensor) -> Tensor:
    """Flow matching of the inner flow: ``average(s, s, y)`` against `velocity`, the teacher's or a sample's ``alpha' x1 + sigma' x0``."""
    return _squared(average(s, s, y) - velocity.detach())


def eulerian(
    average: Average, s: Tensor, u: Tensor, y: Tensor, velocity: Tensor, *, derivative: Derivative = "forward"
) -> Tensor:
    """Against ``velocity + (u - s) d/ds average`` along the flow, the target held fixed.

    With the teacher's inner velocity this is ESD; with a sample's, MeanFlow. An average that is right for every start ``s`` is a fixed point.
    """
    one = torch.ones_like(s)
    value, slope = directional(
        lambda start, state: average(start, u, state), (s, y), (one, velocity), derivative=derivative
    )
    return _squared(value - (velocity + time_like(u - s, y) * slope).detach())


def lagrangian(average: Average, s: Tensor, u: Tensor, y: Tensor, *, derivative: Derivative = "forward") -> Tensor:
    """LSD: the map's own velocity at its end, ``d/du X_{s,u}(y)``, against what the diagonal says there, held fixed."""

    def end(time: Tensor) -> Tensor:
        return y + time_like(time - s, y) * average(s, time, y)

    state, slope = directional(end, (u,), (torch.ones_like(u),), derivative=derivative, learn="slope")
    with torch.no_grad():
        target = average(u, u, state.detach())
    return _squared(slope - target)


def progressive(average: Average, s: Tensor, u: Tensor, y: Tensor, share: Tensor) -> Tensor:
    """PSD: one step from `s` to `u` against two steps that meet after `share` (B,) of the way, held fixed."""
    middle = s + share * (u - s)
    with torch.no_grad():
        first = average(s, middle, y)
        there = y + time_like(middle - s, y) * first
        second = average(middle, u, there)
        part = time_like(share, y)
        target = part * first + (1 - part) * second
    return _squared(average(s, u, y) - target)


def adaptive(errors: Tensor, power: float, floor: float = 0.01) -> Tensor:
    """Mean of ``errors / (errors + floor)^power`` with the divisor held fixed: large errors pull less; `power` 0 is the plain mean."""
    return (errors / (errors.detach() + floor) ** power).mean()


def directional(
    function: Callable[..., Tensor],
    at: tuple[Tensor, ...],
    along: tuple[Tensor, ...],
    *,
    derivative: Derivative = "forward",
    learn: Literal["value", "slope"] = "value",
) -> tuple[Tensor, Tensor]:
    """A function's value and its derivative along a direction, that of the two that is to be learned with a graph to parameters.

    Parameters
    ----------
    function : callable
    at, along : tuples of tensors
        Point and direction.
    derivative : {"forward", "double-backward"}
        By `torch.func.jvp`, or by differentiating a backward pass, for operations that have no forward-mode derivative.
    learn : {"value", "slope"}

    Raises
    ------
    NotImplementedError
        An operation of the network (a fused attention kernel, mostly) has no forward-mode derivative; the message says what to do.
    """
    if derivative == "forward":
        try:
            value, slope = torch.func.jvp(function, at, along)
        except (NotImplementedError, RuntimeError) as error:
            if "forward" not in str(error).lower():
                raise
            raise NotImplementedError(
                "an operation of the backbone has no forward-mode derivative (fused attention kernels have none). Run training under "
                "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), write attention out, pass derivative='double-backward', "
                f"or train with distill='psd', which needs no derivative. Torch said: {str(error).splitlines()[0]}"
            ) from error
    elif derivative == "double-backward":
        with torch.enable_grad():
            points = tuple(point.detach().requires_grad_() for point in at)
            value = function(*points)
            probe = torch.zeros_like(value, requires_grad=True)
            back = torch.autograd.grad(value, points, probe, create_graph=True, materialize_grads=True)
            inner = sum(((b * direction).sum() for b, direction in zip(back, along, strict=True)), torch.zeros(()))
            (slope,) = torch.autograd.grad(inner, probe, create_graph=learn == "slope", retain_graph=True)
    else:
        raise ValueError(f"derivative must be 'forward' or 'double-backward', got {derivative!r}")
    return (value, slope.detach()) if learn == "value" else (value.detach(), slope)


def _squared(error: Tensor) -> Tensor:
    return error.square().flatten(1).sum(1)
