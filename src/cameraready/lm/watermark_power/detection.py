"""Is a text watermarked? The exact binomial test, with what repeats counted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from cameraready.lm.watermark_power.plan import Plan
from cameraready.lm.watermark_power.theory.tails import check_alpha

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Detection:
    """What was found in each text; arrays (texts,).

    Attributes
    ----------
    green, scored : integer arrays
        Green tokens among the scored ones. A list and a token that occur again are scored once (unless repeats were asked for).
    p_value : array
        Probability of as many green tokens in text written without the key, exactly; 1 where nothing could be scored.
    z_score : array
        ``(green - share * scored) / sqrt(scored share (1 - share))``, for comparison with other tools; NaN where nothing could be scored.
    share : float
        Green share of the vocabulary.
    """

    green: np.ndarray
    scored: np.ndarray
    p_value: np.ndarray
    z_score: np.ndarray
    share: float

    def is_watermarked(self, alpha: float) -> np.ndarray:
        """Booleans: p-value at most `alpha`. For any length; one in 1 / alpha unwatermarked texts is called watermarked."""
        check_alpha(alpha)
        return self.p_value <= alpha


def exact_detect(
    token_ids: Any,
    config: Any,
    vocab_size: Any = None,
    *,
    skip: int = 0,
    count_repeats: bool = False,
    device: str = "cpu",
) -> Detection:
    """Test texts for a green-list watermark, exactly.

    Parameters
    ----------
    token_ids : tensor or array (length,) or (texts, length), or a list of sequences of any lengths
        Without padding, and without a leading beginning-of-text token that was not in the prompt.
    config : Plan, transformers.WatermarkingConfig, or dict
        The watermark, with its key. Also MarkLLM's KGW dict. A `Plan` stands for transformers' default key.
    vocab_size : int or model or model config
        Width of the model's logits, which is often more than ``len(tokenizer)``: another number gives other lists. Not needed with a plan that
        knows it.
    skip : int
        Leading tokens that serve as context alone: the length of the prompt, where it is there. The first new token can be scored then.
    count_repeats : bool
        True scores every token, as transformers and MarkLLM do by default. Repeats are not independent, so that the false-positive rate is
        not kept on text that repeats itself.
    device : str
        Where the text was written; the generators of CPU and CUDA give different lists for one key.

    Returns
    -------
    Detection

    Notes
    -----
    Two positions whose list and token agree have the same answer, whatever else stands before them; so this pair is what is counted once.
    Under "selfhash" with ``context_width=1`` the list depends on the token alone, so that every kind of token is scored once.
    transformers counts n-grams of the full context instead, of which "lefthash" with ``context_width > 1`` has several for one pair.
    One permutation of the vocabulary a distinct seed, O(vocab_size) each, over all texts together.
    """
    import torch

    from cameraready.lm.watermark_power.schemes import GreenLists, ngrams_of

    if isinstance(config, Plan):
        vocab_size = vocab_size if vocab_size is not None else config.vocab_size
        config = config.to_transformers()
    lists = GreenLists.of(config, _width(vocab_size), device)
    texts = _texts(token_ids)
    if not isinstance(skip, (int, np.integer)) or skip < 0:
        raise ValueError(f"skip must be a whole number of at least 0, got {skip!r}")
    outside = [int(text.max()) for text in texts if text.size and (text.max() >= lists.vocab_size or text.min() < 0)]
    if outside:
        raise ValueError(
            f"token ids go up to {max(outside)} (or below 0), but vocab_size is {lists.vocab_size}: pass the width of the model's logits, and no padding"
        )
    grams, owner = ngrams_of(texts, lists.context, skip, device)
    n = len(texts)
    green, scored = np.zeros(n, dtype=int), np.zeros(n, dtype=int)
    if len(grams):
        seeds = lists.seeds(grams)
        token = grams[:, -1]
        keys, where = torch.unique(torch.stack([seeds, token], dim=1), dim=0, return_inverse=True)
        hits = lists.green(keys[:, 0], keys[:, 1]).cpu().numpy()
        where = where.cpu().numpy()
        if not count_repeats:
            pairs = np.unique(owner * np.int64(len(keys)) + where)
            owner, where = pairs // len(keys), pairs % len(keys)
        scored = np.bincount(owner, minlength=n)
        green = np.bincount(owner, weights=hits[where], minlength=n).astype(int)
    share = lists.share
    with np.errstate(invalid="ignore", divide="ignore"):
        z = (green - share * scored) / np.sqrt(scored * share * (1 - share))
    return Detection(green, scored, stats.binom.sf(green - 1, scored, share), z, share)


def _width(vocab_size: Any) -> int:
    """The width of the logits, from a number, a model or a model's configuration."""
    source = getattr(vocab_size, "config", vocab_size)
    if hasattr(source, "get_text_config"):
        source = source.get_text_config().vocab_size
    if isinstance(source, (int, np.integer)) and not isinstance(source, bool) and source > 1:
        return int(source)
    raise ValueError(
        f"vocab_size must be the width of the model's logits (model.config.vocab_size), or the model, got {type(vocab_size).__name__}"
        + (f" {vocab_size!r}" if isinstance(vocab_size, (int, float)) else "")
    )


def _texts(token_ids: torch.Tensor | Sequence[Any]) -> list[np.ndarray]:
    """Texts as integer arrays, whatever holds them."""
    for name in ("sequences", "input_ids"):
        if hasattr(token_ids, name):
            raise TypeError(f"token_ids must be the ids alone: pass .{name} of what you have")
    if hasattr(token_ids, "detach"):
        token_ids = token_ids.detach().cpu().numpy()
    if isinstance(token_ids, np.ndarray):
        rows = [token_ids] if token_ids.ndim == 1 else list(token_ids)
    else:
        rows = list(token_ids)
        if not rows or np.isscalar(rows[0]) or getattr(rows[0], "ndim", 1) == 0:
            rows = [rows]
    arrays = [np.asarray(row.detach().cpu() if hasattr(row, "detach") else row) for row in rows]
    for array in arrays:
        if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
            raise TypeError(
                f"token ids must be whole numbers, one sequence a text, got {array.dtype} of shape {array.shape}"
            )
        if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
            raise ValueError(f"there is no token {array.max()}")
    return [array.astype(np.int64) for array in arrays]
