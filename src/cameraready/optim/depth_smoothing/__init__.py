"""Gradient smoothing: any optimizer's updates, mixed with those of the neighbouring blocks in depth."""

from cameraready.optim.depth_smoothing.blocks import BlockGroup, find_blocks
from cameraready.optim.depth_smoothing.kernels import smooth_updates, smoothing_matrix
from cameraready.optim.depth_smoothing.optimizer import DepthSmoothing

__all__ = ["BlockGroup", "DepthSmoothing", "find_blocks", "smooth_updates", "smoothing_matrix"]
