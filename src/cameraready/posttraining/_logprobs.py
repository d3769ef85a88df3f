"""Log-probabilities and entropies of the tokens that a model wrote, without a block of tokens times vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cameraready.posttraining._endings import Ending, at_rest, ending_of, positions_of, takes
from cameraready.posttraining._masks import FEEDBACK, PADDING, PROMPT, loss_mask, masked_mean, spread

if TYPE_CHECKING:
    from cameraready.models import Anatomy

__all__ = [
    "FEEDBACK",
    "IGNORED",
    "PADDING",
    "PROMPT",
    "Ending",
    "ScoringHead",
    "TokenScores",
    "at_rest",
    "check_targets",
    "chunk_size",
    "completion_logprobs",
    "ending_of",
    "loss_mask",
    "masked_mean",
    "positions_of",
    "spread",
    "takes",
    "token_logprobs",
]

#: Targets with this number are skipped, as everywhere in PyTorch.
IGNORED = -100
#: Entries of the largest block of logits that is made or turned into float32 at once (64 MiB), unless `chunk` says otherwise.
LARGEST = 1 << 24


class TokenScores(NamedTuple):
    """Log-probabilities of tokens and, where asked for, entropies of the distributions they were drawn from; both in nats."""

    logps: Tensor
    entropies: Tensor | None = None


def token_logprobs(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, chunk: int | None = None, entropy: bool = False
) -> TokenScores:
    """Log-probability of each target under softmax(logits / temperature), and the entropy of that distribution.

    Use it where logits are there already; `completion_logprobs` does not even make them all.

    Parameters
    ----------
    logits : Tensor of shape (..., L, V)
        Of any floating dtype. Half precision becomes float32 first, a chunk of tokens at a time; float64 stays. -inf removes a token
        from the vocabulary.
    targets : LongTensor of shape (..., L)
        -100 is skipped: 0 for both numbers, and no gradient.
    temperature : float
        Above 0.
    chunk : int, optional
        Tokens worked on at once; by default so many that a block takes 64 MiB in float32.
    entropy : bool
        Whether entropies are wanted. They are differentiable too.

    Returns
    -------
    TokenScores of Tensors of shape (..., L), float32 (float64 for float64 logits)
        -inf for a target of probability 0, whose gradient, and everybody else's, stays finite.

    Raises
    ------
    ValueError
        Shapes do not fit, the temperature is not above 0, or a target is outside the vocabulary.

    Notes
    -----
    For the backward pass nothing of the size of the logits is kept beyond the logits themselves; their gradient, in their dtype, is the only
    other block of that size. It can be differentiated once. Where all logits of a token are -inf both numbers are NaN, as log_softmax has it.
    """
    _check_temperature(temperature)
    if not logits.is_floating_point() or logits.ndim < 2 or not logits.shape[-1]:
        raise ValueError(f"logits must be floating (..., L, V) with V > 0, got {logits.dtype} {tuple(logits.shape)}")
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"targets {tuple(targets.shape)} must be the logits' shape {tuple(logits.shape)} without V")
    check_targets(targets, logits.shape[-1])
    size = chunk_size(chunk, logits.shape[-1])
    logps, entropies = _Scores.apply(logits, targets.long(), float(temperature), size, entropy)
    return TokenScores(logps, entropies if entropy else None)


class _Scores(torch.autograd.Function):
    """Forward and backward a chunk of tokens at a time; only the logits as they came and a few numbers a token are kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, chunk: int, entropy: bool) -> Any:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logps, totals, entropies = (torch.zeros(targets.shape, dtype=dtype, device=logits.device) for _ in range(3))
        blocks = _blocks(chunk, logits, targets, logps, totals, entropies)
        for block, wanted, logp, total, spread_out in blocks:
            scaled = block.to(dtype) / temperature
            total.copy_(scaled.logsumexp(-1))
            found = scaled.gather(-1, wanted.clamp_min(0)[:, None])[:, 0] - total
            logp.copy_(found.where(wanted >= 0, 0.0))
            if entropy:
                shares = scaled.sub_(total[:, None]).exp()
                # 0 * -inf is the limit 0.
                spread_out.copy_(-(shares * scaled.masked_fill_(shares == 0, 0.0)).sum(-1).where(wanted >= 0, 0.0))
        ctx.temperature, ctx.chunk, ctx.entropy = temperature, chunk, entropy
        ctx.save_for_backward(logits, targets, totals, entropies)
        return logps, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, from_logps: Tensor, from_entropies: Tensor) -> Any:
        logits, targets, totals, entropies = ctx.saved_tensors
        gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        given = from_logps.contiguous(), from_entropies.contiguous()
        blocks = _blocks(ctx.chunk, logits, targets, totals, entropies, *given, gradient)
        for block, wanted, total, spread_out, above, above_entropy, target in blocks:
            kept = wanted >= 0
            above = above.where(kept, 0.0)
            shifted = (block.to(total.dtype) / ctx.temperature).sub_(total[:, None])
            if ctx.entropy:
                slope = shifted.exp()
                bend = shifted.masked_fill_(slope == 0, 0.0).add_(spread_out[:, None]).mul_(slope)
                slope.mul_(-above[:, None]).sub_(bend.mul_(above_entropy.where(kept, 0.0)[:, None]))
            else:
                slope = shifted.exp_().mul_(-above[:, None])
            slope.scatter_add_(-1, wanted.clamp_min(0)[:, None], above[:, None])
            target.copy_(slope.div_(ctx.temperature).masked_fill_(~kept[:, None], 0.0))
        return gradient, None, None, None, None


