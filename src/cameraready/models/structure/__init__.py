"""The parts of any decoder-only language model, found by structure and never by class name."""

from cameraready.models.structure.attending import attend, causal_mask
from cameraready.models.structure.attention import Attention
from cameraready.models.structure.discovery import anatomy
from cameraready.models.structure.errors import UnknownArchitecture
from cameraready.models.structure.parts import Anatomy, Layer, Mlp
from cameraready.models.structure.rotary import apply_rotary, rotate

__all__ = [
    "Anatomy",
    "Attention",
    "Layer",
    "Mlp",
    "UnknownArchitecture",
    "anatomy",
    "apply_rotary",
    "attend",
    "causal_mask",
    "rotate",
]
