"""The wheel with the extras of a method, installed away from the repository: its study runs there."""

from __future__ import annotations

import json

import pytest

from cameraready.catalog import catalog
from tests.distribution.conftest import install

EXTRAS = ("study", "attribution")
PUBLIC = ["cameraready", "cameraready.evidence", *(card.module for card in catalog() if card.extra in ("", *EXTRAS))]


@pytest.fixture(scope="module")
def full(wheel, away, tmp_path_factory):
    return install(f"{wheel}[{','.join(EXTRAS)}]", tmp_path_factory.mktemp("full") / "venv", away)


def test_a_study_runs_where_only_the_wheel_is_installed(full):
    ran = full.run("cameraready", "run", "oddshap", "--tier", "smoke", "--json", "--out", "smoke")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["tier"] == "smoke"
    assert found["failed_trials"] == []
    assert (full.away / "smoke" / "index.html").stat().st_size > 10_000


def test_what_was_shipped_is_made_into_pages_and_tables(full):
    reported = full.run("cameraready", "report", "oddshap", "--out", "page")
    assert reported.returncode == 0, reported.stderr
    assert "<svg" in (full.away / "page" / "index.html").read_text(encoding="utf-8")
    exported = full.run("cameraready", "export", "oddshap", "--to", "csv", "--out", "tables")
    assert exported.returncode == 0, exported.stderr
    assert exported.stdout.split()


@pytest.mark.parametrize("module", PUBLIC)
def test_public_modules_are_imported_where_any_warning_is_an_error(full, module):
    code = f"import {module} as found; [getattr(found, name) for name in found.__all__]"
    ran = full.run("python", "-W", "error", "-c", code)
    assert (ran.returncode, ran.stderr) == (0, "")
