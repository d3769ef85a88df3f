"""From scores to the tokens that are kept: the same number in every head, or a layer's budget shared by its heads."""

from __future__ import annotations

import torch


def n_kept_of(length: int, compression_ratio: float, n_sink: int) -> int:
    """How many of `length` tokens stay: int(T (1 - ratio)) as in kvpress, but never fewer than the sinks, nor none."""
    return min(length, max(int(length * (1 - compression_ratio)), n_sink, 1))


def kept_positions(scores: torch.Tensor, n_kept: int) -> torch.Tensor:
    """Positions of the `n_kept` highest scores of each head, ascending; of equal scores the earlier token is kept.

    Parameters
    ----------
    scores : tensor, shape (B, Hkv, T)
    n_kept : int
        At most T.

    Returns
    -------
    int64 tensor, shape (B, Hkv, n_kept)
    """
    if not 0 <= n_kept <= scores.shape[-1]:
        raise ValueError(f"{n_kept} tokens cannot be kept of {scores.shape[-1]}")
    # A stable sort breaks ties alike on every device, which topk does not.
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :n_kept].sort(dim=-1).values


def adaptive_positions(scores: torch.Tensor, n_kept: int, safeguard: float = 0.2) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions when heads share one budget of Hkv * n_kept tokens: who has the higher scores gets more.

    Every head keeps at least ``int(safeguard * n_kept)``, as in AdaKV (Feng et al., 2024, arXiv:2407.11550).

    Parameters
    ----------
    scores : tensor, shape (B, Hkv, T)
        Comparable across heads, as leverages are.
    n_kept : int
        Tokens a head on average.
    safeguard : float in [0, 1]

    Returns
    -------
    positions : int64 tensor, shape (B, Hkv, S)
        S is what the largest head keeps; shorter heads repeat their last position.
    valid : bool tensor, shape (B, Hkv, S)
        False where a position only fills up. Padding (a score of -inf) is never valid.
    """
    if not 0 <= safeguard <= 1:
        raise ValueError(f"safeguard is a share of the budget between 0 and 1, got {safeguard!r}")
    batch, heads, length = scores.shape
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    safe = torch.zeros_like(scores, dtype=torch.bool)
    safe.scatter_(-1, order[..., : int(safeguard * n_kept)], True)
    # Safe tokens first, each group by its scores; +inf stays +inf.
    lifted = torch.where(safe & (scores != -torch.inf), torch.inf, scores).flatten(1)
    chosen = lifted.sort(dim=-1, descending=True, stable=True).indices[:, : heads * n_kept]
    kept = torch.zeros_like(lifted, dtype=torch.bool).scatter_(-1, chosen, True).view(batch, heads, length)
    kept &= scores != -torch.inf
    counts = kept.sum(-1)
    slots = int(counts.max())
    at = torch.arange(length, device=scores.device)
    positions = torch.where(kept, at, length).sort(dim=-1).values[..., :slots]
    valid = torch.arange(slots, device=scores.device) < counts[..., None]
    last = torch.where(kept, at, 0).amax(-1, keepdim=True)
    return torch.where(valid, positions, last), valid


def gathered(cached: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Entries of `cached` (B, Hkv, T, d) at `positions` (B, Hkv, S): (B, Hkv, S, d), in the dtype of `cached`."""
    index = positions.unsqueeze(-1).expand(*positions.shape, cached.shape[-1])
    if cached.element_size() == 1 and cached.is_floating_point():  # float8 has no gather
        return cached.view(torch.uint8).gather(2, index).view(cached.dtype)
    return cached.gather(2, index)
