"""The arms of the study: every way to get a mean and a standard deviation at new points from the same data and time."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cameraready.evidence import Context
from cameraready.stats.gp2scale import Amplitude, Field, NonStationary, SparseGPRegressor, Wendland
from cameraready.stats.gp2scale.workloads import Split

#: (split, seconds) -> {"mean": (m,), "std": (m,), and columns of the row}. Standard deviations are those of y, noise included.
Regress = Callable[[Split, float], dict[str, Any]]

START_NEIGHBOURS = 15
#: The dense process is left out where one likelihood takes seconds.
MOST_DENSE = 2_500


def arms(ctx: Context) -> dict[str, Regress]:
    """All arms by name; a user's own is a callable (X_train, y_train, X_test) -> (mean, std)."""
    own = {name: called(method) for name, method in ctx.own.items()}
    shipped: dict[str, Regress] = {
        "gp2scale": sparse,
        "nonstationary": nonstationary,
        "mcmc": by_mcmc,
        "matern": dense,
        "svgp-10": svgp(ctx, 10),
        "svgp-256": svgp(ctx, 256),
        "ski-20": ski(ctx, 20),
        "ski-1000": ski(ctx, 1_000),
        "vecchia": gpboost(ctx, "vecchia"),
        "tapered": gpboost(ctx, "wendland"),
    }
    return {name: own.get(name, arm) for name, arm in ctx.select(shipped).items()}


# --- ours -----------------------------------------------------------------------------------------------------------


def sparse(split: Split, seconds: float) -> dict[str, Any]:
    """The regressor with its default kernel; beyond two columns, a radius for each."""
    kernel = ard_kernel(split.X_train) if split.ard else None
    return fitted(SparseGPRegressor(kernel, noise="learn", noise_bounds=(1e-5, 2.0), mean="learn"), split, seconds)


def ard_kernel(X: np.ndarray) -> Any:
    """Amplitude * Wendland from the median distance to the 50th neighbour, free to grow and shrink tenfold by column."""
    radius = neighbour_distance(X, 50)
    bounds = (radius / 10, radius * 10)
    return Amplitude(1.0) * Wendland(np.full(X.shape[1], radius), length_scale_bounds=bounds)


def nonstationary(split: Split, seconds: float) -> dict[str, Any]:
    """Length scale and signal vary over eight centres: the positive definite stand-in for the paper's eq. (6)."""
    from sklearn.cluster import KMeans

    X = split.X_train
    centres = KMeans(8, n_init=1, random_state=0).fit(X).cluster_centers_
    radius = neighbour_distance(X, 100)
    scale = Field(centres, np.full(8, radius / 2), values_bounds=(radius / 20, 10 * radius))
    signal = Field(centres, np.ones(8), values_bounds=(1e-2, 1e1))
    kernel = NonStationary(scale, signal, radius, radius_bounds=(radius / 3, 3 * radius))
    return fitted(SparseGPRegressor(kernel, noise="learn", noise_bounds=(1e-5, 2.0), mean="learn"), split, seconds)


def fitted(model: SparseGPRegressor, split: Split, seconds: float) -> dict[str, Any]:
    """Fit, interrupted after `seconds`: the regressor then keeps the best hyper-parameters so far."""
    started = time.process_time()
    with processor_time(seconds):
        model.set_params(random_state=0).fit(split.X_train, split.y_train)
    return predicted(model, split, started)


def by_mcmc(split: Split, seconds: float) -> dict[str, Any]:
    """The paper's trainer, block Metropolis-Hastings, with the default kernel; as many steps as fit, at least 30."""
    model = SparseGPRegressor(noise="learn", noise_bounds=(1e-5, 2.0), mean="learn", optimizer=None, random_state=0)
    started = time.process_time()
    model.fit(split.X_train, split.y_train)
    begun = time.process_time()
    model.log_marginal_likelihood(model.theta_)
    one = time.process_time() - begun
    left = seconds - (time.process_time() - started)
    model.set_params(optimizer="mcmc", n_samples=max(30, int(left / one)))
    return predicted(model.fit(split.X_train, split.y_train), split, started)


class _TimeIsUp(KeyboardInterrupt):
    pass


