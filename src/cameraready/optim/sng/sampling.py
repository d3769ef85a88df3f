"""Batches drawn by squared volume: an exact sampler of a k-determinantal point process."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor


def as_matrix(J: Tensor | np.ndarray) -> tuple[Tensor, float]:
    """J in double precision and the rounding unit of what was given; raises ValueError unless it is a finite matrix other than zero."""
    given = J.detach() if isinstance(J, Tensor) else torch.as_tensor(np.asarray(J))
    if given.is_complex():
        raise TypeError("J must be real, got complex numbers")
    matrix = given.to("cpu", torch.float64)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(f"J must have shape (N, n), a row a sample, got {tuple(matrix.shape)}")
    if not torch.isfinite(matrix).all():
        raise ValueError("J has entries that are not finite")
    if not matrix.any():
        raise ValueError("J is zero: it must be other than zero for a step to change anything")
    return matrix, torch.finfo(given.dtype if given.is_floating_point() else torch.float64).eps


def check_volume(matrix: Tensor, k: int, damping: float, eps: float) -> None:
    """Raise ValueError unless some batch of k rows has a positive volume."""
    N = matrix.shape[0]
    if isinstance(k, bool) or not (isinstance(k, int | np.integer) and 1 <= k <= N):
        raise ValueError(f"k must be a whole number from 1 to {N}, the number of rows, got {k!r}")
    if not (math.isfinite(damping) and damping >= 0.0):
        raise ValueError(f"damping must be a finite number of at least 0, got {damping}")
    rank = int(torch.linalg.matrix_rank(matrix, rtol=max(matrix.shape) * eps))
    if damping == 0.0 and k > rank:
        raise ValueError(
            f"J has rank {rank}, so every batch of {k} rows has volume zero; use damping above 0 or k of at most {rank}"
        )


def log_symmetric(logs: Tensor, k: int) -> Tensor:
    """Logarithms of the elementary symmetric polynomials e_0 ... e_k of numbers given by their logarithms, shape (k + 1,)."""
    found = torch.full((k + 1,), -math.inf, dtype=torch.float64)
    found[0] = 0.0
    for value in logs:
        found[1:] = torch.logaddexp(found[1:], found[:-1] + value)
    return found


class SquaredVolumeSampler(torch.utils.data.Sampler[list[int]]):
    """Batches of k rows, each drawn with probability proportional to ``det(J_S J_S' + damping I)``.

    Use it for linear models, and to study the method: under this law an SNG step is a preconditioned gradient step on average
    (`svs_preconditioner`). For a network J changes with every step; draw batches uniformly there.

    Parameters
    ----------
    J : array or Tensor of shape (N, n)
        A row a sample.
    k : int
        Batch size; at most N, and at most the rank of J for damping = 0.
    damping : float
        Added to the kernel of a batch as it is; k times that of the optimizers.
    n_batches : int, optional
        Batches an iteration; by default N / k, rounded up.
    seed : int
        For a generator of its own; each iteration goes on where the last one ended.
    generator : torch.Generator, optional
        Instead of `seed`.

    Raises
    ------
    ValueError
        If J is not a finite matrix other than zero, or an option is out of range.

    Notes
    -----
    O(N^3) once, O(N k^2) a batch, memory O(N^2): for N up to a few thousand. The draw is exact: eigenvectors are chosen by
    elementary symmetric polynomials, rows one by one by their squared distance from the span of those before.

    References
    ----------
    Kulesza and Taskar, 2011, k-DPPs; Goldshlager, Hu and Lin, 2026, arXiv:2508.21022, for squared-volume sampling.

    Examples
    --------
    >>> import torch
    >>> from cameraready.optim.sng import SquaredVolumeSampler
    >>> J = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    >>> data = torch.utils.data.TensorDataset(J, torch.arange(50))
    >>> loader = torch.utils.data.DataLoader(data, batch_sampler=SquaredVolumeSampler(J, 4, 1e-3))
    >>> len(loader), next(iter(loader))[0].shape
    (13, torch.Size([4, 8]))
    """

    def __init__(
        self,
        J: Tensor | np.ndarray,
        k: int,
        damping: float = 0.0,
        *,
        n_batches: int | None = None,
        seed: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        matrix, eps = as_matrix(J)
        check_volume(matrix, k, damping, eps)
        if n_batches is not None and (n_batches != int(n_batches) or n_batches < 1):
            raise ValueError(f"n_batches must be a whole number of at least 1, got {n_batches}")
        N = matrix.shape[0]
        self.k = k = int(k)
        self.n_batches = -(-N // k) if n_batches is None else n_batches
        self.generator = torch.Generator().manual_seed(seed) if generator is None else generator
        left, singular, _ = torch.linalg.svd(matrix, full_matrices=damping > 0.0)
        values = torch.zeros(left.shape[1], dtype=torch.float64)
        values[: len(singular)] = singular**2
        if damping == 0.0:
            kept = singular > singular[0] * max(matrix.shape) * eps
            left, values = left[:, kept], values[kept]
        self._vectors = left
        logs = (values + damping).log()
        # table[m, j] is the logarithm of e_j of the first m eigenvalues.
        table = torch.full((len(logs) + 1, k + 1), -math.inf, dtype=torch.float64)
        table[:, 0] = 0.0
        for m, value in enumerate(logs, start=1):
            table[m, 1:] = torch.logaddexp(table[m - 1, 1:], table[m - 1, :-1] + value)
        # Probability that eigenvalue m is among the j to be chosen from the first m.
        self._taken = torch.exp(table[:-1, :-1] + logs[:, None] - table[1:, 1:]).nan_to_num(0.0).numpy()

    def __len__(self) -> int:
        return self.n_batches

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.n_batches):
            yield self._draw()

    def _draw(self) -> list[int]:
        luck = torch.rand(len(self._taken) + self.k, dtype=torch.float64, generator=self.generator).numpy()
        chosen: list[int] = []
        for m in range(len(self._taken) - 1, -1, -1):
            missing = self.k - len(chosen)
            if missing == 0:
                break
            if luck[m] < self._taken[m, missing - 1]:
                chosen.append(m)
        span = self._vectors[:, chosen].numpy()
        distances = (span**2).sum(axis=1)
        directions = np.zeros((self.k, self.k))
        picked: list[int] = []
        for step in range(self.k):
            distances[picked] = 0.0
            ends = np.cumsum(np.clip(distances, 0.0, None))
            row = int(np.searchsorted(ends, luck[len(self._taken) + step] * ends[-1], side="right"))
            row = min(row, len(ends) - 1)
            picked.append(row)
            fresh = span[row] - directions[:step].T @ (directions[:step] @ span[row])
            fresh = fresh - directions[:step].T @ (directions[:step] @ fresh)
            directions[step] = fresh / np.linalg.norm(fresh)
            distances = distances - (span @ directions[step]) ** 2
        return sorted(picked)
