"""What happens by accident: inputs that change later, labels of a series, refits that fail, bounds in other units."""

from __future__ import annotations

import threading

import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import RBF
from sklearn.model_selection import cross_val_score

from cameraready import check
from cameraready.evidence.checking import UsageError
from cameraready.evidence.specs import SpecError
from cameraready.stats.gp2scale import (
    Bumps,
    Core,
    Deltas,
    Field,
    NotPositiveDefinite,
    PaperNonStationary,
    SparseGPRegressor,
    SupportKernel,
    Wendland,
)
from cameraready.stats.gp2scale.setting import default_kernel

DRAW = np.random.default_rng(0)
X = DRAW.random((80, 1))
y = np.sin(9 * X[:, 0]) + 0.1 * DRAW.normal(size=80)


def common_letters(A, B, parameters):
    return np.array([len(set(a) & set(b)) / np.sqrt(len(set(a)) * len(set(b))) for a, b in zip(A, B, strict=True)])


def every_pair(A, B):
    return np.divmod(np.arange(len(A) * len(B)), len(B))


STRINGS = ["".join(DRAW.choice(list("abcdef"), size=4)) for _ in range(30)]
ON_STRINGS = SupportKernel(common_letters, every_pair, guaranteed=True)


def test_a_series_of_strings_is_read_in_its_order_whatever_its_labels():
    values = np.array([len(set(s)) for s in STRINGS], dtype=float)
    labels = DRAW.permutation(30)
    model = SparseGPRegressor(ON_STRINGS, noise=0.1, mean="learn").fit(STRINGS, values)
    labelled = SparseGPRegressor(ON_STRINGS, noise=0.1, mean="learn").fit(pd.Series(STRINGS, index=labels), values)
    np.testing.assert_allclose(labelled.predict(pd.Series(STRINGS[:5])), model.predict(STRINGS[:5]), rtol=1e-12)
    assert np.isfinite(cross_val_score(labelled, pd.Series(STRINGS, index=labels), values, cv=3)).all()
    with pytest.raises(ValueError, match="got one string"):
        model.predict("abcd")


def test_data_that_change_after_the_fit_do_not_change_the_model():
    inputs, outputs, noise = X.copy(), y.copy(), np.full(80, 0.01)
    model = SparseGPRegressor(Wendland(0.3), noise=noise).fit(inputs, outputs)
    before = model.predict([[0.5]]), model.log_marginal_likelihood(model.theta_)
    inputs *= 0
    outputs *= 0
    noise += 1
    assert model.predict([[0.5]]) == before[0]
    assert model.log_marginal_likelihood(model.theta_) == before[1]


@pytest.mark.parametrize(
    "change", [{"noise": -1.0}, {"kernel": PaperNonStationary(lambda X: 0.02 + 0.2 * (X[:, 0] > 0.5), 1.0)}]
)
def test_a_refit_that_fails_leaves_the_model_as_it_was(change):
    model = SparseGPRegressor(Wendland(0.3), noise=0.01, normalize_y=True).fit(X, y)
    before, theta = model.predict([[0.5]]), model.theta_
    dense = np.linspace(0, 1, 300)[:, None]
    with pytest.raises((ValueError, NotPositiveDefinite)):
        model.set_params(**change, optimizer=None).fit(dense, 1_000 * dense[:, 0] + 5_000)
    assert model.predict([[0.5]]) == before
    assert model.theta_ is theta


def test_a_start_outside_its_bounds_and_an_end_at_them_are_told():
    months = np.arange(200.0)[:, None] * 2.6e6 + 1.6e9
    with pytest.raises(ValueError, match=r"length_scale starts at 3e\+07, outside its bounds"):
        SparseGPRegressor(Wendland(3e7), noise=1e-4).fit(months, np.sin(months[:, 0] / 3e7))
    with pytest.warns(ConvergenceWarning, match="length_scale ended at the upper bound"):
        SparseGPRegressor(Wendland(0.05, length_scale_bounds=(0.01, 0.06)), noise=0.01).fit(X, y)


def test_a_learned_noise_has_bounds_in_the_units_of_the_outputs():
    for unit in (1e-4, 1e4):
        found = SparseGPRegressor(noise="learn").fit(X, unit * y).noise_
        assert 0.005 < found / unit**2 < 0.02


