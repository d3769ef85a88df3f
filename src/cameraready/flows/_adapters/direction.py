"""Whether a model's time runs the way it is said to: its flow-matching loss on data, against the loss when it is read the other way."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cameraready.flows._adapters.velocity import Velocity, turned
from cameraready.flows._paths import LINEAR, Path, check_finite, time_like

#: Another reading has to have a loss this small, relative to the model as it is, to count as the right one.
MARGIN = 0.9
#: A turned model has to come this near to the loss of a Gaussian fit to be believed,
FIT = 2.0
#: and nearer to it than to that of a constant, or have so small a part of the loss as it is;
PLAIN = 0.3
#: and one with more than so much of the loss of predicting a constant is refused, whatever its best reading.
NOTHING = 1.5
#: Parts of the data with a time of their own, for models that take one time for a whole batch.
PARTS = 8


def looks_reversed(
    velocity: Callable[..., Tensor],
    data: Tensor,
    *,
    generator: torch.Generator | None = None,
    y: Tensor | None = None,
    path: Path = LINEAR,
    draws: int = 8,
) -> float:
    """The flow-matching loss under the room's direction of time over the loss under the reversed one; above 1 the model looks reversed.

    Parameters
    ----------
    velocity : callable ``v(x, t, y=None)``
    data : (B, ...) tensor
        What the model was trained on, in the range it was trained on; labels `y` where it needs them.
    generator : torch.Generator, optional
        Of times (between 0.05 and 0.95) and noise.
    path : Path
    draws : int
        How often all of `data` is noised, with one time for each.

    Raises
    ------
    ValueError, FloatingPointError
        The model gives no tensor of the data's shape, or numbers that are not finite.
    """
    losses = _losses(velocity, data, generator, y, path, draws)
    ours, theirs = losses["as it is"], losses["reversed"]
    return ours / theirs if theirs else math.inf


def check_direction(
    velocity: Callable[..., Tensor],
    data: Tensor,
    *,
    generator: torch.Generator | None = None,
    y: Tensor | None = None,
    path: Path = LINEAR,
    draws: int = 8,
) -> float:
    """Raise a ValueError where `velocity` fits `data` clearly better when its time, its sign or both are turned; returns `looks_reversed`.

    Parameters as for `looks_reversed`. Clearly: with a loss below `MARGIN` of the loss as it is, so that a network that has learnt nothing passes.
    Where even the best reading is far from the loss of a Gaussian with the data's mean and variance, or nearer to that of a constant (and not below `PLAIN` of the loss as it is), turning is not what is
    missing (data in other units, other labels, another kind of prediction, another scale of time), and the sentence says so.
    """
    losses = _losses(velocity, data, generator, y, path, draws)
    gaussian, constant = losses.pop("a Gaussian"), losses.pop("a constant")
    best = min(losses, key=lambda name: losses[name])
    turnable = losses[best] < MARGIN * losses["as it is"]
    learnt = losses[best] <= max((gaussian + constant) / 2, PLAIN * losses["as it is"])
    believed = learnt and losses[best] <= FIT * gaussian
    if not believed and (turnable or losses["as it is"] > NOTHING * constant):
        raise ValueError(
            f"the model fits these data in no reading (flow-matching loss {losses['as it is']:.4g}, at best {losses[best]:.4g} where time, sign or both are "
            f"turned; a Gaussian of their mean and variance has {gaussian:.4g}); look at their scale, labels, kind, time_scale"
        )
    if turnable:
        other = turned(velocity.reading.direction if isinstance(velocity, Velocity) else "noise_to_data")
        what = {
            "reversed": f"its time runs the other way: give direction={other!r} to velocity_of",
            "sign": "its sign is turned: it predicts noise minus data where its time runs from noise to data; negate its output",
            "time": "its time is turned and its sign is not: hand it 1 - t",
        }[best]
        raise ValueError(
            f"the model fits these data better (flow-matching loss {losses[best]:.4g} against {losses['as it is']:.4g}) if {what}"
        )
    return losses["as it is"] / losses["reversed"] if losses["reversed"] else math.inf


def _losses(
    velocity: Callable[..., Tensor],
    data: Tensor,
    generator: torch.Generator | None,
    y: Tensor | None,
    path: Path,
    draws: int,
) -> dict[str, float]:
    """Flow-matching losses of the model as it is, reversed, and with only its sign or only its time turned, and of two simple ones, on the same draws."""
    other = velocity.reversed() if isinstance(velocity, Velocity) else lambda x, t, *y: -velocity(x, 1 - t, *y)
    labels = () if y is None else (y,)

    def asked(model: Callable[..., Tensor], x: Tensor, t: Tensor) -> Tensor:
        v = model(x, t, *labels)
        if not isinstance(v, Tensor):
            raise ValueError(f"the model returned {type(v).__name__}, and a tensor like its states was expected")
        return v

    readings: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "as it is": lambda x, t: asked(velocity, x, t),
        "reversed": lambda x, t: asked(other, x, t),
        "sign": lambda x, t: -asked(velocity, x, t),
        "time": lambda x, t: -asked(other, x, t),
    }
    calls = velocity.calls if isinstance(velocity, Velocity) else 0
    center, variance = data.mean(0), data.var(0, correction=0).mean()

    def constant(x: Tensor, t: Tensor) -> Tensor:
        return (path.d_alpha(time_like(t, x)) * center).expand_as(x)

    def gaussian(x: Tensor, t: Tensor) -> Tensor:
        t = time_like(t, x)
        alpha, sigma = path.alpha(t), path.sigma(t)
        away = (x - alpha * center) / (alpha**2 * variance + sigma**2)
        return path.d_alpha(t) * (center + alpha * variance * away) + path.d_sigma(t) * sigma * away

    readings |= {"a Gaussian": gaussian, "a constant": constant}
    sums = dict.fromkeys(readings, 0.0)
    with torch.no_grad(), _evaluating(velocity):
        for x1, t, share in _noised(velocity, data, generator, draws):
            x0 = torch.randn(x1.shape, generator=generator, dtype=x1.dtype, device=x1.device)
            x, target = path.interpolate(x1, x0, t), path.target(x1, x0, t)
            for name, reading in readings.items():
                v = reading(x, t)
                if v.shape != x.shape:  # which broadcasting would hide
                    raise ValueError(f"the velocity has shape {tuple(v.shape)} for data of shape {tuple(x.shape)}")
                check_finite(v, t)
                sums[name] += float((v - target).double().square().mean()) * share
    if isinstance(velocity, Velocity):
        velocity.calls = calls  # looking at a model is not sampling from it
    return sums


@contextlib.contextmanager
def _evaluating(velocity: Any) -> Iterator[None]:
    """A module without dropout and with its running means as they are; every submodule's mode is put back."""
    modes = {m: m.training for m in velocity.modules()} if isinstance(velocity, nn.Module) else {}
    try:
        for module in modes:
            module.training = False
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _noised(
    velocity: Callable[..., Tensor], data: Tensor, generator: torch.Generator | None, draws: int
) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Data, their times and their share in the mean: a time for each, or, where the model takes one for all, for each of a few parts."""
    alone = isinstance(velocity, Velocity) and not velocity.takes_times
    for _ in range(draws):
        for part in data.chunk(PARTS) if alone else (data,):
            count = 1 if alone else len(part)
            t = 0.05 + 0.9 * torch.rand(count, generator=generator, dtype=data.dtype, device=data.device)
            yield part, t, len(part) / len(data) / draws
