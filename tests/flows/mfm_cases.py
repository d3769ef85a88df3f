"""Meta flow maps in the room's conformance test: steering by a velocity's own posterior flow, and a map distilled from it."""

import torch

from cameraready.flows.meta_flow_maps import MapMLP, MetaFlowMap, MFMTrainer, PosteriorFlow, Steered
from tests.flows.flow_cases import DIM, FlowCase


def reward(x1):
    return -(x1[:, 0] - 1).square() / 2


def _steered(**options):
    def make(velocity, dtype):
        steered = Steered(PosteriorFlow(velocity, steps=2, method="euler"), reward, n=2, **options)
        return lambda x, times, generator: (
            steered.sample(tuple(x.shape), times=times.tolist(), noise=x, generator=generator).x
        )

    return make


def _distilled(velocity, dtype):
    mfm = MetaFlowMap(MapMLP(DIM, width=8, depth=1)).to(dtype)

    def clean(n, generator):
        return torch.randn(n, DIM, generator=generator, dtype=dtype)

    averaged = MFMTrainer(mfm, velocity, batch=8, lr=1e-5, warmup=1, distill="lsd").fit(clean, 2)
    return lambda x, times, generator: averaged.sample_posterior(torch.zeros_like(x), 0.0, noise=x[None])[0]


CASES = [
    FlowCase("steered-grad", _steered(method="grad"), independent=False),
    FlowCase("steered-weights", _steered(method="weights"), independent=False),
    FlowCase("steered-dps", _steered(method="dps")),
    FlowCase("distilled", _distilled, takes_times=False, half=False, trains=True),
]
