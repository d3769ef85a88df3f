"""Success rates of attempts that are carried from step to step: the steadier source of CAL's weights."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from cameraready.posttraining.cal_grpo.attempts import Attempts, attempts_of, check_count, later_failures


class RunningRates:
    """Running p_k of each prompt (or bucket of prompts), shrunk towards that of all prompts.

    Counts decay: at each update of a key, what it had is multiplied by ``decay``. As a baseline (``baseline="ema"``) a running rate leaves
    no bias and helps late attempts, which few trajectories of a group reach. As weights (``weights="ema"``) it lags behind the policy, and
    that is a bias: with a policy that changes quickly it trained worse than the group's own noisy weights in three of our four worlds.
    Prefer it for weights where the policy moves little between visits of a prompt.

    Parameters
    ----------
    attempts : int
        K.
    decay : float in [0, 1)
        Of a key's counts from one update to the next.
    prior : float
        Trajectories that the rate of all prompts is worth in that of a single one.

    Raises
    ------
    ValueError
        Arguments out of range.

    Notes
    -----
    Ours: the paper (Ildiz et al., 2026, arXiv:2604.17912) was read to its abstract, and says nothing of how the weights are estimated.
    """

    def __init__(self, attempts: int, *, decay: float = 0.9, prior: float = 4.0) -> None:
        check_count("attempts", attempts)
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, got {decay}")
        if not prior > 0:
            raise ValueError(f"prior must be positive, got {prior}")
        self.attempts, self.decay, self.prior = attempts, decay, prior
        self._all = np.zeros((2, attempts))
        self._of: dict[Hashable, np.ndarray] = {}

    def update(self, rewards: Any, reached: Any = None, keys: Sequence[Hashable] | None = None) -> None:
        """Count the trajectories of a step.

        Parameters
        ----------
        rewards, reached
            As for `attempt_advantages`.
        keys : sequence (T,) of str, int or None, optional
            The prompt of each trajectory; by default all count for the common rate alone.
        """
        table = attempts_of(rewards, reached)
        if table.shape[1] != self.attempts:
            raise ValueError(f"rewards has {table.shape[1]} attempts, these rates are for {self.attempts}")
        self._all = self.decay * self._all + _counts(table, slice(None))
        if keys is None:
            return
        rows: dict[Hashable, list[int]] = {}
        for row, key in enumerate(_listed(keys, table.shape[0])):
            rows.setdefault(key, []).append(row)
        for key, which in rows.items():
            if key is not None:
                before = self._of.get(key)
                new = _counts(table, np.array(which))
                self._of[key] = new if before is None else self.decay * before + new

    def rates(self, keys: Sequence[Hashable]) -> np.ndarray:
        """p_k under each key, float64 (len(keys), K); the rate of all prompts for a key never seen, NaN where no prompt got that far."""
        successes, n = self._all
        common = np.where(n > 0, successes / np.where(n > 0, n, 1), np.nan)
        found = np.empty((len(keys), self.attempts))
        for row, key in enumerate(_listed(keys, len(keys))):
            own = self._of.get(key)
            found[row] = common if own is None else (own[0] + self.prior * common) / (own[1] + self.prior)
        return found

    def weights(self, keys: Sequence[Hashable]) -> np.ndarray:
        """w_k under each key, float64 (len(keys), K); NaN before an attempt that no prompt has reached."""
        return later_failures(self.rates(keys))

    def state_dict(self) -> dict[str, Any]:
        """All of it as JSON values; keys must be strings, integers or None."""
        return {
            "attempts": self.attempts,
            "decay": self.decay,
            "prior": self.prior,
            "all": self._all.tolist(),
            "of": [[key, counts.tolist()] for key, counts in self._of.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave.

        Raises
        ------
        ValueError
            It is for another number of attempts.
        """
        if state["attempts"] != self.attempts:
            raise ValueError(f"the state is for {state['attempts']} attempts, these rates are for {self.attempts}")
        self.decay, self.prior = state["decay"], state["prior"]
        self._all = np.array(state["all"], dtype=np.float64)
        self._of = {key: np.array(counts, dtype=np.float64) for key, counts in state["of"]}


def _counts(table: Attempts, rows: Any) -> np.ndarray:
    return np.stack([table.success[rows].sum(axis=0), table.reached[rows].sum(axis=0)]).astype(np.float64)


def _listed(keys: Any, n: int) -> list[Hashable]:
    listed = keys.tolist() if hasattr(keys, "tolist") else list(keys)
    if len(listed) != n:
        raise ValueError(f"keys must name the prompt of each of the {n} trajectories, got {len(listed)}")
    return listed
