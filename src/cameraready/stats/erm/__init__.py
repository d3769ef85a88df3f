"""Empirical risk minimisation with many features: predicted test error, and when Gaussian universality may be trusted."""

from cameraready.stats.erm.asymptotics import Asymptotics, HighDimERM, ScoreLaw
from cameraready.stats.erm.correspondence import matching_erm
from cameraready.stats.erm.designs import (
    EllipticalDesign,
    EmpiricalDesign,
    GaussianDesign,
    IndependentDesign,
    MixtureDesign,
    PlugInWarning,
)
from cameraready.stats.erm.estimator import AsymptoticErrorEstimator
from cameraready.stats.erm.laws import BinaryTarget, Design, LinearTarget, two_point
from cameraready.stats.erm.losses import (
    HuberLoss,
    ScaledHuberLoss,
    SeparablePenalty,
    SmoothLoss,
    log_cosh_penalty,
    pseudo_huber_penalty,
)
from cameraready.stats.erm.system import NoMinimiserError
from cameraready.stats.erm.universality import UniversalityCheck, UniversalityGap, universality_gap

__all__ = [
    "AsymptoticErrorEstimator",
    "Asymptotics",
    "BinaryTarget",
    "Design",
    "EllipticalDesign",
    "EmpiricalDesign",
    "GaussianDesign",
    "HighDimERM",
    "HuberLoss",
    "IndependentDesign",
    "LinearTarget",
    "MixtureDesign",
    "NoMinimiserError",
    "PlugInWarning",
    "ScaledHuberLoss",
    "ScoreLaw",
    "SeparablePenalty",
    "SmoothLoss",
    "UniversalityCheck",
    "UniversalityGap",
    "log_cosh_penalty",
    "matching_erm",
    "pseudo_huber_penalty",
    "two_point",
    "universality_gap",
]
