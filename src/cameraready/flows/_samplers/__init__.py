"""Samplers of a flow with every evaluation of the network counted: fixed steps, adaptive steps, diffusers' schedulers, and the memoryless SDE.

All of them take a velocity ``v(x, t, y=None)`` in the room's convention (t = 0 noise, t = 1 data) and a state ``x`` of shape (B, ...).
One evaluation is one call of the velocity on the whole batch, the unit in which samplers are compared ("NFE").
"""

from cameraready.flows._samplers.adaptive_steps import adaptive
from cameraready.flows._samplers.asking import Sampled, grid
from cameraready.flows._samplers.diffusers_schedulers import scheduler_sample
from cameraready.flows._samplers.fixed import SCHEDULERS, STAGES, evaluations, sample, steps_for
from cameraready.flows._samplers.stochastic import euler_maruyama

__all__ = [
    "SCHEDULERS",
    "STAGES",
    "Sampled",
    "adaptive",
    "euler_maruyama",
    "evaluations",
    "grid",
    "sample",
    "scheduler_sample",
    "steps_for",
]
