"""Properties of the games that attribution methods are run on."""

from __future__ import annotations

from itertools import combinations
from math import factorial

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cameraready.attribution._game import (
    CountedGame,
    MarginalGame,
    UnanimityGame,
    all_coalitions,
    checked_values,
    exact_shapley,
)

SEEDS = st.integers(0, 2**32 - 1)


def table_game(n_players: int, seed: int):
    values = np.random.default_rng(seed).normal(size=2**n_players)
    return lambda coalitions: values[coalitions @ (1 << np.arange(n_players))]


# --- exact values ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), SEEDS)
@settings(max_examples=30, deadline=None)
def test_exact_values_are_the_definition(n: int, seed: int) -> None:
    game = table_game(n, seed)

    def v(players: tuple[int, ...]) -> float:
        row = np.zeros((1, n), dtype=bool)
        row[0, list(players)] = True
        return float(game(row)[0])

    def phi(i: int) -> float:
        others = [j for j in range(n) if j != i]
        return sum(
            factorial(size) * factorial(n - size - 1) / factorial(n) * (v((*subset, i)) - v(subset))
            for size in range(n)
            for subset in combinations(others, size)
        )

    assert exact_shapley(game, n) == pytest.approx([phi(i) for i in range(n)], abs=1e-12)


@given(st.integers(1, 12), SEEDS)
@settings(max_examples=20, deadline=None)
def test_unanimity_closed_form_is_the_enumerated_value(n: int, seed: int) -> None:
    game = UnanimityGame.random(n, n_terms=20, max_size=n, seed=seed)
    assert exact_shapley(game, n) == pytest.approx(game.shapley_values(), abs=1e-11)


def test_enumeration_refuses_what_it_cannot_finish() -> None:
    with pytest.raises(ValueError, match="stops at 20 players"):
        exact_shapley(lambda z: z.sum(axis=1), 21)


# --- counting -------------------------------------------------------------------------------------------------------


def test_counted_game_counts_every_coalition_once_and_remembers() -> None:
    asked = []

    def game(coalitions: np.ndarray) -> np.ndarray:
        asked.append(coalitions.copy())
        return coalitions @ np.arange(1.0, 5.0)

    counted = CountedGame(game, 4)
    every = all_coalitions(4)
    twice = np.concatenate([every, every[::-1]])
    assert counted(twice) == pytest.approx(twice @ np.arange(1.0, 5.0))
    assert (counted.requests, counted.evaluations, counted.calls) == (32, 16, 1)
    counted(every[:3])
    assert (counted.requests, counted.evaluations) == (35, 16)
    assert sum(map(len, asked)) == 16
    plain = CountedGame(game, 4, cache=False)
    plain(twice)
    assert plain.evaluations == 32
    with pytest.raises(ValueError, match=r"shape \(m, 4\)"):
        counted(every[:, :3])


@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.float32, np.float16, bool])
def test_numbers_of_any_type_are_values(dtype: type) -> None:
    values = checked_values(np.ones(3, dtype=dtype), 3)
    assert values.dtype == np.float64
    assert (values == 1).all()
    assert checked_values(np.ones((3, 1), dtype=dtype), 3).shape == (3,)
    assert checked_values([1, 2.5, 3], 3)[1] == 2.5


def test_what_is_no_value_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="nan for 1 of 3 coalitions, first for number 1"):
        checked_values(np.array([0.0, np.nan, 1.0]), 3)
    with pytest.raises(ValueError, match="inf"):
        checked_values(np.array([0.0, np.inf, 1.0]), 3)
    with pytest.raises(TypeError, match="must return numbers"):
        checked_values(np.array(["yes", "no", "no"]), 3)
    with pytest.raises(ValueError, match=r"this one returned shape \(3, 2\)"):
        checked_values(np.zeros((3, 2)), 3)


# --- models and backgrounds -----------------------------------------------------------------------------------------


def mixed_frame(n_rows: int, seed: int = 0) -> pd.DataFrame:
    generator = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "number": generator.normal(size=n_rows),
            "count": generator.integers(0, 9, n_rows),
            "text": generator.choice(["red", "green", "blue"], n_rows),
            "kind": pd.Categorical(generator.choice(["u", "v"], n_rows), categories=["v", "u", "never"]),
            "flag": generator.random(n_rows) < 0.5,
            "day": pd.Timestamp("2021-03-01") + pd.to_timedelta(generator.integers(0, 99, n_rows), "D"),
        }
    )
    frame.loc[::4, "number"] = np.nan
    frame.loc[1::5, "text"] = None
    return frame


def test_marginal_game_is_the_mean_over_hybrid_rows() -> None:
    generator = np.random.default_rng(0)
    background, row = generator.normal(size=(7, 4)), generator.normal(size=4)
    predict = lambda x: np.sin(x).prod(axis=1) + x[:, 0]  # noqa: E731
    coalitions = all_coalitions(4)
    expected = [predict(np.where(s, row, background)).mean() for s in coalitions]
    assert MarginalGame(predict, row, background)(coalitions) == pytest.approx(expected, abs=1e-14)
    small = MarginalGame(predict, row[None], background, max_bytes=1)
    assert small(coalitions) == pytest.approx(expected, abs=1e-14)