@contextlib.contextmanager
def processor_time(seconds: float) -> Iterator[None]:
    """End the block as Ctrl-C would once it has used so much processor time, and go on after it.

    Signals reach the main thread of Unix processes alone, which is where trials run; elsewhere there is no limit.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(number: int, frame: Any) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    except _TimeIsUp:
        pass
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def predicted(model: SparseGPRegressor, split: Split, started: float) -> dict[str, Any]:
    fit_seconds = time.process_time() - started
    mean, std = model.predict(split.X_test, return_std=True, include_noise=True)
    return {
        "mean": mean,
        "std": std,
        "fit_seconds": fit_seconds,
        "density": model.sparsity_,
    }


def neighbour_distance(X: np.ndarray, k: int) -> float:
    """Median distance of a point to its k-th neighbour."""
    from scipy.spatial import cKDTree

    some = X[:: max(1, len(X) // 2_000)]
    return float(np.median(cKDTree(X).query(some, min(k, len(X) - 1) + 1)[0][:, -1]))


# --- others ---------------------------------------------------------------------------------------------------------


def dense(split: Split, seconds: float) -> dict[str, Any]:
    """scikit-learn's Gaussian process, Matern 3/2, from the same start; its L-BFGS is interrupted when the time is up."""
    from scipy.optimize import minimize
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    started = time.process_time()

    def within_time(objective: Any, start: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, float]:
        best: list[Any] = [start, np.inf]

        def watched(theta: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = objective(theta)
            if value < best[1]:
                best[:] = theta.copy(), value
            return value, gradient

        with processor_time(seconds):
            minimize(watched, start, jac=True, method="L-BFGS-B", bounds=bounds)
        return best[0], best[1]

    columns = split.X_train.shape[1]
    scale = start_scale(split.X_train)
    lengths = np.full(columns, scale) if split.ard else scale
    kernel = ConstantKernel(1.0, (1e-3, 1e3)) * Matern(lengths, (1e-3, 1e3), nu=1.5) + WhiteKernel(0.1, (1e-5, 2.0))
    model = GaussianProcessRegressor(kernel, optimizer=within_time, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on bounds that are touched
        model.fit(split.X_train, split.y_train)
        fit_seconds = time.process_time() - started
        mean, std = model.predict(split.X_test, return_std=True)
    return {"mean": mean, "std": std, "fit_seconds": fit_seconds}


def start_scale(X: np.ndarray) -> float:
    """Where Matern length scales start: the median distance to the 15th neighbour."""
    return neighbour_distance(X, START_NEIGHBOURS)


def svgp(ctx: Context, n_inducing: int) -> Regress:
    def regress(split: Split, seconds: float) -> dict[str, Any]:
        X = split.X_train
        count = min(n_inducing, len(X))
        gap = float(np.ptp(X, axis=0).max()) / count ** (1 / X.shape[1])
        scales = [
            np.log(2.0),
            max(start_scale(X), gap),
        ]  # GPyTorch's own start, and one that the inducing points can hold
        given = (X, split.y_train, split.X_test, count, scales, split.ard, seconds, ctx.seed)
        return ctx.peer("gpytorch").svgp(*given)

    return regress


def ski(ctx: Context, grid: int) -> Regress:
    """A grid of `grid` points; in two dimensions of about ten times as many, in more there is none."""

    def regress(split: Split, seconds: float) -> dict[str, Any]:
        X = split.X_train
        size = grid if X.shape[1] == 1 else round(np.sqrt(10 * grid))
        scales = [np.log(2.0), max(start_scale(X), 2 * float(np.ptp(X, axis=0).max()) / size)]
        return ctx.peer("gpytorch").ski(X, split.y_train, split.X_test, size, scales, seconds, ctx.seed)

    return regress


def gpboost(ctx: Context, approximation: str) -> Regress:
    def regress(split: Split, seconds: float) -> dict[str, Any]:
        radius = neighbour_distance(split.X_train, 50)
        given = (split.X_train, split.y_train, split.X_test, approximation, split.ard, radius, seconds)
        return ctx.peer("gpboost").regress(*given)

    return regress


def called(method: Callable[..., Any]) -> Regress:
    """A user's own arm."""

    def regress(split: Split, seconds: float) -> dict[str, Any]:
        started = time.process_time()
        found = method(split.X_train, split.y_train, split.X_test)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise ValueError(f"an arm must return (mean, std), got {type(found).__name__}")
        mean, std = (np.asarray(part, dtype=float) for part in found)
        return {"mean": mean, "std": std, "fit_seconds": time.process_time() - started}

    return regress
