"""Which tokens the model wrote itself, numbers of attempts spread over them, and means that add up over micro-batches."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

#: What stands for a token that no attempt of the model wrote: of the prompt, of a verifier or tool, of padding. 0, 1, ... are attempts.
PROMPT, FEEDBACK, PADDING = -1, -2, -3


def masked_mean(
    values: Tensor,
    mask: Tensor,
    *,
    per: Literal["token", "sequence", "constant"] = "token",
    total: float | Tensor | None = None,
) -> Tensor:
    """The mean of `values` where `mask` holds, so that sums over micro-batches are exactly the whole batch's mean.

    Parameters
    ----------
    values : Tensor of shape (B, L)
        What `mask` leaves out may be anything, NaN and infinities included, and gets no gradient.
    mask : Tensor of shape (B, L)
        Bool, or numbers that are 0 or 1; it is no weight.
    per : {"token", "sequence", "constant"}
        ``token``: sum over tokens / tokens (DAPO). ``sequence``: mean of each row's tokens, then of the rows, of which an empty one
        counts as 0 (GRPO). ``constant``: sum over tokens / `total` (Dr. GRPO).
    total : float or Tensor, optional
        What to divide by: the number of tokens (of rows for ``sequence``) of the whole optimizer step, over all micro-batches and
        processes. By default that of this batch, which is exact only without accumulation. ``constant`` needs it.

    Returns
    -------
    Tensor, a scalar, float32 at least
        0 for an empty mask, with a graph, so that ``backward`` works.

    Raises
    ------
    ValueError
        Shapes differ, a mask of floats holds weights, `per` is unknown, or `total` is missing, more than one number or not above 0.
    """
    if values.shape != mask.shape or values.ndim != 2:
        raise ValueError(
            f"values and mask must be (B, L) of one shape, got {tuple(values.shape)} and {tuple(mask.shape)}"
        )
    if per not in ("token", "sequence", "constant"):
        raise ValueError(f"per must be 'token', 'sequence' or 'constant', got {per!r}")
    if per == "constant" and total is None:
        raise ValueError("per='constant' divides by a number that is the same for all batches; give it as total")
    if isinstance(total, Tensor):
        if total.numel() != 1:
            raise ValueError(f"total must be one number, got a tensor of shape {tuple(total.shape)}")
        total = total.reshape(())
    if total is not None and not float(total) > 0:
        raise ValueError(f"total must be above 0, got {float(total)}")
    if mask.is_floating_point() and not ((mask == 0) | (mask == 1)).all():
        raise ValueError(
            "mask holds numbers other than 0 and 1; multiply the values by weights, and mask them by 0 and 1"
        )
    mask = mask.bool()
    kept = values.masked_fill(~mask, 0.0).to(
        torch.promote_types(values.dtype, torch.float32)
    )  # half precision overflows
    counts = mask.sum(-1)
    if per == "sequence":
        kept = kept.sum(-1) / counts.clamp_min(1)
        return kept.sum() / (max(len(kept), 1) if total is None else total)
    return kept.sum() / (counts.sum().clamp_min(1) if total is None else total)


def loss_mask(attempt_ids: Tensor) -> Tensor:
    """Which tokens the model wrote itself: not the prompt's, a verifier's or tool's, nor padding. Bool, of the shape of `attempt_ids`."""
    return attempt_ids >= 0


def spread(per_attempt: Tensor, attempt_ids: Tensor, fill: float = 0.0) -> Tensor:
    """One number for each attempt, written on all tokens of that attempt.

    Parameters
    ----------
    per_attempt : Tensor of shape (B, K)
        Advantages, say; those of attempts that were never reached may be NaN.
    attempt_ids : LongTensor of shape (B, L)
        0, 1, ... for tokens of an attempt; negative for others (`PROMPT`, `FEEDBACK`, `PADDING`), which get `fill`.

    Returns
    -------
    Tensor of shape (B, L), in the dtype of `per_attempt`

    Raises
    ------
    ValueError
        Shapes do not fit, or an attempt that has tokens has no number, or NaN.
    """
    if per_attempt.ndim != 2 or attempt_ids.ndim != 2 or len(per_attempt) != len(attempt_ids):
        raise ValueError(
            f"per_attempt (B, K) and attempt_ids (B, L) must have one B, got {tuple(per_attempt.shape)} and {tuple(attempt_ids.shape)}"
        )
    written = attempt_ids >= 0
    if not written.any():
        return per_attempt.new_full(attempt_ids.shape, fill)
    if int(attempt_ids.max()) >= per_attempt.shape[1]:
        raise ValueError(
            f"attempt {int(attempt_ids.max())} has tokens, but per_attempt has numbers for {per_attempt.shape[1]} attempts"
        )
    found = per_attempt.gather(1, attempt_ids.clamp_min(0)).masked_fill(~written, fill)
    lost = found.isnan() & written
    if lost.any():
        row, place = lost.nonzero()[0].tolist()
        raise ValueError(f"attempt {int(attempt_ids[row, place])} of row {row} has tokens, but its number is NaN")
    return found
