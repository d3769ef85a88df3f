"""ATC as a class of river's own, for what asks for it by class, such as the cloning of models."""

from __future__ import annotations

try:
    from river import base
except ImportError as error:
    raise ImportError("ATC.to_river() needs river: pip install river") from error

from cameraready.stats.atc.detector import ATC


class RiverATC(ATC, base.DriftDetector):
    """`ATC`, and a `river.base.DriftDetector`; made by `ATC.to_river`. Parameters and methods are ATC's."""
