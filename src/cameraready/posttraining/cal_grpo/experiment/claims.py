"""Claims of our own on credit by attempt: where the weights come from, what the late attempts cost, and what lam is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from cameraready.evidence import Claim, above, always, below, difference, ratio, violations, within
from cameraready.evidence.measures import RatioOfSums

OURS: dict[str, Any] = {"scope": "ours", "source": "this study"}
SETTINGS: dict[str, Any] = {"workloads": ["gradients"], **OURS}
GAINS = (pl.col("tries") > 1) & (pl.col("answers") > 2)
TRAINED = pl.col("part") == "train"


@dataclass(frozen=True)
class VarianceRatio(RatioOfSums):
    """A ratio of summed variances, with a sentence where there are none: without a verdict that differs within a group no rule gives credit."""

    def blocks(self, frame: pl.DataFrame, arms_col: str, block_col: str) -> Any:
        found = super().blocks(frame, arms_col, block_col)
        if found.values.size and not found.values.any():
            raise ValueError(
                "the gradient is zero under both rules, as no group of dialogues had both a solved and an unsolved one: the model solves none of "
                "these problems, or all at once"
            )
        return found


EXTRA = [
    Claim(
        6,
        part="a",
        paper="(Ours.) At the first attempt calibration never has a higher variance.",
        tested="In no setting with at least three answers is the variance of the first attempt's gradient higher than the trajectory's, weights from the group.",
        measure=violations((pl.col("arm") == "cal") & (pl.col("first_ratio") > 1 + 1e-9), "settings with a higher one"),
        rule=always(),
        where=GAINS,
        **SETTINGS,
    ),
    Claim(
        6,
        part="b",
        paper="(Ours.) The residual's price: all of it has the variance of the trajectory.",
        tested="Total variance with lam = 1 over the trajectory's, geometric mean: between 0.8 and 1.2.",
        measure=ratio("variance_ratio", "whole", "trajectory"),
        rule=within(0.8, 1.2),
        where=GAINS,
        **SETTINGS,
    ),
    Claim(
        7,
        part="a",
        paper="(Ours.) Known weights and baselines, what running rates tend to, take much of the variance that a group's own leave.",
        tested="Total variance with known weights and baselines over that with the group's own, geometric mean: below 0.75.",
        measure=ratio("variance_ratio", "known", "cal"),
        rule=below(0.75),
        where=GAINS,
        **SETTINGS,
    ),
    Claim(
        7,
        part="b",
        paper="(Ours.) So they do for recurrent policies.",
        tested="The same of the gradient at the checkpoints, weights and baselines of each prompt: below 1.",
        measure=ratio("variance", "known", "cal"),
        rule=below(1.0),
        where=pl.col("part") == "variance",
        workloads=["key", "hidden", "maze", "number"],
        pooled=False,
        **OURS,
    ),
    Claim(
        7,
        part="c",
        paper="(Ours.) Running rates train better than a group's own.",
        tested="V@K over training with running weights and baselines by prompt, minus that with the group's: above 0.",
        measure=difference("verified_mean", "cal-ema", "cal"),
        rule=above(0.0),
        where=TRAINED,
        workloads=["key", "hidden", "maze", "number"],
        pooled=False,
        **OURS,
    ),
    Claim(
        7,
        part="d",
        paper="(Ours.) Running baselines with the group's weights do no harm.",
        tested="V@K over training with running baselines by prompt, minus that with the group's, weights from the group in both: above -0.01.",
        measure=difference("verified_mean", "cal-baseline", "cal"),
        rule=above(-0.01),
        where=TRAINED,
        workloads=["key", "hidden", "maze", "number"],
        pooled=False,
        **OURS,
    ),
    Claim(
        8,
        paper="(Ours.) Half of the residual is enough to learn to ask.",
        tested="V@2 with lam = 0.5 after training, minus that of CAL, where a word that is never right makes the key known: above 0.2.",
        measure=difference("verified", "half", "cal"),
        rule=above(0.2),
        where=TRAINED,
        workloads=["ask"],
        **OURS,
    ),
]
