"""Kernels with compact support, in the conventions of `sklearn.gaussian_process.kernels`, returning CSR matrices."""

from cameraready.stats.gp2scale.kernels.base import Amplitude, Entries, Product, SparseKernel, Sum
from cameraready.stats.gp2scale.kernels.custom import SupportKernel
from cameraready.stats.gp2scale.kernels.farfield import Bumps, Deltas
from cameraready.stats.gp2scale.kernels.nested import Core, Field
from cameraready.stats.gp2scale.kernels.nonstationary import NonStationary, PaperNonStationary
from cameraready.stats.gp2scale.kernels.wendland import Wendland

__all__ = [
    "Amplitude", "Bumps", "Core", "Deltas", "Entries", "Field", "NonStationary", "PaperNonStationary", "Product",
    "SparseKernel", "Sum", "SupportKernel", "Wendland",
]  # fmt: skip
