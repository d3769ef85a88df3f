"""What a denoiser learns first: data with dialled statistics, the exponent, and a callback (Bardone et al., 2026, arXiv:2603.12901)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cameraready.flows.mixed_cumulant.callback import Passage, SimplicityBiasCallback
    from cameraready.flows.mixed_cumulant.clones import GaussianClone, WienerDenoiser
    from cameraready.flows.mixed_cumulant.denoiser import SphericalDenoiser
    from cameraready.flows.mixed_cumulant.empirical import EmpiricalExponent, empirical_exponent
    from cameraready.flows.mixed_cumulant.exponent import (
        InformationExponent,
        diffusion_information_exponent,
        population_loss,
    )
    from cameraready.flows.mixed_cumulant.model import MixedCumulant, make_mixed_cumulant
    from cameraready.flows.mixed_cumulant.scaling import SampleComplexity, kaplan_meier_median, sample_complexity_curve

_HOME = {
    "callback": ("Passage", "SimplicityBiasCallback"),
    "clones": ("GaussianClone", "WienerDenoiser"),
    "denoiser": ("SphericalDenoiser",),
    "empirical": ("EmpiricalExponent", "empirical_exponent"),
    "exponent": ("InformationExponent", "diffusion_information_exponent", "population_loss"),
    "model": ("MixedCumulant", "make_mixed_cumulant"),
    "scaling": ("SampleComplexity", "kaplan_meier_median", "sample_complexity_curve"),
}

__all__ = [
    "EmpiricalExponent",
    "GaussianClone",
    "InformationExponent",
    "MixedCumulant",
    "Passage",
    "SampleComplexity",
    "SimplicityBiasCallback",
    "SphericalDenoiser",
    "WienerDenoiser",
    "diffusion_information_exponent",
    "empirical_exponent",
    "kaplan_meier_median",
    "make_mixed_cumulant",
    "population_loss",
    "sample_complexity_curve",
]


def __getattr__(name: str) -> Any:
    """Torch is imported only where the callback or clones are asked for."""
    for home, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
