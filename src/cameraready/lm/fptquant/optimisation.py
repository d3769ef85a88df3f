"""Fitting the transforms: to the weights alone, without data; and, with the ranges, to the given model's predictions."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax

from cameraready.lm.fptquant.merging import Read, Transforms
from cameraready.lm.fptquant.quantisers import quantiser_parameters

if TYPE_CHECKING:
    from cameraready.lm.fptquant.quantizer import FPTQuantizer


@dataclass
class Progress:
    """How far an optimisation has come: losses of the steps done and the optimiser's state."""

    losses: list[float] = field(default_factory=list)
    optimiser: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "optimiser": copy.deepcopy(self.optimiser)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        return cls(list(state["losses"]), copy.deepcopy(state["optimiser"]))


def steps_shown(first: int, last: int, label: str, progress: bool | None) -> Iterator[int]:
    """range(first, last), with a progress bar on standard error if it is a terminal (or as `progress` says)."""
    from rich.console import Console
    from rich.progress import track

    shown = sys.stderr.isatty() if progress is None else progress
    yield from track(range(first, last), description=label, console=Console(stderr=True), disable=not shown)


def p_norm(weight: Tensor, p: float) -> Tensor:
    """(mean |w|^p)^(1/p), computed relative to the largest entry."""
    largest = weight.detach().abs().amax().clamp_min(torch.finfo(weight.dtype).tiny)
    # The clamp gives a matrix of zeros a gradient of zero; its own would be infinite.
    mean = (weight / largest).abs().pow(p).mean().clamp_min(torch.finfo(weight.dtype).tiny)
    return largest * mean.pow(1 / p)


def finite(loss: float, step: int) -> float:
    """`loss`, if it is a finite number: else the transforms, still those of the step before, would be spoilt."""
    if not math.isfinite(loss):
        raise RuntimeError(
            f"the loss is {loss} at step {step}; the transforms are those of the step before. Are all weights finite? Else try a lower lr"
        )
    return loss


def weight_norms(transforms: Transforms, model: nn.Module, p: float = 4.0) -> dict[str, float]:
    """(mean |w|^p)^(1/p) of every transformed weight matrix, and of gains of query and key norms: the terms of the local loss, by name."""
    with torch.no_grad():
        every = transforms.merged(Read(model, torch.float32))
        return {name: float(p_norm(value, p)) for name, value in every if _counts(transforms, name, value)}


def _counts(transforms: Transforms, name: str, value: Tensor) -> bool:
    inner = {f"{n.name}.weight" for layer in transforms.host.layers for n in (layer.q_norm, layer.k_norm) if n}
    return value.ndim == 2 or name in inner


def optimise_locally(
    transforms: Transforms,
    model: nn.Module,
    done: Progress,
    *,
    p: float,
    steps: int,
    lr: float,
    rows: int | None,
    seed: int,
    progress: bool | None,
) -> None:
    """AdamW on the sum of `losses`, from step ``len(done.losses)`` to `steps`; every step leaves a state that can be resumed."""
    if not p >= 1:
        raise ValueError(f"p must be at least 1, got {p}")
    if rows is not None and rows < 1:
        raise ValueError(f"rows must be positive, got {rows}")
    parameters = [parameter for parameter in transforms.parameters() if parameter.requires_grad]
    if not parameters or steps <= len(done.losses):
        return
    optimiser = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    if done.optimiser is not None:
        optimiser.load_state_dict(done.optimiser)
    read = Read(model, torch.float32)
    for step in steps_shown(len(done.losses), steps, "local optimisation", progress):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        optimiser.zero_grad()
        total = finite(_backward(transforms, read, p=p, rows=rows, generator=generator), step)
        optimiser.step()
        done.losses.append(total)
        done.optimiser = optimiser.state_dict()


