"""Paths between noise and data, and exact conversions among what networks predict on them.

Time ``t`` runs from 0 (noise) to 1 (data) everywhere in this room: ``x_t = alpha(t) x1 + sigma(t) x0`` with data ``x1`` and noise
``x0 ~ N(0, I)``, and the velocity is ``v(x, t) = E[alpha'(t) x1 + sigma'(t) x0 | x_t = x]`` (Albergo et al., 2023, arXiv:2303.08797, Section 2;
Lipman et al., 2023, arXiv:2210.02747). Models that run time the other way are turned round by `cameraready.flows.velocity_of`.
"""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

#: A time: a number, a 0-d tensor, or a (B,) tensor with one time for each state.
Time = float | Tensor
Kind = Literal["velocity", "score", "x1", "noise"]
KINDS: tuple[Kind, ...] = ("velocity", "score", "x1", "noise")
#: How far a time may lie outside [0, 1]: rounding, and the differences by which derivatives in time are tested.
SLACK = 1e-3


class Path(ABC):
    """``x_t = alpha(t) x1 + sigma(t) x0`` with ``alpha(0) = sigma(1) = 0`` or close to it, and ``alpha / sigma`` growing.

    The four coefficients take a number and give a number, or take a tensor and give one of its shape, differentiable in ``t``.
    """

    @abstractmethod
    def alpha(self, t: Time) -> Time:
        """What the data are multiplied by; grows."""

    @abstractmethod
    def sigma(self, t: Time) -> Time:
        """What the noise is multiplied by; falls."""

    @abstractmethod
    def d_alpha(self, t: Time) -> Time:
        """The derivative of `alpha`."""

    @abstractmethod
    def d_sigma(self, t: Time) -> Time:
        """The derivative of `sigma`."""

    def snr(self, t: Time) -> Time:
        """The signal-to-noise ratio ``alpha(t)^2 / sigma(t)^2``; infinite where there is no noise left."""
        alpha, sigma = self.alpha(t), self.sigma(t)
        if isinstance(alpha, Tensor) or isinstance(sigma, Tensor):
            return (alpha / sigma) ** 2
        return math.inf if sigma == 0 else (alpha / sigma) ** 2

    def time_of(self, alpha: Time, sigma: Time) -> Time:
        """The time at which data and noise are mixed as ``alpha : sigma``, by bisection where a path has no closed form.

        Where the path does not reach the ratio, the nearer of its two ends.
        """
        wanted = _angle(alpha, sigma)
        low, high = (torch.zeros_like(wanted), torch.ones_like(wanted)) if isinstance(wanted, Tensor) else (0.0, 1.0)
        for _ in range(60):
            middle = (low + high) / 2
            below = _angle(self.alpha(middle), self.sigma(middle)) < wanted
            low, high = _where(below, middle, low), _where(below, high, middle)
        return (low + high) / 2

    def interpolate(self, x1: Tensor, x0: Tensor, t: Time) -> Tensor:
        """The state ``x_t`` between noise `x0` and data `x1`, both (B, ...), at `t`."""
        t = time_like(check_time(t), x1)
        return (self.alpha(t) * x1 + self.sigma(t) * x0).to(x1.dtype)

    def target(self, x1: Tensor, x0: Tensor, t: Time) -> Tensor:
        """The conditional velocity ``alpha'(t) x1 + sigma'(t) x0``, what flow matching regresses on; shapes as in `interpolate`."""
        t = time_like(check_time(t), x1)
        return (self.d_alpha(t) * x1 + self.d_sigma(t) * x0).to(x1.dtype)


@dataclass(frozen=True)
class LinearPath(Path):
    """``x_t = t x1 + (1 - t) x0``: rectified flow, conditional optimal transport, and what current image models are trained on."""

    def alpha(self, t: Time) -> Time:
        return t

    def sigma(self, t: Time) -> Time:
        return 1 - t

    def d_alpha(self, t: Time) -> Time:
        return torch.ones_like(t) if isinstance(t, Tensor) else 1.0

    def d_sigma(self, t: Time) -> Time:
        return -torch.ones_like(t) if isinstance(t, Tensor) else -1.0

    def time_of(self, alpha: Time, sigma: Time) -> Time:
        return alpha / (alpha + sigma)


