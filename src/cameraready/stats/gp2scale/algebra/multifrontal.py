"""A supernodal multifrontal Cholesky factorisation in NumPy and LAPACK: solves, log-determinant, selected inverse.

The blocks of the assembly tree are dense, so all arithmetic is done by BLAS, and Python is entered once for a block. The
selected inverse gives the entries of the inverse on the pattern of the factor at the cost of about two factorisations
(Takahashi, Fagan and Chin, 1973), which is what an exact gradient of the likelihood needs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse
from scipy.linalg import blas, lapack

from cameraready.stats.gp2scale.algebra.dissection import Structure
from cameraready.stats.gp2scale.algebra.errors import IndefiniteMatrix
from cameraready.stats.gp2scale.algebra.threads import BlasThreads


class MultifrontalFactor:
    """The Cholesky factor of a symmetric positive definite matrix.

    Parameters
    ----------
    structure: from `structure_of`.
    values: the entries (m,) in the order of the pairs that the structure was made of.

    Raises
    ------
    IndefiniteMatrix: a pivot is not positive.
    """

    def __init__(self, structure: Structure, values: np.ndarray):
        self.structure = structure
        tree = structure.tree
        self._own = np.diff(tree.start)
        # Per node: the lower triangle of the diagonal block and the panel below it, in Fortran order.
        self._blocks: list[np.ndarray] = []
        self._panels: list[np.ndarray] = []
        with BlasThreads() as threads:
            self._factorise(values[structure.entry_order], threads)

    def _factorise(self, values: np.ndarray, threads: BlasThreads) -> None:
        s = self.structure
        start, entries, places = s.boundary_start.tolist(), s.entry_start.tolist(), s.entry_place
        parent, own = s.tree.parent.tolist(), self._own.tolist()
        pending: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in own]
        logdet = 0.0
        for node, k in enumerate(own):
            b = start[node + 1] - start[node]
            threads.for_front(k + b)
            panel = np.zeros((k + b, k))
            these = slice(entries[node], entries[node + 1])
            panel.ravel()[places[these]] = values[these]
            below = panel[k:].T if b else panel[:0].T
            block = np.asfortranarray(panel[:k])
            rest = np.zeros((b, b), order="F")
            panel_below = np.asfortranarray(below.T)
            for update, rows in pending[node]:
                _extend_add(block, panel_below, rest, update, rows, k)
            pending[node] = []
            block, failed = lapack.dpotrf(block, lower=1, clean=1, overwrite_a=1)
            if failed > 0:
                raise IndefiniteMatrix(f"pivot {s.tree.start[node] + failed} of the factorisation is not positive")
            logdet += 2.0 * np.log(block.diagonal()).sum()
            if b:
                panel_below = blas.dtrsm(1.0, block, panel_below, side=1, lower=1, trans_a=1, overwrite_b=1)
                rest = blas.dsyrk(-1.0, panel_below, beta=1.0, c=rest, lower=1, overwrite_c=1)
                pending[parent[node]].append((rest, s.parent_rows[start[node] : start[node + 1]]))
            self._blocks.append(block)
            self._panels.append(panel_below)
        self.logdet = logdet

    def __len__(self) -> int:
        return len(self.structure.tree.order)

    @property
    def nonzeros(self) -> int:
        """The stored entries of the factor."""
        return self.structure.nonzeros

    def solve(self, right: np.ndarray) -> np.ndarray:
        """A^{-1} right for right (n,) or (n, m)."""
        order = self.structure.tree.order
        x = np.asfortranarray(right[order].reshape(len(order), -1), dtype=float)
        nodes = range(len(self._own))
        with BlasThreads():
            self._forward(x, nodes, self.structure.tree.start, self.structure.boundary)
            self._backward(x)
        result = np.empty_like(x)
        result[order] = x
        return result.reshape(right.shape)

    def _forward(self, x: np.ndarray, nodes: Any, place: np.ndarray, boundary: np.ndarray) -> None:
        """x <- L^{-1} x over `nodes`; node t owns the rows from place[t], and `boundary` holds rows of x."""
        starts = self.structure.boundary_start
        for node in nodes:
            rows = slice(place[node], place[node] + self._own[node])
            x[rows] = lapack.dtrtrs(self._blocks[node], x[rows], lower=1)[0]
            below = boundary[starts[node] : starts[node + 1]]
            if len(below):
                x[below] -= self._panels[node] @ x[rows]

    def _backward(self, x: np.ndarray) -> None:
        s = self.structure
        for node in range(len(self._own) - 1, -1, -1):
            rows = slice(s.tree.start[node], s.tree.start[node + 1])
            below = s.boundary[s.boundary_start[node] : s.boundary_start[node + 1]]
            here = x[rows] - self._panels[node].T @ x[below] if len(below) else x[rows]
            x[rows] = lapack.dtrtrs(self._blocks[node], here, lower=1, trans=1)[0]

    def quadratic(self, left: sparse.csr_matrix, *, full: bool = False, batch: int = 256) -> np.ndarray:
        """left A^{-1} left': the diagonal (m,), or the whole matrix (m, m), for sparse left (m, n).

        Only the blocks that a batch of right-hand sides reaches are visited, and rows that reach the same blocks share a
        batch, so that a prediction costs the square of the largest separators and not the whole factor.
        """
        with BlasThreads():
            return self._quadratic(left[:, self.structure.tree.order].tocsr(), full, batch)

    def _quadratic(self, permuted: sparse.csr_matrix, full: bool, batch: int) -> np.ndarray:
        m = permuted.shape[0]
        if full:
            half = self._half_solved(permuted)
            return half.T @ half
        result = np.zeros(m)
        counts = np.diff(permuted.indptr)
        touched = np.flatnonzero(counts)
        firsts = np.minimum.reduceat(permuted.indices, permuted.indptr[touched]) if len(touched) else touched
        touched = touched[np.argsort(firsts, kind="stable")]
        for begin in range(0, len(touched), batch):
            chosen = touched[begin : begin + batch]
            half = self._half_solved(permuted[chosen])
            result[chosen] = np.einsum("ij,ij->j", half, half)
        return result

    def _half_solved(self, right: sparse.csr_matrix) -> np.ndarray:
        """L^{-1} right' on the rows that it reaches, (reached, m)."""
        s = self.structure
        nodes, place = self._reached(np.unique(right.indices))
        total = int(self._own[nodes].sum())
        compact = np.full(len(self), -1)
        for node in nodes:
            compact[s.tree.start[node] : s.tree.start[node + 1]] = place[node] + np.arange(self._own[node])
        x = np.zeros((total, right.shape[0]), order="F")
        entries = right.tocoo()
        x[compact[entries.col], entries.row] = entries.data
        self._forward(x, nodes, place, compact[s.boundary])
        return x

    def _reached(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The nodes that own the positions, with all their ancestors; and the place of each in a compact array."""
        tree = self.structure.tree
        mask = np.zeros(len(tree.parent), dtype=bool)
        front = np.unique(np.searchsorted(tree.start, positions, side="right") - 1)
        while len(front):
            mask[front] = True
            front = np.unique(tree.parent[front])
            front = front[(front >= 0)]
            front = front[~mask[front]]
        nodes = np.flatnonzero(mask)
        place = np.zeros(len(mask), dtype=np.int64)
        place[nodes] = np.concatenate([[0], np.cumsum(self._own[nodes])[:-1]]) if len(nodes) else []
        return nodes, place

    def multiply(self, x: np.ndarray) -> np.ndarray:
        """P' L x for x (n,) or (n, m): turns white noise into draws with the covariance A."""
        s = self.structure
        work = np.array(x, dtype=float).reshape(len(self), -1)
        result = np.zeros_like(work)
        for node in range(len(self._own)):
            rows = slice(s.tree.start[node], s.tree.start[node + 1])
            below = s.boundary[s.boundary_start[node] : s.boundary_start[node + 1]]
            result[rows] += self._blocks[node] @ work[rows]
            result[below] += self._panels[node] @ work[rows]
        out = np.empty_like(result)
        out[s.tree.order] = result
        return out.reshape(x.shape)

    def inverse_entries(self) -> np.ndarray:
        """The entries of A^{-1} at the pairs that the structure was made of, in their order."""
        with BlasThreads() as threads:
            return self._inverse_entries(threads)

    def _inverse_entries(self, threads: BlasThreads) -> np.ndarray:
        s = self.structure
        found = np.empty(len(s.entry_order))
        waiting = np.bincount(s.tree.parent[s.tree.parent >= 0], minlength=len(self._own))
        fronts: dict[int, np.ndarray] = {}
        for node in range(len(self._own) - 1, -1, -1):
            parent, k = s.tree.parent[node], self._own[node]
            rows = s.parent_rows[s.boundary_start[node] : s.boundary_start[node + 1]]
            threads.for_front(k + len(rows))
            front = self._inverse_front(node, fronts.get(parent), rows)
            these = slice(s.entry_start[node], s.entry_start[node + 1])
            found[s.entry_order[these]] = front[:, :k].ravel()[s.entry_place[these]]
            if parent >= 0:
                waiting[parent] -= 1
                if not waiting[parent]:
                    del fronts[parent]
            if waiting[node]:
                fronts[node] = front
        return found

    def _inverse_front(self, node: int, above: np.ndarray | None, rows: np.ndarray) -> np.ndarray:
        """The inverse on the node's own rows and its boundary, from the parent's."""
        block, panel = self._blocks[node], self._panels[node]
        k, b = block.shape[0], len(rows)
        inverse = lapack.dpotri(block, lower=1)[0]
        inverse = np.tril(inverse) + np.tril(inverse, -1).T
        if above is None or not b:
            return inverse
        outer = above[rows[:, None], rows]
        weights = blas.dtrsm(1.0, block, panel, side=1, lower=1)
        cross = -(outer @ weights)
        front = np.empty((k + b, k + b))
        front[:k, :k] = inverse - weights.T @ cross
        front[k:, :k] = cross
        front[:k, k:] = cross.T
        front[k:, k:] = outer
        return front


def _extend_add(
    block: np.ndarray, panel: np.ndarray, rest: np.ndarray, update: np.ndarray, rows: np.ndarray, k: int
) -> None:
    """Add a child's update (lower triangle) to the three parts of its parent's front, in place."""
    inner = int(np.searchsorted(rows, k))
    own, outer = rows[:inner], rows[inner:] - k
    if inner:
        _add_at(block.T, own, own, update[:inner, :inner].T)
    if len(outer):
        if inner:
            _add_at(panel.T, own, outer, update[inner:, :inner].T)
        _add_at(rest.T, outer, outer, update[inner:, inner:].T)


def _add_at(target: np.ndarray, rows: np.ndarray, cols: np.ndarray, values: np.ndarray) -> None:
    """target[rows, cols] += values on the grid of rows and cols; whole rows move, which is faster than indexing both."""
    spread = np.zeros((len(rows), target.shape[1]))
    spread[:, cols] = values
    target[rows] += spread
