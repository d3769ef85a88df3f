"""What happens by accident: files that turn booleans into numbers, refits that fail, masks in place of columns."""

from __future__ import annotations

import datetime
import decimal

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression, Ridge

from cameraready.causal.latent_structure import LatentStructure, RankTest
from cameraready.causal.rank_learner import RankLearner
from cameraready.causal.rank_learner.tables import TableEncoder

DRAW = np.random.default_rng(0)
N = 200
X = DRAW.normal(size=(N, 3))
T = (DRAW.random(N) < 0.5).astype(int)
Y = X[:, 0] + T * X[:, 1] + DRAW.normal(size=N)


def learner(**options):
    return RankLearner(model_y=Ridge(), model_t=LogisticRegression(), scorer="linear", cv=3, random_state=0).set_params(
        **options
    )


def test_levels_are_the_same_whatever_a_file_made_of_them():
    flags = X > 0
    encoder = TableEncoder().fit(flags)
    for again in (flags.astype(int), flags.astype(float), flags.astype(object)):
        np.testing.assert_array_equal(encoder.transform(again), encoder.transform(flags))
    codes = pd.DataFrame({"code": pd.Categorical(DRAW.integers(3, size=N))})
    encoder = TableEncoder().fit(codes)
    as_numbers = codes["code"].astype(int).to_frame()
    np.testing.assert_array_equal(encoder.transform(as_numbers), encoder.transform(codes))
    as_numbers = as_numbers.astype(float)
    as_numbers.iloc[0] = np.nan
    np.testing.assert_array_equal(encoder.transform(as_numbers)[1:], encoder.transform(codes)[1:])


def test_numbers_and_dates_are_recognised_in_every_dress():
    days = pd.date_range("2020-01-01", periods=N)
    expected = TableEncoder().fit_transform(pd.DataFrame({"day": days}))
    for dress in (days.tz_localize("UTC"), [day.date() for day in days], [day.to_pydatetime() for day in days]):
        np.testing.assert_allclose(TableEncoder().fit_transform(pd.DataFrame({"day": dress})), expected, atol=1e-9)
    prices = pd.DataFrame({"price": [decimal.Decimal(str(value)) for value in X[:, 0].round(3)]})
    np.testing.assert_allclose(TableEncoder().fit_transform(prices), TableEncoder().fit_transform(X[:, :1].round(3)))
    rows = [[float(value), "u" if value > 0 else "v"] for value in X[:, 0]]
    assert TableEncoder().fit_transform(rows).shape == (N, 3)
    assert isinstance(days[0].date(), datetime.date)


def test_frames_without_an_encoder_are_matched_by_name():
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    fitted = learner(encoder=None).fit(Y, T, X=frame)
    np.testing.assert_array_equal(fitted.predict(frame[["c", "b", "a"]]), fitted.predict(frame))
    with pytest.raises(ValueError, match="lacks the columns b"):
        fitted.predict(frame[["a", "c"]])
    with pytest.raises(ValueError, match="X has 2 columns, 3 were there in fit"):
        fitted.predict(X[:, :2])


def test_a_refit_that_fails_leaves_the_ranking_as_it_was():
    fitted = learner().fit(Y, T, X=X)
    before = fitted.predict(X)
    for wrong in ({"X": X * [1, 1000, 1], "W": X[:5]}, {"X": X, "W": None, "T": np.zeros(N)}):
        with pytest.raises(ValueError, match=r"rows|two values"):
            fitted.fit(Y, wrong.pop("T", T), **wrong)
        np.testing.assert_array_equal(fitted.predict(X), before)


def test_an_outcome_in_words_keeps_its_meaning():
    words = np.where(Y > 0, "yes", "no")
    fitted = learner(model_y=LogisticRegression()).fit(words, T, X=X)
    with pytest.raises(ValueError, match="Y must hold 'no' and 'yes' as in fit"):
        fitted.evaluate(np.where(Y > 0, "good", "poor"), T, X=X)
    assert np.isfinite(fitted.evaluate(np.full(N, "yes"), T, X=X).value)


def test_columns_are_indices_or_names_and_nothing_else():
    test = RankTest(DRAW.normal(size=(N, 4)))
    for mistake in ([True, True, False, False], [0.9, 1.2]):
        with pytest.raises(ValueError, match="there is no column"):
            test.pvalue(mistake, [2, 3], 0)


def test_time_as_text_is_refused_and_old_names_are_forgotten():
    cause = DRAW.normal(size=(N, 1))
    table = cause + 0.5 * DRAW.normal(size=(N, 5))
    with pytest.raises(ValueError, match="time must be numbers or dates"):
        LatentStructure().fit(table, time=np.arange(N).astype(str))
    model = LatentStructure().fit(pd.DataFrame(table, columns=list("abcde")))
    assert not hasattr(model.fit(table[:, :4]), "feature_names_in_")
