"""Fixed steps: Euler, midpoint, Heun, Runge-Kutta 4 and Adams-Bashforth 2, and what each of them costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from cameraready.flows._samplers.asking import Counted, Sampled, check_steps, grid_of

#: Evaluations of each step (with Heun's of diffusers, whose last step is Euler's, in `evaluations`).
STAGES = {"euler": 1, "ab2": 1, "midpoint": 2, "heun": 2, "rk4": 4}
#: diffusers' schedulers by short names.
SCHEDULERS = ("euler", "heun", "dpm++2m", "unipc")


def evaluations(method: str, steps: int, *, scheduler: bool = False) -> int:
    """How often `sample` (or, with ``scheduler=True``, `scheduler_sample`) asks the velocity in `steps` steps of `method`."""
    check_steps(steps)
    stages = stages_of(method, scheduler)
    return 2 * steps - 1 if scheduler and method == "heun" else stages * steps


def steps_for(method: str, nfe: int, *, scheduler: bool = False) -> int | None:
    """The number of steps that costs exactly `nfe` evaluations, or None where the budget does not divide."""
    if nfe < 1:
        raise ValueError(f"a budget is at least one evaluation, got {nfe}")
    stages = stages_of(method, scheduler)
    if scheduler and method == "heun":
        return (nfe + 1) // 2 if nfe % 2 else None
    return nfe // stages if nfe % stages == 0 else None


def sample(
    velocity: Callable[..., Tensor],
    x: Tensor,
    *,
    steps: int | None = None,
    times: Tensor | Sequence[float] | None = None,
    method: Literal["euler", "midpoint", "heun", "rk4", "ab2"] = "euler",
    y: Tensor | None = None,
    trajectory: bool = False,
    grad: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Sampled:
    """Integrate ``dx/dt = v(x, t)`` over a grid of times.

    Orders of accuracy: ``euler`` 1; ``midpoint``, ``heun`` and ``ab2`` (two-step Adams-Bashforth for unequal steps, its first step Euler's) 2; ``rk4`` 4.
    ``ab2`` uses the last step's velocity again and so costs no more than Euler: the competitor that a method for few evaluations has to beat.

    Parameters
    ----------
    velocity : callable ``v(x, t, y=None)``
        Asked with states of the dtype of `x` and `t` a float, in the mode it is in: call ``eval()`` on a network with dropout or batch normalisation.
    x : (B, ...) floating-point tensor
        Noise, or data where `times` fall (inversion).
    steps : int, optional
        Uniform steps from 0 to 1; give either this or `times`.
    times : (steps + 1,), optional
        In [0, 1], strictly monotone, rising or falling.
    y : tensor, optional
        Labels, handed to the velocity.
    trajectory : bool
        Whether to keep all states.
    grad : bool
        Whether gradients flow through the integration; needs memory for all of it.
    progress : callable, optional
        Called with the number of steps done and in all.

    Returns
    -------
    Sampled
        States are accumulated in float32 at least and returned in the dtype of `x`.

    Raises
    ------
    ValueError
        Neither or both of `steps` and `times`, a grid that is not monotone or leaves [0, 1], a velocity of another shape than the state.
    FloatingPointError
        A velocity that is not finite.
    """
    stages = stages_of(method)
    times = grid_of(steps, times)
    asked = Counted(velocity, x, y)
    states = [x] if trajectory else None
    with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
        state, last, last_h = asked.working(x), None, 1.0
        for done, (t, after) in enumerate(pairwise(times.tolist()), 1):
            h = after - t
            v = asked(state, t)
            if method == "ab2" and last is not None:
                weight = h / last_h / 2
                move = (1 + weight) * v - weight * last
            elif stages == 1:
                move = v
            else:
                move = _move(asked, state, v, t, h, method)
            state, last, last_h = state + h * move, v, h
            if states is not None:
                states.append(state.to(x.dtype))
            if progress is not None:
                progress(done, len(times) - 1)
    return Sampled(state.to(x.dtype), asked.calls, times, None if states is None else torch.stack(states))


def _move(asked: Counted, state: Tensor, v: Tensor, t: float, h: float, method: str) -> Tensor:
    """The mean velocity of a one-step method of two or four stages."""
    if method == "midpoint":
        return asked(state + h / 2 * v, t + h / 2)
    if method == "heun":
        return (v + asked(state + h * v, t + h)) / 2
    second = asked(state + h / 2 * v, t + h / 2)
    third = asked(state + h / 2 * second, t + h / 2)
    return (v + 2 * second + 2 * third + asked(state + h * third, t + h)) / 6


def stages_of(method: str, scheduler: bool = False) -> int:
    """Evaluations of a step; of one of diffusers' schedulers those of a first step."""
    known, what = (SCHEDULERS, "scheduler") if scheduler else (STAGES, "method")
    if method not in known:
        raise ValueError(f"there is no {what} {method!r}; choose one of {', '.join(known)}")
    return 1 if scheduler else STAGES[method]
