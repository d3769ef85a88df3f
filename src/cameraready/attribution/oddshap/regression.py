"""Constrained, Shapley-weighted least squares on parity functions, with standard errors of the Shapley values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from cameraready.attribution.oddshap.sampling import Units

#: Rows turned into floats at a time, so that memory stays O(K^2 + K m / 2 bytes) for K terms.
_BLOCK = 4096
#: Entries (terms x rows) up to which the rows are kept as float64, 256 MB.
_KEPT = 32_000_000
#: Reciprocal condition number of the normal matrix, by the precision of its products, below which it is not trusted.
_TRUSTED = {np.float32: 1e-7, np.float64: 1e-13}


@dataclass(frozen=True)
class Fit:
    """Coefficients of the parity functions and what they say of the Shapley values.

    Attributes
    ----------
    coefficients : float array (K,)
        One per term; they satisfy the constraints to rounding.
    values, standard_errors : float arrays (n_players,)
        Shapley values of the fitted function and their standard errors; NaN where there are no more rows than terms.
    min_norm : bool
        True where the rows do not determine the coefficients and the minimum-norm solution was taken.
    """

    coefficients: np.ndarray
    values: np.ndarray
    standard_errors: np.ndarray
    min_norm: bool


def regress(terms: np.ndarray, units: Units, game_values: np.ndarray) -> Fit:
    """Fit sum over T of beta_T (-1)^|S n T| to a game's values, exact on the empty and the full coalition.

    Parameters
    ----------
    terms : bool array (K, n_players)
        The sets T. If all are of odd size the constant is (v(N) + v(0)) / 2, which the constraint implies, and a pair
        enters as one row with target (v(S) - v(S^c)) / 2; same solution, half the rows. Otherwise the empty set must
        be among the terms.
    units : Units
        What was drawn.
    game_values : float array (m,)
        Values along the sequence: v(0), v(N), then the units'.

    Notes
    -----
    Importance correction and Shapley kernel together vary only by a factor of about n_players / 4 over the rows, and
    parity functions are nearly orthogonal, so the normal matrix is well conditioned: it is factored by Cholesky and the
    solution refined by its residual (corrected seminormal equations; Bjorck, 1987), at a fraction of the cost of an
    SVD; its products are float32 where the condition allows, the residuals always float64. Where the factor is not trusted (fewer rows than terms, duplicate columns) the minimum-norm solution of the
    projected problem is taken instead.

    The population optimum has the Shapley values of the game for any set of terms that holds all singletons, so the only error
    is that of sampling: standard errors are a sandwich of the residuals' scores, centred within each size, with finite
    population correction (zero where a size is enumerated), times n / (n - K). They do not account for terms having been
    chosen on the same data.
    """
    odd = bool((terms.sum(axis=1) % 2 == 1).all())
    rows = _odd_rows(units, game_values) if odd else _all_rows(units, game_values)
    empty, full = game_values[:2]
    signs = np.where(terms.sum(axis=1) % 2 == 1, -1.0, 1.0)
    if odd:
        constraint, bound = np.ones((1, len(terms))), np.array([(empty - full) / 2])
    else:  # on the empty and the full coalition
        constraint, bound = np.stack([np.ones(len(terms)), signs]), np.array([empty, full])
    system = _System(parities(terms, rows.coalitions), rows.weights, rows.target)
    share = np.where(terms & (signs < 0)[:, None], -2.0 / np.maximum(terms.sum(axis=1), 1)[:, None], 0.0)
    errors = np.full(terms.shape[1], np.nan)
    surplus = len(rows.target) - (len(terms) - len(constraint))
    if surplus > 0:
        for precision in (np.float32, np.float64):
            solver = _Solver(system, constraint, precision)
            beta = None if solver.singular else solver.solve(bound)
            if beta is not None:
                errors = _standard_errors(system, solver, share, units) * np.sqrt(len(rows.target) / surplus)
                return Fit(beta, share.T @ beta, errors, min_norm=False)
    beta = _minimum_norm(system, constraint, bound)
    return Fit(beta, share.T @ beta, errors, min_norm=True)


@dataclass(frozen=True)
class _Rows:
    coalitions: np.ndarray  # (n, n_players); of pairs that enter as two rows, first every S, then every complement
    weights: np.ndarray  # (n,)
    target: np.ndarray  # (n,)


def _odd_rows(units: Units, game_values: np.ndarray) -> _Rows:
    own = game_values[units.first]
    target = (own - game_values[units.first + 1]) / 2 if units.paired else own - (game_values[0] + game_values[1]) / 2
    return _Rows(units.coalitions, units.weights, target)


def _all_rows(units: Units, game_values: np.ndarray) -> _Rows:
    own = game_values[units.first]
    if not units.paired:
        return _Rows(units.coalitions, units.weights, own)
    return _Rows(
        np.concatenate([units.coalitions, ~units.coalitions]),
        np.concatenate([units.weights, units.weights]) / 2,
        np.concatenate([own, game_values[units.first + 1]]),
    )


def parities(terms: np.ndarray, coalitions: np.ndarray) -> np.ndarray:
    """chi_T(S) = (-1)^|S n T| for every term and row: int8 array (K, n)."""
    single = np.where(coalitions.T, np.int8(-1), np.int8(1))
    parities = np.ones((len(terms), len(coalitions)), dtype=np.int8)
    sizes = terms.sum(axis=1)
    for size in np.unique(sizes[sizes > 0]):
        rows = np.flatnonzero(sizes == size)
        members = np.nonzero(terms[rows])[1].reshape(-1, size)
        product = single[members[:, 0]]
        for column in members.T[1:]:
            product *= single[column]
        parities[rows] = product
    return parities


class _System:
    """The weighted rows, turned into floats once if they are few and block by block otherwise; mean weight is 1."""

    def __init__(self, parities: np.ndarray, weights: np.ndarray, target: np.ndarray) -> None:
        self.parities = parities
        self.root = np.sqrt(weights / weights.mean()) if len(weights) else weights
        self.target = target * self.root
        self.n_terms, self.n_rows = parities.shape
        self._kept: list[tuple[slice, np.ndarray]] | None = None
        if parities.size <= _KEPT:
            self._kept = list(self.blocks(np.float64))

    def blocks(self, dtype: type) -> Iterator[tuple[slice, np.ndarray]]:
        """Slices of rows and their weighted parities: arrays (K, rows) of `dtype`."""
        if self._kept is not None:
            yield from ((at, block.astype(dtype, copy=False)) for at, block in self._kept)
            return
        root = self.root.astype(dtype)
        for start in range(0, self.n_rows, _BLOCK):
            at = slice(start, min(start + _BLOCK, self.n_rows))
            yield at, self.parities[:, at] * root[at]

    def gram(self, dtype: type) -> np.ndarray:
        """Normal matrix (K, K), its products in `dtype`, summed in float64."""
        total = np.zeros((self.n_terms, self.n_terms))
        for _, block in self.blocks(dtype):
            total += block @ block.T
        return total

    def residual_and_gradient(self, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        residual, gradient = np.empty(self.n_rows), np.zeros(self.n_terms)
        for at, block in self.blocks(np.float64):
            residual[at] = self.target[at] - beta @ block
            gradient += block @ residual[at]
        return residual, gradient

    def scores(self, pull: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """Each row's pull (n, q) on q linear functions of the coefficients, whose projected gradients are `pull` (K, q)."""
        found = np.empty((self.n_rows, pull.shape[1]))
        for at, block in self.blocks(np.float32):  # goes into standard errors only
            found[at] = block.T @ pull.astype(np.float32)
        return found * residual[:, None]


