"""A neural process for tables of series, in the manner of scikit-learn."""

from __future__ import annotations

import numbers
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from cameraready.stats.sfconvcnp.frequencies import AliasingWarning, FrequencyGrid
from cameraready.stats.sfconvcnp.network import SFConvCNP
from cameraready.stats.sfconvcnp.tasks import random_splits, read_inputs, read_points, read_tasks

#: A typical task is scaled to this width, that of the paper's own tasks, for which its frequencies were chosen.
WIDTH = 6.0


class NeuralProcessRegressor(BaseEstimator):
    """Learns from many short series what such series look like, and completes a new one from a few of its points
    (`SFConvCNP`; Mohseni et al., 2026, arXiv:2606.01172).

    Use it where there are dozens of series of one kind (stations, patients, batches, simulations) with points at any
    places and gaps; for a single series take a Gaussian process. Training costs O(points) a step; a prediction is one pass.

    Parameters
    ----------
    width, n_blocks, groups, volterra_rank
        The network, see `SFConvCNP`.
    max_freq : float
        Highest frequency, in cycles for a sixth of the typical series' width.
    x_range : float, optional
        Largest distance, in units of x, between points of one task or from its points to a query; None takes the widest
        series of `fit`. The frequency step follows from it.
    n_steps, batch_size, learning_rate
        Steps of AdamW on so many series each, the rate falling to zero along a cosine.
    context : (int, int or None)
        Smallest and largest number of points that a series is completed from in training; None means all but one.
    n_targets : int
        Most held-out points of a series that enter one step.
    columns : (str, str or sequence of str, str or sequence of str)
        Names of the series' column, the inputs and the outputs, where `fit` is given a table.
    device : str
        Where to train and predict.
    verbose : bool, optional
        Whether to show progress on stderr; None does where that is a terminal.
    random_state : int, RandomState instance or None

    Attributes
    ----------
    model_ : SFConvCNP
    n_steps_ : int
        Steps taken; fewer than `n_steps` after an interruption with Ctrl-C, which leaves a usable estimator and a warning.
    log_likelihoods_ : ndarray of shape (n_steps_,)
        Of a held-out output in each step, in units of the standardised outputs.
    x_scale_, y_mean_, y_scale_ : ndarray
    """

    def __init__(
        self,
        *,
        width: int = 32,
        n_blocks: int = 3,
        groups: int = 8,
        volterra_rank: int | None = None,
        max_freq: float = 4.9,
        x_range: float | None = None,
        n_steps: int = 2000,
        batch_size: int = 16,
        learning_rate: float = 1e-3,
        context: tuple[int, int | None] = (3, None),
        n_targets: int = 64,
        columns: tuple[str, Sequence[str], Sequence[str]] = ("series", ("x",), ("y",)),
        device: str = "cpu",
        verbose: bool | None = None,
        random_state: Any = None,
    ) -> None:
        self.width = width
        self.n_blocks = n_blocks
        self.groups = groups
        self.volterra_rank = volterra_rank
        self.max_freq = max_freq
        self.x_range = x_range
        self.n_steps = n_steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.context = context
        self.n_targets = n_targets
        self.columns = columns
        self.device = device
        self.verbose = verbose
        self.random_state = random_state

    def fit(self, tasks: Any, y: None = None) -> NeuralProcessRegressor:
        """Learn from series.

        Parameters
        ----------
        tasks : list of (x, y), or table
            Arrays (n,) or (n, dim_x) and (n,) or (n, dim_y), n differing between series; or a long table with the columns
            named in `columns`. Inputs are numbers or dates (taken in days); a missing output is NaN.

        Raises
        ------
        ValueError
            No series with two points, an output that is missing everywhere, inputs that are not finite, series so much wider
            than the others that the frequencies would not fit, arguments out of range. The estimator is then as it was.
        RuntimeError
            Training diverged.
        """
        before = self.__dict__.copy()
        try:
            return self._fit(tasks)
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _fit(self, tasks: Any) -> NeuralProcessRegressor:
        self._check_arguments()
        read = [(x, y) for x, y in (_with_output(*task) for task in read_tasks(tasks, self.columns)) if len(x) >= 2]
        if not read:
            raise ValueError("no series has two points with an output, so that nothing can be held out")
        state = check_random_state(self.random_state)
        seeds = state.randint(np.iinfo(np.int32).max, size=2)
        self._set_scales(read)
        scaled = [(x / self.x_scale_, (y - self.y_mean_) / self.y_scale_) for x, y in read]
        widest = max(float(np.ptp(x, axis=0).max()) for x, _ in scaled)
        asked = widest if self.x_range is None else self.x_range / float(self.x_scale_.min())
        self.x_range_ = asked if asked > 0 else WIDTH
        self._check_width()
        self.model_ = SFConvCNP(
            read[0][0].shape[1],
            read[0][1].shape[1],
            width=self.width,
            n_blocks=self.n_blocks,
            groups=self.groups,
            volterra_rank=self.volterra_rank,
            max_freq=self.max_freq,
            freq_resolution="auto",
            x_range=self.x_range_,
            aliasing="ignore",  # told in the user's own units, by _check_reach
            generator=torch.Generator().manual_seed(int(seeds[0])),
        ).to(self.device)
        self._train(scaled, np.random.default_rng(int(seeds[1])))
        return self

    def predict(self, context: Any, x: Any, return_std: bool = False) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Mean, and with `return_std` standard deviation, of the outputs (noise included) of one series at `x`.

        Parameters
        ----------
        context : (x, y)
            The points of the series that are known; may be empty arrays.
        x : array-like of shape (n,) or (n, dim_x)

        Returns
        -------
        mean, std : ndarray of shape (n,), or (n, dim_y) where `fit` saw outputs of two dimensions
        """
        tensors = self._tensors(context, x)
        with torch.no_grad():
            found = self.model_(*tensors)
        mean = self._shaped(found.loc.double().cpu().numpy() * self.y_scale_ + self.y_mean_)
        if not return_std:
            return mean
        return mean, self._shaped(found.scale.double().cpu().numpy() * self.y_scale_)

    def sample(self, context: Any, x: Any, n_samples: int = 1, random_state: Any = None) -> np.ndarray:
        """Joint samples of one series at `x`, drawn value by value: shape (n_samples, n) or (n_samples, n, dim_y)."""
        tensors = self._tensors(context, x)
        seed = int(check_random_state(random_state).randint(np.iinfo(np.int32).max))
        generator = torch.Generator(self.device).manual_seed(seed)
        drawn = self.model_.sample(*tensors, n_samples=n_samples, generator=generator)
        return self._shaped(drawn.double().cpu().numpy() * self.y_scale_ + self.y_mean_)

    # --- fitting --------------------------------------------------------------------------------------------------------

    def _check_arguments(self) -> None:
        counts = (self.n_steps, self.batch_size, self.n_targets)
        if not all(isinstance(count, numbers.Integral) and count >= 1 for count in counts):
            raise ValueError(f"n_steps, batch_size and n_targets must be whole numbers of at least 1, got {counts}")
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate!r}")
        if self.context is None or len(self.context) != 2:
            raise ValueError(f"context must be (smallest, largest), got {self.context!r}")
        smallest, largest = self.context
        if smallest < 0 or (largest is not None and largest < smallest):
            raise ValueError(f"context must be (smallest, largest) with 0 <= smallest <= largest, got {self.context!r}")
        if self.x_range is not None and not self.x_range > 0:
            raise ValueError(f"x_range must be positive or None, got {self.x_range!r}")

    def _check_width(self) -> None:
        """Refuse a widest series, or an x_range, for which the frequencies would not fit."""
        try:
            FrequencyGrid(len(self.x_scale_), self.max_freq, "auto", x_range=self.x_range_)
        except ValueError as error:
            if "frequencies" not in str(error):
                raise
            raise ValueError(
                f"{'the widest series' if self.x_range is None else 'x_range'} is {self.x_range_ / WIDTH:.3g} times as wide as the typical "
                f"series, which asks for too many frequencies ({error}); leave out or cut the widest series, or set x_range smaller"
            ) from None

    def _set_scales(self, tasks: list[tuple[np.ndarray, np.ndarray]]) -> None:
        spans = np.array([np.ptp(x, axis=0) for x, _ in tasks])
        typical = np.median(spans, axis=0) / WIDTH
        self.x_scale_ = np.where(typical > 0, typical, np.where(spans.max(0) > 0, spans.max(0) / WIDTH, 1.0))
        values = np.concatenate([y for _, y in tasks])
        empty = np.flatnonzero(np.isnan(values).all(axis=0))
        if len(empty):
            raise ValueError(f"output {empty[0]} is missing in every point; leave it out")
        self.y_mean_ = np.nanmean(values, axis=0)
        deviation = np.nanstd(values, axis=0)
        self.y_scale_ = np.where(deviation > 0, deviation, 1.0)

    def _train(self, tasks: list[tuple[np.ndarray, np.ndarray]], generator: np.random.Generator) -> None:
        optimizer = torch.optim.AdamW(self.model_.parameters(), lr=self.learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.n_steps)
        batches = random_splits(tasks, self.batch_size, *self.context, self.n_targets, generator)
        show = sys.stderr.isatty() if self.verbose is None else self.verbose
        reached: list[float] = []
        self.model_.train()
        try:
            for step in range(1, self.n_steps + 1):
                batch = next(batches)
                batch = type(batch)(*(tensor.to(self.device) for tensor in vars(batch).values()))
                value = batch.log_likelihood(self.model_(batch.xc, batch.yc, batch.xt, batch.mask_c)).mean()
                optimizer.zero_grad(set_to_none=True)
                (-value).backward()
                torch.nn.utils.clip_grad_norm_(self.model_.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                reached.append(float(value.detach()))
                if not np.isfinite(reached[-1]):
                    raise RuntimeError(
                        f"training diverged in step {step} (the likelihood is {reached[-1]}); lower learning_rate ({self.learning_rate:g})"
                    )
                if show and (step % 50 == 0 or step == self.n_steps):
                    recent = np.mean(reached[-50:])
                    sys.stderr.write(f"\rstep {step} of {self.n_steps}, log-likelihood {recent:.3f} ")
                    sys.stderr.flush()
        except KeyboardInterrupt:
            warnings.warn(
                f"interrupted after {len(reached)} of {self.n_steps} steps; the estimator can be used as it is",
                ConvergenceWarning,
                stacklevel=3,
            )
        finally:
            self.model_.eval()
            self.log_likelihoods_, self.n_steps_ = np.array(reached), len(reached)
            if show:
                sys.stderr.write("\n")

    # --- predicting -----------------------------------------------------------------------------------------------------

    def _tensors(self, context: Any, x: Any) -> tuple[torch.Tensor, ...]:
        check_is_fitted(self, "model_")
        if not isinstance(context, tuple | list) or len(context) != 2:
            raise ValueError("context must be a pair (x, y), of empty arrays where nothing is known")
        known, values = _with_output(*read_points(*context))
        query = read_inputs(x)
        dim_x, dim_y = self.model_.dim_x, self.model_.dim_y
        if len(known) == 0:
            known, values = np.zeros((0, dim_x)), np.zeros((0, dim_y))
        if known.shape[1] != dim_x or query.shape[1] != dim_x or values.shape[1] != dim_y:
            raise ValueError(
                f"the estimator was fitted to inputs of {dim_x} and outputs of {dim_y} dimensions, got a context of"
                f" {known.shape[1]} and {values.shape[1]} and a query of {query.shape[1]}"
            )
        known, query = known / self.x_scale_, query / self.x_scale_
        self._check_reach(known, query)
        parts = known, ((values - self.y_mean_) / self.y_scale_).astype(np.float32), query
        return tuple(torch.as_tensor(part, device=self.device) for part in parts)

    def _check_reach(self, known: np.ndarray, query: np.ndarray) -> None:
        if not len(known) or not len(query):
            return
        both = np.concatenate([known, query])
        spread = np.ptp(both, axis=0)
        limit = self.model_.grid.period / 2
        if (spread > limit).any():
            axis = int(np.argmax(spread))
            scale = self.x_scale_[axis]
            warnings.warn(
                f"context and query lie {spread[axis] * scale:.4g} apart; beyond {limit * scale:.4g} far points look near."
                f" Fit with x_range={spread[axis] * scale:.4g}",
                AliasingWarning,
                stacklevel=4,
            )

    def _shaped(self, values: np.ndarray) -> np.ndarray:
        return values[..., 0] if self.model_.dim_y == 1 else values


def _with_output(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The points that have at least one output."""
    there = ~np.isnan(y).all(axis=1)
    return x[there], y[there]
