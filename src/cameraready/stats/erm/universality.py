"""May the normal approximation be trusted? For a known law by solving twice, for data by two tests of its assumptions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from cameraready.stats.erm.asymptotics import HighDimERM, ScoreLaw
from cameraready.stats.erm.laws import Array, Design
from cameraready.stats.erm.leave_out import Influence

#: A random scale of rows matters from this coefficient of variation of x'Qx on (beyond what normal features show).
SCALE_CV = 0.25
#: Standard errors beyond which the excess is no accident.
SCALE_Z = 3.0
LEVEL = 0.01
MAX_PAIRS = 150  # rows of which all pairs are looked at


# --- a known law -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UniversalityGap:
    """How far predictions that treat the features as normal are from those that do not.

    Attributes
    ----------
    distance : float
        Largest Kolmogorov distance between a class's score and the normal law of the same mean and variance.
    test_error, gaussian_test_error : float
        Predicted with the features' own law, and with normal features of the same first two moments.
    scale_cv : float
        Standard deviation over mean of E||x||^2 among the design's components of a class: random scales, which the theorem excludes.
    """

    distance: float
    test_error: float
    gaussian_test_error: float
    scale_cv: float

    @property
    def error_gap(self) -> float:
        """How much too high the normal prediction is."""
        return self.gaussian_test_error - self.test_error

    @property
    def concentrates(self) -> bool:
        """Whether rows of a class have about one length, as the theorem assumes."""
        return self.scale_cv <= SCALE_CV

    @property
    def holds(self) -> bool:
        """Scores normal to 0.01, errors equal to 2 %, and rows that concentrate."""
        return self.concentrates and self.distance < 0.01 and abs(self.error_gap) <= 0.02 * max(self.test_error, 1e-12)


def universality_gap(design: Design, erm: HighDimERM, n_samples: int) -> UniversalityGap:
    """Solve for the design and for its Gaussian equivalent, and compare.

    Source: the decomposition of Yaakoubi et al., 2026, arXiv:2604.03146: universality breaks exactly where mu'x is not normal.
    """
    own = erm.predict_asymptotics(design, n_samples)
    gaussian = erm.predict_asymptotics(design.gaussian_equivalent(), n_samples)
    labels = np.unique(own.score_law.labels) if design.is_classification else [None]
    laws = [own.score_law if label is None else own.score_law.given(label) for label in labels]
    return UniversalityGap(
        max(distance_from_normal(law) for law in laws), own.test_error, gaussian.test_error, _scale_cv(design)
    )


def distance_from_normal(law: ScoreLaw) -> float:
    """Kolmogorov distance between a law and the normal one of the same mean and variance."""
    sd = np.sqrt(law.variance)
    grid = np.linspace(-5.0, 5.0, 401)
    return float(np.abs(law.cdf(law.mean + sd * grid) - ndtr(grid)).max())


def _scale_cv(design: Design) -> float:
    sizes: dict[float | None, list[tuple[float, float]]] = {}
    for part in design.components():
        variance = part.noise.sum() if part.noise.ndim == 1 else np.trace(part.noise)
        one_class = design.is_classification and len(np.unique(part.labels)) == 1
        key = float(part.labels[0]) if one_class else None
        sizes.setdefault(key, []).append((part.weight, part.noise_scale * float(variance)))
    worst = 0.0
    for group in sizes.values():
        weights, traces = np.array(group).T
        mean = weights @ traces / weights.sum()
        if mean > 0:
            worst = max(worst, float(np.sqrt(weights @ (traces - mean) ** 2 / weights.sum()) / mean))
    return worst


# --- data --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UniversalityCheck:
    """What training rows and left-out scores say about the theorem's assumptions.

    Attributes
    ----------
    scale_cv : float
        Coefficient of variation of x'Qx over rows in excess of what normal features show: a random scale of rows.
    scale_z : float
        That excess in standard errors.
    normality_p : float
        Smallest p-value over classes of the Anderson-Darling test that scores are normal, times the number of classes.
    n_features_effective : float
        (tr A)^2 / tr(A^2) of the matrix A that x'Qx averages over; concentration needs it to be large.
    """

    scale_cv: float
    scale_z: float
    normality_p: float
    n_features_effective: float

    @property
    def concentrates(self) -> bool:
        """No random scale of rows was found: one kappa a class is enough."""
        return not (self.scale_cv > SCALE_CV and self.scale_z > SCALE_Z)

    @property
    def scores_normal(self) -> bool:
        """The scores' law was not found to differ from a normal one."""
        return self.normality_p >= LEVEL

    @property
    def trusted(self) -> bool:
        """Nothing speaks against predictions that treat the features as normal."""
        return self.concentrates and self.scores_normal

    @property
    def reasons(self) -> tuple[str, ...]:
        """What speaks against them, in sentences."""
        found = []
        if not self.concentrates:
            found.append(
                f"rows differ in scale: x'Qx varies by {self.scale_cv:.0%} more than for normal features, so that one variance for all rows is wrong"
            )
        if not self.scores_normal:
            found.append(
                f"scores within a class are not normal (p = {self.normality_p:.2g}): the projection on the coefficients keeps its own law"
            )
        return tuple(found)


