"""Fixed embeddings of prompts by a language model's own hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def prompt_embeddings(model: nn.Module, token_ids: Sequence[Sequence[int] | Tensor], *, batch_size: int = 16) -> Tensor:
    """Mean over a prompt's tokens of the model's last hidden states, computed once before training.

    Parameters
    ----------
    model : transformers causal language model
        Left as it is: its mode is put back, no gradient is recorded. Costs one pass over the pool's tokens.
    token_ids : sequence of P sequences of int
        The prompts as the trainer will give them to the model, chat template included.
    batch_size : int
        Prompts in a pass; they are sorted by length, so that padding is short.

    Returns
    -------
    Tensor, float32 of shape (P, hidden), on the model's device

    Raises
    ------
    ValueError
        No prompts, or an empty one.

    Notes
    -----
    Kim et al., 2026, arXiv:2602.12642, compute them once with the reference model. A sentence encoder's vectors do as well: `PartitionHead` takes
    any matrix.
    """
    rows: list[Tensor] = [torch.as_tensor(ids, dtype=torch.int64).flatten() for ids in token_ids]
    if not rows or batch_size < 1:
        raise ValueError(
            f"embeddings need at least one prompt and a batch_size of at least 1, got {len(rows)} and {batch_size}"
        )
    empty = [place for place, row in enumerate(rows) if not len(row)]
    if empty:
        raise ValueError(f"prompt {empty[0]} has no tokens, so that it has no embedding")
    device = next(model.parameters()).device
    body: Any = getattr(model, "base_model", model)
    was_training, found = model.training, {}
    model.eval()
    try:
        order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
        for start in range(0, len(order), batch_size):
            places = order[start : start + batch_size]
            ids = nn.utils.rnn.pad_sequence([rows[p] for p in places], batch_first=True).to(device)
            mask = (torch.arange(ids.shape[1])[None] < torch.tensor([len(rows[p]) for p in places])[:, None]).to(device)
            hidden = body(
                input_ids=ids, attention_mask=mask.long(), output_hidden_states=True, use_cache=False
            ).hidden_states[-1]
            means = torch.where(mask[..., None], hidden.float(), 0.0).sum(1) / mask.sum(1, keepdim=True)
            found.update(zip(places, means, strict=True))
    finally:
        model.train(was_training)
    return torch.stack([found[place] for place in range(len(rows))])
