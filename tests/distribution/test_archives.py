"""What is in the wheel and in the sdist, and that one makes the other."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from cameraready.catalog import catalog
from tests.distribution.conftest import ROOT

LARGEST = 1_000_000  # bytes


def contents(wheel: Path) -> dict[str, str]:
    """Digests of the files of a wheel, by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def package_files() -> set[str]:
    source = ROOT / "src"
    return {
        path.relative_to(source).as_posix()
        for path in (source / "cameraready").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel):
    inside = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert inside == package_files()
    for card in catalog():
        folder = Path(*card.module.split(".")).as_posix()
        shipped = ("results.json", "results.parquet") if card.results_path.is_file() else ()
        assert {f"{folder}/{name}" for name in ("card.toml", *shipped)} <= inside
    assert "cameraready/py.typed" in inside
    assert {Path(name).suffix for name in inside} >= {".py", ".toml", ".json", ".parquet", ".lock", ".css", ".j2"}


def test_no_file_is_large(wheel, sdist):
    with zipfile.ZipFile(wheel) as archive:
        sizes = {item.filename: item.file_size for item in archive.infolist()}
    with tarfile.open(sdist) as archive:
        sizes |= {item.name: item.size for item in archive.getmembers()}
    assert {name: size for name, size in sizes.items() if size > LARGEST} == {}


def test_the_sdist_and_the_repository_build_the_same_wheel(wheel, sdist, tmp_path):
    """The wheel of ``make dist`` was built from the sdist, as installers that take the sdist do."""
    words = [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT]
    built = subprocess.run(words, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (direct,) = tmp_path.glob("*.whl")
    assert contents(direct) == contents(wheel)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/test_catalog.py", "docs/support.md", "Makefile", "constraints.txt", "mkdocs.yml"} <= names
