"""What the solvers are tried on: mixtures whose velocity is exact, and the room's networks on digits, each with its SideNets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cameraready.evidence import Spec, SpecError
from cameraready.flows._workload import FlowProblem, open_flow
from cameraready.flows.ba_solver import BAConfig, MLPSideNet, SideNet, train_sidenet

PLANE, SPACE, QUICK = "mixture-2d", "mixture-16d", "quick"
UNET, DIT = "digits-unet", "digits-dit"
ORDERS = "orders"
MIXTURES, DIGITS = (PLANE, SPACE), (UNET, DIT)
#: Guidance of the transformer's samples; those of the U-Net are without.
GUIDANCE = 1.5
#: How SideNets are trained here, chosen on noise of tuning: 400 starts of four links, steps of 0.1 on average (the paper: 0.02, eight links).
RATE, STEPS, CHAIN, LR = 10.0, 400, 4, 1e-2


def generator(*numbers: int) -> torch.Generator:
    """A generator whose seed is made of several numbers."""
    seed = 0
    for number in numbers:
        seed = (1_000_003 * seed + number + 1) % (2**62)
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Flow:
    """A velocity with what its samples are compared with.

    Attributes
    ----------
    velocity : callable ``v(x, t, y=None)``
        As peers ask it: guided where there is guidance.
    raw : callable
        Without guidance, as the SideNet sees it.
    exact : callable
        For the reference; in float64 where the velocity is a formula.
    shape : tuple of int
    data, held : (N, ...) tensors
        To train SideNets on, and to compare samples with.
    labels : tensor, optional
        Of `data`.
    classes : int
    config : BAConfig
        The guidance, if any.
    features : callable, optional
        What a classifier sees in a sample.
    samples, fine : int
        Of one run, and steps of the Runge-Kutta reference.
    """

    name: str
    velocity: Callable[..., Tensor]
    raw: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    shape: tuple[int, ...]
    data: Tensor
    held: Tensor
    labels: Tensor | None = None
    classes: int = 0
    config: BAConfig = field(default_factory=BAConfig)
    features: Callable[[Tensor], Tensor] | None = None
    samples: int = 1000
    fine: int = 150
    budgets: tuple[int, ...] = (4, 5, 6, 7, 8, 10, 16)
    double: bool = False

    def noise(self, run: int, n: int | None = None) -> tuple[Tensor, Tensor | None]:
        """Noise of one run, and labels in turn; runs below 0 are for tuning."""
        n = n or self.samples
        drawn = torch.randn(n, *self.shape, generator=generator(7, run + 1000), dtype=torch.float64)
        return drawn.float(), torch.arange(n) % self.classes if self.classes else None

    def reference(self, noise: Tensor, y: Tensor | None) -> Tensor:
        """The ends of the flow, by Runge and Kutta's fourth-order method in fine steps."""
        from cameraready.flows._samplers import sample

        start = noise.double() if self.double else noise
        return sample(self.exact, start, steps=self.fine, method="rk4", y=y).x

    def untrained(self, seed: int) -> nn.Module:
        """A SideNet for these states: about 1 % of the networks, or a perceptron of 64 units for vectors."""
        if len(self.shape) == 3:
            return SideNet(
                self.shape[0], width=16, depth=2, heads=0, classes=self.classes, generator=generator(11, seed)
            )
        return MLPSideNet(self.shape[-1], width=64, depth=2, classes=self.classes, generator=generator(11, seed))

    def trained_side(self, seed: int, *, rate: float = RATE, steps: int = STEPS, quiet: bool = True) -> nn.Module:
        """A SideNet trained for this flow."""
        images = len(self.shape) == 3
        return train_sidenet(
            self.raw,
            self.untrained(seed),
            self.data,
            labels=self.labels,
            null_label=self.classes or None,
            steps=steps,
            batch=64 if images else 128,
            chain=CHAIN,
            h_rate=rate,
            lr=LR,
            generator=generator(12, seed),
            progress=(lambda done, of, loss: None) if quiet else None,
        ).side


