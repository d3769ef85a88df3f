"""Watermarks chosen by their power: share of green tokens, bias and threshold for a stated false-positive rate, length and distortion."""

from cameraready.lm.watermark_power.calibrator import WatermarkCalibrator
from cameraready.lm.watermark_power.detection import Detection, exact_detect
from cameraready.lm.watermark_power.plan import Plan, RidgePoint
from cameraready.lm.watermark_power.theory.constraints import Infeasible
from cameraready.lm.watermark_power.theory.contexts import Contexts
from cameraready.lm.watermark_power.theory.frontier import FrontierPoint
from cameraready.lm.watermark_power.theory.tails import threshold_count

__all__ = [
    "Contexts",
    "Detection",
    "FrontierPoint",
    "Infeasible",
    "Plan",
    "RidgePoint",
    "WatermarkCalibrator",
    "exact_detect",
    "threshold_count",
]
