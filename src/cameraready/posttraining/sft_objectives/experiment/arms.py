"""The objectives that are compared, and how a learning rate is chosen for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cameraready.posttraining.sft_objectives import PriorStrength, ProbabilityObjective

#: The likelihoods kept or dropped by thresholds, as in the authors' default and its complement.
Q = 0.2
#: Members of the family over which accuracy should rise or fall.
ALPHAS = (0.1, 0.5, 1.0, 3.0, 10.0)


def objectives(prior: PriorStrength) -> dict[str, ProbabilityObjective]:
    """Every arm that trains; thresholds by rank come from the measured prior, as the authors take theirs from the base model."""
    top_tenth = min(prior.quantile(0.9), 1 - 1e-6)
    return {
        "nll": ProbabilityObjective("nll"),
        **{f"alpha={alpha:g}": ProbabilityObjective(alpha=alpha) for alpha in ALPHAS},
        "dft": ProbabilityObjective("dft"),
        "gce": ProbabilityObjective("gce"),
        "focal": ProbabilityObjective("focal"),
        "label-smoothing": ProbabilityObjective("label_smoothing"),
        "mixture": ProbabilityObjective("mixture"),
        "top": ProbabilityObjective("nll", threshold=Q, normalize="kept"),
        "bottom": ProbabilityObjective("nll", threshold=Q, side="bottom", normalize="kept"),
        "top-tenth": ProbabilityObjective("nll", threshold=top_tenth, normalize="kept"),
    }


def checked(compared: Mapping[str, Any]) -> dict[str, ProbabilityObjective]:
    """The arms, once it is sure that all are objectives; those of a user may not be."""
    for name, objective in compared.items():
        if not isinstance(objective, ProbabilityObjective):
            raise TypeError(f"{name} must be a ProbabilityObjective, got {type(objective).__name__}")
    return dict(compared)


def best_rate(scores: Mapping[float, tuple[float, float]]) -> float:
    """The learning rate with the highest accuracy on tuning runs, to three decimals; among equals that of the least divergence."""
    return min(scores, key=lambda rate: (-round(scores[rate][0], 3), scores[rate][1]))
