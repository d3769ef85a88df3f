"""Cases of the bi-anchor solver for the conformance test of the room."""

import copy
from functools import cache

import torch

from tests.flows.flow_cases import DIM, FlowCase, exact, mixture


@cache
def side():
    """A SideNet that has seen the flow for a moment, so that it predicts something."""
    from cameraready.flows.ba_solver import MLPSideNet, train_sidenet

    data = mixture().to(torch.float32).sample(200, torch.Generator().manual_seed(0))
    net = MLPSideNet(DIM, width=16, depth=1, generator=torch.Generator().manual_seed(1))
    return train_sidenet(exact(), net, data, steps=15, batch=64, chain=2, h_rate=5.0, lr=1e-2).side


def sampled(trained, **settings):
    """Makes a run with these settings of the solver."""

    def make(velocity, dtype):
        from cameraready.flows.ba_solver import BAConfig, ba_sample

        config = BAConfig(**settings)
        net = copy.deepcopy(side()).to(torch.promote_types(dtype, torch.float32)) if trained else None
        return lambda x, times, generator: ba_sample(velocity, net, x, times=times, config=config).x

    return make


CASES = [
    FlowCase("bi-anchor", sampled(True)),
    FlowCase("without-a-sidenet", sampled(False)),
    FlowCase("single-anchor", sampled(True, anchors="single", nodes="simpson", probe_chunk=1)),
]
