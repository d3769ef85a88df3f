"""Hadamard matrices of many orders, and their product with activations in O(n log n)."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

#: Factors of a Sylvester matrix are multiplied in blocks of at most this order: few large products beat many butterflies.
BLOCK = 64


@lru_cache(maxsize=64)
def _base(order: int) -> torch.Tensor | None:
    """A Hadamard matrix of `order` (entries -1 and 1, float64) by Paley's two constructions, or None."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if order == 2:
        return torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    if order % 4:
        return None
    if _is_prime(order - 1):  # order - 1 = 3 mod 4: Paley's first
        core = _jacobsthal(order - 1)
        skew = torch.zeros(order, order, dtype=torch.float64)
        skew[0, 1:], skew[1:, 0], skew[1:, 1:] = 1, -1, core
        return torch.eye(order, dtype=torch.float64) + skew
    half = order // 2
    if half % 4 == 2 and _is_prime(half - 1):  # half - 1 = 1 mod 4: Paley's second
        conference = torch.zeros(half, half, dtype=torch.float64)
        conference[0, 1:], conference[1:, 0], conference[1:, 1:] = 1, 1, _jacobsthal(half - 1)
        plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        diagonal = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(conference, plus) + torch.kron(torch.eye(half, dtype=torch.float64), diagonal)
    return None


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % k for k in range(2, math.isqrt(n) + 1))


def _jacobsthal(prime: int) -> torch.Tensor:
    """Q[i, j] = chi(i - j), the quadratic character modulo `prime`."""
    squares = {x * x % prime for x in range(1, prime)}
    chi = torch.tensor([0.0 if x == 0 else (1.0 if x in squares else -1.0) for x in range(prime)], dtype=torch.float64)
    index = torch.arange(prime)
    return chi[(index[:, None] - index[None]) % prime]


@lru_cache(maxsize=256)
def hadamard_order(width: int) -> int:
    """The largest order that divides `width` and of which `hadamard_matrix` knows a matrix with a base of at most 256.

    The width itself wherever possible (896 = 28 x 32, 4,864 = 76 x 64, 14,336 = 28 x 512); otherwise transforms are
    block-diagonal with blocks of this order (11,008 = 43 blocks of 256).
    """
    if width < 1:
        raise ValueError(f"width must be positive, got {width}")
    orders = (order for order in range(width, 0, -1) if width % order == 0)
    return next(order for order in orders if _split(order) is not None)


def _split(order: int) -> tuple[int, int] | None:
    """(base, power of two) with a known base matrix, the base as small as possible."""
    odd, power = order, 1
    while odd % 2 == 0:
        odd, power = odd // 2, power * 2
    for taken in (1, 2, 4, 8, 16):
        base = odd * taken
        if base > 256 or taken > power:
            break
        if _base(base) is not None:
            return base, power // taken
    return None


def hadamard_matrix(order: int) -> torch.Tensor:
    """An orthogonal matrix of shape (order, order), float64, whose entries are plus or minus 1 / sqrt(order).

    Paley's construction for the odd part times Sylvester's for powers of two.

    Raises
    ------
    ValueError
        For an order of which no matrix is known here; `hadamard_order` finds one that divides a width.
    """
    split = _split(order) if order >= 1 else None
    if split is None:
        raise ValueError(f"no Hadamard matrix of order {order} is known here; hadamard_order({order}) divides it")
    base, power = split
    matrix = _base(base)
    assert matrix is not None
    while power > 1:
        matrix = torch.kron(matrix, _base(2))
        power //= 2
    return matrix / math.sqrt(order)


class GroupedHadamard(torch.nn.Module):
    """Multiplies the last dimension by a block-diagonal Hadamard matrix H (orthogonal), and by its transpose.

    Parameters
    ----------
    width : int
        Size of the last dimension; it need not be a power of two.
    group : int, optional
        Order of the blocks; must divide `width`. The default is `hadamard_order(width)`.

    Notes
    -----
    A block of order b * 2^k is the Kronecker product of a base matrix of order b and Sylvester's, applied factor by factor:
    O(width * (b + k)) operations a row where a dense matrix takes O(width * group).
    """

    def __init__(self, width: int, group: int | None = None):
        super().__init__()
        order = hadamard_order(width) if group is None else group
        if order < 1 or width % order:
            raise ValueError(f"blocks of {order} do not divide a width of {width}")
        split = _split(order)
        if split is None:
            raise ValueError(f"no Hadamard matrix of order {order} is known here; {hadamard_order(order)} divides it")
        self.width, self.order = width, order
        base, power = split
        sizes = [base] if base > 1 else []
        while power > 1:
            sizes.append(min(power, BLOCK))
            power //= sizes[-1]
        self.sizes = tuple(sizes)
        self._factors: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

    def _factor(self, size: int, like: torch.Tensor) -> torch.Tensor:
        key = (size, like.dtype, like.device)
        if key not in self._factors:
            self._factors[key] = hadamard_matrix(size).to(device=like.device, dtype=like.dtype)
        return self._factors[key]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x H for `x` of shape (..., width), same dtype and device."""
        return self._multiply(x, transpose=False)

    def transposed(self, x: torch.Tensor) -> torch.Tensor:
        """x H^T, the inverse of `forward`."""
        return self._multiply(x, transpose=True)

    def _multiply(self, x: torch.Tensor, *, transpose: bool) -> torch.Tensor:
        if x.shape[-1] != self.width:
            raise ValueError(f"expected a last dimension of {self.width}, got shape {tuple(x.shape)}")
        shape, after = x.shape, self.order
        for size in self.sizes:
            after //= size
            factor = self._factor(size, x)
            if after == 1:
                x = x.reshape(-1, size) @ (factor.T if transpose else factor)
            else:  # y[j] = sum_i x[i] H[i, j] along the middle dimension
                x = (factor if transpose else factor.T) @ x.reshape(-1, size, after)
        return x.reshape(shape)
