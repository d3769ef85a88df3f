"""What the optimizers are tried on: two physics-informed networks and a linear least-squares problem, all as residual vectors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import jvp


class TaylorNetwork(nn.Module):
    """A tanh network that carries its value and its derivatives with respect to the inputs forward together.

    Channels of a point are the value, the first derivative in each of d inputs and the second one in the inputs `seconds`. The biases are
    the last columns of the weights: the value channel has a one there, the derivatives have zeros. All arms share this network; its
    derivatives need no second backward pass.
    """

    def __init__(self, n_inputs: int, width: int, depth: int, seconds: Sequence[int]) -> None:
        super().__init__()
        sizes = [n_inputs, *[width] * depth, 1]
        self.layers = nn.ModuleList(
            nn.Linear(a + 1, b, bias=False, dtype=torch.float64) for a, b in itertools.pairwise(sizes)
        )
        self.n_inputs, self.seconds = n_inputs, list(seconds)

    def start(self, seed: int) -> TaylorNetwork:
        """Glorot's normal weights and zero biases, from a seed."""
        rng = np.random.default_rng([seed, 7])
        with torch.no_grad():
            for layer in self.layers:
                n_out, n_in = layer.weight.shape
                weight = rng.normal(size=(n_out, n_in)) * math.sqrt(2.0 / (n_in - 1 + n_out))
                weight[:, -1] = 0.0
                layer.weight.copy_(torch.from_numpy(weight))
        return self

    def forward(self, x: Tensor) -> Tensor:
        """(k, d) -> (k, 1 + d + len(seconds))."""
        k, d = x.shape
        channels = 1 + d + len(self.seconds)
        h = x.new_zeros(k, channels, d)
        h[:, 0] = x
        h[:, 1 : 1 + d] = torch.eye(d, dtype=x.dtype)
        ones = x.new_zeros(k, channels, 1)
        ones[:, 0] = 1.0
        picks = [1 + i for i in self.seconds]
        for i, layer in enumerate(self.layers):
            z = layer(torch.cat([h, ones], dim=2))
            if i + 1 == len(self.layers):
                return z[..., 0]
            value = torch.tanh(z[:, :1])
            slope = 1.0 - value * value
            bent = slope * z[:, 1 + d :] - 2.0 * value * slope * z[:, picks] ** 2
            h = torch.cat([value, slope * z[:, 1 : 1 + d], bent], dim=1)
        raise AssertionError("a network has at least one layer")


@dataclass(frozen=True)
class Problem:
    """A loss that is half the mean square of residuals, and the error that one cares about.

    Attributes
    ----------
    start : callable
        ``start(seed) -> module`` at its first parameters.
    residuals : callable
        ``residuals(module, rows) -> (k,)``, rows a tensor of row numbers below `n_rows`.
    error : callable
        ``error(module) -> float``, relative to doing nothing.
    n_rows, batch : int
    points : dict of arrays
        What a peer in another process needs to build the same residuals.
    sample : pair, optional
        The residual of one sample as an ordinary function ``(params, *row)`` of a network that knows nothing of derivatives, and the
        columns that rows are taken from.
    """

    name: str
    start: Callable[[int], nn.Module]
    residuals: Callable[[nn.Module, Tensor], Tensor]
    error: Callable[[nn.Module], float]
    n_rows: int
    batch: int
    points: dict[str, Any]
    sample: tuple[Callable[..., Tensor], tuple[Tensor, ...]] | None = None


WIDTH, DEPTH, BATCH = 32, 2, 128


