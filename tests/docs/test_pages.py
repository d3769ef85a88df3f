"""The hand-written pages show code that runs and numbers that were measured."""

import json
import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"


def blocks(path, language="python"):
    return re.findall(rf"```{language}[^\n]*\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_readme_shows_the_answer_that_ships():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").replace("\n> ", " ").split())
    results = json.loads((ROOT / "src/cameraready/attribution/oddshap/results.json").read_text(encoding="utf-8"))
    assert " ".join(results["answer"].split()) in readme


def test_readme_and_quick_start_show_the_same_use():
    assert blocks(DOCS / "quickstart.md")[0] == blocks(ROOT / "README.md")[0]


def test_the_quick_starts_use_of_a_method_works(tmp_path, monkeypatch):
    import pandas as pd
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer(as_frame=True).frame.iloc[:120, [0, 1, 2, 3, -1]]
    table.insert(0, "ward", np.where(np.arange(len(table)) % 3, "north", None))
    pd.DataFrame(table).to_csv(tmp_path / "yours.csv", index=False)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(blocks(DOCS / "quickstart.md")[0], names)
    explanation = names["explanation"]
    full = names["model"].predict_proba(names["X"].head(5))[:, 1]
    assert explanation.values.shape == (5, 5)
    np.testing.assert_allclose(explanation.values.sum(axis=1) + explanation.base_values, full, atol=1e-9)


def test_the_example_of_ones_own_method_estimates_shapley_values():
    names: dict = {}
    exec(blocks(DOCS / "own-method.md")[0], names)
    weights = np.array([1.0, -2.0, 0.5, 3.0])
    pairs = list(combinations(range(4), 2))
    strength = np.arange(1.0, 7.0)

    def game(present):
        both = np.stack([present[:, i] & present[:, j] for i, j in pairs], axis=1)
        return present @ weights + both @ strength

    # A pair's worth is split between its two players.
    truth = weights + np.array(
        [sum(s / 2 for s, pair in zip(strength, pairs, strict=True) if i in pair) for i in range(4)]
    )
    estimate = names["my_method"](game, 4, 20_000, 0)
    spread = sum(s**2 for s in strength) ** 0.5 / np.sqrt(20_000 // 5)
    np.testing.assert_allclose(estimate, truth, atol=4 * spread)
    assert estimate.sum() == pytest.approx(game(np.ones((1, 4), dtype=bool))[0])


def test_the_guide_to_gaussian_processes_fits_one():
    names: dict = {}
    exec(blocks(DOCS / "choosing-a-gp.md")[0], names)
    first = names["X"][:5]
    truth = np.sin(20 * first[:, 0]) * np.cos(15 * first[:, 1])
    assert names["model"].predict(first) == pytest.approx(truth, abs=0.15)
    assert names["mean"] == pytest.approx(truth, abs=0.15)
    assert (names["std"] < 0.1).all()
    assert np.abs(names["slope"]).max() < 0.05 * abs(names["value"])
