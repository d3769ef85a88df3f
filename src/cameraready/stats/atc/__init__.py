"""Anytime tracking CUSUM: track a level that jumps at unknown times, and be told when it jumped.

Gafni, Iyengar and Zeevi, 2026, "The Cost of Learning under Multiple Change Points", arXiv:2602.11406.
"""

from cameraready.stats.atc.batch import AtcResult, atc
from cameraready.stats.atc.detector import ATC

__all__ = ["ATC", "AtcResult", "atc"]