def perceptron(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """The value of a `TaylorNetwork` with these parameters at one point, and nothing else."""
    h = x
    for i, weight in enumerate(params.values()):
        h = weight[:, :-1] @ h + weight[:, -1]
        h = torch.tanh(h) if i + 1 < len(params) else h
    return h[0]


def along(params: dict[str, Tensor], x: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
    """Value, first and second derivative of the perceptron in input i, by forward differentiation."""
    direction = torch.zeros_like(x)
    direction[i] = 1.0

    def value(at: Tensor) -> Tensor:
        return perceptron(params, at)

    def slope(at: Tensor) -> tuple[Tensor, Tensor]:
        return jvp(value, (at,), (direction,))

    (u, first), (_, second) = jvp(slope, (x,), (direction,))
    return u, first, second


def poisson() -> Problem:
    """-laplace(u) = f on the unit square, u = 0 on its edge, with solution sin(pi x) sin(pi y); 1,000 + 200 points."""
    rng = np.random.default_rng(0)
    inside = rng.uniform(size=(1_000, 2))
    position, side = rng.uniform(size=200), rng.integers(4, size=200)
    edge = np.where(side[:, None] < 2, np.column_stack([position, side % 2]), np.column_stack([side % 2, position]))
    x = torch.from_numpy(np.concatenate([inside, edge]))
    inner = torch.arange(len(x)) < len(inside)
    scale = 2 * math.pi**2
    f = torch.sin(math.pi * x[:, 0]) * torch.sin(math.pi * x[:, 1])

    def residuals(model: nn.Module, rows: Tensor) -> Tensor:
        u = model(x[rows])
        return torch.where(inner[rows], -(u[:, 3] + u[:, 4]) / scale - f[rows], u[:, 0])

    grid = torch.cartesian_prod(*[torch.linspace(0, 1, 33, dtype=torch.float64)] * 2)
    truth = torch.sin(math.pi * grid[:, 0]) * torch.sin(math.pi * grid[:, 1])

    def one(params: dict[str, Tensor], at: Tensor, given: Tensor, inside: Tensor) -> Tensor:
        laplacian = sum(along(params, at, i)[2] for i in (0, 1))
        return torch.where(inside, -laplacian / scale - given, perceptron(params, at))

    extra = {"f": f.numpy(), "scale": scale}
    return _network_problem("poisson", residuals, grid, truth, (0, 1), x, inner, extra, (one, (x, f, inner)))


VISCOSITY = 0.05


def burgers() -> Problem:
    """u_t + u u_x = 0.05 u_xx on t in [0, 1], x in [-1, 1], from -sin(pi x), zero at both ends; 1,000 + 200 points."""
    rng = np.random.default_rng(0)
    inside = np.column_stack([rng.uniform(size=1_000), rng.uniform(-1, 1, size=1_000)])
    first = np.column_stack([np.zeros(100), rng.uniform(-1, 1, size=100)])
    ends = np.column_stack([rng.uniform(size=100), rng.choice([-1.0, 1.0], size=100)])
    x = torch.from_numpy(np.concatenate([inside, first, ends]))
    inner = torch.arange(len(x)) < len(inside)
    given = torch.where(x[:, 0] == 0.0, -torch.sin(math.pi * x[:, 1]), 0.0)

    def residuals(model: nn.Module, rows: Tensor) -> Tensor:
        u = model(x[rows])
        flow = u[:, 1] + u[:, 0] * u[:, 2] - VISCOSITY * u[:, 3]
        return torch.where(inner[rows], flow, u[:, 0] - given[rows])

    t, at = np.linspace(0.05, 1, 20), np.linspace(-1, 1, 65)
    grid = torch.cartesian_prod(torch.from_numpy(t), torch.from_numpy(at))
    truth = torch.from_numpy(burgers_solution(grid[:, 0].numpy(), grid[:, 1].numpy()))

    def one(params: dict[str, Tensor], at: Tensor, wanted: Tensor, inside: Tensor) -> Tensor:
        u, slope, curve = along(params, at, 1)
        flow = along(params, at, 0)[1] + u * slope - VISCOSITY * curve
        return torch.where(inside, flow, u - wanted)

    extra = {"f": given.numpy(), "scale": 1.0}
    return _network_problem("burgers", residuals, grid, truth, (1,), x, inner, extra, (one, (x, given, inner)))


def burgers_solution(t: np.ndarray, x: np.ndarray) -> np.ndarray:
    """By the Cole-Hopf transformation and Gauss-Hermite quadrature, t > 0."""
    nodes, weights = np.polynomial.hermite.hermgauss(100)
    at = x[:, None] - nodes * np.sqrt(4 * VISCOSITY * t)[:, None]
    heat = weights * np.exp(-np.cos(np.pi * at) / (2 * np.pi * VISCOSITY))
    return -(np.sin(np.pi * at) * heat).sum(axis=1) / heat.sum(axis=1)


def _network_problem(
    name: str,
    residuals: Callable[[nn.Module, Tensor], Tensor],
    grid: Tensor,
    truth: Tensor,
    seconds: Sequence[int],
    x: Tensor,
    inner: Tensor,
    extra: dict[str, Any],
    sample: tuple[Callable[..., Tensor], tuple[Tensor, ...]],
) -> Problem:
    def start(seed: int) -> nn.Module:
        return TaylorNetwork(2, WIDTH, DEPTH, seconds).start(seed)

    def error(model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(grid)[:, 0] - truth).norm() / truth.norm())

    points = {"kind": name, "x": x.numpy(), "inner": inner.numpy(), **extra}
    return Problem(name, start, residuals, error, len(x), BATCH, points, sample)


def least_squares(n_rows: int = 4_000, n: int = 400, decay: float = 1.0) -> Problem:
    """A consistent linear system with singular values i^-decay; the error is that of the residual, relative to the target's norm."""
    A, b = decaying_system(n_rows, n, decay, seed=0)

    def start(seed: int) -> nn.Module:
        model = nn.Linear(n, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            model.weight.copy_(torch.from_numpy(np.random.default_rng([seed, 8]).normal(size=(1, n))))
        return model

    def residuals(model: nn.Module, rows: Tensor) -> Tensor:
        return model(A[rows])[:, 0] - b[rows]

    def error(model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(A)[:, 0] - b).norm() / b.norm())

    return Problem(
        "least-squares", start, residuals, error, n_rows, 64, {"kind": "least-squares", "A": A.numpy(), "b": b.numpy()}
    )


def decaying_system(n_rows: int, n: int, decay: float, seed: int) -> tuple[Tensor, Tensor]:
    """A with random singular vectors and singular values i^-decay times sqrt(n_rows), and b = A @ a normal vector."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(n_rows, n, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    spectrum = torch.arange(1, n + 1, dtype=torch.float64) ** -decay * math.sqrt(n_rows)
    A = (left * spectrum) @ right.mT
    return A, A @ torch.randn(n, generator=generator, dtype=torch.float64)


PROBLEMS = {"poisson": poisson, "burgers": burgers, "least-squares": least_squares}
