"""The flow from noise to the posterior of clean data given a noisy state, in closed form from an ordinary velocity.

A state ``x_t = alpha(t) x1 + sigma(t) x0`` and an inner state ``y_s = alpha(s) x1 + sigma(s) x0'`` with noise of its own are two Gaussian views
of the same ``x1``. Their precisions add, ``SNR(t*) = SNR(t) + SNR(s)``, so that together they say as much as one state ``x*`` at the later
time ``t*``; and what a velocity says there gives the velocity of the inner flow (Potaptchik et al., 2026, arXiv:2601.14430; the formula is derived
here anew, for any path, in a form that divides by nothing that vanishes for ``t < 1``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cameraready.flows._paths import LinearPath, Path, Time, check_finite, time_like

#: What two vanishing noises are divided by instead (the inner velocity does not exist at s = t = 1).
FLOOR = 1e-6

Velocity = Callable[..., Tensor]


@dataclass(frozen=True)
class InnerFlow:
    """How the inner flow at ``(s, t)`` follows from a velocity: ``x* = from_x x + from_y y``, ``u = on_x x + on_y y + on_velocity b(x*, t*)``.

    Attributes
    ----------
    time : tensor
        ``t*``, of the shape of `s` and `t` together.
    from_x, from_y, on_x, on_y, on_velocity : tensors
        Of that shape.
    """

    time: Tensor
    from_x: Tensor
    from_y: Tensor
    on_x: Tensor
    on_y: Tensor
    on_velocity: Tensor

    def merged(self, x: Tensor, y: Tensor) -> Tensor:
        """The state ``x*`` at ``t*`` that says as much about the clean data as `x` and `y` together."""
        return self.from_x * x + self.from_y * y

    def velocity(self, x: Tensor, y: Tensor, b: Tensor) -> Tensor:
        """The inner velocity, from the velocity `b` at ``(x*, t*)``."""
        return self.on_x * x + self.on_y * y + self.on_velocity * b


def inner_flow(s: Tensor, t: Tensor, path: Path = LinearPath()) -> InnerFlow:  # noqa: B008 (frozen)
    """The coefficients of the inner flow at inner time `s` for a state at time `t`.

    Parameters
    ----------
    s, t : tensors of shapes that broadcast
        In [0, 1]. At ``s = t = 1`` there is no inner velocity; a finite number is given for it (0 on the linear path).
    path : Path
        Of the states and of the inner flow alike.

    Notes
    -----
    Divided by ``alpha + sigma`` any path is the linear one with another clock, ``tau = alpha / (alpha + sigma)``. There, with
    ``root = hypot(tau_s (1 - tau_t), tau_t (1 - tau_s))``, cosine and sine of the two views' shares and ``q = root + (1 - tau_s)(1 - tau_t)``,

        ``tau* = root / q``, ``x* = (1 - tau_s) sin / q x + (1 - tau_t) cos / q y``,
        ``u = sin / q x - [(1 - tau_t) sin^2 / (1 + cos) + tau_t sin] / q y + (1 - tau_t) / q b(x*, t*)``.
    """
    time_s, time_t = torch.broadcast_tensors(s, t)
    scale_s, scale_t = _scale(path, time_s), _scale(path, time_t)
    tau_s, rest_s = path.alpha(time_s) / scale_s, path.sigma(time_s) / scale_s
    tau_t, rest_t = path.alpha(time_t) / scale_t, path.sigma(time_t) / scale_t

    from_state, from_condition = tau_s * rest_t, tau_t * rest_s
    blank = (from_state == 0) & (from_condition == 0)  # neither view says anything, or both say everything
    root = torch.hypot(torch.where(blank, 1.0, from_state), from_condition)
    cos, sin = torch.where(blank, 1.0, from_state) / root, from_condition / root
    root = torch.where(blank, 0.0, root)
    ended = blank & (rest_s * rest_t == 0)
    q = torch.where(ended, FLOOR, root + rest_s * rest_t)
    end = torch.where(ended, 1.0, 0.0)
    time = path.time_of(root + end, rest_s * rest_t)

    # On the linear path with the clock tau; `b` there is (b - scale' x~) / (scale tau').
    merged_x, merged_y = rest_s * sin / q, rest_t * cos / q
    on_x, on_y, on_b = sin / q, -(rest_t * sin**2 / (1 + cos) + tau_t * sin) / q, rest_t / q
    scale, pace = _scale(path, time), _pace(path, time)
    stretch = path.d_alpha(time) + path.d_sigma(time)
    back = on_b / pace
    on_x, on_y = on_x - back * stretch * merged_x, on_y - back * stretch * merged_y

    # And back: y = scale_s z, dy/ds = scale_s' z + scale_s tau' dz/dtau.
    pace_s = _pace(path, time_s)
    return InnerFlow(
        time,
        scale * merged_x / scale_t,
        scale * merged_y / scale_s,
        pace_s * on_x / scale_t,
        (path.d_alpha(time_s) + path.d_sigma(time_s) + pace_s * on_y) / scale_s,
        pace_s * back,
    )


def inner_velocity(velocity: Velocity, path: Path = LinearPath()) -> Callable[..., Tensor]:  # noqa: B008 (frozen)
    """The velocity of the posterior's flow, from a velocity of the data's.

    Parameters
    ----------
    velocity : callable ``v(x, t, y=None)``
        An ordinary flow's, on `path`; `t` is given as a (B,) tensor. Where it is exact, so is the inner velocity.
    path : Path

    Returns
    -------
    callable ``u(s, y, t, x, label=None)``
        `s` and `t` floats or tensors () or (B,), `y` and `x` (B, ...); the velocity is asked in the dtype of `x`, the result is like `y`. Differentiable in `x` and `y`. Starting from
        noise at ``s = 0``, the flow ``dy/ds = u`` ends in a draw from ``p(x1 | x_t = x)``. One call of `velocity` each.
    """

    def inner(s: Time, y: Tensor, t: Time, x: Tensor, label: Tensor | None = None) -> Tensor:
        work = torch.promote_types(y.dtype, torch.float32)
        flow = inner_flow(times(s, y), times(t, y), path)
        state, condition = y.to(work), x.to(work)
        b = ask(velocity, flow.merged(condition, state).to(x.dtype), _flat(flow.time, y), label)
        return flow.velocity(condition, state, b.to(work)).to(y.dtype)

    return inner


class PosteriorFlow:
    """Posterior draws from a plain velocity by integrating its inner flow: no training, several calls a draw.

    Use it as the reference for a trained `MetaFlowMap`, or where so few draws are needed that training one does not pay. It takes the place of a
    map in `value_estimate`, `Steered` and `finetune`. Each step of each draw is one call, two with the midpoint rule: 32 calls a draw by default, which is for
    references; for steering take ``steps=4`` and ``method="euler"``, or a trained map.

    Parameters
    ----------
    velocity : callable ``v(x, t, y=None)``
        The base flow's.
    path : Path
    steps : int
        Default number of equal steps of a draw.
    method : {"euler", "midpoint"}

    Attributes
    ----------
    evaluations : int
        States that `velocity` was asked about so far (a call on a batch of 8 counts 8).

    Raises
    ------
    ValueError
        `steps` or `n` below 1, a time outside [0, 1].
    FloatingPointError
        Draws that are not finite.
    """

    def __init__(
        self,
        velocity: Velocity,
        path: Path = LinearPath(),  # noqa: B008 (frozen)
        *,
        steps: int = 16,
        method: str = "midpoint",
    ) -> None:
        if method not in ("euler", "midpoint"):
            raise ValueError(f"method must be 'euler' or 'midpoint', got {method!r}")
        self.path, self.steps, self.method = path, steps, method
        self.evaluations = 0
        self._velocity = velocity
        self._inner = inner_velocity(self.velocity, path)

    def velocity(self, x: Tensor, t: Time, y: Tensor | None = None) -> Tensor:
        """The base flow's velocity, counted."""
        self.evaluations += x.shape[0]
        return ask(self._velocity, x, t, y)

    def sample_posterior(
        self,
        x_t: Tensor,
        t: Time,
        n: int = 1,
        *,
        steps: int | None = None,
        label: Tensor | None = None,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """`n` independent draws of clean data for each state, as `MetaFlowMap.sample_posterior`."""
        draws = self.steps if steps is None else steps
        check_times(t)
        if draws < 1:
            raise ValueError(f"steps must be at least 1, got {draws}")
        y, x, t, label = repeated(x_t, t, n, label, generator, noise)
        y = y.to(torch.promote_types(y.dtype, torch.float32))
        times_ = torch.linspace(0, 1, draws + 1, dtype=torch.float64).tolist()
        for s, u in itertools.pairwise(times_):
            slope = self._inner(s, y, t, x, label)
            if self.method == "midpoint":
                slope = self._inner((s + u) / 2, y + (u - s) / 2 * slope, t, x, label)
            y = y + (u - s) * slope
        check_finite(y, t, "a posterior draw")
        return y.to(x_t.dtype).reshape(n, *x_t.shape)


def ask(velocity: Velocity, x: Tensor, t: Time, label: Tensor | None = None) -> Tensor:
    """A velocity's answer; it is given a label only where there is one, so that ``v(x, t)`` will do."""
    return velocity(x, t) if label is None else velocity(x, t, label)


def repeated(
    x_t: Tensor, t: Time, n: int, label: Tensor | None, generator: torch.Generator | None, noise: Tensor | None
) -> tuple[Tensor, Tensor, Time, Tensor | None]:
    """Fresh noise, states, times and labels for `n` draws of each of B states, as batches of ``n B``; draws of a state lie B apart.

    Raises
    ------
    ValueError
        `n` below 1, noise of another shape, times or labels that are not one for each state.
    """
    if n < 1:
        raise ValueError(f"n, the number of draws for each state, must be at least 1, got {n}")
    shape = (n, *x_t.shape)
    if noise is None:
        noise = gaussian(shape, x_t, generator)
    elif noise.shape != shape:
        raise ValueError(
            f"noise must have the shape (n, *x_t.shape) = {tuple(shape)}, one noise for each draw; it has {tuple(noise.shape)}"
        )
    if isinstance(t, Tensor) and t.numel() > 1:
        if t.numel() != len(x_t):
            raise ValueError(f"give one time, or one for each of the {len(x_t)} states; got {t.numel()}")
        t = t.reshape(-1).repeat(n)
    if label is not None:
        if len(label) != len(x_t):
            raise ValueError(f"give one label for each of the {len(x_t)} states; got {len(label)}")
        label = label.repeat(n, *([1] * (label.dim() - 1)))
    return noise.flatten(0, 1), x_t.repeat(n, *([1] * (x_t.dim() - 1))), t, label


def gaussian(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal noise of the dtype and device of `like`, drawn in float32 at least and where `generator` lives."""
    device = like.device if generator is None else generator.device
    work = torch.promote_types(like.dtype, torch.float32)
    return torch.randn(shape, dtype=work, device=device, generator=generator).to(device=like.device, dtype=like.dtype)


def check_times(t: Time) -> None:
    """Raise a ValueError for a time outside [0, 1], which a network would answer with nonsense."""
    low, high = (float(t.min()), float(t.max())) if isinstance(t, Tensor) else (float(t), float(t))
    if not 0 <= low <= high <= 1:
        raise ValueError(f"times run from 0 (noise) to 1 (data); got {low:.6g} to {high:.6g}")


def times(t: Time, like: Tensor) -> Tensor:
    """`t` as a tensor that multiplies `like`: () or (B, 1, ..., 1), float32 at least."""
    t = time_like(t, like)
    if isinstance(t, Tensor):
        return t
    return torch.tensor(t, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def _flat(t: Tensor, like: Tensor) -> Tensor:
    """Times of shape () or (B, 1, ..., 1) as (B,)."""
    return t.reshape(-1).expand(like.shape[0])


def _scale(path: Path, t: Tensor) -> Tensor:
    return path.alpha(t) + path.sigma(t)


def _pace(path: Path, t: Tensor) -> Tensor:
    """``scale d tau / dt``, which is ``(alpha' sigma - sigma' alpha) / scale``; positive."""
    return (path.d_alpha(t) * path.sigma(t) - path.d_sigma(t) * path.alpha(t)) / _scale(path, t)
