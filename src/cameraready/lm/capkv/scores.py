"""How much each cached token tells: the log-determinant capacity of a set of key-value pairs, and what one token adds.

A layer's output is taken for a linear-Gaussian observation of the pairs that are kept. Token i contributes its value v_i
with prior power w_i, what future queries are expected to make of it, and is seen in noise of variance sigma^2. What a
set R tells is

    I(R) = 1/2 log det(1 + sigma^-2 sum_{i in R} w_i v_i v_i^T),

and taking token i out of the full set costs exactly -1/2 log(1 - s_i), where with A = sigma^2 1 + sum_j w_j v_j v_j^T

    s_i = w_i v_i^T A^-1 v_i,    0 <= s_i < 1,    sum_i s_i = d - sigma^2 tr A^-1

is its ridge leverage (Yang et al., 2026, arXiv:2604.25975). Nothing here is of size T x T.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, Literal

import torch

Similarity = Literal["cosine", "inner"]

#: Tokens that are worked on at a time; bounds memory on long contexts.
CHUNK = 8192
#: The noise, relative to the largest w ||v||^2 of a head, is held between these: beyond them the order of the scores has
#: reached its limit (pure leverage below, w ||v||^2 above), and numbers would run over.
LEAST, MOST = 1e-12, 1e8


def capkv_scores(
    anchor: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    tau: float = 5.0,
    sigma: float = 1.0,
    similarity: Similarity = "cosine",
    n_sink: int = 4,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """What each cached token adds to the capacity of all of them: its ridge leverage under expected attention.

    Parameters
    ----------
    anchor : tensor, shape (B, H, d)
        The query that stands for future ones, a row a query head, rotated to future positions (see `QueryAnchors`).
    keys, values : tensors, shapes (B, Hkv, T, d) and (B, Hkv, T, dv)
        As they are cached, keys after rotary positions; H is a multiple of Hkv, neighbouring query heads share a key head.
        float16 and bfloat16 are accumulated in float32.
    tau : float
        How sharply relevance follows the similarity of key and anchor; 0 leaves the geometry of values alone.
    sigma : float, positive
        Standard deviation of the noise, in units of the values. Far below ``sqrt(w) ||v||`` the score is the pure leverage,
        which no longer looks at w; far above, it is ``w ||v||^2``.
    similarity : {"cosine", "inner"}
        ``"cosine"``: w_i = exp(tau (cos_i - max cos)), as kvpress's CapPress has it. ``"inner"``: w_i = exp(tau <k_i, mu>), as the
        paper has it, computed without overflow.
    n_sink : int
        The first real tokens of each row; they are kept whatever they tell, and take no part in A.
    attention_mask : tensor, shape (B, T), optional
        1 for real tokens, 0 for padding on the left.

    Returns
    -------
    tensor, shape (B, Hkv, T), float32 (float64 for float64 input)
        Scores in [0, 1), up to rounding, averaged over the query heads of a key head; +inf for sinks, -inf for padding.

    Raises
    ------
    ValueError
        Shapes do not fit, or an option is out of its range.

    Notes
    -----
    Time O(Hkv G (T d^2 + d^3)) and memory O(H d^2) beside chunks of the cache, with G = H / Hkv.

    References
    ----------
    Yang et al., 2026, arXiv:2604.25975; NVIDIA/kvpress, `CapPress`.
    """
    weights, values, power, candidates = relevance(
        anchor, keys, values, tau=tau, sigma=sigma, similarity=similarity, n_sink=n_sink, attention_mask=attention_mask
    )
    scores = leverages(weights, values, power).mean(dim=2)
    return marked(scores, candidates, attention_mask)


def greedy_scores(
    anchor: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    n_kept: int,
    *,
    tau: float = 5.0,
    sigma: float = 1.0,
    similarity: Similarity = "cosine",
    n_sink: int = 4,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """What each token adds when the best one is taken again and again: the `n_kept` highest are the greedy choice.

    Unlike `capkv_scores` it sees that copies of a token tell nothing new. The set that it takes has at least (1 - 1/e) of the
    largest log-determinant that any set of its size has (Nemhauser et al., 1978), for which query heads of a key head are averaged.

    Parameters
    ----------
    n_kept : int
        How many tokens each key head keeps, sinks included.
    anchor, keys, values, tau, sigma, similarity, n_sink, attention_mask
        As for `capkv_scores`.

    Returns
    -------
    tensor, shape (B, Hkv, T)
        log(1 + w_i v_i^T B^-1 v_i) with the B of the moment at which token i was taken, or of the end where it was not; +inf for
        sinks, -inf for padding.

    Notes
    -----
    Rank-one updates in float64: time O(n_kept H T d), memory O(H (T + d^2)).
    """
    if isinstance(n_kept, bool) or not isinstance(n_kept, Integral) or n_kept < 0:
        raise ValueError(f"n_kept is a number of tokens, 0 or more, got {n_kept!r}")
    weights, values, power, candidates = relevance(
        anchor, keys, values, tau=tau, sigma=sigma, similarity=similarity, n_sink=n_sink, attention_mask=attention_mask
    )
    gains = greedy_gains(weights, values, power, candidates, max(int(n_kept) - n_sink, 0))
    return marked(gains, candidates, attention_mask)


def marked(scores: torch.Tensor, candidates: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """`scores` (B, Hkv, T) with +inf for what is no candidate (B, T), the sinks, and -inf for padding."""
    scores = scores.masked_fill(~candidates[:, None], torch.inf)
    if attention_mask is None:
        return scores
    return scores.masked_fill(~attention_mask.bool()[:, None], -torch.inf)


# --- relevance ------------------------------------------------------------------------------------------------------


def relevance(
    anchor: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    tau: float,
    sigma: float,
    similarity: Similarity,
    n_sink: int,
    attention_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Expected attention of each token, relative to the largest, and the noise in the same units.

    Returns
    -------
    weights : tensor, shape (B, Hkv, G, T)
        w_i over the largest w of the query head; 0 for sinks and padding.
    values : tensor, shape (B, Hkv, T, d)
        As given, with padding zeroed.
    power : tensor, shape (B, Hkv, G)
        sigma^2 over the same. Scores depend on w and sigma^2 through their ratio alone, so that dividing both by the
        largest w changes nothing and nothing overflows. Cosines are defined relative to the largest: there it is sigma^2.
        Held between `LEAST` and `MOST` times the largest w ||v||^2.
    candidates : bool tensor, shape (B, T)
        Tokens that are neither sink nor padding.
    """
    check_shapes(anchor, keys, values, attention_mask)
    check_options(tau, sigma, similarity, n_sink)
    if attention_mask is not None:  # what stands in padding may be anything, also NaN
        hidden = ~attention_mask.to(keys.device).bool()[:, None, :, None]
        keys, values = keys.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
    check_finite(anchor=anchor, keys=keys, values=values)
    working = working_dtype(anchor, keys, values)
    batch, kv_heads, length, _ = keys.shape
    anchor = anchor.to(working).unflatten(1, (kv_heads, -1))
    # Every key is cast once; a (B, H, T) matrix of products is as small as the scores themselves.
    if similarity == "cosine":
        anchor = torch.nn.functional.normalize(anchor, dim=-1)
    products = [
        torch.matmul(anchor, _directions(chunk.to(working), similarity).transpose(-1, -2))
        for chunk in keys.split(CHUNK, dim=2)
    ]
    logits = tau * (torch.cat(products, dim=-1) if products else anchor.new_zeros(*anchor.shape[:3], 0))
    candidates = candidate_tokens(batch, length, n_sink, attention_mask, keys.device)
    logits = logits.masked_fill(~candidates[:, None, None], -torch.inf)
    power = torch.full(logits.shape[:3], sigma**2, dtype=working, device=keys.device)
    if length == 0:
        return logits, values, power, candidates
    largest = logits.amax(dim=-1, keepdim=True)
    largest = torch.where(largest.isfinite(), largest, 0.0)  # a row without candidates
    weights = _exponential(logits - largest).masked_fill(~candidates[:, None, None], 0.0)
    squares = torch.cat([chunk.to(working).square().sum(-1) for chunk in values.split(CHUNK, dim=2)], dim=-1)
    scale = (weights * squares.unsqueeze(2)).amax(-1).clamp_min(torch.finfo(working).tiny)
    if similarity == "inner":
        # In logarithms: exp(-max) alone may run over.
        log_power = power.log() - largest[..., 0] - scale.log()
        power = scale * torch.exp(log_power.clamp(math.log(LEAST), math.log(MOST)))
    else:
        power = torch.maximum(torch.minimum(power, MOST * scale), LEAST * scale)
    return weights, values, power, candidates


