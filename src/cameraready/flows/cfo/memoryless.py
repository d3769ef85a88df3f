"""Memoryless trajectories of a flow: what is drawn, what it cost in KL, and the lean adjoint of a reward along them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from cameraready.flows._paths import Path

Scheme = Literal["ancestral", "euler"]
#: A velocity in the room's convention: states (..., D) and a time to the like of the states.
Field = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True)
class MemorylessSteps:
    """A chain x_(k+1) = keep_k x_k + move_k v(x_k, t_k) + noise_k z_k whose end does not remember its start.

    Its limit is dX = (2 v(X, t) - alpha'/alpha X) dt + s(t) dB with s^2 = 2 sigma (alpha'/alpha sigma - sigma') (Domingo-Enrich et al., 2025, arXiv:2409.08861), under which the
    KL of two velocities' paths is that of their ends. Exchanging v for v' shifts step k by move_k (v' - v), which is `control` (k) times v' - v in units of its noise.

    Attributes
    ----------
    times : tuple of float, T + 1 of them
    keep, move, noise : tuple of float, T each
    """

    times: tuple[float, ...]
    keep: tuple[float, ...]
    move: tuple[float, ...]
    noise: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.keep)

    def control(self, k: int) -> float:
        """Noises of step k that a unit of velocity shifts it by."""
        return self.move[k] / self.noise[k]


def memoryless_steps(path: Path, times: list[float] | Tensor | int, scheme: Scheme = "ancestral") -> MemorylessSteps:
    """Coefficients of the memoryless chain on a grid.

    Parameters
    ----------
    path : Path
    times : int, or increasing sequence from 0 to 1
        A number of equal steps, at least 2, or the grid itself.
    scheme : {"ancestral", "euler"}
        ``"euler"`` is the authors' Euler-Maruyama, in which alpha is taken at the end of each step where it divides; its first states are too wide by a factor of
        two in variance. ``"ancestral"`` takes the mean of the exact transition of a diffusion whose clean sample is the posterior mean, and the variance that is exact
        for standard normal data: means are right and nothing is singular at any number of steps.

    Raises
    ------
    ValueError
        A grid that is not increasing from 0 to 1, or too short.
    """
    if scheme not in get_args(Scheme):
        raise ValueError(f"scheme must be 'ancestral' or 'euler', got {scheme!r}")
    grid = [k / times for k in range(times + 1)] if isinstance(times, int) and times > 0 else None
    if grid is None:
        grid = [float(t) for t in times] if not isinstance(times, int) else []
    if len(grid) < 3 or grid[0] != 0.0 or grid[-1] != 1.0 or any(b <= a for a, b in pairwise(grid)):
        raise ValueError(f"times must be at least 2 steps, or a grid that increases from 0 to 1, got {times!r}")
    rows = [_coefficients(path, t, s, scheme) for t, s in pairwise(grid)]
    keep, move, noise = (tuple(column) for column in zip(*rows, strict=True))
    return MemorylessSteps(tuple(grid), keep, move, noise)


def _coefficients(path: Path, t: float, s: float, scheme: Scheme) -> tuple[float, float, float]:
    alpha, after, sigma, left = (float(each) for each in (path.alpha(t), path.alpha(s), path.sigma(t), path.sigma(s)))
    rising, falling = float(path.d_alpha(t)), float(path.d_sigma(t))
    if scheme == "euler":
        step = s - t
        return (
            1 - step * rising / after,
            2 * step,
            math.sqrt(2 * step * sigma * (rising * sigma - alpha * falling) / after),
        )
    shrink = alpha / after  # the diffusion that takes data to noise multiplies by this from s back to t
    clean = after * (sigma**2 - (shrink * left) ** 2) / sigma**2
    turning = sigma * rising - falling * alpha
    keep = shrink * left**2 / sigma**2 - clean * falling / turning
    spread, before = after**2 + left**2, alpha**2 + sigma**2  # variances of the two states of standard normal data
    return keep, clean * sigma / turning, math.sqrt(spread * (1 - shrink**2 * spread / before))


@dataclass(frozen=True)
class Trajectory:
    """States (T + 1, *shape), and of each sample what `simulate` added up along them."""

    states: list[Tensor]
    log_ratio: Tensor | None
    energy: Tensor | None

    @property
    def end(self) -> Tensor:
        return self.states[-1]


def normal(shape: tuple[int, ...], generator: torch.Generator, like: Tensor | None = None) -> Tensor:
    """Standard normal numbers drawn where the generator lives, then moved to the device of `like`."""
    dtype = torch.float32 if like is None else like.dtype
    drawn = torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)
    return drawn if like is None else drawn.to(like.device)


@torch.no_grad()
def simulate(
    velocity: Field,
    start: Tensor,
    steps: MemorylessSteps,
    generator: torch.Generator,
    *,
    base: Field | None = None,
    events: int = 1,
) -> Trajectory:
    """Run the memoryless chain of `velocity` from noise.

    Parameters
    ----------
    velocity, base : callables v(x, t)
    start : Tensor of shape (..., *event)
        Standard normal.
    steps : MemorylessSteps
    generator : torch.Generator
    base : callable, optional
        With it, ``log_ratio`` is log dP/dP_base of the path, and ``energy`` the sum of squared controls over two, both of shape (...,) in float64:
        means of either estimate KL(P || P_base), the second with less noise and never below 0.
    events : int
        How many trailing axes are one sample.
    """
    x, states = start, [start]
    ratio = energy = None
    if base is not None:
        ratio = torch.zeros(start.shape[: start.ndim - events], dtype=torch.float64, device=start.device)
        energy = torch.zeros_like(ratio)
    for k in range(len(steps)):
        t, fresh = steps.times[k], normal(tuple(x.shape), generator, x)
        v = velocity(x, t)
        if base is not None:
            control = ((v - base(x, t)) * steps.control(k)).double().flatten(x.ndim - events)
            energy += 0.5 * control.square().sum(-1)
            ratio += (0.5 * control.square() + control * fresh.double().flatten(x.ndim - events)).sum(-1)
        x = steps.keep[k] * x + steps.move[k] * v + steps.noise[k] * fresh
        states.append(x)
    return Trajectory(states, ratio, energy)


def lean_adjoint(
    base: Field, states: list[Tensor], terminal: Tensor, steps: MemorylessSteps
) -> tuple[list[Tensor], list[Tensor]]:
    """The adjoint after each step: a_T = `terminal`, a_k = keep_k a_(k+1) + move_k (dv_base/dx at x_k)^T a_(k+1).

    Parameters
    ----------
    base : callable v(x, t), differentiable in x
    states : list of T + 1 tensors
    terminal : Tensor like a state
        Minus the gradient of f / alpha at the end.

    Returns
    -------
    two lists of T tensors
        Entry k is a_(k+1), with which the velocity of step k is matched (Domingo-Enrich et al., 2025, arXiv:2409.08861, Eq. 38-39, in discrete time), and v_base at (x_k, t_k).
    """
    adjoint, adjoints, velocities = terminal, [terminal] * len(steps), [terminal] * len(steps)
    for k in range(len(steps) - 1, -1, -1):
        with torch.enable_grad():
            x = states[k].detach().requires_grad_(True)
            v = base(x, steps.times[k])
            velocities[k] = v.detach()
            if k == 0:
                break
            (pulled,) = torch.autograd.grad(v, x, adjoint)
        adjoint = steps.keep[k] * adjoint + steps.move[k] * pulled
        adjoints[k - 1] = adjoint
    return adjoints, velocities
