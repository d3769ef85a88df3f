"""Groups of multi-attempt trajectories: what may stand in a table of verifier bits, and what is counted from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

#: A verifier's 1 may come as a float32; anything farther from 0 and 1 is a fraction, and no verdict.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Attempts:
    """Verdicts of T trajectories at up to K attempts, by group.

    ``success`` and ``reached`` are bool (T, K), ``group`` and ``pool`` int (T,): which of the G groups, and which of the pools that
    stand in where a group has no data, a trajectory belongs to. Trajectories that made no attempt are in no count.
    """

    success: np.ndarray
    reached: np.ndarray
    group: np.ndarray
    pool: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return self.reached.shape  # type: ignore[return-value]

    @cached_property
    def solved(self) -> np.ndarray:
        """R: whether any attempt succeeded, bool (T,)."""
        return self.success.any(axis=1)

    @cached_property
    def n_groups(self) -> int:
        return int(self.group.max(initial=-1)) + 1

    def per_group(self, values: np.ndarray) -> np.ndarray:
        """Sums of (T, K) over the trajectories of each group, float64 (G, K)."""
        return _sums(values, self.group, self.n_groups)

    @cached_property
    def n(self) -> np.ndarray:
        """n_k: trajectories of the group that reached attempt k, float64 (G, K)."""
        return self.per_group(self.reached)

    @cached_property
    def c(self) -> np.ndarray:
        """c_k: those of them that succeeded at it, float64 (G, K)."""
        return self.per_group(self.success)

    @cached_property
    def group_pool(self) -> np.ndarray:
        """The pool of each group, int (G,)."""
        found = np.zeros(self.n_groups, dtype=np.int64)
        found[self.group] = self.pool
        return found

    def rates(self) -> np.ndarray:
        """p_k = c_k / n_k of each group, float64 (G, K).

        Where nobody of the group reached attempt k, the rate of the pool at k stands in; where nobody of the pool did, the pool's rate
        over all attempts.
        """
        pools = int(self.pool.max(initial=-1)) + 1
        n, c = _sums(self.reached, self.pool, pools), _sums(self.success, self.pool, pools)
        overall = _share(c.sum(axis=1), n.sum(axis=1), 0.0)
        pooled = _share(c, n, overall[:, None])
        return _share(self.c, self.n, pooled[self.group_pool])


def attempts_of(rewards: Any, reached: Any = None, group_ids: Any = None, pool_ids: Any = None) -> Attempts:
    """Check a table of verdicts and take it apart.

    Raises ValueError with the place of the first entry that is no verdict, or that cannot be.
    """
    if isinstance(rewards, list | tuple):
        lengths = {len(row) for row in rewards if hasattr(row, "__len__")}
        if len(lengths) > 1:
            raise ValueError(
                f"rewards has rows of {min(lengths)} to {max(lengths)} attempts: pad with NaN where an attempt was not made, "
                "[[1, nan], [0, 1]] for [[1], [0, 1]]"
            )
    table = as_numpy(rewards)
    if table.ndim != 2:
        raise ValueError(
            f"rewards must be (trajectories, attempts), one verdict an attempt, got shape {table.shape}; "
            "one outcome a trajectory is rewards[:, None]"
        )
    if not table.shape[1]:
        raise ValueError("rewards has no attempts: a trajectory takes at least one column")
    if table.dtype.kind not in "biuf":
        raise TypeError(f"rewards must be numbers or booleans, got dtype {table.dtype}")
    values = table.astype(np.float64)
    if reached is None:
        there = ~np.isnan(values)
    else:
        there = as_numpy(reached)
        if there.shape != values.shape:
            raise ValueError(f"reached must have the shape of rewards, {values.shape}, got {there.shape}")
        if there.dtype.kind != "b" and not np.isin(there, (0, 1)).all():
            raise ValueError("reached must be true or false for each attempt")
        there = there.astype(bool)
        _refuse(there & np.isnan(values), "is NaN though the attempt was made: give the verifier's verdict")
    _refuse(
        there & ~(np.minimum(np.abs(values), np.abs(values - 1)) <= TOLERANCE),
        "is neither 0 nor 1: the weights are products of failure probabilities, so decide what counts as solved and pass 0 or 1",
        values,
    )
    success = there & (np.round(values) == 1)
    _refuse(
        there[:, 1:] & ~there[:, :-1], "was made though the one before it was not: attempts are made in order", after=1
    )
    earlier = np.maximum.accumulate(success, axis=1)[:, :-1] if success.size else success[:, 1:]
    _refuse(
        there[:, 1:] & earlier, "comes after a success: a trajectory ends there, so pass NaN (not reached)", after=1
    )
    return Attempts(
        success,
        there,
        _codes(group_ids, len(values), "group_ids"),
        _codes(pool_ids, len(values), "pool_ids"),
    )


def later_failures(rates: np.ndarray) -> np.ndarray:
    """w_k = prod over j > k of (1 - p_j), the probability that all later attempts fail, from p (..., K); the last is 1."""
    fail = 1.0 - rates[..., ::-1]
    shifted = np.concatenate([np.ones_like(fail[..., :1]), fail[..., :-1]], axis=-1)
    return np.cumprod(shifted, axis=-1)[..., ::-1]


def check_count(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be a whole number and at least 1, got {value!r}")


def as_numpy(values: Any) -> np.ndarray:
    """An array on the CPU, of a tensor, an array or a list."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values
        return values.numpy()
    return np.asarray(values)


def _codes(ids: Any, n: int, name: str) -> np.ndarray:
    if ids is None:
        return np.zeros(n, dtype=np.int64)
    array = as_numpy(ids)
    if array.shape != (n,):
        raise ValueError(f"{name} must say for each of the {n} trajectories where it belongs, got shape {array.shape}")
    if array.dtype.kind == "O":  # of several types, which have no order
        seen: dict[Any, int] = {}
        return np.array([seen.setdefault(each, len(seen)) for each in array.tolist()], dtype=np.int64)
    return np.unique(array, return_inverse=True)[1].reshape(n).astype(np.int64)


def _sums(values: np.ndarray, codes: np.ndarray, n: int) -> np.ndarray:
    columns = [np.bincount(codes, weights=column, minlength=n) for column in values.T.astype(np.float64)]
    return np.stack(columns, axis=1) if columns else np.zeros((n, 0))


def _share(part: np.ndarray, whole: np.ndarray, otherwise: np.ndarray | float) -> np.ndarray:
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1.0), otherwise)


def _refuse(wrong: np.ndarray, why: str, values: np.ndarray | None = None, after: int = 0) -> None:
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        value = "" if values is None else f" ({values[row, column + after]:g})"
        raise ValueError(f"attempt {column + after + 1} of trajectory {row}{value} {why}")