@dataclass(frozen=True)
class CosinePath(Path):
    """``x_t = sin(pi t / 2) x1 + cos(pi t / 2) x0``: data and noise of variance one keep it (variance preserving)."""

    def alpha(self, t: Time) -> Time:
        return _sin(math.pi / 2 * t)

    def sigma(self, t: Time) -> Time:
        return _sin(math.pi / 2 * (1 - t))  # exactly 0 at t = 1, which the rounded cosine of pi / 2 is not

    def d_alpha(self, t: Time) -> Time:
        return math.pi / 2 * _sin(math.pi / 2 * (1 - t))

    def d_sigma(self, t: Time) -> Time:
        return -math.pi / 2 * _sin(math.pi / 2 * t)

    def time_of(self, alpha: Time, sigma: Time) -> Time:
        return 2 / math.pi * _angle(alpha, sigma)


@dataclass(frozen=True)
class DiscretePath(Path):
    """A discrete diffusion's variance-preserving path, continuous in ``t``: noise level ``s = (T - 1)(1 - t)`` of ``T``.

    Between two levels the angle of ``alpha = sqrt(alphas_cumprod)`` and ``sigma = sqrt(1 - alphas_cumprod)`` is linear, so that their squares add up to one
    everywhere and a whole-numbered level has exactly its own. Such paths end a little short of pure noise at t = 0 and of clean data at t = 1.

    Parameters
    ----------
    angles : tuple of float
        ``atan2(alpha, sigma)`` of level 0 (data), 1, ..., T - 1 (noise), falling; see `of`.
    """

    angles: tuple[float, ...]

    @classmethod
    def of(cls, alphas_cumprod: Tensor) -> DiscretePath:
        """From a scheduler's ``alphas_cumprod``, (T,) and strictly falling within [0, 1]."""
        kept = alphas_cumprod.detach().to("cpu", torch.float64)
        if kept.dim() != 1 or len(kept) < 2 or bool((kept.diff() >= 0).any()) or kept[0] > 1 or kept[-1] < 0:
            raise ValueError("alphas_cumprod must fall strictly from at most 1 to at least 0, with two levels or more")
        return cls(tuple(torch.atan2(kept.sqrt(), (1 - kept).sqrt()).tolist()))

    def alpha(self, t: Time) -> Time:
        return _sin(self._at(t)[0])

    def sigma(self, t: Time) -> Time:
        return _sin(math.pi / 2 - self._at(t)[0])

    def d_alpha(self, t: Time) -> Time:
        angle, slope = self._at(t)
        return _sin(math.pi / 2 - angle) * slope

    def d_sigma(self, t: Time) -> Time:
        angle, slope = self._at(t)
        return -_sin(angle) * slope

    def time_of(self, alpha: Time, sigma: Time) -> Time:
        wanted = _angle(alpha, sigma)
        rising = self.angles[::-1]
        if not isinstance(wanted, Tensor):
            wanted = min(max(wanted, rising[0]), rising[-1])
            below = min(max(bisect.bisect_right(rising, wanted) - 1, 0), len(rising) - 2)
            return (below + (wanted - rising[below]) / (rising[below + 1] - rising[below])) / (len(rising) - 1)
        table = torch.tensor(rising, dtype=wanted.dtype, device=wanted.device)
        wanted = wanted.clamp(table[0], table[-1])
        index = (torch.searchsorted(table, wanted.contiguous(), right=True) - 1).clamp(0, len(rising) - 2)
        return (index + (wanted - table[index]) / (table[index + 1] - table[index])) / (len(rising) - 1)

    def _at(self, t: Time) -> tuple[Time, Time]:
        """The angle at `t` and its derivative."""
        last = len(self.angles) - 1
        rising = self.angles[::-1]
        if not isinstance(t, Tensor):
            below = min(max(math.floor(t * last), 0), last - 1)
            step = rising[below + 1] - rising[below]
            return rising[below] + (t * last - below) * step, step * last
        table = torch.tensor(rising, dtype=t.dtype, device=t.device)
        index = (t.detach() * last).floor().long().clamp(0, last - 1)
        step = table[index + 1] - table[index]
        return table[index] + (t * last - index) * step, step * last


#: The path of the room's networks, and of `torchcfm`, `flow_matching` and diffusers' flow models unless they say otherwise.
LINEAR = LinearPath()


