"""A key changes with everything that a trial's rows depend on, and with nothing else."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from cameraready.evidence.execution.key import arm_versions, canonical_json, code_digest, trial_key, versions_of
from cameraready.evidence.study import Peer, Study

names = (f"made_up_package_{number}" for number in itertools.count())


class Package:
    """A package made of given files, importable while the test runs."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder / name
        self.name = name

    def write(self, **files: str) -> Package:
        for name, text in files.items():
            path = self.folder / (name.replace("__in__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("PACKAGE", self.name))
        return self

    def digest(self, module: str = "study") -> str:
        return code_digest(f"{self.name}.{module}")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    monkeypatch.syspath_prepend(tmp_path)
    made = Package(tmp_path, next(names))
    return made.write(
        __init__='"""Root."""\n',
        study='"""T."""\nfrom .method import fit\nimport numpy\n\ndef trial(w):\n    """Run."""\n    return fit(w)\n',
        method="from PACKAGE.deep.core import depth\n\ndef fit(w):\n    return depth + 1\n",
        deep__in____init__="",
        deep__in__core="depth = 3\n",
        bystander="unused = 1\n",
    )


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (
            "study",
            '"""Another docstring."""\nfrom .method import fit\nimport numpy\n\ndef trial(w):\n    return fit(w)\n',
        ),
        (
            "study",
            "from .method import (\n    fit,\n)\nimport numpy\n\n# why\ndef trial( w ):\n  return(fit( w ))  # what\n",
        ),
        (
            "method",
            '"""New."""\nfrom PACKAGE.deep.core import depth\n\n\n\ndef fit(w):\n    "Fits."\n    return (depth + 1)\n',
        ),
        ("deep__in__core", 'depth = 3\n"""How deep it is."""\n'),
        ("bystander", "unused = 2\n"),
        ("deep__in____init__", "from . import core\n"),
        ("__init__", '"""Another root."""\n'),
    ],
)
def test_comments_docstrings_layout_and_bystanders_do_not_count(package: Package, file: str, text: str) -> None:
    before = package.digest()
    package.write(**{file: text})
    assert package.digest() == before


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("study", "from .method import fit\n\ndef trial(w):\n    return fit(w)\n"),
        ("method", "from PACKAGE.deep.core import depth\n\ndef fit(w):\n    return depth + 2\n"),
        ("deep__in__core", "depth = 3.0\n"),
        ("deep__in__core", "depth = '3'\n"),
    ],
)
def test_code_counts_however_deep(package: Package, file: str, text: str) -> None:
    before = package.digest()
    package.write(**{file: text})
    assert package.digest() != before


@pytest.mark.parametrize(
    "line",
    [
        "import PACKAGE.lazy",
        "from PACKAGE import lazy",
        "from PACKAGE.lazy import number",
        "from PACKAGE.lazy import *",
        "from . import lazy",
        "from .lazy import number as n",
        "def late():\n    from .lazy import number",
        "try:\n    import PACKAGE.lazy\nexcept ImportError:\n    pass",
    ],
)
def test_every_way_to_import_is_followed_without_executing(package: Package, line: str) -> None:
    package.write(study=line + "\n", lazy="number = 1\nraise SystemExit('executed')\n")
    before = package.digest()
    package.write(lazy="number = 2\nraise SystemExit('executed')\n")
    assert package.digest() != before


def test_imports_of_the_type_checker_do_not_count(package: Package) -> None:
    package.write(
        study="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import types_only\n",
        types_only="x = 1\n",
    )
    before = package.digest()
    package.write(types_only="x = 2\n")
    assert package.digest() == before


def test_circular_imports_end(package: Package) -> None:
    package.write(study="from . import method\n", method="from . import study\n")
    assert len(package.digest()) == 32


def test_a_lone_file_counts_with_the_files_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name, beside = next(names), next(names)
    (tmp_path / f"{name}.py").write_text(f"import {beside}, json, numpy.linalg\n")
    (tmp_path / f"{beside}.py").write_text("x = 1\n")
    before = code_digest(name)
    (tmp_path / f"{beside}.py").write_text("x = 22\n")
    assert code_digest(name) != before


def test_the_engine_does_not_count() -> None:
    from cameraready.evidence.execution.key import _is_engine

    engine = [
        "cameraready",
        "cameraready.evidence",
        "cameraready.evidence.study",
        "cameraready.cli.run",
        "cameraready.catalog",
    ]
    assert all(_is_engine(name) for name in engine)
    assert not any(
        _is_engine(name) for name in ["cameraready.attribution", "cameraready.evidences", "cameraready.models"]
    )


