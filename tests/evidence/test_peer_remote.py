"""Talking to a peer: what crosses, in how many messages, what errors look like, and that nothing is left running."""

import ast
import enum
import http
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cameraready.evidence.peers import server as peer_server
from cameraready.evidence.peers.remote import PeerError, PeerUnavailable, Remote

SCRIPT = Path(__file__).with_name("peer_script.py")
PYTHON = Path(sys.executable)


@pytest.fixture(scope="module")
def remote():
    with Remote("toy", PYTHON, SCRIPT) as remote:
        yield remote


@pytest.fixture
def own():
    """A peer of the test's own, which the test may break."""
    with Remote("toy", PYTHON, SCRIPT) as remote:
        yield remote


class Colour(str, enum.Enum):  # noqa: UP042 (what users write)
    RED = "red"


def gone(pid, seconds=10.0):
    """Whether process `pid` ends within `seconds`; a zombie has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


class TestCrossing:
    @given(plain)
    @settings(max_examples=150, deadline=None)
    def test_plain_values_come_back_equal_and_of_the_same_type(self, remote, value):
        back = remote.echo(value)
        assert back == value
        assert repr(back) == repr(value)  # 1, 1.0 and True are equal, and so are 0.0 and -0.0

    @pytest.mark.parametrize(
        "array",
        [
            np.zeros((0, 3)),
            np.array(2.5),
            np.asfortranarray(np.arange(12.0).reshape(3, 4)),
            np.arange(24).reshape(2, 3, 4)[:, ::2, ::-1],
            np.array([True, False]),
            np.arange(3, dtype=">i4"),
            np.array([np.nan, np.inf, -0.0], "f2"),
            np.array([1 + 2j]),
            np.array(["", "ü", "long text"]),
            np.array(["2026-01-01", "NaT"], "M8[D]"),
            np.array([b"a", b"bc"]),
        ],
        ids=lambda array: f"{array.dtype.str}{array.shape}",
    )
    def test_arrays_keep_dtype_shape_and_bits(self, remote, array):
        back = remote.echo({"inside": [array]})["inside"][0]
        assert back.dtype == array.dtype
        assert back.shape == array.shape
        assert back.tobytes() == array.tobytes()
        assert back.flags.writeable

    @pytest.mark.parametrize(
        "value",
        [2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 10**5000, -(10**5000)],
        ids=lambda value: str(value.bit_length()),
    )
    def test_integers_of_any_size(self, remote, value):
        assert remote.echo([value, {value: "key"}]) == [value, {value: "key"}]

    def test_enumerations_become_their_values(self, remote):
        assert remote.echo([http.HTTPStatus.NOT_FOUND, Colour.RED]) == [404, "red"]

    def test_numpy_scalars_become_numbers(self, remote):
        assert remote.echo([np.float32(0.5), np.int64(2**62), np.bool_(True), np.str_("a")]) == [0.5, 2**62, True, "a"]
        assert type(remote.echo(np.float64(1.0))) is float

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (object(), "a value of type object cannot cross"),
            ({1, 2}, "a value of type set cannot cross"),
            (np.array([None, "a"]), "an array of dtype object cannot cross"),
            (np.zeros(2, [("a", "f8")]), "cannot cross"),
            ({(1, 2): 3}, "a dict with the key (1, 2) cannot cross"),
        ],
    )
    def test_what_cannot_cross_is_refused_here(self, remote, value, message):
        with pytest.raises(TypeError) as caught:
            remote.echo([value])
        assert message in str(caught.value)
        assert remote.echo(1) == 1

    def test_what_cannot_come_back_is_refused_there(self, remote):
        with pytest.raises(PeerError, match="a value of type object cannot cross"):
            remote.unsendable()


class TestCallbacks:
    def test_a_batch_is_one_message_whatever_its_rows(self, remote):
        batches = []

        def game(rows):
            batches.append(rows)
            return rows @ np.arange(64.0)

        out = remote.batch(game, 10_000, 64)
        assert [rows.shape for rows in batches] == [(10_000, 64)]
        assert batches[0].dtype == bool
        assert (batches[0] == out["rows"]).all()
        np.testing.assert_array_equal(out["values"], out["rows"] @ np.arange(64.0))
        assert out["calls"] == 1

    def test_waiting_is_counted(self, remote):
        def slow(rows):
            time.sleep(0.05)
            return rows.sum(axis=1)

        out = remote.batch(slow, 10, 3, times=4)
        assert out["calls"] == 4
        assert 4 * 0.05 <= out["waited"] <= out["elapsed"]

    def test_several_functions_and_keywords(self, remote):
        out = remote.composed(lambda x: x + 1, lambda x: x * 10, np.arange(3), scale=2)
        assert out.tolist() == [2, 22, 42]

    def test_what_a_callback_raises_here_is_raised_here(self, remote):
        def broken(rows):
            raise ZeroDivisionError("in the game")

        with pytest.raises(ZeroDivisionError, match="in the game"):
            remote.batch(broken, 10, 3)
        assert remote.echo(1) == 1

    def test_a_script_cannot_hide_it(self, remote):
        def broken(value):
            raise ZeroDivisionError("in the game")

        with pytest.raises(ZeroDivisionError):
            remote.swallow(broken)

    def test_a_callback_may_not_call_its_own_peer(self, remote):
        with pytest.raises(PeerError, match="in the middle of a call"):
            remote.batch(lambda rows: remote.echo(1), 1, 1)

    def test_an_interrupt_ends_the_peer(self, own):
        pid = own.surroundings()["pid"]

        def interrupted(rows):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            own.batch(interrupted, 1, 1)
        assert own.closed
        assert gone(pid)
        with pytest.raises(PeerError, match="peer toy has been closed"):
            own.echo(1)


class TestErrors:
    def test_remote_exception_with_its_traceback(self, remote):
        with pytest.raises(PeerError) as caught:
            remote.raise_key_error()
        assert caught.value.kind == "KeyError"
        assert "raise_key_error() of peer toy raised KeyError: 'no such player'" in str(caught.value)
        assert f'File "{SCRIPT}", line' in caught.value.remote_traceback
        assert "server.py" not in caught.value.remote_traceback
        assert remote.echo(1) == 1

    def test_leaving_the_interpreter_is_an_error_too(self, remote):
        with pytest.raises(PeerError, match="SystemExit: done here"):
            remote.leave()
        assert remote.echo(1) == 1

    def test_wrong_arguments(self, remote):
        with pytest.raises(PeerError, match="TypeError"):
            remote.echo(1, 2)

    def test_unknown_function(self, remote):
        with pytest.raises(AttributeError, match="no function 'ecko'; it has echo"):
            remote.ecko(1)

    def test_death_with_last_words(self, own):
        with pytest.raises(PeerError) as caught:
            own.print_and_die(3)
        message = str(caught.value)
        assert "the process of peer toy exited with status 3 in print_and_die()" in message
        assert "last words" in message
        assert "to the error stream" in message
        assert own.closed

    def test_death_by_a_signal(self, own):
        with pytest.raises(PeerError, match=r"was killed by signal 9 in die_by_signal\(\)"):
            own.die_by_signal()

    def test_script_that_cannot_be_imported(self, tmp_path):
        script = tmp_path / "s.py"
        script.write_text("import not_there_at_all\n")
        with pytest.raises(
            PeerError, match=r"s\.py cannot be loaded in the environment of toy: No module named"
        ) as caught:
            Remote("toy", PYTHON, script)
        assert f'File "{script}", line 1' in caught.value.remote_traceback

    def test_script_with_a_reserved_name(self, tmp_path):
        script = tmp_path / "s.py"
        script.write_text("def close(): ...\n")
        with pytest.raises(ValueError, match="defines close"):
            Remote("toy", PYTHON, script)

    def test_interpreter_that_is_none(self, tmp_path):
        for name, content in (("missing", None), ("failing", "#!/bin/sh\nexit 1\n")):
            python = tmp_path / name
            if content:
                python.write_text(content)
                python.chmod(0o755)
            with pytest.raises(PeerUnavailable, match="cannot be started"):
                Remote("toy", python, SCRIPT)


class TestSurroundings:
    def test_nothing_of_ours_is_visible(self, monkeypatch, tmp_path):
        (tmp_path / "sneaky.py").write_text("")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "sneaky.py"))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        with Remote("toy", PYTHON, SCRIPT, threads=2) as remote:
            seen = remote.surroundings()
        assert str(tmp_path) not in seen["path"]
        assert "" not in seen["path"]
        assert not [name for name in seen["modules"] if name.startswith(("cameraready", "execnet", "numpy"))]
        assert "PYTHONPATH" not in seen["variables"]
        assert seen["variables"]["OMP_NUM_THREADS"] == "2"
        assert seen["group"] == seen["pid"]  # Ctrl-C in the terminal reaches the driver alone

    def test_only_own_functions_of_the_script_are_offered(self, remote):
        tree = ast.parse(SCRIPT.read_text())
        assert remote.functions == sorted(node.name for node in tree.body if isinstance(node, ast.FunctionDef))

    def test_far_side_stands_alone_on_old_interpreters(self):
        tree = ast.parse(Path(peer_server.__file__).read_text(), feature_version=(3, 8))
        imported = {
            name.split(".")[0]
            for node in ast.walk(tree)
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert imported <= set(sys.stdlib_module_names) | {"numpy"}


class TestEnds:
    def test_close_leaves_nothing(self, own):
        pids = [own.surroundings()["pid"], *own.leave_children()]
        own.close()
        assert [pid for pid in pids if not gone(pid)] == []
        own.close()

    def test_a_forgotten_peer_ends(self):
        remote = Remote("toy", PYTHON, SCRIPT)
        pid = remote.surroundings()["pid"]
        del remote
        assert gone(pid)

    def test_a_peer_outlives_the_thread_that_opened_it(self):
        opened = []
        thread = threading.Thread(target=lambda: opened.append(Remote("toy", PYTHON, SCRIPT)))
        thread.start()
        thread.join()
        time.sleep(0.2)
        with opened[0] as remote:
            assert remote.echo("alive") == "alive"

    @pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a peer in compiled code ends when that returns")
    @pytest.mark.parametrize("call", ["hold_the_interpreter()", "batch(lambda rows: time.sleep(3600), 1, 1)"])
    def test_no_orphan_after_kill_9_in_the_middle_of_a_call(self, call):
        program = (
            "import sys, time\nfrom pathlib import Path\n"
            "from cameraready.evidence.peers.remote import Remote\n"
            f"remote = Remote('toy', Path(sys.executable), Path({str(SCRIPT)!r}))\n"
            "print(remote.surroundings()['pid'], *remote.leave_children(), flush=True)\n"
            f"remote.{call}\n"
        )
        search = os.pathsep.join(path for path in sys.path if path)
        driver = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": search}
        )
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(pids) == 3
        time.sleep(0.3)  # into the call
        assert all(psutil.pid_exists(pid) for pid in pids)
        driver.kill()
        driver.wait()
        driver.stdout.close()
        assert [pid for pid in pids if not gone(pid)] == []