def _blocks(chunk: int, logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of at most `chunk` tokens of all tensors, as views: logits (n, V), others (n,) or (n, V)."""
    if all(tensor.is_contiguous() for tensor in (logits, *others)):
        depth = logits.ndim - 1
        flat = [tensor.view(-1, *tensor.shape[depth:]) for tensor in (logits, *others)]
        for start in range(0, len(flat[0]), chunk):
            yield tuple(tensor[start : start + chunk] for tensor in flat)
    elif logits.ndim == 2:
        for start in range(0, len(logits), chunk):
            yield tuple(tensor[start : start + chunk] for tensor in (logits, *others))
    else:  # a slice of a larger block of logits is not copied to be made flat
        for parts in zip(*(tensor.unbind(0) for tensor in (logits, *others)), strict=True):
            yield from _blocks(chunk, *parts)


def completion_logprobs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    completion_length: int,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    entropy: bool = False,
) -> TokenScores:
    """Log-probabilities of the last `completion_length` tokens of each row, as the model gives them.

    The model runs once; its head runs on a chunk of tokens at a time and once more in the backward pass, so that logits of all tokens at
    once (which with 150,000 words take more memory than the rest) never exist. Use it for losses of policy gradients. It is slower than the
    plain way by one more multiplication with the head.

    Parameters
    ----------
    model : nn.Module
        A causal language model of transformers, wrapped or not (PEFT, accelerate, data parallelism); called through its outermost
        wrapper, in the mode that it is in.
    input_ids : LongTensor of shape (B, T)
        Prompt and completion, padded on the left, the right or both.
    attention_mask : Tensor of shape (B, T), or None
        0 at padding, which gets the numbers 0 and no gradient. Positions are counted from the first token that is not padding. A
        completion's token behind padding (where the first token of a row has nothing before it) is predicted from what stands there: keep
        at least one token of prompt.
    completion_length : int
        L, from 1 to T - 1.
    temperature : float
        Above 0; logits are divided by it after the model's own scaling and soft-cap.
    chunk : int, optional
        Tokens whose logits are made at once; by default so many that they take 64 MiB in float32.
    entropy : bool
        Whether entropies are wanted.

    Returns
    -------
    TokenScores of Tensors of shape (B, L), float32 or float64

    Raises
    ------
    ValueError
        Shapes, ids, temperature or chunk are out of range.
    cameraready.models.UnknownArchitecture
        The model makes its logits in a way that is not known; use ``token_logprobs(model(...).logits, ...)`` there.
    """
    from cameraready.models import UnknownArchitecture

    _check_temperature(temperature)
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids must be whole numbers, got {input_ids.dtype}")
    input_ids = input_ids.long()
    if input_ids.ndim != 2 or not 1 <= completion_length < input_ids.shape[1]:
        raise ValueError(
            f"completion_length must be from 1 to T - 1 for input_ids (B, T), got {completion_length} and {tuple(input_ids.shape)}"
        )
    if not len(input_ids):
        raise ValueError("input_ids has no rows")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask {tuple(attention_mask.shape)} and input_ids {tuple(input_ids.shape)} must be of one shape"
        )
    parts = ending_of(model)
    targets = input_ids[:, -completion_length:].masked_fill(attention_mask[:, -completion_length:] == 0, IGNORED)
    lowest, highest = int(input_ids.min()), int(input_ids.max())
    if lowest < 0 or highest >= parts.vocab_size:
        raise ValueError(
            f"input_ids go from {lowest} to {highest}, but the vocabulary has the ids 0 to {parts.vocab_size - 1}; -100 belongs into labels"
        )
    work = ScoringHead(parts, targets, float(temperature), chunk_size(chunk, parts.vocab_size), entropy)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    if takes(model, "position_ids"):
        inputs["position_ids"] = positions_of(attention_mask)
    with work.instead_of_all_logits():
        output = model(**inputs)
    if work.scores is None:
        raise UnknownArchitecture(
            f"{type(model).__name__} never ran its head (it may fuse head and loss); use token_logprobs(model(...).logits, ...)."
        )
    work.check(output)
    return work.scores


class ScoringHead:
    """Scores tokens inside the model's own forward pass, at its head, where wrappers have gathered weights and set precisions."""

    def __init__(self, parts: Ending | Anatomy, targets: Tensor, temperature: float, chunk: int, entropy: bool) -> None:
        self.parts, self.targets = parts, targets
        self.temperature, self.chunk, self.entropy = temperature, chunk, entropy
        self.scores: TokenScores | None = None
        self._sample: Tensor | None = None
        self._inside = False

    @contextmanager
    def instead_of_all_logits(self) -> Iterator[None]:
        """While it lasts, the head is given one token in place of all; the completion's are scored beside it."""
        before = self.parts.head.register_forward_pre_hook(self._before, with_kwargs=True)
        behind = self.parts.head.register_forward_hook(self._behind)
        try:
            yield
        finally:
            before.remove()
            behind.remove()

    def _before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside:
            return None
        name = None if args else next(iter(kwargs))
        hidden = args[0] if name is None else kwargs[name]
        self._inside = True
        try:
            self.scores = self._scored(hidden)
        finally:
            self._inside = False
        few = hidden[:1, -1:]
        return ((few, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: few})

    def _behind(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if not self._inside:
            self._sample = output.detach()

    def _scored(self, hidden: Tensor) -> TokenScores:
        length = self.targets.shape[1]
        if hidden.ndim != 3 or hidden.shape[1] <= length or hidden.shape[0] != self.targets.shape[0]:
            raise ValueError(
                f"the head was given {tuple(hidden.shape)}, which does not hold {length} tokens and the one before"
            )
        rows = hidden[:, -length - 1 : -1].flatten(0, 1)
        targets = self.targets.to(hidden.device).flatten()
        places = (targets != IGNORED).nonzero()[:, 0]
        if not len(places):
            places = places.new_zeros(1)  # so that every weight has its gradient, of zero
        found = [self._chunk(rows[part], targets[part]) for part in places.split(self.chunk)]
        logps, entropies = (torch.cat([scores[i] for scores in found]) for i in range(2))
        return TokenScores(
            *(
                torch.zeros(len(targets), dtype=values.dtype, device=values.device)
                .scatter(0, places, values)
                .view_as(self.targets)
                if wanted
                else None
                for values, wanted in ((logps, True), (entropies, self.entropy))
            )  # type: ignore[arg-type]
        )

    def _chunk(self, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        # `run` knows nothing of `self`: the graph that keeps it would keep its own outcome, and never be freed without a backward pass.
        head, finish, options = self.parts.head, self.parts.finish, (self.temperature, self.chunk, self.entropy)

        def run(rows: Tensor) -> tuple[Tensor, Tensor]:
            logits = head(rows[None])[0]
            for step in finish:
                logits = step(logits)
            return _Scores.apply(logits, targets, *options)

        return checkpoint(run, rows, use_reentrant=False) if torch.is_grad_enabled() else run(rows)

    def check(self, output: Any) -> None:
        """The model's own logits of one token must be those of its head and the scaling known of it."""
        from cameraready.models import UnknownArchitecture

        logits = getattr(output, "logits", None)
        if logits is None or self._sample is None:
            return
        ours = self._sample
        for step in self.parts.finish:
            ours = step(ours)
        half = any(tensor.dtype.itemsize < 4 for tensor in (ours, logits))
        theirs = logits.detach().to(ours.device, torch.float32)
        off = (ours.float() - theirs).abs().max()
        if off > (2e-2 if half else 1e-4) * theirs.abs().max():
            raise UnknownArchitecture(
                f"{type(self.parts.model).__name__} does something to its logits that is not known; use "
                "token_logprobs(model(...).logits, ...)."
            )


def chunk_size(chunk: int | None, vocabulary: int) -> int:
    """Tokens whose logits are made at once: `chunk`, which is checked, or so many that they take 64 MiB in float32."""
    if chunk is None:
        return max(1, LARGEST // vocabulary)
    if isinstance(chunk, bool) or not hasattr(chunk, "__index__"):
        raise TypeError(f"chunk must be a whole number of tokens, got {chunk!r}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    return int(chunk)


def _check_temperature(temperature: float) -> None:
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be above 0, got {temperature}")


def check_targets(targets: Tensor, vocabulary: int) -> None:
    """Raise ValueError unless all targets are -100 or ids of the vocabulary."""
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(f"targets must be whole numbers, got {targets.dtype}")
    kept = targets[targets != IGNORED]
    if len(kept) and not (int(kept.min()) >= 0 and int(kept.max()) < vocabulary):
        raise ValueError(
            f"targets go from {int(kept.min())} to {int(kept.max())}, but the vocabulary has the ids 0 to {vocabulary - 1} "
            "(-100 is skipped)"
        )
