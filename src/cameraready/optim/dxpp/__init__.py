"""Quadratic programs as a PyTorch layer with the cheapest correct backward pass (Linghu et al., 2026, arXiv:2602.14154)."""

from cameraready.optim.dxpp.errors import InaccurateQPWarning, QPError, QPWarning, WeaklyActiveWarning
from cameraready.optim.dxpp.layer import PenaltyQPLayer, QPSolution, qp_solve
from cameraready.optim.dxpp.numerics.solving import QPInfo

__all__ = [
    "InaccurateQPWarning",
    "PenaltyQPLayer",
    "QPError",
    "QPInfo",
    "QPSolution",
    "QPWarning",
    "WeaklyActiveWarning",
    "qp_solve",
]