def test_tables_passed_to_the_model_are_bounded() -> None:
    sizes = []

    def predict(x: np.ndarray) -> np.ndarray:
        sizes.append(x.nbytes)
        return x.sum(axis=1)

    MarginalGame(predict, np.ones(5), np.zeros((10, 5)), max_bytes=10_000)(all_coalitions(5).repeat(20, axis=0))
    assert max(sizes) <= 10_000
    assert len(sizes) > 20


def test_a_linear_model_has_its_textbook_values() -> None:
    generator = np.random.default_rng(1)
    weights, background, row = generator.normal(size=6), generator.normal(size=(9, 6)), generator.normal(size=6)
    game = MarginalGame(lambda x: x @ weights, row, background)
    assert exact_shapley(game, 6) == pytest.approx(weights * (row - background.mean(axis=0)), abs=1e-12)


def test_pandas_columns_keep_their_dtypes_and_values() -> None:
    frame = mixed_frame(30)
    background, row = frame.iloc[10:], frame.iloc[[4]]
    seen = []

    def predict(table: pd.DataFrame) -> np.ndarray:
        assert (table.dtypes == frame.dtypes).all()
        assert list(table.columns) == list(frame.columns)
        seen.append(table)
        return np.zeros(len(table))

    coalition = np.array([[True, False, True, False, True, False]])
    MarginalGame(predict, row, background)(coalition)
    for name, present in zip(frame, coalition[0], strict=True):
        expected = row[name].repeat(len(background)) if present else background[name]
        pd.testing.assert_series_equal(seen[0][name], expected.reset_index(drop=True))


def test_polars_columns_keep_their_dtypes_and_values() -> None:
    frame = pl.from_pandas(mixed_frame(30)).with_columns(pl.col("kind").cast(pl.Enum(["v", "u", "never"])))
    background, row = frame[10:], frame[4:5]
    seen = []

    def predict(table: pl.DataFrame) -> np.ndarray:
        assert table.schema == frame.schema
        seen.append(table)
        return np.zeros(len(table))

    MarginalGame(predict, row, background)(np.array([[True, False, True, False, True, False]]))
    for name, present in zip(frame.columns, [True, False, True, False, True, False], strict=True):
        expected = pl.concat([row[name]] * 20) if present else background[name]
        assert seen[0][name].equals(expected, null_equal=True)


def test_categories_of_row_and_background_are_united() -> None:
    background = pd.DataFrame({"kind": pd.Categorical(["a", "b"])})
    row = pd.DataFrame({"kind": pd.Categorical(["c"])})

    def predict(table: pd.DataFrame) -> np.ndarray:
        assert isinstance(table["kind"].dtype, pd.CategoricalDtype)
        return (table["kind"] == "c").to_numpy()

    assert MarginalGame(predict, row, background)(np.array([[True], [False]])) == pytest.approx([1.0, 0.0])
    text = pd.DataFrame({"kind": ["c"]})
    assert MarginalGame(predict, text, background)(np.array([[True], [False]])) == pytest.approx([1.0, 0.0])


def test_columns_may_be_in_another_order_but_not_others() -> None:
    frame = mixed_frame(12)
    game = MarginalGame(lambda t: t["count"].to_numpy(), frame.iloc[[0]][frame.columns[::-1]], frame)
    assert game(np.ones((1, 6), dtype=bool))[0] == frame["count"][0]
    with pytest.raises(ValueError, match="missing \\['count'\\], unexpected \\['counts'\\]"):
        MarginalGame(lambda t: t, frame.iloc[[0]].rename(columns={"count": "counts"}), frame)


def test_outputs_are_chosen_and_checked() -> None:
    background, row = np.zeros((3, 2)), np.ones(2)
    both = np.array([[False, False], [True, True]])
    several = lambda x: np.column_stack([x.sum(axis=1), -x.sum(axis=1)])  # noqa: E731
    assert MarginalGame(several, row, background, output=1)(both) == pytest.approx([0.0, -2.0])
    with pytest.raises(ValueError, match="2 outputs; say which one"):
        MarginalGame(several, row, background)(both)
    with pytest.raises(ValueError, match="outputs 0 to 1"):
        MarginalGame(several, row, background, output=2)(both)
    integers = MarginalGame(lambda x: x.sum(axis=1).astype(int), row, background)(both)
    assert integers.dtype == np.float64
    with pytest.raises(ValueError, match="NaN or infinite values for 3 of 6 rows"):
        MarginalGame(lambda x: np.where(x[:, 0] == 1, np.nan, 0), row, background)(both)
    with pytest.raises(TypeError, match="must return numbers"):
        MarginalGame(lambda x: np.full(len(x), "spam"), row, background)(both)
    with pytest.raises(ValueError, match="one prediction per row"):
        MarginalGame(lambda x: x.sum(), row, background)(both)


def test_shapes_that_do_not_fit_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match="background is empty"):
        MarginalGame(lambda x: x, np.ones(2), np.zeros((0, 2)))
    with pytest.raises(ValueError, match="has 2 features"):
        MarginalGame(lambda x: x, np.ones(3), np.zeros((4, 2)))
    with pytest.raises(ValueError, match="one row is explained at a time, got 2"):
        MarginalGame(lambda x: x, mixed_frame(2), mixed_frame(5))
