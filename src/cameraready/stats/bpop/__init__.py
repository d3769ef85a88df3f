"""BPOP: the partial order behind a procedure's traces, with its uncertainty, and an executor that runs it in parallel.

Li, Cheng, Nicholls and Kong, 2026, "De-Linearizing Agent Traces: Bayesian Inference of Latent Partial Orders for Efficient
Execution", arXiv:2602.02806.
"""

from cameraready.stats.bpop.executor import CompiledGraph, Execution, compile
from cameraready.stats.bpop.inference.diagnostics import Calibration, Diagnostics
from cameraready.stats.bpop.inference.exact import ExactPosterior, exact_posterior
from cameraready.stats.bpop.inference.prior import LatentPrior
from cameraready.stats.bpop.model import PartialOrderModel
from cameraready.stats.bpop.posterior import ConvergenceWarning, InterruptedFitWarning, PosetPosterior
from cameraready.stats.bpop.traces import read_traces

__all__ = [
    "Calibration",
    "CompiledGraph",
    "ConvergenceWarning",
    "Diagnostics",
    "ExactPosterior",
    "Execution",
    "InterruptedFitWarning",
    "LatentPrior",
    "PartialOrderModel",
    "PosetPosterior",
    "compile",
    "exact_posterior",
    "read_traces",
]