class _Solver:
    """Cholesky factor of the normal matrix plus a multiple of the constraints, which has the same constrained optimum."""

    def __init__(self, system: _System, constraint: np.ndarray, dtype: type) -> None:
        self.system, self.constraint = system, constraint
        self.residual = system.target  # of the last coefficients but one, which differ from the last by rounding
        gram = system.gram(dtype)
        # The multiple makes the constrained directions as stiff as the others.
        gram += (np.trace(gram) / gram.shape[0] / (constraint**2).sum(axis=1).max()) * (constraint.T @ constraint)
        norm = np.abs(gram).sum(axis=0).max()
        try:
            self._factor = scipy.linalg.cho_factor(gram, lower=True, overwrite_a=True, check_finite=False)
        except np.linalg.LinAlgError:
            self.singular = True
            return
        reciprocal, _ = scipy.linalg.lapack.dpocon(self._factor[0], norm, uplo="L")
        self.singular = bool(reciprocal < _TRUSTED[dtype])
        self._stiff = self.invert(constraint.T)
        self._gap = constraint @ self._stiff

    def invert(self, right: np.ndarray) -> np.ndarray:
        return scipy.linalg.cho_solve(self._factor, right, check_finite=False)

    def project(self, step: np.ndarray, bound: np.ndarray) -> np.ndarray:
        """The step within the constraints' surface that the normal matrix' norm deems nearest to `step`."""
        return step + self._stiff @ np.linalg.solve(self._gap, bound - self.constraint @ step)

    def solve(self, bound: np.ndarray) -> np.ndarray | None:
        """The constrained optimum, or None where refinement does not settle; `residual` is left behind."""
        beta = self.constraint.T @ np.linalg.solve(self.constraint @ self.constraint.T, bound)
        zero, last = np.zeros_like(bound), np.inf
        for _ in range(12):
            self.residual, gradient = self.system.residual_and_gradient(beta)
            step = self.project(self.invert(gradient), zero)
            beta = beta + step
            length, scale = np.abs(step).max(), np.abs(beta).max()
            if length <= 1e-11 * scale:
                return beta
            if length > last / 2:  # rounding is all that is left, or nothing converges
                return beta if length <= 1e-8 * scale else None
            last = length
        return None


