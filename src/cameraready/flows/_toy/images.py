"""Small real images that ship with scikit-learn: handwritten digits, and patches of two photographs."""

from __future__ import annotations

from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Split = Literal["all", "train", "test"]

#: Held-out digits; the others are the train split.
TEST_DIGITS = 360
#: Share of each photograph, from its left edge, that train patches come from; test patches come from the rest.
_TRAIN_SHARE = 0.8
#: Of the luminance, for red, green and blue (ITU-R BT.601).
_LUMINANCE = (0.299, 0.587, 0.114)


def digits(split: Split = "all") -> tuple[Tensor, Tensor]:
    """The handwritten digits of scikit-learn (Alpaydin and Kaynak, 1998).

    Parameters
    ----------
    split : {"all", "train", "test"}
        All 1797, or 1437 and 360 of them by a fixed permutation (the same writers are in both).

    Returns
    -------
    images : (N, 1, 8, 8) float32 in [-1, 1]
        Seventeen grey levels, -1 for paper and 1 for ink.
    labels : (N,) int64
        0 to 9.
    """
    from sklearn.datasets import load_digits

    _check(split)
    found = load_digits()
    images = torch.from_numpy(found.images.astype(np.float32) / 8 - 1)[:, None]
    labels = torch.from_numpy(found.target.astype(np.int64))
    if split == "all":
        return images, labels
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1797))
    chosen = order[:TEST_DIGITS] if split == "test" else order[TEST_DIGITS:]
    return images[chosen], labels[chosen]


def patches(n: int, size: int = 8, seed: int = 0, split: Split = "all") -> Tensor:
    """Random square patches of scikit-learn's photographs `china` and `flower`, grey and standardised.

    Parameters
    ----------
    n : int
        How many, half from each photograph; places overlap when there are many.
    size : int
        Side in pixels.
    seed : int
        Of the places.
    split : {"all", "train", "test"}
        From everywhere, or from the left 80 or the right 20 percent of each photograph, which share no pixel. They show different things: the laws differ (squared
        energy distance 0.70 at size 8, against 0.34 from the train split to its Gaussian clone). For draws of the same law take another seed instead.

    Returns
    -------
    (n, 1, size, size) float32
        Grey levels less the mean over both photographs, divided by their standard deviation: one affine map for all pixels, whatever `n` and
        `seed`. `patch_range` says what black and white became.
    """
    _check(split)
    grey, mean, std = _photographs()
    height, width = grey[0].shape
    cut = int(_TRAIN_SHARE * width)
    low, high = {"all": (0, width), "train": (0, cut), "test": (cut, width)}[split]
    if not 1 <= size <= min(height, high - low):
        raise ValueError(f"size must be 1 to {min(height, high - low)} for this split, got {size}")
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    g = torch.Generator().manual_seed(seed)
    top = torch.randint(height - size + 1, (n,), generator=g)
    left = torch.randint(low, high - size + 1, (n,), generator=g)
    which = torch.arange(n) % 2
    inside = torch.arange(size)
    rows, columns = (top[:, None] + inside)[:, :, None], (left[:, None] + inside)[:, None, :]
    cut_out = torch.stack([torch.from_numpy(g) for g in grey])[which[:, None, None], rows, columns]
    order = torch.randperm(n, generator=g)
    return ((cut_out[order] - mean) / std).to(torch.float32)[:, None]


def patch_range() -> tuple[float, float]:
    """What black and white are in the units of `patches`."""
    _, mean, std = _photographs()
    return -mean / std, (1 - mean) / std


@cache
def _photographs() -> tuple[list[np.ndarray], float, float]:
    """Grey in [0, 1], and mean and standard deviation over all pixels of both."""
    from sklearn.datasets import load_sample_images

    grey = [image @ np.array(_LUMINANCE) / 255 for image in load_sample_images().images]
    together = np.stack(grey)
    return grey, float(together.mean()), float(together.std())


def _check(split: str) -> None:
    if split not in ("all", "train", "test"):
        raise ValueError(f"split must be 'all', 'train' or 'test', got {split!r}")
