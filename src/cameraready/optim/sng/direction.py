"""The two updates: subsampled natural gradient, and the same with SPRING's momentum."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cameraready.optim._linear import damped_solve
from cameraready.optim.sng.jacobian import DenseJacobian, Jacobian


def sng_direction(jacobian: Tensor | Jacobian, residual: Tensor, damping: float, *, centered: bool = False) -> Tensor:
    """Subsampled natural gradient direction ``J' (J J' + damping I)^-1 r`` of a batch.

    The step is ``theta - eta * direction``; for least squares with eta = 1 it is a regularised block Kaczmarz step. The k-by-k system
    is solved in double precision. The optimizers call it with k times their damping, so that theirs does not depend on the batch size.

    Parameters
    ----------
    jacobian : Tensor of shape (k, n), or an operator such as `MatrixFreeJacobian`
        Derivatives of the batch's outputs.
    residual : Tensor of shape (k,)
        Derivative of the summed loss with respect to the outputs; the residual itself for half a sum of squares.
    damping : float
        At least 0. With 0 the pseudo-inverse of the kernel is used, which takes singular values of J below about 1e-8 of the largest
        for zero.
    centered : bool
        Take the batch's mean off outputs and residual, for losses that a constant added to all outputs does not change.

    Returns
    -------
    Tensor of shape (n,), of the residual's dtype

    Raises
    ------
    ValueError
        If shapes do not fit, `damping` is negative, or a number is not finite.
    TypeError
        If numbers are neither float32 nor float64, or of different precision.

    Notes
    -----
    Costs O(k^2 n + k^3) for a matrix.

    References
    ----------
    Goldshlager, Hu and Lin, 2026, arXiv:2508.21022, the SNG step.

    Examples
    --------
    >>> import torch
    >>> from cameraready.optim.sng import sng_direction
    >>> J = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    >>> sng_direction(J, torch.tensor([5.0], dtype=torch.float64), 0.0)  # Kaczmarz: r / |J|^2 times the row
    tensor([0.6000, 0.8000], dtype=torch.float64)
    """
    return _update(jacobian, residual, None, 0.0, damping, centered)


def spring_update(
    jacobian: Tensor | Jacobian, residual: Tensor, phi: Tensor, mu: float, damping: float, *, centered: bool = False
) -> Tensor:
    """SPRING's new direction ``mu phi + J' (J J' + damping I)^-1 (r - mu J phi)``.

    Store what it returns, before any learning rate or norm constraint, as the next call's `phi`; the step is
    ``theta - eta * direction``. Unlike in heavy-ball momentum, what `phi` already does for this batch is taken off the residual.

    Parameters
    ----------
    jacobian : Tensor of shape (k, n), or an operator such as `MatrixFreeJacobian`
        Of the current batch at the current parameters.
    residual : Tensor of shape (k,)
    phi : Tensor of shape (n,)
        What the last call returned; zeros at first.
    mu : float
        In [0, 1). With 0 this is `sng_direction`.
    damping, centered
        As in `sng_direction`.

    Returns
    -------
    Tensor of shape (n,), of the residual's dtype

    Raises
    ------
    ValueError
        If shapes do not fit, `mu` or `damping` is out of range, or a number is not finite.
    TypeError
        If numbers are neither float32 nor float64, or of different precision.

    References
    ----------
    Goldshlager, Hu and Lin, 2026, arXiv:2508.21022, the SPRING step.
    """
    return _update(jacobian, residual, phi, mu, damping, centered)


def _update(
    jacobian: Tensor | Jacobian, residual: Tensor, phi: Tensor | None, mu: float, damping: float, centered: bool
) -> Tensor:
    operator: Jacobian = DenseJacobian(jacobian) if isinstance(jacobian, Tensor) else jacobian
    k, n = operator.shape
    if residual.shape != (k,):
        raise ValueError(f"the Jacobian has {k} rows, so the residual has shape ({k},), got {tuple(residual.shape)}")
    if phi is not None and phi.shape != (n,):
        raise ValueError(f"the Jacobian has {n} columns, so phi has shape ({n},), got {tuple(phi.shape)}")
    if residual.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"the residual must be float32 or float64, got {residual.dtype}")
    given = {"phi": phi, "the Jacobian": jacobian if isinstance(jacobian, Tensor) else None}
    for name, tensor in given.items():
        if tensor is not None and tensor.dtype != residual.dtype:
            raise TypeError(f"{name} is {tensor.dtype} and the residual {residual.dtype}; give all in one precision")
    if not (0.0 <= mu < 1.0):
        raise ValueError(f"mu must be in [0, 1), got {mu}")
    if not (math.isfinite(damping) and damping >= 0.0):
        raise ValueError(f"damping must be a finite number of at least 0, got {damping}")
    kernel = operator.kernel()
    target = residual.to(kernel.dtype)
    if phi is not None and mu > 0.0:
        target = target - mu * operator.push(phi).to(kernel.dtype)
    if centered:
        kernel = kernel - kernel.mean(dim=0, keepdim=True)
        kernel = kernel - kernel.mean(dim=1, keepdim=True)
        # A multiple of ones, of the kernel's own size, fills the null space that centring makes; the target has no part in it.
        kernel = kernel + kernel.diagonal().mean() / k
        target = target - target.mean()
    weights = solve_kernel(kernel, target, damping)
    if centered:
        weights = weights - weights.mean()
    direction = operator.pull(weights.to(residual.dtype))
    return direction if phi is None or mu == 0.0 else direction.add(phi, alpha=mu)


def solve_kernel(kernel: Tensor, target: Tensor, damping: float) -> Tensor:
    """``(kernel + damping I)^-1 target``, by Cholesky where damping keeps the system far from singular."""
    if not (torch.isfinite(kernel).all() and torch.isfinite(target).all()):
        raise ValueError(
            "residuals or their derivatives are not finite; parameters were left as they were. "
            "Use a smaller learning rate, more damping or a norm constraint"
        )
    if damping > 1e3 * torch.finfo(kernel.dtype).eps * float(kernel.diagonal().sum()):
        factor, failed = torch.linalg.cholesky_ex(
            kernel + damping * torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device)
        )
        if not failed:
            return torch.cholesky_solve(target[:, None], factor)[:, 0]
    return damped_solve((kernel + kernel.mT) / 2, target, damping)
