"""The clipped policy-gradient loss with a bound for each token, and what a run should know of its clips."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from cameraready.posttraining._logprobs import masked_mean

Aggregation = Literal["token-mean", "seq-mean-token-mean", "constant"]
_PER = {"token-mean": "token", "seq-mean-token-mean": "sequence", "constant": "constant"}

#: Upper ends of the buckets of old probability in which clips are counted; the last bucket ends at 1.
BUCKETS = (0.01, 0.1, 0.5, 0.9)
#: Log-ratios beyond this count as this, so that no ratio overflows; such a token has no gradient.
LARGEST_LOG_RATIO = 20.0


def band_policy_loss(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lo: Tensor | float,
    hi: Tensor | float,
    *,
    agg: Aggregation = "token-mean",
    total: float | Tensor | None = None,
    dual_clip: float | None = None,
    validate: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's pessimistic loss max(-A r, -A clip(r, lo, hi)) with bounds that may differ from token to token.

    Parameters
    ----------
    logps : Tensor (B, L)
        Log-probabilities of the sampled tokens under the policy that is trained, with a graph.
    old_logps : Tensor (B, L)
        The same under the policy that sampled them (at the same temperature); a constant.
    advantages : Tensor (B,), (B, 1) or (B, L)
    mask : Tensor (B, L)
        True or 1 where the token is the model's own: not the prompt's, not padding, not a tool's. What is masked may be anything, NaN included.
    lo, hi : Tensor (B, L), or float
        From `band_bounds`; constants such as 0.8 and 1.2 make it plain clipping. No gradient flows through them.
    agg : {"token-mean", "seq-mean-token-mean", "constant"}
        Sum over tokens / tokens (DAPO), mean over each row's tokens and then rows (GRPO), or sum / `total` (Dr. GRPO).
    total : float or Tensor, optional
        What to divide by when the batch is one of several of an optimizer step: tokens (rows for "seq-mean-token-mean") of all of them.
    dual_clip : float, optional
        For negative advantages the loss is at most -A * dual_clip, above 1 (10 in the authors' runs). Without it, a ratio that has grown
        although its advantage is negative is pushed back without limit, up to a log-ratio of 20; beyond that every token is without a gradient.
    validate : bool
        Look for log-probabilities and advantages that are not finite at counted tokens, which on an accelerator waits for the device.

    Returns
    -------
    loss : Tensor, scalar
        In the dtype of `logps`, float32 at least. An empty mask gives a 0 that has a graph.
    stats : dict of Tensor, detached
        ``clip_up``, ``clip_down``: share of counted tokens whose gradient the upper (lower) bound has cut: A > 0 and r > hi (A < 0 and r < lo).
        ``tokens_by_p``, ``clip_up_by_p``, ``clip_down_by_p`` (5,): counted tokens, and the shares among them, by old probability: up to
        0.01, 0.1, 0.5, 0.9, 1; NaN in an empty bucket. ``kl``: estimate of KL(old || new) per token in nats, the mean of r - 1 - log r
        (Schulman's k3), never negative.

    Raises
    ------
    ValueError
        Shapes do not fit, lo > hi or NaN in either at a counted token, NaN at a counted token, a counted token of old probability 0, dual_clip at most 1.

    References
    ----------
    Li et al., 2026, arXiv:2603.04918; the dual clip is Ye et al., 2020, arXiv:1912.09729.
    """
    if agg not in _PER:
        raise ValueError(f"agg must be one of {', '.join(_PER)}, got {agg!r}")
    mask = _fitting(logps, old_logps, mask, lo, hi)
    advantages = _per_token(advantages, logps)
    old_logps = old_logps.detach()
    if validate:
        check_counted(logps, old_logps, advantages, mask)
        check_band(lo, hi, mask)
    # What is masked may be NaN, and NaN times 0 is NaN, in gradients too: it is put away before anything is computed.
    logps, old_logps = logps.masked_fill(~mask, 0.0), old_logps.masked_fill(~mask, 0.0)
    advantages = advantages.masked_fill(~mask, 0.0)
    losses = token_losses(logps, old_logps, advantages, lo, hi, dual_clip=dual_clip)
    loss = masked_mean(losses, mask, per=_PER[agg], total=total)
    with torch.no_grad():
        stats = shares(clip_counts(logps, old_logps, advantages, mask, lo, hi))
    return loss, stats


def token_losses(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    lo: Tensor | float,
    hi: Tensor | float,
    *,
    dual_clip: float | None = None,
) -> Tensor:
    """The loss of each token by itself, any broadcastable shapes: max(-A r, -A clip(r, lo, hi)); see `band_policy_loss`."""
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip!r}")
    ratio = _log_ratio(logps, old_logps).exp()
    advantages = advantages.to(ratio.dtype)
    losses = torch.maximum(-advantages * ratio, -advantages * _clipped(ratio, lo, hi))
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)
    return losses


