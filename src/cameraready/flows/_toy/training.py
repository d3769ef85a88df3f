"""Training small networks: flow matching for a velocity, and the loop under it that goes on where it was interrupted."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path as FilePath

import torch
from torch import Tensor, nn

from cameraready.flows._paths import LinearPath, Path
from cameraready.flows._toy.checkpoints import Checkpoint, optimizer_tensors, restore_optimizer
from cameraready.flows._toy.stacked import StackedMLP, clip_per_seed

#: ``draw(n, generator)`` gives fresh data (n, ...), or data and labels (n,).
Draw = Callable[[int, torch.Generator], Tensor | tuple[Tensor, Tensor]]


class Progress:
    """Says on stderr how far a loop is: at most every ten seconds, on a terminal every second in one line."""

    def __init__(self, what: str | None, steps: int):
        self.what, self.steps = what, steps
        self._terminal = sys.stderr.isatty()
        self._begun = self._said = time.monotonic()
        self._first: int | None = None

    def __call__(self, step: int, loss: Tensor) -> None:
        """`step` steps are done, the last with this loss."""
        if self.what is None:
            return
        now = time.monotonic()
        if self._first is None:
            self._first = step
        last = step == self.steps
        if now - self._said < (1 if self._terminal else 10) and not last:
            return
        self._said = now
        left = (now - self._begun) / max(1, step - self._first) * (self.steps - step)
        end = "\n" if last or not self._terminal else ""
        start = "\r" if self._terminal else ""
        text = f"{start}{self.what}: step {step} of {self.steps}, loss {float(loss):.4f}, {left:.0f} s left  "
        print(text, end=end, file=sys.stderr, flush=True)


def fit(
    net: nn.Module,
    loss: Callable[[nn.Module, torch.Generator], Tensor],
    *,
    steps: int,
    lr: float,
    generator: torch.Generator,
    ema: float = 0.999,
    clip: float = 1.0,
    weight_decay: float = 0.0,
    checkpoint: FilePath | Checkpoint | None = None,
    progress: str | None = None,
) -> nn.Module:
    """Minimise a loss by AdamW with warm-up over a twentieth of the steps, then a cosine to zero, and take the weights' moving average.

    Parameters
    ----------
    net : nn.Module
        Trained in place. A `StackedMLP` is clipped for each seed by itself.
    loss : callable
        ``loss(net, generator)``, a scalar, or (S,) for S stacked seeds, whose sum is descended.
    steps, lr
    generator : torch.Generator
        On the CPU; the only source of randomness.
    ema : float
        Decay of the average over steps, at step k at most (1 + k) / (10 + k).
    clip : float
        Largest norm of the gradient.
    weight_decay : float
        Decoupled.
    checkpoint : path or Checkpoint, optional
        Where the state is kept every twenty seconds. With the same arguments an interrupted training goes on from it and ends with the same bits as one
        that was not; the file is removed at the end.
    progress : str, optional
        What to call the training on stderr; None is silent.

    Returns
    -------
    nn.Module
        `net` with averaged weights, in evaluation mode, without gradients.

    Raises
    ------
    FloatingPointError
        The loss is NaN or infinite: which step.
    """
    if steps < 1 or not lr > 0 or not 0 <= ema < 1:
        raise ValueError(f"steps and lr must be positive and ema in [0, 1), got {steps}, {lr} and {ema}")
    weights = dict(net.named_parameters())
    average = {name: w.detach().clone() for name, w in weights.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=lr, betas=(0.9, 0.99), weight_decay=weight_decay, fused=True)
    if not isinstance(checkpoint, Checkpoint):
        shapes = {name: list(w.shape) for name, w in weights.items()}
        checkpoint = Checkpoint(checkpoint, [shapes, steps, lr, ema, clip, weight_decay])
    start = _restore(checkpoint, net, average, optimizer, generator)
    net.train()
    tell = Progress(progress, steps)
    warm = max(1, steps // 20)
    for step in range(start, steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.zero_grad(set_to_none=True)
        value = loss(net, generator)
        total = value.sum()
        if not math.isfinite(reached := float(total.detach())):
            advice = f"lower the learning rate (lr={lr})"
            if step == 0:
                advice = "before anything was learnt: look at the data and the network's initial weights"
            raise FloatingPointError(f"the loss is {reached} at step {step}: {advice}")
        total.backward()
        if isinstance(net, StackedMLP):
            clip_per_seed(weights.values(), clip)
        else:
            nn.utils.clip_grad_norm_(weights.values(), clip)
        optimizer.step()
        keep = min(ema, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(average.values()), [w.detach() for w in weights.values()], 1 - keep)
        tell(step + 1, value.detach().mean())
        if checkpoint.due():
            checkpoint.save(step + 1, _state(net, average, optimizer, generator))
    with torch.no_grad():
        for name, w in weights.items():
            w.copy_(average[name])
    if checkpoint.path is not None:
        checkpoint.path.unlink(missing_ok=True)
    return net.eval().requires_grad_(False)


def _state(
    net: nn.Module, average: dict[str, Tensor], optimizer: torch.optim.Optimizer, generator: torch.Generator
) -> dict[str, Tensor]:
    return {
        **{f"net.{name}": tensor for name, tensor in net.state_dict().items()},
        **{f"average.{name}": tensor for name, tensor in average.items()},
        **optimizer_tensors(optimizer),
        "generator": generator.get_state(),
    }


def _restore(
    checkpoint: Checkpoint,
    net: nn.Module,
    average: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> int:
    found = checkpoint.load()
    if found is None:
        return 0
    step, tensors = found
    wanted = {f"net.{name}" for name in net.state_dict()} | {f"average.{name}" for name in average} | {"generator"}
    if lacking := wanted - set(tensors):
        print(
            f"{checkpoint.path} cannot be read ({min(lacking)} is missing); the training begins anew.", file=sys.stderr
        )
        return 0
    net.load_state_dict({key[4:]: value for key, value in tensors.items() if key.startswith("net.")})
    for name in average:
        average[name].copy_(tensors[f"average.{name}"])
    restore_optimizer(optimizer, tensors)
    generator.set_state(tensors["generator"])
    return step


def train_flow(
    net: nn.Module,
    data: Tensor | Draw,
    labels: Tensor | None = None,
    *,
    path: Path = LinearPath(),  # noqa: B008 (a constant)
    steps: int,
    batch: int = 128,
    lr: float = 1e-3,
    ema: float = 0.999,
    label_dropout: float = 0.1,
    generator: torch.Generator,
    clip: float = 1.0,
    checkpoint: FilePath | None = None,
    progress: str | None = None,
) -> nn.Module:
    """Train a velocity by conditional flow matching (Lipman et al., 2023, arXiv:2210.02747).

    Parameters
    ----------
    net : nn.Module
        ``net(x, t, y)`` like x; without labels it is called as ``net(x, t)``. A `StackedMLP` trains all its seeds, each on batches, noise and times of
        its own.
    data : (N, ...) tensor, or callable
        Training data, or ``draw(n, generator)``, which gives fresh ones.
    labels : (N,) long, optional
        For a network with ``classes``.
    path : Path
    steps, batch, lr, ema, clip, checkpoint, progress
        See `fit`.
    label_dropout : float
        Probability that a label is replaced by the null label ``net.classes``, so that the network is unconditional as well.
    generator : torch.Generator
        Of batches, noise, times and dropped labels.

    Returns
    -------
    nn.Module
        `net` with averaged weights, in evaluation mode, without gradients.

    Notes
    -----
    Times of a batch are stratified: one in each of `batch` equal pieces of [0, 1], shifted together, which takes variance from the loss.
    """
    if isinstance(data, Tensor) and labels is not None and len(labels) != len(data):
        raise ValueError(f"there must be one label for each of the {len(data)} data, got {len(labels)}")
    if not isinstance(data, Tensor) and labels is not None:
        raise ValueError("labels of drawn data are given by the draw: let it return (data, labels)")
    if isinstance(data, Tensor):
        if not len(data):
            raise ValueError("there are no data to train on")
        bad = int((~torch.isfinite(data)).reshape(len(data), -1).any(1).sum())
        if bad:
            raise ValueError(f"{bad} of {len(data)} data are not finite; leave them out or fill them in")
    stacks = net.seeds if isinstance(net, StackedMLP) else 1
    like = next(net.parameters())

    def loss(net: nn.Module, g: torch.Generator) -> Tensor:
        count = stacks * batch
        if isinstance(data, Tensor):
            chosen = torch.randint(len(data), (count,), generator=g)
            x1, y = data[chosen], None if labels is None else labels[chosen]
        else:
            drawn = data(count, g)
            x1, y = drawn if isinstance(drawn, tuple) else (drawn, None)
        x1 = x1.to(like)
        x0 = torch.randn(x1.shape, generator=g, dtype=like.dtype)
        t = (torch.rand(stacks, 1, generator=g) + torch.arange(batch) / batch).remainder(1).flatten().to(like.dtype)
        x_t, target = path.interpolate(x1, x0, t), path.target(x1, x0, t)
        if y is not None:
            y = torch.where(torch.rand(count, generator=g) < label_dropout, net.classes, y)
        if isinstance(net, StackedMLP):
            x_t, target, t = (v.unflatten(0, (stacks, batch)) for v in (x_t, target, t))
            y = None if y is None else y.unflatten(0, (stacks, batch))
        found = net(x_t, t) if y is None else net(x_t, t, y)
        return (found - target).square().flatten(1 if stacks > 1 or isinstance(net, StackedMLP) else 0).mean(-1)

    return fit(
        net, loss, steps=steps, lr=lr, generator=generator, ema=ema, clip=clip, checkpoint=checkpoint, progress=progress
    )
