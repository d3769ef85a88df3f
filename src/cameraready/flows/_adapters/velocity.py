"""Any model as a velocity of this room: direction and scale of time, order of arguments, precision, and what it predicts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cameraready.flows._paths import (
    KINDS,
    LINEAR,
    Kind,
    Path,
    Time,
    check_finite,
    check_time,
    convert,
    on_path,
    scale_between,
    time_like,
)

Direction = Literal["noise_to_data", "data_to_noise"]


@dataclass(frozen=True)
class Reading:
    """How a model's inputs and outputs are to be read; fields as the parameters of `velocity_of`."""

    kind: Kind = "velocity"
    direction: Direction = "noise_to_data"
    path: Path = LINEAR
    model_path: Path = LINEAR
    time_scale: float = 1.0
    time_dtype: torch.dtype | None = None
    eps: float | None = None
    check_finite: bool = True

    def __post_init__(self) -> None:
        for name, value, known in (
            ("kind", self.kind, KINDS),
            ("direction", self.direction, ("noise_to_data", "data_to_noise")),
        ):
            if value not in known:
                raise ValueError(f"there is no {name} {value!r}; choose one of {', '.join(known)}")
        if not (math.isfinite(self.time_scale) and self.time_scale > 0):
            raise ValueError(f"time_scale must be above 0, got {self.time_scale}")
        if self.eps is not None and not 0 < self.eps < 0.5:
            raise ValueError(f"eps lies between 0 and 0.5, got {self.eps}")


