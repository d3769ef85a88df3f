"""Watch a denoiser in training pass from pair-wise to higher-order statistics, noise level by noise level."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cameraready.flows._adapters import Velocity, velocity_of
from cameraready.flows._paths import LINEAR, Kind, Path, convert
from cameraready.flows.mixed_cumulant.clones import GaussianClone

#: Noise levels looked at unless told otherwise (0 is noise, 1 is data).
TIMES = (0.3, 0.5, 0.7, 0.85)
#: The model counts as having the pair-wise statistics once its error is within this of the Wiener denoiser's.
NEAR = 0.1
_COLUMNS = {"step", "time", "data", "clones", "beyond", "parting"}


@dataclass(frozen=True)
class Passage:
    """What happened at one noise level up to the last evaluation.

    Attributes
    ----------
    time, snr : float
        Noise level: t of the path, and ``(alpha / sigma)^2``.
    pairwise_step : int or None
        First evaluated step with an error on the data within 10 percent of the Wiener denoiser's: pair-wise statistics are learnt.
    higher_order_step : int or None
        First evaluated step from which on the error on the data stays below the Wiener denoiser's, on the same samples and noise, by more than chance: no denoiser that knows only
        mean and covariance does that.
    parting_step : int or None
        First evaluated step from which on the error on clones stays above that on the data by more than chance (beyond what it is for the Wiener denoiser).
    clone_turn : int
        Step at which the error on the clones was lowest; later ones make the model worse for Gaussian data.
    phase : {"learning", "pair-wise", "higher-order"}
        At the last evaluation.
    """

    time: float
    snr: float
    pairwise_step: int | None
    higher_order_step: int | None
    parting_step: int | None
    clone_turn: int
    phase: str

    def __str__(self) -> str:
        step = lambda s: "not yet" if s is None else f"step {s}"  # noqa: E731
        return (
            f"t = {self.time:g} (snr {self.snr:.3g}): {self.phase}; pair-wise: {step(self.pairwise_step)}, beyond the Wiener denoiser: {step(self.higher_order_step)}, "
            f"data and clones part: {step(self.parting_step)}"
        )


class SimplicityBiasCallback:
    """Tells at which step a denoiser passes from pair-wise to higher-order statistics, per noise level.

    At chosen steps the model is asked for the clean sample on a fixed set of held-out data and on Gaussian clones of them, with fixed noise, and its errors are compared
    with those of the Wiener denoiser, the best one that knows only mean and covariance. Any affine denoiser has the same error on data and clones.

    Call ``on_step(model)`` once a training step, in a loop of torch, diffusers or accelerate. The model is asked in ``eval()`` mode without gradients and put back; no
    generator of the training is touched. The state is saved and restored by `state_dict` and `load_state_dict`, so that
    ``accelerator.register_for_checkpointing(callback)`` takes it.

    When to use: to see what a training run has learnt so far, at which noise levels, and whether longer training still changes anything. When not: as a measure of sample
    quality; with fewer than a few hundred held-out samples chance hides the passage. Models of labels are asked without one.

    Parameters
    ----------
    data : tensor or array, (N, ...)
        Samples that the model is not trained on, scaled as its training data are.
    clone : GaussianClone, optional
        Fitted to the training data (or more); by default to `data`, which favours the Wiener denoiser.
    times : sequence of float
        Noise levels strictly between 0 (noise) and 1 (data) on `path`.
    kind : {"velocity", "x1", "noise", "score"}
        What the model predicts.
    path : Path
        The room's path on which states are made.
    adapt : callable, optional
        ``adapt(model) -> velocity`` on `path`, for models that `velocity_of` with the other arguments does not describe:
        ``lambda model: from_diffusers(model, scheduler)``.
    every : int, optional
        Evaluate at each so many steps; by default at steps that grow by a fifth, some twelve a decade.
    samples : int
        Data (and clones) that are used, at most; an evaluation costs ``2 * samples * len(times)`` forward passes.
    margin : float
        Standard errors beyond which a difference counts.
    seed : int
        Of the clones and the noise.
    **reading
        Further arguments of `cameraready.flows.velocity_of`: ``direction``, ``model_path``, ``call``, ``time_scale``, ``label`` ...

    Raises
    ------
    ValueError
        Times outside (0, 1), data of another shape than the clone, too few samples.
    TypeError
        An argument that neither this class nor `velocity_of` has.

    References
    ----------
    Bardone et al., 2026, arXiv:2603.12901 (the clones); Refinetti et al., 2023, arXiv:2211.11567. Wiener reference and tests are of this package.

    Examples
    --------
    >>> import torch
    >>> data = torch.sign(torch.randn(400, 4, generator=torch.Generator().manual_seed(0)))
    >>> callback = SimplicityBiasCallback(data, times=(0.5,), kind="x1")
    >>> callback.on_step(lambda x, t: torch.tanh(2 * x), step=10)[0]["data"] < callback.wiener_errors()[0]
    True
    """

    def __init__(
        self,
        data: Any,
        *,
        clone: GaussianClone | None = None,
        times: Sequence[float] = TIMES,
        kind: Kind = "velocity",
        path: Path = LINEAR,
        adapt: Callable[[Any], Callable[..., Tensor]] | None = None,
        every: int | None = None,
        samples: int = 512,
        margin: float = 3.0,
        seed: int = 0,
        **reading: Any,
    ) -> None:
        _check_reading(reading)
        data = data.detach().cpu() if isinstance(data, Tensor) else torch.as_tensor(data)
        if data.dim() < 2 or not data.is_floating_point() or min(len(data), samples) < 20:
            raise ValueError(
                f"data must be 20 or more samples (N, ...) of floating point, got {data.dtype} of shape {tuple(data.shape)}"
            )
        if not bool(torch.isfinite(data).all()):
            raise ValueError("data hold NaN or infinity; leave such rows out, or fill them in")
        self.times = tuple(float(t) for t in times)
        if not self.times or not all(0 < t < 1 for t in self.times):
            raise ValueError(f"times must lie strictly between 0 (noise) and 1 (data), got {list(times)}")
        if every is not None and every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        clone = clone or GaussianClone(data)
        if clone.shape != tuple(data.shape[1:]):
            raise ValueError(f"the clone is of samples {clone.shape} and the data of {tuple(data.shape[1:])}")
        self.path, self.every, self.margin = path, every, margin
        self._adapt = adapt or (lambda model: velocity_of(model, kind=kind, path=path, **reading))
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(data), generator=generator)[:samples]
        self._data = data[chosen].to(torch.float32)
        self._clones = torch.as_tensor(clone.sample(len(chosen), generator)).to(torch.float32)
        self._noise = torch.randn(len(self.times), *self._data.shape, generator=generator)
        wiener = clone.denoiser(path)
        self._wiener = [
            tuple(
                _errors(wiener(x, t), clean)
                for x, clean in zip(self._states(i), (self._data, self._clones), strict=True)
            )
            for i, t in enumerate(self.times)
        ]
        self.history: list[dict[str, float]] = []
        self._count, self._next = 0, 0

    # --- during training ---------------------------------------------------------------------------------------------

    def on_step(self, model: Any, step: int | None = None) -> list[dict[str, float]] | None:
        """To be called once a training step; evaluates where it is due.

        Parameters
        ----------
        model : module or callable
            As it is trained (or its moving average).
        step : int, optional
            Steps done; by default the calls of this method are counted.

        Returns
        -------
        list of dict, one a noise level, or None where no evaluation was due
            ``step``, ``time``, errors a dimension ``data`` and ``clones``, and ``beyond`` and ``parting``, the differences of `Passage` in standard errors.
        """
        self._count = self._count + 1 if step is None else int(step)
        if self._count < self._next:
            return None
        self._next = self._count + self.every if self.every else max(self._count + 1, math.ceil(1.2 * self._count))
        return self.evaluate(model, self._count)

    def evaluate(self, model: Any, step: int) -> list[dict[str, float]]:
        """Evaluate now, whatever the schedule; as `on_step`."""
        velocity = self._adapt(model)
        on = getattr(velocity, "path", self.path) if isinstance(velocity, Velocity) else self.path
        if on != self.path:
            raise ValueError(
                f"the adapted model is a velocity on {on}, and states are made on {self.path}: give path={on} here"
            )
        device = _device_of(model)
        answers = []
        with torch.no_grad(), _evaluating(model):
            for i, t in enumerate(self.times):
                x = torch.cat(self._states(i)).to(device)
                clean = convert(velocity(x, t), x, t, source="velocity", target="x1", path=self.path)
                answers.append(clean.float().cpu().chunk(2))
        return self.record(step, answers)

    def record(self, step: int, answers: Sequence[tuple[Tensor, Tensor]]) -> list[dict[str, float]]:
        """Take down estimates of the clean samples that were made elsewhere, for the states of `states`.

        Parameters
        ----------
        step : int
        answers : sequence of (tensor, tensor)
            For each time the estimates on data and on clones, each shaped like the data used.
        """
        if self.history and step < self.history[-1]["step"]:
            raise ValueError(
                f"step {step} comes before step {int(self.history[-1]['step'])}, which was recorded already"
            )
        rows = []
        for t, wiener, (on_data, on_clones) in zip(self.times, self._wiener, answers, strict=True):
            data, clones = _errors(on_data, self._data), _errors(on_clones, self._clones)
            if not (bool(torch.isfinite(data).all()) and bool(torch.isfinite(clones).all())):
                raise FloatingPointError(f"the model's estimate at t = {t:g} and step {step} is NaN or infinite")
            better, worse = wiener[0] - data, (clones - wiener[1])
            parting = worse.mean() + better.mean()
            spread = math.sqrt(float(worse.var() + better.var()) / len(data))
            rows.append(
                {
                    "step": step,
                    "time": t,
                    "data": float(data.mean()),
                    "clones": float(clones.mean()),
                    "beyond": _scaled(float(better.mean()), float(better.std()) / math.sqrt(len(data))),
                    "parting": _scaled(float(parting), spread),
                }
            )
        self.history += rows
        return rows

    def states(self) -> list[tuple[float, Tensor, Tensor]]:
        """For each time: the time, the noisy data and the noisy clones that a model is asked at."""
        return [(t, *self._states(i)) for i, t in enumerate(self.times)]

    # --- what came out --------------------------------------------------------------------------------------------------

    def passages(self) -> list[Passage]:
        """What happened at each noise level so far; empty before the first evaluation."""
        return [self._passage(i) for i in range(len(self.times))] if self.history else []

    def report(self) -> str:
        """The same in words, a line a noise level."""
        return (
            "\n".join(map(str, self.passages()))
            or "nothing was evaluated yet: call on_step(model) in the training loop"
        )

    def wiener_errors(self) -> list[float]:
        """The Wiener denoiser's error a dimension on the data used, by noise level."""
        return [float(data.mean()) for data, _ in self._wiener]

    def _passage(self, i: int) -> Passage:
        rows = self.history[i :: len(self.times)]
        t, reference = self.times[i], float(self._wiener[i][0].mean())
        near = next((int(r["step"]) for r in rows if r["data"] <= (1 + NEAR) * reference), None)
        beyond = _settled(rows, "beyond", self.margin)
        lowest = min(rows, key=lambda r: r["clones"])
        phase = (
            "higher-order"
            if beyond is not None
            else "pair-wise"
            if rows[-1]["data"] <= (1 + NEAR) * reference
            else "learning"
        )
        snr = (float(self.path.alpha(t)) / float(self.path.sigma(t))) ** 2
        return Passage(t, snr, near, beyond, _settled(rows, "parting", self.margin), int(lowest["step"]), phase)

    # --- state -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings and lists only; what `load_state_dict` needs to go on as if nothing had happened."""
        return {
            "version": 1,
            "set": self._fingerprint(),
            "count": self._count,
            "next": self._next,
            "history": [dict(r) for r in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError for the state of a callback with other data, times or seed."""
        if state.get("version") != 1 or state.get("set") != self._fingerprint():
            raise ValueError(
                "this state belongs to a callback with other data, clones, times or seed; make the callback as it was made then"
            )
        if any(set(row) != _COLUMNS for row in state["history"]) or len(state["history"]) % len(self.times):
            raise ValueError("this state's history is damaged: rows lack their columns, or a noise level its row")
        self._count, self._next = int(state["count"]), int(state["next"])
        self.history = [dict(row) for row in state["history"]]

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(repr((self.times, self.path)).encode())
        for each in (self._data, self._clones, self._noise):
            digest.update(each.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def _states(self, i: int) -> tuple[Tensor, Tensor]:
        t = self.times[i]
        return self.path.interpolate(self._data, self._noise[i], t), self.path.interpolate(
            self._clones, self._noise[i], t
        )


def _check_reading(reading: dict[str, Any]) -> None:
    """Raise a TypeError that tells all arguments, for one that neither the callback nor `velocity_of` has."""
    own = [p.name for p in inspect.signature(SimplicityBiasCallback).parameters.values() if p.kind is not p.VAR_KEYWORD]
    of_velocity = [name for name in inspect.signature(velocity_of).parameters if name not in ("model", *own)]
    strange = [name for name in reading if name not in of_velocity]
    if strange:
        raise TypeError(
            f"SimplicityBiasCallback has no argument {', '.join(map(repr, strange))}; it takes {', '.join(own)}, and to read the model {', '.join(of_velocity)}"
        )


def _errors(estimate: Tensor, clean: Tensor) -> Tensor:
    """Mean squared error a dimension, by sample."""
    return (estimate.to(torch.float32) - clean).flatten(1).square().mean(1)


def _scaled(difference: float, error: float) -> float:
    """In standard errors; rounding differences of float32 count as none."""
    return 0.0 if abs(difference) < 1e-7 else difference / max(error, 1e-12)


def _settled(rows: list[dict[str, float]], name: str, margin: float) -> int | None:
    """First step from which on `name` stays above `margin`."""
    found = None
    for row in reversed(rows):
        if not row[name] > margin:
            break
        found = int(row["step"])
    return found


def _device_of(model: Any) -> torch.device:
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.device("cpu") if parameter is None else parameter.device


@contextmanager
def _evaluating(model: Any) -> Any:
    """The model in eval mode, and every part of it back in its own mode afterwards."""
    modes = [(part, part.training) for part in model.modules()] if isinstance(model, nn.Module) else []
    for part, _ in modes:
        part.training = False
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
