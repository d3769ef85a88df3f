"""What the study claims of its own, beyond what the paper does."""

from __future__ import annotations

from typing import Any

import polars as pl

from cameraready.evidence import (
    Claim,
    above,
    always,
    average,
    below,
    difference,
    ratio,
    ratio_of_sums,
    violations,
    within,
)
from cameraready.posttraining.paced.experiment.worlds import POOL

#: Each arm at the best of five learning rates, or all at the smallest.
TUNED, SLOW = "tuned", "slow"
#: Where every trial failed the column is empty and has no type.
KIND = pl.col("kind").cast(pl.String)
SUMMARY = KIND == "summary"
COURSE = (KIND == "course") & (pl.col("rate") == SLOW)
AT_BEST, ALIKE = SUMMARY & (pl.col("rate") == TUNED), SUMMARY & (pl.col("rate") == SLOW)
COMMON: dict[str, Any] = {"scope": "ours", "source": "this study", "workloads": [POOL]}

OURS = [
    Claim(
        7,
        part="a",
        paper="(Ours, the sheet's refutation.) The estimate ranks prompts better than a running average of each.",
        tested="Spearman's correlation with exact accuracies less that of a forgetful average of the same rollouts, prompts at random: above 0.",
        measure=average("spearman_gain", "uniform"),
        rule=above(0.0),
        where=ALIKE,
        **COMMON,
    ),
    Claim(
        7,
        part="b",
        paper="(Ours, the same.) Also where it selects what it sees.",
        tested="The same in runs of PACED.",
        measure=average("spearman_gain", "paced"),
        rule=above(0.0),
        where=ALIKE,
        **COMMON,
    ),
    Claim(
        7,
        part="c",
        paper="(Ours.) Its error is smaller than the running average's.",
        tested="Mean absolute error of the average less that of the estimate in runs of PACED: above 0.",
        measure=average("mae_gain", "paced"),
        rule=above(0.0),
        where=ALIKE,
        **COMMON,
    ),
    Claim(
        7,
        part="d",
        paper="(Ours.) Selection by it needs fewer rollouts than selection by the average.",
        tested="Rollouts until 0.8, each arm at its best rate: below the running average.",
        measure=ratio_of_sums("rollouts", "selection", "running-average"),
        rule=below(1.0),
        where=AT_BEST,
        **COMMON,
    ),
    Claim(
        8,
        part="a",
        paper="(Ours, the reduced counterpart of 2.) More accurate than GRPO at equal rollouts.",
        tested="Held-out accuracy after 1,280 rollouts, each arm at its best rate, over GRPO's with uniform prompts: above 1.",
        measure=ratio("accuracy_early", "paced", "grpo"),
        rule=above(1.0),
        where=AT_BEST,
        **COMMON,
    ),
    Claim(
        8,
        part="b",
        paper="(Ours, the same.) Also with one small learning rate for both.",
        tested="The same after 2,560 rollouts, one small learning rate.",
        measure=ratio("accuracy_early", "paced", "grpo"),
        rule=above(1.0),
        where=ALIKE,
        **COMMON,
    ),
    Claim(
        8,
        part="c",
        paper="(Ours, the same.) More pass@8.",
        tested="pass@8 after 2,560 rollouts, one small learning rate, over GRPO's: above 1.",
        measure=ratio("pass8_early", "paced", "grpo"),
        rule=above(1.0),
        where=ALIKE,
        **COMMON,
    ),
    Claim(
        9,
        part="a",
        paper="(Ours.) Replayed successes draw the estimate upwards where it learns from them.",
        tested="Bias of the estimate over the pool, replayed successes taught as they are, less that with replay left out: above 0.05.",
        measure=difference("bias", "paced-naive", "paced"),
        rule=above(0.05),
        where=AT_BEST,
        **COMMON,
    ),
    Claim(
        9,
        part="b",
        paper="(Ours.) Taught by their groups' means they do not.",
        tested="The same, taught by their groups' means: within 0.05.",
        measure=difference("bias", "paced-weighted", "paced"),
        rule=within(-0.05, 0.05),
        where=AT_BEST,
        **COMMON,
    ),
    Claim(
        10,
        part="a",
        paper="(Ours.) Proposition 4.1 is exact.",
        tested="Least-squares intercept less p / beta + KL, all answers enumerated, on every prompt of the pool: never more than 1e-10.",
        measure=violations(pl.col("deviation") > 1e-10, "an intercept off by more than 1e-10"),
        rule=always(),
        where=KIND == "exact",
        **COMMON,
    ),
    Claim(
        10,
        part="b",
        paper="(Ours.) The estimate is no log-partition: that of the tilted policy says something else.",
        tested="beta times the log-partition of the tilted policy less accuracy, mean over the pool: above 0.1.",
        measure=average("partition_error", "intercept"),
        rule=above(0.1),
        where=KIND == "exact",
        **COMMON,
    ),
    Claim(
        11,
        part="a",
        paper="(Ours.) Selection helps GRPO's own loss as well.",
        tested="Rollouts until 0.8 under GRPO, one small learning rate: selection below uniform.",
        measure=ratio_of_sums("rollouts", "grpo-selection", "grpo"),
        rule=below(1.0),
        where=ALIKE,
        **COMMON,
    ),
    Claim(
        11,
        part="b",
        paper="(Ours.) What is left to gain by a better estimate is little.",
        tested="Rollouts until 0.8, one small learning rate: selection by the estimate at most 1.1 times that by exact accuracies.",
        measure=ratio_of_sums("rollouts", "selection", "oracle"),
        rule=below(1.1),
        where=ALIKE,
        **COMMON,
    ),
    Claim(
        12,
        paper="(Ours.) On your model: more groups that teach.",
        tested="Share of groups with right and wrong answers, paced selection less uniform, trajectory balance: above 0.",
        measure=difference("spread", "selection", "uniform"),
        rule=above(0.0),
        where=SUMMARY,
        scope="ours",
        source="this study",
        workloads=["own"],
    ),
]
