"""ATC, the anytime tracking CUSUM: the current level of a stream that jumps, and when it last jumped."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cameraready.stats.atc.checking import (
    LARGEST,
    Missing,
    Scan,
    as_array,
    as_floats,
    check_options,
    check_values,
    checked_sigma,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

#: Samples between two chances to interrupt `ATC.learn_many`.
CHUNK = 65_536
_STATE_VERSION = 1
_PARAMETERS = ("sigma", "alpha", "scan", "threshold", "warmup", "missing")
_ARRAYS = ("_counts", "_floats", "_marks", "_window")


class ATC:
    """Anytime tracking CUSUM: track a level that jumps at unknown times (Gafni et al., 2026, arXiv:2602.11406).

    The prediction is the mean of the current segment. After each sample every split of the segment is looked at; where the
    two sides' means differ by more than noise can explain at any time (the threshold grows with the logarithm of the
    segment's length and of its start), the segment begins anew with the last sample. Neither a horizon nor a number of
    changes nor a smallest jump has to be named; small jumps that cost little are left alone on purpose.

    Use it to track a level and be told of jumps, one sample at a time, with few false alarms however long it runs. Not for
    slow drifts, seasons or autocorrelated noise (take these out first), changes of variance or shape, or the retrospective
    dating of all changes of a finished series (`ruptures`).

    It goes where river expects a drift detector (`update`, `drift_detected`, `clone`); `to_river` makes it one by class too.

    Parameters
    ----------
    sigma : float, sequence of float, or "mad"
        Standard deviation of the noise (its sub-Gaussian parameter; 1/2 covers everything between 0 and 1), for several
        streams also one for each. ``"mad"`` estimates it from the median absolute difference of the last 512 pairs of
        neighbours, so jumps do not inflate it; autocorrelation deflates it and then causes false alarms.
    alpha : float
        Bound on the probability of any false alarm in a run of any length, between 0 and 1. Proved for independent
        sub-Gaussian noise and a known `sigma`; with ``"mad"`` the threshold is enlarged as Student's t is, which is checked by
        simulation only.
    scan : {"exact", "geometric"}
        ``"exact"``: the largest statistic over all splits. For one stream it is found on the convex hulls of the partial sums,
        about 2 log(L) splits in a segment of L samples (O(L) at worst, for a steady trend; the memory grows with it). For
        several streams all L splits are looked at, O(L) time and memory. ``"geometric"``: about 3 log2(L) splits, in that much
        time and memory whatever the data; a statistic at least 0.7 times the exact one's at the true change.
    threshold : "anytime" or float
        ``"anytime"`` is the paper's. A number is a constant threshold of the statistic (in standard deviations), without any
        guarantee.
    warmup : int
        With ``sigma="mad"``, differences of neighbours to see before the first alarm, at least 8.
    missing : {"raise", "skip"}
        What a NaN does: raise ValueError, or count as a sample that was not seen (`n_missing`). In several streams a sample
        with any NaN counts as missing. Infinite values always raise.

    Raises
    ------
    ValueError
        For a parameter out of range.

    Examples
    --------
    >>> detector = ATC(sigma=1.0)
    >>> for x in [0.3, -0.5, 0.1, 0.4, -0.2, 0.0, 0.2, 9.1, 8.8, 9.3]:
    ...     if detector.update(x).drift_detected:
    ...         print("changed at", detector.last_change)
    changed at 7
    """

    # The state, made at the first sample; `kernel` says what it holds.
    _counts: np.ndarray | None
    _floats: np.ndarray
    _marks: np.ndarray
    _window: np.ndarray
    _kind: int

    def __init__(
        self,
        sigma: float | Sequence[float] | Literal["mad"] = 1.0,
        *,
        alpha: float = 0.05,
        scan: Scan = "exact",
        threshold: float | Literal["anytime"] = "anytime",
        warmup: int = 30,
        missing: Missing = "raise",
    ) -> None:
        self.sigma = sigma
        self.alpha = alpha
        self.scan = scan
        self.threshold = threshold
        self.warmup = warmup
        self.missing = missing
        self._sigma = checked_sigma(sigma)
        check_options(alpha, scan, threshold, warmup, missing)
        self._names: tuple[str, ...] | None = None
        self._scalar = True
        self._fast = False
        self._compiled: tuple[Any, ...] | None = None
        self._counts = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PARAMETERS and self.__dict__.get("_counts") is not None:
            raise AttributeError(
                f"{name} cannot change once samples were seen; make another detector with clone({{{name!r}: ...}})"
            )
        super().__setattr__(name, value)

    # --- what it says ------------------------------------------------------------------------------------------------

    def predict_one(self) -> Any:
        """The mean of the current segment, which predicts the next sample; NaN before the first one.

        A number, an array (n_streams,), or a dict for a stream of dicts.
        """
        if self._counts is None:
            return math.nan
        mean = self.mean
        if self._names is not None:
            return dict(zip(self._names, mean.tolist(), strict=True))
        return float(mean[0]) if self._scalar else mean

    get = predict_one  # river's name for the value of a running statistic

    @property
    def mean(self) -> np.ndarray:
        """Mean of the current segment, float64 (n_streams,); (0,) before the first sample, NaN while all were missing."""
        if self._counts is None:
            return np.empty(0)
        length = self._count("LENGTH")
        origin, total = self._floats[0], self._floats[1]
        return origin + total / length if length else np.full(len(origin), np.nan)

    @property
    def drift_detected(self) -> bool:
        """Whether the last `update` (for `learn_many` its last sample) raised an alarm."""
        return bool(self._count("ALARM"))

    @property
    def last_change(self) -> int:
        """Position in the stream, from 0, of the first sample after the change behind the last alarm, as estimated then; or -1."""
        return self._count("CHANGE") if self._count("N_ALARMS") else -1

    @property
    def last_restart(self) -> int:
        """Position in the stream, from 0, of the first sample of the current segment (of the last alarm, if there was one)."""
        return self._count("START_POSITION")

    @property
    def statistic(self) -> float:
        """The largest standardised difference of means over the splits looked at after the last sample; NaN if it was missing."""
        return 0.0 if self._counts is None else float(self._floats[5, 0])

    @property
    def current_threshold(self) -> float:
        """What `statistic` was compared with; infinite before any split and during the warm-up."""
        return math.inf if self._counts is None else float(self._floats[6, 0])

    @property
    def noise(self) -> np.ndarray:
        """The standard deviations in use, float64 (n_streams,): those given, or the current estimates."""
        return np.empty(0) if self._counts is None else self._floats[3].copy()

    @property
    def n_samples(self) -> int:
        """Samples taken in, missing ones included."""
        return self._count("SEEN")

    @property
    def n_missing(self) -> int:
        """Samples skipped because they held a NaN."""
        return self._count("SEEN") - self._count("USED")

    @property
    def n_alarms(self) -> int:
        """Alarms so far."""
        return self._count("N_ALARMS")

    @property
    def n_splits(self) -> int:
        """Splits that were looked at after the last sample."""
        return self._count("EVALUATED")

    def _count(self, name: str) -> int:
        if self._counts is None:
            return 0
        from cameraready.stats.atc import kernel

        return int(self._counts[getattr(kernel, name)])

    # --- taking samples in -------------------------------------------------------------------------------------------

    def update(self, x: Any) -> ATC:
        """Take in one sample: a number, or for several streams a sequence (n_streams,) or a dict with the same keys each time.

        Returns the detector itself. Raises ValueError, with the state unchanged, for an infinite value, a NaN with
        ``missing="raise"``, absolute values above 1e100, or another number of streams than before.
        """
        if self._fast and type(x) in _NUMBERS and -LARGEST <= x <= LARGEST and self._update_number(x):
            return self
        row, names = self._as_row(x)
        self._check_values(row)
        self._prepare(row.shape[1], scalar=np.ndim(x) == 0 and names is None, names=names)
        self._advance(row, _NOTHING, _NO_RECORD, _NO_CHANGES)
        return self

    def _update_number(self, x: float) -> bool:
        """The common case of `update` at a tenth of its cost: one stream, a finite number, and room for it."""
        if self._compiled is None:
            from cameraready.stats.atc import kernel

            self._compiled = (kernel.advance_one, *self._settings())
        advance_one, *settings = self._compiled
        return advance_one(float(x), *settings, self._counts, self._floats, self._marks, self._window)

    def learn_many(self, X: ArrayLike) -> ATC:
        """Take in many samples at once, (n,) or (n, n_streams); the same state as after `update` with each in turn.

        All values are checked first. An interrupt (Ctrl-C) leaves the state after the first `n_samples` of them, from which
        ``learn_many(X[n:])`` goes on.
        """
        self._learn(X, record=False)
        return self

    def _learn(self, X: ArrayLike, *, record: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Means before each sample (n, n_streams), statistics and thresholds (n, 2), changes (n,); empty unless `record`."""
        values = as_array(X)
        if values.ndim not in (1, 2) or (values.ndim == 2 and values.shape[1] == 0):
            raise ValueError(f"samples must have shape (n,) or (n, n_streams), got {values.shape}")
        scalar = values.ndim == 1
        values = as_floats(values[:, None] if scalar else values)
        self._check_values(values)
        n, n_streams = values.shape
        means = np.empty((n, n_streams)) if record else _NOTHING
        history = np.empty((n, 2)) if record else _NO_RECORD
        changes = np.empty(n, dtype=np.int64) if record else _NO_CHANGES
        if n:
            self._prepare(n_streams, scalar=scalar, names=None)
            for start in range(0, n, CHUNK):
                part = slice(start, start + CHUNK)
                self._advance(values[part], means[part], history[part], changes[part])
        return means, history, changes

    def _advance(self, values: np.ndarray, means: np.ndarray, history: np.ndarray, changes: np.ndarray) -> None:
        from cameraready.stats.atc import kernel

        done = 0
        while True:
            assert self._counts is not None
            state = self._counts, self._floats, self._marks, self._window
            done += kernel.advance(
                values[done:], *self._settings(), *state, means[done:], history[done:], changes[done:]
            )
            if done >= len(values):
                return
            self._marks = np.concatenate([self._marks, np.zeros_like(self._marks)], axis=1)

    def _settings(self) -> tuple[int, float, float, int]:
        """Scan, alpha, constant threshold (NaN for the anytime one) and warm-up (0 where sigma is known), for the kernel."""
        constant = math.nan if self.threshold == "anytime" else float(self.threshold)
        return self._kind, float(self.alpha), constant, self.warmup if self._sigma is None else 0

    def _as_row(self, x: Any) -> tuple[np.ndarray, tuple[str, ...] | None]:
        if isinstance(x, Mapping):
            if self._names is None and self._counts is not None:
                raise ValueError(
                    f"samples were numbers or arrays so far, got a dict with the keys {', '.join(map(str, x))}"
                )
            names = tuple(x) if self._names is None else self._names
            if self._names is not None and set(x) != set(names):
                raise ValueError(
                    f"a sample must have the keys {', '.join(map(str, names))}, got {', '.join(map(str, x))}"
                )
            return as_floats(np.array([[x[name] for name in names]])), names
        row = np.asarray(x)
        if row.ndim > 1 or row.size == 0:
            raise ValueError(f"a sample must be a number or have shape (n_streams,), got shape {row.shape}")
        return as_floats(row.reshape(1, -1)), None

    def _check_values(self, values: np.ndarray) -> None:
        expected = None if self._counts is None else self._floats.shape[1]
        if expected is None and self._sigma is not None and len(self._sigma) > 1:
            expected = len(self._sigma)
        check_values(values, expected=expected, nan=self.missing == "skip", first=self.n_samples)

    # --- state -------------------------------------------------------------------------------------------------------

    def _prepare(self, n_streams: int, *, scalar: bool, names: tuple[str, ...] | None) -> None:
        """Make the state at the first sample, when the number of streams is known."""
        if self._counts is not None:
            return
        from cameraready.stats.atc import kernel

        one = n_streams == 1
        self._kind = kernel.GEOMETRIC if self.scan == "geometric" else kernel.HULL if one else kernel.EVERY
        capacity = kernel.GEOMETRIC_CAPACITY if self.scan == "geometric" else 64
        self._floats = np.zeros((kernel.N_FLOATS, n_streams))
        self._floats[kernel.THRESHOLD] = math.inf
        if self._sigma is not None:
            self._floats[kernel.SIGMA] = self._sigma
        self._marks = np.zeros((2, capacity, kernel.SUMS + n_streams))
        self._window = np.zeros((2, n_streams, kernel.WINDOW if self._sigma is None else 0))
        self._scalar, self._names = scalar, names
        self._fast = one and scalar
        self._counts = np.zeros(kernel.N_COUNTS, dtype=np.int64)  # last: from here on there is a state

    def reset(self) -> ATC:
        """Forget all samples; the parameters stay."""
        self._counts = None
        self.__init__(**self.get_params())  # type: ignore[misc]
        return self

    _reset = reset  # river's name for it

    def get_params(self) -> dict[str, Any]:
        """The parameters of the constructor."""
        return {name: getattr(self, name) for name in _PARAMETERS}

    def clone(self, new_params: Mapping[str, Any] | None = None, include_attributes: bool = False) -> ATC:
        """A detector with the same parameters, or those in `new_params`; with its samples only if `include_attributes`."""
        if include_attributes and not new_params:
            return copy.deepcopy(self)
        return type(self)(**{**self.get_params(), **dict(new_params or {})})

    def state_dict(self) -> dict[str, Any]:
        """Parameters and state as plain JSON values, for `from_state`."""
        params = {**self.get_params(), "sigma": self.sigma if self._sigma is None else self._sigma.tolist()}
        state: dict[str, Any] = {"version": _STATE_VERSION, "params": params}
        if self._counts is not None:
            state |= {"names": list(self._names) if self._names else None, "scalar": self._scalar}
            state["arrays"] = {name: getattr(self, name).tolist() for name in _ARRAYS}
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ATC:
        """The detector that `state_dict` described; it goes on as the original would. Raises ValueError for anything else."""
        if not isinstance(state, Mapping) or state.get("version") != _STATE_VERSION or "params" not in state:
            raise ValueError("this is no state of an ATC: expected what state_dict() returned")
        params = dict(state["params"])
        if isinstance(params["sigma"], list) and len(params["sigma"]) == 1:
            params["sigma"] = params["sigma"][0]
        made = cls(**params)
        if "arrays" not in state:
            return made
        arrays = {name: np.array(state["arrays"][name]) for name in _ARRAYS if name in state["arrays"]}
        if set(arrays) != set(_ARRAYS):
            raise ValueError(f"this state of an ATC lacks {', '.join(sorted(set(_ARRAYS) - set(arrays)))}")
        names = tuple(state["names"]) if state["names"] else None
        n_streams = np.shape(arrays["_floats"])[-1]
        made._prepare(n_streams, scalar=bool(state["scalar"]), names=names)
        for name, array in arrays.items():
            fresh = getattr(made, name)
            grown = name == "_marks" and array.ndim == 3 and array.shape[1] >= fresh.shape[1]
            if array.shape != fresh.shape and not (grown and array.shape[::2] == fresh.shape[::2]):
                raise ValueError(f"the state's {name} has shape {array.shape}, expected {fresh.shape}")
            setattr(made, name, array.astype(fresh.dtype))
        made._check_counts()
        return made

    def _check_counts(self) -> None:
        """Compiled code does not look at bounds, so a state from outside is looked at here."""
        from cameraready.stats.atc import kernel

        counts = self._counts
        assert counts is not None
        marks = counts[[kernel.N_FIRST, kernel.N_SECOND]]
        if (counts[np.arange(kernel.N_COUNTS) != kernel.CHANGE] < 0).any() or (marks > self._marks.shape[1]).any():
            raise ValueError("this state of an ATC is damaged: its counts do not fit its arrays")

    def to_river(self) -> ATC:
        """A copy, state included, that is also a `river.base.DriftDetector`; river's models then clone it without its samples.

        Raises ImportError where river is not installed.
        """
        from cameraready.stats.atc.for_river import RiverATC

        made = RiverATC(**self.get_params())
        made.__dict__.update(copy.deepcopy(self).__dict__)
        return made

    def __copy__(self) -> ATC:
        return copy.deepcopy(self)  # two detectors on one state would spoil each other's

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": None}  # compiled code is found again, not stored

    def __repr__(self) -> str:
        return f"ATC({', '.join(f'{name}={value!r}' for name, value in self.get_params().items())})"


#: What the quick way of `update` takes; the rest, NumPy's other numbers included, is looked at more closely.
_NUMBERS = (float, int, np.float64)
_NOTHING, _NO_RECORD, _NO_CHANGES = np.empty((0, 0)), np.empty((0, 2)), np.empty(0, dtype=np.int64)
