"""Watermarks chosen by their power: share of green tokens, bias and threshold for a stated false-positive rate, length and distortion."""

from cameraready.lm.watermark_power.calibrator import WatermarkCalibrator
from cameraready.lm.watermark_power.constraints import Infeasible
from cameraready.lm.watermark_power.contexts import Contexts
from cameraready.lm.watermark_power.detection import Detection, exact_detect
from cameraready.lm.watermark_power.frontier import FrontierPoint
from cameraready.lm.watermark_power.plan import Plan, RidgePoint
from cameraready.lm.watermark_power.tails import threshold_count

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
