"""OddSHAP: Shapley values of black-box models from paired samples and sparse odd interactions.

Fumagalli, Butler, Kang, Ramchandran and Witter, 2026, "An Odd Estimator for Shapley Values", arXiv:2602.01399.
"""

from cameraready.attribution.oddshap.estimator import OddShap
from cameraready.attribution.oddshap.explain import explain

__all__ = ["OddShap", "explain"]
