"""The same sampler in plain NumPy: a second implementation, for the study's ratio of speeds and for the tests.

It takes the same random numbers in the same way, so that its chain must be the compiled one's, state by state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cameraready.stats.bpop.inference.prior import dominance
from cameraready.stats.bpop.inference.sampler import (
    BETA_STEP,
    EPS_STEP,
    MAX_BETA,
    MAX_RHO,
    MOVES,
    N_UNIFORMS,
    RHO_STEP,
    SMALL_STEP,
    Target,
)


@dataclass
class State:
    """Latent rows (n, K), their correlation, the traces' parameters, and the log-likelihood at them."""

    latent: np.ndarray
    rho: float
    beta: float
    eps: float
    value: float


def trace_log_likelihood(
    trace: Sequence[int], choice: Sequence[int], order: np.ndarray, beta: float, eps: float
) -> float:
    """Log-likelihood of one trace under a closed order (n, n), step by step as the paper writes it."""
    left = np.zeros(len(order), dtype=bool)
    left[list(choice)] = True
    total = 0.0
    for y in trace:
        frontier = left & ~order[left].any(axis=0)
        scores = np.where(frontier, (1.0 + order[:, left].sum(axis=1)) ** beta, 0.0)
        total += np.log(eps / left.sum() + (1 - eps) * scores[y] / scores.sum())
        left[y] = False
    return float(total)


def row_log_density(rows: np.ndarray, rho: float) -> np.ndarray:
    """Log-density of rows (m, K) under N(0, (1 - rho) I + rho 11'), less K/2 log 2 pi."""
    k = rows.shape[1]
    covariance = (1 - rho) * np.eye(k) + rho
    _, log_determinant = np.linalg.slogdet(covariance)
    quadratic = np.einsum("ij,ij->i", rows, np.linalg.solve(covariance, rows.T).T)
    return -0.5 * (quadratic + log_determinant)


