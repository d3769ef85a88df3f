"""Claims that the paper does not make, and what all claims share."""

from __future__ import annotations

from typing import Any

import polars as pl

from cameraready.evidence import Claim, above, below, difference, ratio, versus_best

PAPER = "Potaptchik et al., 2026, arXiv:2601.14430"
EIGHT, SIXTEEN, BOARD, DIGITS, SMOKE = "eight-gaussians", "rare-mode", "checkerboard", "digits", "two-modes"
OURS: dict[str, Any] = {"scope": "ours", "source": "this study"}
REWARD: dict[str, Any] = {"workloads": [SIXTEEN, DIGITS], "pooled": False}

OF_OURS = [
    Claim(
        6,
        paper="Not in the paper: what one call is worth beside the teacher's inner flow, which needs no training.",
        tested="Energy distance to the posterior at the worst time, one call of the map against four Euler steps of the inner flow, below 1.",
        measure=ratio("worst_energy", "mfm", "teacher-4", floor=1e-3),
        rule=below(1.0),
        where=pl.col("part") == "posterior",
        workloads=[EIGHT, SIXTEEN, BOARD, DIGITS],
        pooled=False,
        **OURS,
    ),
    Claim(
        7,
        paper="Not in the paper: the same count with backward passes, each as two calls.",
        tested="Calls and backward passes of MFM-G against the best of 1000 samples, below 1/25.",
        measure=ratio("passes", "mfm-g", "best-of-1000"),
        rule=below(0.04),
        where=pl.col("part") == "reward",
        **OURS,
        **REWARD,
    ),
    Claim(
        8,
        paper="Not in the paper: whether higher rewards are real.",
        part="a",
        tested="Distance of one particle of MFM-G to the nearest training image against that of the best of 1000 samples, below 1.1 times.",
        measure=ratio("implausible", "mfm-g", "best-of-1000"),
        rule=below(1.1),
        where=pl.col("part") == "reward",
        workloads=[DIGITS],
        pooled=False,
        **OURS,
    ),
    Claim(
        8,
        part="b",
        paper="Not in the paper: whether higher rewards are real.",
        tested="Minus log density of one particle of MFM-G less that of the best of 1000 samples, below 2 (in nats, in 16 dimensions).",
        measure=difference("implausible", "mfm-g", "best-of-1000"),
        rule=below(2.0),
        where=pl.col("part") == "reward",
        workloads=[SIXTEEN],
        pooled=False,
        **OURS,
    ),
    Claim(
        9,
        paper="Not in the paper: the map's own few-call samples in place of the base flow's.",
        tested="Reward of one particle of MFM-G minus that of the best of 1000 samples of the map in one, two or four calls, above 0.",
        measure=difference("reward", "mfm-g", "best-of-1000-fast"),
        rule=above(0.0),
        where=pl.col("part") == "reward",
        **OURS,
        **REWARD,
    ),
    Claim(
        10,
        paper="Not in the paper: flow matching on data weighted by exp(r), which needs no posterior draws.",
        tested="What remains of the distance to the tilt after fine-tuning minus what remains after reward-weighted flow matching with twice the steps (a step costs half), below 0.",
        measure=difference("remaining", "finetune", "reward-weighted"),
        rule=below(0.0),
        where=pl.col("part") == "tilt",
        workloads=[EIGHT],
        pooled=False,
        **OURS,
    ),
    Claim(
        11,
        paper="Not in the paper: gradient-free steering.",
        tested="Reward of one particle of MFM-GF with 16 draws a step minus that of the best of 1000 samples, above 0.",
        measure=difference("reward", "mfm-gf", "best-of-1000"),
        rule=above(0.0),
        where=pl.col("part") == "reward",
        **OURS,
        **REWARD,
    ),
    Claim(
        12,
        part="a",
        paper="Not in the paper: the rivals that need no training.",
        tested="Reward of one particle of MFM-G minus that of the better of DPS (17 calls) and Feynman-Kac steering with 16 particles (512 calls), above 0.",
        measure=versus_best("reward", "mfm-g", ["dps", "smc-16"], kind="difference", lower_is_better=False),
        rule=above(0.0),
        where=pl.col("part") == "reward",
        **OURS,
        **REWARD,
    ),
    Claim(
        12,
        part="b",
        paper="Not in the paper: DPS on the same count of steps.",
        tested="How implausible one particle of MFM-G is less how implausible one of DPS is, below 0.",
        measure=difference("implausible", "mfm-g", "dps"),
        rule=below(0.0),
        where=pl.col("part") == "reward",
        **OURS,
        **REWARD,
    ),
    Claim(
        13,
        part="a",
        paper="Not in the paper: which law steered particles have.",
        tested="Steered at exactly the tilt: squared energy distance to the tilted law of MFM-G with 16 draws a step less that of DPS, below 0.",
        measure=difference("law", "mfm-g-16", "dps"),
        rule=below(0.0),
        where=pl.col("part") == "law",
        workloads=[EIGHT],
        pooled=False,
        **OURS,
    ),
    Claim(
        13,
        part="b",
        paper="Not in the paper: the same against Feynman-Kac steering.",
        tested="The same distance of MFM-G with 16 draws a step (529 calls) minus that of a particle drawn from 16 resampled ones (1,040 calls), below 0.",
        measure=difference("law", "mfm-g-16", "smc-16"),
        rule=below(0.0),
        where=pl.col("part") == "law",
        workloads=[EIGHT],
        pooled=False,
        **OURS,
    ),
]
