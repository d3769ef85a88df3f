"""Gaussian clones and Wiener denoisers: exact moments, optimality among affine denoisers, the analytic posterior."""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from cameraready.flows import CosinePath, LinearPath
from cameraready.flows._toy.images import digits
from cameraready.flows._toy.mixtures import GaussianMixture
from cameraready.flows.mixed_cumulant import GaussianClone

pytestmark = pytest.mark.torch


def skewed(n=4_000, d=5, seed=0):
    rng = np.random.default_rng(seed)
    return torch.tensor(rng.exponential(1.0, (n, d)) @ rng.standard_normal((d, d)) + 2.0)


def test_a_clone_has_the_moments_and_is_gaussian():
    data = skewed()
    clone = GaussianClone(data)
    drawn = clone.sample(50_000, torch.Generator().manual_seed(1))
    scale = math.sqrt(float(clone.covariance.diagonal().max()))
    torch.testing.assert_close(drawn.mean(0), data.mean(0), atol=5 * scale / math.sqrt(50_000), rtol=0)
    torch.testing.assert_close(drawn.T.cov(), clone.covariance, atol=0.06 * scale**2, rtol=0)
    first = (drawn[:, 0] - clone.mean[0]) / clone.covariance[0, 0].sqrt()
    assert kstest(first[:5_000].numpy(), "norm").pvalue > 1e-3
    matched = clone.sample(40, 2, matched=True)
    torch.testing.assert_close(matched.mean(0), clone.mean)
    centred = matched - matched.mean(0)
    torch.testing.assert_close(centred.T @ centred / 40, clone.covariance)


def test_constant_pixels_stay_constant_and_form_and_dtype_are_kept():
    images = digits("train")[0]
    drawn = GaussianClone(images).sample(100, torch.Generator().manual_seed(3), matched=True)
    assert drawn.shape == (100, 1, 8, 8)
    assert drawn.dtype == torch.float32
    assert float((drawn[:, 0, :, 0] - images[:, 0, :, 0].mean(0)).abs()[:, 0].max()) < 1e-6
    array = GaussianClone(images.numpy()).sample(3, np.random.default_rng(0))
    assert isinstance(array, np.ndarray)
    assert array.dtype == np.float32
    half = GaussianClone(images.to(torch.bfloat16)).sample(2, 0)
    assert half.dtype == torch.bfloat16


def test_the_same_generator_gives_the_same_clone_and_no_other_is_touched():
    clone, before = GaussianClone(skewed()), torch.get_rng_state()
    one, two = (clone.sample(5, torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(torch.get_rng_state(), before)


def test_shrinkage_and_warning():
    data = skewed(8, 5)
    with pytest.warns(UserWarning, match="8 rows are few"):
        plain = GaussianClone(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shrunk = GaussianClone(data, shrinkage=0.25)
    level = plain.covariance.trace() / 5
    torch.testing.assert_close(
        shrunk.covariance, 0.75 * plain.covariance + 0.25 * level * torch.eye(5, dtype=torch.float64)
    )


@pytest.mark.parametrize("path", [LinearPath(), CosinePath()])
def test_the_wiener_denoiser_is_the_posterior_mean_of_a_gaussian(path):
    clone = GaussianClone(skewed())
    gaussian = GaussianMixture(torch.ones(1, dtype=torch.float64), clone.mean[None], clone.covariance[None])
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for t in (0.1, 0.5, 0.95):
        torch.testing.assert_close(
            clone.denoiser(path)(x, t), gaussian.posterior(x, t, path).mean.to(x), atol=1e-8, rtol=1e-8
        )
        torch.testing.assert_close(
            clone.denoiser(path).velocity(x, t), gaussian.velocity(path)(x, t), atol=1e-7, rtol=1e-7
        )


def test_no_affine_denoiser_is_better_and_its_error_is_the_formula():
    data = skewed(200_000)
    clone, t = GaussianClone(data), 0.6
    wiener = clone.denoiser()
    noise = torch.randn(data.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    x = t * data + (1 - t) * noise
    error = (wiener(x, t) - data).square().mean(1)
    assert float(error.mean()) == pytest.approx(wiener.error(t), abs=5 * float(error.std()) / math.sqrt(len(data)))
    design = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    best = (design @ torch.linalg.lstsq(design, data).solution - data).square().mean()
    assert float(best) == pytest.approx(wiener.error(t), rel=0.01)
    clones = clone.sample(200_000, 7)
    on_clones = (wiener(t * clones + (1 - t) * noise, t) - clones).square().mean()
    assert float(on_clones) == pytest.approx(float(error.mean()), rel=0.01)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GaussianClone(torch.zeros(1, 3)), "two or more rows"),
        (lambda: GaussianClone(torch.zeros(9, 3, dtype=torch.int64)), "floating point"),
        (lambda: GaussianClone(torch.full((9, 3), math.nan)), "NaN"),
        (lambda: GaussianClone(skewed(), shrinkage=1.0), "shrinkage"),
        (lambda: GaussianClone(skewed()).sample(0, 0), "at least 1"),
        (lambda: GaussianClone(skewed()).sample(5, 0, matched=True), "more than 5 draws"),
        (lambda: GaussianClone(skewed()).denoiser().velocity(torch.zeros(2, 5), torch.tensor([0.1, 0.2])), "one time"),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
