"""Sampling and inverting a flow with one network evaluation a step and predictions of a SideNet in between.

References
----------
Chen, Li, Wang and Chen, 2026, arXiv:2601.21542.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from cameraready.flows._paths import check_finite
from cameraready.flows._samplers.asking import Counted, Sampled, grid_of
from cameraready.flows.ba_solver.quadrature import BAConfig
from cameraready.flows.ba_solver.stepping import Half, Reading, Side, Stepper


@dataclass(frozen=True)
class BASampled(Sampled):
    """What `ba_sample` returns: as `Sampled`, and what the SideNet was asked.

    Attributes
    ----------
    predictions : int
        Evaluations of the SideNet, in batches of the state's size: with the default rule four a step and three in the last, twice as
        many where guidance acts.
    """

    predictions: int = 0


def ba_sample(
    velocity: Callable[..., Tensor],
    side: Side | None,
    noise: Tensor,
    *,
    steps: int | None = None,
    times: Tensor | Sequence[float] | None = None,
    y: Tensor | None = None,
    config: BAConfig | None = None,
    trajectory: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> BASampled:
    """Sample a flow by the bi-anchor solver: N steps cost exactly N evaluations of the network (Chen et al., 2026, arXiv:2601.21542).

    From the start of a step the SideNet predicts velocities at the nodes of a quadrature, which gives the end of the step; the network is asked there;
    from its answer the nodes of the step's second half are predicted back, and the step is integrated again. The last step is not
    corrected. A velocity that the network gave at the predicted point is used again after the correction.

    With an exact SideNet the order is 6 (``nodes="lobatto"``), 4 (other inner nodes) or 2 (``"trapezoid"``); with any bounded one that is
    continuous at a step of zero it is 2, with the single anchor 1. With none (``side=None``, or an untrained one) it is two-step
    Adams-Bashforth on a uniform grid, for every rule: compare with ``sample(method="ab2")``, which needs no training.

    Use it for 4 to 10 evaluations of a network that is expensive against its SideNet. Above about 16 a multistep method without training is as good;
    for a network as cheap as the SideNet, take more steps instead.

    Parameters
    ----------
    velocity : callable ``v(x, t, y=None)``
        Time 0 noise, 1 data; asked with states of the dtype of `noise`, `t` a float. For a model in another convention see
        `cameraready.flows._adapters.velocity_of`.
    side : SideNet, MLPSideNet, callable or None
        ``side(x, v, t, h, y)`` gives the change of velocity from t to t + h; trained by `train_sidenet`. None predicts no change.
    noise : (B, ...) floating-point tensor
        States at the first time.
    steps : int, optional
        Uniform steps from 0 to 1; give either this or `times`.
    times : (N + 1,), optional
        In [0, 1], strictly rising, or falling to run the flow backwards.
    y : (B,) tensor of int64, optional
        Labels for network and SideNet.
    config : BAConfig, optional
        Rule, anchors, guidance.
    trajectory : bool
        Whether to keep the points at which the network was asked, and the end.
    progress : callable, optional
        Called with the number of steps done and in all.

    Returns
    -------
    BASampled
        States are accumulated in float32 at least and returned in the dtype of `noise`. Under guidance a call is one on the doubled batch.

    Raises
    ------
    ValueError
        A grid that is not monotone or leaves [0, 1], shapes that do not fit, guidance without labels, a SideNet on another device.
    FloatingPointError
        A velocity or a prediction that is not finite.
    """
    config = config or BAConfig()
    grid = grid_of(steps, times)
    network = _Network(velocity, noise, y, config)
    stepper = Stepper(side, grid.tolist(), config)
    with torch.no_grad():
        point = noise.to(torch.promote_types(noise.dtype, torch.float32))
        points = [noise] if trajectory else None
        for done, (t, after) in enumerate(pairwise(grid.tolist()), 1):
            point = stepper.advance(point, network(point, t, min(t, after)))
            check_finite(point, t)
            if points is not None:
                points.append(point.to(noise.dtype))
            if progress is not None:
                progress(done, len(grid) - 1)
    states = None if points is None else torch.stack(points)
    return BASampled(point.to(noise.dtype), network.calls, grid, states, stepper.predictions)


def ba_invert(
    velocity: Callable[..., Tensor],
    side: Side | None,
    data: Tensor,
    *,
    steps: int | None = None,
    times: Tensor | Sequence[float] | None = None,
    y: Tensor | None = None,
    config: BAConfig | None = None,
    trajectory: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> BASampled:
    """The noise from which the flow makes `data`: `ba_sample` on the same grid, run backwards.

    To edit, invert with the old label and sample with the new one. The round trip is exact only as far as both integrations are:
    its error falls with the number of steps as that of sampling does.

    Parameters
    ----------
    velocity, side, y, config, trajectory, progress
        As of `ba_sample`.
    data : (B, ...) floating-point tensor
        States at the last time of the grid.
    steps, times
        The grid as it is given for sampling, rising.

    Returns
    -------
    BASampled

    Raises
    ------
    ValueError
        As `ba_sample`; also a falling grid.
    """
    grid = grid_of(steps, times)
    if grid[0] > grid[-1]:
        raise ValueError("give the grid as for sampling, with rising times; ba_invert runs it backwards itself")
    return ba_sample(
        velocity, side, data, times=grid.flip(0), y=y, config=config, trajectory=trajectory, progress=progress
    )


class _Network:
    """The velocity as the solver asks it: one call a point, both halves of guidance in one batch."""

    def __init__(self, velocity: Callable[..., Tensor], x: Tensor, y: Tensor | None, config: BAConfig) -> None:
        self.config, self.y = config, y
        self._plain = Counted(velocity, x, y)
        if y is not None and len(y) != len(x):
            raise ValueError(f"there are {len(y)} labels for {len(x)} states")
        if config.guidance != 1.0:
            if y is None:
                raise ValueError(f"guidance={config.guidance} needs labels: give y")
            assert config.null_label is not None
            self.null = torch.full_like(y, config.null_label)
            self._both = Counted(velocity, x, torch.cat([y, self.null]))

    @property
    def calls(self) -> int:
        return self._plain.calls + (self._both.calls if self.config.guidance != 1.0 else 0)

    def __call__(self, point: Tensor, t: float, noisier: float) -> Reading:
        """The answer at the start of a step, whose noisier end decides whether it is guided: the same steps are, both ways."""
        scale, (low, high) = self.config.guidance, self.config.guidance_interval
        if scale == 1.0 or not low <= noisier < high:
            velocity = self._plain(point, t)
            return Reading(velocity, (Half(velocity, 1.0, self.y),))
        given, free = self._both(torch.cat([point, point]), t).chunk(2)
        halves = (Half(given, scale, self.y), Half(free, 1.0 - scale, self.null))
        return Reading(free + scale * (given - free), halves)
