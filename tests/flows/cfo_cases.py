"""CFO in the room's conformance test: a correction of the velocity tuned for one short round, and sampled."""

import torch
from torch import nn

from cameraready.flows._samplers import sample
from cameraready.flows.cfo import NFT, AdjointMatching, AugmentedLagrangian
from tests.flows.flow_cases import DIM, FlowCase


class Corrected(nn.Module):
    """A velocity that is given, plus a linear map that is tuned; the velocity sees states of `dtype` alone."""

    def __init__(self, velocity, dtype):
        super().__init__()
        self.given, self.states = velocity, dtype
        self.shift = nn.Parameter(torch.zeros(DIM, dtype=torch.promote_types(dtype, torch.float32)))

    def __deepcopy__(self, memo):  # the velocity of a test cannot be copied in every case, and is not tuned
        made = Corrected(self.given, self.states)
        made.shift = nn.Parameter(self.shift.detach().clone(), requires_grad=self.shift.requires_grad)
        return made

    def forward(self, x, t, y=None):
        return self.given(x.to(self.states), t).to(x.dtype) + self.shift.to(x.dtype)


def _tuned(kind):
    def make(velocity, dtype):
        solver = kind(lr=0.05, batch=16, steps=6)
        lagrangian = AugmentedLagrangian(lambda x: x[:, 0], lambda x: x[:, 1], 0.0, penalty="expectation")
        base = solver.open(Corrected(velocity, dtype), (DIM,))
        policy, generator = solver.copy(base), torch.Generator().manual_seed(0)
        solver.solve(policy, base, lagrangian, kl=1.0, steps=2, generator=generator)

        def run(x, times, generator):
            return sample(policy, x, times=times).x

        return run

    return make


CASES = [FlowCase("adjoint-matching", _tuned(AdjointMatching), trains=True), FlowCase("nft", _tuned(NFT), trains=True)]
