"""Training a meta flow map from a velocity, or from data alone; interruptible, resumable, with averaged weights."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from cameraready.flows._paths import time_like
from cameraready.flows.meta_flow_maps import losses
from cameraready.flows.meta_flow_maps.inner import Velocity, ask, gaussian, inner_velocity
from cameraready.flows.meta_flow_maps.maps import MetaFlowMap
from cameraready.flows.meta_flow_maps.progress import progress_bar

Distill = Literal["esd", "mf", "lsd", "psd"]
#: (N, ...) tensor, ``draw(n, generator)``, or an iterable of batches; each of data or of (data, labels).
Data = Tensor | Callable[[int, torch.Generator], Any] | Iterable[Any]


@dataclass(frozen=True)
class PowerZero:
    """Condition times: 0 with probability `zero`, else ``U^power`` with U uniform; a power above 1 favours noisy states.

    Raises
    ------
    ValueError
        `zero` outside [0, 1], or a power that is not positive.
    """

    zero: float = 0.1
    power: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.zero <= 1 or not self.power > 0:
            raise ValueError(f"zero must be a probability and power positive, got {self.zero} and {self.power}")

    def __call__(self, n: int, generator: torch.Generator) -> Tensor:
        """`n` times, (n,), float32."""
        none, drawn = torch.rand(2, n, generator=generator, device=generator.device)
        return torch.where(none < self.zero, 0.0, drawn**self.power)


class MFMTrainer:
    """Trains a `MetaFlowMap`: its inner velocity on the diagonal, and averages that agree with it.

    Parameters
    ----------
    mfm : MetaFlowMap
        Trained in place; `averaged` is what to use afterwards.
    teacher : callable ``v(x, t, y=None)``, optional
        A velocity of the data on the map's path, whose closed-form inner velocity is the target. Of a module a frozen copy in eval mode is asked, so that it may be the
        very network that the map is made of; a plain callable has to see to that itself. Without a teacher targets come from the data alone, noisy but unbiased.
    distill : {"esd", "mf", "lsd", "psd"}
        Off the diagonal: Eulerian self-distillation with the teacher's velocity or with a sample's (MeanFlow), Lagrangian, progressive.
    t_cond : callable ``(n, generator) -> (n,)``
        Condition times.
    lr, warmup, cooldown : float, int, float
        Peak rate of Adam, steps of linear warm-up, and the last share of the steps in which the rate falls to zero.
    ema : float
        Decay of the averaged weights, fewer steps counting for less at the beginning.
    batch : int
        States of one step.
    diagonal : float
        Their share on the diagonal.
    adaptive : (float, float), optional
        Powers of the adaptive weights on and off the diagonal. By default 0.5 where targets are the teacher's, which are noiseless, and 0 where they are
        samples: there such weights would pull averages towards medians. (The authors take 0.5 and 1.)
    data_std : float, optional
        Root mean square of the data's numbers. Errors are measured in units of the spread that draws would have were the data Gaussian, so that small
        posteriors, late in time, count like large ones. None measures all alike, as the authors do.
    clip : float
        Largest norm of the gradient.
    null_label, label_dropout : int, float
        The label that stands for none, and with what probability labels are replaced by it.
    guidance : float
        Scale of classifier-free guidance that is built into the map (1 for none). Posteriors of a guided velocity are those of no joint law:
        for unbiased values and tilts leave it at 1. Replaced labels are taught without guidance.
    derivative : {"forward", "double-backward"}
        See `losses.directional`.
    seed : int

    Raises
    ------
    ValueError
        A setting out of range; ``distill="esd"`` without a teacher; guidance without `null_label`.
    """

    def __init__(
        self,
        mfm: MetaFlowMap,
        teacher: Velocity | None = None,
        *,
        distill: Distill = "esd",
        t_cond: Callable[[int, torch.Generator], Tensor] = PowerZero(0.1, 2.0),
        lr: float = 1e-4,
        warmup: int = 100,
        cooldown: float = 0.0,
        ema: float = 0.999,
        batch: int = 256,
        diagonal: float = 0.5,
        adaptive: tuple[float, float] | None = None,
        data_std: float | None = 1.0,
        clip: float = 1.5,
        null_label: int | None = None,
        label_dropout: float = 0.0,
        guidance: float = 1.0,
        derivative: losses.Derivative = "forward",
        seed: int = 0,
    ) -> None:
        if distill not in get_args(Distill):
            raise ValueError(f"distill must be one of {', '.join(get_args(Distill))}, got {distill!r}")
        if distill == "esd" and teacher is None:
            raise ValueError(
                "distill='esd' needs teacher=, a velocity of the data; from data alone train with 'mf', 'lsd' or 'psd'"
            )
        if (guidance != 1 or label_dropout > 0) and null_label is None:
            raise ValueError(
                "guidance and label_dropout need null_label, the label by which the network is asked for all classes"
            )
        for name, value in (("diagonal", diagonal), ("cooldown", cooldown), ("label_dropout", label_dropout)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is a share and must lie in [0, 1], got {value}")
        if batch < 2 or not lr > 0 or not 0 <= ema < 1:
            raise ValueError(f"batch must be at least 2, lr positive and ema in [0, 1), got {batch}, {lr} and {ema}")
        if isinstance(teacher, torch.nn.Module):
            teacher = copy.deepcopy(teacher).eval().requires_grad_(False)
        self.mfm, self.teacher, self.distill, self.t_cond = mfm, teacher, distill, t_cond
        self.lr, self.warmup, self.cooldown, self.ema = lr, warmup, cooldown, ema
        self.batch, self.diagonal, self.clip = batch, diagonal, clip
        noisy = teacher is None or distill == "mf"
        self.adaptive = adaptive if adaptive is not None else (0.0 if teacher is None else 0.5, 0.0 if noisy else 0.5)
        self.data_std = data_std
        self.null_label, self.label_dropout, self.guidance = null_label, label_dropout, guidance
        self.derivative: losses.Derivative = derivative
        self.averaged = copy.deepcopy(mfm).eval().requires_grad_(False)
        self.optimizer = torch.optim.Adam(mfm.parameters(), lr=lr)
        self._settings = {
            "distill": distill, "t_cond": repr(t_cond), "lr": lr, "warmup": warmup, "cooldown": cooldown, "ema": ema, "batch": batch,
            "diagonal": diagonal, "adaptive": repr(self.adaptive), "data_std": repr(data_std), "clip": clip, "null_label": repr(null_label),
            "label_dropout": label_dropout, "guidance": guidance, "seed": seed,
        }  # fmt: skip
        device = next(mfm.parameters()).device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.step_count = 0
        self.history: list[float] = []
        self._inner = None if teacher is None else inner_velocity(self._guided, mfm.path)

    def fit(
        self,
        data: Data,
        steps: int,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int = 1000,
        progress: bool | None = None,
    ) -> MetaFlowMap:
        """Train until `steps` steps were made in all, and return the averaged map.

        Parameters
        ----------
        data : tensor (N, ...), ``draw(n, generator)``, or an iterable of batches
            Clean data, or pairs (data, labels) with labels (N,) long. An iterable (a DataLoader) is gone through again and again and sets the batch itself.
        steps : int
            Counted from the beginning, also over interruptions.
        checkpoint : path, optional
            Written every `every` steps and at an interruption; if it exists, training goes on from there. With a tensor or `draw` as data the result
            is that of an uninterrupted training, bit for bit.
        progress : bool, optional
            By default only in a terminal.

        Raises
        ------
        ValueError
            No data, labels that do not fit; a checkpoint that is damaged, or of another training.
        FloatingPointError
            The loss is not finite; weights are those before that step.
        """
        file = None if checkpoint is None else FilePath(checkpoint)
        if file is not None and file.exists():
            self._resume(file)
        batches = batches_of(data, self.batch, self.generator)
        self.mfm.train()
        try:
            with progress_bar(progress, steps, "meta flow map") as report:
                while self.step_count < steps:
                    before = self.generator.get_state()
                    try:
                        x1, label = next(batches)
                        loss = self.step(x1, label, steps=steps)
                    except BaseException:  # an interrupted step is made again with the same draws
                        self.generator.set_state(before)
                        raise
                    report(self.step_count, f"loss {loss:.4g}")
                    if file is not None and self.step_count % every == 0:
                        _save(self.state_dict(), file)
        finally:
            self.mfm.eval()
            if file is not None:
                _save(self.state_dict(), file)
        return self.averaged

    def step(self, x1: Tensor, label: Tensor | None = None, *, steps: int | None = None) -> float:
        """One step of the optimizer on clean data `x1` (B, ...); returns the loss. `steps`, the length of the training, sets the cool-down."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * self._rate(steps)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(x1, label)
        if not bool(torch.isfinite(loss.detach())):
            raise FloatingPointError(
                f"the loss is {loss.item()} at step {self.step_count + 1}: lower lr, or look at the teacher and the range of the data"
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.mfm.parameters(), self.clip)
        self.optimizer.step()
        self.step_count += 1
        self._average()
        self.history.append(float(loss.detach()))
        return self.history[-1]

    def loss(self, x1: Tensor, label: Tensor | None = None) -> Tensor:
        """The training loss on clean data `x1` (B, ...) with fresh times and noises of the trainer's generator; a scalar with a graph."""
        g, path, n = self.generator, self.mfm.path, len(x1)
        x1 = x1.to(g.device)
        t = self.t_cond(n, g).to(x1.dtype)
        x_t = path.interpolate(x1, gaussian(tuple(x1.shape), x1, g), t)
        label = self._dropped(label, n)
        first, second = torch.rand(2, n, generator=g, device=g.device, dtype=x1.dtype)
        on = min(max(round(self.diagonal * n), 1), n - 1)
        s, u = torch.minimum(first, second), torch.maximum(first, second)
        s = torch.cat([first[:on], s[on:]])
        x0 = gaussian(tuple(x1.shape), x1, g)  # not the noise of x_t: with that one the posterior would be a point
        y = path.interpolate(x1, x0, s)
        with torch.no_grad():
            sampled = path.target(x1, x0, s)
            taught = sampled if self._inner is None else self._inner(s, y, t, x_t, label)
        unit = self._scale(s, t).square()
        errors = losses.diagonal(self._part(t, x_t, label, slice(0, on)), s[:on], y[:on], taught[:on]) / unit[:on]
        rest = slice(on, n)
        average = self._part(t, x_t, label, rest)
        s, u, y = s[rest], u[rest], y[rest]
        if self.distill in ("esd", "mf"):
            velocity = (taught if self.distill == "esd" else sampled)[rest]
            off = losses.eulerian(average, s, u, y, velocity, derivative=self.derivative)
        elif self.distill == "lsd":
            off = losses.lagrangian(average, s, u, y, derivative=self.derivative)
        else:
            off = losses.progressive(average, s, u, y, torch.rand(n - on, generator=g, device=g.device, dtype=x1.dtype))
        return losses.adaptive(errors, self.adaptive[0]) + losses.adaptive(off / unit[rest], self.adaptive[1])

    def state_dict(self) -> dict[str, Any]:
        """All that training goes on from: weights, averaged weights, optimizer, generator, count of steps, losses."""
        return {
            "mfm": self.mfm.state_dict(),
            "averaged": self.averaged.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "step": self.step_count,
            "settings": dict(self._settings),
            "history": torch.tensor(self.history, dtype=torch.float64),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.mfm.load_state_dict(state["mfm"])
        self.averaged.load_state_dict(state["averaged"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        self.step_count, self.history = int(state["step"]), state["history"].tolist()

    def _resume(self, file: FilePath) -> None:
        """Go on from a checkpoint file, if it is one of this training."""
        advice = "remove it to begin anew, or name another checkpoint"
        try:
            state = torch.load(file, weights_only=True, map_location=self.generator.device)
            settings = state["settings"]
        except Exception as error:  # whatever torch finds wrong with a file
            raise ValueError(
                f"{file} is no checkpoint of a meta flow map, or damaged ({type(error).__name__}); {advice}"
            ) from error
        other = [
            f"{name} {settings.get(name)!r} (now {value!r})"
            for name, value in self._settings.items()
            if settings.get(name) != value
        ]
        if other:
            raise ValueError(f"{file} is of a training with other settings: {', '.join(other)}; {advice}")
        try:
            self.load_state_dict(state)
        except (RuntimeError, KeyError, ValueError) as error:
            raise ValueError(f"{file} is of another network ({str(error).splitlines()[0]}); {advice}") from error

    def _part(self, t: Tensor, x: Tensor, label: Tensor | None, where: slice) -> losses.Average:
        part = None if label is None else label[where]
        return lambda s, u, y: self.mfm.average_velocity(s, u, y, t[where], x[where], part)

    def _dropped(self, label: Tensor | None, n: int) -> Tensor | None:
        if label is None:
            return None
        label = label.to(self.generator.device)
        if label.shape != (n,):
            raise ValueError(f"labels must be ({n},), one for each datum; got {tuple(label.shape)}")
        if self.label_dropout == 0:
            return label
        kept = torch.rand(n, generator=self.generator, device=label.device) >= self.label_dropout
        return torch.where(kept, label, self.null_label)

    def _guided(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:
        assert self.teacher is not None
        plain = ask(self.teacher, x, t, y)
        if self.guidance == 1 or y is None:
            return plain
        null = torch.full_like(y, self.null_label)
        scale = time_like(torch.where(y == self.null_label, 1.0, self.guidance), x).to(x.dtype)
        base = self.teacher(x, t, null)
        return base + scale * (plain - base)

    def _rate(self, steps: int | None) -> float:
        rise = min(1.0, (self.step_count + 1) / max(self.warmup, 1))
        if steps is None or self.cooldown == 0:
            return rise
        return rise * min(1.0, (steps - self.step_count) / math.ceil(self.cooldown * steps))

    def _scale(self, s: Tensor, t: Tensor) -> Tensor:
        """How much inner velocities differ among draws at ``(s, t)``, (B,), for Gaussian data of standard deviation `data_std`."""
        if self.data_std is None:
            return torch.ones_like(s)
        path, variance = self.mfm.path, self.data_std**2
        left = variance * path.sigma(t) ** 2 / (path.sigma(t) ** 2 + variance * path.alpha(t) ** 2)
        spread = path.alpha(s) ** 2 * left + path.sigma(s) ** 2
        turning = path.d_alpha(s) * path.sigma(s) - path.d_sigma(s) * path.alpha(s)
        return turning * (left.clamp(min=1e-4) / spread.clamp(min=1e-4)).sqrt()

    def _average(self) -> None:
        follow(self.averaged, self.mfm, min(self.ema, self.step_count / (9 + self.step_count)))


@torch.no_grad()
def follow(averaged: nn.Module, network: nn.Module, decay: float) -> None:
    """Move averaged weights towards the network's, and take over its buffers."""
    for mean, now in zip(averaged.parameters(), network.parameters(), strict=True):
        mean.lerp_(now.detach(), 1 - decay)
    for mean, now in zip(averaged.buffers(), network.buffers(), strict=True):
        mean.copy_(now)


def batches_of(data: Data, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor | None]]:
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], Tensor):
        whole, labels = data
    elif isinstance(data, Tensor):
        whole, labels = data, None
    elif callable(data):
        while True:
            yield _pair(data(size, generator))
    else:
        while True:
            empty = True
            for batch in data:
                empty = False
                yield _pair(batch)
            if empty:
                raise ValueError("the data gave no batch; an iterator that is used up cannot be gone through again")
    if len(whole) == 0 or (labels is not None and len(labels) != len(whole)):
        raise ValueError(f"data must hold at least one row and a label for each; got {len(whole)} rows")
    while True:
        chosen = torch.randint(len(whole), (size,), generator=generator, device=generator.device).to(whole.device)
        yield whole[chosen], None if labels is None else labels[chosen]


def _pair(batch: Any) -> tuple[Tensor, Tensor | None]:
    if not isinstance(batch, tuple | list):
        return batch, None
    if len(batch) not in (1, 2):
        raise ValueError(f"a batch must be data, or (data, labels); got {len(batch)} parts")
    return batch[0], batch[1] if len(batch) == 2 else None


def _save(state: dict[str, Any], file: FilePath) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    torch.save(state, part)
    part.replace(file)
