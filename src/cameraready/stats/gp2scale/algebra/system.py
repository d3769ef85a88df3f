"""Chooses how the matrix of a likelihood is factored, and keeps an ordering for as long as it serves."""

from __future__ import annotations

from dataclasses import dataclass
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

# Orderings are reused until the pattern has shrunk by this factor.
STALE = 1.3


@dataclass(frozen=True, eq=False)
class _Known:
    """The last structure, the pairs that it is for, and how many there were when its ordering was made."""

    rows: np.ndarray
    cols: np.ndarray
    structure: Structure
    entries_when_fresh: int


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
        self._known: _Known | None = None
        self.used: str = ""

    def __getstate__(self) -> dict[str, Any]:
        """Without the cached ordering, which another process makes anew."""
        return self.__dict__ | {"_known": None}

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
        known = self._known  # read and written once, so that threads share a system
        if known is not None and np.array_equal(rows, known.rows) and np.array_equal(cols, known.cols):
            return known.structure
        # Of a pattern that has shrunk much, separators made for the denser one are wider than they need be.
        stale = known is None or len(rows) * STALE < known.entries_when_fresh
        if known is None or stale or not _separates(known.structure.tree, rows, cols):
            tree, fresh = nested_dissection(self._places(rows, cols), rows, cols), len(rows)
        else:
            tree, fresh = known.structure.tree, known.entries_when_fresh
        structure = structure_of(tree, rows, cols)
        self._known = _Known(rows, cols, structure, fresh)
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
