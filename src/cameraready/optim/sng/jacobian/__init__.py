"""Jacobians of a batch's outputs, by the cheapest way that is exact: from layers, from one-sample functions, or row by row."""

from cameraready.optim.sng.jacobian.batch import CoupledSamplesError, Linearised, linearise
from cameraready.optim.sng.jacobian.layers import LayerJacobian
from cameraready.optim.sng.jacobian.operators import DenseJacobian, Jacobian, MatrixFreeJacobian, gram
from cameraready.optim.sng.jacobian.recording import Known, Recorder, SlowJacobianWarning

__all__ = [
    "CoupledSamplesError",
    "DenseJacobian",
    "Jacobian",
    "Known",
    "LayerJacobian",
    "Linearised",
    "MatrixFreeJacobian",
    "Recorder",
    "SlowJacobianWarning",
    "gram",
    "linearise",
]
