"""The half space of frequencies, and the phases of scattered points on it."""

from __future__ import annotations

import math
import warnings
from typing import Literal

import torch
from torch import Tensor, nn

Aliasing = Literal["warn", "ignore", "raise"]

#: A grid with more frequencies than this is taken for a mistake: at 50 an axis, three dimensions give 490,050.
MAX_FREQUENCIES = 200_000


class AliasingWarning(UserWarning):
    """Points lie farther apart than half the period of the frequency grid."""


class FrequencyGrid(nn.Module):
    """Frequencies of a half space of R^D: step `resolution` up to `max_freq`, the last axis from zero on.

    A real function's transform has conjugate values at opposite frequencies, so that half of them is enough: a frequency
    with a positive last coordinate counts twice, one on the plane where it is zero once (there both of a pair are listed).

    Parameters
    ----------
    dim : int
        D, the dimension of the inputs, at least 1.
    max_freq : float
        M, in cycles a unit of the inputs: details finer than about 1 / (2 M) are not seen.
    resolution : float or "auto"
        Step between frequencies. What is made of such a grid repeats itself with period 1 / `resolution` along every
        axis, so distances should stay below half of that. ``"auto"`` takes it from `x_range`.
    x_range : float, optional
        Largest distance along an axis between points of one task; needed for ``"auto"``, which makes the period twice
        that and a fifth more, room for what the envelope of the features adds.
    aliasing : {"warn", "ignore", "raise"}
        What to do with a task that is too wide for the grid.

    Attributes
    ----------
    frequencies : Tensor (F, D), in cycles
    weights : Tensor (F,)
        `resolution` ** D times 2, or times 1 on the plane: the weights of the inverse transform.
    """

    frequencies: Tensor
    weights: Tensor

    def __init__(
        self,
        dim: int,
        max_freq: float,
        resolution: float | Literal["auto"],
        *,
        x_range: float | None = None,
        aliasing: Aliasing = "warn",
    ) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"spatial_dim must be at least 1, got {dim}")
        if aliasing not in ("warn", "ignore", "raise"):
            raise ValueError(f"aliasing must be 'warn', 'ignore' or 'raise', got {aliasing!r}")
        self.dim, self.aliasing = dim, aliasing
        self.resolution = step_for(x_range) if resolution == "auto" else float(resolution)
        self.max_freq = float(max_freq)
        if not (self.resolution > 0 and math.isfinite(self.resolution)):
            raise ValueError(f"freq_resolution must be a positive number or 'auto', got {resolution!r}")
        steps = round(self.max_freq / self.resolution) if math.isfinite(self.max_freq) else 0
        if steps < 1:
            raise ValueError(f"max_freq must be at least one step of {self.resolution:g}, got {max_freq!r}")
        count = (2 * steps + 1) ** (dim - 1) * (steps + 1)
        if count > MAX_FREQUENCIES:
            raise ValueError(
                f"{steps} steps an axis in {dim} dimensions are {count:,} frequencies, more than {MAX_FREQUENCIES:,};"
                " lower max_freq or raise freq_resolution"
            )
        self.steps, self.count = steps, count
        # Made from the numbers above, in the precision that the inputs need: no part of the state.
        frequencies, weights = self._made()
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("weights", weights, persistent=False)

    def get_extra_state(self) -> Tensor:
        """Step and highest frequency, which the weights belong to: they mean nothing on another grid."""
        return torch.tensor([self.resolution, self.max_freq], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Refuse weights of another grid."""
        resolution, max_freq = state.tolist()
        if not (math.isclose(resolution, self.resolution) and math.isclose(max_freq, self.max_freq)):
            raise ValueError(
                f"these weights belong to a grid with freq_resolution={resolution:g} and max_freq={max_freq:g}, this one has "
                f"{self.resolution:g} and {self.max_freq:g}"
            )

    def _made(self) -> tuple[Tensor, Tensor]:
        whole = torch.arange(-self.steps, self.steps + 1, device="cpu")
        index = torch.cartesian_prod(*[whole] * (self.dim - 1), whole[self.steps :]).reshape(self.count, self.dim)
        weights = torch.where(index[:, -1] == 0, 1.0, 2.0).double() * self.resolution**self.dim
        return index.double() * self.resolution, weights

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Move with the module, but stay in float64 whatever its parameters are cast to (float32 where there is none)."""
        super()._apply(fn, recurse)
        device = self.weights.device
        if device.type != "meta":
            dtype = torch.float32 if device.type == "mps" else torch.float64
            self.frequencies, self.weights = (tensor.to(device, dtype) for tensor in self._made())
        return self

    def __len__(self) -> int:
        return self.count

    @property
    def period(self) -> float:
        """Distance after which everything repeats."""
        return 1 / self.resolution

    def phases(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """cos and sin of 2 pi xi.x at centred points: (B, N, D) -> (B, N, 2 F), of `dtype`.

        The products xi.x are taken in the precision of `x`, at least float32.
        """
        turns = x @ self.frequencies.to(x.dtype).T
        angle = (2 * math.pi) * turns
        return torch.cat([angle.cos(), angle.sin()], dim=-1).to(dtype)

    def check_range(self, spread: float) -> None:
        """Warn or raise where points of one task lie `spread` apart along an axis, more than half a period."""
        if self.aliasing == "ignore" or spread <= self.period / 2 * (1 + 1e-6):
            return
        message = (
            f"points of one task lie {spread:.4g} apart, more than half the period of {self.period:.4g} of the frequency"
            f" grid: far points look near. Use a freq_resolution of at most {1 / (2 * spread):.3g}, or 'auto' with"
            f" x_range={spread:.4g}"
        )
        if self.aliasing == "raise":
            raise ValueError(message)
        warnings.warn(message, AliasingWarning, stacklevel=7)  # whoever called the module


def step_for(x_range: float | None) -> float:
    """The frequency step with which points up to `x_range` apart do not alias: 1 / (2.4 x_range)."""
    if x_range is None or not (x_range > 0 and math.isfinite(x_range)):
        raise ValueError(
            f"freq_resolution='auto' needs x_range, the largest distance between points of a task; got {x_range!r}"
        )
    return 1 / (2.4 * x_range)


def centred(
    x_values: Tensor, x_query: Tensor, mask: Tensor | None, grid: FrequencyGrid | None = None
) -> tuple[Tensor, Tensor]:
    """Both sets of inputs less the middle of each task's points, in at least float32.

    Phases of large numbers have no digits left: at x = 1e4 and 5 cycles a unit, float32 turns 50,000 times with an error
    of a hundredth of a turn. Only differences matter, and a difference of neighbouring floating-point numbers is exact.

    Parameters
    ----------
    x_values : Tensor (B, N, D)
    x_query : Tensor (B, Q, D)
    mask : bool Tensor (B, N), optional
        Absent points do not count, and come out at the middle.
    grid : FrequencyGrid, optional
        Checked for aliasing.
    """
    at_least = torch.promote_types(torch.promote_types(x_values.dtype, x_query.dtype), torch.float32)
    x_values, x_query = x_values.to(at_least), x_query.to(at_least)
    with torch.no_grad():
        low, high = _extent(x_values, mask)
        low_q, high_q = _extent(x_query, None)
        # A task without context has no middle of its own; nothing it returns depends on one.
        middle = torch.where(low <= high, 0.5 * low + 0.5 * high, torch.where(low_q <= high_q, low_q, 0.0))
        if grid is not None and x_values.numel() and grid.aliasing != "ignore":
            spread = torch.maximum(high - low, torch.maximum(high - low_q, high_q - low))
            grid.check_range(float(spread.max()))
    if mask is not None:
        x_values = torch.where(mask[..., None], x_values, middle)
    return x_values - middle, x_query - middle


def _extent(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each task along each axis, (B, 1, D) each; infinity and -infinity for no points."""
    inf = float("inf")
    if x.shape[1] == 0:
        shape = (x.shape[0], 1, x.shape[2])
        return x.new_full(shape, inf), x.new_full(shape, -inf)
    if mask is None:
        return x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    there = mask[..., None]
    return (
        torch.where(there, x, inf).amin(1, keepdim=True),
        torch.where(there, x, -inf).amax(1, keepdim=True),
    )
