"""What the study is tried on: priors on grids, a mixture in the plane, and a problem of the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cameraready.flows._toy.cached import cached
from cameraready.flows._toy.mixtures import GaussianMixture, random_mixture
from cameraready.flows._toy.stacked import StackedMLP
from cameraready.flows._toy.training import fit
from cameraready.flows.cfo import WeightedPoints
from cameraready.flows.cfo.exact import Optimum, exact_optimum

#: Blocks of each part, and seeds of the networks on which learning rates were chosen.
PROBLEMS, RUNS, TUNING = 12, 10, 100


@dataclass(frozen=True)
class Steering:
    """What is to be raised, and what must stay below its bound."""

    reward: Callable[[Tensor], Tensor]
    constraint: Callable[[Tensor], Tensor]
    bound: float
    kl: float


# --- grids ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GridProblem:
    """A prior on a grid of the line or the plane, with constraints of unit spread under the unconstrained optimum."""

    prior: WeightedPoints
    reward: Callable[[Tensor], Tensor]
    constraint: Callable[[Tensor], Tensor]
    bound: list[float]
    kl: float

    def optimum(self) -> Optimum:
        return exact_optimum(self.prior, self.reward, self.constraint, self.bound, kl=self.kl)


def grid_problem(number: int) -> GridProblem:
    """Problem `number` of `PROBLEMS`: half on the line, half in the plane, the last of each with two constraints.

    Bounds lie half-way between the mean and the first decile of c under the unconstrained optimum, so that they bind.
    """
    g = torch.Generator().manual_seed(number)
    dim = 1 if number < PROBLEMS // 2 else 2
    law = random_mixture(dim, 3, g)
    spread, centre = law.covariance().diagonal().sqrt(), law.mean()
    axes = [torch.linspace(-5, 5, 801 if dim == 1 else 61, dtype=torch.float64)] * dim
    unit = torch.cartesian_prod(*axes).reshape(-1, dim)
    points = centre + unit * spread
    prior = WeightedPoints(points, law.log_prob(points))
    tilt, bend = torch.randn(dim, generator=g, dtype=torch.float64), 0.2 + 0.3 * torch.rand(1, generator=g).item()
    kl = (0.5, 1.0)[number % 2]
    several = number in (PROBLEMS // 2 - 1, PROBLEMS - 1)
    kinds = (lambda z: z.square().sum(-1), lambda z: F.softplus(2 * z.sum(-1)), lambda z: torch.exp(0.7 * z[..., 0]))
    chosen = [kinds[number % 3]] if not several else [kinds[0], kinds[1]]

    def standard(x: Tensor) -> Tensor:
        return (x - centre) / spread

    def reward(x: Tensor) -> Tensor:
        z = standard(x)
        return z @ tilt - bend * z.square().sum(-1) / 2

    raw = torch.stack([each(standard(points)) for each in chosen], -1)
    free = torch.softmax(prior.log_weights + reward(points) / kl, 0)
    scale = (free @ (raw - free @ raw).square()).sqrt()

    def constraint(x: Tensor) -> Tensor:
        return torch.stack([each(standard(x)) for each in chosen], -1) / scale

    c = constraint(points)
    bound = []
    for values in c.unbind(-1):
        order = values.argsort()
        decile = float(values[order][int((free[order].cumsum(0) < 0.1).sum())])
        bound.append(0.5 * (float(free @ values) + decile))
    return GridProblem(prior, reward, constraint, bound, kl)


# --- the plane ----------------------------------------------------------------------------------------------------------

MIXTURE = GaussianMixture(
    torch.tensor([0.4, 0.3, 0.3], dtype=torch.float64),
    torch.tensor([[-1.5, 0.0], [0.5, 1.2], [0.8, -1.4]], dtype=torch.float64),
    torch.tensor([0.25, 0.2, 0.2], dtype=torch.float64),
)


def plane_reward(x: Tensor) -> Tensor:
    """-|x - (2.5, 0.5)|^2 / 2."""
    return -0.5 * ((x[..., 0] - 2.5).square() + (x[..., 1] - 0.5).square())


def plane_constraint(x: Tensor) -> Tensor:
    """4/3 softplus(3 (x_1 - 0.5 + 0.3 x_2^2)): a wall, curved, between the prior and where the reward is."""
    return 4 / 3 * F.softplus(3 * (x[..., 0] - 0.5 + 0.3 * x[..., 1].square()))


#: Under the prior E[c] = 1.96, at the unconstrained optimum 3.91; the bound costs 1.305 of reward a unit of c.
PLANE = Steering(plane_reward, plane_constraint, bound=1.0, kl=0.5)
SPAN = (-4.0, 5.0)


def plane_grid(points: int = 181) -> WeightedPoints:
    """The mixture on a grid."""
    axis = torch.linspace(*SPAN, points, dtype=torch.float64)
    x = torch.cartesian_prod(axis, axis)
    return WeightedPoints(x, MIXTURE.log_prob(x))


def plane_optimum() -> Optimum:
    """The true p* of the problem in the plane."""
    return exact_optimum(plane_grid(), PLANE.reward, PLANE.constraint, [PLANE.bound], kl=PLANE.kl)


def plane_networks(seeds: list[int], steps: int, *, quiet: bool = False, keep: bool = True) -> StackedMLP:
    """Networks (one a seed) that learned the mixture's exact velocity; kept on the machine where `keep`."""
    width, depth, lr = 64, 3, 3e-3
    recipe = {
        "name": "cfo-plane",
        "version": 1,
        "seeds": seeds,
        "steps": steps,
        "width": width,
        "depth": depth,
        "lr": lr,
    }

    def build() -> StackedMLP:
        return StackedMLP(seeds, 2, width, depth)

    law = MIXTURE.to(torch.float32)
    velocity = law.velocity()

    def train(net: nn.Module) -> nn.Module:
        def loss(net: nn.Module, g: torch.Generator) -> Tensor:
            shape = (len(seeds), 256)
            x1 = law.sample(math.prod(shape), g).reshape(*shape, 2)
            x0 = torch.randn(*shape, 2, generator=g)
            t = torch.rand(256, generator=g)
            x = t[:, None] * x1 + (1 - t[:, None]) * x0
            with torch.no_grad():
                goal = velocity(x.reshape(-1, 2), t.repeat(len(seeds))).reshape(x.shape)
            return (net(x, t) - goal).square().mean((-1, -2)).sum()

        return fit(net, loss, steps=steps, lr=lr, generator=torch.Generator().manual_seed(seeds[0]))

    if keep:
        return cached(recipe, build, train, quiet=quiet)  # type: ignore[return-value]
    return train(build()).eval().requires_grad_(False)  # type: ignore[return-value]


# --- a user's own ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OwnProblem:
    """A flow of the user's with a reward and a constraint."""

    flow: Any
    steering: Steering
