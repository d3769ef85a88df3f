"""The exponent of a direction in a user's own data, from its moments, with what the sample can and cannot tell."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.stats import t as student

from cameraready.flows.mixed_cumulant._activation import activation, hermite_values
from cameraready.flows.mixed_cumulant.exponent import InformationExponent, loss_coefficients, noise_levels

#: Samples below which moments of degree four are not worth testing.
FEWEST = 50


@dataclass(frozen=True)
class EmpiricalExponent:
    """`exponent` as far as the sample tells; moments ``E[h_k(q)]`` of the projection q, with standard errors, for k = 0..max_order.

    `seen` says which moments differ from a Gaussian's zero, at a family-wise level over all degrees.
    """

    exponent: InformationExponent
    moments: np.ndarray = field(repr=False)
    standard_errors: np.ndarray = field(repr=False)
    seen: np.ndarray = field(repr=False)
    n_samples: int

    def __str__(self) -> str:
        degrees = ", ".join(
            f"{k}: 0 by construction"
            if s < 1e-12 and not seen
            else f"{k}: {m:.3g} +- {s:.2g}{'' if seen else ' (not told from 0)'}"
            for k, (m, s, seen) in enumerate(zip(self.moments, self.standard_errors, self.seen, strict=True))
            if k
        )
        return f"{self.exponent}\nHermite moments from {self.n_samples} samples: {degrees}"


def empirical_exponent(
    X: Any,
    direction: Any,
    *,
    phi: Any = "tanh",
    snr: float = 1.0,
    gain: float = 0.5,
    whiten: bool = False,
    max_order: int = 6,
    significance: float = 0.05,
) -> EmpiricalExponent:
    """The diffusion information exponent of one direction of given data.

    With `q` the projection of the scaled data, the loss of the minimal denoiser changes with the overlap m by ``sum_k L_k a^k E[h_k(q)] m^k``
    where the other directions are white and Gaussian (`diffusion_information_exponent` has the coefficients). The moments come from the sample; a degree counts once its
    moment differs from zero by more than chance, tested over all degrees together.

    When to use: to see whether a direction (a principal or independent component) is one that a denoiser finds early or late. When not: on a direction that was chosen on
    the same rows (take others, or the moments are biased upwards); for order 5 and more, whose moments need very many samples.

    Parameters
    ----------
    X : array or tensor, (n, ...)
        At least 50 samples, and more than dimensions; flattened to (n, d) and centred. The unit is the bulk's standard deviation: the mean variance over the
        directions across `direction` whose sample variance lies where white noise would put it (Marchenko and Pastur), which leaves out strong spikes.
    direction : array, (d,)
        Not zero; normalised here.
    phi, snr, gain
        As in `diffusion_information_exponent`; one noise level.
    whiten : bool
        Take out the whole covariance first, so that only what lies beyond the second order is left: for images, and for any features whose variances fall off
        without a level that many share. Needs more samples than dimensions and no constant or repeated features: reduce them by principal components first, as in
        the example.
    max_order : int
        1 to 8.
    significance : float
        Family-wise, over all degrees (Bonferroni).

    Raises
    ------
    ValueError
        Shapes that do not fit, NaN, a zero direction, a covariance without a bulk, or too few samples to whiten.

    Examples
    --------
    Images: 64 pixels, some of which never change, come to 20 principal components, of other rows; a direction of pixels goes along.

    >>> from sklearn.datasets import load_digits
    >>> from sklearn.decomposition import PCA
    >>> X = load_digits().images.reshape(-1, 64)
    >>> pca = PCA(20, random_state=0).fit(X[::2])
    >>> direction = pca.components_[0]  # of pixels, (64,)
    >>> found = empirical_exponent(pca.transform(X[1::2]), pca.components_ @ direction, whiten=True)
    >>> found.exponent.order
    4
    """
    X = np.asarray(X.detach().cpu() if hasattr(X, "detach") else X, dtype=float)
    if X.ndim < 2 or len(X) < FEWEST:
        raise ValueError(f"X must hold at least {FEWEST} samples (n, ...), got shape {X.shape}")
    X = X.reshape(len(X), -1)
    direction = np.asarray(direction.detach().cpu() if hasattr(direction, "detach") else direction, dtype=float).ravel()
    if direction.shape != (X.shape[1],):
        raise ValueError(f"direction has {direction.size} entries and the data {X.shape[1]} features")
    if not np.isfinite(X).all() or not np.isfinite(direction).all():
        raise ValueError("X or direction holds NaN or infinity: leave such rows out first")
    length = np.linalg.norm(direction)
    if length == 0:
        raise ValueError("direction is zero: it points nowhere")
    if not 1 <= max_order <= 8:
        raise ValueError(f"max_order must lie between 1 and 8, got {max_order}")
    if not 0 < significance < 1:
        raise ValueError(f"significance must lie between 0 and 1, got {significance}")
    q, scale = _projection(X - X.mean(0), direction / length, whiten)
    values = hermite_values(q, max_order)
    moments = values.mean(1)
    moments[1] = 0.0  # centred
    # What a row adds to a moment: by itself, by the mean that is taken off, and by the unit that everything is divided by.
    degrees = np.arange(1, max_order + 1)[:, None]
    centre = degrees * moments[:-1, None] * q
    unit = degrees / 2 * (q * values[:-1]).mean(1, keepdims=True) * scale
    errors = np.zeros(max_order + 1)
    errors[1:] = (values[1:] - centre - unit).std(1, ddof=1) / math.sqrt(len(q))
    limit = student.isf(significance / (2 * max_order), len(q) - 1)
    seen = np.abs(moments) > limit * errors + 1e-12
    seen[:2] = False
    if whiten:
        seen[2] = False  # zero by construction, also of the errors
    (a,), (s,) = noise_levels(snr)
    chosen = activation(phi)
    loss, off = loss_coefficients(chosen, a, s, gain, max_order)
    coefficients = np.where(seen, loss * a ** np.arange(max_order + 1) * moments, 0.0)
    coupled = seen & (np.abs(loss) > np.maximum(1e-9, 10 * off))
    if coupled.any():
        k = int(np.argmax(coupled))
        reason = _passed_over(chosen.name, loss, seen, coupled, k, len(q), whiten)
        sign = "attractive" if coefficients[k] < 0 else "repulsive"
        found = InformationExponent(k, float(coefficients[k]), sign, reason, coefficients, float(snr))
    else:
        why = (
            f"the activation {chosen.name!r} does not couple to the degrees that differ from a Gaussian's"
            if seen.any()
            else f"no moment up to degree {max_order} differs from a Gaussian's with {len(q)} samples"
        )
        found = InformationExponent(math.inf, 0.0, "none", why, coefficients, float(snr))
    return EmpiricalExponent(found, moments, errors, seen, len(q))


def _passed_over(
    name: str, loss: np.ndarray, seen: np.ndarray, coupled: np.ndarray, k: int, n: int, whiten: bool
) -> str:
    """Why the order is `k` and no other: degrees below it that chance hides or whitening removed, and degrees that are there and do not count."""
    unsure = [str(j) for j in range(2, k) if not seen[j] and abs(loss[j]) > 1e-9 and not (whiten and j == 2)]
    deaf = [str(j) for j in range(2, len(seen)) if seen[j] and not coupled[j]]
    parts = [f"degree {', '.join(unsure)} could not be told from zero with {n} samples"] if unsure else []
    if whiten:
        parts.append("degree 2 is taken out by whiten=True")
    if deaf:
        parts.append(
            f"degree {', '.join(deaf)} differs from a Gaussian's and is passed over: the activation {name!r} does not couple to it"
        )
    return "; ".join(parts)


def _projection(X: np.ndarray, direction: np.ndarray, whiten: bool) -> tuple[np.ndarray, np.ndarray]:
    """The projection in units of the bulk, (n,), and what each row says of that unit's square, relative, with mean zero."""
    n, d = X.shape
    if n <= d:
        raise ValueError(
            f"{n} samples of {d} features do not tell their covariance: give more samples than features, or reduce the features first"
        )
    if whiten:
        variances, axes = np.linalg.eigh(X.T @ X / n)
        if variances[0] <= 1e-10 * variances[-1]:
            raise ValueError(
                "whitening needs a covariance of full rank, and these data have constant or repeated features (as images do): leave them out, or give "
                "the leading principal components, PCA(20).fit(X).transform(X), and the direction in them, pca.components_ @ direction"
            )
        q = X @ (axes @ ((axes.T @ direction) / np.sqrt(variances)))
        q /= q.std()
        return q, q**2 - 1
    if d < 3:
        raise ValueError(
            f"the unit comes from the directions across the given one, of which {d} features leave too few; use whiten=True"
        )
    along = X @ direction
    across = X - along[:, None] * direction
    variances, axes = np.linalg.eigh(across.T @ across / n)
    variances, axes = variances[1:], axes[:, 1:]  # without the direction itself
    ratio, slack = (d - 1) / n, 1 + 3 * math.sqrt(2 / n)
    low, high = (1 - math.sqrt(ratio)) ** 2 / slack, (1 + math.sqrt(ratio)) ** 2 * slack
    level = float(np.median(variances)) / (1 - ratio / 3)
    for _ in range(50):
        bulk = (variances >= low * level) & (variances <= high * level)
        if level <= 0 or bulk.sum() < max(2, (d - 1) / 2):
            raise ValueError(
                "the data have no bulk of directions with one variance, so that there is no unit to measure by (images have none): use whiten=True, and where "
                "features are constant or repeated on their leading principal components, as in the example of empirical_exponent"
            )
        level = float(variances[bulk].mean())
    parts = ((X @ axes[:, bulk]) ** 2).mean(1) / level
    return along / math.sqrt(level), parts - parts.mean()
