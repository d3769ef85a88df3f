"""What a pipeline's network answered before guidance combined it: recorded by a hook, and matched with what reaches the scheduler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cameraready.flows.ba_solver.stepping import Half, Reading

#: More answers between two steps than any guidance combines.
MOST = 8


class Recorder:
    """Keeps what the networks it is hooked to return between two steps of a scheduler.

    Attributes
    ----------
    networks : int
        How many networks are watched.
    active : bool
        Whether answers are kept; only while a scheduler is sampling.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._kept: list[tuple[Tensor, Tensor | None]] = []
        self.active = False

    @property
    def networks(self) -> int:
        return len(self._handles)

    def watch(self, network: nn.Module, labels: str | int | None = None) -> None:
        """Hook onto a network, by torch's public `register_forward_hook`; `labels` is the argument that holds a call's labels."""

        def keep(network: nn.Module, inputs: Any, named: Any, output: Any) -> None:
            self._keep(_argument(labels, inputs, named), output)

        self._handles.append(network.register_forward_hook(keep, with_kwargs=True))

    def release(self) -> None:
        """Unhook from all networks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.clear()

    def clear(self) -> None:
        self._kept.clear()

    def taken(self) -> list[tuple[Tensor, Tensor | None]]:
        """Answers since the last call, with the labels that they were for."""
        kept, self._kept = self._kept, []
        return kept

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        return Recorder()  # hooks stay with the scheduler that they were made for

    def _keep(self, labels: Tensor | None, output: Any) -> None:
        if not self.active:
            return
        if isinstance(output, tuple | list):
            output = output[0]
        output = getattr(output, "sample", output)
        if len(self._kept) <= MOST:
            self._kept.append((output, labels))


def _argument(labels: str | int | None, inputs: Any, named: Any) -> Tensor | None:
    """The argument of a call that holds its labels.

    Raises
    ------
    ValueError
        The call has no such argument.
    """
    if labels is None:
        return None
    found = named.get(labels) if isinstance(labels, str) else inputs[labels] if labels < len(inputs) else None
    if not isinstance(found, Tensor):
        raise ValueError(
            f"the network was called without labels in the argument {labels!r}; it got {len(inputs)} by place and {', '.join(named) or 'none'} by name"
        )
    return found


def reading_of(
    combined: Tensor, answers: list[tuple[Tensor, Tensor | None]], sign: float, dtype: torch.dtype
) -> Reading:
    """What the pipeline combined, times `sign`, with the halves that `halves_of` finds behind it."""
    halves = tuple(
        Half(sign * part.to(dtype), weight.to(dtype) if isinstance(weight, Tensor) else weight, labels)
        for part, weight, labels in halves_of(combined, answers)
    )
    return Reading(sign * combined.to(dtype), halves)


def halves_of(
    combined: Tensor, answers: list[tuple[Tensor, Tensor | None]]
) -> list[tuple[Tensor, float | Tensor, Tensor | None]]:
    """The answers behind what a pipeline made of them, each with its weight.

    Parameters
    ----------
    combined : (B, ...) tensor
        What the pipeline handed to its scheduler.
    answers : list of ((nB, ...) tensor, (nB,) labels or None)
        What the network returned since the last step, whether halves came in one call or in several.

    Returns
    -------
    list of ((B, ...) tensor, weight, (B,) labels or None)
        Weights are 1.0 where there is one answer and it is what was handed on, else (B,) float64 tensors, found by least squares for each sample: any guidance that
        adds the answers up with weights of its own is recognised, whatever its scale and the order of its calls. Weights add up to
        more than zero: where the pipeline turned the network's velocities round, so are the answers here.

    Raises
    ------
    ValueError
        No answers or too many, of other shapes, or a guidance that is no weighted sum of them.
    """
    if not answers:
        raise ValueError(
            "the pipeline took a step without asking the watched network; watch the one that it asks (pipe.transformer or pipe.unet)"
        )
    if len(answers) > MOST:
        raise ValueError(
            f"the watched network was asked more than {MOST} times in one step; this guidance is not known"
        )
    batch, parts, labels = len(combined), [], []
    for answer, asked in answers:
        if not isinstance(answer, Tensor) or answer.shape[1:] != combined.shape[1:] or len(answer) % batch:
            found = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
            raise ValueError(
                f"the network returned {found} and the scheduler was handed {tuple(combined.shape)}; a SideNet needs the velocity as the network gives it"
            )
        parts += list(answer.detach().split(batch))
        labels += [None] * (len(answer) // batch) if asked is None else list(asked.expand(len(answer)).split(batch))
    if len(parts) == 1 and torch.equal(parts[0].to(combined.dtype), combined):
        return [(parts[0], 1.0, labels[0])]
    weights = _weights(combined, parts)
    if bool((weights.sum(1) < 0).all()):  # the pipeline turned the network's velocities round
        parts, weights = [-part for part in parts], -weights
    return list(zip(parts, weights.unbind(1), labels, strict=True))


def _weights(combined: Tensor, parts: list[Tensor]) -> Tensor:
    """Weights (B, k) of the parts in each sample of their sum."""
    columns = torch.stack([part.flatten(1) for part in parts], dim=-1).to(torch.float64)
    target = combined.flatten(1).to(torch.float64)
    # Halves are alike; their differences are what tells weights apart.
    basis = torch.cat([columns[..., :1], columns[..., 1:] - columns[..., :1]], dim=-1)
    scale = basis.norm(dim=1, keepdim=True)
    basis = basis / torch.where(scale > 0, scale, 1.0)
    gram, projected = basis.mT @ basis, basis.mT @ target[..., None]
    scaled = torch.linalg.pinv(gram, hermitian=True, rtol=1e-10) @ projected
    found = scaled[..., 0] / torch.where(scale > 0, scale, 1.0)[:, 0]
    weights = torch.cat([found[:, :1] - found[:, 1:].sum(1, keepdim=True), found[:, 1:]], dim=1)
    residual = (target - (columns * weights[:, None]).sum(-1)).norm(dim=1)
    coarsest = max(torch.finfo(each.dtype).eps for each in (combined, *parts))
    allowed = 2 * coarsest * (weights.abs() * columns.norm(dim=1)).sum(1)
    if bool((residual > allowed).any()):
        share = float((residual / target.norm(dim=1)).max())
        raise ValueError(
            f"what the pipeline handed to its scheduler is no weighted sum of what its network returned (it misses {share:.1%}); the SideNet needs "
            "unguided velocities and cannot tell them from this guidance: use plain classifier-free guidance, or BAScheduler without a SideNet"
        )
    return weights
