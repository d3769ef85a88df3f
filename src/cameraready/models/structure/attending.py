"""Attention put together from its pieces, as a check of them and for those who want to change one."""

from __future__ import annotations

import torch

from cameraready.models.structure.attention import Attention
from cameraready.models.structure.rotary import Angles, apply_rotary


def attend(
    attention: Attention, hidden: torch.Tensor, angles: Angles | None = None, *, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The output of an attention, from its queries, keys and values (what its module gives the layer).

    Parameters
    ----------
    attention : Attention
        From ``anatomy(model).layers[i].attention``.
    hidden : torch.Tensor, shape (B, T, hidden_size)
        What the attention is given (site ``attention_input``).
    angles : (torch.Tensor, torch.Tensor), optional
        cos and sin of `Anatomy.rotary`, shapes (B, T, R); needed where ``attention.rotary`` is not None.
    mask : torch.Tensor, optional
        Boolean, broadcast to (B, heads, T, T), True where a query may look. Causal within the sliding window by default.

    Returns
    -------
    torch.Tensor, shape (B, T, hidden_size)

    Raises
    ------
    UnknownArchitecture
        If the attention is of a make that is not known.
    ValueError
        If angles are missing.

    Notes
    -----
    Inner products and weights are in float32 at least. Takes memory of B x heads x T x T. For models of full length use the module itself.
    """
    queries, keys, values = attention.queries(hidden), attention.keys(hidden), attention.values(hidden)
    if attention.rotary is not None:
        if angles is None:
            raise ValueError("This attention has rotary positions: give the cosines and sines of `Anatomy.rotary`.")
        queries = apply_rotary(queries, *angles, attention.rotary)
        keys = apply_rotary(keys, *angles, attention.rotary)
    dtype = values.dtype
    # Inner products that come out in half precision would be off by whole units where keys are large (Qwen 2's biases).
    exact = torch.promote_types(dtype, torch.float32)
    queries, keys, values = (x.to(exact) for x in (queries, keys, values))
    keys, values = (x.repeat_interleave(attention.group_size, dim=1) for x in (keys, values))
    logits = queries @ keys.transpose(-1, -2) * attention.scaling
    if attention.softcap is not None:
        logits = attention.softcap * torch.tanh(logits / attention.softcap)
    if mask is None:
        mask = causal_mask(hidden.shape[1], attention.sliding_window, hidden.device)
    logits = logits.masked_fill(~mask, float("-inf"))
    if attention.sinks is not None:
        sinks = attention.sinks.reshape(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        weights = torch.cat((logits, sinks.to(logits.dtype)), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = logits.softmax(dim=-1)
    heads = (weights @ values).to(dtype).transpose(1, 2).flatten(-2)
    if attention.gated and attention.q_proj is not None:
        split = attention.q_proj(hidden).unflatten(-1, (attention.n_heads, 2 * attention.head_dim))
        heads = heads * torch.sigmoid(split[..., attention.head_dim :].flatten(-2))
    return heads if attention.o_proj is None else attention.o_proj(heads)


def causal_mask(length: int, window: int | None = None, device: torch.device | None = None) -> torch.Tensor:
    """Which keys (columns) a query (row) may look at: none later than itself, none before its sliding window.

    Returns
    -------
    torch.Tensor of bool, shape (length, length)
    """
    place = torch.arange(length, device=device)
    distance = place[:, None] - place[None]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)
