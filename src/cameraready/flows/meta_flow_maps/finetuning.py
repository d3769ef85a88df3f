"""Fine-tuning a velocity towards a reward from posterior draws, without rolling out, to exactly the tilted law."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from cameraready.flows._paths import Path, time_like
from cameraready.flows.meta_flow_maps.inner import Velocity, ask
from cameraready.flows.meta_flow_maps.progress import progress_bar
from cameraready.flows.meta_flow_maps.rewards import CountedReward, Reward, log_mean_exp
from cameraready.flows.meta_flow_maps.trainer import Data, batches_of, follow
from cameraready.flows.meta_flow_maps.value import Posterior

Sigma = Literal["exact"] | float | Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Finetuned:
    """A fine-tuned velocity and how its training went.

    Attributes
    ----------
    network : nn.Module
        Averaged weights, in eval mode; called as the network that was given.
    history : tuple of float
        The loss of each step. It does not fall to zero: single draws are noise.
    effective : float
        Mean share of a batch's draws that carried weight, in (0, 1]; near 0 a few draws decide everything, and `scale` is too large for this `batch`.
    offset : float
        What was subtracted from scaled rewards; no effect on what is learned.
    network_calls, reward_calls : int
        States asked about and data rewarded, in all.
    """

    network: nn.Module
    history: tuple[float, ...]
    effective: float
    offset: float
    network_calls: int
    reward_calls: int


def finetune(
    velocity: nn.Module | Velocity,
    mfm: Posterior,
    reward: Reward,
    *,
    data: Data,
    steps: int = 1000,
    batch: int = 256,
    lr: float = 1e-4,
    scale: float = 1.0,
    sigma: Sigma = "exact",
    method: Literal["grad", "weights"] = "grad",
    network: nn.Module | None = None,
    max_gain: float = 25.0,
    ema: float = 0.99,
    clip: float = 1.0,
    offset: float | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Finetuned:
    """Train a velocity whose flow ends in ``p_data exp(scale * reward) / Z``, off-policy, from one posterior draw of each state.

    For a state `x` of the base flow at `t` and one draw ``x1'`` given it, with ``R = exp(scale r(x1') - offset)``, the target is
    ``b_base - (R - 1)(b - b_base) + half(t) grad_x R`` without gradient. Although `R` and its gradient come from a single draw, the mean of the error
    vanishes exactly at ``b_base + half grad V``, because it is linear in both (Potaptchik et al., 2026, arXiv:2601.14430).

    Use it where a reward will be used again and again; for a few samples `Steered` needs no training.

    Parameters
    ----------
    velocity : callable ``v(x, t, y=None)``
        The base flow on the map's path; a module is copied and trained unless `network` is given.
    mfm : MetaFlowMap or PosteriorFlow
        Of the same data.
    reward : callable ``reward(x1) -> (B,)``
    data : as in `MFMTrainer.fit`
        Samples of the base flow, or what it was trained on. Labels go to `velocity` and `mfm`.
    steps, batch, lr : int, int, float
        Of Adam.
    scale : float
        Strength of the tilt.
    sigma : {"exact"}, float or callable ``sigma(t)``
        ``half = sigma^2 / 2``. ``"exact"`` is the memoryless one, ``half = sigma (alpha' sigma - sigma' alpha) / alpha``, and the only one whose flow ends
        in the tilt. A constant, as in the authors' configuration, is another law, stronger where it is larger.
    method : {"grad", "weights"}
        ``"weights"`` regresses on the draw's own conditional velocity weighted by R instead; it takes black-box rewards and needs ``sigma="exact"``.
    network : nn.Module, optional
        What to train instead of a copy of `velocity`; changed in place. Parameters that are frozen stay so, unless all are.
    max_gain : float
        Times at which ``half`` is larger count for less in the loss, which leaves its fixed point where it is.
    ema, clip : float
        Decay of averaged weights; largest norm of the gradient.
    offset : float, optional
        By default the log-mean-exp of the rewards of 1024 data.
    seed : int
        Of all that is drawn.
    progress : bool, optional

    Returns
    -------
    Finetuned

    Raises
    ------
    TypeError
        `velocity` is no module and no `network` was given.
    ValueError
        A reward without a gradient (``"grad"``), ``"weights"`` with another `sigma`.
    FloatingPointError
        The loss is not finite.
    """
    if method not in ("grad", "weights"):
        raise ValueError(f"method must be 'grad' or 'weights', got {method!r}")
    if method == "weights" and sigma != "exact":
        raise ValueError("method='weights' regresses on conditional velocities and has no sigma; leave sigma='exact'")
    if isinstance(sigma, str) and sigma != "exact":
        raise ValueError(f"sigma must be 'exact', a number or a callable of t, got {sigma!r}")
    if network is None:
        if not isinstance(velocity, nn.Module):
            raise TypeError(
                "velocity is a plain callable and cannot be trained; pass network=, a module called as network(x, t, y)"
            )
        network = copy.deepcopy(velocity)
    if isinstance(velocity, nn.Module):
        velocity = copy.deepcopy(velocity).eval().requires_grad_(False)
    if not any(p.requires_grad for p in network.parameters()):
        network.requires_grad_(True)
    network.train()
    averaged = copy.deepcopy(network).eval().requires_grad_(False)
    counted = CountedReward(reward, scale)
    generator = torch.Generator(next(network.parameters()).device).manual_seed(seed)
    stream = batches_of(data, batch, generator)
    if offset is None:
        pilot = torch.cat([next(stream)[0] for _ in range(-(-1024 // batch))])
        offset = float(log_mean_exp(counted(pilot)))
    optimizer = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr=lr)
    history: list[float] = []
    shares = asked = 0.0
    before = int(getattr(mfm, "evaluations", 0))
    with progress_bar(progress, steps, "fine-tuning") as report:
        for step in range(1, steps + 1):
            x1, label = next(stream)
            t, x = noised(x1, mfm.path, generator)
            weight, pull = drawn(mfm, counted, x, t, label, offset, method, generator)
            with torch.no_grad():
                base = ask(velocity, x, t, label)
            now = ask(network, x, t, label)
            target, emphasis = target_of(
                now.detach(), base, x, t, weight, pull, path=mfm.path, sigma=sigma, method=method, max_gain=max_gain
            )
            loss = (emphasis * (now - target).square().flatten(1).sum(1)).mean()
            if not bool(torch.isfinite(loss)):
                raise FloatingPointError(
                    f"the loss is {loss.item()} at step {step}: lower lr or scale, or look at the reward"
                )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
            optimizer.step()
            follow(averaged, network, min(ema, step / (9 + step)))
            history.append(float(loss.detach()))
            shares += float(weight.sum() ** 2 / weight.square().sum() / len(weight))
            asked += 2 * len(x)
            report(step, f"loss {history[-1]:.4g}")
    calls = int(asked) + int(getattr(mfm, "evaluations", 0)) - before
    return Finetuned(averaged, tuple(history), shares / max(steps, 1), offset, calls, counted.calls)


def noised(x1: Tensor, path: Path, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Uniform times (B,) and states of the base flow at them, from clean data."""
    t = torch.rand(len(x1), generator=generator, device=generator.device, dtype=x1.dtype)
    noise = torch.randn(x1.shape, generator=generator, device=generator.device, dtype=x1.dtype)
    return t, path.interpolate(x1.to(generator.device), noise, t)


