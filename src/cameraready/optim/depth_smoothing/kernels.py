"""How updates are mixed over depth: the kernels as matrices, the same in place, and the norms afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from numbers import Integral, Real
from typing import Literal, get_args

import torch
from torch import Tensor

KernelName = Literal["window", "laplacian", "ema", "ema-forward", "shuffled", "average"]
#: A kernel of one's own: ``kernel(n_blocks, alpha)`` gives the matrix, shape (n_blocks, n_blocks).
Kernel = KernelName | Callable[[int, float], Tensor]
Normalize = Literal["none", "rescale", "normalize_before"]

#: Kernels with a mode of eigenvalue 1 - 2 alpha (in the limit of many blocks), which changes sign at alpha = 1/2.
SIGN_CHANGING = ("window", "laplacian", "shuffled")


def check_kernel(kernel: Kernel) -> None:
    """Raises ValueError for an unknown name."""
    if not callable(kernel) and kernel not in get_args(KernelName):
        raise ValueError(
            f"kernel must be one of {', '.join(get_args(KernelName))}, or a callable (n_blocks, alpha) -> matrix;"
            f" got {kernel!r}"
        )


def check_normalize(normalize: str) -> None:
    """Raises ValueError for an unknown name."""
    if normalize not in get_args(Normalize):
        raise ValueError(f"normalize must be one of {', '.join(get_args(Normalize))}; got {normalize!r}")


def check_alpha(alpha: float) -> float:
    """`alpha` as a float; raises TypeError for what is no number and ValueError outside [0, 1]."""
    if isinstance(alpha, bool) or not isinstance(alpha, (Real, Tensor)):
        raise TypeError(f"alpha must be a number between 0 and 1, got {alpha!r}")
    value = float(alpha)
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"alpha must lie between 0 (no smoothing) and 1, got {alpha!r}")
    return value


def smoothing_matrix(
    n_blocks: int,
    alpha: float,
    kernel: Kernel = "window",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The matrix S that mixes the updates of `n_blocks` consecutive blocks: new update l = sum over j of S[l, j] update j.

    ``"window"`` is I - (alpha / 2) Lap with the Laplacian of the path graph. It is symmetric, its rows and columns sum to one
    (the mean update over depth is kept), and its eigenvalues are 1 - alpha (1 - cos(pi k / n_blocks)), k = 0 ... n_blocks - 1:
    positive for alpha <= 1/2. A single block gets the identity.

    Parameters
    ----------
    n_blocks : int
        Number of blocks, at least 1.
    alpha : float
        Strength in [0, 1]; 0 is the identity. For ``"ema"`` it is the weight of the running mean (rho).
    kernel : {"window", "laplacian", "ema", "ema-forward", "shuffled", "average"} or callable
        ``"window"``: each block with its two neighbours, the method itself. ``"laplacian"``: neighbours with a minus sign, which
        sharpens. ``"ema"``: running mean from the last block to the first; ``"ema-forward"``: from the first to the last.
        ``"shuffled"``: the window along a random order of the blocks, in which no two neighbours stay neighbours (from four blocks
        on), and ``"average"``: (1 - alpha) of a block's own and alpha of the mean of all; both are controls.
        A callable ``(n_blocks, alpha) -> matrix`` is a kernel of your own.
    seed : int
        Of the order of ``"shuffled"``.
    dtype : torch.dtype
        Of the matrix.

    Returns
    -------
    Tensor
        Shape (n_blocks, n_blocks).

    Raises
    ------
    ValueError
        `n_blocks` below 1, `alpha` outside [0, 1], an unknown kernel, or a callable's matrix of another shape.

    References
    ----------
    Meng, Sugolov and Papyan, 2026, arXiv:2606.30813 (window); the filters laplacian and ema are those of the authors' public code.

    Examples
    --------
    >>> smoothing_matrix(3, 0.2)
    tensor([[0.9000, 0.1000, 0.0000],
            [0.1000, 0.8000, 0.1000],
            [0.0000, 0.1000, 0.9000]], dtype=torch.float64)
    """
    if isinstance(n_blocks, bool) or not isinstance(n_blocks, Integral) or n_blocks < 1:
        raise ValueError(f"n_blocks must be an integer of at least 1, got {n_blocks!r}")
    n_blocks, alpha = int(n_blocks), check_alpha(alpha)
    check_kernel(kernel)
    if callable(kernel):
        return own_matrix(kernel, n_blocks, alpha).to(dtype)
    matrix = torch.eye(n_blocks, dtype=dtype)
    if kernel == "shuffled":
        order = shuffled_order(n_blocks, seed)
        mixed = mix_(matrix[order], alpha, "window")
        return mixed[torch.tensor(order).argsort()]
    return mix_(matrix, alpha, kernel)


