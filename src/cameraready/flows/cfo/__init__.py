"""Constrained Flow Optimization: raise a reward of a flow's samples while the mean of a constraint stays below a bound."""

from cameraready.flows.cfo.adjoint import AdjointMatching
from cameraready.flows.cfo.exact import ExactTilt, WeightedPoints, exact_optimum
from cameraready.flows.cfo.lagrangian import AugmentedLagrangian
from cameraready.flows.cfo.nft import NFT
from cameraready.flows.cfo.objective import FixedWeights, Objective
from cameraready.flows.cfo.optimizer import ConstrainedFlowOptimizer
from cameraready.flows.cfo.result import CFOResult, Round
from cameraready.flows.cfo.solver import FlowPolicy, FlowSolver, Solver

__all__ = [
    "NFT",
    "AdjointMatching",
    "AugmentedLagrangian",
    "CFOResult",
    "ConstrainedFlowOptimizer",
    "ExactTilt",
    "FixedWeights",
    "FlowPolicy",
    "FlowSolver",
    "Objective",
    "Round",
    "Solver",
    "WeightedPoints",
    "exact_optimum",
]
