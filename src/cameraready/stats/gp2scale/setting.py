"""Turns the regressor's options into what its computation needs: kernel, noise, mean, starts and blocks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import KernelOperator

from cameraready.stats.gp2scale.kernels import Amplitude, SparseKernel, Wendland
from cameraready.stats.gp2scale.kernels.base import count_points
from cameraready.stats.gp2scale.kernels.neighbours import neighbour_distances
from cameraready.stats.gp2scale.likelihood import LogLikelihood, NotPositiveDefinite
from cameraready.stats.gp2scale.search import Trace, blocks_of, climb, walk

# The default kernel: neighbours within the first radius tried, and at least.
NEIGHBOURS, FEWEST = 50, 4
# Its largest radius holds all of up to 2,000 points; of more, about so many non-zeros, and so many neighbours in any case.
MOST_NONZEROS, MOST = 4_000_000, 200

# A learned noise starts at this share of the mean square of y, and stays within these unless noise_bounds say otherwise.
NOISE_SHARE, NOISE_BOUNDS = 0.05, (1e-6, 10.0)

CHOICES = {
    "solver": ("auto", "cholesky", "cg"),
    "backend": ("auto", "multifrontal", "superlu", "qdldl", "cholmod"),
    "optimizer": ("lbfgs", "mcmc", None),
}


def check_options(estimator: Any) -> None:
    """Refuse options that mean nothing, before any work."""
    for name, allowed in CHOICES.items():
        if getattr(estimator, name) not in allowed:
            raise ValueError(f"{name} must be one of {list(allowed)}, got {getattr(estimator, name)!r}")
    kernel = estimator.kernel
    if isinstance(kernel, KernelOperator) and not isinstance(kernel, SparseKernel):
        raise TypeError(
            f"{kernel!r} joins a kernel of scikit-learn with one of this package; wrap the former: Core(RBF()) * Wendland(radius)"
        )
    if kernel is not None and not isinstance(kernel, SparseKernel):
        raise TypeError(
            f"kernel must be one of this package's kernels, got {kernel!r}; a kernel of scikit-learn becomes one as "
            "Core(kernel) * Wendland(radius)"
        )
    for name, least in (("max_iter", 1), ("n_samples", 1), ("n_probes", 1), ("n_restarts_optimizer", 0)):
        if not getattr(estimator, name) >= least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(estimator, name)!r}")
    for name in ("tol", "max_factor_bytes"):
        if not getattr(estimator, name) > 0:
            raise ValueError(f"{name} must be above 0, got {getattr(estimator, name)!r}")
    if isinstance(estimator.noise, str) and estimator.noise != "learn":
        raise ValueError(f"noise must be a number, 'learn', a callable or an array, got {estimator.noise!r}")
    if estimator.mean is None or (isinstance(estimator.mean, str) and estimator.mean != "learn"):
        raise ValueError(f"mean must be a number, 'learn' or a callable, got {estimator.mean!r}")


def default_kernel(X: np.ndarray, y: np.ndarray) -> SparseKernel:
    """Amplitude * Wendland, its radius and bounds from quantiles of the distances between neighbours in X (n, d)."""
    places = np.unique(X, axis=0)
    repeats = len(X) / len(places)
    span = float(np.linalg.norm(X.max(axis=0) - X.min(axis=0))) or 1.0

    def distance(rows: int) -> float:
        """The median radius that holds so many rows, equal ones counted."""
        return float(np.median(neighbour_distances(places, max(1, round(rows / repeats))))) if len(places) > 1 else 0.0

    most = max(MOST, MOST_NONZEROS // len(X))
    high = 4 * span if len(X) <= most else distance(most)
    radius = distance(NEIGHBOURS) or span
    low = min(distance(FEWEST) or radius / 10, radius)
    variance = float(np.mean(y**2)) or 1.0
    return Amplitude(variance, variance_bounds=(1e-3 * variance, 1e3 * variance)) * Wendland(
        radius, length_scale_bounds=(low, max(high, radius))
    )


def given_mean(mean: Any, X: Any) -> Any:
    """The part of the mean that is given: 0 when it is learned."""
    if callable(mean):
        values = np.asarray(mean(X), dtype=float)
        if values.shape != (count_points(X),) or not np.isfinite(values).all():
            raise ValueError(f"mean must return {count_points(X)} finite values, got an array of shape {values.shape}")
        return values
    return 0.0 if isinstance(mean, str) else float(mean)


def units(y: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation, the latter 1 for constant y."""
    return float(y.mean()), float(y.std()) or 1.0


