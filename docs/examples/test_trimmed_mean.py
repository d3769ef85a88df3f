"""The trimmed mean: its limits, its invariances, and what it is for."""

import numpy as np
import pytest
from cameraready.robust.trimmed_mean import TrimmedMean
from scipy.stats import trim_mean
from sklearn.utils.estimator_checks import check_estimator

X = np.random.default_rng(0).normal(size=(101, 3))


def test_it_is_an_estimator():
    check_estimator(TrimmedMean())


def test_without_trimming_it_is_the_mean():
    np.testing.assert_allclose(TrimmedMean(trim=0).fit(X).location_, X.mean(axis=0))


@pytest.mark.parametrize("trim", [0.05, 0.1, 0.49])
def test_it_equals_scipys(trim):
    np.testing.assert_allclose(TrimmedMean(trim=trim).fit(X).location_, trim_mean(X, trim))


def test_it_moves_and_scales_with_the_data():
    moved = TrimmedMean().fit(-2 * X + 7).location_
    np.testing.assert_allclose(moved, -2 * TrimmedMean().fit(X).location_ + 7)


def test_gross_errors_within_the_share_cannot_carry_it_away():
    dirty = X.copy()
    dirty[:10] = 1e12
    assert np.abs(TrimmedMean(trim=0.1).fit(dirty).location_).max() < 1


@pytest.mark.parametrize("trim", [-0.1, 0.5, float("nan")])
def test_a_share_out_of_range_is_refused(trim):
    with pytest.raises(ValueError, match="trim must be"):
        TrimmedMean(trim=trim).fit(X)
