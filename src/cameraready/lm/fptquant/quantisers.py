"""Static integer quantisers, simulated in floating point: range search, straight-through rounding, learned ranges."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

#: Values kept a site for the range search; the extremes are kept besides.
KEPT = 1 << 14


@dataclass(frozen=True)
class QuantConfig:
    """What is quantised, and to how many bits; None leaves a thing in full precision.

    Attributes
    ----------
    weights : int or None
        Symmetric, one scale an output channel; the projections of the decoder layers. Embedding and head stay.
    activations : int or None
        Inputs of those projections: static, one range for the whole tensor (queries, keys and values share their input, as do gate and up).
    kv : int or None
        Keys (after RoPE) and values as the cache holds them: static, one range a KV head.
    residual : int or None
        The residual stream before each sub-block: static, one range for the whole tensor. What an integer-only
        accelerator does, and what ``residual_scale`` is for.
    symmetric : bool
        Whether ranges of activations and of the cache are symmetric about zero; the default is affine, with a zero point.
    dynamic : bool
        Ranges of activations from each token as it comes, as SpinQuant and QuaRot do, in place of static ones. The cache stays static.
    p : float
        Ranges are searched on a grid that minimises the mean of |error|^p.
    """

    weights: int | None = 4
    activations: int | None = 4
    kv: int | None = 4
    residual: int | None = None
    symmetric: bool = False
    dynamic: bool = False
    p: float = 2.0

    def __post_init__(self) -> None:
        for name in ("weights", "activations", "kv", "residual"):
            bits = getattr(self, name)
            if bits is not None and (isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 16):
                raise ValueError(f"{name} must be a number of bits from 2 to 16, or None, got {bits!r}")
        if not self.p > 0:
            raise ValueError(f"p must be positive, got {self.p}")

    def describe(self) -> str:
        """``"W4A4KV4"``, 16 standing for full precision; ``R`` the residual stream, where it is quantised."""
        text = f"W{self.weights or 16}A{self.activations or 16}KV{self.kv or 16}"
        return text + (f"R{self.residual}" if self.residual else "")


def levels(bits: int, symmetric: bool) -> tuple[int, int]:
    """Lowest and highest integer: (-8, 7) or, with a zero point, (0, 15) for 4 bits."""
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if symmetric else (0, (1 << bits) - 1)


def round_through(x: Tensor) -> Tensor:
    """x rounded half to even, with the gradient of the identity."""
    return x + (x.round() - x).detach()


def fake_quantise(x: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    """`x` on its integer grid: scale * (clamp(round(x / scale) + zero) - zero).

    Parameters
    ----------
    x : Tensor
        Any shape, floating.
    scale, zero : Tensor
        Broadcast against `x`; `zero` None means symmetric. Gradients flow to all three (straight through the rounding).
    bits : int

    Returns
    -------
    Tensor
        Shape and dtype of `x`; the arithmetic is in float32, or float64 if `x` is.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    low, high = levels(bits, zero is None)
    scaled = round_through(wide / scale)
    if zero is None:
        return (scaled.clamp(low, high) * scale).to(x.dtype)
    shift = round_through(zero)
    return (((scaled + shift).clamp(low, high) - shift) * scale).to(x.dtype)


def search_range(
    rows: Tensor, bits: int, *, symmetric: bool, p: float = 2.0, grid: int = 48
) -> tuple[Tensor, Tensor | None]:
    """Scale (R,) and zero point (R,) or None that minimise the mean of |x - quantised x|^p for each of `rows` (R, N).

    The full range is shrunk in `grid` steps, evenly down to a half and then geometrically to a hundredth (ranges with massive outliers);
    for affine ranges each end is then refined by itself. A row that is zero gets scale 1.
    """
    x = rows.detach()
    x = x if x.dtype == torch.float64 else x.float()
    even = torch.linspace(1.0, 0.5, grid // 2)
    shrink = torch.cat((even, torch.logspace(math.log10(0.48), -2, grid - grid // 2)))
    if symmetric:
        reach = x.abs().amax(-1)
        low, high = _best(x, -reach, reach, [(float(c), float(c)) for c in shrink], bits, symmetric=True, p=p)
        return _grid(low, high, bits, symmetric=True)
    low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
    low, high = _best(x, low, high, [(float(c), float(c)) for c in shrink], bits, symmetric=False, p=p)
    alone = [float(c) for c in torch.linspace(1.3, 0.4, grid // 2)]
    low, high = _best(x, low, high, [(1.0, 1.0), *((c, 1.0) for c in alone)], bits, symmetric=False, p=p)
    low, high = _best(x, low, high, [(1.0, 1.0), *((1.0, c) for c in alone)], bits, symmetric=False, p=p)
    return _grid(low, high, bits, symmetric=False)


def _grid(low: Tensor, high: Tensor, bits: int, *, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    lowest, highest = levels(bits, symmetric)
    if symmetric:
        scale = high / highest
        return torch.where(scale > 0, scale, torch.ones_like(scale)), None
    scale = (high - low) / (highest - lowest)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return scale, (-low / scale).round().clamp(lowest, highest)


def _best(
    x: Tensor, low: Tensor, high: Tensor, factors: list[tuple[float, float]], bits: int, *, symmetric: bool, p: float
) -> tuple[Tensor, Tensor]:
    best = torch.full_like(low, torch.inf)
    found = low, high
    for below, above in factors:
        tried = low * below, high * above
        scale, zero = _grid(*tried, bits, symmetric=symmetric)
        error = (fake_quantise(x, scale[:, None], None if zero is None else zero[:, None], bits) - x).abs()
        loss = (error.square_() if p == 2 else error.pow_(p)).mean(-1)
        better = loss < best
        best = torch.where(better, loss, best)
        found = torch.where(better, tried[0], found[0]), torch.where(better, tried[1], found[1])
    return found


class StaticQuantiser(nn.Module):
    """A range for a whole tensor or for each head, searched on samples, then frozen or learned.

    Parameters
    ----------
    bits : int
    symmetric : bool
    heads : int
        0: one range for the tensor; else one for each entry of the second dimension of (batch, heads, tokens, D).
    p : float
        Exponent of the search.

    Notes
    -----
    `mode` is ``"off"`` (the identity), ``"observe"`` (the identity, keeping a sample) or ``"on"``. The sample is thinned evenly, so that rare
    massive tokens keep their frequency, and holds the extremes besides.
    """

    def __init__(self, bits: int, *, symmetric: bool, heads: int = 0, p: float = 2.0):
        super().__init__()
        self.bits, self.symmetric, self.heads, self.p = bits, symmetric, heads, p
        self.mode: Literal["off", "observe", "on"] = "off"
        rows = max(heads, 1)
        self.log_scale = nn.Parameter(torch.zeros(rows))
        self.zero = None if symmetric else nn.Parameter(torch.zeros(rows))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "off":
            return x
        if self.mode == "observe":
            self.seen.append(self._thin(x.detach()))
            return x
        scale, zero = self.log_scale.exp(), self.zero
        if self.heads:
            scale, zero = scale[:, None, None], None if zero is None else zero[:, None, None]
        return fake_quantise(x, scale, zero, self.bits)

    def _thin(self, x: Tensor) -> Tensor:
        rows = x.transpose(0, 1).flatten(1) if self.heads else x.reshape(1, -1)
        step = max(1, rows.shape[1] // KEPT)
        while math.gcd(step, x.shape[-1]) > 1:  # such a stride would see the same channels of every token
            step += 1
        extremes = torch.stack((rows.amin(-1), rows.amax(-1)), dim=1)
        return torch.cat((rows[:, ::step], extremes), dim=1).float()

    @torch.no_grad()
    def search(self) -> None:
        """Set the range from what was observed, forget it, and switch on."""
        if not self.seen:
            raise RuntimeError("a quantiser saw no activations; run the calibration text through the model first")
        rows = torch.cat(self.seen, dim=1)
        step = max(1, rows.shape[1] // (2 * KEPT))
        extremes = torch.stack((rows.amin(-1), rows.amax(-1)), dim=1)
        rows = torch.cat((rows[:, :: step + (step % 2 == 0)], extremes), dim=1)
        scale, zero = search_range(rows, self.bits, symmetric=self.symmetric, p=self.p)
        self.log_scale.copy_(scale.log())
        if self.zero is not None and zero is not None:
            self.zero.copy_(zero)
        self.seen, self.mode = [], "on"


class TokenQuantiser(nn.Module):
    """Ranges taken from each token as it comes: dynamic quantisation, for comparisons."""

    def __init__(self, bits: int, *, symmetric: bool):
        super().__init__()
        self.bits, self.symmetric = bits, symmetric
        self.mode: Literal["off", "observe", "on"] = "off"

    def forward(self, x: Tensor) -> Tensor:
        if self.mode != "on":
            return x
        wide = x.detach().float()
        if self.symmetric:
            # Half the whole range a side, as compressed-tensors has it: the largest value of a token is rounded down.
            scale, zero = wide.abs().amax(-1) / (((1 << self.bits) - 1) / 2), None
            scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        else:
            low, high = wide.amin(-1).clamp(max=0), wide.amax(-1).clamp(min=0)
            scale, zero = _grid(low, high, self.bits, symmetric=False)
        return fake_quantise(x, scale[..., None], None if zero is None else zero[..., None], self.bits)

    def search(self) -> None:
        """Nothing to search; switches on."""
        self.mode = "on"


class WeightQuantiser(nn.Module):
    """Symmetric, one scale an output channel, searched on the weight itself, then frozen or learned."""

    def __init__(self, bits: int, channels: int, *, p: float = 2.0):
        super().__init__()
        self.bits, self.p = bits, p
        self.mode: Literal["off", "observe", "on"] = "off"
        self.log_scale = nn.Parameter(torch.zeros(channels))

    def forward(self, weight: Tensor) -> Tensor:
        return fake_quantise(weight, self.log_scale.exp()[:, None], None, self.bits) if self.mode == "on" else weight

    @torch.no_grad()
    def search(self, weight: Tensor, *, grid: int = 32) -> None:
        """Set the scales for `weight` (out, in), and switch on."""
        parts = [
            search_range(rows, self.bits, symmetric=True, p=self.p, grid=grid)[0]
            for rows in weight.split(max(1, (1 << 22) // weight.shape[1]))
        ]
        self.log_scale.copy_(torch.cat(parts).log())
        self.mode = "on"


def quantiser_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Ranges of all quantisers of a model."""
    for module in model.modules():
        if isinstance(module, (StaticQuantiser, WeightQuantiser)):
            yield from module.parameters()


def checked(batches: Iterable[Tensor], vocabulary: int) -> list[Tensor]:
    """The batches as a list; ValueError for none, or for one that is no (batch, tokens) tensor of ids below `vocabulary`."""
    texts = list(batches) if not isinstance(batches, Tensor) else [batches]
    if not texts:
        raise ValueError("there is no batch of token ids to calibrate on")
    for ids in texts:
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
            got = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(f"a batch must be a tensor of token ids, shape (batch, tokens), got {got}")
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise ValueError(
                f"token ids must be from 0 to {vocabulary - 1}, the model's vocabulary, got {int(ids.min())} to {int(ids.max())}: is the "
                "tokenizer the model's own?"
            )
    return texts
