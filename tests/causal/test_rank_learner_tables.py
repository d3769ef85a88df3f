"""RankLearner on raw tables: text, categories, dates, gaps, frames of pandas and polars."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression, Ridge

from cameraready.causal.rank_learner import RankLearner
from cameraready.causal.rank_learner.tables import TableEncoder


def quick():
    return RankLearner(model_y=Ridge(), model_t=LogisticRegression(), scorer="linear", random_state=0)


def table(n=700, seed=0):
    generator = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": generator.normal(40, 10, n),
            "city": generator.choice(["Bern", "Graz", None], n),
            "joined": pd.to_datetime("2020-01-01") + pd.to_timedelta(generator.integers(0, 900, n), unit="D"),
            "size": pd.Categorical(generator.choice(["s", "m", "l"], n)),
            "member": generator.random(n) < 0.5,
            "rare": [f"id{i}" for i in range(n)],
        }
    )
    frame.loc[::7, "age"] = np.nan
    T = generator.integers(0, 2, n)
    tau = 2.0 * (frame["city"] == "Bern") + 1.0 * (frame["size"] == "l") + 1.0 * frame["age"].isna()
    Y = T * tau.to_numpy() + generator.normal(size=n)
    return Y, T, frame, tau.to_numpy()


def test_raw_tables_are_ranked_and_new_levels_and_missing_values_are_taken():
    Y, T, frame, tau = table()
    learner = quick().fit(Y, T, X=frame)
    assert spearmanr(learner.predict(frame), tau).statistic > 0.85
    scores = learner.predict(frame)
    np.testing.assert_array_equal(learner.predict(frame[frame.columns[::-1]]), scores)
    new = frame.head(5).assign(city=["Oslo", None, "Bern", np.nan, "Graz"], age=[np.nan] * 5)
    assert np.isfinite(learner.predict(new)).all()
    with pytest.raises(ValueError, match="lacks the columns city"):
        learner.predict(frame.drop(columns="city"))
    with pytest.raises(ValueError, match="age holds text"):
        learner.predict(frame.assign(age="old"))


def test_polars_and_pandas_agree():
    polars = pytest.importorskip("polars")
    Y, T, frame, _ = table(n=300)
    other = polars.DataFrame(
        {name: frame[name].astype(object).where(frame[name].notna(), None).tolist() for name in frame}
    )
    scores = quick().fit(Y, T, X=frame).predict(frame)
    np.testing.assert_allclose(quick().fit(Y, T, X=other).predict(other), scores, rtol=1e-9)


def test_the_encoder_standardises_and_flags():
    coded = TableEncoder().fit_transform(pd.DataFrame({"a": [1.0, np.nan, 3.0, 5.0], "b": ["x", "y", "x", "y"]}))
    assert coded.shape == (4, 4)
    present = coded[[0, 2, 3], 0]
    np.testing.assert_allclose([present.mean(), present.std()], [0, 1], atol=1e-12)
    np.testing.assert_array_equal(coded[:, 1], [0, 1, 0, 0])