def convert(
    prediction: Tensor,
    x: Tensor,
    t: Time,
    *,
    source: Kind,
    target: Kind,
    path: Path = LINEAR,
    eps: float | None = None,
) -> Tensor:
    """What a network predicts, as another of the four things that say the same.

    Parameters
    ----------
    prediction, x : (B, ...) tensors
        The prediction at state `x`; states of half precision are computed in float32.
    t : float, or tensor () or (B,)
    source, target : {"velocity", "score", "x1", "noise"}
        ``x1`` and ``noise`` are the posterior means ``E[x1 | x_t]`` and ``E[x0 | x_t]``; the score is ``grad log p_t(x)``, ``-noise / sigma``.
    path : Path
    eps : float, optional
        The least that is divided by. Under ``torch.func.vmap`` over `t` it has to be given, since there a value cannot be looked at.

    Returns
    -------
    (B, ...) tensor of the dtype of `x`. Exact algebra: a round trip gives the prediction back to rounding.

    Raises
    ------
    ValueError
        An unknown kind; shapes that differ; a number outside [0, 1] as time; or, without `eps`, a time at which the conversion does not exist: a score where there is no noise,
        anything from the noise (or its score) where there is no data in the state, anything from ``x1`` where there is no noise.
    """
    _check_kinds(source, target)
    if prediction.shape != x.shape:
        raise ValueError(
            f"the prediction has shape {tuple(prediction.shape)} and the state {tuple(x.shape)}; they must be the same"
        )
    dtype, t = x.dtype, time_like(check_time(t), x)
    if source == target:
        return prediction.to(dtype)
    work = torch.promote_types(dtype, torch.float32)
    prediction, x = prediction.to(work), x.to(work)
    alpha, sigma, d_alpha, d_sigma = path.alpha(t), path.sigma(t), path.d_alpha(t), path.d_sigma(t)

    def over(numerator: Tensor, divisor: Time, name: str) -> Tensor:
        return numerator / _divisor(divisor, name, source, target, eps)

    if source == "velocity":
        turning = alpha * d_sigma - d_alpha * sigma  # never 0 while alpha / sigma grows
        x1, noise = (d_sigma * x - sigma * prediction) / turning, (alpha * prediction - d_alpha * x) / turning
    elif source == "x1":
        x1 = prediction
        noise = over(x - alpha * x1, sigma, "sigma")
    else:
        noise = -sigma * prediction if source == "score" else prediction
        if source == "score" and target == "noise":
            return noise.to(dtype)
        if source == "noise" and target == "score":
            return over(-noise, sigma, "sigma").to(dtype)
        x1 = over(x - sigma * noise, alpha, "alpha")
    if target == "x1":
        return x1.to(dtype)
    if target == "noise":
        return noise.to(dtype)
    if target == "score":
        return over(-noise, sigma, "sigma").to(dtype)
    return (d_alpha * x1 + d_sigma * noise).to(dtype)


def reparametrise_path(velocity: Callable[..., Tensor], source_path: Path, target_path: Path) -> Callable[..., Tensor]:
    """The same flow on another path: a change of time and a scale, no approximation (Karras et al., 2022, arXiv:2206.00364, Eq. 4).

    Both paths visit the same ratios ``alpha : sigma``, so that ``x_t`` of the one is ``c z_u`` of the other; data and noise
    predicted at ``(x / c, u)`` are those at ``(x, t)``. Where `source_path` does not reach a ratio (some discrete schedules end short of pure noise),
    its nearer end is asked, at a state of the norm that it knows there; see `on_path`.

    Parameters
    ----------
    velocity : callable ``v(x, t, y=None)``
        On `source_path`.
    source_path, target_path : Path

    Returns
    -------
    callable ``v(x, t, y=None)`` on `target_path`; both ends of the flow, and the map between them, are unchanged.
    """

    def moved(x: Tensor, t: Time, y: Tensor | None = None) -> Tensor:
        time = time_like(check_time(t), x)
        u = source_path.time_of(target_path.alpha(time), target_path.sigma(time))
        z = (x / scale_between(source_path, u, target_path, time)).to(x.dtype)
        there = velocity(z, _flat(u)) if y is None else velocity(z, _flat(u), y)
        x1 = convert(there, z, _flat(u), source="velocity", target="x1", path=source_path)
        noise = convert(there, z, _flat(u), source="velocity", target="noise", path=source_path)
        return on_path(x1, noise, x, time, target_path)

    return moved


def scale_between(source_path: Path, u: Time, target_path: Path, t: Time) -> Time:
    """``x_target / x_source`` of states with the same ratio: that of the roots of ``alpha^2 + sigma^2``.

    Where `u` is only the nearest that `source_path` has, data of variance one keep the variance that a network of that path was trained on. Any other
    norm would not do: a predicted noise is multiplied by ``sigma / alpha`` there, and so is what is wrong with the state.
    """
    return _norm(target_path.alpha(t), target_path.sigma(t)) / _norm(source_path.alpha(u), source_path.sigma(u))