def check_rows(
    groups: Array, scores: Array, influence: Influence, factor_of: Array, *, seed: int = 0
) -> UniversalityCheck:
    """The two tests, for rows of a fitted model.

    Parameters
    ----------
    groups : ndarray of shape (n,)
        Class of each row; one value for regression.
    scores : ndarray of shape (n,)
        Left-out scores.
    influence : Influence
        Of the fit.
    factor_of : ndarray of shape (r, n)
        What `influence.factor` is for rows centred within their group.
    seed : int
        Draws the rows whose pairs are looked at where there are more than 150 in a group.
    """
    rng = np.random.default_rng(seed)
    worst, z, effective = 0.0, 0.0, np.inf
    values = np.unique(groups)
    for value in values:
        rows = np.flatnonzero(groups == value)
        if len(rows) < 8:
            continue
        cv, score, size = _scale_excess(influence, factor_of, rows, rng)
        effective = min(effective, size)
        if cv * (score > SCALE_Z) > worst * (z > SCALE_Z) or score > z:
            worst, z = cv, score
    p_values = [anderson_darling_p(scores[groups == value]) for value in values]
    return UniversalityCheck(worst, z, min(1.0, len(values) * min(p_values)), float(effective))


def _scale_excess(
    influence: Influence, centred: Array, rows: Array, rng: np.random.Generator
) -> tuple[float, float, float]:
    """Excess coefficient of variation of x'Q_{-i}x among `rows`, its z-score, and the effective number of features."""
    F, C, D = influence.factor, centred, influence.curvature
    own = np.einsum("ri,ri->i", C[:, rows], C[:, rows])
    cross = np.einsum("ri,ri->i", C[:, rows], F[:, rows])
    full = np.einsum("ri,ri->i", F[:, rows], F[:, rows])
    size = own + D[rows] * cross**2 / (1.0 - D[rows] * full)
    mean, variance = float(size.mean()), float(size.var(ddof=1))
    if mean <= 0:
        return 0.0, 0.0, 0.0
    some = rng.permutation(rows)[:MAX_PAIRS]
    normal_variance = 2.0 * _mean_square_pairs(F[:, some], C[:, some], D[some])
    effective = 2.0 * mean**2 / max(normal_variance, 1e-300)
    spread = np.sqrt((2.0 + 12.0 / max(effective, 1.0)) / len(rows))
    excess = np.sqrt(max(variance - normal_variance, 0.0)) / mean
    return float(excess), float((variance / max(normal_variance, 1e-300) - 1.0) / spread), float(effective)


def _mean_square_pairs(F: Array, C: Array, D: Array) -> float:
    """Mean over pairs of (x_i' Q x_j / n)^2 with both rows left out of Q: an unbiased estimate of tr(Q S Q S) / n^2."""
    G, R, S = F.T @ F, F.T @ C, C.T @ C  # R[a, i]: row a as it is against row i centred
    # Leaving out {i, j} adds R_i' K R_j with K = (I - D G)^{-1} D on the pair; all pairs at once, the diagonal is not used.
    kept, own = 1.0 - D * np.diag(G), np.diag(R)
    mixed = G * D[:, None]
    determinant = np.outer(kept, kept) - mixed * mixed.T
    left, right = own[:, None], R  # R_i = (R_ii, R_ji), R_j = (R_ij, R_jj)
    first = D[:, None] * kept * right + D[:, None] * D * G * own
    second = D * D[:, None] * G * right + D * kept[:, None] * own
    np.fill_diagonal(determinant, 1.0)
    pairs = (S + (left * first + R.T * second) / determinant) ** 2
    n = len(D)
    return float((pairs.sum() - np.trace(pairs)) / (n * (n - 1)))


def anderson_darling_p(sample: Array) -> float:
    """p-value of the Anderson-Darling test of normality with unknown mean and variance.

    Formulas of D'Agostino and Stephens, 1986, Goodness-of-Fit Techniques, table 4.9. 1 for fewer than eight values, which cannot tell;
    0 for a sample without spread.
    """
    n = len(sample)
    if n < 8:
        return 1.0
    sd = sample.std(ddof=1)
    if not sd > 1e-12 * max(np.abs(sample).max(), 1e-300):
        return 0.0
    z = np.sort((sample - sample.mean()) / sd)
    rank = np.arange(1, n + 1)
    below, above = np.log(np.maximum(ndtr(z), 1e-300)), np.log(np.maximum(ndtr(-z[::-1]), 1e-300))
    a = (-n - np.mean((2 * rank - 1) * (below + above))) * (1 + 0.75 / n + 2.25 / n**2)
    if a >= 0.6:
        return float(np.exp(1.2937 - 5.709 * min(a, 13.0) + 0.0186 * min(a, 13.0) ** 2))
    if a > 0.34:
        return float(np.exp(0.9177 - 4.279 * a - 1.38 * a * a))
    if a > 0.2:
        return float(1 - np.exp(-8.318 + 42.796 * a - 59.938 * a * a))
    return float(1 - np.exp(-13.436 + 101.14 * a - 223.73 * a * a))
