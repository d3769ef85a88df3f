"""Training a SideNet beside a frozen flow, by chains of short steps.

References
----------
Chen, Li, Wang and Chen, 2026, arXiv:2601.21542, and its released training script.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

import torch
from torch import Tensor, nn

from cameraready.flows._paths import LinearPath, Path, check_finite
from cameraready.flows._samplers import grid, sample
from cameraready.flows.ba_solver.checkpoints import Progress, load, save
from cameraready.flows.ba_solver.quadrature import open_rule
from cameraready.flows.ba_solver.stepping import working_dtype

#: The least room for a step, so that a chain that has come to an end of time goes on.
ROOM = 1e-5
#: Own samples of the backbone that are drawn at once.
OWN_BATCH = 64
_NODES = open_rule(3)


@dataclass(frozen=True)
class Training:
    """What `train_sidenet` did.

    Attributes
    ----------
    side : nn.Module
        The network that was given, now with the averaged weights, set to evaluation.
    losses : tuple of float
        Mean loss of each step of the optimizer, squared velocity an entry.
    calls : int
        Evaluations of the backbone, each on a batch; those for starting points drawn from the backbone are among them.
    seconds : float
        Wall-clock time, that of resumed runs added.
    finished : bool
        False where `max_seconds` or Ctrl-C ended it early.
    """

    side: nn.Module
    losses: tuple[float, ...]
    calls: int
    seconds: float
    finished: bool


def train_sidenet(
    velocity: Callable[..., Tensor],
    side: nn.Module,
    data: Tensor | Iterable[Tensor | tuple[Tensor, Tensor]] | None = None,
    *,
    labels: Tensor | None = None,
    shape: tuple[int, ...] | None = None,
    steps: int = 250,
    batch: int = 128,
    chain: int = 8,
    h_rate: float = 10.0,
    lr: float = 3e-3,
    decay: bool = True,
    ema: float = 0.99,
    clip: float = 1.0,
    label_dropout: float = 0.1,
    null_label: int | None = None,
    path: Path = LinearPath(),  # noqa: B008 (a constant)
    own_samples: int = 1024,
    own_steps: int = 20,
    generator: torch.Generator | None = None,
    max_seconds: float | None = None,
    checkpoint: str | File | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> Training:
    """Train `side` to predict how the velocity of a frozen flow changes along its steps (Chen et al., 2026, arXiv:2601.21542).

    A chain starts at a random time between data and noise. Each of its links draws a direction and a length (see `step_lengths`), moves the state along the
    flow by the SideNet's own predictions at three Gauss-Legendre nodes, asks the backbone there, and takes as loss the mean square of what the SideNet
    says of the change of velocity less what it was. Gradients flow through that one prediction, never through the moves. Costs
    ``steps * (chain + 1)`` evaluations of the backbone on batches of `batch`, and no gradient of it.

    Parameters
    ----------
    velocity : callable ``v(x, t, y=None)``
        The frozen flow, 0 noise and 1 data; `t` comes as a (B,) tensor.
    side : nn.Module
        A `SideNet`, `MLPSideNet`, or any ``side(x, v, t, h, y)`` with weights; changed in place.
    data : (N, ...) tensor, iterable, or None
        Data to start chains between, an iterable of batches (``x`` or ``(x, y)``; it is begun again when it ends), or None: the backbone's
        own samples, `own_samples` of `shape`, drawn with `own_steps` steps of Heun on the device of `side`, float32.
    labels : (N,) tensor of int64, optional
        Beside `data`; with ``data=None`` the labels to draw samples for, in turn.
    shape : tuple of int
        Of one sample; only with ``data=None``.
    steps, batch : int
        Steps of the optimizer (the paper takes 250 at batch 4096 for 256 x 256 images), and chains in each.
    chain : int
        Links of a chain.
    h_rate : float
        Rate of the truncated exponential distribution of step lengths: their mean is about its inverse. The paper's 50 trains on steps of 0.02,
        a tenth of those that are then taken, and extrapolates. 0 draws them evenly.
    lr : float
        Of AdamW without weight decay; the paper takes 1e-4 for networks 100 times as large.
    decay : bool
        Whether the rate falls to zero along a cosine over all `steps`; the paper's does not. What the optimizer leaves of noise in the weights is
        otherwise as large as what they gain.
    ema, clip : float
        Of the averaged weights, whose decay is warmed up as min(ema, (1 + k)/(10 + k)), and the largest norm of a gradient.
    label_dropout, null_label
        Share of labels replaced by `null_label`, so that both halves of guidance are learnt; without a `null_label` none is.
    path : Path
        Of the flow; linear by default.
    generator : torch.Generator, optional
        Of everything that is drawn; None: one of seed 0. On the CPU.
    max_seconds : float, optional
        Stop after so long in this call, with what was reached.
    checkpoint : path, optional
        A .safetensors file written every 50 steps, and when stopped. If it is there, training goes on from it: to the same bits as in
        one go where `data` is a tensor or None. With `decay` it is bound to its `steps`.
    progress : callable, optional
        Called with steps done, steps in all and the last loss; by default a line on a terminal's stderr.

    Returns
    -------
    Training

    Raises
    ------
    ValueError
        Settings out of range; labels that do not fit; a checkpoint of other settings.
    FloatingPointError
        The backbone or the loss is not finite.
    """
    _check(steps=steps, batch=batch, chain=chain, own_samples=own_samples, own_steps=own_steps)
    if h_rate < 0 or not 0 <= ema < 1 or lr <= 0 or clip <= 0 or not 0 <= label_dropout <= 1:
        raise ValueError(
            f"h_rate={h_rate} and ema={ema} must be at least 0 (ema below 1), lr={lr} and clip={clip} above 0, label_dropout={label_dropout} in [0, 1]"
        )
    generator = generator if generator is not None else torch.Generator().manual_seed(0)
    asked = _Asked(velocity)
    began = time.monotonic()
    if not any(parameter.requires_grad for parameter in side.parameters()):
        raise ValueError(
            "no weight of the SideNet is trainable; it has none, or requires_grad is False for all of them"
        )
    settings: dict[str, Any] = {"chain": chain, "h_rate": h_rate, "batch": batch, "lr": lr, "ema": ema, "clip": clip}
    settings |= {"label_dropout": label_dropout, "null_label": null_label, "path": repr(path), "decay": decay}
    if decay:
        settings["steps"] = steps
    if isinstance(data, Tensor):
        settings["data"] = [*data.shape, float(data.double().sum())]
    optimizer = torch.optim.AdamW(side.parameters(), lr=lr, weight_decay=0.0)
    average = {name: value.detach().clone() for name, value in side.state_dict().items()}
    if data is None:
        weight = next(side.parameters(), torch.empty(0))
        data, labels = _own(asked, shape, labels, own_samples, own_steps, generator, weight.device)
    elif shape is not None:
        raise ValueError("shape goes with data=None; data have their own")
    drawn = _batches(data, labels, batch, generator)
    done = Progress()
    if checkpoint is not None and File(checkpoint).is_file():
        done = load(File(checkpoint), side, average, optimizer, generator, settings)
    losses, before = list(done.losses), done.seconds
    asked.calls += done.calls
    before_step = generator.get_state()
    show = progress or (_on_terminal if sys.stderr.isatty() else None)
    side.train()

    def reached() -> Progress:
        return Progress(tuple(losses), asked.calls, before + time.monotonic() - began)

    try:
        while len(losses) < steps:
            if max_seconds is not None and time.monotonic() - began > max_seconds:
                break
            before_step = generator.get_state()
            x1, y = next(drawn)
            if y is not None and null_label is not None:
                free = torch.rand(len(y), generator=generator).to(y.device) < label_dropout
                y = torch.where(free, torch.full_like(y, null_label), y)
            loss = _chain(asked, side, x1, y, path, chain, h_rate, generator)
            if not loss == loss or loss == float("inf"):
                raise FloatingPointError(
                    f"the loss is {loss} at step {len(losses) + 1}; lower lr={lr}, or look at the backbone's precision"
                )
            nn.utils.clip_grad_norm_(side.parameters(), clip)
            if decay:
                for group in optimizer.param_groups:
                    group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * len(losses) / steps))
            with _whole():
                optimizer.step()
                losses.append(loss)
                _averaged(average, side, min(ema, (1 + len(losses)) / (10 + len(losses))))
                before_step = generator.get_state()
            optimizer.zero_grad(set_to_none=True)
            if checkpoint is not None and len(losses) % 50 == 0:
                save(File(checkpoint), side, average, optimizer, before_step, settings, reached())
            if show is not None:
                show(len(losses), steps, loss)
    except KeyboardInterrupt:
        if checkpoint is None:
            raise
    if checkpoint is not None:
        save(File(checkpoint), side, average, optimizer, before_step, settings, reached())
    side.load_state_dict(average)
    side.eval()
    end = reached()
    return Training(side, end.losses, end.calls, end.seconds, len(losses) >= steps)


@contextmanager
def _whole() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, so that no step is half done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(*came[0])


def step_lengths(room: Tensor, rate: float, generator: torch.Generator) -> Tensor:
    """Lengths from an exponential distribution truncated to ``[0, room]``, like `room`; with ``rate=0`` uniform there.

    Inverts the distribution function, ``h = -log(1 + u (exp(-rate room) - 1)) / rate``, without loss of digits where ``rate room`` is small.
    """
    u = torch.rand(room.shape, generator=generator, dtype=room.dtype).to(room.device)
    room = room.clamp(min=ROOM)
    if rate == 0:
        return u * room
    return -torch.log1p(u * torch.expm1(-rate * room)) / rate


def _chain(
    asked: _Asked,
    side: nn.Module,
    x1: Tensor,
    y: Tensor | None,
    path: Path,
    chain: int,
    rate: float,
    generator: torch.Generator,
) -> float:
    """One chain from between `x1` and noise; adds its gradient to the SideNet's weights and returns its mean loss."""
    n, dtype = len(x1), working_dtype(side, x1)
    working = torch.promote_types(x1.dtype, torch.float32)
    shape = (-1, *[1] * (x1.dim() - 1))
    noise = torch.randn(x1.shape, generator=generator, dtype=working).to(x1.device)
    t = torch.rand(n, generator=generator, dtype=working).to(x1.device)
    x = path.interpolate(x1.to(working), noise, t)
    v = asked(x, t, y, x1.dtype)
    total = 0.0
    for _ in range(chain):
        towards_data = (torch.rand(n, generator=generator) < 0.5).to(x1.device)
        h = step_lengths(torch.where(towards_data, 1 - t, t), rate, generator)
        h = torch.where(towards_data, h, -h)
        move = torch.zeros_like(x)
        with torch.no_grad():
            for node, weight in zip(_NODES.nodes, _NODES.weights, strict=True):
                change = side(x.to(dtype), v.to(dtype), t.to(dtype), (node * h).to(dtype), y)
                move = move + weight * (v + change.to(working))
            reached = (t + h).clamp(0.0, 1.0)
            x_next = x + h.view(shape) * move
            v_next = asked(x_next, reached, y, x1.dtype)
        predicted = side(x.to(dtype), v.to(dtype), t.to(dtype), h.to(dtype), y)
        loss = (predicted - (v_next - v).to(dtype)).square().mean() / chain
        loss.backward()
        total += float(loss.detach())
        x, t, v = x_next, reached, v_next
    return total


