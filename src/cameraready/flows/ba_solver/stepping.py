"""One step after another of the bi-anchor solver, driven from outside: by `ba_sample` or by a diffusers pipeline.

References
----------
Chen, Li, Wang and Chen, 2026, arXiv:2601.21542.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cameraready.flows.ba_solver.quadrature import BAConfig

#: ``side(x, v, t, h, y)``: the change of velocity from t to t + h; see `SideNet.forward`.
Side = Callable[..., Tensor]


@dataclass(frozen=True)
class Half:
    """What one half of a guided evaluation gave: a velocity (B, ...), its weight, a number or (B,), and its labels."""

    velocity: Tensor
    weight: float | Tensor = 1.0
    labels: Tensor | None = None


@dataclass(frozen=True)
class Reading:
    """The network's answer at a point: the velocity that counts, and the unguided halves that it was combined from."""

    velocity: Tensor
    halves: tuple[Half, ...]


@dataclass(frozen=True)
class _Open:
    """A step whose end was predicted and not yet corrected."""

    state: Tensor
    start: Tensor
    inner: tuple[Tensor, ...]
    step: float


class Stepper:
    """Takes the network's answer at one point and says where to ask next.

    Parameters
    ----------
    side : callable or None
        The SideNet; None predicts no change.
    times : sequence of float
        The grid, N + 1 times; falling times run the flow backwards.
    config : BAConfig

    Attributes
    ----------
    index : int
        How many answers were taken in; the N-th call of `advance` returns the end of the flow.
    predictions : int
        Evaluations of the SideNet, in batches of the state's size.
    """

    def __init__(self, side: Side | None, times: Sequence[float], config: BAConfig) -> None:
        self.side, self.times, self.config = side, tuple(float(t) for t in times), config
        rule = config.rule
        self._rule = rule
        self._inner = [(node, weight) for node, weight in zip(rule.nodes, rule.weights, strict=True) if 0 < node < 1]
        self.index = 0
        self.predictions = 0
        self._open: _Open | None = None

    def restart(self) -> None:
        """Forget the step that is open: the next point was put there by somebody else."""
        self._open = None

    def advance(self, point: Tensor, reading: Reading) -> Tensor:
        """The next point at which to evaluate the network, after the last answer the end of the flow.

        Parameters
        ----------
        point : (B, ...) tensor
            Where the network was asked: what the last call returned, before the first one the start.
        reading : Reading
            What it answered.
        """
        t = self.times[self.index]
        step = self.times[self.index + 1] - t
        self.index += 1
        if self.config.anchors == "single":
            predicted = self._predict(point, reading, t, [node * step for node, _ in self._inner])
            return point + step * _weighted(zip((w for _, w in self._inner), predicted, strict=True))
        state = point if self._open is None else self._corrected(point, reading, t)
        offsets = [node * step for node, _ in self._inner] + [step]
        *inner, end = self._predict(state, reading, t, offsets)
        self._open = _Open(state, reading.velocity, tuple(inner), step)
        return state + step * self._integral(reading.velocity, inner, end)

    def _corrected(self, point: Tensor, reading: Reading, t: float) -> Tensor:
        """The state at the end of the open step: nodes nearer to it are predicted back from it, one in the middle from both ends."""
        assert self._open is not None
        step = self._open.step
        late = [place for place, (node, _) in enumerate(self._inner) if node >= 0.5]
        back = self._predict(point, reading, t, [(self._inner[place][0] - 1.0) * step for place in late])
        inner = list(self._open.inner)
        for place, velocity in zip(late, back, strict=True):
            inner[place] = velocity if self._inner[place][0] > 0.5 else 0.5 * (inner[place] + velocity)
        return self._open.state + step * self._integral(self._open.start, inner, reading.velocity)

    def _integral(self, start: Tensor, inner: Sequence[Tensor], end: Tensor) -> Tensor:
        first, last = self._rule.weights[0], self._rule.weights[-1]
        between = [(weight, velocity) for (_, weight), velocity in zip(self._inner, inner, strict=True)]
        return _weighted([(first, start), *between, (last, end)])

    def _predict(self, x: Tensor, reading: Reading, t: float, offsets: Sequence[float]) -> list[Tensor]:
        """Velocities at times ``t + offset`` along the flow through `x`, all in as few calls of the SideNet as allowed."""
        if self.side is None or not offsets:
            return [reading.velocity for _ in offsets]
        halves = reading.halves
        jobs = [(offset, half) for offset in offsets for half in halves]
        chunk = self.config.probe_chunk or len(jobs)
        changes: list[Tensor] = []
        for begin in range(0, len(jobs), chunk):
            changes += predicted_changes(self.side, x, t, jobs[begin : begin + chunk])
        self.predictions += len(jobs)
        found = []
        for place in range(len(offsets)):
            velocity = reading.velocity
            for half, change in zip(halves, changes[place * len(halves) :], strict=False):
                velocity = velocity + _over(half.weight, change) * change
            found.append(velocity)
        return found


def predicted_changes(side: Side, x: Tensor, t: float, jobs: Sequence[tuple[float, Half]]) -> list[Tensor]:
    """What `side` says of each (offset, half), all in one batch, in the dtype of `x`."""
    batch, n = x.shape[0], len(jobs)
    dtype = working_dtype(side, x)
    states = x.to(dtype).repeat(n, *[1] * (x.dim() - 1))
    velocities = torch.cat([half.velocity for _, half in jobs]).to(dtype)
    offsets = torch.tensor([offset for offset, _ in jobs], dtype=torch.float64).to(device=x.device, dtype=dtype)
    times = torch.full((n * batch,), t, dtype=dtype, device=x.device)
    labels = [half.labels for _, half in jobs]
    y = None if labels[0] is None else torch.cat([label for label in labels if label is not None])
    change = side(states, velocities, times, offsets.repeat_interleave(batch), y)
    if change.shape != states.shape:
        raise ValueError(
            f"the SideNet returned {tuple(change.shape)} for states {tuple(states.shape)}; it must return a change of velocity for each"
        )
    return list(change.to(x.dtype).split(batch))


def working_dtype(side: Side, x: Tensor) -> torch.dtype:
    """The dtype that the SideNet computes in: that of its weights, or of the state where it has none.

    Raises
    ------
    ValueError
        Its weights are on another device than the state.
    """
    if isinstance(side, nn.Module):
        weight = next((p for p in side.parameters() if p.is_floating_point()), None)
        if weight is not None:
            if weight.device != x.device:
                raise ValueError(
                    f"the SideNet is on {weight.device} and the state on {x.device}; move it with side.to({str(x.device)!r})"
                )
            return weight.dtype
    return x.dtype


def _weighted(terms: object) -> Tensor:
    total: Tensor | None = None
    for weight, velocity in terms:  # type: ignore[attr-defined]
        total = weight * velocity if total is None else total + weight * velocity
    assert total is not None
    return total


def _over(weight: float | Tensor, like: Tensor) -> float | Tensor:
    """A weight for each sample, to be multiplied with (B, ...)."""
    return weight.view(-1, *[1] * (like.dim() - 1)) if isinstance(weight, Tensor) else weight
