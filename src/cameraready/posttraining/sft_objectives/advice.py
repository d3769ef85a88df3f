"""Which objective a measured prior calls for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cameraready.posttraining.sft_objectives.objective import ProbabilityObjective
from cameraready.posttraining.sft_objectives.prior import PriorStrength

Place = Literal["weak", "intermediate", "strong"]

#: Mean probability below which a prior is weak and above which it is strong: the paper's tasks lie near 0.01 (a font), 0.5 (medicine) and
#: 0.76 to 0.81 (mathematics).
WEAK, STRONG = 0.1, 0.5
#: A prior is weak as well where more than this share of tokens lies below `WEAK`: a few trivial ones, such as the end of a short answer, lift a mean.
MOSTLY = 2 / 3
#: Fewer tokens than this say little.
FEW = 200


@dataclass(frozen=True)
class Recommendation:
    """Where a model stands on a task, and what to train it with.

    Attributes
    ----------
    place : {"weak", "intermediate", "strong"}
        End of the continuum.
    objective : ProbabilityObjective
        Ready to use.
    name : str
        Of the objective: ``"nll"``, ``"alpha=0.5"`` or ``"alpha=1"``.
    loss_type : str
        The setting of TRL's `SFTConfig` that has the same gradient; empty where there is none.
    reason : str
    prior : PriorStrength
    """

    place: Place
    objective: ProbabilityObjective
    name: str
    loss_type: str
    reason: str
    prior: PriorStrength

    def __str__(self) -> str:
        return f"{self.name} ({self.place} prior): {self.reason}"


def recommend(
    prior: PriorStrength, *, weak: float = WEAK, strong: float = STRONG, mostly: float = MOSTLY
) -> Recommendation:
    """The objective for a measured prior.

    Parameters
    ----------
    prior : PriorStrength
        Of the model and the demonstrations to be trained on.
    weak, strong : float
        Limits of the mean probability, ``0 <= weak <= strong <= 1``; the defaults are the paper's.
    mostly : float
        Share of tokens with p below 0.1 above which the prior counts as weak, whatever its mean.

    Returns
    -------
    Recommendation
        Where the prior is weak the log-likelihood, above `strong` 1 - p (alpha = 1), between them alpha = 0.5.

    Raises
    ------
    TypeError
        `prior` is something else, a model for instance.
    ValueError
        The limits are out of order.
    """
    if not isinstance(prior, PriorStrength):
        raise TypeError(
            f"recommend takes what prior_strength(model, tokenizer, dataset) returns, not {type(prior).__name__}"
        )
    if not 0 <= weak <= strong <= 1 or not 0 <= mostly <= 1:
        raise ValueError(f"limits must obey 0 <= weak <= strong <= 1, got {weak} and {strong}")
    seen = (
        f"the mean probability of a demonstrated token is {prior.mean:.2f}; {prior.below:.0%} of tokens lie below 0.1, "
        f"{prior.above:.0%} above 0.9"
    )
    if prior.tokens < FEW:
        seen += f" (of {prior.tokens} tokens only: measure more demonstrations)"
    if prior.mean < weak or prior.below > mostly:
        held = min(prior.mean, prior.median)
        reason = f"{seen}. The model has yet to learn these tokens, and 1 - p would pull at a typical one {held:.2g} times as hard"
        return Recommendation("weak", ProbabilityObjective("nll"), "nll", "nll", reason, prior)
    if prior.mean > strong:
        reason = f"{seen}. The model knows the task, so tokens that it finds unlikely are as likely slips of the demonstrations; 1 - p leaves them alone"
        return Recommendation("strong", ProbabilityObjective(alpha=1.0), "alpha=1", "dft", reason, prior)
    reason = f"{seen}. Neither end is near; alpha = 0.5 pulls at a token of p = 0.01 a tenth as hard as the log-likelihood, and 1 - p a hundredth"
    return Recommendation("intermediate", ProbabilityObjective(alpha=0.5), "alpha=0.5", "", reason, prior)
