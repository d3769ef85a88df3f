"""Subsampled natural gradient with and without momentum, the analysis that predicts its speed, and squared-volume sampling."""

from cameraready.optim.sng.analysis import (
    ProjectionStats,
    SVSPreconditioner,
    projection_stats,
    svs_preconditioner,
)
from cameraready.optim.sng.direction import sng_direction, spring_update
from cameraready.optim.sng.jacobian import (
    CoupledSamplesError,
    Linearised,
    MatrixFreeJacobian,
    SlowJacobianWarning,
    linearise,
)
from cameraready.optim.sng.momentum import accelerated_parameters, learning_rate_for
from cameraready.optim.sng.optimizer import SNG, SPRING, UnstableStepWarning
from cameraready.optim.sng.sampling import SquaredVolumeSampler

__all__ = [
    "SNG",
    "SPRING",
    "CoupledSamplesError",
    "Linearised",
    "MatrixFreeJacobian",
    "ProjectionStats",
    "SVSPreconditioner",
    "SlowJacobianWarning",
    "SquaredVolumeSampler",
    "UnstableStepWarning",
    "accelerated_parameters",
    "learning_rate_for",
    "linearise",
    "projection_stats",
    "sng_direction",
    "spring_update",
    "svs_preconditioner",
]
