"""What the base optimizer would add to a tensor, obtained without touching the tensor: it steps on a stand-in."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim

#: Optimizers whose step treats every tensor by itself and reads its value only for weight decay.
KNOWN = tuple(
    getattr(optim, name)
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Muon")
    if hasattr(optim, name)
)
HALF = (torch.float16, torch.bfloat16)


def is_known(base: optim.Optimizer) -> bool:
    """Whether the base steps as one of the known optimizers does; subclasses with a step of their own do not."""
    step = inspect.unwrap(type(base).step)
    return any(isinstance(base, known) and step is inspect.unwrap(known.step) for known in KNOWN)


def is_decoupled(base: optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether the base shrinks tensors by lr * weight_decay beside its update, as AdamW and Muon do, or says that it does."""
    by_kind = is_known(base) and isinstance(base, tuple(k for k in KNOWN if k.__name__ in ("AdamW", "Muon")))
    return bool(group.get("decoupled_weight_decay", by_kind))


def decay_of(base: optim.Optimizer, group: dict[str, Any]) -> float | Tensor:
    """The share of a tensor that a decoupled weight decay takes in this step; 0 where there is none."""
    return group["lr"] * group["weight_decay"] if group.get("weight_decay") and is_decoupled(base, group) else 0.0


def starts_from_zero(base: optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether the base's update does not depend on the tensor's value, apart from a decoupled decay.

    Then it can be run from zero and leaves the update itself, at full relative precision. Elsewhere (L2 penalties, unknown optimizers)
    it is run from a copy, which is subtracted again.
    """
    return is_known(base) and (not group.get("weight_decay") or is_decoupled(base, group))


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of a new tensor with the layout of this one."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


class Run:
    """Neighbouring tensors of one slot, with a buffer (blocks, size) in which the base leaves their updates."""

    def __init__(self, tensors: Sequence[nn.Parameter], groups: Sequence[dict[str, Any]]) -> None:
        self.tensors, self.groups = tensors, groups
        self.nbytes = tensors[0].numel() * tensors[0].element_size() * len(tensors)

    def prepare(self, base: optim.Optimizer) -> None:
        """Put stand-ins in the place of the tensors' data."""
        first = self.tensors[0]
        self.strides = dense_strides(first)
        self.updates = first.new_zeros((len(self.tensors), first.numel()))
        self.real = [tensor.data for tensor in self.tensors]
        self.copied = [k for k, group in enumerate(self.groups) if not starts_from_zero(base, group)]
        stand_ins = self.rows()
        for k in self.copied:
            stand_ins[k].copy_(self.real[k])
        for tensor, stand_in in zip(self.tensors, stand_ins, strict=True):
            tensor.data = stand_in

    def restore(self) -> None:
        for tensor, real in zip(self.tensors, self.real, strict=True):
            tensor.data = real

    def rows(self) -> tuple[Tensor, ...]:
        """Views of the buffer in the shape and layout of the tensors."""
        shape = (len(self.tensors), *self.tensors[0].shape)
        return self.updates.as_strided(shape, (self.tensors[0].numel(), *self.strides)).unbind()

    def collect(self, shares: Sequence[float | Tensor]) -> Tensor:
        """The updates without decoupled decay, (blocks, size), in float32 where the tensors have 16 bits."""
        rows = self.rows()
        for k in self.copied:
            rows[k].sub_(self.real[k] * (1 - shares[k]))
        if self.updates.dtype in HALF:
            self.updates = self.updates.float()
        return self.updates

    def apply(self, shares: Sequence[float | Tensor]) -> None:
        """Take its share off each tensor, add its update, and let the buffer go."""
        if self.tensors[0].dtype in HALF:
            for tensor, share, update in zip(self.tensors, shares, self.rows(), strict=True):
                # One rounding in all: sum in float32.
                tensor.copy_(tensor.float().mul_(1 - share).add_(update))
        else:
            for tensor, share in zip(self.tensors, shares, strict=True):
                if isinstance(share, Tensor) or share != 0.0:
                    tensor.mul_(1 - share)
            torch._foreach_add_(list(self.tensors), list(self.rows()))
        del self.updates, self.real


@contextmanager
def only(base: optim.Optimizer, wanted: set[int]) -> Iterator[None]:
    """The base sees these tensors (by id) alone; its group dicts stay the same objects."""
    groups = base.param_groups
    if all(id(tensor) in wanted for group in groups for tensor in group["params"]):
        yield
        return
    everything = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = [tensor for tensor in group["params"] if id(tensor) in wanted]
        base.param_groups = [group for group in groups if group["params"]]
        yield
    finally:
        base.param_groups = groups
        for group, tensors in zip(groups, everything, strict=True):
            group["params"] = tensors


def portions(found: Sequence[Run], floor: int = 1 << 22) -> list[list[Run]]:
    """Runs in portions no larger than the largest of them (or `floor` bytes), so that no more than that is held at a time."""
    limit = max([floor, *(run.nbytes for run in found)])
    packed: list[list[Run]] = []
    for run in sorted(found, key=lambda run: -run.nbytes):
        if not packed or sum(held.nbytes for held in packed[-1]) + run.nbytes > limit:
            packed.append([])
        packed[-1].append(run)
    return packed
