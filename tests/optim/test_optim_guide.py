"""The guide "Which optimizer, which layer" prints what it says."""

import contextlib
import io
import json
import re
from importlib import resources
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

GUIDE = Path(__file__).parents[2] / "docs" / "which-optimizer.md"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_block_prints_what_the_page_shows():
    text = GUIDE.read_text(encoding="utf-8")
    pairs = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, flags=re.DOTALL)
    assert len(pairs) == text.count("```python")
    names: dict[str, object] = {}
    for code, shown in pairs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == shown


#: Headings of the page, and the verdicts whose estimates stand under them: number of the claim, workload, how it is printed.
MEASURED = {
    "A quadratic program as a layer": (
        "dxpp",
        [
            (c, w, ".3g")
            for c in ("2a", "2b", "7a", "8b", "9b")
            for w in ("chain", "simplex")
            if (c, w) != ("9b", "simplex")
        ]
        + [("11a", "portfolio", ".3g"), ("11a", "sudoku", ".3g"), ("1d", "random-dense", ".3g")],
    ),
    "A loss that must become very small": (
        "sng",
        [(c, w, ".3g") for c in ("8a", "8b") for w in ("poisson", "burgers")]
        + [("7a", "perceptron", ".3g"), ("7b", "perceptron", ".3g"), ("7c", "poisson", ".3g"), ("7d", "poisson", ".3g")]
        + [("9a", "spectra", ".3g"), ("9b", "spectra", ".3g")],
    ),
    "Blocks that repeat": (
        "depth_smoothing",
        [
            ("1a", "text-adamw", ".4f"),
            ("1b", "text-muon", ".4f"),
            ("2a", "digits-vit", ".4f"),
            ("8", "text-adamw", ".4f"),
            ("4", "depth-12", ".3g"),
        ],
    ),
    "Records that must stay private": (
        "dp_c4",
        [(c, w, ".3g") for c in ("2b", "2d") for w in ("breast-cancer", "digits", "tate", "heavy-tailed")]
        + [("5b", "digits-network", ".3g")],
    ),
}


@pytest.mark.parametrize("heading", MEASURED)
def test_its_numbers_are_those_of_the_shipped_results(heading):
    method, wanted = MEASURED[heading]
    section = GUIDE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    results = json.loads((resources.files(f"cameraready.optim.{method}") / "results.json").read_text())
    found = {(claim["label"], claim["workload"]): claim["estimate"] for claim in results["claims"]}
    shown = set(re.findall(r"(?<![\w.])\d+(?:\.\d+)?", section))
    missing = [(label, name) for label, name, form in wanted if f"{found[label, name]:{form}}" not in shown]
    assert missing == []
