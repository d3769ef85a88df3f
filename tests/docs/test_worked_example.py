"""The worked example of "Add a method": its files, put where the page says, are a method like any other."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "docs" / "examples"
pytestmark = pytest.mark.xdist_group("worked-example")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the package with the example added, and a function that runs Python in it."""
    root = tmp_path_factory.mktemp("project")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "cameraready", root / "src" / "cameraready", ignore=ignored)
    shutil.copytree(EXAMPLE / "robust", root / "src" / "cameraready" / "robust", ignore=ignored)
    shutil.copy(EXAMPLE / "test_trimmed_mean.py", root)
    shutil.copy(ROOT / "tests" / "test_conformance.py", root)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root / "src"), str(ROOT / "docs" / "generator")]),
        "CAMERAREADY_HOME": str(root / "home"),
    }

    def run(*arguments):
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)

    return root, run


@pytest.fixture(scope="module")
def results(project):
    """What its desk run writes, put beside its code as the page says."""
    root, run = project
    ran = run("-m", "cameraready.cli", "run", "trimmed-mean", "--out", "out")
    assert ran.returncode == 0, ran.stderr
    for name in ("results.json", "results.parquet"):
        shutil.copy(root / "out" / name, root / "src" / "cameraready" / "robust" / "trimmed_mean")
    return ran.stdout, json.loads((root / "out" / "results.json").read_text(encoding="utf-8"))


def test_its_own_tests_pass(project):
    _, run = project
    ran = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_trimmed_mean.py")
    assert ran.returncode == 0, ran.stdout


def test_its_study_gives_the_verdicts_that_statistics_knows(results):
    printed, written = results
    words = {claim["label"]: claim["verdict"] for claim in written["claims"]}
    assert words == {"1": "holds", "2": "holds", "3": "untested"}
    # With so few errors the median is as good as trimming: the answer does not make up a winner.
    assert "on dirty the trimmed mean and the median cannot be told apart" in printed.splitlines()[0]


def test_the_catalogue_and_the_conformance_tests_find_it_by_themselves(project, results):
    _, run = project
    shown = run("-m", "cameraready.cli", "find", "--instead-of", "numpy.mean")
    assert "trimmed-mean" in shown.stdout
    ran = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_conformance.py", "-k", "trimmed-mean")
    assert ran.returncode == 0, ran.stdout
    assert " 6 passed" in f" {ran.stdout.splitlines()[-1]}", ran.stdout


def test_its_pages_are_generated(project, results):
    _, run = project
    made = run(
        "-c",
        "import methods, finding; from cameraready.catalog import catalog, resolve; card = resolve('trimmed-mean');"
        "print(methods.page(card)); print(finding.room_page('robust', [card])); print(finding.problems_index(catalog()))",
    )
    assert made.returncode == 0, made.stderr
    assert "# Trimmed mean" in made.stdout
    assert "# Robust: estimates that a few wrong measurements cannot spoil." in made.stdout
    row = next(line for line in made.stdout.splitlines() if "<code>numpy.mean</code></td><td><a" in line)
    assert 'href="../methods/trimmed-mean.html"' in row
    assert " on dirty" in row
