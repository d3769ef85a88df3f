"""What the study learns from and is tested on: Gaussian processes, sawtooth waves, real series, the user's table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cameraready.evidence.specs import Spec, SpecError, read_columns
from cameraready.stats.sfconvcnp.tasks import read_inputs, read_points

LOW, HIGH = -3.0, 3.0
SMALLEST_CONTEXT, LARGEST_CONTEXT, QUERIES = 5, 30, 30
Points = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Tasks:
    """A batch of tasks with as many points each: inputs (B, n, 1) and outputs (B, n, 1), context first.

    Attributes
    ----------
    ceiling : ndarray (B,), or None
        Mean log-likelihood of a query output under the process that the tasks were drawn from, where it is known.
    """

    xc: np.ndarray
    yc: np.ndarray
    xt: np.ndarray
    yt: np.ndarray
    ceiling: np.ndarray | None = None


@dataclass(frozen=True)
class Family:
    """Where tasks come from.

    Attributes
    ----------
    draw : callable (n_tasks, n_context, n_queries, generator, ceiling) -> Tasks
    test : callable (n_tasks, n_queries, generator) -> list of Tasks, one a test task
    """

    name: str
    draw: Callable[..., Tasks]
    test: Callable[..., list[Tasks]]
    has_ceiling: bool = False
    others: dict[str, list[Tasks]] = field(default_factory=dict)


def open_family(spec: Spec) -> Family | str:
    """The family of that name; the bare name for workloads that draw their own numbers."""
    if spec.kind == "table":
        return own_family(spec)
    if spec.name in KERNELS:
        others = {name: real_tasks(name) for name in REAL} if spec.name == "matern" else {}
        return _drawn(spec.name, gaussian_process(KERNELS[spec.name]), True, others)
    if spec.name == "sawtooth":
        return _drawn("sawtooth", sawtooth, False, {})
    return spec.name


def _drawn(name: str, draw: Callable[..., Tasks], has_ceiling: bool, others: dict[str, list[Tasks]]) -> Family:
    def test(n_tasks: int, n_queries: int, generator: np.random.Generator) -> list[Tasks]:
        sizes = generator.integers(SMALLEST_CONTEXT, LARGEST_CONTEXT + 1, size=n_tasks)
        return [draw(1, int(size), n_queries, generator, has_ceiling) for size in sizes]

    return Family(name, draw, test, has_ceiling, others)


# --- Gaussian processes -------------------------------------------------------------------------------------------------

NOISE = 0.1


def rbf(distance: np.ndarray) -> np.ndarray:
    return np.exp(-0.5 * distance**2)


def matern(distance: np.ndarray) -> np.ndarray:
    """Matern, smoothness 5/2."""
    d = np.sqrt(5) * distance
    return (1 + d + d**2 / 3) * np.exp(-d)


KERNELS = {"rbf": rbf, "matern": matern}


def gaussian_process(kernel: Callable[[np.ndarray], np.ndarray]) -> Callable[..., Tasks]:
    """Draws with variance 1, length scale 10 ** U(-0.602, 0) and noise 0.1, as the paper does."""

    def draw(n_tasks: int, n_context: int, n_queries: int, generator: np.random.Generator, ceiling: bool) -> Tasks:
        x = generator.uniform(LOW, HIGH, size=(n_tasks, n_context + n_queries))
        length = 10 ** generator.uniform(-0.602, 0.0, size=(n_tasks, 1, 1))
        covariance = kernel(np.abs(x[:, :, None] - x[:, None, :]) / length)
        covariance += NOISE**2 * np.eye(x.shape[1])
        y = (np.linalg.cholesky(covariance) @ generator.normal(size=(*x.shape, 1)))[..., 0]
        best = posterior_likelihood(covariance, y, n_context) if ceiling else None
        return _split(x, y, n_context, best)

    return draw


def posterior_likelihood(covariance: np.ndarray, y: np.ndarray, n_context: int) -> np.ndarray:
    """Mean log-likelihood of each query by itself under the exact posterior: the ceiling of predictions one by one."""
    cc, qc = covariance[:, :n_context, :n_context], covariance[:, n_context:, :n_context]
    gain = np.linalg.solve(cc, qc.transpose(0, 2, 1)).transpose(0, 2, 1)
    mean = (gain @ y[:, :n_context, None])[..., 0]
    variance = np.diagonal(covariance, axis1=1, axis2=2)[:, n_context:] - (gain * qc).sum(2)
    each = -0.5 * (np.log(2 * np.pi * variance) + (y[:, n_context:] - mean) ** 2 / variance)
    return each.mean(1)


def sawtooth(n_tasks: int, n_context: int, n_queries: int, generator: np.random.Generator, ceiling: bool) -> Tasks:
    """Sawtooth waves between -1 and 1 with frequency U(0.5, 5), any phase and direction, noise 0.05."""
    x = generator.uniform(LOW, HIGH, size=(n_tasks, n_context + n_queries))
    frequency = generator.uniform(0.5, 5.0, size=(n_tasks, 1)) * generator.choice([-1.0, 1.0], size=(n_tasks, 1))
    phase = generator.uniform(size=(n_tasks, 1))
    y = 2 * ((frequency * x + phase) % 1.0) - 1 + 0.05 * generator.normal(size=x.shape)
    return _split(x, y, n_context, None)


def _split(x: np.ndarray, y: np.ndarray, n_context: int, ceiling: np.ndarray | None) -> Tasks:
    x, y = x[..., None], y[..., None]
    return Tasks(x[:, :n_context], y[:, :n_context], x[:, n_context:], y[:, n_context:], ceiling)


# --- real series ----------------------------------------------------------------------------------------------------------

#: Points in a window of a real series, and how many of them are the context.
REAL = {"co2": (60, 20), "sunspots": (25, 12)}


def real_tasks(name: str) -> list[Tasks]:
    """Windows of a real series without overlap, each scaled to the inputs' range and its context to unit variance."""
    import statsmodels.api as sm

    if name == "co2":
        values = sm.datasets.co2.load_pandas().data["co2"].to_numpy(dtype=float)
    else:
        values = sm.datasets.sunspots.load_pandas().data["SUNACTIVITY"].to_numpy(dtype=float)
    length, n_context = REAL[name]
    generator = np.random.default_rng([6, len(values)])
    tasks = []
    for start in range(0, len(values) - length + 1, length):
        window = values[start : start + length]
        there = np.flatnonzero(~np.isnan(window))
        if len(there) < length // 2 + 5:  # co2 has gaps
            continue
        x = LOW + (HIGH - LOW) * there / (length - 1)
        order = generator.permutation(len(there))
        tasks.append(_standardised(x[order], window[there][order], n_context))
    return tasks


