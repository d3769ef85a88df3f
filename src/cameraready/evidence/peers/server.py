"""The far side of a peer: runs inside the peer's environment and lets the parent call its script's functions.

execnet sends this file's source to the peer's interpreter, so it must stand alone: the standard library only, numpy
where arrays cross, Python 3.8 or newer, and never `cameraready`. `encode` and `decode` are used on both sides.

One call is a conversation in strict turns over one channel, in tuples:

    parent -> peer   ("call", function, args, kwargs)
    peer -> parent   ("ask", callback id, args, kwargs)      any number of times, each answered by
    parent -> peer   ("answer", value) or ("refused", text)
    peer -> parent   ("result", value) or ("error", type name, text, traceback)
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

THREAD_SETTINGS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


REAPERS: list[subprocess.Popen[bytes]] = []
PLAIN = frozenset((bool, int, float, complex, str, bytes))


class CallbackFailed(RuntimeError):
    """The parent's function, called from here, raised; the parent knows the exception itself."""


def encode(value: Any, register: Callable[[Any], int] | None = None) -> Any:
    """`value` in the types that execnet carries.

    Arrays become dtype, shape and bytes, whatever their number of rows. Tuples are marked, since plain tuples are the
    marks. `register` turns a callable into a number; without it callables are refused.
    """
    if value is None or type(value) in PLAIN:
        # execnet fails on integers below -2**31, and on all beyond some digits where Python limits their text.
        return ("int", hex(value)) if type(value) is int and not -(2**31) <= value < 2**31 else value
    numpy = sys.modules.get("numpy")  # no array exists where numpy was never imported
    if numpy is not None:
        if isinstance(value, numpy.ndarray):
            return encode_array(value, numpy)
        if isinstance(value, numpy.generic):
            item = value.item()
            return encode(item) if type(item) in PLAIN else encode_array(numpy.asarray(value), numpy)
    if isinstance(value, list):
        return [encode(item, register) for item in value]
    if isinstance(value, tuple):
        return ("tuple", [encode(item, register) for item in value])
    if isinstance(value, dict):
        return {encode_key(key): encode(item, register) for key, item in value.items()}
    for kind in (int, float, str):  # enumerations and other subclasses, which execnet does not know
        if isinstance(value, kind):
            return encode(getattr(kind, f"__{kind.__name__}__")(value))
    if callable(value) and register is not None:
        return ("function", register(value))
    raise TypeError(
        f"a value of type {type(value).__name__} cannot cross to or from a peer's environment; numbers, strings, "
        "bytes, None, lists, tuples, dicts and numpy arrays can, and functions as arguments of a call"
    )


def encode_key(key: Any) -> Any:
    plain = encode(key)
    if isinstance(plain, tuple) and plain[0] != "int":
        raise TypeError(
            f"a dict with the key {key!r} cannot cross to or from a peer's environment; use plain strings or numbers"
        )
    return plain


def encode_array(array: Any, numpy: Any) -> Any:
    if array.dtype.hasobject or array.dtype.kind == "V":
        raise TypeError(
            f"an array of dtype {array.dtype} cannot cross to or from a peer's environment; pass array.tolist(), "
            "or arrays of numbers, booleans, dates or fixed-width strings"
        )
    return ("array", array.dtype.str, list(array.shape), numpy.ascontiguousarray(array).tobytes())


def decode(value: Any, function: Callable[[int], Any] | None = None) -> Any:
    """The inverse of `encode`; `function` makes a callable of a number. Arrays are writable copies."""
    if isinstance(value, list):
        return [decode(item, function) for item in value]
    if isinstance(value, dict):
        return {decode(key): decode(item, function) for key, item in value.items()}
    if not isinstance(value, tuple):
        return value
    mark = value[0]
    if mark == "array":
        import numpy

        _, dtype, shape, data = value
        # bytearray: an array over bytes would be read-only, which compiled libraries often refuse.
        return numpy.ndarray(tuple(shape), dtype, bytearray(data))
    if mark == "int":
        return int(value[1], 16)
    if mark == "tuple":
        return tuple(decode(item, function) for item in value[1])
    if mark == "function" and function is not None:
        return function(value[1])
    raise TypeError(f"cannot read a value marked {mark!r}")