def clip_counts(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, lo: Tensor | float, hi: Tensor | float
) -> Tensor:
    """Sums that add up over batches and processes: (buckets, 4) of tokens, cut by the upper bound, cut by the lower, and KL in nats.

    float64 where the device has it, else float32; one row for each bucket of old probability (see `BUCKETS`).
    """
    log_ratio = _log_ratio(logps.detach(), old_logps)
    ratio = log_ratio.exp()
    up, down = (advantages > 0) & (ratio > hi), (advantages < 0) & (ratio < lo)
    kl = ratio - 1.0 - log_ratio
    edges = torch.tensor(BUCKETS, dtype=old_logps.dtype, device=old_logps.device).log()
    bucket = torch.bucketize(old_logps.detach().contiguous(), edges).reshape(-1)
    wide = torch.float32 if old_logps.device.type == "mps" else torch.float64
    each = torch.stack([torch.ones_like(kl), up.to(kl.dtype), down.to(kl.dtype), kl], dim=-1)
    each = each.masked_fill(~mask[..., None], 0.0).reshape(-1, 4).to(wide)
    return torch.zeros(len(BUCKETS) + 1, 4, dtype=wide, device=each.device).index_add_(0, bucket, each)


def shares(counts: Tensor) -> dict[str, Tensor]:
    """The statistics that `band_policy_loss` returns, of the sums that `clip_counts` made."""
    tokens, up, down = counts[:, 0], counts[:, 1], counts[:, 2]
    everything = counts.sum(0)
    some = everything[0].clamp(min=1.0)
    return {
        "clip_up": everything[1] / some,
        "clip_down": everything[2] / some,
        "kl": everything[3] / some,
        "tokens_by_p": tokens,
        "clip_up_by_p": up / tokens,
        "clip_down_by_p": down / tokens,
    }


def check_counted(logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor) -> None:
    """Raises ValueError for numbers at counted tokens that a loss cannot be made of."""
    for name, values in (("logps", logps), ("old_logps", old_logps), ("advantages", advantages)):
        if bool((torch.isnan(values) & mask).any()):
            hint = "; rewards that are NaN make such advantages" if name == "advantages" else ""
            raise ValueError(f"{name} holds NaN at a token that the mask counts{hint}")
    if bool((torch.isinf(advantages) & mask).any()):
        raise ValueError("advantages are infinite at a token that the mask counts")
    if bool((torch.isinf(old_logps) & mask).any()):
        raise ValueError(
            "old_logps is infinite at a token that the mask counts: a token of probability 0 cannot have been sampled. "
            "Mask padding and prompts, and take the log-probabilities at the sampling temperature"
        )


def check_band(lo: Tensor | float, hi: Tensor | float, mask: Tensor) -> None:
    """Raises ValueError where a counted token's lower bound is above the upper one, or either is NaN."""
    if isinstance(lo, Tensor) or isinstance(hi, Tensor):
        lo, hi = (torch.as_tensor(bound, device=mask.device) for bound in (lo, hi))
        if bool((~(lo <= hi) & mask).any()):
            raise ValueError("lo must be at most hi at every token that the mask counts, and neither may be NaN")


def _log_ratio(logps: Tensor, old_logps: Tensor) -> Tensor:
    if logps.dtype in (torch.bfloat16, torch.float16):
        logps = logps.float()
    return (logps - old_logps.to(logps.dtype)).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def _clipped(ratio: Tensor, lo: Tensor | float, hi: Tensor | float) -> Tensor:
    if isinstance(lo, Tensor) or isinstance(hi, Tensor):
        lo, hi = (torch.as_tensor(bound, device=ratio.device).detach().to(ratio.dtype) for bound in (lo, hi))
    return torch.clamp(ratio, lo, hi)


def _fitting(logps: Tensor, old_logps: Tensor, mask: Tensor, lo: Tensor | float, hi: Tensor | float) -> Tensor:
    """The mask as bool; raises ValueError for shapes that do not fit and bounds that are no band."""
    shape = tuple(logps.shape)
    for name, value in (("old_logps", old_logps), ("mask", mask), ("lo", lo), ("hi", hi)):
        if isinstance(value, Tensor) and value.ndim and tuple(value.shape) != shape:
            raise ValueError(f"{name} {tuple(value.shape)} must have the shape of logps {shape}")
    if logps.ndim != 2:
        raise ValueError(f"logps must be (B, L), got {shape}")
    if not (isinstance(lo, Tensor) or isinstance(hi, Tensor)) and not lo <= hi:
        raise ValueError(f"lo must be at most hi, got {lo} and {hi}")
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a tensor (B, L), got {type(mask).__name__}")
    return mask.bool()


def _per_token(advantages: Tensor, logps: Tensor) -> Tensor:
    if advantages.ndim == 1:
        advantages = advantages[:, None]
    if advantages.ndim != 2 or len(advantages) != len(logps) or advantages.shape[1] not in (1, logps.shape[1]):
        raise ValueError(
            f"advantages must be (B,), (B, 1) or (B, L) for logps {tuple(logps.shape)}, got {tuple(advantages.shape)}"
        )
    return advantages.detach().expand_as(logps)