def _exponential(logits: torch.Tensor) -> torch.Tensor:
    """exp, which below e^-60 falls slowly instead of vanishing: weights too small to matter still keep their order."""
    deep = (-60.0 - logits).clamp_min(0.0)
    return torch.exp(logits.clamp_min(-60.0)) / (1.0 + deep)


def _directions(keys: torch.Tensor, similarity: Similarity) -> torch.Tensor:
    return torch.nn.functional.normalize(keys, dim=-1) if similarity == "cosine" else keys


def candidate_tokens(
    batch: int, length: int, n_sink: int, attention_mask: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """Bool (B, T): real tokens after the first `n_sink` real ones of their row."""
    if attention_mask is None:
        return (torch.arange(length, device=device) >= n_sink).expand(batch, length)
    real = attention_mask.to(device).bool()
    return real & (real.long().cumsum(-1) > n_sink)


# --- leverage and greedy choice ---------------------------------------------------------------------------------------


def leverages(weights: torch.Tensor, values: torch.Tensor, power: torch.Tensor | float) -> torch.Tensor:
    """s_i = w_i v_i^T A^-1 v_i for every query head, by one Cholesky factor a head.

    Parameters
    ----------
    weights : tensor, shape (B, Hkv, G, T)
        w_i, not negative.
    values : tensor, shape (B, Hkv, T, d)
        Any float dtype; the work is done in that of `weights`.
    power : tensor of shape (B, Hkv, G), or float
        sigma^2, the ridge.

    Returns
    -------
    tensor, shape (B, Hkv, G, T)
    """
    factor = capacity_factor(weights, values, power)
    size = values.shape[-1]
    eye = torch.eye(size, dtype=factor.dtype, device=factor.device)
    # L^-1 of a d x d matrix, then one product for all query heads of a key head: s_i = w_i |L^-1 v_i|^2 is never negative.
    inverse = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
    every = inverse.flatten(2, 3).transpose(-1, -2)  # (B, Hkv, d, G d)
    norms = [
        torch.matmul(chunk.to(factor.dtype), every).unflatten(-1, (-1, size)).square().sum(-1)
        for chunk in values.split(CHUNK, dim=2)
    ]
    return weights * torch.cat(norms, dim=2).transpose(2, 3).to(weights.dtype)


def capacity_factor(weights: torch.Tensor, values: torch.Tensor, power: torch.Tensor | float) -> torch.Tensor:
    """The lower Cholesky factor of A = sigma^2 1 + sum_i w_i v_i v_i^T, shape (B, Hkv, G, d, d).

    In the dtype of `weights`. Where rounding of the sum exceeds sigma^2 (values of very large norm), in float64.
    """
    factor, failed = torch.linalg.cholesky_ex(_capacity(weights, values, power))
    if not failed.any():
        return factor
    exact = _capacity(weights.double(), values, power.double() if isinstance(power, torch.Tensor) else power)
    factor, failed = torch.linalg.cholesky_ex(exact)
    if failed.any():  # sigma is below the resolution of float64: the least ridge that rounding leaves
        least = 1e-13 * exact.diagonal(dim1=-2, dim2=-1).amax(-1)
        exact.diagonal(dim1=-2, dim2=-1).add_(least[..., None])
        factor = torch.linalg.cholesky(exact)
    return factor


def _capacity(weights: torch.Tensor, values: torch.Tensor, power: torch.Tensor | float) -> torch.Tensor:
    size = values.shape[-1]
    total = weights.new_zeros(*weights.shape[:3], size, size)
    for weight, value in zip(weights.split(CHUNK, dim=-1), values.split(CHUNK, dim=2), strict=True):
        scaled = value.to(weights.dtype).unsqueeze(2) * weight.sqrt().unsqueeze(-1)
        total += torch.matmul(scaled.transpose(-1, -2), scaled)
    ridge = power[..., None] if isinstance(power, torch.Tensor) else power
    total.diagonal(dim1=-2, dim2=-1).add_(ridge)
    return total


def greedy_gains(
    weights: torch.Tensor, values: torch.Tensor, power: torch.Tensor, candidates: torch.Tensor, n: int
) -> torch.Tensor:
    """What each candidate adds to the mean log-determinant of a key head's query heads, at its turn; shape (B, Hkv, T).

    `n` candidates are taken one after the other, each the one that adds most. Let B be the capacity of those taken so far:
    with c_i = v_i^T B^-1 v_i token i adds log(1 + w_i c_i), and taking j lowers every c_i by (v_i^T u)^2, u the scaled B^-1 v_j.
    """
    wanted = weights.dtype
    if weights.device.type != "mps":  # which has no float64; differences of many steps add up
        weights, power = weights.double(), power.double()
    values = values.to(weights.dtype)
    batch, kv_heads, groups, length = weights.shape
    size = values.shape[-1]
    eye = torch.eye(size, dtype=weights.dtype, device=weights.device)
    inverse = eye / power[..., None, None]  # (B, Hkv, G, d, d)
    contained = values.square().sum(-1).unsqueeze(2) / power[..., None]  # c, (B, Hkv, G, T)
    open_ = candidates[:, None].expand(batch, kv_heads, length).clone()
    gains = weights.new_full((batch, kv_heads, length), -torch.inf)
    for _ in range(min(n, length)):
        gain = torch.log1p(weights * contained).mean(dim=2).masked_fill(~open_, -torch.inf)
        best, chosen = gain.max(dim=-1, keepdim=True)
        some = best.isfinite()  # False in a row that has no candidates left
        gains.scatter_(-1, chosen, torch.where(some, best, gains.gather(-1, chosen)))
        open_.scatter_(-1, chosen, open_.gather(-1, chosen) & ~some)
        value = values.gather(2, chosen.unsqueeze(-1).expand(-1, -1, -1, size))  # (B, Hkv, 1, d)
        at = chosen.unsqueeze(2).expand(-1, -1, groups, -1)
        weight, inside = weights.gather(-1, at), contained.gather(-1, at)  # (B, Hkv, G, 1)
        scale = torch.where(some.unsqueeze(2), weight / (1 + weight * inside), 0.0).sqrt()
        update = torch.matmul(inverse, value.transpose(-1, -2).unsqueeze(2)).squeeze(-1) * scale  # u, (B, Hkv, G, d)
        inverse -= update.unsqueeze(-1) * update.unsqueeze(-2)
        along = torch.matmul(update, values.transpose(-1, -2))  # (B, Hkv, G, T)
        contained = (contained - along.square()).clamp_min(0.0)
    left = torch.log1p(weights * contained).mean(dim=2)
    return torch.where(open_, left, gains).to(wanted)


def information(weights: torch.Tensor, values: torch.Tensor, power: torch.Tensor | float = 1.0) -> torch.Tensor:
    """I = 1/2 log det(1 + sigma^-2 sum_i w_i v_i v_i^T) of the pairs given, in nats, shape (B, Hkv, G).

    Give the weight 0 to a pair that is not in the set. Parameters as for `leverages`.
    """
    factor = capacity_factor(weights, values, power)
    logdet = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    noise = torch.as_tensor(power, dtype=logdet.dtype, device=logdet.device).log()
    return 0.5 * (logdet - values.shape[-1] * noise)


# --- checks -----------------------------------------------------------------------------------------------------------


def working_dtype(*tensors: torch.Tensor) -> torch.dtype:
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def check_shapes(
    anchor: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attention_mask: torch.Tensor | None
) -> None:
    shapes = f"anchor {tuple(anchor.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)}"
    if anchor.ndim != 3 or keys.ndim != 4 or values.ndim != 4:
        raise ValueError(f"the anchor is (B, H, d), keys and values are (B, Hkv, T, d); got {shapes}")
    if keys.shape[:3] != values.shape[:3] or anchor.shape[0] != keys.shape[0] or anchor.shape[-1] != keys.shape[-1]:
        raise ValueError(f"batch, key heads, tokens and head size must agree; got {shapes}")
    if keys.shape[1] == 0 or anchor.shape[1] % keys.shape[1]:
        raise ValueError(f"query heads must be a multiple of key heads; got {shapes}")
    if attention_mask is not None and not isinstance(attention_mask, torch.Tensor):
        raise TypeError(f"the attention mask is a tensor (B, T), got {type(attention_mask).__name__}")
    if attention_mask is not None and attention_mask.shape != (keys.shape[0], keys.shape[2]):
        raise ValueError(
            f"the attention mask is (B, T) = {(keys.shape[0], keys.shape[2])}, got {tuple(attention_mask.shape)}"
        )
    if attention_mask is not None:
        check_left(attention_mask)


def check_left(attention_mask: torch.Tensor) -> None:
    """Raise a ValueError where a row of (B, T) has padding after a real token: stored pairs would no longer lie under their mask."""
    real = attention_mask.bool()
    if (real[:, :-1] & ~real[:, 1:]).any():
        raise ValueError(
            "a row of the attention mask has padding behind or between real tokens; contexts are padded on the left "
            "(tokenizer.padding_side = 'left'), as generation needs"
        )


def check_finite(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        # float8 knows no such question.
        if not (tensor if tensor.element_size() > 1 else tensor.float()).isfinite().all():
            raise ValueError(
                f"the {name} hold NaN or infinity; a model in float16 overflows on some inputs, bfloat16 and float32 do not"
            )


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def check_options(tau: float, sigma: float, similarity: str, n_sink: int) -> None:
    if not is_number(tau) or not 0 <= tau < math.inf:
        raise ValueError(f"tau is a sharpness, 0 or more, got {tau!r}")
    if not is_number(sigma) or not 1e-15 <= sigma <= 1e15:
        raise ValueError(f"sigma is a standard deviation between 1e-15 and 1e15, got {sigma!r}")
    if similarity not in ("cosine", "inner"):
        raise ValueError(f"similarity is 'cosine' or 'inner', got {similarity!r}")
    if isinstance(n_sink, bool) or not isinstance(n_sink, Integral) or n_sink < 0:
        raise ValueError(f"n_sink is a number of tokens, 0 or more, got {n_sink!r}")
