"""The study's null: how often text that people wrote is called watermarked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from scipy import stats

from cameraready.lm import _corpora
from cameraready.lm.watermark_power.schemes import GreenLists

WINDOW = 60
GAMMAS = (0.25, 0.5, 0.9)
ALPHAS = (0.05, 0.01, 0.001)


def windows_of(tokenizer: Any, n: int) -> torch.Tensor:
    """`n` windows of 60 tokens from all kinds of text together, in random order; no two overlap."""
    found = _corpora.windows(tokenizer, _corpora.KINDS, length=WINDOW, n=n, seed=0)
    return found[torch.from_numpy(np.random.default_rng(0).permutation(n))]


def false_alarms(windows: torch.Tensor, vocab_size: int, key: int) -> Iterator[dict[str, Any]]:
    """Rows of the share of windows called watermarked under one key, by test, gamma and alpha, with the share that theory says.

    Arms: "exact" (pairs that repeat counted once, binomial), "repeats" (all counted, binomial), "z" (all counted, normal quantile, as
    transformers and MarkLLM test), "z-once" (pairs once, normal quantile). All gammas are read off one permutation of the vocabulary.
    """
    lists = GreenLists("lefthash", 0.5, key, 1, vocab_size)
    before, token = windows[:, :-1].reshape(-1), windows[:, 1:].reshape(-1)
    keys, where = torch.unique(torch.stack([before, token], dim=1), dim=0, return_inverse=True)
    place = lists.place(keys[:, 0], keys[:, 1]).numpy()
    where = where.numpy()
    owner = np.repeat(np.arange(len(windows)), windows.shape[1] - 1)
    once_owner, once_where = np.divmod(np.unique(owner * np.int64(len(keys)) + where), len(keys))
    for gamma in GAMMAS:
        size = int(vocab_size * gamma)
        share = size / vocab_size
        counted = {
            "once": (np.bincount(once_owner), np.bincount(once_owner, weights=place[once_where] < size)),
            "all": (np.bincount(owner), np.bincount(owner, weights=place[where] < size)),
        }
        for alpha in ALPHAS:
            for arm, which, normal in (
                ("exact", "once", False),
                ("repeats", "all", False),
                ("z", "all", True),
                ("z-once", "once", True),
            ):
                length, green = counted[which]
                if normal:
                    called = (green - share * length) / np.sqrt(length * share * (1 - share)) > stats.norm.isf(alpha)
                    bar = np.floor(share * length + stats.norm.isf(alpha) * np.sqrt(length * share * (1 - share))) + 1
                else:
                    called = stats.binom.sf(green - 1, length, share) <= alpha
                    bar = stats.binom.isf(alpha, length, share) + 1
                size_said = float(stats.binom.sf(bar - 1, length, share).mean())
                yield {
                    "arm": arm,
                    "gamma": gamma,
                    "level": alpha,
                    "alarms": float(called.mean()),
                    "expected": size_said,
                    "inflation": float(called.mean()) / alpha,
                    "windows": len(windows),
                }
