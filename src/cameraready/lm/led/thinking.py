"""When a row's thinking phase is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

#: So many tokens may stand after the marker at the end of a prompt (white space of a chat template).
SLACK = 2


class ThinkEnd:
    """Finds the end of the thinking phase in what a row has generated.

    A marker given as text is found by its token ids and, since a tokenizer may melt its last character with what follows, in the decoded text as well, unless
    it is a single token. A prompt that ends with the marker (a chat template with thinking switched off) has no thinking phase; earlier markers
    in a prompt belong to earlier turns and do not count.

    Raises
    ------
    ValueError
        For text without a tokenizer, or text that the tokenizer cannot write.
    """

    def __init__(self, end: str | Sequence[int] | None, tokenizer: Any = None) -> None:
        self.text, self.tokenizer = "", None
        if isinstance(end, str):
            if tokenizer is None:
                raise ValueError(
                    f"think_end={end!r} is text, which needs tokenizer=...; pass its token ids instead, or think_end=None for a"
                    " model without a thinking phase"
                )
            ids = tokenizer(end, add_special_tokens=False)["input_ids"]
            if not ids or (len(ids) == 1 and ids[0] == getattr(tokenizer, "unk_token_id", None)):
                raise ValueError(f"this tokenizer cannot write think_end={end!r}; pass think_end=None or other text")
            if len(ids) > 1:
                self.text, self.tokenizer = end, tokenizer
        else:
            ids = end or ()
        self.ids = tuple(int(i) for i in ids)

    def begin(self, prompt: torch.Tensor) -> torch.Tensor:
        """Rows whose prompt (B, T), left-padded, ends with the marker: BoolTensor (B,)."""
        over = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
        for slack in range(SLACK + 1 if self.ids else 0):
            over |= self._ends_with(prompt[:, : prompt.shape[1] - slack])
        if self.text:
            tail = prompt[:, -(2 * len(self.ids) + SLACK) :].tolist()
            texts = [self.tokenizer.decode(row).rstrip() for row in tail]
            over |= torch.tensor([text.endswith(self.text) for text in texts], device=prompt.device)
        return over

    def update(self, over: torch.Tensor, generated: torch.Tensor) -> torch.Tensor:
        """Rows past the marker, (B,), now that `generated` (B, n), the tokens after the prompt, has one token more."""
        if not self.ids:
            return over
        over = over | self._ends_with(generated)
        if self.text and not bool(over.all()):
            tail = generated[:, -(len(self.text) + 4) :].tolist()
            found = [
                done or self.text in self.tokenizer.decode(row) for done, row in zip(over.tolist(), tail, strict=True)
            ]
            over = torch.tensor(found, device=over.device)
        return over

    def _ends_with(self, ids: torch.Tensor) -> torch.Tensor:
        n = len(self.ids)
        if ids.shape[1] < n:
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        return (ids[:, -n:] == torch.tensor(self.ids, device=ids.device)).all(-1)
