"""Conjugate gradients and stochastic Lanczos quadrature, for matrices whose factor does not fit.

The preconditioner is block Jacobi: the points are cut into compact clusters, and the matrix of each is factored. The
log-determinant is that of the blocks plus a quadrature on the preconditioned matrix (Ubaru, Chen and Saad, 2017), with probes
from a fixed seed, so that the estimate is a smooth function of the hyper-parameters. Its standard error is kept.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import linalg, sparse

from cameraready.stats.gp2scale.algebra.backends import quadratic_by_solves
from cameraready.stats.gp2scale.algebra.errors import IndefiniteMatrix, NoConvergence
from cameraready.stats.gp2scale.kernels.base import mirror

CLUSTER = 64
LANCZOS_STEPS = 64
MAX_CG_STEPS = 2000
# Lanczos keeps its whole basis; so many numbers at a time.
BASIS_NUMBERS = 2**27


class BlockJacobi:
    """Cholesky factors of the diagonal blocks of A: M = L L', applied to (n,) or (n, m).

    Blocks are the clusters of a k-d tree over `coordinates` (n, d), nearly equal in size, so that all are padded to one size
    and applied by one batched product.

    Attributes: order (n,), the points cluster by cluster; matrix, A in that order; logdet of M.
    """

    def __init__(self, matrix: sparse.csr_matrix, coordinates: np.ndarray):
        clusters = kd_clusters(coordinates, CLUSTER)
        sizes = np.array([len(cluster) for cluster in clusters])
        self.order = np.concatenate(clusters)
        self.matrix = matrix[self.order][:, self.order].tocsr()
        self._size = int(sizes.max())
        begins = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        # Row of the padded array for each point.
        self._row = np.repeat(np.arange(len(sizes)) * self._size - begins, sizes) + np.arange(len(self.order))
        blocks = self._diagonal_blocks(len(sizes))
        try:
            self._lower = np.linalg.cholesky(blocks)
        except np.linalg.LinAlgError as error:
            raise IndefiniteMatrix("a diagonal block of the matrix is not positive definite") from error
        self._inverse = np.linalg.inv(self._lower)
        self.logdet = 2.0 * float(np.log(np.diagonal(self._lower, axis1=1, axis2=2)).sum())

    def _diagonal_blocks(self, count: int) -> np.ndarray:
        """The blocks (count, size, size), the identity where a cluster is smaller."""
        entries = self.matrix.tocoo()
        i, j = self._row[entries.row], self._row[entries.col]
        inside = i // self._size == j // self._size
        blocks = np.zeros((count, self._size, self._size))
        blocks[i[inside] // self._size, i[inside] % self._size, j[inside] % self._size] = entries.data[inside]
        empty = np.ones(count * self._size, dtype=bool)
        empty[self._row] = False
        padded = np.flatnonzero(empty)
        blocks[padded // self._size, padded % self._size, padded % self._size] = 1.0
        return blocks

    def _apply(self, blocks: np.ndarray, x: np.ndarray) -> np.ndarray:
        padded = np.zeros((len(blocks) * self._size, x.shape[1]))
        padded[self._row] = x
        return (blocks @ padded.reshape(len(blocks), self._size, -1)).reshape(padded.shape)[self._row]

    def half(self, x: np.ndarray, *, transposed: bool) -> np.ndarray:
        """L^{-1} x, or L^{-T} x, for x (n, m)."""
        return self._apply(self._inverse.transpose(0, 2, 1) if transposed else self._inverse, x)

    def factor_times(self, x: np.ndarray) -> np.ndarray:
        """L x."""
        return self._apply(self._lower, x)

    def solve(self, x: np.ndarray) -> np.ndarray:
        """M^{-1} x."""
        return self.half(self.half(x, transposed=False), transposed=True)


class IterativeFactor:
    """A symmetric positive definite matrix, solved by preconditioned conjugate gradients.

    Parameters
    ----------
    n, rows, cols, values: the upper-triangle entries.
    coordinates: (n, d), for the preconditioner's clusters.
    tol: the relative residual at which a solve ends.
    n_probes: random vectors for the log-determinant and for entries of the inverse.
    seed: of the probes.

    Attributes
    ----------
    logdet, logdet_error: the estimate and its standard error over the probes.

    Raises
    ------
    IndefiniteMatrix: a direction of negative curvature was met, in a block, in a solve or in the quadrature.
    NoConvergence: a solve did not reach `tol`.
    """

    nonzeros = 0

    def __init__(
        self, n: int, rows: np.ndarray, cols: np.ndarray, values: np.ndarray, coordinates: np.ndarray, *,
        tol: float, n_probes: int, seed: int,
    ):  # fmt: skip
        self._n, self._rows, self._cols, self._tol = n, rows, cols, tol
        i, j, both = mirror(rows, cols, values)
        self._blocks = BlockJacobi(sparse.csr_matrix((both, (i, j)), shape=(n, n)), coordinates)
        self._probes = np.random.default_rng(seed).choice([-1.0, 1.0], size=(n, n_probes))
        self.logdet, self.logdet_error = self._log_determinant()

    def __len__(self) -> int:
        return self._n

    def solve(self, right: np.ndarray) -> np.ndarray:
        """A^{-1} right for right (n,) or (n, m), to the relative residual `tol`."""
        columns = np.asarray(right, dtype=float).reshape(self._n, -1)[self._blocks.order]
        solved = np.empty_like(columns)
        solved[self._blocks.order] = self._conjugate_gradients(columns)
        return solved.reshape(right.shape)

    def _conjugate_gradients(self, right: np.ndarray) -> np.ndarray:
        """All right-hand sides at once, each with its own step lengths; those that are done stand still."""
        x = np.zeros_like(right)
        residual = right.copy()
        goal = self._tol * np.linalg.norm(right, axis=0)
        z = self._blocks.solve(residual)
        direction = z.copy()
        weight = np.einsum("ij,ij->j", residual, z)
        for _ in range(MAX_CG_STEPS):
            active = np.linalg.norm(residual, axis=0) > goal
            if not active.any():
                return x
            image = self._blocks.matrix @ direction[:, active]
            curvature = np.einsum("ij,ij->j", direction[:, active], image)
            if (curvature <= 0).any():
                raise IndefiniteMatrix("conjugate gradients met a direction of negative curvature")
            step = weight[active] / curvature
            x[:, active] += step * direction[:, active]
            residual[:, active] -= step * image
            z = self._blocks.solve(residual[:, active])
            new = np.einsum("ij,ij->j", residual[:, active], z)
            direction[:, active] = z + (new / weight[active]) * direction[:, active]
            weight[active] = new
        worst = float((np.linalg.norm(residual, axis=0) / np.maximum(goal, 1e-300)).max() * self._tol)
        raise NoConvergence(
            f"conjugate gradients reached a relative residual of {worst:.1e} instead of {self._tol:.1e} in "
            f"{MAX_CG_STEPS} steps; more noise, a shorter length scale or a larger tol would help"
        )

    def _preconditioned(self, x: np.ndarray) -> np.ndarray:
        half = self._blocks.half(x, transposed=True)
        return self._blocks.half(self._blocks.matrix @ half, transposed=False)

    def _log_determinant(self) -> tuple[float, float]:
        steps = min(LANCZOS_STEPS, self._n)
        together = max(1, BASIS_NUMBERS // (steps * self._n))
        estimates = []
        for begin in range(0, self._probes.shape[1], together):
            alphas, betas = lanczos(self._preconditioned, self._probes[:, begin : begin + together], steps)
            estimates += [self._n * _log_quadrature(a, b) for a, b in zip(alphas, betas, strict=True)]
        error = float(np.std(estimates, ddof=1) / np.sqrt(len(estimates))) if len(estimates) > 1 else float("nan")
        return self._blocks.logdet + float(np.mean(estimates)), error

    def quadratic(self, left: sparse.csr_matrix, *, full: bool = False) -> np.ndarray:
        """left A^{-1} left': the diagonal (m,), or the whole matrix (m, m), for sparse left (m, n)."""
        return quadratic_by_solves(self.solve, left, full=full)

    def inverse_entries(self) -> np.ndarray:
        """Unbiased estimates of the entries of A^{-1} at the matrix' pairs (Hutchinson), from the same probes.

        With probes w and A^{-1} = L^{-T} (L^{-1} A L^{-T})^{-1} L^{-1}: E[(A^{-1} L w)(L^{-T} w)'] = A^{-1}.
        """
        order = self._blocks.order
        first, second = np.empty_like(self._probes), np.empty_like(self._probes)
        first[order] = self._conjugate_gradients(self._blocks.factor_times(self._probes))
        second[order] = self._blocks.half(self._probes, transposed=True)
        total = np.zeros(len(self._rows))
        for u, v in zip(first.T, second.T, strict=True):
            total += u[self._rows] * v[self._cols] + u[self._cols] * v[self._rows]
        return total / (2 * self._probes.shape[1])


