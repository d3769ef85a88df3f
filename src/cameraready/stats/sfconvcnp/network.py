"""The conditional neural process made of set Fourier convolutions, and coherent samples from it."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional

from cameraready.stats.sfconvcnp.frequencies import Aliasing, FrequencyGrid
from cameraready.stats.sfconvcnp.layers import (
    Grouping,
    Phases,
    SetFourierConv,
    SetFourierVolterraConv,
    check_points,
    phases_of,
    reset_linear,
    working_dtype,
)

SMALLEST_STD = 1e-6


class SFConvCNP(nn.Module):
    """Convolutional conditional neural process without a grid in space (Mohseni et al., 2026, arXiv:2606.01172: SFConvCNP,
    and with `volterra_rank` SFVConvCNP).

    From a context of points with values it predicts a Gaussian at every target. Train it on many tasks of one kind (series,
    sensors, simulations) by maximising the likelihood of held-out points; then one pass predicts for a new task. Moving all
    inputs moves the predictions, and cost is linear in the number of points. Not for a single data set without
    others like it: use a Gaussian process there.

    Parameters
    ----------
    dim_x, dim_y : int
        Dimensions of inputs and outputs.
    width : int
        Channels C.
    n_blocks : int
        Layers of convolution and feed-forward network.
    max_freq, freq_resolution, x_range, aliasing
        The frequency grid, see `SetFourierConv`.
    groups, rank, lengthscale, grouping, mix, normalize
        Passed to every convolution, see there.
    volterra_rank : int, optional
        R > 0 makes the convolutions second-order Volterra ones, and the feed-forward networks linear: all non-linearity is
        then in the products of convolutions.
    activation : {"gelu", "identity"}, optional
        Overrides that choice.
    share_blocks : bool
        Context and targets go through the same weights (by default each has its own).
    generator : torch.Generator, optional
        Source of the initial weights; None draws from torch's default one.

    Examples
    --------
    One step of training; `NeuralProcessRegressor` has the whole loop, for tables and for series of different length.

    >>> import torch
    >>> model = SFConvCNP(freq_resolution="auto", x_range=10.0)
    >>> x, phase = 10 * torch.rand(16, 40, 1), 6 * torch.rand(16, 1, 1)  # 16 tasks of 40 points
    >>> y = torch.sin(x + phase)
    >>> loss = -model(x[:, :15], y[:, :15], x[:, 15:]).log_prob(y[:, 15:]).mean()
    >>> loss.backward()
    """

    def __init__(
        self,
        dim_x: int = 1,
        dim_y: int = 1,
        *,
        width: int = 32,
        n_blocks: int = 3,
        max_freq: float = 4.9,
        freq_resolution: float | Literal["auto"] = 0.1,
        groups: int = 4,
        rank: int | None = None,
        volterra_rank: int | None = None,
        activation: Literal["gelu", "identity"] | None = None,
        lengthscale: float = 0.05,
        grouping: Grouping = "blocked",
        mix: bool | None = None,
        normalize: Literal["count"] | None = None,
        share_blocks: bool = False,
        x_range: float | None = None,
        aliasing: Aliasing = "warn",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if min(dim_y, n_blocks) < 1:
            raise ValueError(f"dim_y and n_blocks must be at least 1, got {dim_y} and {n_blocks}")
        if activation not in (None, "gelu", "identity"):
            raise ValueError(f"activation must be 'gelu', 'identity' or None, got {activation!r}")
        self.dim_x, self.dim_y = dim_x, dim_y
        self.grid = FrequencyGrid(dim_x, max_freq, freq_resolution, x_range=x_range, aliasing=aliasing)
        smooth = nn.Identity if (activation or ("identity" if volterra_rank else "gelu")) == "identity" else nn.GELU

        def block() -> _Block:
            options: dict[str, Any] = {
                "groups": groups,
                "rank": rank,
                "lengthscale": lengthscale,
                "grouping": grouping,
                "mix": (not volterra_rank) if mix is None else mix,
                "normalize": normalize,
                "grid": self.grid,
            }
            conv: SetFourierConv
            if volterra_rank:
                conv = SetFourierVolterraConv(dim_x, width, width, volterra_rank=volterra_rank, **options)
            else:
                conv = SetFourierConv(dim_x, width, width, **options)
            return _Block(conv, width, smooth)

        self.encode_context = _two_layers(2 * dim_y, width, width)
        self.encode_target = _two_layers(2 * dim_y, width, width)
        self.context_blocks = nn.ModuleList(block() for _ in range(n_blocks))
        self.target_blocks = self.context_blocks if share_blocks else nn.ModuleList(block() for _ in range(n_blocks))
        self.decode = _two_layers(width, width, 2 * dim_y)
        if generator is not None:
            self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights anew, from `generator`."""
        for module in self.modules():
            if isinstance(module, SetFourierConv):
                module.reset_parameters(generator)
            elif isinstance(module, nn.Linear):
                reset_linear(module, generator)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    def forward(self, xc: Tensor, yc: Tensor, xt: Tensor, mask_c: Tensor | None = None) -> Normal:
        """The prediction at every target, given the context.

        Parameters
        ----------
        xc : Tensor (B, N, dim_x)
            Inputs of the context; N may be 0. Without the batch axis a single task. May be of higher precision than the
            weights: differences are taken first.
        yc : Tensor (B, N, dim_y)
            Its outputs. NaN is a missing output; a point without any is no point.
        xt : Tensor (B, T, dim_x)
            Inputs of the targets.
        mask_c : bool Tensor (B, N), optional
            Which context points are there, for batches of tasks of different size.

        Returns
        -------
        torch.distributions.Normal
            Of shape (B, T, dim_y): the marginal of each output. Targets do not see each other, so that the sum of their
            log-probabilities is not that of the targets together; see `sample`.

        Raises
        ------
        ValueError
            Shapes that do not fit, inputs that are not finite, an infinite output.
        """
        single = xc.ndim == yc.ndim == xt.ndim == 2
        if single:
            xc, yc, xt = xc[None], yc[None], xt[None]
            mask_c = None if mask_c is None else mask_c[None]
        check_points(yc, xc, xt, mask_c, self.dim_y, self.dim_x)
        dtype = next(self.decode.parameters()).dtype
        there, yc, missing = _observed(yc, mask_c, dtype)
        to_target, to_context = phases_of(self.grid, xc, xt, there, working_dtype(yc))
        zc = self.encode_context(torch.cat([yc, missing], dim=-1))
        unknown = yc.new_tensor([0.0] * self.dim_y + [1.0] * self.dim_y).expand(len(xt), xt.shape[1], -1)
        zt = self.encode_target(unknown)
        for on_context, on_target in zip(self.context_blocks, self.target_blocks, strict=True):
            zc = on_context(zc, zc, to_context, there)
            zt = on_target(zt, zc, to_target, there)
        mean, spread = self.decode(zt[0] if single else zt).chunk(2, dim=-1)
        return Normal(mean, functional.softplus(spread) + SMALLEST_STD, validate_args=False)

    @torch.no_grad()
    def sample(
        self,
        xc: Tensor,
        yc: Tensor,
        xt: Tensor,
        mask_c: Tensor | None = None,
        *,
        n_samples: int = 1,
        chunk: int = 1,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Joint samples at the targets: each drawn value becomes context for the next (autoregressive sampling).

        Targets are visited in random order, another one for every call. T passes of growing context; with `chunk` targets
        at a time T / `chunk` passes, and no dependence within a chunk.

        Parameters
        ----------
        xc, yc, xt, mask_c
            As in `forward`, with or without the batch axis.
        n_samples, chunk : int
        generator : torch.Generator, optional
            Source of the order and the draws, on the model's device.

        Returns
        -------
        Tensor (n_samples, B, T, dim_y), without B for a single task
        """
        if min(n_samples, chunk) < 1:
            raise ValueError(f"n_samples and chunk must be at least 1, got {n_samples} and {chunk}")
        if xc.ndim == 2:
            mask = None if mask_c is None else mask_c[None]
            one = self.sample(xc[None], yc[None], xt[None], mask, n_samples=n_samples, chunk=chunk, generator=generator)
            return one[:, 0]
        batch, targets, _ = xt.shape
        if mask_c is None:
            mask_c = torch.ones(xc.shape[:2], dtype=torch.bool, device=xc.device)
        xc, yc, mask_c, xt = (each.repeat(n_samples, *[1] * (each.ndim - 1)) for each in (xc, yc, mask_c, xt))
        order = torch.randperm(targets, generator=generator, device=xt.device)
        drawn = yc.new_empty(n_samples * batch, targets, self.dim_y)
        for part in order.split(chunk):
            found = self(xc, yc, xt[:, part], mask_c)
            noise = torch.randn(found.loc.shape, generator=generator, dtype=found.loc.dtype, device=found.loc.device)
            drawn[:, part] = (found.loc + found.scale * noise).to(drawn.dtype)
            xc, yc = torch.cat([xc, xt[:, part]], 1), torch.cat([yc, drawn[:, part]], 1)
            mask_c = torch.cat([mask_c, mask_c.new_ones(len(mask_c), len(part))], 1)
        return drawn.view(n_samples, batch, targets, self.dim_y)


class _Block(nn.Module):
    """Pre-norm: q + conv(norm(v)), then q + feed-forward(norm(q))."""

    def __init__(self, conv: SetFourierConv, width: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.norm_values, self.norm_query = nn.LayerNorm(width), nn.LayerNorm(width)
        self.conv = conv
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), activation(), nn.Linear(4 * width, width))

    def forward(self, query: Tensor, values: Tensor, phases: Phases, mask: Tensor | None) -> Tensor:
        query = query + self.conv.convolve(self.norm_values(values), phases, mask)
        return query + self.feed_forward(self.norm_query(query))


def _two_layers(dim_in: int, width: int, dim_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim_in, width), nn.GELU(), nn.Linear(width, dim_out))


def _observed(yc: Tensor, mask: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor, Tensor]:
    """Which points have an output (None: all), the outputs with zeros for the missing, and flags of the missing."""
    absent = torch.isnan(yc)
    if mask is not None:
        absent = absent | ~mask[..., None]
    if torch.isinf(torch.where(absent, 0, yc)).any():
        raise ValueError("an output of the context is infinite; a missing one is NaN")
    some = bool(absent.any())
    there = ~absent.all(-1) if mask is not None or some else None
    return there, torch.where(absent, 0, yc).to(dtype), absent.to(dtype)
