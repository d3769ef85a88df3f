"""The set Fourier convolution, from scattered features to features anywhere, and its second-order Volterra version.

Every sum is over points and frequencies themselves: no grid in space, no FFT. Real and imaginary parts are kept side by side
in real tensors, so that casts, optimizers and mixed precision treat them as they treat any other number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from cameraready.stats.sfconvcnp.frequencies import Aliasing, FrequencyGrid, centred

Grouping = Literal["blocked", "interleaved"]
SMALLEST_LENGTH = 1e-5


@dataclass(frozen=True)
class Phases:
    """Phases of a batch of tasks, computed once and shared by all layers on the same frequency grid.

    Attributes
    ----------
    values, query : Tensor (B, N, 2 F) and (B, Q, 2 F)
        Cosines, then sines; zero where a value is absent.
    density : Tensor (B, 2 F, 1)
        Sum over the points present.
    count : Tensor (B, 1, 1)
        How many there are, at least 1.
    """

    values: Tensor
    query: Tensor
    density: Tensor
    count: Tensor


def phases_of(
    grid: FrequencyGrid, x_values: Tensor, x_query: Tensor, mask: Tensor | None, dtype: torch.dtype
) -> tuple[Phases, Phases]:
    """Phases for convolving from the values to the query, and to the values themselves, computed in `dtype`."""
    near, far = centred(x_values, x_query, mask, grid)
    values, query = grid.phases(near, dtype), grid.phases(far, dtype)
    at_values = values
    if mask is not None:
        values = values * mask[..., None]
        count = mask.sum(1).clamp(min=1).to(dtype)[:, None, None]
    else:
        count = values.new_full((len(values), 1, 1), max(values.shape[1], 1))
    density = values.sum(1)[..., None]
    return Phases(values, query, density, count), Phases(values, at_values, density, count)


class SetFourierConv(nn.Module):
    """Convolution of scattered points: real features at points of R^D become features at any points (Mohseni et al., 2026,
    arXiv:2606.01172, the SFConv layer).

    Density and features are transformed by exact Fourier sums over the points, damped by a learned Gaussian for every
    channel, multiplied by a complex matrix for every frequency, and transformed back at the query. Moving all points moves
    the output. Time O((N + Q) F C + F C^2 / groups) and memory O((N + Q) F) a task, with F frequencies: use it for
    scattered points in one or two dimensions, in three with ``groups=out_channels`` or `rank`; on a full regular grid an FFT
    is faster.

    Parameters
    ----------
    spatial_dim : int
        D.
    in_channels, out_channels : int
    max_freq, freq_resolution, x_range, aliasing
        The frequency grid, see `FrequencyGrid`: highest frequency and step, in cycles a unit of x; or the step ``"auto"``
        with the widest task that there will be.
    groups : int
        The 2 `in_channels` channels (densities, features) and the `out_channels` are split into so many groups with a
        matrix each.
    rank : int, optional
        Each matrix is a product of two with this inner dimension.
    lengthscale : float
        Where the Gaussians' length scales start, in units of x.
    grouping : {"blocked", "interleaved"}
        How channels are split: [all densities | all features] into contiguous groups, so that the first groups see
        densities alone (the paper's); or each group with densities and features of its own channels.
    mix : bool
        A linear layer over the output channels at the end.
    normalize : {None, "count"}
        ``"count"`` divides by the number of points: a mean instead of a sum, for sets whose sizes differ by orders.
    grid : FrequencyGrid, optional
        To share one among layers; takes the place of `max_freq`, `freq_resolution`, `x_range` and `aliasing`.
    generator : torch.Generator, optional
        Source of the initial weights.

    Raises
    ------
    ValueError
        Channels that the groups do not divide, a grid without or with too many frequencies; from `forward`, shapes that
        do not fit or inputs that are not finite.
    """

    kernels = 1

    def __init__(
        self,
        spatial_dim: int,
        in_channels: int,
        out_channels: int,
        max_freq: float = 4.9,
        freq_resolution: float | Literal["auto"] = 0.1,
        *,
        groups: int = 1,
        rank: int | None = None,
        lengthscale: float = 0.05,
        grouping: Grouping = "blocked",
        mix: bool = False,
        normalize: Literal["count"] | None = None,
        x_range: float | None = None,
        aliasing: Aliasing = "warn",
        grid: FrequencyGrid | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        _check_channels(in_channels, out_channels, groups, rank, grouping)
        if normalize not in (None, "count"):
            raise ValueError(f"normalize must be None or 'count', got {normalize!r}")
        if not lengthscale > SMALLEST_LENGTH:
            raise ValueError(f"lengthscale must be above {SMALLEST_LENGTH:g}, got {lengthscale!r}")
        self.grid = grid or FrequencyGrid(spatial_dim, max_freq, freq_resolution, x_range=x_range, aliasing=aliasing)
        if self.grid.dim != spatial_dim:
            raise ValueError(f"the grid given has {self.grid.dim} dimensions, spatial_dim is {spatial_dim}")
        self.spatial_dim, self.in_channels, self.out_channels = spatial_dim, in_channels, out_channels
        self.groups, self.rank, self.grouping, self.normalize = groups, rank, grouping, normalize
        self.lengthscale = float(lengthscale)
        self.raw_lengthscale = nn.Parameter(torch.empty(spatial_dim, in_channels))
        blocks = len(self.grid), groups
        inner, outer = 2 * in_channels // groups, self.kernels * out_channels // groups
        shapes = [(inner, outer)] if rank is None else [(inner, rank), (rank, outer)]
        #: Matrices of every frequency and group, real and imaginary part last: (F, groups, in, out, 2).
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(*blocks, *shape, 2)) for shape in shapes)
        self.mixing = nn.Linear(out_channels, out_channels) if mix else None
        self._add_parameters()
        self.reset_parameters(generator)

    def _add_parameters(self) -> None:
        """What a subclass has beyond these."""

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights anew: complex normal, with variance 1 / (inputs x outputs) of a group's matrix."""
        start = self.lengthscale - SMALLEST_LENGTH
        with torch.no_grad():
            self.raw_lengthscale.fill_(start + math.log(-math.expm1(-start)))  # the inverse of softplus
            inner, outer = 2 * self.in_channels // self.groups, self.out_channels // self.groups
            variances = [1 / (inner * outer)] if self.rank is None else [1 / inner, 1 / (self.rank * outer)]
            for weight, variance in zip(self.weights, variances, strict=True):
                weight.normal_(0.0, math.sqrt(variance / 2), generator=generator)
        if self.mixing is not None:
            reset_linear(self.mixing, generator)

    def forward(
        self, z_values: Tensor, x_query: Tensor, x_values: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Features at the query.

        Parameters
        ----------
        z_values : Tensor (B, N, in_channels)
            Features at the points; N may be 0.
        x_query : Tensor (B, Q, D)
        x_values : Tensor (B, N, D), optional
            The points; None means that they are the query.
        mask : bool Tensor (B, N), optional
            Which points are there: the others leave the density as well as the features.

        Returns
        -------
        Tensor (B, Q, out_channels), of the dtype of `z_values`
        """
        x_values = x_query if x_values is None else x_values
        check_points(z_values, x_values, x_query, mask, self.in_channels, self.spatial_dim)
        to_query, _ = phases_of(self.grid, x_values, x_query, mask, working_dtype(z_values))
        return self.convolve(z_values, to_query, mask)

    def convolve(self, z_values: Tensor, phases: Phases, mask: Tensor | None = None) -> Tensor:
        """`forward` with phases that were computed before, on the layer's own grid."""
        if mask is not None:
            z_values = torch.where(mask[..., None], z_values, 0)  # an absent NaN times zero would stay
        # In at least float32, also under autocast: sums over thousands of points have no digits left in float16.
        with torch.autocast(z_values.device.type, enabled=False):
            out = self._kernels(z_values.to(phases.values.dtype), phases)
            out = self._combine(out)
            if self.mixing is not None:
                out = functional.linear(out, self.mixing.weight.to(out.dtype), self.mixing.bias.to(out.dtype))
        return out.to(z_values.dtype)

    def lengthscales(self) -> Tensor:
        """Length scales of the envelope, (D, in_channels), in units of x."""
        return SMALLEST_LENGTH + functional.softplus(self.raw_lengthscale)

    def envelope(self, dtype: torch.dtype) -> Tensor:
        """Transform of exp(-x^2 / 2 l^2) at the grid's frequencies, (F, in_channels)."""
        lengths = self.lengthscales().to(dtype)
        squared = (self.grid.frequencies.to(dtype) ** 2) @ (lengths**2)
        peak = (2 * math.pi) ** (self.spatial_dim / 2) * lengths.prod(0)
        return peak * torch.exp(-2 * math.pi**2 * squared)

    def _kernels(self, z: Tensor, phases: Phases) -> Tensor:
        """All kernels' outputs side by side, (B, Q, kernels x out_channels)."""
        sums = phases.values.transpose(1, 2) @ z
        density = phases.density
        if self.normalize == "count":
            sums, density = sums / phases.count, density / phases.count
        spectrum = self._grouped(density.expand_as(sums), sums)
        for weight in self._damped_weights(z.dtype):
            spectrum = _multiply(spectrum, weight)
        # The real part of the spectrum's product with exp(i a); opposite frequencies are in the grid's weights.
        return phases.query @ self._ungrouped(spectrum)

    def _damped_weights(self, dtype: torch.dtype) -> list[Tensor]:
        """The matrices, the first with the envelope and the half space's weights in its rows: cheaper than in every task."""
        damping = self.envelope(dtype) * self.grid.weights.to(dtype)[:, None]
        rows = self._by_group(damping, damping)
        first, *rest = (weight.to(dtype) for weight in self.weights)
        return [first * rows[..., None, None], *rest]

    def _combine(self, out: Tensor) -> Tensor:
        return out

    def _by_group(self, density: Tensor, features: Tensor) -> Tensor:
        """(..., C) twice -> (..., groups, 2 C / groups)."""
        if self.grouping == "blocked":
            return torch.cat([density, features], dim=-1).unflatten(-1, (self.groups, -1))
        split = (self.groups, -1)
        return torch.cat([density.unflatten(-1, split), features.unflatten(-1, split)], dim=-1)

    def _grouped(self, density: Tensor, features: Tensor) -> Tensor:
        """(B, 2 F, C) twice -> (F, groups, 2 B, 2 C / groups): a batch of cosine sums, then one of sine sums."""
        batch, count, _ = density.shape
        both = self._by_group(density, features).view(batch, 2, count // 2, self.groups, -1)
        return both.permute(2, 3, 1, 0, 4).reshape(count // 2, self.groups, 2 * batch, -1)

    def _ungrouped(self, spectrum: Tensor) -> Tensor:
        """(F, groups, 2 B, kernels x C / groups) -> (B, 2 F, kernels x C), kernels outermost."""
        count, groups, twice, _ = spectrum.shape
        parts = spectrum.view(count, groups, 2, twice // 2, self.kernels, -1)
        return parts.permute(3, 2, 0, 4, 1, 5).reshape(twice // 2, 2 * count, -1)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, dim={self.spatial_dim}, frequencies={len(self.grid)},"
            f" max_freq={self.grid.max_freq:g}, freq_resolution={self.grid.resolution:g}, groups={self.groups},"
            f" rank={self.rank}"
        )


class SetFourierVolterraConv(SetFourierConv):
    """Set Fourier convolution of second order: a convolution plus products of `volterra_rank` pairs of convolutions
    (Mohseni et al., 2026, arXiv:2606.01172, the SFVConv layer).

    y = k_0 * z + sum_r w_r (k_{r,1} * z)(k_{r,2} * z), a second-order Volterra series with a separable kernel; it is
    non-linear without an activation. Arguments and shapes are those of `SetFourierConv`.

    Parameters
    ----------
    volterra_rank : int
        R, the number of products; 2 R + 1 kernels in all.
    """

    def __init__(
        self,
        spatial_dim: int,
        in_channels: int,
        out_channels: int,
        max_freq: float = 4.9,
        freq_resolution: float | Literal["auto"] = 0.1,
        *,
        volterra_rank: int = 2,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        if volterra_rank < 1:
            raise ValueError(f"volterra_rank must be at least 1, got {volterra_rank!r}")
        self.kernels = 2 * volterra_rank + 1
        super().__init__(
            spatial_dim,
            in_channels,
            out_channels,
            max_freq,
            freq_resolution,
            generator=generator,
            **options,
        )

    def _add_parameters(self) -> None:
        self.product_weights = nn.Parameter(torch.empty(self.kernels // 2))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        super().reset_parameters(generator)
        bound = 1 / math.sqrt(len(self.product_weights))
        with torch.no_grad():
            self.product_weights.uniform_(-bound, bound, generator=generator)

    def _combine(self, out: Tensor) -> Tensor:
        batch, query, _ = out.shape
        out = out.view(batch, query, self.kernels, self.out_channels)
        products = out[:, :, 1::2] * out[:, :, 2::2]
        return out[:, :, 0] + torch.einsum("bqrc,r->bqc", products, self.product_weights.to(out.dtype))


# --- pieces ---------------------------------------------------------------------------------------------------------


def _multiply(spectrum: Tensor, weight: Tensor) -> Tensor:
    """Complex matrix product for every frequency and group, in one real one.

    A spectrum c - i s is held as the batch of c followed by that of s: (F, G, 2 B, in) x (F, G, in, out, 2) -> (F, G, 2 B, out).
    """
    count, groups, twice, inner = spectrum.shape
    products = torch.bmm(spectrum.flatten(0, 1), weight.reshape(count * groups, inner, -1))
    cosine, sine = products.view(count, groups, 2, twice // 2, -1, 2).unbind(2)
    # (c - i s)(a + i b) = (c a + s b) - i (s a - c b)
    both = torch.stack([cosine[..., 0] + sine[..., 1], sine[..., 0] - cosine[..., 1]], dim=2)
    return both.view(count, groups, twice, -1)


def working_dtype(z: Tensor) -> torch.dtype:
    """The dtype of sums over points: that of the features, at least float32."""
    return torch.promote_types(z.dtype, torch.float32)


def reset_linear(layer: nn.Linear, generator: torch.Generator | None) -> None:
    """torch's own initialisation of a linear layer, from `generator`."""
    bound = 1 / math.sqrt(layer.in_features)
    with torch.no_grad():
        layer.weight.uniform_(-bound, bound, generator=generator)
        if layer.bias is not None:
            layer.bias.uniform_(-bound, bound, generator=generator)


def _check_channels(in_channels: int, out_channels: int, groups: int, rank: int | None, grouping: str) -> None:
    if min(in_channels, out_channels, groups) < 1:
        raise ValueError(f"channels and groups must be at least 1, got {in_channels}, {out_channels} and {groups}")
    if grouping not in ("blocked", "interleaved"):
        raise ValueError(f"grouping must be 'blocked' or 'interleaved', got {grouping!r}")
    divided = 2 * in_channels if grouping == "blocked" else in_channels
    if divided % groups or out_channels % groups:
        raise ValueError(
            f"{groups} groups do not divide {divided} channels in ({grouping}) and {out_channels} out evenly"
        )
    if rank is not None and rank < 1:
        raise ValueError(f"rank must be at least 1 or None, got {rank!r}")


def check_points(
    z_values: Tensor, x_values: Tensor, x_query: Tensor, mask: Tensor | None, channels: int, dim: int
) -> None:
    """Raise ValueError or TypeError where shapes, types or inputs do not fit."""
    for name, tensor in (("z_values", z_values), ("x_values", x_values), ("x_query", x_query)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a tensor of real floating-point numbers, got {got}")
        if tensor.ndim != 3 or not len(tensor):
            raise ValueError(f"{name} must have the shape (tasks, points, channels), got {tuple(tensor.shape)}")
    if z_values.shape[:2] != x_values.shape[:2] or z_values.shape[0] != x_query.shape[0]:
        raise ValueError(
            f"tasks or points differ: values {tuple(z_values.shape)} at {tuple(x_values.shape)}, query"
            f" {tuple(x_query.shape)}"
        )
    if z_values.shape[2] != channels or x_values.shape[2] != dim or x_query.shape[2] != dim:
        raise ValueError(
            f"expected {channels} channels at points of dimension {dim}, got values {tuple(z_values.shape)}, points"
            f" {tuple(x_values.shape)} and query {tuple(x_query.shape)}"
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != z_values.shape[:2]):
        raise ValueError(
            f"mask must be boolean of shape {tuple(z_values.shape[:2])}, got {mask.dtype} of shape {tuple(mask.shape)}"
        )
    there = x_values if mask is None else torch.where(mask[..., None], x_values, 0)
    if not (torch.isfinite(there).all() and torch.isfinite(x_query).all()):
        raise ValueError("inputs must be finite; leave points without a position out, or mask them")
