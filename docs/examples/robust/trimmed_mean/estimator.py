"""The trimmed mean of every column of a table."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import validate_data


class TrimmedMean(BaseEstimator):
    """Mean of every column without its smallest and its largest values (Lugosi and Mendelson, 2021, arXiv:1907.11391, section 2).

    Use it where up to a share `trim` of the values may be wrong on either side; not for skewed data, whose mean it
    does not estimate.

    Parameters
    ----------
    trim : float
        Share of the values to leave out on each side, at least 0 and below one half.

    Attributes
    ----------
    location_ : ndarray of shape (n_features,)

    Raises
    ------
    ValueError
        From `fit`, where `trim` is out of range or `X` is not finite.
    """

    def __init__(self, trim: float = 0.1) -> None:
        self.trim = trim

    def fit(self, X: Any, y: None = None) -> TrimmedMean:
        """Estimate the location of `X` (n_samples, n_features); O(n log n) a feature."""
        if not 0 <= self.trim < 0.5:
            raise ValueError(f"trim must be at least 0 and below 0.5, got {self.trim!r}; 0.5 would leave nothing")
        X = validate_data(self, X, dtype=[np.float64, np.float32])
        cut = int(self.trim * len(X))
        self.location_ = np.sort(X, axis=0)[cut : len(X) - cut].mean(axis=0)
        return self
