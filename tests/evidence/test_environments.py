"""Peers' environments: built once, from a lock, apart from ours, and never left half done.

Nearly all tests install wheels that they make themselves, from a folder and without a network.
"""

import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from cameraready.evidence.peers.environments import (
    PeerError,
    PeerUnavailable,
    cache_folder,
    ensure,
    is_built,
    lock_of,
    open_peer,
)
from cameraready.evidence.peers.interpreters import find_python
from cameraready.evidence.study import Peer

SCRIPT = """
import cr_toy


def version():
    return cr_toy.VERSION


def asked(game, value):
    return game(value)
"""
SURROUNDINGS = """
import importlib.util
import sys


def path():
    return sys.path


def find(name):
    return importlib.util.find_spec(name) is not None
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache, and installers that know no index but a folder of wheels, which is returned."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("UV_FIND_LINKS", str(wheels))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return wheels


@pytest.fixture
def folder(tmp_path):
    """The folder of a study, with scripts."""
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    (folder / "surroundings.py").write_text(SURROUNDINGS)
    return folder


def wheel(wheels, name, version, requires=()):
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": metadata + "".join(f"Requires-Dist: {one}\n" for one in requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(wheels / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)


def environments():
    """Names in the cache beside locks and guards."""
    return sorted(path.name for path in cache_folder().glob("*") if path.suffix not in (".lock", ".guard", ".log"))


class TestBuilding:
    def test_built_once_and_used(self, home, folder):
        wheel(home, "cr_toy", "1.0")
        peer = Peer("cr_toy==1.0", script="script.py")
        steps = []
        assert not is_built(peer, folder)
        assert lock_of(peer, folder) == "cr_toy==1.0\n"
        python = ensure(peer, folder, progress=steps.append)
        assert is_built(peer, folder)
        assert [step.split()[0] for step in steps] == ["creating", "resolving", "installing"]
        assert ensure(peer, folder, progress=steps.append) == python
        assert len(steps) == 3
        assert python.is_relative_to(cache_folder())
        assert lock_of(peer, folder).splitlines() == [
            f"# python {sys.version_info.major}.{sys.version_info.minor}",
            "cr-toy==1.0",
        ]
        with open_peer(peer, folder) as remote:
            assert remote.version() == "1.0"
            assert remote.asked(lambda value: value + 1, 41) == 42
        assert not list(folder.rglob("__pycache__"))

    def test_apart_from_ours(self, home, folder, monkeypatch):
        wheel(home, "cr_toy", "1.0")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        with open_peer(Peer("cr_toy==1.0", script="surroundings.py"), folder) as remote:
            ours = [path for path in remote.path() if "site-packages" in path]
            assert len(ours) == 1
            assert Path(ours[0]).is_relative_to(cache_folder())
            assert remote.find("cr_toy")
            assert not any(remote.find(name) for name in ("cameraready", "execnet", "pytest", "sklearn"))
            with pytest.raises(PeerError, match="No module named 'numpy'"):
                remote.find(np.zeros(3))

    def test_variables_of_pip_are_passed_to_uv(self, home, folder, monkeypatch):
        wheel(home, "cr_toy", "1.0")
        monkeypatch.delenv("UV_FIND_LINKS")
        monkeypatch.delenv("UV_NO_INDEX")
        assert ensure(Peer("cr_toy"), folder).exists()

    @pytest.mark.slow
    def test_pip_inside_the_environment(self, home, folder, monkeypatch):
        wheel(home, "cr_toy", "1.0", requires=["cr_not_to_be_had>=2"])
        monkeypatch.setenv("UV_FIND_LINKS", "/not/there")
        monkeypatch.setenv("PIP_TARGET", str(folder / "elsewhere"))
        peer = Peer("cr_toy", installer="pip", dependencies=False, script="script.py")
        with open_peer(peer, folder) as remote:
            assert remote.version() == "1.0"
        assert not (folder / "elsewhere").exists()
        assert lock_of(peer, folder).splitlines()[1:] == ["cr_toy==1.0"]
        wheel(home, "cr_toy", "1.1")
        shutil.rmtree(ensure(peer, folder).parents[1])
        with open_peer(peer, folder) as remote:
            assert remote.version() == "1.0"

    def test_without_dependencies(self, home, folder):
        wheel(home, "cr_toy", "1.0", requires=["cr_not_to_be_had>=2"])
        with pytest.raises(PeerUnavailable) as caught:
            ensure(Peer("cr_toy==1.0"), folder)
        assert str(caught.value).startswith("the environment of peer cr_toy (cr_toy==1.0) cannot be built: ")
        assert "cr-not-to-be-had" in str(caught.value)  # the installer's own words
        with open_peer(Peer("cr_toy==1.0", dependencies=False, script="script.py"), folder) as remote:
            assert remote.version() == "1.0"

    def test_further_requirements(self, home, folder):
        wheel(home, "cr_toy", "1.0")
        wheel(home, "cr_extra", "2.0")
        peer = Peer("cr_toy", also=["cr_extra<3"], script="surroundings.py")
        with open_peer(peer, folder) as remote:
            assert remote.find("cr_extra")

    def test_different_wishes_are_different_environments(self, home, folder):
        wheel(home, "cr_toy", "1.0")
        wheel(home, "cr_toy", "1.1")
        pythons = {ensure(Peer(requirement), folder) for requirement in ("cr_toy==1.0", "cr_toy==1.1", "cr_toy")}
        assert len(pythons) == 3


class TestLocks:
    def test_rebuilt_as_first_resolved(self, home, folder):
        wheel(home, "cr_toy", "1.0")
        peer = Peer("cr_toy>=1", script="script.py")
        environment = ensure(peer, folder).parents[1]
        lock = lock_of(peer, folder)
        wheel(home, "cr_toy", "1.1")
        shutil.rmtree(environment)
        with open_peer(peer, folder) as remote:
            assert remote.version() == "1.0"
        assert lock_of(peer, folder) == lock

    def test_lock_beside_the_study(self, home, folder):
        wheel(home, "cr_toy", "1.0")
        wheel(home, "cr_toy", "1.1")
        (folder / "toy.lock").write_text("cr_toy==1.0\n")
        peer = Peer("cr_toy", lock="toy.lock", script="script.py")
        with open_peer(peer, folder) as remote:
            assert remote.version() == "1.0"
        assert lock_of(peer, folder) == "cr_toy==1.0\n"
        (folder / "toy.lock").write_text("cr_toy==1.1\n")
        assert not is_built(peer, folder)
        with open_peer(peer, folder) as remote:
            assert remote.version() == "1.1"

    def test_lock_of_something_else(self, home, folder):
        wheel(home, "cr_extra", "2.0")
        (folder / "toy.lock").write_text("cr_extra==2.0\n")
        peer = Peer("cr_toy", lock="toy.lock")
        with pytest.raises(PeerUnavailable, match="cr_toy is not among the installed packages"):
            ensure(peer, folder)
        assert not is_built(peer, folder)
        with pytest.raises(ValueError, match=r"names the lock none\.lock, which cannot be read"):
            ensure(Peer("cr_toy", lock="none.lock"), folder)


class TestTrouble:
    def test_nothing_is_left_of_a_failed_build(self, home, folder):
        peer = Peer("cr_toy==9.9")
        with pytest.raises(PeerUnavailable) as caught:
            ensure(peer, folder)
        assert "no versions fit together" in str(caught.value)
        assert environments() == []
        wheel(home, "cr_toy", "9.9")
        assert ensure(peer, folder).exists()

    def test_no_interpreter(self, home, folder, monkeypatch):
        monkeypatch.setenv("PATH", str(folder))
        monkeypatch.setenv("PYENV_ROOT", str(folder))
        with pytest.raises(PeerUnavailable, match=r"this machine has no Python >=3.99 on PATH or in pyenv"):
            ensure(Peer("cr_toy", python=">=3.99"), folder)

    def test_interpreter_that_went_away(self, home, folder):
        wheel(home, "cr_toy", "1.0")
        peer = Peer("cr_toy", script="script.py")
        python = ensure(peer, folder)
        python.unlink()
        python.symlink_to("/not/there/python")
        assert not is_built(peer, folder)
        with open_peer(peer, folder) as remote:
            assert remote.version() == "1.0"

    def test_leftover_of_a_killed_build_is_cleared(self, home, folder):
        wheel(home, "cr_toy", "1.0")
        peer = Peer("cr_toy")
        environment = ensure(peer, folder).parents[1]
        shutil.rmtree(environment)
        leftover = environment.with_name(environment.name + ".building-1")
        (leftover / "bin").mkdir(parents=True)
        assert not is_built(peer, folder)
        ensure(peer, folder)
        assert environments() == [environment.name]

    @pytest.mark.skipif(os.name == "nt", reason="sends a signal")
    def test_killed_builds_leave_nothing_that_is_taken_for_an_environment(self, home, folder):
        wheel(home, "cr_toy", "1.0")
        peer = Peer("cr_toy", script="script.py")
        for delay in np.linspace(0.15, 0.6, 6):
            builder = subprocess.Popen(
                [sys.executable, "-c", program(folder)], env=environment_with_path(), stderr=subprocess.DEVNULL
            )
            time.sleep(delay)
            builder.kill()
            builder.wait()
            if is_built(peer, folder):
                with open_peer(peer, folder) as remote:
                    assert remote.version() == "1.0"
                shutil.rmtree(ensure(peer, folder).parents[1])
        ensure(peer, folder)
        assert len(environments()) == 1

    def test_two_builders_build_once(self, home, folder):
        wheel(home, "cr_toy", "1.0")
        builders = [
            subprocess.Popen(
                [sys.executable, "-c", program(folder)], env=environment_with_path(), stdout=subprocess.PIPE, text=True
            )
            for _ in range(3)
        ]
        said = [builder.communicate()[0] for builder in builders]
        assert [builder.returncode for builder in builders] == [0, 0, 0]
        assert sum(text.count("installing") for text in said) == 1
        assert len({text.splitlines()[-1] for text in said}) == 1

    def test_scripts(self, home, folder):
        with pytest.raises(ValueError, match="peer cr_toy names no script"):
            open_peer(Peer("cr_toy"), folder)
        with pytest.raises(ValueError, match="the script of peer cr_toy is missing"):
            open_peer(Peer("cr_toy", script="none.py"), folder)

    def test_cache_is_the_users_where_nothing_else_is_said(self, monkeypatch):
        monkeypatch.delenv("CAMERAREADY_HOME", raising=False)
        assert cache_folder().name == "environments"
        assert "cameraready" in cache_folder().parts


def program(folder):
    return (
        "from pathlib import Path\nfrom cameraready.evidence.study import Peer\n"
        "from cameraready.evidence.peers.environments import ensure\n"
        f"print(ensure(Peer('cr_toy', script='script.py'), Path({str(folder)!r}), progress=print))\n"
    )


def environment_with_path():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


GAME = '''
import numpy as np
import shapiq


def leverage(game, n_players, budget, seed):
    """Shapley values by LeverageSHAP, and what it cost."""

    def batched(coalitions):
        return game(np.asarray(coalitions, dtype=bool))

    values = shapiq.LeverageSHAP(n=n_players, random_state=seed).approximate(budget, batched)
    return {"version": shapiq.__version__, "values": values.get_n_order_values(1), "calls": game.calls}
'''


@pytest.mark.peers
@pytest.mark.slow
def test_a_real_competitor_on_another_python(tmp_path, monkeypatch):
    """shapiq needs Python 3.12; its LeverageSHAP recovers the values of an additive game through batched callbacks."""
    if find_python(">=3.12") is None:
        pytest.skip("this machine has no Python >=3.12")
    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path))
    (tmp_path / "leverage.py").write_text(GAME)
    weights = np.random.default_rng(0).normal(size=20)
    rows = []

    def game(coalitions):
        rows.append(len(coalitions))
        return coalitions @ weights

    with open_peer(Peer("shapiq==1.8.0", python=">=3.12", also=["lightgbm"], script="leverage.py"), tmp_path) as remote:
        out = remote.leverage(game, 20, 500, 0)
        assert tuple(map(int, remote.python.split(".")[:2])) >= (3, 12)
    assert out["version"] == "1.8.0"
    np.testing.assert_allclose(out["values"], weights, atol=1e-8)
    assert sum(rows) <= 502
    assert out["calls"] == len(rows) <= 5
