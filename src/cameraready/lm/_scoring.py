"""How continuations and answers are scored: nats per token after a prefix, pass@k, accuracy."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cameraready.lm._problems import Problem

if TYPE_CHECKING:
    from torch import Tensor

#: Entries of the largest block of logits that is turned into float32 at once (64 MiB).
LARGEST = 1 << 24


def perplexity_after(
    model: Any, prefix: Any, suffix: Tensor, *, position: int | Tensor | None = None, chunk: int | None = None
) -> Tensor:
    """Mean negative log-likelihood of `suffix` after `prefix`, in nats per token; its exponential is the perplexity.

    Scored are the tokens of `suffix` from its second on, given everything before: a cache does not hold the prediction of the first,
    and so a cache and the tokens that it was made from give the same number.

    Parameters
    ----------
    model : transformers causal language model
    prefix : LongTensor of shape (B, P), or transformers Cache
        Tokens without padding, or the keys and values of tokens, of which some may have been dropped. A cache is left as it was (a copy is extended).
    suffix : LongTensor of shape (B, T)
        At least 2 tokens, without padding.
    position : int or LongTensor of shape (B,), optional
        How many tokens the prefix had, which is the position of the first token of `suffix`. By default as many as the cache holds:
        give it where a cache was pruned and kept its positions.
    chunk : int, optional
        Tokens in one forward pass; by default so many that their logits stay below 64 MiB in float32.

    Returns
    -------
    Tensor of shape (B,), float32, on the device of `suffix`

    Raises
    ------
    ValueError
        Shapes do not fit, or `suffix` has fewer than two tokens.
    """
    import torch

    if suffix.ndim != 2 or suffix.shape[1] < 2:
        raise ValueError(f"the suffix must be (B, T) with at least two tokens to score one, got {tuple(suffix.shape)}")
    batch, length = suffix.shape
    given = "cache" if _takes(model, "cache") else "past_key_values"  # transformers 5.24 renamed it
    with torch.inference_mode():
        if isinstance(prefix, torch.Tensor):
            if prefix.ndim != 2 or len(prefix) != batch:
                raise ValueError(
                    f"prefix {tuple(prefix.shape)} and suffix {tuple(suffix.shape)} must both be (B, T) of one B"
                )
            if prefix.shape[1] == 0:
                cache, held = None, 0
            else:
                few = {"logits_to_keep": 1} if _takes(model, "logits_to_keep") else {}
                cache, held = model(prefix, use_cache=True, **few).past_key_values, prefix.shape[1]
        else:
            cache, held = copy.deepcopy(prefix), int(prefix.get_seq_length())
        first = torch.as_tensor(held if position is None else position, device=suffix.device).reshape(-1, 1)
        positions = (first + torch.arange(length, device=suffix.device)).expand(batch, length)
        size = chunk or max(1, LARGEST // (batch * int(model.get_output_embeddings().weight.shape[0])))
        total = torch.zeros(batch, dtype=torch.float64)
        for start in range(0, length - 1, size):
            stop = min(start + size, length - 1)  # the last token is only predicted
            found = model(
                suffix[:, start:stop], **{given: cache}, position_ids=positions[:, start:stop], use_cache=True
            )
            cache = found.past_key_values
            total += negative_log_likelihood(found.logits, suffix[:, start + 1 : stop + 1]).sum(1).double().cpu()
    return (total / (length - 1)).float().to(suffix.device)


def negative_log_likelihood(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats of each target under its logits, in float32, a block of rows at a time.

    Parameters
    ----------
    logits : Tensor of shape (B, T, V)
        Of any dtype; where it is not float32 only a block is copied.
    targets : LongTensor of shape (B, T)

    Returns
    -------
    Tensor of shape (B, T), float32
    """
    import torch
    from torch.nn.functional import cross_entropy

    rows, wanted = logits.flatten(0, 1), targets.flatten()
    size = max(1, LARGEST // logits.shape[-1])
    parts = [
        cross_entropy(rows[start : start + size].float(), wanted[start : start + size], reduction="none")
        for start in range(0, len(rows), size)
    ]
    return torch.cat(parts).view(targets.shape)


def pass_at_k(n: Any, correct: Any, k: int) -> np.ndarray:
    """Chance that at least one of `k` samples is right, from `n` samples of which `correct` are: 1 - C(n - c, k) / C(n, k).

    The unbiased estimator of Chen et al. (2021), arXiv:2107.03374, Eq. 1. Average it over problems.

    Parameters
    ----------
    n, correct : int or array of int
        Samples of each problem, and how many of them are right; broadcast against each other.
    k : int
        From 1 to the smallest `n`.

    Returns
    -------
    ndarray of float64, of the broadcast shape
        In O(k) for each problem.
    """
    samples, right = np.broadcast_arrays(np.asarray(n), np.asarray(correct))
    if not (np.issubdtype(samples.dtype, np.integer) and np.issubdtype(right.dtype, np.integer)):
        raise TypeError(f"n and correct must be whole numbers, got {samples.dtype} and {right.dtype}")
    if k < 1 or (samples < k).any():
        raise ValueError(f"k must be from 1 to the number of samples, got k={k} and n={samples.min()}")
    if (right < 0).any() or (right > samples).any():
        raise ValueError("correct must be from 0 to n")
    # The product of (n - c - j) / (n - j) over j < k, in logarithms, so that small chances keep their digits.
    missed = right[..., None] / (samples[..., None] - np.arange(k))
    enough = samples - right >= k
    logs = np.log1p(-np.where(enough[..., None], missed, 0.0)).sum(-1)
    return np.where(enough, -np.expm1(logs), 1.0) + 0.0


def accuracy(problem: Problem, text: str | Sequence[str]) -> float:
    """Share of the texts that answer `problem`: 1.0 or 0.0 for one, in between for several samples."""
    texts = [text] if isinstance(text, str) else list(text)
    if not texts:
        raise ValueError("there is no text to check")
    return sum(bool(problem.check(part)) for part in texts) / len(texts)


def _takes(model: Any, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters
