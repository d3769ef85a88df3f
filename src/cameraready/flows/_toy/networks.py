"""Small velocity networks of plain operations: a perceptron, a U-Net and a diffusion transformer, for autograd, forward-mode derivatives and vmap."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def seeded(generator: torch.Generator | None) -> torch.Generator:
    """The generator, or one of seed 0: weights never come from torch's global state."""
    return torch.Generator().manual_seed(0) if generator is None else generator


def linear(inputs: int, outputs: int, generator: torch.Generator, *, gain: float = 1.0, bias: bool = True) -> nn.Linear:
    """A linear map with weights N(0, gain^2 / inputs) and bias zero."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias)
    return _filled(layer, inputs, generator, gain)


def convolution(
    inputs: int, outputs: int, generator: torch.Generator, *, size: int = 3, gain: float = 1.0
) -> nn.Conv2d:
    """A convolution that keeps height and width, with weights N(0, gain^2 / (inputs size^2)) and bias zero."""
    layer = nn.utils.skip_init(nn.Conv2d, inputs, outputs, size, padding=size // 2)
    return _filled(layer, inputs * size * size, generator, gain)


def embedding(rows: int, width: int, generator: torch.Generator) -> nn.Embedding:
    """A table with entries N(0, 1)."""
    table = nn.utils.skip_init(nn.Embedding, rows, width)
    with torch.no_grad():
        table.weight.normal_(generator=generator)
    return table


def _filled(
    layer: nn.Linear | nn.Conv2d, fan_in: int, generator: torch.Generator, gain: float
) -> nn.Linear | nn.Conv2d:
    with torch.no_grad():
        layer.weight.normal_(0, gain / math.sqrt(fan_in), generator=generator)
        if layer.bias is not None:
            layer.bias.zero_()
    return layer


def times_of(t: float | Tensor, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Times of the given shape in x's dtype: from a number, a 0-d tensor, or a tensor that broadcasts."""
    time = torch.as_tensor(t, device=x.device)
    if not time.is_floating_point():
        time = time.to(torch.float64)
    if time.dim() > len(shape) or (time.dim() and time.shape[-1] not in (1, shape[-1])):
        raise ValueError(
            f"t must be a number or hold one time for each of the {shape[-1]} states, got {tuple(time.shape)}"
        )
    return time.to(x.dtype).expand(shape)


def time_features(time: Tensor, count: int) -> Tensor:
    """cos and sin of pi 2^(j/2) t for j < count, (..., 2 count): the slowest tells the ends apart, periods halve every other one."""
    rate = math.pi * 2 ** (torch.arange(count, dtype=torch.float32, device=time.device) / 2)
    angle = time[..., None] * rate.to(time.dtype)
    return torch.cat([angle.cos(), angle.sin()], -1)


def labels_of(y: int | Tensor | None, classes: int, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
    """Labels of the given shape; the null label `classes` where y is None; None for a network without classes."""
    if not classes:
        if y is not None:
            raise ValueError("this network knows no classes: call it without labels, or build it with classes=...")
        return None
    if y is None:
        return torch.full(shape, classes, dtype=torch.long, device=device)
    labels = torch.as_tensor(y, device=device)
    if labels.is_floating_point():
        raise ValueError(f"labels are whole numbers, got {labels.dtype}")
    return labels.long().expand(shape)


def looked_up(table: nn.Embedding, labels: Tensor) -> Tensor:
    """Rows of the table; a label out of range is told by its number."""
    try:
        return table(labels)
    except IndexError:
        check_labels(labels, table.num_embeddings - 1)
        raise


def check_labels(labels: Tensor, classes: int) -> None:
    """Raise a ValueError for labels outside 0..classes."""
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high > classes:
        raise ValueError(f"labels must lie in 0..{classes} ({classes} is the null label), got {low}..{high}")


class MLPVelocity(nn.Module):
    """A perceptron of vectors and time, with SiLU and Fourier features of time.

    Parameters
    ----------
    dim : int
        Of the state.
    width, depth : int
        Of the hidden layers, and how many.
    classes : int
        Number of labels, 0 for none; label `classes` is the null label.
    fourier : int
        Frequencies of the time features.
    extra : int
        Width of further inputs, given as ``context``.
    times : int
        How many times the network is given: with 2 or more, ``t`` is a sequence of them.
    generator : torch.Generator, optional
        For the weights; by default that of seed 0.

    Notes
    -----
    ``forward(x, t, y=None, context=None)``: x (B, dim), t a number, a 0-d or a (B,) tensor, y (B,) long or None for the null label, context (B, extra);
    returns (B, dim). Images of any shape with `dim` numbers are taken and given back in their shape.
    """

    def __init__(
        self,
        dim: int,
        width: int = 256,
        depth: int = 4,
        *,
        classes: int = 0,
        fourier: int = 8,
        extra: int = 0,
        times: int = 1,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        if min(dim, width, depth, fourier, times) < 1 or min(classes, extra) < 0:
            raise ValueError("dim, width, depth, fourier and times must be at least 1, classes and extra at least 0")
        g = seeded(generator)
        self.dim, self.width, self.depth, self.classes = dim, width, depth, classes
        self.fourier, self.extra, self.times = fourier, extra, times
        inputs = dim + extra + times * 2 * fourier
        widths = [inputs, *[width] * depth]
        self.layers = nn.ModuleList(linear(a, b, g, gain=math.sqrt(2)) for a, b in pairwise(widths))
        self.last = linear(width, dim, g)
        self.table = embedding(classes + 1, width, g) if classes else None

    def forward(
        self,
        x: Tensor,
        t: float | Tensor | tuple[float | Tensor, ...],
        y: int | Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        flat = x.reshape(len(x), -1)
        h = torch.cat(inputs_of(self, flat, t, context), -1)
        labels = labels_of(y, self.classes, flat.shape[:1], x.device)
        for number, layer in enumerate(self.layers):
            h = layer(h)
            if number == 0 and labels is not None:
                h = h + looked_up(self.table, labels)
            h = F.silu(h)
        return self.last(h).reshape(x.shape)


def inputs_of(
    net: nn.Module, x: Tensor, t: float | Tensor | tuple[float | Tensor, ...], context: Tensor | None
) -> list[Tensor]:
    """What a perceptron over x (..., B, dim) sees: state, context, features of each time."""
    if x.shape[-1] != net.dim:
        raise ValueError(f"this network's states have {net.dim} numbers, got shape {tuple(x.shape)}")
    times = t if isinstance(t, tuple | list) else (t,)
    if len(times) != net.times:
        raise ValueError(f"this network is given {net.times} time(s), got {len(times)}")
    width = 0 if context is None else context.shape[-1]
    if width != net.extra:
        raise ValueError(f"context must have {net.extra} numbers for each state, got {width}")
    parts = [x] if context is None else [x, context.to(x.dtype).expand(*x.shape[:-1], width)]
    return parts + [time_features(times_of(one, x, x.shape[:-1]), net.fourier) for one in times]


class _Embedding(nn.Module):
    """Time and label as one vector (B, width)."""

    def __init__(self, width: int, classes: int, generator: torch.Generator):
        super().__init__()
        self.classes = classes
        self.first = linear(24, width, generator, gain=math.sqrt(2))
        self.second = linear(width, width, generator)
        self.table = embedding(classes + 1, width, generator) if classes else None

    def forward(self, x: Tensor, t: float | Tensor, y: int | Tensor | None) -> Tensor:
        h = self.second(F.silu(self.first(time_features(times_of(t, x, x.shape[:1]), 12))))
        labels = labels_of(y, self.classes, x.shape[:1], x.device)
        return F.silu(h if labels is None else h + looked_up(self.table, labels))


class _ResidualBlock(nn.Module):
    """Norm, SiLU, convolution, twice; the second norm is scaled and shifted by time and label."""

    def __init__(self, inputs: int, outputs: int, condition: int, generator: torch.Generator):
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)])
        self.first = convolution(inputs, outputs, generator, gain=math.sqrt(2))
        self.second = convolution(outputs, outputs, generator, gain=0.3)
        self.film = linear(condition, 2 * outputs, generator, gain=0.3)
        self.skip = convolution(inputs, outputs, generator, size=1) if inputs != outputs else None

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.film(condition)[..., None, None].chunk(2, 1)
        h = self.first(F.silu(self.norms[0](x)))
        h = self.second(F.silu(self.norms[1](h) * (1 + scale) + shift))
        return (x if self.skip is None else self.skip(x)) + h


class _Attention(nn.Module):
    """Self-attention over tokens (B, N, width), written out (fused kernels have no forward-mode derivative on every device)."""

    def __init__(self, width: int, heads: int, generator: torch.Generator, *, gain: float = 0.3):
        super().__init__()
        self.heads = heads
        self.inner = linear(width, 3 * width, generator)
        self.outer = linear(width, width, generator, gain=gain)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.inner(x).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.mT / math.sqrt(width // self.heads), -1)
        return self.outer((weights @ v).transpose(1, 2).reshape(batch, tokens, width))


class UNet(nn.Module):
    """A two-level U-Net with self-attention at the lower level, conditioned on time and label.

    Parameters
    ----------
    channels, size : int
        Of the images (B, channels, size, size); `size` even.
    width : int
        Channels at full resolution, a multiple of 8; twice as many at half resolution.
    blocks : int
        Residual blocks a level on the way down.
    classes : int
        Number of labels, 0 for none; label `classes` is the null label.
    generator : torch.Generator, optional
        For the weights; by default that of seed 0.
    """

    def __init__(
        self,
        channels: int = 1,
        size: int = 8,
        width: int = 48,
        *,
        blocks: int = 2,
        classes: int = 10,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        if size % 2 or width % 8 or min(channels, size, width, blocks) < 1:
            raise ValueError(f"size must be even and width a multiple of 8, got {size} and {width}")
        g = seeded(generator)
        self.channels, self.size, self.width, self.classes = channels, size, width, classes
        wide, condition = 2 * width, 4 * width
        self.embed = _Embedding(condition, classes, g)
        self.first = convolution(channels, width, g)
        self.down = nn.ModuleList(_ResidualBlock(width, width, condition, g) for _ in range(blocks))
        self.narrow = convolution(width, wide, g)
        self.low = nn.ModuleList(_ResidualBlock(wide, wide, condition, g) for _ in range(blocks))
        self.norm = nn.GroupNorm(8, wide)
        self.attention = _Attention(wide, 4, g)
        self.middle = _ResidualBlock(wide, wide, condition, g)
        self.up_low = _ResidualBlock(2 * wide, wide, condition, g)
        self.widen = convolution(wide, width, g, size=1)
        self.up = _ResidualBlock(2 * width, width, condition, g)
        self.last_norm = nn.GroupNorm(8, width)
        self.last = convolution(width, channels, g)

    def forward(self, x: Tensor, t: float | Tensor, y: int | Tensor | None = None) -> Tensor:
        if x.dim() != 4 or x.shape[1:] != (self.channels, self.size, self.size):
            raise ValueError(
                f"this network takes images (B, {self.channels}, {self.size}, {self.size}), got shape {tuple(x.shape)}"
            )
        condition = self.embed(x, t, y)
        h = self.first(x)
        for block in self.down:
            h = block(h, condition)
        full = h
        h = F.avg_pool2d(self.narrow(h), 2)
        for block in self.low:
            h = block(h, condition)
        half = h
        tokens = self.norm(h).flatten(2).transpose(1, 2)
        h = h + self.attention(tokens).transpose(1, 2).reshape(h.shape)
        h = self.middle(h, condition)
        h = self.up_low(torch.cat([h, half], 1), condition)
        h = self.widen(h)[..., :, None, :, None].expand(-1, -1, -1, 2, -1, 2).reshape(full.shape)
        h = self.up(torch.cat([h, full], 1), condition)
        return self.last(F.silu(self.last_norm(h)))


class _TransformerBlock(nn.Module):
    """Attention and perceptron, each after a norm that time and label scale and shift, each gated by them."""

    def __init__(self, width: int, heads: int, generator: torch.Generator):
        super().__init__()
        self.attention = _Attention(width, heads, generator, gain=1.0)
        self.inner = linear(width, 4 * width, generator, gain=math.sqrt(2))
        self.outer = linear(4 * width, width, generator)
        self.modulation = linear(width, 6 * width, generator, gain=0.2)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale1, shift1, gate1, scale2, shift2, gate2 = self.modulation(condition)[:, None].chunk(6, -1)
        x = x + gate1 * self.attention(_normed(x) * (1 + scale1) + shift1)
        return x + gate2 * self.outer(F.silu(self.inner(_normed(x) * (1 + scale2) + shift2)))


def _normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


class TinyDiT(nn.Module):
    """A diffusion transformer over patches, conditioned on time and label by adaptive layer norms.

    Parameters
    ----------
    channels, size : int
        Of the images (B, channels, size, size).
    patch : int
        Side of a patch; divides `size`.
    width, depth, heads : int
        Of the tokens, number of blocks, attention heads; `heads` divides `width`.
    classes : int
        Number of labels, 0 for none; label `classes` is the null label.
    generator : torch.Generator, optional
        For the weights; by default that of seed 0.

    Notes
    -----
    After Peebles and Xie, 2023, arXiv:2212.09748, small and with gates that start small rather than at zero, so that a fresh network depends on all inputs.
    """

    def __init__(
        self,
        channels: int = 1,
        size: int = 8,
        *,
        patch: int = 2,
        width: int = 128,
        depth: int = 6,
        heads: int = 4,
        classes: int = 10,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        if size % patch or width % heads or min(channels, size, patch, width, depth, heads) < 1:
            raise ValueError(f"patch must divide size and heads width, got {patch} of {size} and {heads} of {width}")
        g = seeded(generator)
        self.channels, self.size, self.patch, self.width, self.classes = channels, size, patch, width, classes
        self.embed = _Embedding(width, classes, g)
        self.first = linear(channels * patch * patch, width, g)
        self.position = nn.Parameter(torch.empty((size // patch) ** 2, width).normal_(generator=g))
        self.blocks = nn.ModuleList(_TransformerBlock(width, heads, g) for _ in range(depth))
        self.modulation = linear(width, 2 * width, g, gain=0.2)
        self.last = linear(width, channels * patch * patch, g)

    def forward(self, x: Tensor, t: float | Tensor, y: int | Tensor | None = None) -> Tensor:
        if x.dim() != 4 or x.shape[1:] != (self.channels, self.size, self.size):
            raise ValueError(
                f"this network takes images (B, {self.channels}, {self.size}, {self.size}), got shape {tuple(x.shape)}"
            )
        condition = self.embed(x, t, y)
        side, p = self.size // self.patch, self.patch
        cut = x.reshape(-1, self.channels, side, p, side, p).permute(0, 2, 4, 1, 3, 5)
        h = self.first(cut.reshape(len(x), side * side, -1)) + self.position
        for block in self.blocks:
            h = block(h, condition)
        scale, shift = self.modulation(condition)[:, None].chunk(2, -1)
        h = self.last(_normed(h) * (1 + scale) + shift)
        cut = h.reshape(-1, side, side, self.channels, p, p).permute(0, 3, 1, 4, 2, 5)
        return cut.reshape(x.shape)
