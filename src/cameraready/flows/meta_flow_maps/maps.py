"""A network that draws from the posterior of clean data in one call, as a module around any backbone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cameraready.flows._paths import LinearPath, Path, Time, check_finite
from cameraready.flows.meta_flow_maps.inner import check_times, gaussian, repeated, times


class MetaFlowMap(nn.Module):
    """Clean data given a noisy state and fresh noise: ``X_{0,1}(eps; t, x_t)`` is a draw from ``p(x1 | x_t)``, differentiable in ``x_t``.

    The backbone gives the *average* velocity of the inner flow (noise to posterior, for the state `x` at time `t`) between its times `s` and `u`, so
    that ``X_{s,u}(y; t, x) = y + (u - s) v(s, u, y; t, x)`` is its flow map. At ``t = 0`` the state says nothing and the map is
    an ordinary few-step generator.

    Use it to steer or fine-tune a generator towards a reward, or to ask how sure it is, without rolling out trajectories. For samples
    alone a plain flow map is smaller; for a handful of draws `PosteriorFlow` needs no training.

    Parameters
    ----------
    backbone : nn.Module ``backbone(s, u, y, t, x, label)``
        `s`, `u`, `t` are (B,), `y` and `x` (B, ...), `label` (B,) or None; returns the average velocity, like `y`. `FlowBackbone` makes one of a
        trained flow network, `MapMLP` is one for vectors. A network in half precision is given its own dtype.
    path : Path
        Of the states and of the inner flow.

    Attributes
    ----------
    evaluations : int
        States that the backbone was asked about so far (a call on a batch of 8 counts 8). Set it to 0 at will.

    Raises
    ------
    FloatingPointError
        A draw, or a velocity, that is not finite.

    References
    ----------
    Potaptchik et al., 2026, arXiv:2601.14430.
    """

    def __init__(self, backbone: nn.Module, path: Path = LinearPath()) -> None:  # noqa: B008 (frozen)
        super().__init__()
        self.backbone, self.path = backbone, path
        self.evaluations = 0

    def average_velocity(self, s: Time, u: Time, y: Tensor, t: Time, x: Tensor, label: Tensor | None = None) -> Tensor:
        """The backbone's output, (B, ...) like `y`; times are numbers or tensors () or (B,). Equal to the inner velocity where ``u = s``."""
        self.evaluations += y.shape[0]
        dtype = next((p.dtype for p in self.parameters() if p.is_floating_point()), y.dtype)
        clock = torch.promote_types(dtype, torch.float32)
        s, u, t = (_each(value, y, clock) for value in (s, u, t))
        return self.backbone(s, u, y.to(dtype), t, x.to(dtype), label).to(y.dtype)

    def forward(self, s: Time, u: Time, y: Tensor, t: Time, x: Tensor, label: Tensor | None = None) -> Tensor:
        """The flow map ``X_{s,u}(y; t, x)``: the inner state at `u` of what is at `y` at `s`; shapes as in `average_velocity`."""
        work = torch.promote_types(y.dtype, torch.float32)
        step = times(u, y) - times(s, y)
        return (y.to(work) + step * self.average_velocity(s, u, y, t, x, label).to(work)).to(y.dtype)

    def velocity(self, x: Tensor, t: Time, y: Tensor | None = None) -> Tensor:
        """The unconditional flow's velocity at state `x` (B, ...) and time `t`, labels `y`: the diagonal of the map at condition time 0."""
        v = self.average_velocity(t, t, x, 0.0, torch.zeros_like(x), y)
        check_finite(v, t)
        return v

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
        """`n` independent draws from ``p(x1 | x_t)`` for each of B states.

        Parameters
        ----------
        x_t : (B, ...) tensor
            Noisy states; the draws are differentiable in it.
        t : float, or tensor () or (B,)
            Times of the states, in [0, 1].
        n : int
        steps : int, optional
            Calls of the network per draw, 1 by default: more compose the map over equal parts of [0, 1].
        label : (B,) tensor, optional
        generator : torch.Generator, optional
            Draws the noise; by default torch's own.
        noise : (n, B, ...) tensor, optional
            Instead of drawing it: equal noise gives equal draws.

        Returns
        -------
        (n, B, ...) tensor of the dtype of `x_t`.

        Raises
        ------
        ValueError
            `n` or `steps` below 1, noise of another shape, a time outside [0, 1].
        FloatingPointError
            A draw that is not finite.
        """
        check_times(t)
        y, x, t, label = repeated(x_t, t, n, label, generator, noise)
        y = y.to(torch.promote_types(y.dtype, torch.float32))
        for s, u in _grid(1 if steps is None else steps):
            y = self(s, u, y, t, x, label)
        check_finite(y, t, "a posterior draw")
        return y.to(x_t.dtype).reshape(n, *x_t.shape)

    def sample(
        self,
        shape: Sequence[int],
        *,
        steps: int = 1,
        kernel: bool = False,
        label: Tensor | None = None,
        generator: torch.Generator | None = None,
        like: Tensor | None = None,
    ) -> Tensor:
        """Unconditional samples in `steps` calls of the network.

        Parameters
        ----------
        shape : (B, ...)
        steps : int
        kernel : bool
            False composes the flow map at ``t = 0`` over equal parts of [0, 1]. True walks through posteriors instead: a draw of clean data given the
            state, noised again to the next time, and so on; each step forgets errors of those before it.
        label : (B,) tensor, optional
        generator : torch.Generator, optional
        like : tensor, optional
            Whose dtype and device the samples get; float32 on the network's device by default.

        Returns
        -------
        tensor of `shape`
        """
        if like is None:
            parameter = next(self.parameters(), torch.zeros(()))
            like = torch.zeros((), device=parameter.device)
        noise = gaussian(tuple(shape), like, generator)
        if not kernel:
            return self.sample_posterior(torch.zeros_like(noise), 0.0, steps=steps, label=label, noise=noise[None])[
                0
            ].detach()
        x = noise
        with torch.no_grad():
            for t, later in _grid(steps):
                clean = self.sample_posterior(x, t, label=label, generator=generator)[0]
                x = clean if later == 1 else self.path.interpolate(clean, gaussian(tuple(shape), x, generator), later)
        return x


def _each(t: Time, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Times as (B,)."""
    if not isinstance(t, Tensor):
        return torch.full((like.shape[0],), float(t), dtype=dtype, device=like.device)
    return t.to(device=like.device, dtype=dtype).reshape(-1).expand(like.shape[0])


def _grid(steps: int) -> list[tuple[float, float]]:
    """Beginning and end of each of `steps` equal parts of [0, 1]."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    ends = torch.linspace(0, 1, steps + 1, dtype=torch.float64).tolist()
    return list(itertools.pairwise(ends))
