"""Grids of times, and the velocity as every sampler asks it: counted, and checked for shape and finite values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor

from cameraready.flows._paths import Time, check_finite


@dataclass(frozen=True)
class Sampled:
    """What a sampler returns.

    Attributes
    ----------
    x : (B, ...) tensor
        The states at the last time, of the dtype that was given.
    calls : int
        Evaluations of the velocity, each on the whole batch.
    times : (steps + 1,) float64 tensor
        The grid; of adaptive sampling the two ends.
    states : (steps + 1, B, ...) tensor, optional
        All states, where ``trajectory=True`` asked for them.
    """

    x: Tensor
    calls: int
    times: Tensor
    states: Tensor | None = None


def grid(
    steps: int,
    *,
    kind: Literal["uniform", "shift", "power"] = "uniform",
    shift: float = 3.0,
    power: float = 2.0,
    start: float = 0.0,
    end: float = 1.0,
) -> Tensor:
    """Times of a sampler, strictly increasing from `start` to `end`.

    Parameters
    ----------
    steps : int
        At least 1.
    kind : {"uniform", "shift", "power"}
        ``"shift"``: the noise level ``s = 1 - t`` becomes ``shift s / (1 + (shift - 1) s)``, as current image models space their steps (Esser et al.,
        2024, arXiv:2403.03206, Eq. 23): above 1, more steps near noise. ``"power"``: ``u ** power``, above 1 more steps near noise as well.
    shift, power : float
        Above 0.
    start, end : float
        In [0, 1], `start` below `end`.

    Returns
    -------
    (steps + 1,) float64 tensor. For inversion flip it: ``grid(n).flip(0)``.
    """
    check_steps(steps)
    if not 0 <= start < end <= 1:
        raise ValueError(f"a grid runs from start to end with 0 <= start < end <= 1, got start={start}, end={end}")
    if shift <= 0 or power <= 0:
        raise ValueError(f"shift and power must be above 0, got shift={shift}, power={power}")
    u = torch.arange(steps + 1, dtype=torch.float64) / steps
    if kind == "shift":
        u = u / (u + shift * (1 - u))  # 1 - shift s / (1 + (shift - 1) s) with s = 1 - u
    elif kind == "power":
        u = u**power
    elif kind != "uniform":
        raise ValueError(f"there is no grid {kind!r}; choose uniform, shift or power")
    times = start + (end - start) * u
    times[-1] = end
    if not bool((times.diff() > 0).all()):
        raise ValueError(
            f"{steps} steps of kind {kind!r} are closer together than numbers are; take fewer or a smaller {kind}"
        )
    return times


def grid_of(steps: int | None, times: Tensor | Sequence[float] | None) -> Tensor:
    if (steps is None) == (times is None):
        raise ValueError("give either steps (uniform, from 0 to 1) or times")
    if times is None:
        assert steps is not None
        return grid(steps)
    times = torch.as_tensor(times, dtype=torch.float64, device="cpu").detach()
    if times.dim() != 1 or len(times) < 2:
        raise ValueError(f"times is a row of at least two numbers, got shape {tuple(times.shape)}")
    moves = times.diff()
    if not bool(torch.isfinite(times).all()) or not (bool((moves > 0).all()) or bool((moves < 0).all())):
        raise ValueError("times must rise strictly, or fall strictly for inversion, without repeats or gaps")
    if float(times.min()) < 0 or float(times.max()) > 1:
        raise ValueError(
            f"times lie between 0 (noise) and 1 (data), got {float(times.min()):g} to {float(times.max()):g}; timesteps of 0 to 1000 have to be divided"
        )
    return times


class Counted:
    """The velocity as samplers ask it: states of the given dtype in, the working dtype out, calls counted, shape and values checked."""

    def __init__(self, velocity: Callable[..., Tensor], x: Tensor, y: Tensor | None) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() == 0:
            raise ValueError("the state must be a floating-point tensor of shape (B, ...)")
        self.velocity, self.dtype, self.y, self.calls = velocity, x.dtype, y, 0

    def working(self, x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def __call__(self, state: Tensor, t: Time) -> Tensor:
        self.calls += 1
        given = state.to(self.dtype)
        v = self.velocity(given, t) if self.y is None else self.velocity(given, t, self.y)
        if not isinstance(v, Tensor):
            raise ValueError(f"the velocity returned {type(v).__name__}, and a tensor like the states was expected")
        if v.shape != state.shape:
            raise ValueError(f"the velocity has shape {tuple(v.shape)} for states of shape {tuple(state.shape)}")
        check_finite(v, t)
        return v.to(state.dtype)


def check_steps(steps: int) -> None:
    if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1:
        raise ValueError(f"steps is a whole number, at least 1, got {steps!r}")