def open_workload(spec: Spec) -> Flow | FlowProblem | str:
    """A shipped flow, or the user's: an array, a table, or (velocity, data). Trains nothing: what has no velocity yet comes as it is, for `ready`."""
    made: Mapping[str, Callable[[], Any]] = {
        PLANE: lambda: _mixture(PLANE),
        SPACE: lambda: _mixture(SPACE),
        QUICK: lambda: _mixture(QUICK),
        UNET: lambda: _digits(UNET),
        DIT: lambda: _digits(DIT),
        ORDERS: lambda: ORDERS,
    }
    found = open_flow(spec, made)
    return _own(found) if isinstance(found, FlowProblem) and not found.needs_training else found


def ready(workload: Flow | FlowProblem | str) -> Flow | str:
    """What `open_workload` gave, with its velocity; the network of a table or an array is trained here, or read where this was done before."""
    return _own(workload) if isinstance(workload, FlowProblem) else workload


def _mixture(name: str) -> Flow:
    from cameraready.flows._toy.mixtures import eight_gaussians, random_mixture

    law = random_mixture(16, 8, generator(3)) if name == SPACE else eight_gaussians()
    single = law.to(torch.float32)
    velocity = single.velocity()
    quick = name == QUICK
    return Flow(
        name,
        _unlabelled(velocity),
        _unlabelled(velocity),
        _unlabelled(law.velocity()),
        (law.dim,),
        single.sample(4000, generator(5)),
        single.sample(500 if quick else 2000, generator(6)),
        samples=100 if quick else 1000,
        fine=20 if quick else 150,
        budgets=(4, 7) if quick else (4, 5, 6, 7, 8, 10, 16),
        double=True,
    )


def _digits(name: str) -> Flow:
    from cameraready.flows._toy.distances import digit_features
    from cameraready.flows._toy.images import digits
    from cameraready.flows._toy.trained import trained

    net = trained(name)
    images, labels = digits("train")
    held = digits("test")[0]
    config = BAConfig(guidance=GUIDANCE, null_label=10) if name == DIT else BAConfig()
    return Flow(
        name,
        _guided(net, config),
        net,
        _guided(net, config),
        (1, 8, 8),
        images,
        held,
        labels,
        10,
        config,
        digit_features,
        samples=20 if name == DIT else 30,
        fine=16,
        budgets=(5, 7, 10) if name == DIT else (5, 7, 8, 10, 16),
    )


def _own(problem: FlowProblem) -> Flow:
    velocity = problem.velocity
    n = min(256, max(32, len(problem.test)))
    try:
        shown = (
            velocity(problem.train[:2], 0.5)
            if problem.train_labels is None
            else velocity(problem.train[:2], 0.5, problem.train_labels[:2])
        )
    except (TypeError, RuntimeError) as error:
        raise SpecError(
            f"the velocity of {problem.name} is also asked with t a number: v(x, 0.5) raised {type(error).__name__}: {error}; give it velocity_of(model)"
        ) from error
    if len(problem.shape) not in (1, 3):
        raise SpecError(
            f"{problem.name} has states of shape {problem.shape}; a SideNet is trained on vectors or images"
        )
    del shown
    return Flow(
        problem.name,
        velocity,
        velocity,
        velocity,
        tuple(problem.shape),
        problem.train,
        problem.test,
        problem.train_labels,
        problem.classes,
        features=None,
        samples=n,
        fine=40,
        budgets=(5, 7, 10),
    )


def _unlabelled(velocity: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, t, y=None: velocity(x, t)


def _guided(net: Callable[..., Tensor], config: BAConfig) -> Callable[..., Tensor]:
    """Classifier-free guidance as peers have it: both halves in one call."""
    if config.guidance == 1.0:
        return net
    null = config.null_label

    def velocity(x: Tensor, t: float | Tensor, y: Tensor) -> Tensor:
        given, free = net(torch.cat([x, x]), t, torch.cat([y, torch.full_like(y, null)])).chunk(2)
        return free + config.guidance * (given - free)

    return velocity


def cached_side(flow: Flow, *, quiet: bool = False) -> nn.Module:
    """The SideNet of one of the room's networks, trained once on a machine."""
    from cameraready.flows._toy.cached import cached

    recipe = {
        "name": f"sidenet-{flow.name}",
        "version": 1,
        "side": {"width": 16, "depth": 2, "heads": 0},
        "training": {"rate": RATE, "steps": STEPS, "chain": CHAIN, "lr": LR, "batch": 64},
    }
    return cached(recipe, lambda: flow.untrained(0), lambda net: flow.trained_side(0, quiet=quiet), quiet=quiet)
