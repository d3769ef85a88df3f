"""What an update needs of a Jacobian: its kernel, its action and that of its transpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from cameraready.optim._per_sample import chunk_size_for


class Jacobian(Protocol):
    """A linear map from n parameters to k outputs."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def kernel(self) -> Tensor:
        """J J', shape (k, k), in the precision of `kernel_dtype`."""

    def push(self, vector: Tensor) -> Tensor:
        """J v, (n,) -> (k,)."""

    def pull(self, weights: Tensor) -> Tensor:
        """J' z, (k,) -> (n,)."""


def kernel_dtype(like: Tensor) -> torch.dtype:
    """Double precision wherever the device has it, for a kernel squares the condition number."""
    return torch.float32 if like.device.type == "mps" else torch.float64


def gram(rows: Tensor) -> Tensor:
    """``rows @ rows.T`` in the precision of a kernel, (k, n) -> (k, k); columns are converted a chunk at a time."""
    dtype = kernel_dtype(rows)
    if rows.dtype == dtype:
        return rows @ rows.mT
    total = rows.new_zeros(rows.shape[0], rows.shape[0], dtype=dtype)
    for part in rows.split(chunk_size_for(rows.shape[0], dtype), dim=1):
        wide = part.to(dtype)
        total.addmm_(wide, wide.mT)
    return total


class DenseJacobian:
    """A Jacobian that is held as a matrix of shape (k, n)."""

    def __init__(self, matrix: Tensor) -> None:
        if matrix.ndim != 2 or 0 in matrix.shape:
            raise ValueError(f"a Jacobian has shape (k, n) with at least one entry, got {tuple(matrix.shape)}")
        if not matrix.is_floating_point():
            raise TypeError(f"a Jacobian holds real floating-point numbers, got {matrix.dtype}")
        self.matrix = matrix

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape[0], self.matrix.shape[1]

    def kernel(self) -> Tensor:
        return gram(self.matrix)

    def push(self, vector: Tensor) -> Tensor:
        return self.matrix @ vector

    def pull(self, weights: Tensor) -> Tensor:
        return self.matrix.mT @ weights


class MatrixFreeJacobian:
    """A Jacobian that is known by its two products; the kernel takes k of each, and memory stays at O(n + k^2).

    For models whose Jacobian does not fit into memory. Where it fits, `linearise` or a closure of outputs is faster.

    Parameters
    ----------
    jvp : callable
        ``jvp(v) -> J v``, (n,) -> (k,).
    vjp : callable
        ``vjp(z) -> J' z``, (k,) -> (n,).
    shape : (int, int)
        k and n.
    dtype, device : optional
        Of the vectors that `vjp` is given; the residual's.

    Raises
    ------
    ValueError
        If a product comes back with a shape that does not fit, or the two are not adjoint to each other.

    Examples
    --------
    >>> import torch
    >>> from cameraready.optim.sng import MatrixFreeJacobian, sng_direction
    >>> J = torch.tensor([[1.0, 0.0, 1.0], [0.0, 2.0, 0.0]], dtype=torch.float64)
    >>> free = MatrixFreeJacobian(lambda v: J @ v, lambda z: J.T @ z, (2, 3), dtype=torch.float64)
    >>> r = torch.ones(2, dtype=torch.float64)
    >>> torch.allclose(sng_direction(free, r, 0.1), sng_direction(J, r, 0.1))
    True
    """

    def __init__(
        self,
        jvp: Callable[[Tensor], Tensor],
        vjp: Callable[[Tensor], Tensor],
        shape: tuple[int, int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if len(shape) != 2 or min(shape) < 1:
            raise ValueError(f"shape is (k, n) with positive numbers, got {shape}")
        self._jvp, self._vjp = jvp, vjp
        self._shape = int(shape[0]), int(shape[1])
        self._like = torch.empty((), dtype=dtype, device=device)

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    def push(self, vector: Tensor) -> Tensor:
        return _checked(self._jvp(vector), self._shape[0], "jvp")

    def pull(self, weights: Tensor) -> Tensor:
        return _checked(self._vjp(weights), self._shape[1], "vjp")

    def kernel(self) -> Tensor:
        k = self._shape[0]
        found = self._like.new_empty(k, k, dtype=kernel_dtype(self._like))
        for i in range(k):
            unit = self._like.new_zeros(k)
            unit[i] = 1.0
            found[i] = self.push(self.pull(unit)).to(found.dtype)
        gap = (found - found.mT).abs().max()
        if gap > torch.finfo(self._like.dtype).eps ** 0.5 * found.abs().max():
            raise ValueError(
                "jvp and vjp are not adjoint to each other: J J' came out as a matrix that is not symmetric"
            )
        return (found + found.mT) / 2


def _checked(vector: Tensor, length: int, name: str) -> Tensor:
    if vector.shape != (length,):
        raise ValueError(f"{name} returned shape {tuple(vector.shape)}, expected ({length},)")
    return vector
