"""Digits and patches: ranges, splits that share nothing, and patches that are what the photographs show."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits, load_sample_images

from cameraready.flows._toy.images import TEST_DIGITS, digits, patch_range, patches

pytestmark = pytest.mark.torch


def test_digits_are_those_of_scikit_learn_in_the_range():
    images, labels = digits()
    assert images.shape == (1797, 1, 8, 8)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert (float(images.min()), float(images.max())) == (-1, 1)
    found = load_digits()
    np.testing.assert_allclose((images[:, 0].numpy() + 1) * 8, found.images, atol=1e-6)
    assert labels.tolist() == found.target.tolist()


def test_the_splits_are_a_partition_with_every_class_in_both():
    everything, train, test = (digits(split) for split in ("all", "train", "test"))
    assert len(test[0]) == TEST_DIGITS

    def rows(images, labels):
        return sorted(tuple(i) for i in torch.cat([images.flatten(1), labels[:, None]], 1).tolist())

    assert rows(*everything) == sorted(rows(*train) + rows(*test))
    assert len(set(test[1].tolist())) == 10
    assert int(torch.bincount(test[1]).min()) > 20


def test_patches_are_cut_out_of_the_photographs():
    x = patches(4, size=5, seed=3)
    low, high = patch_range()
    assert x.shape == (4, 1, 5, 5)
    assert x.dtype == torch.float32
    grey = [image @ np.array([0.299, 0.587, 0.114]) / 255 for image in load_sample_images().images]
    level = (x.double().numpy() - low) / (high - low)  # back to 0..1
    windows = [np.lib.stride_tricks.sliding_window_view(image, (5, 5)) for image in grey]
    for patch in level[:, 0]:
        alike = np.concatenate([w[np.abs(w[..., 2, 2] - patch[2, 2]) < 1e-6] for w in windows])
        assert np.abs(alike - patch).max(axis=(1, 2)).min() < 1e-6


def test_patches_are_standardised_by_one_map_and_depend_on_the_seed_alone():
    x = patches(4000, seed=1)
    low, high = patch_range()
    assert low - 1e-5 <= float(x.min()) < float(x.max()) <= high + 1e-5
    assert abs(float(x.mean())) < 0.1
    assert float(x.std()) == pytest.approx(1, abs=0.05)
    assert torch.equal(x, patches(4000, seed=1))
    assert not torch.equal(x, patches(4000, seed=2))
    grey = np.stack([image @ np.array([0.299, 0.587, 0.114]) / 255 for image in load_sample_images().images])
    assert low == pytest.approx(-grey.mean() / grey.std())
    assert high == pytest.approx((1 - grey.mean()) / grey.std())


def test_train_and_test_patches_share_no_pixel(monkeypatch):
    """Photographs whose grey level is the column's number show where patches come from."""
    from cameraready.flows._toy import images

    columns = np.broadcast_to(np.arange(640.0), (427, 640))
    monkeypatch.setattr(images, "_photographs", lambda: ([columns.copy(), columns.copy()], 0.0, 1.0))
    train, test = patches(3000, split="train"), patches(3000, split="test")
    assert float(train.max()) == 511
    assert float(test.min()) == 512


def test_mistakes_are_named():
    for call in (lambda: digits("dev"), lambda: patches(3, split="dev")):
        with pytest.raises(ValueError, match="split must be 'all', 'train' or 'test', got 'dev'"):
            call()
    with pytest.raises(ValueError, match="size must be 1 to 128"):
        patches(3, size=200, split="test")
    with pytest.raises(ValueError, match="n must be at least 1"):
        patches(0)
