"""Residuals of a batch together with their Jacobian, from a function of one sample."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cameraready.optim._per_sample import per_sample_values_and_gradients
from cameraready.optim.sng.jacobian.recording import CoupledSamplesError, refuse_coupling

__all__ = ["CoupledSamplesError", "Linearised", "linearise"]


@dataclass(frozen=True, eq=False)
class Linearised:
    """Values of k samples and their Jacobian; what a closure may return in place of a residual vector.

    Attributes
    ----------
    values : Tensor of shape (k,)
    jacobian : Tensor of shape (k, n)
        Columns in the order of `params`, flattened.
    params : tuple of Tensor
        The parameters, n entries in all.
    """

    values: Tensor
    jacobian: Tensor
    params: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        n = sum(p.numel() for p in self.params)
        if self.values.ndim != 1 or self.jacobian.shape != (self.values.shape[0], n):
            raise ValueError(
                f"expected values (k,) and a Jacobian (k, {n}), got {tuple(self.values.shape)} and {tuple(self.jacobian.shape)}"
            )

    @staticmethod
    def cat(parts: Sequence[Linearised]) -> Linearised:
        """Terms of a loss one below the other, such as interior and boundary residuals; over the same parameters.

        Raises
        ------
        ValueError
            If there are no parts, or their parameters differ.
        """
        if not parts:
            raise ValueError("there is nothing to put together")
        first = parts[0].params
        if any(
            len(p.params) != len(first) or any(a is not b for a, b in zip(p.params, first, strict=True)) for p in parts
        ):
            raise ValueError("the parts have different parameters; linearise all of them with respect to the same")
        return Linearised(torch.cat([p.values for p in parts]), torch.cat([p.jacobian for p in parts]), first)

    def __mul__(self, factor: float | Tensor) -> Linearised:
        """Values and Jacobian times a number, or one a sample, (k,): the square root of a weight in the loss."""
        factors = torch.as_tensor(factor).to(self.values)
        if factors.shape not in ((), self.values.shape):
            raise ValueError(
                f"expected a number or a tensor of shape {tuple(self.values.shape)}, got shape {tuple(factors.shape)}"
            )
        rows = factors[:, None] if factors.ndim else factors
        return Linearised(self.values * factors, self.jacobian * rows, self.params)

    __rmul__ = __mul__


class _Refuse(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_coupling(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def linearise(
    function: Callable[..., Tensor], params: Mapping[str, Tensor], *batch: Tensor, chunk_size: int | None = None
) -> Linearised:
    """Values of a function of one sample over a batch, with their Jacobian, at the cost of one backward pass.

    Use it where a residual takes derivatives with respect to its inputs (physics-informed networks), or where a network has other
    layers than linear ones. The Jacobian is held in memory: k times the number of parameters. A closure over linear layers alone
    is cheaper without it.

    Parameters
    ----------
    function : callable
        ``function(params, *sample) -> scalar``, pure: call modules by `torch.func.functional_call`.
    params : mapping of str to Tensor
        Such as ``dict(model.named_parameters())``. Those with ``requires_grad=False`` are constants.
    *batch : Tensor
        Each of shape (k, ...).
    chunk_size : int, optional
        Samples at a time; by default as many as fit into 256 MiB.

    Returns
    -------
    Linearised

    Raises
    ------
    CoupledSamplesError
        If `function` normalises over the batch or draws random numbers.
    ValueError
        If the batch is empty or its tensors differ in length, or no parameter needs a gradient.
    TypeError
        If `params` is no mapping.

    Warns
    -----
    UserWarning
        If all derivatives are zero.

    Examples
    --------
    >>> import torch
    >>> from torch.func import functional_call, jacrev
    >>> from cameraready.optim.sng import SPRING, linearise
    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    >>> def slope_minus_cosine(params, x):
    ...     u = lambda x: functional_call(model, params, (x,))[0]
    ...     return jacrev(u)(x)[0] - torch.cos(x[0])
    >>> optimizer = SPRING(model.parameters(), lr=0.05)
    >>> x = torch.linspace(0, 3, 20, dtype=torch.float64)[:, None]
    >>> residuals = optimizer.step(lambda: linearise(slope_minus_cosine, dict(model.named_parameters()), x))
    >>> residuals.values.shape
    torch.Size([20])
    """
    if not isinstance(params, Mapping):
        raise TypeError(
            f"params must map names to tensors, such as dict(model.named_parameters()), got {type(params).__name__}"
        )
    constants = {name: p.detach() for name, p in params.items() if not p.requires_grad}
    free = {name: p for name, p in params.items() if p.requires_grad}
    if not free:
        raise ValueError("no parameter needs a gradient")
    try:
        with _Refuse():
            values, rows = per_sample_values_and_gradients(
                lambda p, *sample: function({**p, **constants}, *sample), free, *batch, chunk_size=chunk_size
            )
    except RuntimeError as error:
        # torch.func stops at running statistics and at random numbers before the layers themselves are reached.
        if "would mutate a captured Tensor" in str(error) or "randomness error mode" in str(error):
            raise CoupledSamplesError(
                "the function changes a buffer or draws random numbers (batch normalisation or dropout in training mode?), so a "
                "sample's derivative is not its own; put the module into evaluation mode"
            ) from error
        raise
    matrix = torch.cat([rows[name].reshape(values.shape[0], -1) for name in free], dim=1)
    if not matrix.any():
        warnings.warn(
            "all derivatives are zero: the function does not use the params that it is given (by torch.func.functional_call), or a step "
            "that was too long has saturated the network (set norm_constraint)",
            UserWarning,
            stacklevel=2,
        )
    return Linearised(values, matrix, tuple(free.values()))
