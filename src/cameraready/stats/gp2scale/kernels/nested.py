"""Kernels made of parts with hyper-parameters of their own: any scikit-learn kernel as a factor, and fields over space."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.spatial import cKDTree
from sklearn.gaussian_process import kernels as dense
from sklearn.gaussian_process.kernels import Hyperparameter, Kernel

from cameraready.stats.gp2scale.kernels.base import SparseKernel, count_points
from cameraready.stats.gp2scale.kernels.neighbours import as_points

# Rows evaluated together when a kernel knows only whole blocks; a block is about this times its neighbours wide.
BLOCK_ROWS = 16


class Parts(SparseKernel):
    """A kernel some of whose parameters are kernels or fields; their hyper-parameters become its own, as `name__inner`."""

    part_names: tuple[str, ...] = ()

    @property
    def hyperparameters(self) -> list[Hyperparameter]:
        """Those of the parts, then the kernel's own."""
        nested = []
        for name in self.part_names:
            part = getattr(self, name)
            if isinstance(part, Kernel):
                nested += [Hyperparameter(f"{name}__{h.name}", *h[1:4]) for h in part.hyperparameters]
        return nested + super().hyperparameters

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters; with `deep` also those of the parts."""
        params = super().get_params(deep=False)
        for name in self.part_names if deep else ():
            part = params[name]
            if isinstance(part, Kernel):
                params.update({f"{name}__{key}": value for key, value in part.get_params(deep=True).items()})
        return params


class Core(Parts):
    """Any kernel of scikit-learn as a factor: evaluated only at the support of the kernel it multiplies.

    `Core(RBF()) * Wendland()` is eq. (4) of Noack et al. (2026) with a core of your choice, and
    `Core(a) * Wendland() + Core(b) * Bumps(...)` has a near and a far core (eq. 12).
    RBF, Matern, rational quadratic, dot product, constant kernels and their sums, products and powers are evaluated pair by
    pair; another kernel in small dense blocks, which is slower. A white kernel is refused: noise belongs to the regressor.

    Parameters
    ----------
    kernel: an instance of `sklearn.gaussian_process.kernels.Kernel`.
    """

    part_names = ("kernel",)

    def __init__(self, kernel: Kernel):
        self.kernel = kernel

    @property
    def guaranteed(self) -> bool:  # type: ignore[override]
        return _always_positive(self.kernel)

    @property
    def requires_vector_input(self) -> bool:
        return self.kernel.requires_vector_input

    def pairs(
        self, X: Any, Y: Any, rows: np.ndarray, cols: np.ndarray, eval_gradient: bool = False
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        return _dense_pairs(self.kernel, X, Y, rows, cols, eval_gradient)

    def diag(self, X: Any) -> np.ndarray:
        return self.kernel.diag(X)

    def is_stationary(self) -> bool:
        return self.kernel.is_stationary()

    def __repr__(self) -> str:
        return f"Core({self.kernel!r})"


class Field(Kernel):
    """A positive function of space, exp(sum_k w_k(x) log v_k), that a non-stationary kernel can learn.

    The weights w are Gaussians around the centres, normalised to sum to one, so the field interpolates the values
    smoothly and never leaves their range. (It derives from scikit-learn's Kernel for its hyper-parameters alone.)

    Parameters
    ----------
    centres: (K, d).
    values: (K,) positive, the hyper-parameters; a number stands for K equal ones.
    width: of the Gaussians; None takes the mean distance of a centre to its nearest other centre.
    values_bounds: bounds for the optimisation of every value, or "fixed".
    """

    def __init__(
        self, centres: Any, values: Any = 1.0, width: float | None = None, *, values_bounds: Any = (1e-5, 1e5)
    ):
        self.centres = centres
        self.values = values
        self.width = width
        self.values_bounds = values_bounds

    @property
    def hyperparameter_values(self) -> Hyperparameter:
        return Hyperparameter("values", "numeric", self.values_bounds, len(self.centres))

    @property
    def theta(self) -> np.ndarray:
        """The logarithms of the values (K,); empty when they are fixed."""
        return np.empty(0) if self.hyperparameter_values.fixed else np.log(self._values())

    @theta.setter
    def theta(self, theta: np.ndarray) -> None:
        self.values = np.exp(theta)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters; seen from a kernel around it (`deep`), a single value counts as K equal ones."""
        params = super().get_params(deep=deep)
        return params | {"values": self._values()} if deep else params

    def __call__(self, X: Any, Y: Any = None, eval_gradient: bool = False) -> Any:
        """The field (n,); with `eval_gradient` also d log field / d log values, (n, K)."""
        weights = self._weights(as_points(X))
        field = np.exp(weights @ np.log(self._values()))
        return (field, weights) if eval_gradient else field

    def diag(self, X: Any) -> np.ndarray:
        return self(X)

    def is_stationary(self) -> bool:
        return False

    def _values(self) -> np.ndarray:
        values = np.broadcast_to(np.asarray(self.values, dtype=float), (len(self.centres),)).copy()
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise ValueError(f"the values of a Field must be finite and above 0, got {self.values}")
        return values

    def _weights(self, points: np.ndarray) -> np.ndarray:
        centres = as_points(self.centres)
        if centres.shape[1] != points.shape[1]:
            raise ValueError(f"the Field's centres have {centres.shape[1]} columns, the points {points.shape[1]}")
        if len(centres) == 1:
            return np.ones((len(points), 1))
        width = cKDTree(centres).query(centres, k=[2])[0].mean() if self.width is None else self.width
        if not width > 0:
            raise ValueError(
                f"the width of a Field must be above 0, got {width}; equal centres need a width of their own"
            )
        squares = sum(np.square((points[:, [k]] - centres[:, k]) / width) for k in range(points.shape[1]))
        logs = -0.5 * (squares - squares.min(axis=1, keepdims=True))
        weights = np.exp(logs)
        return weights / weights.sum(axis=1, keepdims=True)

    def __repr__(self) -> str:
        return f"Field({len(self.centres)} centres)"


def _always_positive(kernel: Kernel) -> bool:
    """Whether the kernel is positive semi-definite in every dimension, by what is known of its class."""
    if isinstance(kernel, dense.KernelOperator):
        return _always_positive(kernel.k1) and _always_positive(kernel.k2)
    if isinstance(kernel, dense.Exponentiation):
        return float(kernel.exponent).is_integer() and kernel.exponent >= 0 and _always_positive(kernel.kernel)
    known = (dense.RBF, dense.Matern, dense.RationalQuadratic, dense.DotProduct, dense.ConstantKernel)
    return isinstance(kernel, known)


def _dense_pairs(
    kernel: Kernel, X: Any, Y: Any, rows: np.ndarray, cols: np.ndarray, eval_gradient: bool
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Values of a dense kernel on pairs, and derivatives in the order of its theta."""
    if isinstance(kernel, dense.KernelOperator):
        first, d_first = _dense_pairs(kernel.k1, X, Y, rows, cols, eval_gradient)
        second, d_second = _dense_pairs(kernel.k2, X, Y, rows, cols, eval_gradient)
        if isinstance(kernel, dense.Sum):
            return first + second, d_first + d_second
        return first * second, [d * second for d in d_first] + [first * d for d in d_second]
    if isinstance(kernel, dense.WhiteKernel):
        raise ValueError("a WhiteKernel inside Core: leave it out and use noise='learn' of the regressor")
    if isinstance(kernel, dense.ConstantKernel):
        values = np.full(len(rows), float(kernel.constant_value))
        return values, [values] if eval_gradient and not kernel.hyperparameter_constant_value.fixed else []
    if type(kernel) is dense.RBF or (type(kernel) is dense.Matern and kernel.nu in (0.5, 1.5, 2.5, np.inf)):
        return _radial_pairs(kernel, X, Y, rows, cols, eval_gradient)
    if eval_gradient and len(kernel.theta):
        return _gradient_blocks(kernel, X, Y, rows, cols)
    if isinstance(kernel, dense.StationaryKernelMixin) and kernel.requires_vector_input:
        # A stationary kernel on pairs is one column: the differences against the origin.
        differences = as_points(X)[rows] - as_points(Y)[cols]
        return kernel(differences, np.zeros((1, differences.shape[1])))[:, 0], []
    return _value_blocks(kernel, X, Y, rows, cols), []


def _radial_pairs(
    kernel: Kernel, X: Any, Y: Any, rows: np.ndarray, cols: np.ndarray, eval_gradient: bool
) -> tuple[np.ndarray, list[np.ndarray]]:
    """RBF and Matern of half-integer order, with closed-form derivatives."""
    scale = np.asarray(kernel.length_scale, dtype=float)
    if scale.ndim and len(scale) not in (1, as_points(X).shape[1]):
        raise ValueError(
            f"{kernel!r} has {len(scale)} length scales, but the points have {as_points(X).shape[1]} columns"
        )
    squares = np.square((as_points(X)[rows] - as_points(Y)[cols]) / scale)
    total = squares.sum(axis=1)
    order = getattr(kernel, "nu", np.inf)
    if order == np.inf:
        values = np.exp(-0.5 * total)
        slope = values
    else:
        r = np.sqrt(2 * order * total)
        decay = np.exp(-r)
        if order == 0.5:
            # -k'(r)/r is infinite at 0, where it meets a difference of 0.
            values, slope = decay, decay * np.divide(1.0, r, out=np.zeros_like(r), where=r > 0)
        elif order == 1.5:
            values, slope = (1 + r) * decay, 3 * decay
        else:
            values, slope = (1 + r + r * r / 3) * decay, (5 / 3) * (1 + r) * decay
    if not eval_gradient or kernel.hyperparameter_length_scale.fixed:
        return values, []
    return values, [slope * column for column in squares.T] if scale.ndim and len(scale) > 1 else [slope * total]


def _grouped(rows: np.ndarray) -> list[np.ndarray]:
    """Indices of the pairs, in groups of BLOCK_ROWS consecutive rows."""
    order = np.argsort(rows, kind="stable")
    group = rows[order] // BLOCK_ROWS
    return np.split(order, np.flatnonzero(np.diff(group)) + 1) if len(order) else []


def _value_blocks(kernel: Kernel, X: Any, Y: Any, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    values = np.empty(len(rows))
    for chosen in _grouped(rows):
        i, at_i = np.unique(rows[chosen], return_inverse=True)
        j, at_j = np.unique(cols[chosen], return_inverse=True)
        values[chosen] = kernel(_take(X, i), _take(Y, j))[at_i, at_j]
    return values


def _gradient_blocks(
    kernel: Kernel, X: Any, Y: Any, rows: np.ndarray, cols: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Values and derivatives of any kernel of scikit-learn; it differentiates only the covariance of a set with itself."""
    if Y is not X:
        raise ValueError("the gradient is defined for the covariance of X with itself")
    values, slopes = np.empty(len(rows)), np.empty((len(kernel.theta), len(rows)))
    for chosen in _grouped(rows):
        points, at = np.unique(np.concatenate([rows[chosen], cols[chosen]]), return_inverse=True)
        i, j = at[: len(chosen)], at[len(chosen) :]
        block, gradient = kernel(_take(X, points), eval_gradient=True)
        values[chosen] = block[i, j]
        slopes[:, chosen] = gradient[i, j].T
    return values, list(slopes)


def _take(X: Any, index: np.ndarray) -> Any:
    return X[index] if hasattr(X, "shape") else [X[i] for i in index[: count_points(X)]]
