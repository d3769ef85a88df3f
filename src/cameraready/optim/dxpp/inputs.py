"""From tensors to programs: batches, sparse layouts, what is shared, where to start."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import scipy.sparse as sparse
import torch
from torch import Tensor

from cameraready.optim._linear import Array, Matrix
from cameraready.optim.dxpp.numerics import programs
from cameraready.optim.dxpp.numerics.programs import Program, Scales
from cameraready.optim.dxpp.numerics.solver import Options
from cameraready.optim.dxpp.numerics.solving import QPInfo, Solved

NAMES = ("Q", "q", "G", "h", "A", "b", "lb", "ub")
MATRICES = ("Q", "G", "A")
#: Bounds of this size mean none, as most solvers have it.
NO_BOUND = 1e20


@dataclass(frozen=True)
class Pattern:
    """Where the values of a sparse matrix stand: rows and columns, (nnz,) each, and samples (nnz,) if it is batched."""

    shape: tuple[int, int]
    row: Array
    column: Array
    sample: Array | None = None
    n_samples: int = 0


def taken_apart(tensor: Tensor) -> tuple[Tensor, Pattern]:
    """Values (nnz,) of a sparse tensor, differentiable, and their pattern. Raises TypeError for block and hybrid layouts."""
    if tensor.layout not in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc) or tensor.dense_dim() > 0:
        raise TypeError(
            f"a sparse matrix must be COO, CSR or CSC with scalar entries, got {tensor.layout} with {tensor.dense_dim()} dense dimensions"
        )
    listed = (tensor if tensor.layout is torch.sparse_coo else tensor.to_sparse_coo()).coalesce()
    where = listed.indices().detach().cpu().numpy()
    shape = (listed.shape[-2], listed.shape[-1])
    if tensor.ndim == 3:
        return listed.values(), Pattern(shape, where[1], where[2], where[0], listed.shape[0])
    return listed.values(), Pattern(shape, where[0], where[1])


@dataclass
class Run:
    """One call of the layer: what was passed beside tensors, and what came out beside tensors."""

    options: Options
    regularization: float
    patterns: Mapping[str, Pattern]
    differentiable: bool
    start: Array | None = None
    kept: tuple[str, Array | None] | None = None
    family: str = ""
    solved: list[Solved] = field(default_factory=list)
    scales: list[Scales] = field(default_factory=list)
    batched: bool = False

    @property
    def infos(self) -> list[QPInfo]:
        return [each.info for each in self.solved]


class Inputs:
    """The tensors of a call as arrays, sample by sample; matrices that the batch shares are checked and converted once."""

    def __init__(self, tensors: Mapping[str, Tensor | None], patterns: Mapping[str, Pattern]) -> None:
        self.patterns = patterns
        self.values = {
            name: None if tensor is None else tensor.detach().cpu().to(torch.float64).numpy()
            for name, tensor in tensors.items()
        }
        quadratic = tensors["Q"]
        assert quadratic is not None
        self.precision = torch.finfo(quadratic.dtype).eps
        self.sparse = bool(patterns)
        sizes = {name: self._samples(name) for name, values in self.values.items() if values is not None}
        counts = {size for size in sizes.values() if size is not None}
        if len(counts) > 1:
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items() if size is not None)
            raise ValueError(f"batch sizes differ: {listed}; every input has the batch's size or no batch dimension")
        self.batched = bool(counts)
        self.count = counts.pop() if counts else 1
        self._check_shapes()
        for name, values in self.values.items():
            if values is not None:
                programs.check_finite(name, values, infinite=name in ("lb", "ub"))
        self._shared: dict[str, tuple[Matrix, Array | None]] = {}

    def _samples(self, name: str) -> int | None:
        if name in self.patterns:
            return self.patterns[name].n_samples if self.patterns[name].sample is not None else None
        values, base = self.values[name], 2 if name in MATRICES else 1
        assert values is not None
        if values.ndim not in (base, base + 1):
            raise ValueError(
                f"{name} must have {base} dimensions, or {base + 1} with a batch, got shape {values.shape}"
            )
        return values.shape[0] if values.ndim == base + 1 else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Without the batch."""
        if name in self.patterns:
            return self.patterns[name].shape
        values = self.values[name]
        if values is None:
            return (0, self.n) if name in MATRICES else (0,)
        return values.shape[-2:] if name in MATRICES else values.shape[-1:]

    def _check_shapes(self) -> None:
        q = self.values["q"]
        assert q is not None
        self.n = n = q.shape[-1]
        self.m, self.p = self.shape("G")[0], self.shape("A")[0]
        expected = {
            "Q": (n, n),
            "G": (self.m, n),
            "h": (self.m,),
            "A": (self.p, n),
            "b": (self.p,),
            "lb": (n,),
            "ub": (n,),
        }
        for name, shape in expected.items():
            if name in ("lb", "ub") and self.values[name] is None:
                continue
            if self.shape(name) != shape:
                raise ValueError(
                    f"{name} must have shape {shape} for q of {n} and {self.m} rows of G, {self.p} of A, got {self.shape(name)}"
                )
        if n == 0:
            raise ValueError(f"a program needs variables, got q of shape {q.shape}")
        if self.p > n:
            raise ValueError(
                f"A has {self.p} rows for {n} variables; more equalities than variables depend on each other, leave rows out"
            )

    def matrix(self, name: str, i: int) -> tuple[Matrix, Array | None]:
        """Matrix of sample i, and the norms of its rows (None for Q)."""
        shared = self._samples(name) is None if name in self.patterns or self.values[name] is not None else True
        if shared and name in self._shared:
            return self._shared[name]
        found = self._matrix(name, i)
        if name == "Q":
            result: tuple[Matrix, Array | None] = (programs.checked_quadratic(found, self.precision), None)
        else:
            result = (found, programs.row_norms(name, found))
        if shared:
            self._shared[name] = result
        return result

    def _matrix(self, name: str, i: int) -> Matrix:
        values = self.values[name]
        if name in self.patterns:
            pattern = self.patterns[name]
            assert values is not None
            mine = slice(None) if pattern.sample is None else pattern.sample == i
            where = (pattern.row[mine].astype(np.int32), pattern.column[mine].astype(np.int32))
            return sparse.csc_array((values[mine], where), shape=pattern.shape)
        if values is None:
            dense: Array = np.zeros((0, self.n))
        else:
            dense = values[i] if values.ndim == 3 else values
        return sparse.csc_array(dense) if self.sparse else dense

    def vector(self, name: str, i: int, missing: float = 0.0) -> Array:
        values = self.values[name]
        if values is None:
            return np.full(self.n if name in ("lb", "ub") else 0, missing)
        return values[i] if values.ndim == 2 else values

    def program(self, i: int, regularization: float) -> tuple[Program, Scales]:
        """The normalised program of sample i."""
        Q, _ = self.matrix("Q", i)
        (G, G_norms), (A, A_norms) = self.matrix("G", i), self.matrix("A", i)
        vectors = {name: self.vector(name, i) for name in ("q", "h", "b")}
        lb, ub = self.vector("lb", i, -np.inf), self.vector("ub", i, np.inf)
        lb, ub = np.where(lb <= -NO_BOUND, -np.inf, lb), np.where(ub >= NO_BOUND, np.inf, ub)
        program = Program(
            Q,
            vectors["q"],
            G,
            vectors["h"],
            A,
            vectors["b"],
            lb,
            ub,
        )
        programs.check_bounds(program)
        assert G_norms is not None
        assert A_norms is not None
        return programs.normalised(program, G_norms, A_norms, regularization)

    def starts(self, run: Run) -> Array | None:
        """Where to start from, (batch, n): what the user says, or the last solution of the same family."""
        if run.kept is not None:
            run.family = self.family()
        if run.start is None:
            return run.kept[1] if run.kept is not None and run.kept[0] == run.family else None
        shape = (self.count, self.n)
        if run.start.shape not in ((self.n,), shape):
            raise ValueError(f"start must have shape ({self.n},) or {shape}, got {run.start.shape}")
        return np.broadcast_to(run.start, shape)

    def family(self) -> str:
        """A digest of what programs share that may start from each other's solutions: sizes and all matrices."""
        digest = hashlib.blake2b(repr((self.n, self.m, self.p, self.count, self.batched)).encode())
        for name in MATRICES:
            values = self.values[name]
            if values is not None:
                digest.update(np.ascontiguousarray(values).tobytes())
            if name in self.patterns:
                digest.update(self.patterns[name].row.tobytes() + self.patterns[name].column.tobytes())
        return digest.hexdigest()