def drawn(
    mfm: Posterior,
    reward: CountedReward,
    x: Tensor,
    t: Tensor,
    label: Tensor | None,
    offset: float,
    method: str,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """``R`` (B,) of one posterior draw for each state, and its gradient in the state (``"grad"``) or the draw itself (``"weights"``)."""
    if method == "weights":
        with torch.no_grad():
            draw = mfm.sample_posterior(x, t, 1, label=label, generator=generator)[0]
            return torch.exp(reward(draw) - offset), draw
    with torch.enable_grad():
        state = x.detach().requires_grad_()
        draw = mfm.sample_posterior(state, t, 1, label=label, generator=generator)[0]
        weight = torch.exp(reward(draw, differentiable=True) - offset)
        (slope,) = torch.autograd.grad(weight.sum(), state)
    return weight.detach(), slope


def target_of(
    now: Tensor,
    base: Tensor,
    x: Tensor,
    t: Tensor,
    weight: Tensor,
    pull: Tensor,
    *,
    path: Path,
    sigma: Sigma = "exact",
    method: str = "grad",
    max_gain: float = 25.0,
) -> tuple[Tensor, Tensor]:
    """The regression target (B, ...) at the present velocity `now`, and the weight of each state in the loss, (B,).

    `weight` and `pull` are what `drawn` gave. The mean of ``now - target`` over draws is ``E[R] (now - base - half grad V)``.
    """
    clock = time_like(t, x)
    alpha, noise = path.alpha(clock), path.sigma(clock)
    turning = path.d_alpha(clock) * noise - path.d_sigma(clock) * alpha
    ratio = weight.reshape(-1, *([1] * (x.dim() - 1))).to(x.dtype)
    if method == "weights":
        noise = noise.clamp(min=1e-3)
        conditional = (turning * pull + path.d_sigma(clock) * x) / noise
        half, shift = turning / noise, (ratio - 1) * (conditional - base)
    else:
        if sigma == "exact":
            half = noise * turning / alpha.clamp(min=1e-6)
        elif callable(sigma):
            half = sigma(clock) ** 2 / 2
        else:
            half = torch.full_like(clock, float(sigma) ** 2 / 2)
        shift = half * pull
    emphasis = (max_gain / half.clamp(min=max_gain)) ** 2
    return (base - (ratio - 1) * (now - base) + shift).to(x.dtype), emphasis.reshape(-1).to(x.dtype)
