"""The Jacobian of linear layers from their inputs and the derivatives at their outputs, without forming it.

For a layer y = W a + b the derivative of sample i with respect to W is the outer product of g_i, the derivative with respect to y,
and the input a_i. Entry (i, j) of the kernel is then (a_i . a_j)(g_i . g_j), which costs O(k^2 (inputs + outputs)) rather than
O(k^2 inputs outputs), and products with J and its transpose are ordinary matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cameraready.optim._per_sample import chunk_size_for
from cameraready.optim.sng.jacobian.operators import gram, kernel_dtype


@dataclass(frozen=True)
class WeightPart:
    """A weight of shape (outputs, inputs): `inputs` (k, t, inputs) and `slopes` (k, t, outputs), t uses a sample."""

    inputs: Tensor
    slopes: Tensor

    @property
    def numel(self) -> int:
        return self.inputs.shape[2] * self.slopes.shape[2]

    def kernel(self) -> Tensor:
        k, t, n_in = self.inputs.shape
        n_out = self.slopes.shape[2]
        by_products = (k * t) ** 2 * (n_in + n_out)
        by_rows = k * n_in * n_out * (t + k)
        if by_products <= by_rows:
            both = gram(self.inputs.reshape(k * t, n_in)) * gram(self.slopes.reshape(k * t, n_out))
            return both if t == 1 else both.view(k, t, k, t).sum(dim=(1, 3))
        total = self.inputs.new_zeros(k, k, dtype=kernel_dtype(self.inputs))
        for slopes in self.slopes.split(chunk_size_for(k * n_in, self.inputs.dtype), dim=2):
            total += gram(torch.bmm(slopes.mT, self.inputs).reshape(k, -1))
        return total

    def push(self, vector: Tensor) -> Tensor:
        k, t, n_in = self.inputs.shape
        weight = vector.view(self.slopes.shape[2], n_in)
        moved = self.inputs.reshape(k * t, n_in) @ weight.mT
        return (moved * self.slopes.reshape(k * t, -1)).view(k, -1).sum(dim=1)

    def pull(self, weights: Tensor) -> Tensor:
        k, t, n_in = self.inputs.shape
        scaled = (self.slopes * weights[:, None, None]).reshape(k * t, -1)
        return (scaled.mT @ self.inputs.reshape(k * t, n_in)).reshape(-1)


@dataclass(frozen=True)
class BiasPart:
    """A bias of shape (outputs,): its rows are the slopes, summed over a sample's uses."""

    rows: Tensor

    @property
    def numel(self) -> int:
        return self.rows.shape[1]

    def kernel(self) -> Tensor:
        return gram(self.rows)

    def push(self, vector: Tensor) -> Tensor:
        return self.rows @ vector

    def pull(self, weights: Tensor) -> Tensor:
        return self.rows.mT @ weights


@dataclass(frozen=True)
class UnusedPart:
    """A parameter that no output depends on."""

    numel: int


class LayerJacobian:
    """Parts in the order of the parameters."""

    def __init__(self, parts: Sequence[WeightPart | BiasPart | UnusedPart], like: Tensor) -> None:
        """`like`: the k outputs as a vector."""
        self.parts, self._like = list(parts), like

    @property
    def shape(self) -> tuple[int, int]:
        return self._like.numel(), sum(part.numel for part in self.parts)

    def kernel(self) -> Tensor:
        k = self._like.numel()
        total = self._like.new_zeros(k, k, dtype=kernel_dtype(self._like))
        for part in self.parts:
            if not isinstance(part, UnusedPart):
                total += part.kernel()
        return total

    def push(self, vector: Tensor) -> Tensor:
        total = torch.zeros_like(self._like)
        for part, piece in zip(self.parts, vector.split([part.numel for part in self.parts]), strict=True):
            if not isinstance(part, UnusedPart):
                total += part.push(piece)
        return total

    def pull(self, weights: Tensor) -> Tensor:
        pieces = [
            weights.new_zeros(part.numel) if isinstance(part, UnusedPart) else part.pull(weights) for part in self.parts
        ]
        return torch.cat(pieces)
