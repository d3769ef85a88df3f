"""Games for attribution: set functions made from a model and a background, counted, cached, synthetic or enumerated."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cameraready.attribution._tables import Pool

Game = Callable[[np.ndarray], np.ndarray]

#: Coalitions that `exact_shapley` will enumerate at most: 2^20.
_MOST_PLAYERS = 20


def checked_values(values: Any, n_coalitions: int) -> np.ndarray:
    """A game's answer as float64 array (n_coalitions,).

    Integer, boolean and float32 answers and a trailing axis of length one are accepted.

    Raises
    ------
    TypeError
        If the answer is not numeric.
    ValueError
        If its shape is wrong or it holds NaN or infinite values.
    """
    array = np.asarray(values)
    if array.dtype.kind == "O":
        with contextlib.suppress(TypeError, ValueError):  # reported below with what was found
            array = array.astype(np.float64)
    if array.dtype.kind not in "biuf":
        found = f"{array.dtype}" + (f", such as {array.ravel()[0]!r}" if array.size else "")
        raise TypeError(f"a game must return numbers, this one returned {found}")
    if array.shape == (n_coalitions, 1):
        array = array[:, 0]
    if array.shape != (n_coalitions,):
        raise ValueError(
            f"a game must return one number per coalition, shape ({n_coalitions},); this one returned shape {array.shape}"
        )
    array = array.astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(array))
    if len(bad):
        raise ValueError(
            f"the game returned {array[bad[0]]} for {len(bad)} of {n_coalitions} coalitions, first for number {bad[0]}; "
            "Shapley values of such a game are undefined"
        )
    return array


class CountedGame:
    """A game that counts what it is asked, answers repeated coalitions from memory, and measures its own time.

    Parameters
    ----------
    game : callable
        bool array (m, n_players) -> (m,).
    n_players : int
    cache : bool
        Whether a coalition seen before is answered from memory.

    Attributes
    ----------
    requests : int
        Coalitions asked for, repetitions and the empty and full coalition included.
    evaluations : int
        Coalitions passed on to `game`: distinct ones if `cache`. This is the budget used.
    calls : int
        Calls of this object.
    seconds : float
        Time spent here and in `game`.
    """

    def __init__(self, game: Game, n_players: int, *, cache: bool = True) -> None:
        self.n_players = n_players
        self.requests = self.evaluations = self.calls = 0
        self.seconds = 0.0
        self._game = game
        self._known: dict[bytes, float] | None = {} if cache else None

    def __call__(self, coalitions: np.ndarray) -> np.ndarray:
        started = time.perf_counter()
        coalitions = np.asarray(coalitions, dtype=bool)
        if coalitions.ndim != 2 or coalitions.shape[1] != self.n_players:
            raise ValueError(f"coalitions must have shape (m, {self.n_players}), got {coalitions.shape}")
        self.calls += 1
        self.requests += len(coalitions)
        if self._known is None:
            self.evaluations += len(coalitions)
            values = checked_values(self._game(coalitions), len(coalitions))
        else:
            values = self._remembered(coalitions)
        self.seconds += time.perf_counter() - started
        return values

    def _remembered(self, coalitions: np.ndarray) -> np.ndarray:
        known = self._known
        assert known is not None
        keys = [row.tobytes() for row in np.packbits(coalitions, axis=1)]
        new: dict[bytes, int] = {}
        for position, key in enumerate(keys):
            if key not in known and key not in new:
                new[key] = position
        if new:
            self.evaluations += len(new)
            found = checked_values(self._game(coalitions[list(new.values())]), len(new))
            known.update(zip(new, found.tolist(), strict=True))
        return np.array([known[key] for key in keys], dtype=np.float64)


class MarginalGame:
    """v(S): the model's mean output with the features in S from the explained row and the others from a background.

    This is the interventional (marginal) value function of SHAP (Lundberg and Lee, 2017; Janzing et al., 2020).

    Parameters
    ----------
    predict : callable
        Table -> array (rows,) or (rows, n_outputs). It receives tables of the kind of `background`: a numpy array, a
        pandas or a polars frame with the same columns and dtypes (strings, categories, dates and missing values too).
    row : array (n_features,) or (1, n_features), or a frame of one row
        What is explained.
    background : array (b, n_features) or frame
        Rows that absent features are taken from.
    output : int, optional
        Which column of the model's output; needed if it has several.
    max_bytes : int
        Rough size of the tables passed to `predict`; more are made one after another. Each holds whole coalitions.

    Raises
    ------
    ValueError
        If shapes or columns do not fit, the background is empty, or the model returns NaN or infinite values.

    Notes
    -----
    m coalitions cost m x b rows of prediction.
    """

    def __init__(
        self,
        predict: Callable[[Any], Any],
        row: Any,
        background: Any,
        *,
        output: int | None = None,
        max_bytes: int = 1 << 26,
    ) -> None:
        self._pool = Pool(row, background)
        self.n_players = self._pool.n_features
        self._predict = predict
        self._output = output
        self._step = max(1, int(max_bytes // (self._pool.row_bytes * self._pool.n_background)))

    def __call__(self, coalitions: np.ndarray) -> np.ndarray:
        """Values (m,), float64, of coalitions given as a bool array (m, n_features)."""
        coalitions = np.asarray(coalitions, dtype=bool)
        if coalitions.ndim != 2 or coalitions.shape[1] != self.n_players:
            raise ValueError(f"coalitions must have shape (m, {self.n_players}), got {coalitions.shape}")
        values = np.empty(len(coalitions))
        for start in range(0, len(coalitions), self._step):
            part = coalitions[start : start + self._step]
            outputs = select_output(
                self._predict(self._pool.mixed(part)), len(part) * self._pool.n_background, self._output
            )
            values[start : start + self._step] = outputs.reshape(len(part), -1).mean(axis=1)
        return values


def select_output(outputs: Any, n_rows: int, output: int | None) -> np.ndarray:
    """One column of a model's output as float64 array (n_rows,); errors say what the model returned instead."""
    if isinstance(outputs, (list, tuple)) and outputs and all(getattr(entry, "ndim", 0) == 2 for entry in outputs):
        raise ValueError(
            f"the model returns a list of {len(outputs)} arrays, one for each of its outputs; pass a function that returns "
            "one output's numbers, such as lambda table: model.predict_proba(table)[0][:, 1]"
        )
    array = np.asarray(outputs)
    if array.dtype.kind == "O":
        with contextlib.suppress(TypeError, ValueError):  # reported below with what was found
            array = array.astype(np.float64)
    if array.dtype.kind not in "biuf":
        sample = f", such as {array.ravel()[0]!r}" if array.size else ""
        raise TypeError(
            f"the model must return numbers, it returned {array.dtype}{sample}; for a classifier pass a function that returns "
            "a probability or a score"
        )
    if array.ndim == 0 or array.ndim > 2 or len(array) != n_rows:
        raise ValueError(
            f"the model must return one prediction per row, ({n_rows},) or ({n_rows}, n_outputs); it returned {array.shape}"
        )
    if array.ndim == 2:
        if output is None and array.shape[1] != 1:
            raise ValueError(f"the model has {array.shape[1]} outputs; say which one to explain with output=0, 1, ...")
        column = 0 if output is None else output
        if not -array.shape[1] <= column < array.shape[1]:
            raise ValueError(f"output={output}, but the model has outputs 0 to {array.shape[1] - 1}")
        array = array[:, column]
    elif output not in (None, 0, -1):
        raise ValueError(f"output={output}, but the model has a single output")
    array = array.astype(np.float64)
    n_bad = int((~np.isfinite(array)).sum())
    if n_bad:
        raise ValueError(
            f"the model returned NaN or infinite values for {n_bad} of {n_rows} rows that mix the explained row with the "
            "background; make it return a number for every input (an imputer, clipping)"
        )
    return array


