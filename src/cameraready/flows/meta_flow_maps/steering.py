"""Steering a flow towards a reward while it samples, with every call counted."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from cameraready.flows._paths import Path, Time, check_finite
from cameraready.flows.meta_flow_maps.inner import Velocity, ask, gaussian
from cameraready.flows.meta_flow_maps.progress import progress_bar
from cameraready.flows.meta_flow_maps.rewards import CountedReward, Reward, effective, shares
from cameraready.flows.meta_flow_maps.value import Posterior, value_gradient

Method = Literal["grad", "weights", "dps"]


@dataclass(frozen=True)
class Steering:
    """Steered samples and what they took, for each particle.

    Attributes
    ----------
    x : tensor
        The samples.
    network_calls, reward_calls, backward_passes : float
        Counted, not computed: states that the networks were asked about, rewards, and states through which a gradient was taken, all divided by the number
        of particles.
    effective : (guided steps,)
        Mean effective sample size of the draws at each step with guidance, of at most `n`; with ``n = 1`` and ``"dps"`` it is 1.
    clamped : dict
        By name of a clamp, in which share of steps it held: ``"max_gain"`` on the gradient's factor.
    times : (all steps + 1,)
        Float64, beginning with 0; the first step is made without guidance.
    trajectory : (all steps + 1, B, ...) or None
    """

    x: Tensor
    network_calls: float
    reward_calls: float
    backward_passes: float
    effective: Tensor
    clamped: dict[str, float]
    times: Tensor
    trajectory: Tensor | None = None


class Steered:
    """Samples from data tilted by ``exp(scale * reward)``, by adding the gradient of the value to the flow's velocity.

    The drift is ``b + g(t) grad V``, ``V(x) = log E[exp(scale r(x1)) | x_t = x]``, ``g = sigma (alpha' sigma - sigma' alpha) / alpha``, on the linear path
    ``(1 - t) / t`` (Doob's transform of the flow). With draws of an exact map and many of them it samples the tilted law exactly.

    Use ``"grad"`` for differentiable rewards, ``"weights"`` for black boxes. Where the reward singles out what the base model almost never
    makes, none of the draws may have any of it and ``"weights"`` sees nothing: look at `Steering.effective` and at the rewards.

    Parameters
    ----------
    mfm : MetaFlowMap or PosteriorFlow
    reward : callable ``reward(x1) -> (B,)``
        Of clean data in the model's own range.
    n : int
        Posterior draws of each particle and step.
    method : {"grad", "weights", "dps"}
        MFM-G: the gradient of the log-mean-exp of `n` draws' rewards. MFM-GF: ``b + (alpha' sigma - sigma' alpha) / sigma (sum w x1 - mean x1)``
        with weights ``softmax(scale r)``, no gradients. DPS: the gradient of the posterior mean's reward, one call and biased
        (Chung et al., 2023, arXiv:2209.14687).
    velocity : callable ``v(x, t, y=None)``, optional
        The base flow; by default the map's own.
    scale : float
        Strength of the tilt.
    map_steps : int, optional
        Calls of the network per draw.
    dynamics : {"ode", "sde"}
        The flow, or the diffusion with memoryless noise ``2 g(t)`` that has the same marginals and forgets errors on the way.
    start : float
        First time at which there is guidance. Before it the flow takes one step without: a state there knows nothing yet of the data.
    max_gain : float
        Largest ``g(t)`` (it is infinite at ``t = 0``); a clamp, reported in `Steering.clamped`.
    normalise : bool
        Rescale guidance to the norm of the base velocity, as the authors' script does. It makes for strong pictures and samples no known law.

    Raises
    ------
    ValueError
        A setting out of range; in `sample`, with ``"grad"`` and ``"dps"``, a reward without a gradient.

    References
    ----------
    Potaptchik et al., 2026, arXiv:2601.14430, MFM-G and MFM-GF.
    """

    def __init__(
        self,
        mfm: Posterior,
        reward: Reward,
        *,
        n: int = 8,
        method: Method = "grad",
        velocity: Velocity | None = None,
        scale: float = 1.0,
        map_steps: int | None = None,
        dynamics: Literal["ode", "sde"] = "ode",
        start: float = 0.01,
        max_gain: float = 25.0,
        normalise: bool = False,
    ) -> None:
        if method not in get_args(Method):
            raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
        if dynamics not in ("ode", "sde"):
            raise ValueError(f"dynamics must be 'ode' or 'sde', got {dynamics!r}")
        if n < (2 if method == "weights" else 1):
            raise ValueError(f"n must be at least 2 for weights to differ and 1 otherwise, got {n}")
        if not 0 < start < 1 or not max_gain > 0:
            raise ValueError(f"start must lie in (0, 1) and max_gain above 0, got {start} and {max_gain}")
        self.mfm, self.reward, self.n, self.method = mfm, CountedReward(reward, scale), n, method
        self.map_steps, self.dynamics, self.start, self.max_gain = map_steps, dynamics, start, max_gain
        self.normalise = normalise
        self.path: Path = mfm.path
        self._velocity: Velocity = mfm.velocity if velocity is None else velocity  # type: ignore[attr-defined]
        self._outside = velocity is not None
        self._asked = self._backward = 0

    def guidance(
        self, x: Tensor, t: float, *, label: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor, bool]:
        """At states `x` (B, ...) and a time `t` above 0: the base velocity, what steering adds to it, effective sample sizes (B,), whether `max_gain` held."""
        full = gain(t, self.path)
        factor = min(full, self.max_gain)
        options = {"steps": self.map_steps, "label": label, "generator": generator}
        size = torch.ones(len(x), device=x.device)
        if self.method == "dps":
            b, slope = self._of_the_mean(x, t, label)
            push = factor * slope
        else:
            with torch.no_grad():
                b = self._ask(x, t, label)
        if self.method == "grad":
            self._backward += self.n * len(x)
            slope, size = value_gradient(self.mfm, x, t, self.reward, n=self.n, **options)  # type: ignore[arg-type]
            push = factor * slope
        elif self.method == "weights":
            with torch.no_grad():
                draws = self.mfm.sample_posterior(x, t, self.n, **options)  # type: ignore[arg-type]
                weights = shares(self.reward(draws.flatten(0, 1)).reshape(self.n, -1))
                size = effective(weights)
                excess = (weights - 1 / self.n).to(x.dtype).reshape(*weights.shape, *([1] * (x.dim() - 1)))
                push = turning(t, self.path) / float(self.path.sigma(t)) * (excess * draws).sum(0)
        if self.normalise:
            norms = [v.flatten(1).norm(dim=1).clamp(min=1e-12) for v in (b, push)]
            push = push * (norms[0] / norms[1]).reshape(-1, *([1] * (x.dim() - 1)))
        return b, push, size, full > self.max_gain and self.method != "weights"

    def sample(
        self,
        shape: Sequence[int],
        *,
        steps: int = 100,
        times: Sequence[float] | None = None,
        label: Tensor | None = None,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
        trajectory: bool = False,
        progress: bool | None = None,
    ) -> Steering:
        """Steer ``shape[0]`` particles from noise to data, each by itself.

        Parameters
        ----------
        shape : (B, ...)
        steps : int
            Equal Euler steps of guidance from `start` to 1.
        times : sequence of float, optional
            Instead of `start` and `steps`: increasing in [0, 1]. A step that begins at 0 is made without guidance.
        label : (B,) tensor, optional
        generator : torch.Generator, optional
        noise : tensor of `shape`, optional
            Where to begin, instead of drawing it; its dtype and device are kept. By default float32 on the CPU.
        trajectory : bool
            Whether all states are kept, from the noise on.
        progress : bool, optional

        Returns
        -------
        Steering

        Raises
        ------
        ValueError
            Times that do not increase within [0, 1]; noise of another shape.
        FloatingPointError
            A velocity or a draw that is not finite.
        """
        grid = _grid(steps, times, self.start)
        if noise is not None and noise.shape != tuple(shape):
            raise ValueError(f"noise has shape {tuple(noise.shape)}, and samples of shape {tuple(shape)} are wanted")
        x = gaussian(tuple(shape), torch.zeros(()), generator) if noise is None else noise
        state = x.to(torch.promote_types(x.dtype, torch.float32))  # rounded for the networks only
        work = state.dtype
        counted, self._asked, self._backward = self._counts(), 0, 0
        rewarded = self.reward.calls
        kept, sizes, clamps, pushed = [x], [], 0, False
        with progress_bar(progress, len(grid) - 1, "steering") as report:
            for done, (t, later) in enumerate(itertools.pairwise(grid), 1):
                if t == 0:
                    with torch.no_grad():
                        drift = self._ask(x, t, label).to(work)
                else:
                    b, push, size, clamp = self.guidance(x, t, label=label, generator=generator)
                    sizes.append(size.mean())
                    pushed = pushed or bool((push != 0).any())
                    clamps += clamp
                    drift = (b + push).to(work)
                    if self.dynamics == "sde":
                        drift = drift + (self._memoryless(x, t, later, b) + push).to(work)
                state = state + (later - t) * drift
                if self.dynamics == "sde" and t > 0 and later < 1:
                    spread = (2 * gain(later, self.path) * (later - t)) ** 0.5
                    state = state + spread * gaussian(tuple(shape), state, generator)
                x = state.to(x.dtype)
                check_finite(x, later, "the steered state")
                if trajectory:
                    kept.append(x)
                report(done, "")
        particles = len(x)
        if self.method != "weights" and sizes and not pushed:
            warnings.warn(
                "the reward's gradient was 0 at every step for every particle, so that nothing was steered; if it is a step function use method='weights'",
                stacklevel=2,
            )
        return Steering(
            x,
            (self._counts() - counted + self._asked) / particles,
            (self.reward.calls - rewarded) / particles,
            self._backward / particles,
            torch.stack(sizes) if sizes else torch.ones(0),
            {"max_gain": clamps / max(len(sizes), 1)},
            torch.tensor(grid, dtype=torch.float64),
            torch.stack(kept) if trajectory else None,
        )

    def _counts(self) -> int:
        return int(getattr(self.mfm, "evaluations", 0))

    def _ask(self, x: Tensor, t: float, label: Tensor | None) -> Tensor:
        self._asked += len(x) if self._outside else 0
        times = torch.full((len(x),), t, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        v = ask(self._velocity, x, times, label)
        check_finite(v, t)
        return v

    def _of_the_mean(self, x: Tensor, t: float, label: Tensor | None) -> tuple[Tensor, Tensor]:
        """The base velocity and the gradient of the reward of the posterior mean, from one call."""
        self._backward += len(x)
        with torch.enable_grad():
            state = x.detach().requires_grad_()
            b = self._ask(state, t, label)
            mean = (float(self.path.sigma(t)) * b - float(self.path.d_sigma(t)) * state) / turning(t, self.path)
            rewards = self.reward(mean.to(x.dtype), differentiable=True)
            (slope,) = torch.autograd.grad(rewards.sum(), state)
        return b.detach(), slope

    def _memoryless(self, x: Tensor, t: float, later: float, b: Tensor) -> Tensor:
        """`gain` times the score of the base flow, ``b - alpha' / alpha x``, divided by alpha at the end of the step, so that long steps early are stable."""
        path = self.path
        return b - float(path.d_alpha(t)) / float(path.alpha(later)) * x


def gain(t: Time, path: Path) -> float:
    """``sigma (alpha' sigma - sigma' alpha) / alpha``, half the memoryless diffusion: what the gradient of the value is multiplied by."""
    return float(path.sigma(t)) * turning(t, path) / float(path.alpha(t))


def turning(t: Time, path: Path) -> float:
    """``alpha' sigma - sigma' alpha``, positive; 1 on the linear path."""
    return float(path.d_alpha(t)) * float(path.sigma(t)) - float(path.d_sigma(t)) * float(path.alpha(t))


def _grid(steps: int, times: Sequence[float] | None, start: float) -> list[float]:
    """Times from 0 on."""
    if times is None:
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        return [0.0, *(start + (1 - start) * torch.linspace(0, 1, steps + 1, dtype=torch.float64)).tolist()]
    grid = [float(t) for t in times]
    if len(grid) < 2 or grid[0] < 0 or grid[-1] > 1 or any(b <= a for a, b in itertools.pairwise(grid)):
        raise ValueError(
            f"times must be at least two and increase in [0, 1] (0 is noise, 1 data); got {', '.join(f'{t:g}' for t in grid[:6])}"
        )
    return grid if grid[0] == 0 else [0.0, *grid]
