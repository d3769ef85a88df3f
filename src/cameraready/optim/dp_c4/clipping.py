"""Coupled clipping: what is clipped is the difference to a reference, and the reference takes up exactly what was released."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class CoupledClip(NamedTuple):
    """What `coupled_clip` gives back. All of it is private: only a noised sum of `delta` may be published.

    Attributes
    ----------
    delta : Tensor of shape (b, ...)
        The clipped differences, each of norm at most the threshold.
    references : Tensor of shape (b, ...)
        The references after the step, old ones plus `delta`.
    clipped_fraction : Tensor of shape ()
        Share of the samples whose difference was longer than the threshold.
    """

    delta: Tensor
    references: Tensor
    clipped_fraction: Tensor


def coupled_clip(gradients: Tensor, references: Tensor, threshold: float) -> CoupledClip:
    r"""Clip ``gradients - references`` sample by sample, and move the references by what is left.

    With gradient g_i, reference h_i and threshold tau,

    .. math:: \delta_i = (g_i - h_i) \min(1, \tau / \|g_i - h_i\|), \qquad h_i \leftarrow h_i + \delta_i.

    Repeated at a point that stays put, h_i reaches g_i in finitely many steps, so that clipping leaves no bias. With references of
    zero that are never moved it is the clipping of DP-SGD.

    Parameters
    ----------
    gradients : Tensor of shape (b, ...)
        A gradient a sample.
    references : Tensor of shape (b, ...)
        Same shape, dtype and device.
    threshold : float
        tau, at least 0. It must not depend on private data.

    Returns
    -------
    CoupledClip

    Raises
    ------
    ValueError
        If shapes differ, or the threshold is negative or not finite.

    Notes
    -----
    A sample whose gradient is not finite gets ``delta = 0``: its influence stays bounded, and no other sample is harmed. Norms of half
    precision are taken in float32, and entries whose squares overflow or underflow are scaled first. Use it by itself to build
    another private method; `make_private_c4` adds noise and accounting, without which nothing here is private.

    References
    ----------
    DP-C4, 2026, OpenReview nw0pePP5qd (reconstructed from its abstract); Khirirat et al., 2023, arXiv:2305.18929, Alg. 1 (Clip21).

    Examples
    --------
    >>> import torch
    >>> from cameraready.optim.dp_c4 import coupled_clip
    >>> found = coupled_clip(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2), 1.0)
    >>> found.delta
    tensor([[0.6000, 0.8000]])
    """
    if gradients.shape != references.shape or gradients.ndim == 0:
        raise ValueError(
            f"gradients and references must both be (b, ...), got {tuple(gradients.shape)} and {tuple(references.shape)}"
        )
    (delta,), clipped = clip_rows([gradients - references], threshold)
    fraction = clipped.double().mean() if len(clipped) else torch.zeros((), dtype=torch.float64, device=clipped.device)
    return CoupledClip(delta, references + delta, fraction)


def clip_rows(parts: Sequence[Tensor], threshold: float) -> tuple[list[Tensor], Tensor]:
    """Scale each sample, whose numbers are spread over tensors (b, ...), to a joint norm of at most `threshold`.

    Returns the clipped tensors and a mask, shape (b,), of the samples that were shortened. Samples with entries that are not finite become
    zero and count as shortened.
    """
    if not 0.0 <= threshold < float("inf"):
        raise ValueError(f"the threshold must be a finite number of at least 0, got {threshold}")
    norms, usable = row_norms(parts, threshold)
    long = norms > threshold
    factors = torch.where(long, threshold / norms, 1.0)
    clipped = []
    if bool(usable.all()) and (not len(factors) or float(factors.min()) > 1e-30):
        clipped = [(part * _column(factors, part)).to(part.dtype) for part in parts]
        return clipped, long
    for part in parts:
        work = part.float() if part.dtype.itemsize < 4 else part
        # First to length one, then to the threshold: their quotient may be too small a number for float32.
        shortened = work / _column(norms, work) * threshold
        found = torch.where(_column(long, work), shortened, work)
        clipped.append(torch.where(_column(usable, work), found, 0.0).to(part.dtype))
    return clipped, ~usable | long


def row_norms(parts: Sequence[Tensor], threshold: float) -> tuple[Tensor, Tensor]:
    """Joint L2 norm of each sample, shape (b,), at least in float32, exact enough to compare with `threshold`; whether its entries are finite."""
    rows = [part.reshape(len(part), math.prod(part.shape[1:])) for part in parts]
    work = torch.float64 if any(row.dtype == torch.float64 for row in rows) else torch.float32
    rows = [row.to(rows[0].device, work) for row in rows]
    norms = torch.stack([torch.linalg.vector_norm(row, dim=1) for row in rows], dim=1)
    norms = torch.linalg.vector_norm(norms, dim=1)
    usable = torch.ones_like(norms, dtype=torch.bool)
    limits = torch.finfo(norms.dtype)
    # Squares of these rows may have overflowed or vanished; their sizes are taken out first.
    doubtful = ~torch.isfinite(norms)
    smallest = limits.tiny**0.5 / limits.eps
    if threshold < 2.0 * smallest:
        doubtful |= norms < smallest
    if doubtful.any():
        picked = [row[doubtful] for row in rows]
        largest = torch.stack(
            [row.abs().amax(dim=1) if row.shape[1] else norms.new_zeros(len(row)) for row in picked]
        ).amax(0)
        scale = torch.where(torch.isfinite(largest) & (largest > 0), largest, torch.ones_like(largest))
        scaled = torch.stack([torch.linalg.vector_norm(row / scale[:, None], dim=1) for row in picked], dim=1)
        norms = norms.clone()
        norms[doubtful] = scale * torch.linalg.vector_norm(scaled, dim=1)
        usable[doubtful] = torch.isfinite(largest)
    return norms, usable


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.device).reshape(-1, *[1] * (like.ndim - 1))


class CoupledMemory:
    """What coupled clipping remembers of each parameter.

    ``"references"`` (n_records, ...), private: what is known of each record. ``"running"``, public: the noised mean of the references.
    ``"snapshot"``, public: an earlier value of the parameter. Sums are kept in at least 32 bits.
    """

    def __init__(self, n_records: int) -> None:
        self.n_records = n_records
        self._held: dict[Tensor, dict[str, Tensor]] = {}

    def of(self, p: Tensor) -> dict[str, Tensor]:
        return self._held.setdefault(p, {})

    def references(self, p: Tensor) -> Tensor:
        """The references of all records, zeros at first."""
        held = self.of(p)
        if "references" not in held:
            held["references"] = p.new_zeros(self.n_records, *p.shape, dtype=work_dtype(p))
        return held["references"]

    def moved(self, params: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Parameters that have a snapshot, with it."""
        return [(p, self.of(p)["snapshot"]) for p in params if "snapshot" in self.of(p)]

    def movement(self, params: Sequence[Tensor]) -> float:
        """Distance of the parameters from their snapshots."""
        return math.sqrt(math.fsum((p.detach() - w).double().square().sum().item() for p, w in self.moved(params)))

    def state(self, params: Sequence[Tensor]) -> dict[int, dict[str, Tensor]]:
        """By the parameters' numbers."""
        return {i: dict(self.of(p)) for i, p in enumerate(params) if self.of(p)}

    def load(self, params: Sequence[Tensor], state: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Take over what `state` gave, or raise ValueError and change nothing."""
        found: dict[Tensor, dict[str, Tensor]] = {}
        for i, kept in state.items():
            p = params[int(i)]
            for name, value in kept.items():
                wanted = (self.n_records, *p.shape) if name == "references" else tuple(p.shape)
                if tuple(value.shape) != wanted:
                    raise ValueError(f"{name} of parameter {i} has shape {tuple(value.shape)}, expected {wanted}")
            found[p] = {
                name: value.detach().to(p.device, p.dtype if name == "snapshot" else work_dtype(p), copy=True)
                for name, value in kept.items()
            }
        self._held = found


def work_dtype(p: Tensor) -> torch.dtype:
    """Sums over records are taken, noised and kept in at least 32 bits: rounding before the noise would be as large as a threshold."""
    return torch.float32 if p.dtype.itemsize < 4 else p.dtype
