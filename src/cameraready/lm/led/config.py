"""What latent exploration decoding can be told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Exploit = Literal["confidence", "never"]
Normaliser = Literal["exact", "candidates"]


@dataclass(frozen=True)
class LEDConfig:
    """Settings of latent exploration decoding (Tan et al., 2026, arXiv:2602.01698).

    Parameters
    ----------
    depth : int
        d, the number of layers whose predictions are looked at: the final one and the `depth` - 1 below it. With 1 the law is
        plain top-k sampling. The authors use 8 on models of 28 layers and more; in a small model only the last two to four share
        candidates with the final one.
    top_k : int
        k, the number of candidates: the tokens that the final layer likes best.
    exploit : {"confidence", "never"}
        ``"confidence"`` samples from the final layer with the probability of its best token, and explores otherwise;
        ``"never"`` always explores.
    think_end : str, sequence of int, or None
        What ends the thinking phase, as text (a tokenizer is needed then; it may be several tokens) or as token ids. After it the law is plain
        top-k sampling. None explores to the end, for models without a thinking phase.
    apply_final_norm : bool
        Whether hidden states of lower layers pass the final norm before the head, as in the paper's analysis. False feeds them as they
        are, which is the default of the authors' launch script.
    normaliser : {"exact", "candidates"}
        ``"exact"`` normalises each lower layer over the whole vocabulary. ``"candidates"`` normalises it over the candidates alone, which needs `top_k`
        rows of the head instead of all of it, and is an approximation: layers that put little on the candidates then count in full.
    floor : float
        What probabilities of candidates are raised to before they are added up (not a floor on the outcome). Candidates that the final
        layer gives exactly zero, masked ones say, are dropped before.
    """

    depth: int = 8
    top_k: int = 8
    exploit: Exploit = "confidence"
    think_end: str | Sequence[int] | None = "</think>"
    apply_final_norm: bool = True
    normaliser: Normaliser = "exact"
    floor: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("depth", "top_k"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name, known in (("exploit", Exploit), ("normaliser", Normaliser)):
            if getattr(self, name) not in get_args(known):
                choices = " or ".join(repr(choice) for choice in get_args(known))
                raise ValueError(f"{name} must be {choices}, got {getattr(self, name)!r}")
        if not (isinstance(self.floor, int | float) and math.isfinite(self.floor) and 0 < self.floor < 1):
            raise ValueError(f"floor must lie between 0 and 1, got {self.floor!r}; the authors use 1e-6")
        object.__setattr__(self, "think_end", _checked_end(self.think_end))


def _checked_end(end: str | Sequence[int] | None) -> str | tuple[int, ...] | None:
    if end is None:
        return None
    if isinstance(end, str):
        if not end.strip():
            raise ValueError("think_end is empty; pass None for a model without a thinking phase")
        return end
    if isinstance(end, int) and not isinstance(end, bool):
        end = (end,)
    try:
        ids = tuple(end)
    except TypeError:
        ids = ()
    if not ids or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(
            f"think_end must be text, token ids, or None for a model without a thinking phase; got {end!r}"
        )
    return ids
