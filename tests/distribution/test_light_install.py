"""The wheel without extras: the catalogue works, and what needs more says what to install. And by uvx."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import pytest

from cameraready.catalog import catalog
from tests.distribution.conftest import install, run_away, settings_for_uv

SLUGS = [card.slug for card in catalog()]


@pytest.fixture(scope="module")
def light(wheel, away, tmp_path_factory):
    return install(str(wheel), tmp_path_factory.mktemp("light") / "venv", away)


def test_the_catalogue_works_without_extras(light):
    listed = light.run("cameraready", "list")
    assert listed.returncode == 0, listed.stderr
    assert all(slug in listed.stdout for slug in SLUGS)
    shown = light.run("cameraready", "show", "oddshap")
    assert shown.returncode == 0, shown.stderr
    assert "✓ holds" in shown.stdout  # the results are there, with their verdicts
    assert "cameraready run oddshap" in shown.stdout
    found = light.run("cameraready", "find", "--instead-of", "shap.KernelExplainer")
    assert found.stdout.split()[0] == "oddshap"
    cited = light.run("cameraready", "cite", "oddshap")
    assert cited.returncode == 0, cited.stderr
    assert "2602.01399" in cited.stdout


def test_what_needs_an_extra_says_so_in_one_line(light):
    ran = light.run("cameraready", "run", "oddshap", "--tier", "smoke")
    assert ran.returncode == 1
    assert len(ran.stderr.strip().splitlines()) == 1
    assert 'pip install "cameraready[study]"' in ran.stderr


def test_the_import_warns_of_nothing(light):
    ran = light.run(
        "python", "-W", "error", "-c", "import cameraready; cameraready.find('explain'); cameraready.catalog()"
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_uvx_runs_it(wheel, away):
    uvx = Path(sysconfig.get_path("scripts"), "uvx.exe" if os.name == "nt" else "uvx")
    more = {**settings_for_uv(), "UV_PYTHON": sys.executable, "UV_PYTHON_DOWNLOADS": "never"}
    ran = run_away([uvx, "--from", wheel, "cameraready", "list"], away, more)
    assert ran.returncode == 0, ran.stderr
    assert all(slug in ran.stdout for slug in SLUGS)
