"""Depth smoothing under the conformance test of optimizers, over each base that it knows best."""

import torch

from cameraready.optim.depth_smoothing import DepthSmoothing
from tests.optim.optimizer_cases import Case, mean_square_closure


def over(base, **settings):
    def build(model, groups, **options):
        return DepthSmoothing(base(groups, **{**settings, **options}), model.blocks)

    return build


CASES = [
    Case("adamw", over(torch.optim.AdamW, lr=1e-2), mean_square_closure),
    Case("sgd", over(torch.optim.SGD, lr=1e-2, momentum=0.9), mean_square_closure),
    Case("adam-l2", over(torch.optim.Adam, lr=1e-2, weight_decay=0.1), mean_square_closure),
    Case("adamax", over(torch.optim.Adamax, lr=1e-2), mean_square_closure),
]