def lanczos(
    apply: Callable[[np.ndarray], np.ndarray], start: np.ndarray, steps: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Tridiagonal coefficients of a symmetric operator for each column of `start` (n, p), fully re-orthogonalised.

    Returns lists of diagonals and off-diagonals, one for each column; a column ends early when its space is exhausted.
    """
    n, p = start.shape
    basis = np.empty((p, steps, n))
    q = start / np.linalg.norm(start, axis=0)
    alphas, betas = [], []
    for step in range(steps):
        basis[:, step] = q.T
        image = apply(q)
        alphas.append(np.einsum("ij,ij->j", q, image))
        for _ in range(2):  # twice is enough (Kahan and Parlett)
            for k in range(p):
                known = basis[k, : step + 1]
                image[:, k] -= (known @ image[:, k]) @ known
        betas.append(np.linalg.norm(image, axis=0))
        if (betas[-1] <= 1e-12 * np.abs(alphas[-1])).all():
            break
        q = image / np.where(betas[-1] > 0, betas[-1], 1.0)
    diagonal, off = np.array(alphas), np.array(betas)
    ends = [_length(off[:, p], diagonal[:, p]) for p in range(start.shape[1])]
    return [diagonal[:e, p] for p, e in enumerate(ends)], [off[: e - 1, p] for p, e in enumerate(ends)]


def _log_quadrature(alpha: np.ndarray, beta: np.ndarray) -> float:
    """e' log(T) e for the tridiagonal T and the first unit vector e."""
    ritz, vectors = linalg.eigh_tridiagonal(alpha, beta)
    if ritz[0] <= 0:
        raise IndefiniteMatrix(f"the quadrature met the negative eigenvalue estimate {ritz[0]:.3g}")
    return float(vectors[0] ** 2 @ np.log(ritz))


def _length(off: np.ndarray, diagonal: np.ndarray) -> int:
    exhausted = np.flatnonzero(off <= 1e-10 * np.abs(diagonal).max())
    return int(exhausted[0]) + 1 if len(exhausted) else len(off)


def smallest_ritz_value(matrix: sparse.csr_matrix, seed: int, *, steps: int = 100) -> float:
    """An upper bound on the smallest eigenvalue: if it is negative, the matrix is certainly indefinite."""
    n = matrix.shape[0]
    start = np.random.default_rng(seed).standard_normal((n, 1))
    alphas, betas = lanczos(lambda x: matrix @ x, start, min(steps, n))
    return float(linalg.eigh_tridiagonal(alphas[0], betas[0], eigvals_only=True)[0])


def kd_clusters(coordinates: np.ndarray, size: int) -> list[np.ndarray]:
    """Indices of the points in compact clusters of at most `size`, by halving along the longest side."""
    pending, done = [np.arange(len(coordinates))], []
    while pending:
        index = pending.pop()
        if len(index) <= size:
            done.append(index)
            continue
        here = coordinates[index]
        axis = int(np.argmax(here.max(axis=0) - here.min(axis=0)))
        ranked = index[np.argsort(here[:, axis], kind="stable")]
        pending += [ranked[: len(index) // 2], ranked[len(index) // 2 :]]
    return done
