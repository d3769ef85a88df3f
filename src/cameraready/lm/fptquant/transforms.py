"""The transforms that leave a language model's function as it is; each acts on weights in float64 or float32.

Conventions: activations are rows, ``y = x W^T + b`` with W of shape (out, in), as in `torch.nn.Linear`. D is the size of a
head, G the number of query heads that share a KV head, d the width of the residual stream. Parameters are kept in float64.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from cameraready.lm.fptquant.hadamard import GroupedHadamard, hadamard_matrix, hadamard_order

Layout = Literal["half", "interleaved"]


def orthogonal(initial: Tensor) -> nn.Module:
    """A module whose ``weight`` is an orthogonal matrix (or a batch of them), `initial` at first, by Cayley's map."""
    holder = nn.Module()
    holder.register_parameter("weight", nn.Parameter(initial.clone().to(torch.float64)))
    return parametrizations.orthogonal(holder, "weight", orthogonal_map="cayley")


class PreRopeTransform(nn.Module):
    """T_k: a rotation and a scale of each RoPE pair of each KV head, inverted on the queries (van Breugel et al., 2025, arXiv:2506.04985).

    Keys become R(theta) s k, the queries of the group R(theta) q / s: the inverse *transpose*. R commutes with RoPE, which turns the
    same planes, so every attention logit stays; a scale that differed within a pair would not commute.

    Parameters
    ----------
    kv_heads, query_heads : int
        Heads; ``query_heads`` must be a multiple.
    head_dim : int
        D.
    rotary_dim : int
        How many leading dimensions of a head RoPE turns; the others are left alone.
    layout : {"half", "interleaved"}
        Whether the pairs are (i, i + rotary_dim / 2), as in Llama, or (2 i, 2 i + 1).
    rotate : bool
        False keeps every angle at zero, which is all that is exact where a norm stands between projection and RoPE.
    """

    def __init__(
        self,
        kv_heads: int,
        query_heads: int,
        head_dim: int,
        rotary_dim: int | None = None,
        *,
        layout: Layout = "half",
        rotate: bool = True,
    ):
        super().__init__()
        rotary = head_dim if rotary_dim is None else rotary_dim
        if query_heads % kv_heads:
            raise ValueError(f"{query_heads} query heads do not share {kv_heads} KV heads evenly")
        if rotary % 2 or not 0 < rotary <= head_dim:
            raise ValueError(f"RoPE must turn an even number of the {head_dim} dimensions of a head, got {rotary}")
        if layout not in ("half", "interleaved"):
            raise ValueError(f"layout must be 'half' or 'interleaved', got {layout!r}")
        self.kv_heads, self.groups, self.head_dim = kv_heads, query_heads // kv_heads, head_dim
        self.rotary, self.layout = rotary, layout
        self.log_scale = nn.Parameter(torch.zeros(kv_heads, rotary // 2, dtype=torch.float64))
        self.angle = nn.Parameter(torch.zeros(kv_heads, rotary // 2, dtype=torch.float64)) if rotate else None

    def keys(self, rows: Tensor) -> Tensor:
        """Weight (kv_heads * D, in) or bias (kv_heads * D,) of the key projection, transformed."""
        return self._turn(rows, repeats=1, sign=1.0)

    def queries(self, rows: Tensor) -> Tensor:
        """Weight (query_heads * D, in) or bias (query_heads * D,) of the query projection, transformed."""
        return self._turn(rows, repeats=self.groups, sign=-1.0)

    def _turn(self, rows: Tensor, *, repeats: int, sign: float) -> Tensor:
        heads = rows.reshape(self.kv_heads * repeats, self.head_dim, -1)
        scale = (sign * self.log_scale).exp().to(rows.dtype).repeat_interleave(repeats, 0)[..., None]
        turned, rest = heads[:, : self.rotary], heads[:, self.rotary :]
        if self.layout == "half":
            first, second = turned.chunk(2, dim=1)
        else:
            first, second = turned[:, 0::2], turned[:, 1::2]
        if self.angle is None:
            first, second = scale * first, scale * second
        else:
            cos = self.angle.cos().to(rows.dtype).repeat_interleave(repeats, 0)[..., None] * scale
            sin = self.angle.sin().to(rows.dtype).repeat_interleave(repeats, 0)[..., None] * scale
            first, second = cos * first - sin * second, sin * first + cos * second
        if self.layout == "half":
            turned = torch.cat((first, second), dim=1)
        else:
            turned = torch.stack((first, second), dim=2).flatten(1, 2)
        return torch.cat((turned, rest), dim=1).reshape(rows.shape)


class ValueTransform(nn.Module):
    """T_v: an invertible D x D matrix M a KV head on the values, its inverse on the slices of the output projection (arXiv:2506.04985).

    M = U diag(exp(l)) V with U and V orthogonal, so that it can be inverted exactly and its condition number, exp(max l - min l),
    is in sight. Attention weights act on tokens and commute with M.

    Parameters
    ----------
    kv_heads, query_heads, head_dim : int
    form : {"full", "rotation"}
        ``"rotation"`` keeps l at zero: what SpinQuant calls R2.
    initial : {"identity", "hadamard"}
        What M is at first.
    """

    def __init__(
        self,
        kv_heads: int,
        query_heads: int,
        head_dim: int,
        *,
        form: Literal["full", "rotation"] = "full",
        initial: Literal["identity", "hadamard"] = "identity",
    ):
        super().__init__()
        if query_heads % kv_heads:
            raise ValueError(f"{query_heads} query heads do not share {kv_heads} KV heads evenly")
        self.kv_heads, self.groups, self.head_dim = kv_heads, query_heads // kv_heads, head_dim
        eye = torch.eye(head_dim, dtype=torch.float64).repeat(kv_heads, 1, 1)
        start = _block_hadamard(head_dim).repeat(kv_heads, 1, 1) if initial == "hadamard" else eye
        self.left = orthogonal(start)
        self.right = orthogonal(eye) if form == "full" else None
        self.log_scale = nn.Parameter(torch.zeros(kv_heads, head_dim, dtype=torch.float64)) if form == "full" else None

    def matrix(self) -> Tensor:
        """M, shape (kv_heads, D, D), float64."""
        if self.right is None or self.log_scale is None:
            return self.left.weight
        return (self.left.weight * self.log_scale.exp()[:, None, :]) @ self.right.weight

    def inverse(self) -> Tensor:
        """M^-1, shape (kv_heads, D, D), float64."""
        if self.right is None or self.log_scale is None:
            return self.left.weight.mT
        return (self.right.weight.mT * (-self.log_scale).exp()[:, None, :]) @ self.left.weight.mT

    def values(self, rows: Tensor) -> Tensor:
        """Weight (kv_heads * D, in) or bias (kv_heads * D,) of the value projection, transformed: v M."""
        heads = rows.reshape(self.kv_heads, self.head_dim, -1)
        return (self.matrix().mT.to(rows.dtype) @ heads).reshape(rows.shape)

    def outputs(self, weight: Tensor) -> Tensor:
        """Weight (out, query_heads * D) of the output projection, each slice multiplied by the inverse."""
        heads = weight.reshape(weight.shape[0], self.kv_heads, self.groups, self.head_dim)
        return torch.einsum("ohgd,hed->ohge", heads, self.inverse().to(weight.dtype)).reshape(weight.shape)


class UpDownScaling(nn.Module):
    """T_u: a positive factor u a channel of the gated MLP, on the rows of the up projection and inverted on the columns of the down one.

    Only the linear branch of the MLP can be scaled; the gate passes a non-linearity (van Breugel et al., 2025, arXiv:2506.04985).
    """

    def __init__(self, width: int):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(width, dtype=torch.float64))

    def up(self, rows: Tensor, index: Tensor | None = None) -> Tensor:
        """Weight (width, in) or bias (width,) of the up projection; `index` names the rows that are given."""
        scale = self._scale(index).exp().to(rows.dtype)
        return rows * (scale[:, None] if rows.ndim == 2 else scale)

    def down(self, weight: Tensor) -> Tensor:
        """Weight (out, width) of the down projection."""
        return weight * (-self.log_scale).exp().to(weight.dtype)

    def _scale(self, index: Tensor | None) -> Tensor:
        return self.log_scale if index is None else self.log_scale[index]


class ResidualRotation(nn.Module):
    """T_r: one orthogonal matrix R (d x d) for the whole residual stream, merged into all that reads or writes it.

    What SpinQuant calls R1 (Liu et al., 2024, arXiv:2405.16406). Gains of the norms must have been folded into the readers before.

    Parameters
    ----------
    width : int
        d.
    initial : {"hadamard", "random-hadamard", "identity"}
        Block-diagonal with `hadamard_order(d)` where no Hadamard matrix of order d is known.
    seed : int
        Of the signs of ``"random-hadamard"``.
    """

    def __init__(
        self,
        width: int,
        *,
        initial: Literal["hadamard", "random-hadamard", "identity"] = "hadamard",
        seed: int = 0,
    ):
        super().__init__()
        if initial == "identity":
            start = torch.eye(width, dtype=torch.float64)
        else:
            start = _block_hadamard(width)
        if initial == "random-hadamard":
            generator = torch.Generator().manual_seed(seed)
            signs = torch.randint(0, 2, (width,), generator=generator).to(torch.float64) * 2 - 1
            start = signs[:, None] * start
        self.rotation = orthogonal(start)

    def matrix(self) -> Tensor:
        """R, shape (d, d), float64."""
        return self.rotation.weight

    @staticmethod
    def reader(weight: Tensor, matrix: Tensor) -> Tensor:
        """Weight (out, d) of a layer that reads the stream: W R."""
        return weight @ matrix.to(weight.dtype)

    @staticmethod
    def writer(rows: Tensor, matrix: Tensor) -> Tensor:
        """Weight (d, in) or bias (d,) of a layer that writes to the stream: R^T W."""
        return matrix.to(rows.dtype).mT @ rows


class DownHadamard(GroupedHadamard):
    """T_d: a grouped Hadamard transform of the down projection's input while the model runs, its inverse in the weight.

    It stands behind a product of two activations and cannot be merged; a plain checkpoint cannot express it.
    """

    def down(self, weight: Tensor) -> Tensor:
        """Weight (out, width) of the down projection: W H."""
        return self(weight)


class ResidualScaling:
    """S_n: the residual stream kept at unit root mean square, token by token (van Breugel et al., 2025, arXiv:2506.04985).

    Before each sub-block the stream z is divided by its RMS s, which RMSNorm needs anyway, and S is multiplied by s; what the sub-block
    adds is divided by S. RMSNorm does not see a scale, so all inputs of sub-blocks stay as they were; its epsilon becomes
    epsilon / S^2, which keeps even tokens of tiny norm exact.

    Attributes
    ----------
    scale : Tensor or None
        S, shape (batch, tokens, 1), of the forward pass that is running or ran last; float32, or float64 where the model is.
    """

    def __init__(self) -> None:
        self.scale: Tensor | None = None

    def begin(self, hidden: Tensor) -> None:
        """Start a forward pass: S = 1."""
        self.scale = torch.ones_like(hidden[..., :1], dtype=_wide(hidden.dtype))

    def rescale(self, hidden: Tensor) -> Tensor:
        """`hidden` (batch, tokens, d) at unit RMS; S is updated. A token that is exactly zero is left alone."""
        assert self.scale is not None
        wide = hidden.to(self.scale.dtype)
        rms = wide.pow(2).mean(-1, keepdim=True).sqrt()
        rms = torch.where(rms > 0, rms, torch.ones_like(rms))
        self.scale = self.scale * rms
        return (wide / rms).to(hidden.dtype)

    def divide(self, x: Tensor) -> Tensor:
        """x / S, in the dtype of `x`."""
        assert self.scale is not None
        return (x.to(self.scale.dtype) / self.scale).to(x.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _block_hadamard(width: int) -> Tensor:
    order = hadamard_order(width)
    return torch.block_diag(*[hadamard_matrix(order)] * (width // order))


def condition(transform: ValueTransform) -> float:
    """The largest condition number of a head's M; infinite ranges of values would be no good start for a quantiser."""
    if transform.log_scale is None:
        return 1.0
    spread = transform.log_scale.amax(-1) - transform.log_scale.amin(-1)
    return math.exp(float(spread.max()))