def _backward(transforms: Transforms, read: Read, *, p: float, rows: int | None, generator: torch.Generator) -> float:
    """Gradients of the whole loss, a tensor at a time, so that only one weight's graph is held; returns the loss."""
    turn = transforms.matrix()
    # R is the same leaf for all: gradients gather on it and pass through Cayley's map once.
    leaf = None if turn is None else turn.detach().requires_grad_()

    def pick(n: int) -> Tensor:
        return torch.randperm(n, generator=generator)[: min(rows or n, n)]

    picked = None if rows is None else pick
    total = 0.0
    for name, value in transforms.each(read, leaf, picked):
        if _counts(transforms, name, value):
            total += _add(p_norm(value, p))
    if turn is not None and leaf is not None and leaf.grad is not None:
        turn.backward(leaf.grad)
    return total


def _add(loss: Tensor) -> float:
    if loss.requires_grad:
        loss.backward()
    return float(loss.detach())


# --- end to end --------------------------------------------------------------------------------------------------------


def divergence(student: Tensor, teacher: Tensor, kind: str) -> Tensor:
    """Mean over tokens of the divergence between the distributions of two sets of logits (..., vocabulary), in nats.

    ``"jsd"``: Jensen-Shannon, symmetric, at most ln 2; ``"kl"``: Kullback-Leibler from the teacher's to the student's.
    """
    q, p = log_softmax(student.float(), -1), log_softmax(teacher.float(), -1)
    if kind == "kl":
        return (p.exp() * (p - q)).sum(-1).mean()
    middle = torch.logaddexp(p, q) - math.log(2)
    return 0.5 * ((p.exp() * (p - middle)).sum(-1) + (q.exp() * (q - middle)).sum(-1)).mean()


def train(
    fpt: FPTQuantizer,
    batches: list[Tensor],
    done: Progress,
    *,
    steps: int,
    lr: float,
    range_lr: float,
    loss: str,
    progress: bool | None,
) -> None:
    """From step ``len(done.losses)`` to `steps`; every step leaves a state that can be resumed."""
    if loss not in ("jsd", "kl", "text"):
        raise ValueError(f"loss must be 'jsd', 'kl' or 'text', got {loss!r}")
    if steps <= len(done.losses):
        return
    own = [parameter for parameter in fpt.transforms.parameters() if parameter.requires_grad]
    ranges = list(quantiser_parameters(fpt.model))
    if not own and not ranges:
        raise ValueError(
            "there is nothing to train: no transform has parameters, and no quantiser has a range of its own"
        )
    groups = [{"params": own, "base": lr}, {"params": ranges, "base": range_lr}]
    optimiser = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, weight_decay=0.0)
    if done.optimiser is not None:
        optimiser.load_state_dict(done.optimiser)
    read = Read(fpt.given, torch.float32)
    for parameter in ranges:
        parameter.requires_grad_(True)
    try:
        for step in steps_shown(len(done.losses), steps, "end-to-end training", progress):
            for group in optimiser.param_groups:
                group["lr"] = group["base"] * 0.5 * (1 + math.cos(math.pi * step / steps))
            optimiser.zero_grad()
            value = _loss(fpt, batches[step % len(batches)], read, loss)
            finite(float(value.detach()), step)
            value.backward()
            torch.nn.utils.clip_grad_norm_([*own, *ranges], 1.0)
            optimiser.step()
            done.losses.append(float(value.detach()))
            done.optimiser = optimiser.state_dict()
    finally:
        for parameter in ranges:
            parameter.requires_grad_(False)


def _loss(fpt: FPTQuantizer, ids: Tensor, read: Read, kind: str) -> Tensor:
    dtype = next(fpt.given.parameters()).dtype
    weights: dict[str, Any] = {name: value.to(dtype) for name, value in fpt.transforms.merged(read)}
    student = torch.func.functional_call(fpt.model, weights, (ids,), {"use_cache": False}).logits
    if kind == "text":
        return cross_entropy(student[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    with torch.no_grad():
        teacher = fpt.given(ids, use_cache=False).logits
    return divergence(student, teacher, kind)