@dataclass(frozen=True)
class Call:
    """How a model is called; fields as the parameters of `velocity_of`. An object and no closure, so that a velocity can be pickled."""

    order: Literal["x,t", "t,x"] = "x,t"
    time: Literal["batch", "scalar"] = "batch"
    label: str | None = None

    def __call__(self, model: Callable[..., Tensor], x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
        when = _single(t) if self.time == "scalar" else t
        first = (x, when) if self.order == "x,t" else (when, x)
        if y is None:
            return model(*first)
        return model(*first, y) if self.label is None else model(*first, **{self.label: y})


class Velocity(nn.Module):
    """A model of any convention, asked as ``v(x, t, y=None)``; made by `velocity_of` and its shorthands.

    A module, so that ``parameters()``, ``to``, ``train`` and ``copy.deepcopy`` reach the model inside, and gradients and JVPs pass through.

    Attributes
    ----------
    calls : int
        Evaluations of the model since it was made or since the last `reset`, each on a whole batch.
    reading : Reading
        How its inputs and outputs are read.
    """

    def __init__(self, ask: Callable[..., Tensor], model: Any, reading: Reading) -> None:
        super().__init__()
        self.model = model
        self.calls = 0
        self.reading = reading
        self._ask = ask

    @property
    def takes_times(self) -> bool:
        """Whether a (B,) time may hold different ones."""
        return getattr(self._ask, "time", "batch") == "batch"

    @property
    def path(self) -> Path:
        """The path on which this is the velocity."""
        return self.reading.path

    def reset(self) -> None:
        """Count `calls` from 0 again."""
        self.calls = 0

    def reversed(self) -> Velocity:
        """The same model read with the other direction of time."""
        return Velocity(self._ask, self.model, replace(self.reading, direction=turned(self.reading.direction)))

    def forward(self, x: Tensor, t: Time, y: Tensor | None = None) -> Tensor:
        """The velocity at states `x` (B, ...) and time `t`, a number, a 0-d or a (B,) tensor; like `x` in shape, dtype and device.

        Raises
        ------
        FloatingPointError
            The model gives NaN or infinite numbers; says when and in how many entries. Not looked at where ``check_finite=False``.
        ValueError
            The output has another shape than `x`, `t` lies outside [0, 1] (tensors are looked at unless ``check_finite=False``), or where the prediction
            says nothing of the velocity.
        """
        path, model_path, kind = self.reading.path, self.reading.model_path, self.reading.kind
        backwards = self.reading.direction == "data_to_noise"
        same = model_path == path
        time = time_like(check_time(t, tensors=self.reading.check_finite), x)
        u = time if same else model_path.time_of(path.alpha(time), path.sigma(time))
        u = _inside(u, kind, self.reading.eps)
        z = x if same else (x / scale_between(model_path, u, path, time)).to(x.dtype)
        output = self._asked(z, 1 - u if backwards else u, y)
        if self.reading.check_finite:
            check_finite(output, t, "the output of the model")
        if kind == "velocity" and backwards:
            output = -output
        if same:
            return convert(output, x, _flat(u), source=kind, target="velocity", path=path)
        work = torch.promote_types(x.dtype, torch.float32)  # rounded once, at the end
        output, z = output.to(work), z.to(work)
        x1 = convert(output, z, _flat(u), source=kind, target="x1", path=model_path)
        noise = convert(output, z, _flat(u), source=kind, target="noise", path=model_path)
        return on_path(x1, noise, x, time, path)

    def _asked(self, x: Tensor, t: Time, y: Tensor | None) -> Tensor:
        """The model's output in the dtype of `x`; inside, states are in the model's dtype and times (B,)."""
        dtype = _dtype_of(self.model, x.dtype)
        scaled = t * self.reading.time_scale
        time_dtype = self.reading.time_dtype or dtype
        if isinstance(scaled, Tensor):
            times = scaled.reshape(-1).to(time_dtype).expand(x.shape[0])
        else:
            times = torch.full((x.shape[0],), scaled, dtype=time_dtype, device=x.device)
        self.calls += 1
        output = self._ask(self.model, x.to(dtype), times, y)
        if not isinstance(output, Tensor):
            raise ValueError(f"the model returned {type(output).__name__}, and a tensor like its states was expected")
        if output.shape != x.shape:
            raise ValueError(
                f"the model returned shape {tuple(output.shape)} for states of shape {tuple(x.shape)}; they must be the same "
                "(times are handed to it with shape (B,): give time='scalar' where it takes a 0-d time)"
            )
        return output.to(x.dtype)


def velocity_of(
    model: Callable[..., Tensor],
    *,
    kind: Kind = "velocity",
    direction: Direction = "noise_to_data",
    path: Path = LINEAR,
    model_path: Path | None = None,
    call: Literal["x,t", "t,x"] = "x,t",
    time: Literal["batch", "scalar"] = "batch",
    time_scale: float = 1.0,
    time_dtype: torch.dtype | None = None,
    label: str | None = None,
    eps: float | None = None,
    check_finite: bool = True,
) -> Velocity:
    """A model of any convention as a velocity of this room.

    Parameters
    ----------
    model : module or callable
        Gives a tensor like its states. Of a module the parameters' dtype is asked: it gets states in it, and its output is turned back.
    kind : {"velocity", "score", "x1", "noise"}
        What it predicts; ``x1`` is the clean data (diffusers' ``sample``), ``noise`` its ``epsilon``.
    direction : {"noise_to_data", "data_to_noise"}
        Which way the model's own time runs from 0 to 1. With ``"data_to_noise"`` a predicted velocity is turned round as well.
    path : Path
        On which the velocity is wanted, in the room's time.
    model_path : Path, optional
        On which the model was trained, in the room's time as well (``alpha`` multiplies the data and is 0 at t = 0); `path` by default. Another one is
        reached exactly, by a change of time and a scale.
    call : {"x,t", "t,x"}
        The order of its arguments.
    time : {"batch", "scalar"}
        Whether it takes times as (B,) or, like functions for ODE solvers, as one 0-d tensor; a (B,) time then has to hold one number only.
    time_scale : float
        What its time is multiplied by: 1000 for models that count timesteps.
    time_dtype : torch.dtype, optional
        Of the times it gets; the dtype of its parameters by default.
    label : str, optional
        The keyword that takes labels; without it they are its third positional argument.
    eps : float, optional
        Networks that predict noise say nothing of the velocity at t = 0, those that predict ``x1`` nothing at t = 1. With `eps` they are asked at least this
        far from that end; without it such a time raises.
    check_finite : bool
        Whether each output is looked at for NaN; has to be off under ``torch.func.vmap``.

    Returns
    -------
    Velocity

    Examples
    --------
    >>> import torch
    >>> v = velocity_of(lambda x, s: -x, direction="data_to_noise")
    >>> v(torch.ones(2, 3), 0.25).shape, v.calls
    (torch.Size([2, 3]), 1)
    """
    if not callable(model):
        raise ValueError(f"a model is a module or a function of states and times, got {type(model).__name__}")
    for name, value, known in (("call", call, ("x,t", "t,x")), ("time", time, ("batch", "scalar"))):
        if value not in known:
            raise ValueError(f"there is no {name} {value!r}; choose one of {', '.join(known)}")

    reading = Reading(kind, direction, path, model_path or path, time_scale, time_dtype, eps, check_finite)
    return Velocity(Call(call, time, label), model, reading)


def turned(direction: Direction) -> Direction:
    """The other direction of time."""
    return "noise_to_data" if direction == "data_to_noise" else "data_to_noise"


def _inside(u: Time, kind: Kind, eps: float | None) -> Time:
    if eps is None or kind == "velocity":
        return u
    low, high = (0.0, 1 - eps) if kind == "x1" else (eps, 1.0)
    return u.clamp(low, high) if isinstance(u, Tensor) else min(max(u, low), high)


def _flat(t: Time) -> Time:
    return t.reshape(-1) if isinstance(t, Tensor) and t.dim() else t


def _dtype_of(model: Any, otherwise: torch.dtype) -> torch.dtype:
    if isinstance(model, nn.Module):
        return next((p.dtype for p in model.parameters() if p.is_floating_point()), otherwise)
    return otherwise


def _single(t: Tensor) -> Tensor:
    if bool((t != t[0]).any()):
        raise ValueError("this model takes one time for the whole batch (time='scalar'), and got several")
    return t[0]
