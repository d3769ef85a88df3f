"""The minimal denoiser: one neuron and a skip connection, trained online on the sphere, with its overlaps recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cameraready.flows.mixed_cumulant._activation import Activation, activation
from cameraready.flows.mixed_cumulant.exponent import noise_levels
from cameraready.flows.mixed_cumulant.model import MixedCumulant, random_directions

#: How many states of a run are recorded at most, unless `record_every` says otherwise.
RECORDS = 2_000


def loss_and_gradient(
    w: np.ndarray, x: np.ndarray, eps: np.ndarray, a: float, s: float, gain: float, phi: Activation
) -> tuple[np.ndarray, np.ndarray]:
    """Mean of ``||x - a y - gain w phi(w.y)||^2`` over a batch, ``y = a x + s eps``, and its gradient in w, in closed form.

    Parameters
    ----------
    w : float64 array, (S, d)
        One vector a run.
    x, eps : float64 arrays, (S, B, d)
        Each run's own batch, and the noise.

    Returns
    -------
    loss : (S,)
    gradient : (S, d)
        The Euclidean one: ``-2 gain mean(phi(p) r + (r.w) phi'(p) y)`` with residual r; not projected.
    """
    y = a * x + s * eps
    p = np.matmul(y, w[..., None])[..., 0]
    value = phi.function(p)
    residual = s**2 * x - (a * s) * eps  # x - a y, without its cancellation
    along = np.matmul(residual, w[..., None])[..., 0]
    square = (w * w).sum(-1)[:, None]
    sizes = np.einsum("sbd,sbd->sb", residual, residual) - 2 * gain * value * along + gain**2 * value**2 * square
    pull = (along - gain * value * square) * phi.derivative(p)  # type: ignore[misc]
    batch = x.shape[1]
    gradient = np.matmul(value[:, None], residual)[:, 0] + np.matmul(pull[:, None], y)[:, 0]
    gradient -= (gain * (value**2).sum(1))[:, None] * w
    return sizes.mean(1), -2 * gain / batch * gradient


def spherical_step(w: np.ndarray, gradient: np.ndarray, rate: float) -> np.ndarray:
    """``normalise(w - rate (I - w w^T) gradient)``, row by row: (S, d) -> (S, d)."""
    gradient = gradient - np.einsum("sd,sd->s", gradient, w)[:, None] * w
    w = w - rate * gradient
    return w / np.linalg.norm(w, axis=1, keepdims=True)


class SphericalDenoiser:
    """``f(y) = a y + gain w phi(w.y)`` with ``|w| = 1``, trained by online spherical SGD; several independent runs at once.

    A step takes a fresh batch, ``w <- normalise(w - (step_size / d) (I - w w^T) gradient)``. The skip connection stays at its optimum for white Gaussian data, a.

    When to use: to see how many samples a direction of the data takes, with truth in hand. When not: as a denoiser for use; it has one neuron.

    Parameters
    ----------
    phi : str or (callable, callable)
        Activation: a name (``"tanh"``, ``"relu"``, ``"sin"`` ...), or a function of arrays and its derivative.
    gain : float
        Output weight of the neuron; not trained.
    snr : float
        a^2 / s^2 of the noise level trained at (a^2 + s^2 = 1).
    step_size : float
        delta in the step above, over d; what a sample moves w by is ``step_size / (d batch_size)``.
    batch_size : int
    runs : int
        Independent runs, vectorised; each has its own start and data.

    Attributes
    ----------
    w_ : float64 array, (runs, d)
    directions_ : float64 array, (runs, k, d), or None
        What overlaps are taken with.
    samples_seen_ : int
    samples_, overlaps_ : float64 arrays, (T,) and (T, runs, k)
        The recorded history: samples seen and w.directions, the start included.

    References
    ----------
    Bardone et al., 2026, arXiv:2603.12901 (its denoiser is reconstructed); Ben Arous et al., 2021, arXiv:2003.10409 (the algorithm).
    """

    def __init__(
        self,
        phi: Any = "tanh",
        *,
        gain: float = 0.5,
        snr: float = 1.0,
        step_size: float = 1.0,
        batch_size: int = 64,
        runs: int = 1,
    ) -> None:
        self.phi = activation(phi, trained=True)
        if not (math.isfinite(gain) and gain):
            raise ValueError(f"gain must be a number other than 0 (the neuron would not speak), got {gain!r}")
        (self.a,), (self.s,) = noise_levels(snr)
        if not (math.isfinite(step_size) and step_size > 0):
            raise ValueError(f"step_size must be positive and finite, got {step_size!r}")
        for name, value in (("batch_size", batch_size), ("runs", runs)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.gain, self.step_size, self.batch_size, self.runs = gain, step_size, batch_size, runs
        self.samples_seen_ = 0
        self.directions_: np.ndarray | None = None

    def __repr__(self) -> str:
        return f"SphericalDenoiser({self.phi.name!r}, gain={self.gain:g}, snr={(self.a / self.s) ** 2:g}, step_size={self.step_size:g})"

    def fit_online(
        self,
        stream: MixedCumulant | np.ndarray | Callable[[tuple[int, int], np.random.Generator], np.ndarray],
        n_samples: int,
        *,
        n_features: int | None = None,
        directions: np.ndarray | None = None,
        random_state: int | np.random.Generator = 0,
        record_every: int | None = None,
        until: tuple[int, float] | None = None,
    ) -> SphericalDenoiser:
        """Train on `n_samples` fresh samples a run. A second call goes on where the first one stopped.

        Parameters
        ----------
        stream : MixedCumulant, array (n, d), or callable
            Where samples come from: the model (each run draws its own u and v); a table, which each run passes once in an order of its own; or
            ``stream((runs, batch), generator) -> (runs, batch, d)``.
        n_samples : int
            A run, at least one batch; what does not fill a batch is left.
        n_features : int, optional
            d; needed for a `MixedCumulant`.
        directions : array, (k, d) or (runs, k, d), optional
            Unit vectors whose overlaps are recorded, and for a `MixedCumulant` its u and v; drawn where not given.
        random_state : int or numpy.random.Generator
        record_every : int, optional
            Steps between records; by default at most 2,000 records are made.
        until : (int, float), optional
            Stop as soon as every run's overlap with direction number `int` has once reached `float` in size.

        Raises
        ------
        ValueError
            Too few samples in a table, samples of another shape, NaN.
        """
        generator = np.random.default_rng(random_state) if isinstance(random_state, (int, np.integer)) else random_state
        steps = n_samples // self.batch_size
        if steps < 1:
            raise ValueError(f"n_samples must be at least one batch of {self.batch_size}, got {n_samples}")
        if isinstance(stream, MixedCumulant):
            if n_features is None and self.directions_ is None and directions is None:
                raise ValueError("n_features says in how many dimensions the mixed cumulant model is drawn; give it")
            if directions is None:
                directions = self.directions_
            if directions is None:
                directions = random_directions(int(n_features or 0), generator, self.runs)
        self.directions_ = self._checked_directions(directions)
        batches = self._batches(stream, steps, generator)
        first = next(batches)
        d = first.shape[-1]
        if not hasattr(self, "w_"):
            start = generator.standard_normal((self.runs, d))
            self.w_ = start / np.linalg.norm(start, axis=1, keepdims=True)
        if self.w_.shape[1] != d:
            raise ValueError(f"samples have {d} features, the denoiser was started with {self.w_.shape[1]}")
        every = record_every or max(1, math.ceil(steps / RECORDS))
        history, counts = [self.overlaps()], [self.samples_seen_]
        reached = np.zeros(self.runs, dtype=bool)
        x = first
        for step in range(1, steps + 1):
            eps = generator.standard_normal(x.shape)
            _, gradient = loss_and_gradient(self.w_, x, eps, self.a, self.s, self.gain, self.phi)
            self.w_ = spherical_step(self.w_, gradient, self.step_size / d)
            self.samples_seen_ += self.batch_size
            if step % every == 0 or step == steps:
                history.append(self.overlaps())
                counts.append(self.samples_seen_)
                if not np.isfinite(self.w_).all():
                    raise ValueError(
                        "the weights became NaN or infinite: lower step_size, or look for NaN and very large values in the samples"
                    )
                if until is not None:
                    reached |= np.abs(history[-1][:, until[0]]) >= until[1]
                    if reached.all():
                        break
            if step < steps:
                x = next(batches)
        earlier = hasattr(self, "samples_")
        self.samples_ = np.concatenate([self.samples_, counts[1:]]) if earlier else np.array(counts, dtype=float)
        self.overlaps_ = np.concatenate([self.overlaps_, history[1:]]) if earlier else np.array(history)
        return self

    def overlaps(self) -> np.ndarray:
        """w.directions now, (runs, k); k = 0 where no directions were given."""
        if self.directions_ is None:
            return np.zeros((self.runs, 0))
        return np.einsum("skd,sd->sk", self.directions_, self.w_)

    def weak_recovery(self, threshold: float = 0.5, direction: int = 0) -> np.ndarray:
        """Samples at the first record with an overlap of `threshold` in size, (runs,); infinity where there was none."""
        hit = np.abs(self.overlaps_[:, :, direction]) >= threshold
        return np.where(hit.any(0), self.samples_[hit.argmax(0)], np.inf)

    def denoise(self, y: np.ndarray, run: int = 0) -> np.ndarray:
        """``a y + gain w phi(w.y)`` of one run: (n, d) -> (n, d); y = a x + s eps."""
        w = self.w_[run]
        return self.a * y + self.gain * self.phi.function(y @ w)[:, None] * w

    def _checked_directions(self, directions: np.ndarray | None) -> np.ndarray | None:
        if directions is None:
            return self.directions_
        directions = np.asarray(directions, dtype=float)
        if directions.ndim == 2:
            directions = np.broadcast_to(directions, (self.runs, *directions.shape))
        if directions.ndim != 3 or len(directions) != self.runs:
            raise ValueError(
                f"directions must be (k, d) or (runs, k, d) with {self.runs} runs, got shape {directions.shape}"
            )
        if not np.allclose(np.linalg.norm(directions, axis=-1), 1, atol=1e-6):
            raise ValueError("directions must be unit vectors; divide each by its norm")
        return directions

    def _batches(self, stream: Any, steps: int, generator: np.random.Generator) -> Iterator[np.ndarray]:
        shape = (self.runs, self.batch_size)
        if isinstance(stream, MixedCumulant):
            while True:
                yield stream.sample(shape, self.directions_, generator)  # type: ignore[arg-type]
        elif callable(stream):
            while True:
                yield self._checked_batch(np.asarray(stream(shape, generator), dtype=float), shape)
        data = np.asarray(stream, dtype=float)
        if data.ndim != 2:
            raise ValueError(f"a table of samples must have two dimensions (n, d), got shape {data.shape}")
        if len(data) < steps * self.batch_size:
            raise ValueError(
                f"{steps * self.batch_size} samples were asked for and the table has {len(data)}: online training takes each row once "
                "(using rows again changes the exponent); lower n_samples"
            )
        order = generator.permuted(np.tile(np.arange(len(data)), (self.runs, 1)), axis=1)
        for step in range(steps):
            chosen = order[:, step * self.batch_size : (step + 1) * self.batch_size]
            yield self._checked_batch(data[chosen], shape)

    @staticmethod
    def _checked_batch(x: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        if x.ndim != 3 or x.shape[:2] != shape:
            raise ValueError(f"the stream must give arrays ({shape[0]}, {shape[1]}, d), got shape {x.shape}")
        if not np.isfinite(x).all():
            raise ValueError("the samples hold NaN or infinity: leave such rows out, or fill them in, before training")
        return x
