"""Momentum and learning rate that go together, and with the constants of a problem."""

from __future__ import annotations

import math


def learning_rate_for(mu: float, beta: float | None = None) -> float:
    """The learning rate eta that goes with momentum mu: ``(rho + 1 / beta) / (1 + rho)``, rho = (1 - mu) / (1 + mu).

    Parameters
    ----------
    mu : float
        In [0, 1).
    beta : float, optional
        The second constant of `projection_stats`, between 1 and ``1 / rho``. None takes ``1 / rho``, the largest value possible,
        for which eta is ``1 - mu``.

    Returns
    -------
    float
        1 for mu = 0.

    Raises
    ------
    ValueError
        If `mu` or `beta` is out of range.

    References
    ----------
    Goldshlager, Hu and Lin, 2026, arXiv:2508.21022, for the rates; the map is derived by matching SPRING with the accelerated
    method at its look-ahead point ``theta - mu phi``.
    """
    if not (0.0 <= mu < 1.0):
        raise ValueError(f"mu must be in [0, 1), got {mu}")
    rho = (1.0 - mu) / (1.0 + mu)
    if beta is None:
        return 1.0 - mu
    if not (1.0 - 1e-9 <= beta <= (1.0 + 1e-9) / rho):
        raise ValueError(f"beta lies between 1 and (1 + mu) / (1 - mu) = {1 / rho:.4g}, got {beta}")
    return (rho + 1.0 / beta) / (1.0 + rho)


def accelerated_parameters(alpha: float, beta: float) -> tuple[float, float]:
    """Momentum and learning rate (mu, eta) of SPRING for the constants alpha and beta of a problem.

    Parameters
    ----------
    alpha : float
        In (0, 1].
    beta : float
        Between 1 and ``1 / alpha``.

    Returns
    -------
    (float, float)
        With rho = sqrt(alpha / beta): mu = (1 - rho) / (1 + rho) and eta = (rho + 1 / beta) / (1 + rho).

    Raises
    ------
    ValueError
        If a constant is out of range.
    """
    if not (0.0 < alpha <= 1.0 + 1e-9):
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")
    if not (1.0 - 1e-9 <= beta <= (1.0 + 1e-9) / alpha):
        raise ValueError(f"beta must be between 1 and 1 / alpha = {1 / alpha:.4g}, got {beta}")
    rho = min(1.0, math.sqrt(alpha / beta))
    return min((1.0 - rho) / (1.0 + rho), math.nextafter(1.0, 0.0)), (rho + 1.0 / beta) / (1.0 + rho)
