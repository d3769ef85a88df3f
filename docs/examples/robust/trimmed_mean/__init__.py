"""The trimmed mean: an average without the extremes."""

from cameraready.robust.trimmed_mean.estimator import TrimmedMean

__all__ = ["TrimmedMean"]
