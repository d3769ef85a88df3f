"""How the conformance test of the room builds a method: every method has ``tests/flows/<m>_cases.py`` with CASES.

The flow of the test is a mixture of two Gaussians in `DIM` dimensions, whose velocity is known exactly, written in every convention.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cameraready.flows._adapters import velocity_of
from cameraready.flows._paths import LinearPath, convert
from cameraready.flows._samplers import euler_maruyama, sample, scheduler_sample
from cameraready.flows._toy.mixtures import GaussianMixture

DIM = 3
EPS = 1e-6


@dataclass(frozen=True)
class FlowCase:
    """One way to use a method on a velocity.

    ``make(velocity, dtype)`` builds it for a velocity ``v(x, t, y=None)`` of states (B, `DIM`) of that dtype, always the same for the same arguments (fixed
    seeds; tests build it often, so it trains next to nothing), and returns ``run(x, times, generator)``: states like `x`, from noise `x` (B, DIM), on the
    grid `times` (a rising float64 tensor from 0 to 1), with `generator` as only source of randomness.

    `takes_times`: whether it works on any grid; others ignore `times`. `independent`: whether each result depends on its own state alone, to rounding.
    `half`: whether it takes bfloat16 states. `trains`: whether `make` trains by draws of the dtype, so that another precision is another training.
    `tolerance`: how far apart results may be for the same model written in another way.
    """

    name: str
    make: Callable
    takes_times: bool = True
    independent: bool = True
    half: bool = True
    trains: bool = False
    tolerance: float = 2e-4


def mixture():
    weights = torch.tensor([0.4, 0.6], dtype=torch.float64)
    means = torch.tensor([[1.0, -0.5, 0.3], [-1.0, 0.5, 0.2]], dtype=torch.float64)
    return GaussianMixture(weights, means, torch.tensor([0.2, 0.3], dtype=torch.float64))


def exact():
    """The velocity of `mixture` in the room's own convention."""
    return mixture().velocity(LinearPath())


def writings():
    """The same model as its makers might have written it, by name."""
    v = exact()

    def predicting(kind):
        return lambda x, t: convert(v(x, t), x, t, source="velocity", target=kind)

    return {
        "data to noise": velocity_of(lambda x, s: -v(x, 1 - s), direction="data_to_noise"),
        "timesteps of data to noise": velocity_of(
            lambda x, s: -v(x, 1 - s / 1000), direction="data_to_noise", time_scale=1000
        ),
        "time first": velocity_of(lambda t, x: v(x, t), call="t,x"),
        "x1": velocity_of(predicting("x1"), kind="x1", eps=EPS),
        "noise": velocity_of(predicting("noise"), kind="noise", eps=EPS),
        "noise, backwards": velocity_of(
            lambda x, s: predicting("noise")(x, 1 - s), kind="noise", direction="data_to_noise", eps=EPS
        ),
    }


def _sampled(sampler, **options):
    def make(velocity, dtype):
        return lambda x, times, generator: sampler(velocity, x, times=times, **options).x

    return make


def _diffused(velocity, dtype):
    return lambda x, times, generator: euler_maruyama(velocity, x, times=times, generator=generator).x


#: The room's own samplers keep to the same rules.
SAMPLERS = [
    FlowCase("euler", _sampled(sample, method="euler")),
    FlowCase("ab2", _sampled(sample, method="ab2")),
    FlowCase("heun", _sampled(sample, method="heun")),
    FlowCase("rk4", _sampled(sample, method="rk4")),
    FlowCase("memoryless", _diffused, independent=False),
    FlowCase("diffusers-unipc", _sampled(scheduler_sample, scheduler="unipc")),
]