class UnanimityGame:
    """A weighted sum of unanimity games, whose Shapley values have a closed form.

    v(S) = sum over terms j of weight_j [T_j within S], so that phi_i = sum over T_j that contain i of weight_j / |T_j|.

    Parameters
    ----------
    members : bool array (n_terms, n_players)
        The sets T_j, none empty.
    weights : float array (n_terms,)
    """

    def __init__(self, members: np.ndarray, weights: np.ndarray) -> None:
        self.members = np.asarray(members, dtype=bool)
        self.weights = np.asarray(weights, dtype=np.float64)
        if self.members.ndim != 2 or self.weights.shape != (len(self.members),):
            raise ValueError(
                f"members must have shape (n_terms, n_players) and weights (n_terms,), got {self.members.shape} and "
                f"{self.weights.shape}"
            )
        self._sizes = self.members.sum(axis=1)
        if (self._sizes == 0).any():
            raise ValueError("the empty set has no unanimity game; drop it from members")
        self.n_players = self.members.shape[1]

    @classmethod
    def random(cls, n_players: int, *, n_terms: int, max_size: int, seed: int | np.random.Generator) -> UnanimityGame:
        """Normal weights on sets of uniform size 1..max_size, drawn uniformly."""
        if not 1 <= max_size <= n_players:
            raise ValueError(f"max_size must be between 1 and n_players = {n_players}, got {max_size}")
        generator = np.random.default_rng(seed)
        sizes = generator.integers(1, max_size + 1, size=n_terms)
        rank = generator.random((n_terms, n_players)).argsort(axis=1).argsort(axis=1)
        return cls(rank < sizes[:, None], generator.normal(size=n_terms))

    def __call__(self, coalitions: np.ndarray) -> np.ndarray:
        """Values (m,) of a bool array (m, n_players)."""
        present = np.asarray(coalitions, dtype=np.float32) @ self.members.T.astype(np.float32)
        return (present == self._sizes) @ self.weights

    def shapley_values(self) -> np.ndarray:
        """The exact Shapley values, (n_players,)."""
        return self.members.T @ (self.weights / self._sizes)


def all_coalitions(n_players: int) -> np.ndarray:
    """Every coalition: bool array (2^n, n), row r holding player i where bit i of r is set."""
    if n_players > _MOST_PLAYERS:
        raise ValueError(
            f"{n_players} players have 2^{n_players} coalitions; enumeration stops at {_MOST_PLAYERS} players"
        )
    return (np.arange(1 << n_players)[:, None] >> np.arange(n_players)) & 1 == 1


def exact_shapley(game: Game, n_players: int) -> np.ndarray:
    """Shapley values (n_players,) by enumeration of all 2^n coalitions; for n up to 20."""
    coalitions = all_coalitions(n_players)
    return shapley_of_all(coalitions, checked_values(game(coalitions), len(coalitions)))


def shapley_of_all(coalitions: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Shapley values (n,) from all 2^n coalitions (bool, in any order) and their values (2^n,).

    phi_i = sum over S of v(S) (|S| - 1)! (n - |S|)! / n! where i is in S, less v(S) |S|! (n - |S| - 1)! / n! where not.
    """
    n = coalitions.shape[1]
    sizes = coalitions.sum(axis=1)
    member = np.array([0.0] + [1.0 / (s * math.comb(n, s)) for s in range(1, n + 1)])
    outsider = np.append(member[1:], 0.0)
    values = values - values[sizes == 0]  # smaller numbers, the same differences
    inside = coalitions.T @ (values * (member[sizes] + outsider[sizes]))
    return inside - values @ outsider[sizes]