class Callback:
    """A function of the parent, as the peer sees it.

    ``callback(*args, **kwargs)`` is evaluated in the parent; pass whole batches, each call is one round trip.

    Attributes
    ----------
    seconds : float
        Wall-clock time spent waiting for answers so far, so that a script can report its own time without it.
    calls : int
        Number of calls so far.
    """

    def __init__(self, channel: Any, number: int) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._channel = channel
        self._number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            self._channel.send(("ask", self._number, encode(list(args)), encode(kwargs)))
            message = self._channel.receive()
            if message[0] == "answer":
                return decode(message[1])
            raise CallbackFailed(message[1])
        finally:
            self.seconds += time.perf_counter() - started
            self.calls += 1


def die_with_parent(parent: int) -> None:
    """End this process and all it started once `parent` is gone, even while compiled code holds the interpreter."""
    if os.name == "posix":
        # A group of its own: Ctrl-C in the terminal reaches the driver alone, and leftovers can be ended together.
        os.setpgid(0, 0)
        start_reaper()
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=watch_parent, args=(parent,), daemon=True).start()


def start_reaper() -> None:
    """A shell that sleeps on a pipe and, when this process is gone for whatever reason, kills its process group."""
    ours, theirs = os.pipe()
    # Not waited for: it outlives this process by design.
    command = ["/bin/sh", "-c", f"read line; kill -9 -{os.getpgid(0)}"]
    REAPERS.append(subprocess.Popen(command, stdin=ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    os.close(ours)
    # A forked child (multiprocessing) would keep the pipe open and the shell asleep.
    os.register_at_fork(after_in_child=lambda: os.close(theirs))


def watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def load_script(path: str) -> dict[str, Callable[..., Any]]:
    """Import the file at `path` and return its own public functions."""
    sys.dont_write_bytecode = True  # the study's folder may be read-only, and is not ours to litter
    name = "peer_script"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling inside the peer look modules up here
    spec.loader.exec_module(module)
    return {
        key: value
        for key, value in vars(module).items()
        if callable(value) and not key.startswith("_") and getattr(value, "__module__", None) == name
    }


def report_error(channel: Any, error: BaseException) -> None:
    frames = error.__traceback__ and error.__traceback__.tb_next  # without this file's own frame
    trace = "".join(traceback.format_exception(type(error), error, frames))
    channel.send(("error", type(error).__name__, str(error), trace))


def serve(channel: Any) -> None:
    settings = channel.receive()
    die_with_parent(settings["parent"])
    for name in THREAD_SETTINGS:
        os.environ[name] = str(settings["threads"])
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"):
        os.environ.pop(name, None)  # this interpreter ignores them (-I); the processes it starts must as well
    log = os.open(settings["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        functions = load_script(settings["script"])
    except BaseException as error:
        report_error(channel, error)
        return
    channel.send(("ready", sorted(functions), ".".join(map(str, sys.version_info[:3]))))
    while True:
        try:
            message = channel.receive()
        except EOFError:
            return
        _, name, args, kwargs = message
        callbacks: dict[int, Callback] = {}

        def callback(number: int, known: dict[int, Callback] = callbacks) -> Callback:
            return known.setdefault(number, Callback(channel, number))

        try:
            value = functions[name](*decode(args, callback), **decode(kwargs, callback))
            answer = ("result", encode(value))
        except EOFError:
            return  # the parent went away in the middle of a callback
        except (Exception, SystemExit) as error:
            report_error(channel, error)
            continue
        channel.send(answer)


if __name__ == "__channelexec__":
    serve(channel)  # type: ignore[name-defined] # noqa: F821
