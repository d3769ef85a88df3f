"""Rank-Learner: whom to treat first, learnt from pairs with orthogonal labels.

Arno, Frauen, Javurek, Demeester and Feuerriegel, 2026, "Rank-Learner: Orthogonal Ranking of Treatment Effects", arXiv:2602.03517.
"""

from cameraready.causal.rank_learner.curves import (
    Assessment,
    Estimate,
    TocCurve,
    assess,
    autoc,
    policy_value,
    toc_curve,
)
from cameraready.causal.rank_learner.learner import RankLearner

__all__ = ["Assessment", "Estimate", "RankLearner", "TocCurve", "assess", "autoc", "policy_value", "toc_curve"]
