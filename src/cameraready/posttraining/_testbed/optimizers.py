"""Elementwise optimizers for stacked parameters: each seed may have its own learning rate, and its own gradient norm is clipped."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class AdamW:
    """AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101) as `torch.optim.AdamW` computes it, with a learning rate for each seed.

    Parameters
    ----------
    parameters : list of (S, ...) tensors
    lr : float or (S,) tensor
    betas, eps, weight_decay
        As in torch, except that weight decay is 0 by default.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        lr: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        self.parameters, self.betas, self.eps, self.weight_decay = list(parameters), betas, eps, weight_decay
        self.rates = _per_seed(lr, self.parameters)
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters]
        self.steps = 0
        self.scale = 1.0  # multiplies the learning rates: a schedule's place

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters from their ``grad``."""
        self.steps += 1
        one, two = self.betas
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters]
        torch._foreach_lerp_(self.first, gradients, 1 - one)
        torch._foreach_mul_(self.second, two)
        torch._foreach_addcmul_(self.second, gradients, gradients, 1 - two)
        size = self.scale / (1 - one**self.steps)
        bottom = torch._foreach_div(torch._foreach_sqrt(self.second), (1 - two**self.steps) ** 0.5)
        torch._foreach_add_(bottom, self.eps)
        for p, rate, m, below in zip(self.parameters, self.rates, self.first, bottom, strict=True):
            if self.weight_decay:
                p.mul_(1 - self.scale * rate * self.weight_decay)
            p.sub_(m.div(below).mul_(rate * size))


class SGD:
    """Plain gradient descent with a learning rate for each seed."""

    def __init__(self, parameters: Sequence[Tensor], lr: float | Tensor):
        self.parameters = list(parameters)
        self.rates = _per_seed(lr, self.parameters)
        self.scale = 1.0

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters from their ``grad``."""
        for p, rate in zip(self.parameters, self.rates, strict=True):
            if p.grad is not None:
                p.sub_(p.grad * (rate * self.scale))


def _per_seed(lr: float | Tensor, parameters: Sequence[Tensor]) -> list[Any]:
    if not isinstance(lr, Tensor) or lr.dim() == 0:
        if not float(lr) >= 0:
            raise ValueError(f"the learning rate must not be negative, got {float(lr)}")
        return [float(lr)] * len(parameters)
    if lr.shape != parameters[0].shape[:1]:
        raise ValueError(
            f"lr must be a number or one for each of the {len(parameters[0])} seeds, got shape {tuple(lr.shape)}"
        )
    if not bool((lr >= 0).all()):
        raise ValueError("learning rates must not be negative")
    return [lr.to(p.dtype).view(-1, *[1] * (p.dim() - 1)) for p in parameters]


def make_optimizer(optimizer: str | Callable[[list[Tensor]], Any], parameters: list[Tensor], lr: float | Tensor) -> Any:
    """The named optimizer, or what the callable makes of the parameters."""
    if callable(optimizer):
        return optimizer(parameters)
    if optimizer == "adamw":
        return AdamW(parameters, lr)
    if optimizer == "sgd":
        return SGD(parameters, lr)
    raise ValueError(f"optimizer must be 'adamw', 'sgd' or a callable, got {optimizer!r}")


@torch.no_grad()
def clip_per_seed(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], clip_norm: float | None) -> Tensor:
    """Put gradients into the parameters' ``grad``, each seed's scaled down to a norm of at most `clip_norm` (None: as they are).

    Returns
    -------
    (S,) float
        Norms before clipping.
    """
    square = sum(g.flatten(1).square().sum(1) for g in gradients if g is not None)
    if isinstance(square, int):
        raise ValueError("the loss does not depend on the policy")
    norms = square.sqrt()
    factor = None if clip_norm is None else (clip_norm / (norms + 1e-6)).clamp_max(1.0)
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g if g is None or factor is None else g * factor.view(-1, *[1] * (g.dim() - 1))
    return norms
