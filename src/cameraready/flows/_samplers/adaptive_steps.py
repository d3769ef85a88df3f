"""Steps chosen by torchdiffeq to a tolerance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cameraready.flows._samplers.asking import Counted, Sampled, grid_of

#: torchdiffeq's methods that choose their steps.
METHODS = ("dopri5", "bosh3", "dopri8", "adaptive_heun", "fehlberg2")


def adaptive(
    velocity: Callable[..., Tensor],
    x: Tensor,
    *,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    method: str = "dopri5",
    start: float = 0.0,
    end: float = 1.0,
    y: Tensor | None = None,
    max_calls: int = 10_000,
) -> Sampled:
    """Integrate with steps chosen by torchdiffeq to a tolerance, one step size for the whole batch.

    Parameters
    ----------
    velocity, x, y
        As for `sample`; `t` comes as a 0-d tensor.
    rtol, atol : float
        Relative and absolute tolerance of torchdiffeq.
    method : str
        Any of its adaptive methods: ``dopri5``, ``bosh3``, ``dopri8``, ``adaptive_heun``, ``fehlberg2``.
    start, end : float
        In [0, 1] and different; `end` below `start` inverts. The velocity is asked between them only: the last step is made to end at `end`, where
        torchdiffeq would by itself step past it and interpolate.
    max_calls : int
        Evaluations after which to give up: a velocity that jumps would be followed for ever.

    Raises
    ------
    RuntimeError
        The tolerance cannot be met, or not within `max_calls`.
    """
    from torchdiffeq import odeint

    times = grid_of(None, (start, end))
    if rtol <= 0 or atol <= 0:
        raise ValueError(f"tolerances are above 0, got rtol={rtol}, atol={atol}")
    if method not in METHODS:
        raise ValueError(f"there is no adaptive method {method!r}; choose one of {', '.join(METHODS)}")
    asked = Counted(velocity, x, y)

    def f(t: Tensor, state: Tensor) -> Tensor:
        if asked.calls >= max_calls:
            raise RuntimeError(
                f"{method} had not come to t = {end:g} with rtol={rtol:g}, atol={atol:g} after {max_calls} evaluations (at t = {float(t):.6g})"
            )
        return asked(state, t)

    with torch.no_grad():
        state = asked.working(x)
        try:
            ends = times.to(device=x.device, dtype=state.dtype)
            path = odeint(f, state, ends, rtol=rtol, atol=atol, method=method, options={"step_t": ends[1:]})
        except AssertionError as error:  # torchdiffeq asserts that its steps do not underflow
            raise RuntimeError(
                f"{method} cannot meet rtol={rtol:g}, atol={atol:g} in {state.dtype}: {error}"
            ) from error
    return Sampled(path[-1].to(x.dtype), asked.calls, times)
