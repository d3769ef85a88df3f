"""Links between far-away places: bumps and point sets that share a latent function (Noack et al., 2026, eqs. 7 to 10)."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse
from scipy.spatial import cKDTree
from sklearn.gaussian_process.kernels import Hyperparameter

from cameraready.stats.gp2scale.kernels.base import SparseKernel, count_points
from cameraready.stats.gp2scale.kernels.neighbours import as_points

Pairs = tuple[np.ndarray, np.ndarray]


class Bumps(SparseKernel):
    """sum_u g_u(x) g_u(x'), with g_u a sum of smooth bumps at the places of group u: far-field links of rank U.

    One bump (eq. 7) at centre c is a exp(s (1 - 1 / (1 - t))) with t = |x - c|^2 / radius^2, and exactly 0 for t >= 1.
    Positive semi-definite as a sum of products of features; alone it gives no variance outside its bumps, so add a Wendland
    kernel: `Core(RBF()) * (Bumps(...) + Wendland())` is eq. (9).

    Parameters
    ----------
    centres: the places, a list of U arrays (P_u, d); one array (P, d) is one group, whose places are all linked.
    radius: of every bump, in units of the inputs.
    amplitude: a, a number or one for each group (U,); 0 switches the links off exactly. Its bounds must be above 0: an
        optimisation that begins at 0 also tries the middle of the bounds, because the slope at 0 is 0.
    shape: s, how steeply a bump falls; > 0.
    radius_bounds, amplitude_bounds, shape_bounds: bounds for the optimisation of each, or "fixed".
    """

    def __init__(
        self,
        centres: Any,
        radius: float = 1.0,
        amplitude: Any = 1.0,
        shape: float = 1.0,
        *,
        radius_bounds: Any = (1e-5, 1e5),
        amplitude_bounds: Any = (1e-3, 1e3),
        shape_bounds: Any = "fixed",
    ):
        self.centres = centres
        self.radius = radius
        self.amplitude = amplitude
        self.shape = shape
        self.radius_bounds = radius_bounds
        self.amplitude_bounds = amplitude_bounds
        self.shape_bounds = shape_bounds

    @property
    def hyperparameter_amplitude(self) -> Hyperparameter:
        size = len(self.amplitude) if np.ndim(self.amplitude) else 1
        return Hyperparameter("amplitude", "numeric", self.amplitude_bounds, size)

    @property
    def hyperparameter_radius(self) -> Hyperparameter:
        return Hyperparameter("radius", "numeric", self.radius_bounds)

    @property
    def hyperparameter_shape(self) -> Hyperparameter:
        return Hyperparameter("shape", "numeric", self.shape_bounds)

    @property
    def theta(self) -> np.ndarray:
        """Natural logarithms; -inf for an amplitude of 0."""
        with np.errstate(divide="ignore"):
            return super().theta

    @theta.setter
    def theta(self, theta: np.ndarray) -> None:
        SparseKernel.theta.fset(self, theta)

    def support(self, X: Any, Y: Any = None) -> Pairs:
        first = self._features(X)[0]
        second = first if Y is None else self._features(Y)[0]
        linked = sparse.csr_matrix(first != 0, dtype=np.int32) @ sparse.csr_matrix(second != 0, dtype=np.int32).T
        return linked_pairs(linked, symmetric=Y is None)

    def pairs(
        self, X: Any, Y: Any, rows: np.ndarray, cols: np.ndarray, eval_gradient: bool = False
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        first, d_first = self._features(X, eval_gradient)
        second, d_second = (first, d_first) if Y is X else self._features(Y, eval_gradient)
        values = paired(first, second, rows, cols)
        slopes = [
            paired(d, second, rows, cols) + paired(first, e, rows, cols) for d, e in zip(d_first, d_second, strict=True)
        ]
        return values, slopes

    def _features(self, X: Any, eval_gradient: bool = False) -> tuple[np.ndarray, list[np.ndarray]]:
        """g (n, U) and its derivatives by the free log-hyper-parameters, in the order of theta."""
        points, groups = as_points(X), self._groups()
        amplitude = np.broadcast_to(np.asarray(self.amplitude, dtype=float), (len(groups),))
        if not (np.isfinite(amplitude).all() and (amplitude >= 0).all() and self.radius > 0 and self.shape > 0):
            raise ValueError(f"bumps need radius > 0, shape > 0 and amplitude >= 0, got {self!r}")
        g, by_radius, by_shape = (np.zeros((len(points), len(groups))) for _ in range(3))
        for u, centres in enumerate(groups):
            if centres.shape[1] != points.shape[1]:
                raise ValueError(f"the bumps' centres have {centres.shape[1]} columns, the points {points.shape[1]}")
            i, j = _near(points, centres, self.radius)
            t = np.square((points[i] - centres[j]) / self.radius).sum(axis=1)
            inside = t < 1
            i, rest = i[inside], 1 - t[inside]
            bump = amplitude[u] * np.exp(self.shape * (1 - 1 / rest))
            np.add.at(g[:, u], i, bump)
            np.add.at(by_radius[:, u], i, bump * self.shape * 2 * (1 - rest) / rest**2)
            np.add.at(by_shape[:, u], i, bump * self.shape * (1 - 1 / rest))
        return g, self._slopes(g, by_radius, by_shape) if eval_gradient else []

    def _slopes(self, g: np.ndarray, by_radius: np.ndarray, by_shape: np.ndarray) -> list[np.ndarray]:
        slopes = []
        if not self.hyperparameter_amplitude.fixed:
            own = np.eye(g.shape[1]) if np.ndim(self.amplitude) else np.ones((1, g.shape[1]))
            slopes += [g * mask for mask in own]
        if not self.hyperparameter_radius.fixed:
            slopes.append(by_radius)
        if not self.hyperparameter_shape.fixed:
            slopes.append(by_shape)
        return slopes

    def _groups(self) -> list[np.ndarray]:
        given = self.centres
        groups = [given] if isinstance(given, np.ndarray) and given.ndim == 2 else list(given)
        arrays = [np.asarray(group, dtype=float) for group in groups]
        if not arrays or any(array.ndim != 2 or not len(array) for array in arrays):
            raise ValueError("centres must be a list of arrays (places, dimensions), or one such array")
        if np.ndim(self.amplitude) and len(np.asarray(self.amplitude)) != len(arrays):
            raise ValueError(f"{len(np.asarray(self.amplitude))} amplitudes for {len(arrays)} groups of bumps")
        return arrays

    def __repr__(self) -> str:
        return f"Bumps(radius={self.radius:.3g}, amplitude={self.amplitude}, shape={self.shape:.3g})"


class Deltas(SparseKernel):
    """amplitude^2 sum_p g_p(x) g_p(x'), with g_p the indicator of a set of points (eq. 10). Positive semi-definite.

    Parameters
    ----------
    sets: for each set either an array of points (m, d), matched exactly, or a callable X -> boolean mask (n,). Callables
        also serve inputs that are not vectors.
    amplitude: one number; 0 switches the links off.
    amplitude_bounds: bounds for its optimisation, or "fixed".
    """

    def __init__(self, sets: Any, amplitude: float = 1.0, *, amplitude_bounds: Any = (1e-3, 1e3)):
        self.sets = sets
        self.amplitude = amplitude
        self.amplitude_bounds = amplitude_bounds

    @property
    def hyperparameter_amplitude(self) -> Hyperparameter:
        return Hyperparameter("amplitude", "numeric", self.amplitude_bounds)

    @property
    def requires_vector_input(self) -> bool:
        return not all(callable(members) for members in self.sets)

    @property
    def theta(self) -> np.ndarray:
        """Natural logarithms; -inf for an amplitude of 0."""
        with np.errstate(divide="ignore"):
            return super().theta

    @theta.setter
    def theta(self, theta: np.ndarray) -> None:
        SparseKernel.theta.fset(self, theta)

    def support(self, X: Any, Y: Any = None) -> Pairs:
        if self.amplitude == 0:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        first = self._members(X)
        second = first if Y is None else self._members(Y)
        linked = sparse.csr_matrix(first, dtype=np.int32) @ sparse.csr_matrix(second, dtype=np.int32).T
        return linked_pairs(linked, symmetric=Y is None)

    def pairs(
        self, X: Any, Y: Any, rows: np.ndarray, cols: np.ndarray, eval_gradient: bool = False
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        if not self.amplitude >= 0:
            raise ValueError(f"the amplitude of Deltas must be at least 0, got {self.amplitude}")
        first = self._members(X)
        second = first if Y is X else self._members(Y)
        values = self.amplitude**2 * paired(first, second, rows, cols)
        free = eval_gradient and not self.hyperparameter_amplitude.fixed
        return values, [2 * values] if free else []

    def _members(self, X: Any) -> np.ndarray:
        """The indicators (n, P) as numbers."""
        n = count_points(X)
        columns = [np.asarray(m(X) if callable(m) else _among(as_points(X), m), dtype=float) for m in self.sets]
        if not columns or any(column.shape != (n,) for column in columns):
            raise ValueError(f"each set of Deltas must mark {n} points with one boolean each")
        return np.stack(columns, axis=1)

    def __repr__(self) -> str:
        return f"Deltas({len(self.sets)} sets, amplitude={self.amplitude:.3g})"


def paired(first: np.ndarray, second: np.ndarray, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """sum_u first[rows, u] second[cols, u], one column at a time to bound the memory."""
    total = np.zeros(len(rows))
    for a, b in zip(first.T, second.T, strict=True):
        total += a[rows] * b[cols]
    return total


def linked_pairs(linked: sparse.spmatrix, *, symmetric: bool) -> Pairs:
    """The stored pairs of a sparse matrix; of its upper triangle when it is symmetric."""
    found = linked.tocoo()
    rows, cols = found.row.astype(np.int64), found.col.astype(np.int64)
    if symmetric:
        upper = rows <= cols
        rows, cols = rows[upper], cols[upper]
    return rows, cols


def _near(points: np.ndarray, centres: np.ndarray, radius: float) -> Pairs:
    found = cKDTree(points).sparse_distance_matrix(cKDTree(centres), radius * (1 + 1e-9), output_type="ndarray")
    return found["i"], found["j"]


def _among(points: np.ndarray, members: Any) -> np.ndarray:
    """Which points are exactly equal to one of the members."""
    members = as_points(members)
    if members.shape[1] != points.shape[1]:
        raise ValueError(f"a set of Deltas has points with {members.shape[1]} columns, X has {points.shape[1]}")
    known = {row.tobytes() for row in members + 0.0}  # + 0.0 makes -0.0 equal to 0.0
    return np.array([row.tobytes() in known for row in points + 0.0], dtype=bool)
