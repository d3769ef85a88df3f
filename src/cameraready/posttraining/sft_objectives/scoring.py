"""Log-probabilities of a batch's labels, from logits that are there or from a model whose logits of all tokens are never made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cameraready.posttraining._endings import ending_of
from cameraready.posttraining._logprobs import IGNORED, ScoringHead, check_targets, chunk_size


def label_logprobs(
    model: nn.Module, labels: Tensor, *, chunk: int | None = None, **inputs: Any
) -> tuple[Tensor, Tensor, Any]:
    """Log-probability of every label under the model, whose head runs on a chunk of labelled tokens at a time.

    Parameters
    ----------
    model : nn.Module
        A causal language model of transformers, wrapped or not; called once, through its outermost wrapper, with `inputs`.
    labels : LongTensor of shape (B, T)
        Unshifted: ``labels[:, t]`` is predicted at t - 1. Tokens with -100 are not scored at all.
    chunk : int, optional
        Tokens whose logits are made at once; by default so many that they take 64 MiB in float32.
    **inputs
        What the model is called with (``input_ids``, ``attention_mask``, ``position_ids`` ...), without labels.

    Returns
    -------
    logps : Tensor of shape (B, T - 1), float32 or float64
        0 where there is no label.
    mask : bool Tensor of shape (B, T - 1)
    outputs
        Of the model; its logits are of one token only.

    Raises
    ------
    ValueError
        Labels are outside the vocabulary, or there is no second token.
    cameraready.models.UnknownArchitecture
        The model makes its logits in a way that is not known.
    """
    from cameraready.models import UnknownArchitecture

    if labels.ndim != 2 or labels.shape[1] < 2:
        raise ValueError(f"labels must be (B, T) with T of at least 2, got {tuple(labels.shape)}")
    targets = labels[:, 1:]
    parts = ending_of(model)
    check_targets(targets, parts.vocab_size)
    work = ScoringHead(parts, targets, 1.0, chunk_size(chunk, parts.vocab_size), False)
    with work.instead_of_all_logits():
        outputs = model(**{"use_cache": False, **inputs})
    if work.scores is None:
        raise UnknownArchitecture(
            f"{type(model).__name__} never ran its head (a kernel may have fused head and loss); give logits instead."
        )
    work.check(outputs)
    return work.scores.logps, (targets != IGNORED).to(work.scores.logps.device), outputs


def logits_of(outputs: Any) -> Tensor:
    """The logits in what a model returned: an output with ``logits``, a mapping, a tuple that begins with them, or themselves."""
    if isinstance(outputs, Tensor):
        return outputs
    found = outputs.get("logits") if isinstance(outputs, dict) else getattr(outputs, "logits", None)
    if found is None and isinstance(outputs, (tuple, list)) and outputs:
        found = outputs[0]
    if not isinstance(found, Tensor) or found.ndim < 2:
        raise ValueError(
            f"the model returned no logits (B, T, V) but {type(outputs).__name__}; kernels that fuse head and loss must be off"
        )
    return found


def mean_logps(logits: Tensor, targets: Tensor, logps: Tensor) -> Tensor:
    """Mean log-probability over the vocabulary at each target, from the target's own: shapes (..., V), (...), (...) -> (...)."""
    means = logits.mean(-1, dtype=logps.dtype)
    chosen = logits.gather(-1, targets.clamp_min(0)[..., None])[..., 0].to(logps.dtype)
    # log sum exp = chosen logit - its log-probability
    found = torch.where(torch.isneginf(chosen), means, means - chosen + logps)
    return torch.where(targets >= 0, found, 0.0)
