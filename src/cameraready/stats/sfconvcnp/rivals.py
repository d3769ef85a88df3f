"""The models of the study: ours and its variants, those of the library neuralprocesses, and attention over points.

Each is a module called as model(xc, yc, xt) with tensors (B, n, 1) that returns a `torch.distributions.Normal`. All but the
variants have within a tenth of as many parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional

from cameraready.stats.sfconvcnp.network import SFConvCNP

Factory = Callable[[], nn.Module]

# --- ours -----------------------------------------------------------------------------------------------------------------

#: First order: the paper's grid (M = 4.9, step 0.1), groups and mixing, and fewer blocks and channels.
FIRST: dict[str, dict[str, Any]] = {
    "small": {"width": 24, "n_blocks": 3, "groups": 4},
    "paper": {"width": 288, "n_blocks": 6, "groups": 4},
}
#: Second order; the small one of the first's size, which takes 8 groups.
SECOND: dict[str, dict[str, Any]] = {
    "small": {"width": 16, "n_blocks": 3, "groups": 8, "volterra_rank": 2},
    "paper": {"width": 128, "n_blocks": 5, "groups": 4, "volterra_rank": 4},
}
#: How much wider the others become beside the paper's first-order model.
WIDER = {"small": 1.0, "paper": 16.5}


def ours(**options: Any) -> Factory:
    # The paper's period of 10 is below twice the inputs' range of 6; that is its setting, and the models live with it.
    return lambda: SFConvCNP(**{"aliasing": "ignore", **options})


def variants(size: str) -> dict[str, Factory]:
    first, second = FIRST[size], SECOND[size]
    return {
        "sfconv-linear": ours(**first, activation="identity"),
        "sfvconv-r1": ours(**{**second, "volterra_rank": 1}),
        "sfvconv-r4": ours(**{**second, "volterra_rank": 4}),
        "sfvconv-gelu": ours(**second, activation="gelu"),
        "sfconv-m09": ours(**first, max_freq=0.9),
        "sfconv-m99": ours(**first, max_freq=9.9),
    }


VARIANTS = tuple(variants("small"))


# --- the library neuralprocesses ----------------------------------------------------------------------------------------------


class FromLibrary(nn.Module):
    """A model of neuralprocesses behind our call: its axes are (B, dimension, point)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, xc: Tensor, yc: Tensor, xt: Tensor) -> Normal:
        found = self.model(*(part.transpose(1, 2) for part in (xc, yc, xt)))
        return Normal(found.mean.transpose(1, 2), found.var.transpose(1, 2).sqrt(), validate_args=False)


def convcnp(channels: int) -> nn.Module:
    """ConvCNP with a U-Net, at a resolution as fine as the frequencies of ours resolve."""
    import lab.torch  # noqa: F401
    import neuralprocesses.torch as nps

    return FromLibrary(
        nps.construct_convgnp(
            dim_x=1, dim_y=1, likelihood="het", conv_arch="unet", unet_channels=(channels,) * 4, points_per_unit=20
        )
    )


def cnp(width: int) -> nn.Module:
    import lab.torch  # noqa: F401
    import neuralprocesses.torch as nps

    return FromLibrary(
        nps.construct_gnp(dim_x=1, dim_y=1, likelihood="het", dim_embedding=width * 16 // 19, width=width)
    )


# --- attention ------------------------------------------------------------------------------------------------------------------


class TransformerNP(nn.Module):
    """Points of the context attend to each other, targets to the context; a small one of our own.

    With `equivariant`, a network of the difference of two inputs is added to their attention, and inputs enter in no other
    way (as in TETNP); without it they are part of the points' features (as in TNP).
    """

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 3, *, equivariant: bool) -> None:
        super().__init__()
        self.equivariant = equivariant
        features = 2 if equivariant else 3
        self.embed = nn.Sequential(nn.Linear(features, width), nn.GELU(), nn.Linear(width, width))
        self.on_context = nn.ModuleList(_Attention(width, heads, equivariant) for _ in range(layers))
        self.on_target = nn.ModuleList(_Attention(width, heads, equivariant) for _ in range(layers))
        self.decode = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 2))

    def forward(self, xc: Tensor, yc: Tensor, xt: Tensor) -> Normal:
        known = torch.cat([yc, torch.zeros_like(yc)], -1)
        asked = torch.cat([torch.zeros_like(xt), torch.ones_like(xt)], -1)
        near: Tensor | None
        far: Tensor | None
        if self.equivariant:
            near, far = xc[:, :, None] - xc[:, None], xt[:, :, None] - xc[:, None]
        else:
            near, far = None, None
            known, asked = torch.cat([known, xc], -1), torch.cat([asked, xt], -1)
        zc, zt = self.embed(known), self.embed(asked)
        for on_context, on_target in zip(self.on_context, self.on_target, strict=True):
            zc = on_context(zc, zc, near)
            zt = on_target(zt, zc, far)
        mean, spread = self.decode(zt).chunk(2, -1)
        return Normal(mean, functional.softplus(spread) + 1e-6, validate_args=False)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, equivariant: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm_query, self.norm_values, self.norm = (nn.LayerNorm(width) for _ in range(3))
        self.query, self.pairs = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.nearness = nn.Sequential(nn.Linear(1, 16), nn.GELU(), nn.Linear(16, heads)) if equivariant else None

    def forward(self, query: Tensor, values: Tensor, difference: Tensor | None) -> Tensor:
        q = self._by_head(self.query(self.norm_query(query)))
        k, v = (self._by_head(part) for part in self.pairs(self.norm_values(values)).chunk(2, -1))
        bias = None
        if self.nearness is not None and difference is not None:
            bias = self.nearness(difference).permute(0, 3, 1, 2)
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        query = query + self.out(found.transpose(1, 2).flatten(2))
        return query + self.feed_forward(self.norm(query))

    def _by_head(self, z: Tensor) -> Tensor:
        return z.unflatten(2, (self.heads, -1)).transpose(1, 2)


def models(size: str = "small", width: int | None = None) -> dict[str, Factory]:
    """All arms but the exact Gaussian process, ``"small"`` or of the ``"paper"``'s size; `width` overrides that of ours and TNPs."""
    scale = WIDER[size]
    attention = width or 4 * round(16 * scale)
    first, second = ({**options[size], **({"width": width} if width else {})} for options in (FIRST, SECOND))
    return {
        "sfconv": ours(**first),
        "sfvconv": ours(**second),
        "convcnp": lambda: convcnp(round(64 * scale)),
        "cnp": lambda: cnp(round(152 * scale)),
        "tnp": lambda: TransformerNP(attention, equivariant=False),
        "tetnp": lambda: TransformerNP(attention, equivariant=True),
        **variants(size),
    }