class NumpyChain:
    """One chain of the sampler in `inference.kernel`, a step at a time."""

    def __init__(
        self,
        target: Target,
        traces: Sequence[Sequence[int]],
        latent: np.ndarray,
        generator: np.random.Generator,
    ) -> None:
        self.target, self.traces, self.generator = target, traces, generator
        shape, rate = target.beta
        a, b = target.eps
        beta, eps = shape / rate if shape > 0 else rate, a / (a + b) if a > 0 else b
        self.state = State(latent.copy(), 0.5, beta, eps, 0.0)
        self.state.value = self._likelihood(self.state)
        self.accepted = 0

    @property
    def order(self) -> np.ndarray:
        """The current order, closed, bool (n, n)."""
        return dominance(self.state.latent)

    def _likelihood(self, state: State) -> float:
        order = dominance(state.latent)
        return sum(trace_log_likelihood(trace, trace, order, state.beta, state.eps) for trace in self.traces)

    def advance(self, n_steps: int) -> None:
        """Make `n_steps`."""
        largest = self.target.prior.largest
        uniforms = self.generator.random((n_steps, N_UNIFORMS))
        normals = self.generator.standard_normal((n_steps, max(self.target.n_actions, largest + 1)))
        cumulative = self.target.move_weights()
        for u, z in zip(uniforms, normals, strict=True):
            move = MOVES[int(np.searchsorted(cumulative, u[0], side="right"))]
            proposed, ratio = getattr(self, f"_{move}")(u, z)
            if proposed is None:
                continue
            proposed.value = self._likelihood(proposed)
            if np.log(u[1]) < ratio + proposed.value - self.state.value:
                self.state = proposed
                self.accepted += 1

    def _copy(self, **changes: float | np.ndarray) -> State:
        state = State(self.state.latent.copy(), self.state.rho, self.state.beta, self.state.eps, self.state.value)
        for name, value in changes.items():
            setattr(state, name, value)
        return state

    def _density(self, state: State, rows: list[int]) -> float:
        return float(row_log_density(state.latent[rows], state.rho).sum())

    def _row(self, u: np.ndarray, z: np.ndarray) -> tuple[State, float]:
        n, k = self.state.latent.shape
        i, step = int(u[2] * n), SMALL_STEP ** u[3]
        new = self._copy()
        new.latent[i] += step * (np.sqrt(1 - new.rho) * z[:k] + np.sqrt(new.rho) * z[self.target.prior.largest])
        return new, self._density(new, [i]) - self._density(self.state, [i])

    def _entry(self, u: np.ndarray, z: np.ndarray) -> tuple[State, float]:
        n, k = self.state.latent.shape
        i, c, new = int(u[2] * n), int(u[4] * k), self._copy()
        if u[3] >= 0.5:
            new.latent[i, c] += SMALL_STEP ** u[5] * z[0]
            return new, self._density(new, [i]) - self._density(self.state, [i])
        covariance = (1 - new.rho) * np.eye(k) + new.rho
        others = np.arange(k) != c
        slope = np.linalg.solve(covariance[np.ix_(others, others)], covariance[others, c])
        deviation = np.sqrt(1 - slope @ covariance[others, c])
        new.latent[i, c] = slope @ new.latent[i, others] + deviation * z[0]
        return new, 0.0

    def _exchange(self, u: np.ndarray, z: np.ndarray) -> tuple[State, float]:
        n, k = self.state.latent.shape
        i, j, c = int(u[2] * n), int(u[3] * (n - 1)), int(u[4] * k)
        j += j >= i
        new = self._copy()
        if u[5] < 0.5:
            new.latent[[i, j]] = new.latent[[j, i]]
        else:
            new.latent[[i, j], c] = new.latent[[j, i], c]
        return new, self._density(new, [i, j]) - self._density(self.state, [i, j])

    def _rho(self, u: np.ndarray, z: np.ndarray) -> tuple[State | None, float]:
        factor = RHO_STEP + (1 / RHO_STEP - RHO_STEP) * u[2]
        proposed = 1 - (1 - self.state.rho) * factor
        if not 0 <= proposed <= MAX_RHO:
            return None, 0.0
        new, ratio = self._copy(rho=proposed), (self.target.prior.rho_shape - 2) * np.log(factor)
        if u[3] < 0.5:
            every = list(range(len(self.state.latent)))
            return new, ratio + self._density(new, every) - self._density(self.state, every)
        k, mean = new.latent.shape[1], new.latent.mean(axis=1, keepdims=True)
        scale = np.sqrt((1 - proposed + k * proposed) / (1 - self.state.rho + k * self.state.rho))
        new.latent = scale * mean + np.sqrt(factor) * (new.latent - mean)
        return new, ratio

    def _beta(self, u: np.ndarray, z: np.ndarray) -> tuple[State | None, float]:
        shape, rate = self.target.beta
        proposed = self.state.beta * np.exp(BETA_STEP * z[0])
        if proposed > MAX_BETA:
            return None, 0.0
        return self._copy(beta=proposed), shape * np.log(proposed / self.state.beta) - rate * (
            proposed - self.state.beta
        )

    def _eps(self, u: np.ndarray, z: np.ndarray) -> tuple[State, float]:
        a, b = self.target.eps
        old = self.state.eps
        new = 1 / (1 + (1 - old) / old * np.exp(-EPS_STEP * z[0]))
        return self._copy(eps=new), a * np.log(new / old) + b * np.log((1 - new) / (1 - old))

    def _dimension(self, u: np.ndarray, z: np.ndarray) -> tuple[State, float]:
        n, k = self.state.latent.shape
        largest, logs, rho = self.target.prior.largest, self.target.prior.log_dimension(), self.state.rho
        if k == 1 or (k < largest and u[2] < 0.5):
            joint = (1 - rho) * np.eye(k + 1) + rho
            slope = np.linalg.solve(joint[:k, :k], joint[:k, k])
            column = self.state.latent @ slope + np.sqrt(1 - slope @ joint[:k, k]) * z[:n]
            latent = np.insert(self.state.latent, int(u[3] * (k + 1)), column, axis=1)
        else:
            latent = np.delete(self.state.latent, int(u[3] * k), axis=1)
        proposed = latent.shape[1]
        ratio = logs[proposed] - logs[k] + np.log(self._jump(proposed, k) / self._jump(k, proposed))
        return self._copy(latent=latent), float(ratio)

    def _jump(self, from_: int, to: int) -> float:
        """Probability to propose `to` dimensions at `from_`."""
        at_an_end = from_ == 1 or from_ == self.target.prior.largest
        return 1.0 if at_an_end else 0.5