def _standardised(x: np.ndarray, y: np.ndarray, n_context: int) -> Tasks:
    centre, scale = y[:n_context].mean(), y[:n_context].std()
    return _split(x[None], (y[None] - centre) / (scale if scale > 0 else 1.0), n_context, None)


# --- the user's table -----------------------------------------------------------------------------------------------------

LEAST_SERIES, LEAST_POINTS = 20, 8


def own_family(spec: Spec) -> Family:
    """Series of a table ``data.csv:target=y,series=id`` whose one other column is the input: half to learn, half to test."""
    inputs, roles = read_columns(spec, ["target", "series"])
    if inputs.shape[1] != 1:
        raise SpecError(
            f"{spec.name} must have one column beside target and series, the input; it has {', '.join(inputs.columns)}"
        )
    x, y = read_inputs(inputs.iloc[:, 0].to_numpy(), "the input"), roles["target"].to_numpy(dtype=float)
    keys = roles["series"].astype(str).to_numpy()
    series = [read_points(x[keys == key], y[keys == key]) for key in dict.fromkeys(keys.tolist())]
    series = [(x[:, 0], y[:, 0]) for x, y in series if len(x) >= LEAST_POINTS]
    if len(series) < LEAST_SERIES:
        raise SpecError(
            f"{spec.name} has {len(series)} series of at least {LEAST_POINTS} points; {LEAST_SERIES} are needed, half of them to"
            " test on"
        )
    return family_of_series(series)


def family_of_series(series: Sequence[Points]) -> Family:
    """Every other series to learn from; inputs scaled so that the typical series is as wide as the drawn ones."""
    width = float(np.median([np.ptp(x) for x, _ in series])) or 1.0
    learn, held = list(series[::2]), list(series[1::2])
    values = np.concatenate([y for _, y in learn])
    centre, scale = values.mean(), values.std() or 1.0
    scaled = [
        [((x - x.mean()) * (HIGH - LOW) / width, (y - centre) / scale) for x, y in group] for group in (learn, held)
    ]

    def draw(n_tasks: int, n_context: int, n_queries: int, generator: np.random.Generator, ceiling: bool) -> Tasks:
        chosen = [scaled[0][i] for i in generator.integers(len(scaled[0]), size=n_tasks)]
        size = min(len(x) for x, _ in chosen)
        known = min(n_context, size - 1)
        picks = [generator.permutation(len(x))[: min(size, known + n_queries)] for x, _ in chosen]
        return _split(
            np.stack([x[p] for (x, _), p in zip(chosen, picks, strict=True)]),
            np.stack([y[p] for (_, y), p in zip(chosen, picks, strict=True)]),
            known,
            None,
        )

    def test(n_tasks: int, n_queries: int, generator: np.random.Generator) -> list[Tasks]:
        tasks: list[Tasks] = []
        for x, y in scaled[1][:n_tasks]:
            order = generator.permutation(len(x))
            known = int(generator.integers(3, max(4, len(x) // 2)))
            tasks.append(_split(x[order][None], y[order][None], known, None))
        return tasks

    return Family("own", draw, test)


def as_tensors(tasks: Tasks, device: Any) -> tuple[Any, Any, Any, Any]:
    """xc, yc, xt, yt in float32."""
    import torch

    parts = (tasks.xc, tasks.yc, tasks.xt, tasks.yt)
    return tuple(torch.as_tensor(part, dtype=torch.float32, device=device) for part in parts)  # type: ignore[return-value]
