"""Flows: fewer steps, posterior draws, constraints, and what a diffusion learns first.

You have a trained flow or diffusion model and want more of it: samples from seven evaluations, draws steered by a reward, a fine-tuned
model that keeps to a bound, or to know which statistics of the data it has learnt. The methods of this room take any velocity, of torchcfm,
flow_matching, diffusers or your own making, and their studies judge them on flows whose truth is known and on trained networks.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cameraready.flows._adapters import (
        Velocity,
        check_direction,
        from_diffusers,
        from_flow_matching,
        from_torchcfm,
        looks_reversed,
        velocity_of,
    )
    from cameraready.flows._paths import CosinePath, LinearPath, Path
    from cameraready.flows._problem import FlowProblem
    from cameraready.flows._samplers import Sampled, grid, sample
    from cameraready.flows._toy.mixtures import GaussianMixture

_HOME = {
    "_adapters": (
        "Velocity",
        "check_direction",
        "from_diffusers",
        "from_flow_matching",
        "from_torchcfm",
        "looks_reversed",
        "velocity_of",
    ),
    "_paths": ("CosinePath", "LinearPath", "Path"),
    "_problem": ("FlowProblem",),
    "_samplers": ("Sampled", "grid", "sample"),
    "_toy.mixtures": ("GaussianMixture",),
}

__all__ = [
    "CosinePath",
    "FlowProblem",
    "GaussianMixture",
    "LinearPath",
    "Path",
    "Sampled",
    "Velocity",
    "check_direction",
    "from_diffusers",
    "from_flow_matching",
    "from_torchcfm",
    "grid",
    "looks_reversed",
    "sample",
    "velocity_of",
]


def __getattr__(name: str) -> Any:
    """What brings a model of one's own into the room; torch is imported when something is asked for."""
    for home, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