def _minimum_norm(system: _System, constraint: np.ndarray, bound: np.ndarray) -> np.ndarray:
    across = np.linalg.pinv(constraint)
    start = across @ bound
    if system.n_rows == 0:
        return start
    design = system.parities.T * system.root[:, None]
    projected = design - (design @ across) @ constraint
    # The projection leaves directions whose singular values are rounding: SciPy's default cut would keep them. Pivoted QR
    # (gelsy) finds the rank several times faster than an SVD.
    cut = max(projected.shape) * np.finfo(float).eps
    target = system.target - design @ start
    return start + scipy.linalg.lstsq(projected, target, cond=cut, lapack_driver="gelsy", check_finite=False)[0]


def _standard_errors(system: _System, solver: _Solver, share: np.ndarray, units: Units) -> np.ndarray:
    pull = solver.invert(share)
    pull = pull - solver._stiff @ np.linalg.solve(solver._gap, solver.constraint @ pull)
    scores = system.scores(pull, solver.residual)
    if len(scores) > len(units.weights):  # both rows of a pair are one draw
        scores = scores[: len(units.weights)] + scores[len(units.weights) :]
    drawn = np.bincount(units.strata)
    centre = np.zeros((len(drawn), scores.shape[1]))
    np.add.at(centre, units.strata, scores)
    centre /= np.maximum(drawn, 1)[:, None]
    alone = drawn < 2  # nothing to centre by
    centre[alone] = 0.0
    scores -= centre[units.strata]
    inflate = np.where(alone, 1.0, drawn / np.maximum(drawn - 1, 1))[units.strata]
    return np.sqrt((inflate * np.maximum(1.0 - units.sampled_fraction, 0.0)) @ scores**2)