def noise_variances(noise: Any, X: Any, bounds: Any) -> np.ndarray | None:
    """The variances (n,), or None when one is learned."""
    n = count_points(X)
    if isinstance(noise, str):
        if bounds is not None and (
            np.shape(bounds) != (2,) or isinstance(bounds, str) or not 0 < bounds[0] <= bounds[1]
        ):
            raise ValueError(f"noise_bounds must be two positive numbers in order, or None, got {bounds!r}")
        return None
    values = np.array(noise(X) if callable(noise) else noise, dtype=float)  # a copy: the caller may change theirs
    if values.ndim == 0:
        values = np.full(n, float(values))
    if values.shape != (n,):
        raise ValueError(f"noise has shape {values.shape}, expected one variance for each of the {n} points")
    if not np.isfinite(values).all() or (values < 0).any():
        raise ValueError("noise variances must be finite and at least 0")
    return values


def noise_at(estimator: Any, X: Any) -> Any:
    """The noise variance of new observations at X."""
    noise = estimator.noise
    if callable(noise):
        return noise_variances(noise, X, None)
    if np.ndim(noise):
        raise ValueError("noise was given for the training points alone; include_noise needs a number or a callable")
    return estimator.noise_


def refuse_noiseless_duplicates(X: np.ndarray, noise: np.ndarray) -> None:
    """Raise ValueError when equal rows have no noise: their covariance is singular."""
    silent = np.flatnonzero(noise == 0)
    if not len(silent):
        return
    _, first, counts = np.unique(X[silent], axis=0, return_index=True, return_counts=True)
    if (counts > 1).any():
        at = first[np.argmax(counts)]
        twins = silent[(X[silent] == X[silent[at]]).all(axis=1)]
        raise ValueError(
            f"rows {twins[0]} and {twins[1]} of X are equal and have no noise, so the covariance is singular: give them a noise "
            "variance above 0, learn it (noise='learn'), or merge equal rows"
        )


@dataclass(frozen=True)
class Plan:
    """One search: its starts (each (p,)), bounds (p, 2), names (p,), blocks of theta, and a seed for each chain."""

    optimizer: str | None
    starts: list[np.ndarray]
    bounds: np.ndarray
    names: list[str]
    blocks: list[np.ndarray]
    seeds: list[int]
    max_iter: int
    n_samples: int

    @classmethod
    def of(cls, estimator: Any, likelihood: LogLikelihood, generator: np.random.RandomState) -> Plan:
        """The plan that the estimator's options describe."""
        kernel, learn_noise = likelihood.kernel, likelihood.noise is None
        theta, bounds = kernel.theta, np.asarray(kernel.bounds, dtype=float).reshape(-1, 2)
        sizes = [h.n_elements for h in kernel.hyperparameters if not h.fixed]
        names = [h.name for h in kernel.hyperparameters if not h.fixed for _ in range(h.n_elements)]
        if learn_noise:
            scale = float(np.mean(likelihood.y**2)) or 1.0
            low, high = np.log(estimator.noise_bounds or [scale * share for share in NOISE_BOUNDS])
            theta = np.append(theta, np.clip(np.log(NOISE_SHARE * scale), low, high))
            bounds = np.vstack([bounds, [low, high]])
            sizes.append(1)
            names.append("noise")
        optimizer = estimator.optimizer if len(theta) else None
        starts = [theta]
        if optimizer is not None:
            _check_bounds(names, theta, bounds, everywhere=optimizer == "mcmc" or estimator.n_restarts_optimizer > 0)
            starts = _starts(theta, bounds)
            for _ in range(estimator.n_restarts_optimizer):
                starts.append(generator.uniform(bounds[:, 0], bounds[:, 1]))
        seeds = [int(seed) for seed in generator.randint(2**31 - 1, size=len(starts))]
        return cls(optimizer, starts, bounds, names, blocks_of(sizes), seeds, estimator.max_iter, estimator.n_samples)

    def run(self, likelihood: LogLikelihood, trace: Trace, client: Any) -> None:
        """Fill `trace` from every start; on a cluster, several starts run side by side, one spreads its assembly."""
        if self.optimizer is None:
            trace.theta = self.starts[0]
            return
        if client is not None and len(self.starts) > 1:
            self._run_on(client, likelihood, trace)
            return
        with self.assembling(likelihood, client):
            for k in range(len(self.starts)):
                single = Trace()
                try:
                    self.run_start(likelihood, k, single)
                finally:
                    trace.merge(single)

    def run_start(self, likelihood: LogLikelihood, k: int, trace: Trace) -> Trace:
        """The search from start k; a further start (k > 0) where the kernel is not positive definite is left out."""
        try:
            if self.optimizer == "mcmc":
                walk(likelihood, self.starts[k], self.bounds, self.n_samples, self.seeds[k], self.blocks, trace)
            else:
                climb(likelihood, self.starts[k], self.bounds, self.max_iter, trace)
        except NotPositiveDefinite:
            if k == 0:
                raise
        return trace

    def _run_on(self, client: Any, likelihood: LogLikelihood, trace: Trace) -> None:
        from cameraready.stats.gp2scale.spreading import share

        shared = share(client, (self, likelihood))
        running = [client.submit(_run_start, shared, k, pure=False) for k in range(len(self.starts))]
        try:
            for future in running:
                trace.merge(future.result())
        finally:
            client.cancel(running)

    @contextmanager
    def assembling(self, likelihood: LogLikelihood, client: Any) -> Iterator[None]:
        """While it lasts, the likelihood assembles its matrices on the cluster."""
        if client is None:
            yield
            return
        from cameraready.stats.gp2scale.spreading import Spread

        coordinates = likelihood.X if likelihood.kernel.requires_vector_input else None
        before, likelihood.assemble = likelihood.assemble, Spread(client, likelihood.X, coordinates)
        try:
            yield
        finally:
            likelihood.assemble = before

    def warn_at_bounds(self, theta: np.ndarray) -> None:
        """Say which hyper-parameters ended at a bound, where the likelihood may still rise."""
        if self.optimizer != "lbfgs":
            return
        for side, word in ((0, "lower"), (1, "upper")):
            at = [
                name
                for name, value, bound in zip(self.names, theta, self.bounds[:, side], strict=True)
                if np.isclose(value, bound)
            ]
            if at:
                warnings.warn(
                    f"{', '.join(dict.fromkeys(at))} ended at the {word} bound; where that is not meant, widen the bounds",
                    ConvergenceWarning,
                    stacklevel=5,
                )


