"""How the conformance test of optimizers builds the private one, in each of its modes."""

import torch

from cameraready.optim.dp_c4 import (
    C4Optimizer,
    ConstantThreshold,
    GeometricThreshold,
    MovementThreshold,
    Sampling,
    per_sample_closure,
)
from tests.optim.optimizer_cases import Case


def build_in(mode, schedule, **options):
    def build(model, groups, **changes):
        base = torch.optim.SGD(groups, lr=0.05)
        settings = {"noise_multiplier": 0.05, "sampling": Sampling("full", 12), "mode": mode, **options, **changes}
        return C4Optimizer(base, schedule=schedule, generator=torch.Generator().manual_seed(7), **settings)

    return build


def closure(model, optimizer, x, y):
    def mean_square(outputs, targets):
        return ((outputs - targets) ** 2).mean()

    return per_sample_closure(model, optimizer, mean_square, x, y)


def without_names(log):
    """A log's releases without the chance name of the ledger that wrote them."""
    return [{key: value for key, value in entry.items() if key != "run"} for entry in log["releases"]]


CASES = [
    Case("off", build_in("off", ConstantThreshold(2.0)), closure),
    Case("table", build_in("table", GeometricThreshold(2.0, 0.9, floor=0.1)), closure),
    Case("snapshot", build_in("snapshot", MovementThreshold(3.0, anchor=3.0), snapshot_every=2), closure),
    Case(
        "restarts", build_in("snapshot", MovementThreshold(3.0, anchor=3.0), restart_every=3, anchor_share=0.5), closure
    ),
]