def on_path(x1: Tensor, noise: Tensor, x: Tensor, t: Time, path: Path) -> Tensor:
    """The velocity at `x` from both posterior means, of which ``alpha x1 + sigma noise = x`` holds.

    Means from the nearest time of another path fall short of that identity where it ends early; they are moved the least that makes it hold
    (at t = 0 the noise becomes `x`, at t = 1 the data do). Elsewhere that is nothing but rounding.
    """
    alpha, sigma = path.alpha(t), path.sigma(t)
    missing = (x - alpha * x1 - sigma * noise) / (alpha**2 + sigma**2)
    x1, noise = x1 + alpha * missing, noise + sigma * missing
    return (path.d_alpha(t) * x1 + path.d_sigma(t) * noise).to(x.dtype)


def check_time(t: Time, tensors: bool = False) -> Time:
    """`t` itself; a ValueError where it is a number (or, with `tensors`, a tensor with numbers) outside [0, 1], but for rounding."""
    if isinstance(t, Tensor):
        if not tensors or t.numel() == 0:
            return t
        low, high = (float(end) for end in torch.aminmax(t.detach()))
    else:
        low = high = float(t)
    if not (low >= -SLACK and high <= 1 + SLACK):
        raise ValueError(
            f"times lie between 0 (noise) and 1 (data), got {low:g}{'' if low == high else f' to {high:g}'}; timesteps of 0 to 1000 have to be divided"
        )
    return t


def time_like(t: Time, x: Tensor) -> Time:
    """`t` so that it multiplies `x` of shape (B, ...): a number as it is, a tensor as () or (B, 1, ..., 1), in float32 at least.

    Raises
    ------
    ValueError
        A tensor that is neither 0-d nor (B,).
    """
    if not isinstance(t, Tensor):
        return float(t)
    t = t.to(device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
    if t.dim() == 0:
        return t
    if t.numel() == 1:
        return t.reshape(())
    if x.dim() == 0 or t.numel() != x.shape[0] or any(size != 1 for size in t.shape[1:]):
        raise ValueError(
            f"t has shape {tuple(t.shape)}; for states of shape {tuple(x.shape)} give a number, a 0-d tensor or one time for each state"
        )
    return t.reshape(-1, *([1] * (x.dim() - 1)))


def check_finite(output: Tensor, t: Time, what: str = "the velocity") -> None:
    """Raise a FloatingPointError that says at which time and in how many entries `output` is NaN or infinite."""
    bad = int((~torch.isfinite(output)).sum())
    if bad:
        if isinstance(t, Tensor):
            t = float(t.reshape(-1)[0]) if t.unique().numel() == 1 else f"{float(t.min()):.6g} to {float(t.max()):.6g}"
        at = t if isinstance(t, str) else f"{t:.6g}"
        raise FloatingPointError(
            f"{what} is not finite in {bad} of {output.numel()} entries at t = {at}; look at the network, its inputs' range and its precision"
        )


def _check_kinds(*kinds: str) -> None:
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"there is no prediction {kind!r}; choose one of {', '.join(KINDS)}")


def _divisor(value: Time, name: str, source: str, target: str, eps: float | None) -> Time:
    if eps is not None:
        return value.clamp(min=eps) if isinstance(value, Tensor) else max(value, eps)
    if bool((value == 0).any()) if isinstance(value, Tensor) else value == 0:
        where = "t = 1, where no noise is left" if name == "sigma" else "t = 0, where there is nothing but noise"
        raise ValueError(
            f"{target} does not follow from {source} at {where} ({name} = 0); keep away from that end or give eps, the least to divide by"
        )
    return value


def _flat(t: Time) -> Time:
    return t.reshape(-1) if isinstance(t, Tensor) and t.dim() else t


def _sin(t: Time) -> Time:
    return torch.sin(t) if isinstance(t, Tensor) else math.sin(t)


def _norm(alpha: Time, sigma: Time) -> Time:
    return (alpha**2 + sigma**2) ** 0.5


def _angle(alpha: Time, sigma: Time) -> Time:
    if isinstance(alpha, Tensor) or isinstance(sigma, Tensor):
        return torch.atan2(torch.as_tensor(alpha), torch.as_tensor(sigma))
    return math.atan2(alpha, sigma)


def _where(condition: Tensor | bool, left: Time, right: Time) -> Time:
    if isinstance(condition, Tensor):
        return torch.where(condition, left, right)
    return left if condition else right
