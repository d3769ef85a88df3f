"""Draws by a stochastic process that has the marginals of the flow, the memoryless one above all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from cameraready.flows._paths import LINEAR, Path, convert
from cameraready.flows._samplers.asking import Counted, Sampled, grid_of


def euler_maruyama(
    velocity: Callable[..., Tensor],
    x: Tensor,
    *,
    times: Tensor | Sequence[float],
    noise: Literal["memoryless"] | Callable[[float], float] = "memoryless",
    path: Path = LINEAR,
    y: Tensor | None = None,
    generator: torch.Generator | None = None,
    trajectory: bool = False,
    grad: bool = False,
) -> Sampled:
    """Draw by a stochastic process with the marginals of the flow: ``dX = (v + s(t)^2 / 2 score) dt + s(t) dB``.

    ``noise="memoryless"`` takes ``s^2 = 2 sigma (alpha' / alpha sigma - sigma')``, ``2 (1 - t) / t`` on the linear path, under which end and start are
    independent (Domingo-Enrich et al., 2025, arXiv:2409.08861, Sections 4.2 and 4.3); the drift is then ``2 v - alpha' / alpha x``. Where ``alpha``
    divides it is taken at the end of the step, as in that paper, so that a grid may begin at 0; the error in law is of first order in the step.

    Parameters
    ----------
    velocity, x, y, grad, trajectory
        As for `sample`; `path` is the velocity's.
    times : (steps + 1,)
        Strictly rising.
    noise : "memoryless" or callable
        A function of the time gives ``s(t)``, at least 0; 0 everywhere is Euler's method.
    generator : torch.Generator, optional
        Of all noise; without it the global one is drawn from.

    Returns
    -------
    Sampled
    """
    times = grid_of(None, times)
    if times[-1] < times[0]:
        raise ValueError("a stochastic process runs from noise to data; give rising times")
    if noise != "memoryless" and not callable(noise):
        raise ValueError(f"noise is 'memoryless' or a function of the time, got {noise!r}")
    asked = Counted(velocity, x, y)
    states = [x] if trajectory else None
    with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
        state = asked.working(x)
        for t, after in pairwise(times.tolist()):
            h = after - t
            v = asked(state, t)
            if noise == "memoryless":
                later = path.alpha(after)
                variance = (
                    2 * path.sigma(t) * (path.d_alpha(t) * path.sigma(t) - path.alpha(t) * path.d_sigma(t)) / later
                )
                drift = 2 * v - path.d_alpha(t) / later * state
            else:
                variance = _squared(noise(t), t)
                score = convert(v, state, t, source="velocity", target="score", path=path) if variance else 0.0
                drift = v + variance / 2 * score
            shock = torch.randn(state.shape, generator=generator, dtype=state.dtype, device=state.device)
            state = state + h * drift + math.sqrt(variance * h) * shock
            if states is not None:
                states.append(state.to(x.dtype))
    return Sampled(state.to(x.dtype), asked.calls, times, None if states is None else torch.stack(states))


def _squared(level: float, t: float) -> float:
    level = float(level)
    if not math.isfinite(level) or level < 0:
        raise ValueError(f"the noise at t = {t:g} is {level}; it must be a finite number, at least 0")
    return level**2
