"""The checkerboard, uniform on boxes, whose flow is known by truncated normals; stable far outside the board and at both ends of time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cameraready.flows._paths import LinearPath, Path
from cameraready.flows._toy.mixtures import one_each

_NODES, _WEIGHTS = (torch.from_numpy(v) for v in np.polynomial.legendre.leggauss(20))
#: Where there is no noise left the velocity outside the board is infinite; it is that of this much noise.
_LEAST_SIGMA = 1e-9


class Checkerboard:
    """The uniform law on every other square of a board, and the flow from standard normal noise to it.

    Parameters
    ----------
    squares : int
        In a row, at least 2.
    extent : float
        The board is [-extent, extent]^2.

    Notes
    -----
    On a path x_t = alpha x1 + sigma x0 each coordinate of (alpha x1 - x_t) / sigma is, given x_t and the square, a standard normal truncated to an interval. Numbers
    are computed in float64; results have the dtype of the state.
    """

    dim = 2

    def __init__(self, squares: int = 4, extent: float = 2.0):
        if squares < 2 or not extent > 0:
            raise ValueError(
                f"a board has at least 2 squares in a row and a positive extent, got {squares} and {extent}"
            )
        self.squares, self.extent = squares, extent
        self.half = extent / squares
        row, column = torch.meshgrid(torch.arange(squares), torch.arange(squares), indexing="ij")
        filled = torch.stack([row, column], -1)[(row + column) % 2 == 0]
        self.centres = -extent + self.half * (2 * filled.to(torch.float64) + 1)  # (boxes, 2)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """`n` draws, (n, 2) float64."""
        box = torch.randint(len(self.centres), (n,), generator=generator)
        inside = 2 * torch.rand(n, 2, generator=generator, dtype=torch.float64) - 1
        return self.centres[box] + self.half * inside

    def log_prob(self, x: Tensor) -> Tensor:
        """Log density at x (B, 2), (B,): minus infinity outside the filled squares."""
        inside = ((x[:, None].to(torch.float64) - self.centres).abs() <= self.half).all(-1).any(-1)
        level = -math.log(len(self.centres) * (2 * self.half) ** 2)
        return torch.where(inside, level, -math.inf).to(x.dtype)

    def marginal_log_prob(self, x: Tensor, t: float | Tensor, path: Path = LinearPath()) -> Tensor:  # noqa: B008
        """Log density of x_t at x (B, 2), (B,)."""
        return torch.logsumexp(self._at(x, t, path).logits, -1).to(x.dtype)

    def posterior_mean(self, x_t: Tensor, t: float | Tensor, path: Path = LinearPath()) -> Tensor:  # noqa: B008
        """E[x1 | x_t] at x_t (B, 2), (B, 2)."""
        found = self._at(x_t, t, path)
        return (torch.softmax(found.logits, -1)[..., None] * found.x1).sum(-2).to(x_t.dtype)

    def velocity(self, path: Path = LinearPath()) -> Callable[..., Tensor]:  # noqa: B008
        """The exact velocity as ``v(x, t, y=None)``: x (B, 2), t a number, a 0-d tensor or (B,); there are no labels.

        At t = 1 it is finite everywhere: on the filled squares its limit, outside them, where the limit is infinite, that of a noise of 1e-9.
        """

        def v(x: Tensor, t: float | Tensor, y: Tensor | None = None) -> Tensor:
            if y is not None:
                raise ValueError("the checkerboard has no labels: leave y out")
            found = self._at(x, t, path)
            weights = torch.softmax(found.logits, -1)[..., None]
            d_alpha, d_sigma = (
                torch.as_tensor(f(found.t), dtype=torch.float64).expand(found.t.shape)[..., None]
                for f in (path.d_alpha, path.d_sigma)
            )
            return (d_alpha * (weights * found.x1).sum(-2) + d_sigma * (weights * found.x0).sum(-2)).to(x.dtype)

        return v

    def _at(self, x: Tensor, t: float | Tensor, path: Path) -> _Conditioned:
        if x.dim() < 1 or x.shape[-1] != 2:
            raise ValueError(f"the state must be (B, 2), got shape {tuple(x.shape)}")
        x = x.to(torch.float64)
        time = one_each(torch.as_tensor(t, dtype=torch.float64, device=x.device), x, "time")
        alpha, sigma = (
            torch.as_tensor(f(time), dtype=torch.float64).expand(time.shape)[..., None, None]
            for f in (path.alpha, path.sigma)
        )
        sigma = sigma.clamp_min(_LEAST_SIGMA)
        centre = (alpha * self.centres - x[..., None, :]) / sigma
        found = truncated_normal(centre, alpha * self.half / sigma)
        logits = (found.log_density - sigma.log()).sum(-1) - math.log(len(self.centres))
        return _Conditioned(time, logits, self.centres + self.half * found.place, -found.mean)


class _Conditioned(NamedTuple):
    t: Tensor
    logits: Tensor  # (B, boxes): log of weight times density of x_t
    x1: Tensor  # (B, boxes, 2): posterior means of data and noise in each box
    x0: Tensor


class Truncated(NamedTuple):
    """A standard normal truncated to [centre - half, centre + half].

    Attributes
    ----------
    log_density : log of (normal mass of the interval) / (2 half), the mean density; for half = 0 the log density at the centre
    mean : of the truncated law
    place : (mean - centre) / half, between -1 and 1; for half = 0 zero
    """

    log_density: Tensor
    mean: Tensor
    place: Tensor


def truncated_normal(centre: Tensor, half: Tensor) -> Truncated:
    """Mass and mean of a truncated standard normal, to about 1e-10 for intervals of any width, near zero or thousands away; differentiable.

    Parameters
    ----------
    centre, half : float64 tensors that broadcast
        Of the interval; half >= 0.

    Notes
    -----
    By symmetry the centre is taken positive. Narrow intervals (half times max(centre, 1) at most 2) by Gauss-Legendre quadrature, which knows no
    cancellation; others that hold zero by the error function; others by Mills' ratio R(a) = (1 - Phi(a)) / phi(a) with the density at the near edge
    factored out, so that nothing underflows.
    """
    centre, half = torch.broadcast_tensors(centre, half)
    side = torch.where(centre < 0, -1.0, 1.0).to(centre.dtype)
    c = centre.abs()
    narrow = half * c.clamp_min(1) <= 2
    straddles = ~narrow & (half > c)
    tail = ~narrow & ~straddles
    n = _narrow(torch.where(narrow, c, 0.0), torch.where(narrow, half, 0.0))
    s = _straddling(torch.where(straddles, c, 0.0), torch.where(straddles, half, 1.0))
    f = _tail(torch.where(tail, c, 2.0), torch.where(tail, half, 1.0))
    log_density, mean, place = (
        torch.where(narrow, a, torch.where(straddles, b, d)) for a, b, d in zip(n, s, f, strict=True)
    )
    return Truncated(log_density, side * mean, side * place)


def _narrow(c: Tensor, half: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    nodes, weights = _NODES.to(c.device), _WEIGHTS.to(c.device)
    step = half[..., None] * nodes
    density = weights / 2 * torch.exp(-step * (c[..., None] + step / 2))
    mass = density.sum(-1)
    place = (density * nodes).sum(-1) / mass
    return mass.log() - c.square() / 2 - 0.5 * math.log(2 * math.pi), c + half * place, place


def _straddling(c: Tensor, half: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, b = c - half, c + half
    mass = (torch.erf(b / math.sqrt(2)) - torch.erf(a / math.sqrt(2))) / 2
    mean = (torch.exp(-a.square() / 2) - torch.exp(-b.square() / 2)) / math.sqrt(2 * math.pi) / mass
    return mass.log() - (2 * half).log(), mean, (mean - c) / half


def _tail(c: Tensor, half: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, b = c - half, c + half
    ratio_a, short_a = _mills(a)
    ratio_b, short_b = _mills(b)
    far = torch.exp(-2 * half * c)  # phi(b) / phi(a)
    mass = ratio_a - far * ratio_b
    beyond = (short_a - far * (short_b + 2 * half * ratio_b)) / mass  # mean - a
    return mass.log() - a.square() / 2 - 0.5 * math.log(2 * math.pi) - (2 * half).log(), a + beyond, beyond / half - 1


def _mills(a: Tensor) -> tuple[Tensor, Tensor]:
    """R(a) and 1 - a R(a), for a >= 0; the second by its asymptotic series where the difference would cancel."""
    large = a > 30
    near = torch.where(large, 1.0, a)
    far = torch.where(large, a, 30.0)
    inverse = far.square().reciprocal()
    series = inverse * (1 - 3 * inverse * (1 - 5 * inverse * (1 - 7 * inverse * (1 - 9 * inverse))))
    ratio = math.sqrt(math.pi / 2) * torch.special.erfcx(near / math.sqrt(2))
    return torch.where(large, (1 - series) / far, ratio), torch.where(large, series, 1 - near * ratio)