def own_matrix(kernel: Callable[[int, float], Tensor], n_blocks: int, alpha: float) -> Tensor:
    """What a callable kernel gives, checked."""
    matrix = torch.as_tensor(kernel(n_blocks, alpha))
    if matrix.shape != (n_blocks, n_blocks):
        raise ValueError(f"the kernel's matrix for {n_blocks} blocks has shape {tuple(matrix.shape)}")
    if not matrix.isfinite().all():
        raise ValueError(
            f"the kernel's matrix for {n_blocks} blocks and alpha = {alpha:g} has entries that are not finite"
        )
    return matrix


def shuffled_order(n_blocks: int, seed: int) -> list[int]:
    """A random order of blocks in which no two that follow each other were neighbours; from four blocks on there is one."""
    draw = random.Random(seed)
    order = list(range(n_blocks))
    while True:
        draw.shuffle(order)
        if n_blocks < 4 or all(abs(a - b) > 1 for a, b in pairwise(order)):
            return order


def mix_(updates: Tensor, alpha: float, kernel: Kernel) -> Tensor:
    """Mix the rows of `updates`, shape (blocks, ...), in place; rows are in depth order (in shuffled order for ``"shuffled"``).

    Written with differences of neighbours rather than as a product with the matrix: three passes, one buffer, and no
    reduced-precision matrix multiplication, whatever the process has set for those.
    """
    if len(updates) < 2 or alpha == 0.0:
        return updates
    if callable(kernel):
        matrix = own_matrix(kernel, len(updates), alpha).to(updates)
        mixed = torch.zeros_like(updates)
        for j, row in enumerate(updates):
            mixed.add_(matrix[:, j].reshape(-1, *[1] * row.ndim) * row)
        return updates.copy_(mixed)
    if kernel in ("window", "shuffled"):
        flow = (updates[1:] - updates[:-1]).mul_(alpha / 2)
        updates[:-1].add_(flow)
        updates[1:].sub_(flow)
    elif kernel == "laplacian":
        flow = (updates[1:] + updates[:-1]).mul_(alpha / 2)
        updates[:-1].sub_(flow)
        updates[1:].sub_(flow)
    elif kernel == "average":
        updates.lerp_(updates.mean(0, keepdim=True), alpha)
    else:
        depths = range(len(updates) - 2, -1, -1) if kernel == "ema" else range(1, len(updates))
        before = 1 if kernel == "ema" else -1
        for depth in depths:
            updates[depth].lerp_(updates[depth + before], alpha)
    return updates


def smooth_(updates: Tensor, alpha: float, kernel: Kernel, normalize: Normalize) -> Tensor:
    """Mix the rows of `updates`, shape (blocks, size), in place, and give each the norm that `normalize` asks for.

    A row of zeros stays zero unless `normalize` is ``"none"``: it has no norm to be scaled to.
    """
    if normalize == "none":
        return mix_(updates, alpha, kernel)
    own = torch.linalg.vector_norm(updates, dim=1)
    if normalize == "normalize_before":
        updates.div_(torch.where(own > 0, own, 1.0)[:, None])
    # Updates that cancel leave rounding errors of what was mixed, which must not be blown up to a full step.
    entering = own if normalize == "rescale" else (own > 0).to(own)
    noise = 8 * torch.finfo(own.dtype).eps * mix_(entering[:, None].clone(), alpha, _magnitudes(kernel))[:, 0]
    mix_(updates, alpha, kernel)
    mixed = torch.linalg.vector_norm(updates, dim=1)
    left = own if normalize == "normalize_before" else (own > 0).to(own)
    return updates.mul_(torch.where(mixed > noise, own / mixed, left)[:, None])