def _run_start(shared: tuple[Plan, LogLikelihood], k: int) -> Trace:
    plan, likelihood = shared
    return plan.run_start(likelihood, k, Trace())


def _check_bounds(names: list[str], theta: np.ndarray, bounds: np.ndarray, *, everywhere: bool) -> None:
    """Refuse bounds that are none, and starts outside them; `everywhere`: bounds that nobody can draw from."""
    for name, value, (low, high) in zip(names, theta, bounds, strict=True):
        if np.isnan([low, high]).any() or low > high:
            raise ValueError(f"the bounds of {name} must be positive numbers in order")
        if everywhere and not np.isfinite([low, high]).all():
            raise ValueError(f"the bounds of {name} must be above 0 and finite for restarts and for MCMC")
        slack = 1e-9 * max(1.0, abs(value))
        if np.isfinite(value) and not low - slack <= value <= high + slack:
            raise ValueError(
                f"{name} starts at {np.exp(value):.4g}, outside its bounds {np.exp(low):.4g} to {np.exp(high):.4g}; give bounds in "
                "the units of your data"
            )


def _starts(theta: np.ndarray, bounds: np.ndarray) -> list[np.ndarray]:
    """theta within its bounds; if it switches something off (-inf, where slopes vanish), also the middle of those bounds."""
    off = np.isneginf(theta)
    starts = [np.clip(theta, bounds[:, 0], bounds[:, 1])]
    if off.any():
        starts.append(np.where(off, bounds.mean(axis=1), starts[0]))
    return starts


def predict_spread(
    posterior: Any, X: Any, variance: bool, client: Any, predict: Callable[..., Any]
) -> tuple[np.ndarray, np.ndarray | None, int]:
    """Posterior.predict, here or in blocks over the workers of a cluster."""
    n = count_points(X)
    if client is None or n < 2:
        return predict(posterior, X, variance)
    from cameraready.stats.gp2scale.spreading import run_everywhere, share, threads

    size = -(-n // max(1, 2 * threads(client)))
    shared = share(client, posterior)
    parts = run_everywhere(client, [(predict, (shared, X[i : i + size], variance)) for i in range(0, n, size)])
    means, variances, empties = zip(*parts, strict=True)
    return np.concatenate(means), np.concatenate(variances) if variance else None, sum(empties)
