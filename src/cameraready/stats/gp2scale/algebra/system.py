"""Chooses how the matrix of a likelihood is factored, and keeps an ordering for as long as it serves."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from cameraready.stats.gp2scale.algebra.backends import LIBRARIES, LibraryFactor
from cameraready.stats.gp2scale.algebra.dissection import (
    Structure,
    Tree,
    graph_coordinates,
    nested_dissection,
    structure_of,
)
from cameraready.stats.gp2scale.algebra.iterative import IterativeFactor
from cameraready.stats.gp2scale.algebra.multifrontal import MultifrontalFactor

Solver = Literal["auto", "cholesky", "cg"]
Backend = Literal["auto", "multifrontal", "superlu", "qdldl", "cholmod"]
Factor = MultifrontalFactor | LibraryFactor | IterativeFactor

# Structures are reused while their factor is at most this much larger than a fresh one was.
STALE = 1.3


class System:
    """Factors symmetric matrices over the same n points, one after another.

    Parameters
    ----------
    n: points. coordinates: (n, d) or None, for orderings; without them the graph's own distances serve.
    solver, backend, max_factor_bytes, tol, n_probes, seed: as in SparseGPRegressor.
    """

    def __init__(
        self, n: int, coordinates: np.ndarray | None, *, solver: Solver = "auto", backend: Backend = "auto",
        max_factor_bytes: float = 8 * 2**30, tol: float = 1e-8, n_probes: int = 32, seed: int = 0,
    ):  # fmt: skip
        self.n = n
        self._coordinates = coordinates
        self._solver, self._backend, self._limit = solver, backend, max_factor_bytes
        self._tol, self._n_probes, self._seed = tol, n_probes, seed
        self._tree: Tree | None = None
        self._rows = self._cols = np.empty(0, dtype=np.int64)
        self._structure: Structure | None = None
        self.used: str = ""

    def __getstate__(self) -> dict[str, Any]:
        """Without the cached ordering, which another process makes anew."""
        return self.__dict__ | {"_tree": None, "_structure": None, "_rows": self._rows[:0], "_cols": self._cols[:0]}

    def factor(self, rows: np.ndarray, cols: np.ndarray, values: np.ndarray) -> Factor:
        """The factor of the matrix with the given upper-triangle entries; raises IndefiniteMatrix."""
        if self._solver == "cg":
            return self._iterative(rows, cols, values)
        if self._backend in LIBRARIES:
            self.used = self._backend
            return LIBRARIES[self._backend](self.n, rows, cols, values)
        structure = self._structure_for(rows, cols)
        if self._solver == "auto" and self.bytes_of(structure) > self._limit:
            return self._iterative(rows, cols, values)
        self.used = "multifrontal"
        return MultifrontalFactor(structure, values)

    @staticmethod
    def bytes_of(structure: Structure) -> int:
        """The memory that a factorisation takes at its peak, roughly."""
        return 8 * structure.nonzeros + 2 * structure.update_bytes

    def _iterative(self, rows: np.ndarray, cols: np.ndarray, values: np.ndarray) -> IterativeFactor:
        self.used = "cg"
        return IterativeFactor(
            self.n,
            rows,
            cols,
            values,
            self._places(rows, cols),
            tol=self._tol,
            n_probes=self._n_probes,
            seed=self._seed,
        )

    def _places(self, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
        if self._coordinates is not None:
            return self._coordinates
        return graph_coordinates(self.n, rows, cols)

    def _structure_for(self, rows: np.ndarray, cols: np.ndarray) -> Structure:
        if self._structure is not None and np.array_equal(rows, self._rows) and np.array_equal(cols, self._cols):
            return self._structure
        fresh = self._tree is None or not _separates(self._tree, rows, cols)
        if fresh:
            self._tree = nested_dissection(self._places(rows, cols), rows, cols)
        assert self._tree is not None
        structure = structure_of(self._tree, rows, cols)
        if fresh:
            self._entries_when_fresh = len(rows)
        elif len(rows) * STALE < self._entries_when_fresh:
            # The pattern has shrunk: separators made for a denser one are wider than they need be.
            self._tree = nested_dissection(self._places(rows, cols), rows, cols)
            structure = structure_of(self._tree, rows, cols)
            self._entries_when_fresh = len(rows)
        self._rows, self._cols, self._structure = rows, cols, structure
        return structure


def _separates(tree: Tree, rows: np.ndarray, cols: np.ndarray) -> bool:
    """Whether every pair lies in one branch of the tree, so that the tree is an elimination order for it."""
    nodes = len(tree.parent)
    first = np.arange(nodes)
    for node in range(nodes):
        parent = tree.parent[node]
        if parent >= 0:
            first[parent] = min(first[parent], first[node])
    node_of = np.empty(len(tree.order), dtype=np.int64)
    node_of[tree.order] = np.repeat(np.arange(nodes), np.diff(tree.start))
    low, high = np.minimum(node_of[rows], node_of[cols]), np.maximum(node_of[rows], node_of[cols])
    return bool((first[high] <= low).all())
