"""DP-C4: differentially private optimisation by coupled clipping, beside Opacus."""

from cameraready.optim.dp_c4.accounting import (
    PrivacyLedger,
    PrivacyStatement,
    PrivateQuantityWarning,
    Release,
    calibrate_noise,
    epsilon_from_log,
)
from cameraready.optim.dp_c4.audit import AuditReport, audit_one_run, epsilon_lower_bound
from cameraready.optim.dp_c4.clipping import CoupledClip, coupled_clip
from cameraready.optim.dp_c4.engine import PrivateTraining, ThresholdSumWarning, make_private_c4, per_sample_closure
from cameraready.optim.dp_c4.optimizer import BudgetSpentError, C4Optimizer
from cameraready.optim.dp_c4.sampling import C4DataLoader, Sampling
from cameraready.optim.dp_c4.schedules import (
    ConstantThreshold,
    GeometricThreshold,
    MovementThreshold,
    PolynomialThreshold,
    ThresholdSchedule,
    noise_shares,
)

__all__ = [
    "AuditReport",
    "BudgetSpentError",
    "C4DataLoader",
    "C4Optimizer",
    "ConstantThreshold",
    "CoupledClip",
    "GeometricThreshold",
    "MovementThreshold",
    "PolynomialThreshold",
    "PrivacyLedger",
    "PrivacyStatement",
    "PrivateQuantityWarning",
    "PrivateTraining",
    "Release",
    "Sampling",
    "ThresholdSchedule",
    "ThresholdSumWarning",
    "audit_one_run",
    "calibrate_noise",
    "coupled_clip",
    "epsilon_from_log",
    "epsilon_lower_bound",
    "make_private_c4",
    "noise_shares",
    "per_sample_closure",
]