def test_a_module_that_is_not_there_gives_a_sentence() -> None:
    for name in ("no_such_module", "json.no_such_module", "math"):
        with pytest.raises(ModuleNotFoundError, match=r"must live in a \.py file"):
            code_digest(name)


BASE = {"code": "c", "content": "d", "condition": {"budget": 10, "arm": "x"}, "seed": 0, "versions": {"numpy": "2.0"}}


def test_each_part_changes_the_key() -> None:
    variants = [
        {},
        {"code": "c2"},
        {"content": "d2"},
        {"condition": {"budget": 11, "arm": "x"}},
        {"condition": {"budget": "10", "arm": "x"}},
        {"condition": {"budget": 10}},
        {"seed": 1},
        {"versions": {"numpy": "2.1"}},
        {"versions": {}},
        {"settings": {"device": "cuda"}},
    ]
    keys = {trial_key(**{**BASE, **variant}) for variant in variants}
    assert len(keys) == len(variants)


def test_equal_parts_have_equal_keys_in_whatever_form() -> None:
    numpy_form = {"arm": np.str_("x"), "budget": np.int64(10)}
    assert trial_key(**{**BASE, "condition": numpy_form}) == trial_key(**BASE) == trial_key(**BASE, settings={})
    # Fixed for good: ledgers outlive releases, and a change here would throw away everybody's finished trials.
    assert trial_key(**BASE) == "d125d3f68fdb6534a8cdfbfe0e0000b4"


def test_floats_are_exact_in_keys() -> None:
    values = [0.1 + 0.2, 0.3, float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-320]
    assert len({canonical_json({"x": value}) for value in values}) == len(values)


def test_conditions_that_are_no_json_give_a_sentence() -> None:
    with pytest.raises(TypeError, match="conditions must be JSON values"):
        trial_key(**{**BASE, "condition": {"budget": {1, 2}}})


def test_versions_are_those_installed() -> None:
    assert versions_of(["numpy", "no-such-distribution"]) == {"numpy": np.__version__, "no-such-distribution": "absent"}


def make_study(requirement: str = "rival==1.0", **changes: object) -> Study:
    peer = Peer(requirement, script="rival_peer.py", lock="rival.lock", **changes)  # type: ignore[arg-type]
    return Study(
        open=lambda spec: None,
        workloads={"smoke": [], "desk": []},
        plan=lambda tier, workload: [],
        trial=lambda workload, ctx: {},
        method="ours",
        arms="arm",
        block="seed",
        libraries={"theirs": ["rival"], "other": ["scipy"], "*": ["numpy"]},
        peers=[peer],
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rival_peer.py").write_text("def solve(x):\n    return x\n")
    (tmp_path / "rival.lock").write_text("rival==1.0\n")
    return tmp_path


def test_an_arm_depends_on_its_own_libraries_and_on_those_of_all(folder: Path) -> None:
    study = make_study()
    assert set(arm_versions(study, "ours", folder)) == {"numpy"}
    assert set(arm_versions(study, "other", folder)) == {"numpy", "scipy"}
    assert set(arm_versions(study, "theirs", folder)) == {"numpy", "rival"}
    assert set(arm_versions(study, "", folder)) == {"numpy", "scipy", "rival"}


def test_a_peer_counts_with_version_python_lock_and_script(folder: Path) -> None:
    found = [arm_versions(make_study(), "theirs", folder)["rival"]]
    found.append(arm_versions(make_study("rival==1.1"), "theirs", folder)["rival"])
    found.append(arm_versions(make_study(python=">=3.12"), "theirs", folder)["rival"])
    found.append(arm_versions(make_study(also=("dep==2",)), "theirs", folder)["rival"])
    (folder / "rival.lock").write_text("rival==1.0\ndep==3\n")
    found.append(arm_versions(make_study(), "theirs", folder)["rival"])
    (folder / "rival_peer.py").write_text("def solve(x):\n    return -x\n")
    found.append(arm_versions(make_study(), "theirs", folder)["rival"])
    assert len(set(found)) == len(found)
    (folder / "rival_peer.py").write_text('def solve(x):\n    "Solve."\n    return -x  # quickly\n')
    assert arm_versions(make_study(), "theirs", folder)["rival"] == found[-1]
