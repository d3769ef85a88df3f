"""Set Fourier convolutions: neural processes on scattered points whose cost is linear and whose predictions move with the data.

Mohseni, Duffield and Wong, 2026, "Revisiting Neural Processes via Fourier Transform and Volterra Series", arXiv:2606.01172.
"""

from cameraready.stats.sfconvcnp.frequencies import AliasingWarning
from cameraready.stats.sfconvcnp.layers import SetFourierConv, SetFourierVolterraConv
from cameraready.stats.sfconvcnp.network import SFConvCNP
from cameraready.stats.sfconvcnp.regressor import NeuralProcessRegressor

__all__ = ["AliasingWarning", "NeuralProcessRegressor", "SFConvCNP", "SetFourierConv", "SetFourierVolterraConv"]
