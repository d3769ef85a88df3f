"""The bi-anchor solver: a flow sampled in 4 to 10 evaluations of its network, with a small trained network predicting in between."""

from typing import TYPE_CHECKING, Any

from cameraready.flows.ba_solver.quadrature import BAConfig
from cameraready.flows.ba_solver.sidenet import MLPSideNet, SideNet
from cameraready.flows.ba_solver.solver import BASampled, ba_invert, ba_sample
from cameraready.flows.ba_solver.training import Training, train_sidenet

if TYPE_CHECKING:
    from cameraready.flows.ba_solver.scheduler import BAScheduler

__all__ = [
    "BAConfig",
    "BASampled",
    "BAScheduler",
    "MLPSideNet",
    "SideNet",
    "Training",
    "ba_invert",
    "ba_sample",
    "train_sidenet",
]


def __getattr__(name: str) -> Any:
    """The scheduler needs diffusers, which is imported when it is first asked for."""
    if name == "BAScheduler":
        from cameraready.flows.ba_solver.scheduler import BAScheduler

        return BAScheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
