"""Models of other libraries, and of other conventions, as velocities of this room: ``v(x, t, y=None)`` with t = 0 noise and t = 1 data."""

from cameraready.flows._adapters.direction import check_direction, looks_reversed
from cameraready.flows._adapters.libraries import from_diffusers, from_flow_matching, from_torchcfm
from cameraready.flows._adapters.velocity import Velocity, velocity_of

__all__ = [
    "Velocity",
    "check_direction",
    "from_diffusers",
    "from_flow_matching",
    "from_torchcfm",
    "looks_reversed",
    "velocity_of",
]
