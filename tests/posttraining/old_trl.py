"""The oldest supported TRL for the conformance test: fetched from the package registry, put in front of the newest in a process of its own."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

import pytest

#: In the process under the oldest TRL this variable names its version.
MARK = "CAMERAREADY_UNDER_OLD_TRL"
#: Set to 1, a registry that cannot be reached is a failure and no skip.
REQUIRE = "CAMERAREADY_REQUIRE_OLD_TRL"


@dataclass
class Outcome:
    """What a run of tests under another TRL came to."""

    passed: int
    failures: list[str] = field(default_factory=list)


def folder_or_skip(cache: Path, version: str) -> Path:
    """A folder that holds that release of TRL and nothing else; the test is skipped where it cannot be had."""
    from filelock import FileLock

    folder = cache / version
    with FileLock(str(cache / f"{version}.lock")):
        if not (folder / "trl" / "__init__.py").is_file():
            problem = _fetch(folder, version)
            if problem and os.environ.get(REQUIRE) == "1":
                pytest.fail(f"trl=={version} cannot be had: {problem}")
            if problem:
                pytest.skip(f"trl=={version} cannot be had from the package registry: {problem}")
    return folder


def _fetch(folder: Path, version: str) -> str:
    """Install trl alone into `folder` by pip, else by uv; what went wrong, empty where nothing did."""
    ways = [
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target"],
        [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--target"],
    ]
    problems = []
    for way in ways:
        try:
            done = subprocess.run(
                [*way, str(folder), f"trl=={version}"], capture_output=True, text=True, timeout=240, check=False
            )
        except subprocess.TimeoutExpired:
            problems.append("no answer in four minutes")
            continue
        if done.returncode == 0:
            return ""
        problems.append((done.stderr.strip().splitlines() or ["no reason was given"])[-1])
    return "; ".join(problems)


def run_under(folder: Path, tests: Path) -> Outcome:
    """Run a file of tests with the release in `folder` before all others."""
    root = tests.parents[2]
    report = folder.parent / f"{folder.name}-{os.getpid()}.xml"
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, MARK: folder.name}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(tests),
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    try:
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return Outcome(0, [done.stdout[-2000:] + done.stderr[-2000:]])
    finally:
        report.unlink(missing_ok=True)
    failures = [
        f"{case.get('name')}: {(each.text or each.get('message') or '')[-1500:]}"
        for case in cases
        for each in case
        if each.tag in ("failure", "error")
    ]
    passed = sum(not any(each.tag in ("failure", "error", "skipped") for each in case) for case in cases)
    return Outcome(passed, failures)