def _magnitudes(kernel: Kernel) -> Kernel:
    """The kernel whose matrix holds the magnitudes of this one's entries."""
    if callable(kernel):
        return lambda n_blocks, alpha: own_matrix(kernel, n_blocks, alpha).abs()
    return "window" if kernel == "laplacian" else kernel


def smooth_updates(
    updates: Sequence[Sequence[Tensor | None]],
    alpha: float = 0.2,
    kernel: Kernel = "window",
    *,
    normalize: Normalize = "none",
    seed: int = 0,
) -> list[list[Tensor | None]]:
    """Smooth lists of updates (or gradients) over depth, for an optimizer of one's own; `DepthSmoothing` does it for those of torch.

    Parameters
    ----------
    updates : sequence of sequence of Tensor or None
        ``updates[l][p]`` is tensor p of block l; every block has as many entries, and entry p has one shape in all blocks. None is
        an absent tensor: it is no neighbour, not even a zero one.
    alpha, kernel, seed
        As in `smoothing_matrix`.
    normalize : {"none", "rescale", "normalize_before"}
        ``"rescale"``: afterwards each tensor gets the norm of its own update. ``"normalize_before"``: updates of norm one are
        mixed, then each gets its own norm. A zero update stays zero under both.

    Returns
    -------
    list of list of Tensor or None
        New tensors of the same shapes, dtypes and devices; 16-bit ones are mixed in float32.

    Raises
    ------
    ValueError
        Blocks of unequal length, an entry of unequal shapes, dtypes or devices, integers, or a bad option.

    References
    ----------
    Meng, Sugolov and Papyan, 2026, arXiv:2606.30813.

    Examples
    --------
    >>> first, second = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    >>> smooth_updates([[first], [second]], alpha=0.2)[0]
    [tensor([0.9000, 0.1000])]
    """
    alpha = check_alpha(alpha)
    check_kernel(kernel)
    check_normalize(normalize)
    rows = [list(block) for block in updates]
    if len({len(row) for row in rows}) > 1:
        raise ValueError(
            f"blocks have {sorted({len(row) for row in rows})} tensors; each needs as many, None for an absent one"
        )
    result: list[list[Tensor | None]] = [list(row) for row in rows]
    for slot in range(len(rows[0]) if rows else 0):
        column = [row[slot] for row in rows]
        likes = {(tuple(t.shape), str(t.dtype), str(t.device)) for t in column if t is not None}
        if len(likes) > 1:
            raise ValueError(
                f"tensor {slot} is {sorted(likes)}; only tensors of one shape, dtype and device can be mixed"
            )
        if any(not (t.is_floating_point() or t.is_complex()) for t in column if t is not None):
            raise ValueError(f"tensor {slot} has the dtype {next(iter(likes))[1]}; updates are floating-point numbers")
        for run in runs([tensor is not None for tensor in column], [True] * (len(column) - 1), kernel, seed):
            stacked = torch.stack([column[depth].reshape(-1) for depth in run])  # type: ignore[union-attr]
            wide = stacked.float() if stacked.dtype in (torch.float16, torch.bfloat16) else stacked
            smooth_(wide, alpha, kernel, normalize)
            for depth, mixed in zip(run, wide.to(stacked.dtype), strict=True):
                result[depth][slot] = mixed.reshape(column[depth].shape)  # type: ignore[union-attr]
    return result


def runs(present: Sequence[bool], linked: Sequence[bool], kernel: Kernel, seed: int) -> list[list[int]]:
    """Which entries are mixed with each other, in the order in which `mix_` wants them; each has at least two.

    `linked[k]` tells whether entries k and k + 1 are neighbours. An absent entry ends a run: what lies on its two sides are no
    neighbours of each other. The average has no neighbours, so that it takes all that are present.
    """
    if kernel == "average":
        everyone = [k for k, here in enumerate(present) if here]
        return [everyone] if len(everyone) > 1 else []
    order = list(range(len(present)))
    if kernel == "shuffled":
        order, linked = shuffled_order(len(present), seed), [True] * (len(present) - 1)
    found: list[list[int]] = [[]]
    for place, k in enumerate(order):
        if not present[k]:
            found.append([])
            continue
        if place and not linked[place - 1]:
            found.append([])
        found[-1].append(k)
    return [run for run in found if len(run) > 1]