@pytest.mark.parametrize(
    "kernel",
    [Bumps(np.array([[0.2], [0.8]]), 0.1), Bumps(np.array([[0.2]]), 0.1) * Wendland(0.3), Deltas([X[:3]], 0.0)],
)
def test_kernels_that_vanish_somewhere_still_have_noise_there(kernel):
    model = SparseGPRegressor(kernel, noise=0.01, optimizer=None).fit(X, y)
    K = kernel(X).toarray() + 0.01 * np.eye(80)
    expected = -0.5 * (y @ np.linalg.solve(K, y) + np.linalg.slogdet(K)[1] + 80 * np.log(2 * np.pi))
    assert model.log_marginal_likelihood(model.theta_) == pytest.approx(expected, rel=1e-10)


def test_the_default_radius_counts_equal_rows():
    places = np.arange(500.0)[:, None]
    once = default_kernel(places, np.ones(500)).k2.length_scale
    for repeats in (10, 49, 51, 200):
        kernel = default_kernel(np.repeat(places, repeats, axis=0), np.ones(500 * repeats))
        assert 0 < kernel.k2.length_scale <= once


def test_one_model_serves_many_threads():
    model = SparseGPRegressor(Wendland(0.1), noise=0.01, optimizer=None).fit(X, y)
    thetas = np.log(DRAW.uniform(0.02, 0.5, size=40))
    expected = [model.log_marginal_likelihood([theta]) for theta in thetas]
    found = [None] * 40

    def work(first):
        for k in range(first, 40, 4):
            found[k] = model.log_marginal_likelihood([thetas[k]])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == pytest.approx(expected, rel=1e-12)


def test_sums_begin_with_zero_and_numbers_must_be_positive():
    both = sum([Wendland(0.1), Wendland(0.3)])
    np.testing.assert_allclose(both(X).toarray(), (Wendland(0.1)(X) + Wendland(0.3)(X)).toarray())
    for mistake in (lambda: 0 * Wendland(0.1), lambda: Wendland(0.1) * -1.0):
        with pytest.raises(ValueError, match="above 0"):
            mistake()
    with pytest.raises(TypeError, match="no powers"):
        Wendland(0.1) ** 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kernel": RBF() * Wendland(0.3)}, TypeError, r"Core\(RBF\(\)\) \* Wendland"),
        ({"kernel": Core(RBF([1.0, 2.0])) * Wendland(0.3)}, ValueError, "2 length scales, but the points have 1 columns"),
        ({"kernel": Wendland(0.3, 1.0)}, ValueError, "smoothness must be"),
        ({"kernel": Wendland(0.0)}, ValueError, "length_scale must be finite and above 0"),
        ({"kernel": Wendland(0.3, length_scale_bounds=(0, 1)), "n_restarts_optimizer": 1}, ValueError, "above 0 and finite"),
        ({"kernel": Wendland(0.3, length_scale_bounds=(0.1, np.inf)), "optimizer": "mcmc"}, ValueError, "above 0 and finite"),
        ({"n_probes": 0}, ValueError, "n_probes must be at least 1"),
        ({"tol": 0.0}, ValueError, "tol must be above 0"),
        ({"mean": None}, ValueError, "mean must be"),
        ({"noise": "learn", "noise_bounds": "fixed"}, ValueError, "noise_bounds must be two positive"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_any_work(options, error, message):
    with pytest.raises(error, match=message):
        SparseGPRegressor(**{"noise": 0.01, **options}).fit(X, y)


def test_a_field_needs_a_width():
    for field in (Field([[0.1], [0.1]], [1.0, 2.0]), Field([[0.1], [0.2]], [1.0, 2.0], width=0.0)):
        with pytest.raises(ValueError, match="width of a Field must be above 0"):
            field(X)


def test_a_noise_array_of_no_dimension_is_a_number():
    model = SparseGPRegressor(Wendland(0.3), noise=np.array(0.01), optimizer=None).fit(X, y)
    assert model.noise_ == 0.01
    assert model.predict(X[:3], return_std=True, include_noise=True)[1].shape == (3,)


def test_a_users_table_is_looked_at_before_anything_runs(tmp_path):
    frame = pd.DataFrame({"east": DRAW.random(90), "north": DRAW.random(90), "height": DRAW.random(90)})
    frame.to_csv(tmp_path / "map.csv", index=False)
    with pytest.raises(SpecError, match="did you mean 'height'"):
        check("gp2scale", on=f"{tmp_path / 'map.csv'}:hight", dry_run=True)
    frame.loc[3, "east"] = np.inf
    frame.to_csv(tmp_path / "map.csv", index=False)
    with pytest.raises(UsageError, match=r"column 'east'.* infinite"):
        check("gp2scale", on=f"{tmp_path / 'map.csv'}:height", dry_run=True)
