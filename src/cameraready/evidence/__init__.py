"""Claims put to the test: what a study needs to say what it measures and what must come out.

Each name is imported when it is first asked for: the command line shows verdicts without loading polars and scipy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cameraready.evidence.context import Context, interleave
    from cameraready.evidence.measures import (
        Measure,
        average,
        difference,
        growth,
        rank_correlation,
        ratio,
        ratio_of_sums,
        versus_best,
        violations,
        win_rate,
    )
    from cameraready.evidence.outcomes import Failure, Outcome, Trial, Verdict
    from cameraready.evidence.rules import Rule, above, always, below, within
    from cameraready.evidence.specs import Spec, SpecError
    from cameraready.evidence.study import Answer, Claim, Cost, Figure, Gallery, Peer, Study, Untested

__all__ = [
    "Answer", "Claim", "Context", "Cost", "Failure", "Figure", "Gallery", "Measure", "Outcome", "Peer", "Rule", "Spec", "SpecError",
    "Study", "Trial", "Untested", "Verdict", "above", "always", "average", "below", "difference", "growth",
    "interleave", "rank_correlation", "ratio", "ratio_of_sums", "versus_best", "violations", "win_rate", "within",
]  # fmt: skip

_HOMES = {
    "context": ("Context", "interleave"),
    "measures": (
        "Measure", "average", "difference", "growth", "rank_correlation", "ratio", "ratio_of_sums", "versus_best",
        "violations", "win_rate",
    ),
    "outcomes": ("Failure", "Outcome", "Trial", "Verdict"),
    "rules": ("Rule", "above", "always", "below", "within"),
    "specs": ("Spec", "SpecError"),
    "study": ("Answer", "Claim", "Cost", "Figure", "Gallery", "Peer", "Study", "Untested"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            from importlib import import_module

            return getattr(import_module(f"cameraready.evidence.{module}"), name)
    raise AttributeError(f"module 'cameraready.evidence' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
