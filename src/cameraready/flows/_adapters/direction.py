"""Whether a model's time runs the way it is said to: its flow-matching loss on data, against the loss when it is read the other way."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from cameraready.flows._adapters.velocity import Velocity, turned
from cameraready.flows._paths import LINEAR, Path

#: Another reading has to have a loss this small, relative to the model as it is, to count as the right one.
MARGIN = 0.9


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
    """
    losses = _losses(velocity, data, generator, y, path, draws)
    best = min(losses, key=lambda name: losses[name])
    if losses[best] < MARGIN * losses["as it is"]:
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
    """Flow-matching losses of the model as it is, reversed, and with only its sign or only its time turned, on the same draws."""
    other = velocity.reversed() if isinstance(velocity, Velocity) else lambda x, t, *y: -velocity(x, 1 - t, *y)
    labels = () if y is None else (y,)
    readings: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "as it is": lambda x, t: velocity(x, t, *labels),
        "reversed": lambda x, t: other(x, t, *labels),
        "sign": lambda x, t: -velocity(x, t, *labels),
        "time": lambda x, t: -other(x, t, *labels),
    }
    calls = velocity.calls if isinstance(velocity, Velocity) else 0
    sums = dict.fromkeys(readings, 0.0)
    with torch.no_grad():
        for _ in range(draws):
            t = 0.05 + 0.9 * torch.rand(len(data), generator=generator, dtype=data.dtype, device=data.device)
            x0 = torch.randn(data.shape, generator=generator, dtype=data.dtype, device=data.device)
            x, target = path.interpolate(data, x0, t), path.target(data, x0, t)
            for name, reading in readings.items():
                sums[name] += float((reading(x, t) - target).double().square().mean()) / draws
    if isinstance(velocity, Velocity):
        velocity.calls = calls  # looking at a model is not sampling from it
    return sums
