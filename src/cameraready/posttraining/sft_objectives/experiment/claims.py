"""What this study claims beyond the paper: its refutation criterion, costs, the recommendation, counterparts of what it cannot test."""

from __future__ import annotations

from typing import Any

import polars as pl

from cameraready.evidence import Claim, above, below, difference, rank_correlation, ratio, versus_best, within
from cameraready.posttraining.sft_objectives.experiment.trials import CONTINUUM, MEMORY

PAPER = "Li, Qiu, Chen, Ji and Tong, 2026, arXiv:2510.00526"
QWEN = "qwen2.5-coder-0.5b-instruct"
STRONG, NONE, MISLED = (pl.col("level") == level for level in ("strong", "none", "misled"))
NOISY, CLEAN = pl.col("noise") > 0, pl.col("noise") == 0
OURS: dict[str, Any] = {"scope": "ours", "source": "this study", "pooled": False}
ON_MODELS: dict[str, Any] = {"workloads": [QWEN, "own"], **OURS}
KNOWN, UNKNOWN = pl.col("task") == "arithmetic", pl.col("task") == "figlet_font"
RIGHT = "probability of writing exactly the right answer to held-out prompts"

OF_OURS: list[Claim] = [
    Claim(
        9,
        part="a",
        paper="(Refuted if not.) The sign of alpha = 1 minus log-likelihood changes between strong and weak priors: positive at the strong end.",
        tested=f"Strong prior, noise, the {RIGHT}: above 0.",
        measure=difference("accuracy", "alpha=1", "nll"),
        rule=above(0.0),
        where=STRONG & NOISY,
        workloads=[CONTINUUM],
        **OURS,
    ),
    Claim(
        9,
        part="b",
        paper="(Refuted if not.) Negative at the weak end.",
        tested="The same from other sources: below 0.",
        measure=difference("accuracy", "alpha=1", "nll"),
        rule=below(0.0),
        where=MISLED & NOISY,
        workloads=[CONTINUUM],
        **OURS,
    ),
    Claim(
        9,
        part="c",
        paper="(Refuted if not.) Negative at the weak end.",
        tested="The same from untrained networks: below 0.",
        measure=difference("accuracy", "alpha=1", "nll"),
        rule=below(0.0),
        where=NONE & NOISY,
        workloads=[CONTINUUM],
        **OURS,
    ),
    Claim(
        10,
        part="a",
        paper="(Ours.) The chunked form takes no more memory than TRL's own chunked loss.",
        tested="Peak of a loss and its gradient, 384 tokens and 151,936 words, over that of TRL's log-likelihood: below 1.1.",
        measure=ratio("peak_mb", "chunked", "trl-nll"),
        rule=below(1.1),
        workloads=[MEMORY],
        **OURS,
    ),
    Claim(
        10,
        part="b",
        paper="(Ours.) Nor more time.",
        tested="Seconds over those of TRL's log-likelihood, which also works out entropies: below 1.1.",
        measure=ratio("seconds", "chunked", "trl-nll"),
        rule=below(1.1),
        workloads=[MEMORY],
        **OURS,
    ),
    Claim(
        11,
        part="a",
        paper="(Ours.) What the measured prior recommends is better than the log-likelihood always.",
        tested=f"Limits of the paper, five levels, noise: the {RIGHT} above that of the log-likelihood.",
        measure=difference("accuracy", "recommended", "nll"),
        rule=above(0.0),
        where=NOISY,
        workloads=[CONTINUUM],
        **OURS,
    ),
    Claim(
        11,
        part="b",
        paper="(Ours.) And than dynamic fine-tuning always.",
        tested="The same minus that of DFT: above 0.",
        measure=difference("accuracy", "recommended", "dft"),
        rule=above(0.0),
        where=NOISY,
        workloads=[CONTINUUM],
        **OURS,
    ),
    Claim(
        11,
        part="c",
        paper="(Ours.) And no worse than the best single objective.",
        tested="The same minus that of the best of all arms, chosen over all levels together: above -0.05.",
        measure=versus_best(
            "accuracy",
            "recommended",
            exclude=["untrained", "family"],
            kind="difference",
            lower_is_better=False,
        ),
        rule=above(-0.05),
        where=NOISY,
        workloads=[CONTINUUM],
        **OURS,
    ),
    Claim(
        11,
        part="d",
        paper="(Ours.) Without noise it costs nothing.",
        tested="Clean demonstrations: recommended minus log-likelihood above -0.02.",
        measure=difference("accuracy", "recommended", "nll"),
        rule=above(-0.02),
        where=CLEAN,
        workloads=[CONTINUUM],
        **OURS,
    ),
    Claim(
        12,
        part="a",
        paper="(Ours, for claim 1.) On a task that a real model knows, alpha = 1 withstands wrong demonstrations.",
        tested=f"Sums, three in ten demonstrations with another's answer, adapters of rank 8 on the last two layers, five steps: the {RIGHT}, alpha = 1 minus log-likelihood, above 0.",
        measure=difference("accuracy", "alpha=1", "nll"),
        rule=above(0.0),
        where=KNOWN,
        **{**ON_MODELS, "workloads": [QWEN]},
    ),
    Claim(
        12,
        part="b",
        paper="(Ours, for claim 2.) On one that it does not know, the log-likelihood wins.",
        tested="Words in a font of reasoning-gym, clean demonstrations: held-out log-loss of alpha = 1 over that of the log-likelihood above 1.",
        measure=ratio("nll_held_out", "alpha=1", "nll"),
        rule=above(1.0),
        where=UNKNOWN,
        **{**ON_MODELS, "workloads": [QWEN]},
    ),
    Claim(
        12,
        part="c",
        paper="(Ours.) What the prior recommends beats what it advises against.",
        tested=f"Both tasks, or yours: the {RIGHT}, of the recommended objective minus that of the other end's (log-likelihood, or alpha = 1 where that is recommended), above 0.",
        measure=difference("accuracy", "recommended", "alternative"),
        rule=above(0.0),
        **ON_MODELS,
    ),
    Claim(
        13,
        paper="(Ours.) From no prior alpha = 10 has no gradient to speak of.",
        tested="Norm of the first gradient, untrained networks, over that of the log-likelihood: below 1e-6.",
        measure=ratio("norm", "alpha=10", "nll", floor=1e-30),
        rule=below(1e-6),
        where=NONE,
        workloads=[CONTINUUM],
        **OURS,
    ),
    Claim(
        14,
        paper="(Ours, for claim 3.) In the middle the gap is below two points.",
        tested=f"Middle prior, noise: the {RIGHT}, alpha = 1 minus log-likelihood, between -0.02 and 0.02.",
        measure=difference("accuracy", "alpha=1", "nll"),
        rule=within(-0.02, 0.02),
        where=(pl.col("level") == "middle") & NOISY,
        workloads=[CONTINUUM],
        **OURS,
    ),
    Claim(
        15,
        paper="(Ours, for claim 7.) The advantage of alpha = 1 grows with the prior.",
        tested="Five levels, noise: rank correlation of the mean probability and alpha = 1 minus log-likelihood above 0.5.",
        measure=rank_correlation("prior", "gain", "alpha=1", across="rows"),
        rule=above(0.5),
        where=NOISY,
        workloads=[CONTINUUM],
        **OURS,
    ),
]
