"""The spectrum of trees against a brute-force Walsh transform, and the trees against the libraries they come from."""

from __future__ import annotations

import subprocess
import sys

import lightgbm
import numpy as np
import pytest
from sklearn.ensemble import (
    ExtraTreesRegressor,
    GradientBoostingRegressor,
    HistGradientBoostingRegressor,
    RandomForestRegressor,
)
from sklearn.linear_model import Ridge
from sklearn.tree import DecisionTreeRegressor

from cameraready.attribution._game import UnanimityGame, all_coalitions, exact_shapley
from cameraready.attribution.oddshap import spectrum
from cameraready.attribution.oddshap.spectrum import Forest, largest_terms, levels, shapley_values
from cameraready.attribution.oddshap.surrogate import fit_surrogate, read_forest, simplified


def walsh(function, n: int) -> dict[tuple[bool, ...], float]:
    """beta_T = mean over S of f(S) (-1)^|S n T|, for every T."""
    sets = all_coalitions(n)
    parity = 1 - 2 * ((sets.astype(int) @ sets.T.astype(int)) % 2)
    return {tuple(t): b for t, b in zip(sets.tolist(), parity.T @ function(sets) / 2**n, strict=True)}


def noisy_sample(n: int, rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    game = UnanimityGame.random(n, n_terms=4 * n, max_size=min(5, n), seed=seed)
    coalitions = generator.random((rows, n)) < generator.random((rows, 1))
    return coalitions, game(coalitions) + 0.1 * generator.normal(size=rows)


def full_forest(n_trees: int, depth: int, n_features: int, seed: int = 0) -> Forest:
    """Complete trees with random values and random features, none twice on a path."""
    generator = np.random.default_rng(seed)
    nodes = 2**depth - 1
    feature = np.empty((n_trees, nodes), dtype=np.int64)
    used = np.zeros((n_trees, 1, n_features), dtype=bool)
    for k in range(depth):
        pick = np.where(used, -1.0, generator.random(used.shape)).argmax(axis=2)
        feature[:, 2**k - 1 : 2 ** (k + 1) - 1] = pick
        np.put_along_axis(used, pick[:, :, None], True, axis=2)
        used = used.repeat(2, axis=1)
    node = np.arange(nodes)
    children = np.stack([2 * node + 1, 2 * node + 2], axis=1)
    children = np.where(children < nodes, children, -1 - (children - nodes))
    tree = np.arange(n_trees)[:, None, None]
    children = np.where(children >= 0, children + tree * nodes, children - tree * (nodes + 1))
    values = generator.normal(size=n_trees * (nodes + 1))
    return Forest(feature.ravel(), children.reshape(-1, 2), values, np.arange(n_trees) * nodes)


@pytest.mark.parametrize("parity", ["odd", "all"])
@pytest.mark.parametrize("min_size", [1, 2, 3])
def test_terms_are_the_walsh_transform(parity: str, min_size: int) -> None:
    coalitions, values = noisy_sample(8, 1500)
    forest = fit_surrogate("boosting", coalitions, values, 0)
    expected = {
        t: b
        for t, b in walsh(forest, 8).items()
        if sum(t) >= min_size and (parity == "all" or sum(t) % 2) and abs(b) > 1e-14
    }
    members, coefficients = largest_terms(forest, 8, 10**6, parity=parity, min_size=min_size)
    found = dict(zip(map(tuple, members.tolist()), coefficients, strict=True))
    assert expected.keys() <= found.keys()
    for t, b in found.items():
        assert b == pytest.approx(expected.get(t, 0.0), abs=1e-13)


def test_the_largest_terms_come_first() -> None:
    coalitions, values = noisy_sample(9, 2000)
    forest = fit_surrogate("boosting", coalitions, values, 0)
    sizes = sorted((abs(b) for t, b in walsh(forest, 9).items() if sum(t) >= 3 and sum(t) % 2), reverse=True)
    _, coefficients = largest_terms(forest, 9, 25)
    assert np.abs(coefficients) == pytest.approx(sizes[:25], abs=1e-13)


def test_the_forests_mean_is_its_constant_term() -> None:
    coalitions, values = noisy_sample(7, 800)
    forest = fit_surrogate("boosting", coalitions, values, 0)
    assert levels(forest)[1] == pytest.approx(forest(all_coalitions(7)).mean(), abs=1e-13)


@pytest.mark.parametrize("n", [1, 2, 5, 10])
def test_tree_shapley_values_are_those_of_the_enumerated_trees(n: int) -> None:
    coalitions, values = noisy_sample(n, 1500)
    forest = fit_surrogate("boosting", coalitions, values, 0)
    assert shapley_values(forest, n) == pytest.approx(exact_shapley(forest, n), abs=1e-12)


def test_tree_shapley_values_are_shaps_interventional_ones() -> None:
    import shap

    coalitions, values = noisy_sample(12, 1500)
    model = DecisionTreeRegressor(max_depth=7, random_state=0).fit(coalitions.astype(float), values)
    explainer = shap.TreeExplainer(model, np.zeros((1, 12)), feature_perturbation="interventional")
    theirs = explainer.shap_values(np.ones((1, 12)))[0]
    assert shapley_values(read_forest(model), 12) == pytest.approx(theirs, abs=1e-6)  # shap computes in float32


@pytest.mark.parametrize("n", [20, 70, 140])
def test_keys_of_many_features_tell_sets_apart(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above 64 features keys are hashed, and many terms are handled in ranges: neither changes the result."""
    forest = full_forest(8, 7, n)
    reference: dict[frozenset[int], float] = {}
    for depth, level in enumerate(levels(forest)[0]):
        for f, ancestors, signs, amount in zip(level.feature, level.ancestors, level.signs, level.amount, strict=True):
            for subset in range(1 << depth):
                chosen = [a for a in range(depth) if subset >> a & 1]
                key = frozenset([int(f), *ancestors[chosen].tolist()])
                reference[key] = reference.get(key, 0.0) + amount * np.prod(signs[chosen])
    wanted = {t: b for t, b in reference.items() if len(t) >= 3 and len(t) % 2}
    monkeypatch.setattr(spectrum, "_MAX_TERMS_AT_ONCE", 5_000)
    members, coefficients = largest_terms(forest, n, 200)
    best = sorted(map(abs, wanted.values()), reverse=True)[:200]
    assert np.abs(coefficients) == pytest.approx(best, abs=1e-13)
    for row, b in zip(members, coefficients, strict=True):
        assert wanted[frozenset(np.flatnonzero(row).tolist())] == pytest.approx(b, abs=1e-13)


def test_colliding_keys_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = spectrum._feature_codes
    attempts = []

    def weak_first(used: np.ndarray, n_features: int, attempt: int) -> tuple[np.ndarray, np.ndarray | None]:
        attempts.append(attempt)
        codes, checks = honest(used, n_features, attempt)
        return (codes % np.uint64(64) if attempt == 0 else codes), checks

    forest = full_forest(4, 5, 80)
    expected = largest_terms(forest, 80, 50)
    monkeypatch.setattr(spectrum, "_feature_codes", weak_first)
    found = largest_terms(forest, 80, 50)
    assert attempts == [0, 1]
    assert np.abs(found[1]) == pytest.approx(np.abs(expected[1]), abs=0)


@pytest.mark.parametrize(
    "model",
    [
        lightgbm.LGBMRegressor(n_estimators=30, max_depth=10, verbose=-1, n_jobs=1),
        DecisionTreeRegressor(max_depth=8, random_state=0),
        RandomForestRegressor(10, max_depth=6, random_state=0),
        ExtraTreesRegressor(10, max_depth=6, random_state=0),
        GradientBoostingRegressor(n_estimators=20, max_depth=4, random_state=0),
        HistGradientBoostingRegressor(max_iter=20, random_state=0),
    ],
    ids=lambda model: type(model).__name__,
)
def test_trees_read_from_a_model_predict_what_it_predicts(model) -> None:
    coalitions, values = noisy_sample(10, 1200)
    model = model.fit(coalitions.astype(float), values)
    forest, probe = read_forest(model), all_coalitions(10)
    difference = model.predict(probe.astype(float)) - forest(probe)
    assert np.ptp(difference) < 1e-9  # boosting's starting constant is not part of the trees
    members, coefficients = largest_terms(forest, 10, 10**6, parity="all", min_size=1)
    transform = walsh(forest, 10)
    assert all(
        transform[tuple(t)] == pytest.approx(b, abs=1e-12) for t, b in zip(members.tolist(), coefficients, strict=True)
    )


@pytest.mark.parametrize(("n", "rows"), [(6, 200), (30, 3000), (70, 2000)])
def test_boosting_grows_the_trees_that_lightgbm_grows(n: int, rows: int) -> None:
    coalitions, values = noisy_sample(n, rows)
    ours = fit_surrogate("boosting", coalitions, values, 0)
    theirs = fit_surrogate("lightgbm", coalitions, values, 0)
    probe = np.random.default_rng(1).random((500, n)) < 0.5
    difference = ours(probe) - theirs(probe)
    assert np.ptp(difference) < 1e-5 * values.std()  # LightGBM's gradients are float32


def test_degenerate_splits_are_removed() -> None:
    # Root splits on 0; its left child on 0 again, its right child on 1 at a threshold that no bit reaches.
    forest = Forest(
        np.array([0, 0, 1]),
        np.array([[1, 2], [-1, -2], [-3, -4]]),
        np.array([1.0, 50.0, 3.0, 70.0]),
        np.array([0]),
    )
    clean = simplified(forest, np.array([0.5, 0.5, 1.5]))
    bits = all_coalitions(2)
    assert clean(bits) == pytest.approx(np.where(bits[:, 0], 3.0, 1.0))
    assert shapley_values(clean, 2) == pytest.approx([2.0, 0.0])
    negative = simplified(forest, np.array([-0.5, 0.5, 0.5]))  # always to the right
    assert negative(bits) == pytest.approx(np.where(bits[:, 1], 70.0, 3.0))


def test_constant_targets_give_no_terms() -> None:
    coalitions, _ = noisy_sample(5, 100)
    for target in (np.zeros(100), np.full(100, 1e6 + 0.1), np.zeros(0)):
        forest = fit_surrogate("boosting", coalitions[: len(target)], target, 0)
        assert len(largest_terms(forest, 5, 10)[0]) == 0
        assert (shapley_values(forest, 5) == 0).all()


@pytest.mark.parametrize("scale", [1e-12, 1e9])
@pytest.mark.parametrize("surrogate", ["boosting", "lightgbm"])
def test_the_scale_of_the_values_does_not_matter(scale: float, surrogate: str) -> None:
    coalitions, values = noisy_sample(8, 600)
    plain, scaled = (fit_surrogate(surrogate, coalitions, factor * values, 0) for factor in (1.0, scale))
    assert largest_terms(scaled, 8, 20)[1] == pytest.approx(scale * largest_terms(plain, 8, 20)[1], rel=1e-5)


def test_models_without_readable_trees_are_refused() -> None:
    with pytest.raises(TypeError, match="Ridge has no trees"):
        read_forest(Ridge().fit(np.eye(3), np.arange(3.0)))
    chain = np.stack([-1 - np.arange(21), np.append(np.arange(1, 21), -22)], axis=1)
    deep = Forest(np.arange(21), chain, np.arange(22.0), np.array([0]))
    with pytest.raises(ValueError, match=r"depth 21.*limit its depth to 20"):
        largest_terms(deep, 21, 10)


@pytest.mark.slow
def test_the_largest_forest_fits_in_two_gib() -> None:
    """100 full trees of depth 10 over 100 features, 17 million odd terms, in a process of its own."""
    script = (
        "import resource, sys; sys.path[:0] = sys.argv[1:]\n"
        "from tests.attribution.test_oddshap_spectrum import full_forest\n"
        "from cameraready.attribution.oddshap.spectrum import largest_terms\n"
        "members, _ = largest_terms(full_forest(100, 10, 100), 100, 1000)\n"
        "print(len(members), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", script, *sys.path], capture_output=True, text=True, check=True)
    count, peak_kib = map(int, done.stdout.split())
    assert count == 1000
    assert peak_kib < 2 * 2**20
