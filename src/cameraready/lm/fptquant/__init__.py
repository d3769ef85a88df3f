"""Function-preserving transforms that make a language model easier to quantise, and the quantizer that applies them."""

from cameraready.lm.fptquant.folding import fold
from cameraready.lm.fptquant.merging import FPTConfig
from cameraready.lm.fptquant.quantisers import QuantConfig
from cameraready.lm.fptquant.quantizer import FPTQuantizer
from cameraready.lm.fptquant.transforms import (
    DownHadamard,
    PreRopeTransform,
    ResidualRotation,
    ResidualScaling,
    UpDownScaling,
    ValueTransform,
)

__all__ = [
    "DownHadamard",
    "FPTConfig",
    "FPTQuantizer",
    "PreRopeTransform",
    "QuantConfig",
    "ResidualRotation",
    "ResidualScaling",
    "UpDownScaling",
    "ValueTransform",
    "fold",
]