class _Asked:
    """The backbone without gradients, in the dtype of the data, calls counted and values checked."""

    def __init__(self, velocity: Callable[..., Tensor]) -> None:
        self.velocity, self.calls = velocity, 0

    def __call__(self, x: Tensor, t: Tensor, y: Tensor | None, dtype: torch.dtype) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            given = x.to(dtype)
            try:
                v = self.velocity(given, t) if y is None else self.velocity(given, t, y)
            except (RuntimeError, TypeError, IndexError) as error:
                raise ValueError(
                    f"the velocity, asked with x {tuple(x.shape)} and t {tuple(t.shape)}{'' if y is None else f' and y {tuple(y.shape)}'}, "
                    f"raised {type(error).__name__}: {error}; every state has a time of its own in training"
                ) from error
        if v.shape != x.shape:
            raise ValueError(f"the velocity has shape {tuple(v.shape)} for states of shape {tuple(x.shape)}")
        check_finite(v, t)
        return v.to(x.dtype)


def _batches(
    data: Tensor | Iterable[Tensor | tuple[Tensor, Tensor]],
    labels: Tensor | None,
    batch: int,
    generator: torch.Generator,
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Batches of data with their labels, without end."""
    if isinstance(data, Tensor):
        if data.dim() < 2 or len(data) == 0 or not data.is_floating_point():
            raise ValueError(
                f"data must be (N, ...) floating point with N at least 1, got {tuple(data.shape)} {data.dtype}"
            )
        if labels is not None and len(labels) != len(data):
            raise ValueError(f"there are {len(labels)} labels for {len(data)} data")
        return _drawn(data, labels, batch, generator)
    if labels is not None:
        raise ValueError("an iterable of batches brings its labels itself, as (x, y)")
    return _repeated(data)


def _drawn(
    data: Tensor, labels: Tensor | None, batch: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor | None]]:
    while True:
        rows = torch.randint(len(data), (batch,), generator=generator).to(data.device)
        yield data[rows], None if labels is None else labels[rows]


def _repeated(batches: Iterable[Tensor | tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor | None]]:
    while True:
        empty = True
        for each in batches:
            empty = False
            yield each if isinstance(each, tuple | list) else (each, None)  # type: ignore[misc]
        if empty:
            raise ValueError(
                "the iterable of batches is used up; give one that can be begun again, such as a DataLoader"
            )


def _own(
    asked: _Asked,
    shape: tuple[int, ...] | None,
    labels: Tensor | None,
    count: int,
    steps: int,
    generator: torch.Generator,
    device: torch.device,
) -> tuple[Tensor, Tensor | None]:
    """Samples of the backbone, with the labels that they were drawn for, a few at a time."""
    if shape is None:
        raise ValueError("without data give shape, that of one sample, to start from the backbone's own samples")
    seed = int(torch.randint(2**62, (), generator=generator))  # whatever is drawn later is the same when resumed
    noise = torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed)).to(device)
    y = None if labels is None else labels.to(device)[torch.arange(count, device=device) % len(labels)]

    def velocity(x: Tensor, t: float, y: Tensor | None = None) -> Tensor:
        times = torch.full((len(x),), t, dtype=x.dtype, device=x.device)
        return asked(x, times, y, x.dtype)

    found = []
    for rows in torch.arange(count, device=device).split(OWN_BATCH):
        drawn = sample(velocity, noise[rows], times=grid(steps), method="heun", y=None if y is None else y[rows])
        found.append(drawn.x)
    return torch.cat(found), y


def _averaged(average: dict[str, Tensor], side: nn.Module, decay: float) -> None:
    with torch.no_grad():
        for name, value in side.state_dict().items():
            if value.is_floating_point():
                average[name].lerp_(value, 1 - decay)
            else:
                average[name].copy_(value)


def _on_terminal(done: int, steps: int, loss: float) -> None:
    end = "\n" if done == steps else ""
    print(f"\rSideNet: step {done}/{steps}, loss {loss:.3g}", end=end, file=sys.stderr, flush=True)


def _check(**sizes: int) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}={size!r} must be a whole number, at least 1")
