"""gp2Scale: exact Gaussian processes at scale, by kernels with compact support.

Noack, Risser, Luo, Tekriwal and Pandolfi, 2026, "gp2Scale: A Class of Compactly-Supported Non-Stationary Kernels and
Distributed Computing for Exact GPs on 10 Million Data Points", arXiv:2512.06143.
"""

from cameraready.stats.gp2scale.kernels import (
    Amplitude,
    Bumps,
    Core,
    Deltas,
    Field,
    NonStationary,
    PaperNonStationary,
    SparseKernel,
    SupportKernel,
    Wendland,
)
from cameraready.stats.gp2scale.likelihood import NotPositiveDefinite
from cameraready.stats.gp2scale.posterior import EmptyNeighbourhood, sample_prior
from cameraready.stats.gp2scale.regressor import SparseGPRegressor

__all__ = [
    "Amplitude", "Bumps", "Core", "Deltas", "EmptyNeighbourhood", "Field", "NonStationary", "NotPositiveDefinite",
    "PaperNonStationary", "SparseGPRegressor", "SparseKernel", "SupportKernel", "Wendland", "sample_prior",
]  # fmt: skip
