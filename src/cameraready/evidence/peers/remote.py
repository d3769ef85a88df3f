"""Talking to a peer in its own environment: calls, batched callbacks, errors, and an end that leaves nothing behind."""

from __future__ import annotations

import difflib
import os
import shlex
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, cast

from cameraready.evidence.peers import server as peer_server

LOG_LINES = 15


class PeerUnavailable(RuntimeError):
    """A peer's environment cannot be built or started; the message says why and what would help."""


class PeerError(RuntimeError):
    """A peer's function raised, or its process ended.

    Attributes
    ----------
    kind : str
        Name of the remote exception's type; empty when the process ended.
    remote_traceback : str
        The traceback inside the peer's environment, or the last lines that it wrote.
    """

    def __init__(self, message: str, kind: str = "", remote_traceback: str = "") -> None:
        super().__init__(message, kind, remote_traceback)
        self.message = message
        self.kind = kind
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        return f"{self.message}\n{self.remote_traceback}".rstrip()


class Remote:
    """A running peer. The functions of its script are methods: ``remote.shapley_values(game, n_players=30, seed=0)``.

    Arguments and results are numbers, strings, bytes, None, lists, tuples, dicts and numpy arrays; arguments may also
    be functions. A function becomes a `Callback` on the far side: calling it there with arrays runs it here and costs
    one round trip, whatever the number of rows. What a function raises here is raised by the call itself.

    Not for use from several threads at once: one call at a time, and a callback must not call the same peer again.

    Attributes
    ----------
    name : str
        The peer's name.
    functions : list of str
        Functions of the script.
    python : str
        Version of the peer's interpreter.
    """

    def __init__(self, name: str, python: Path, script: Path, *, threads: int = 1) -> None:
        self.name = name
        self.functions: list[str] = []
        self.python = ""
        self._busy = threading.Lock()
        group, self._process, self._channel = spawner().submit(start_gateway, python).result()
        handle, path = tempfile.mkstemp(prefix=f"peer-{name}-", suffix=".log")
        self._log = os.fdopen(handle, errors="replace")
        self._end = weakref.finalize(self, end_gateway, group, self._log, path)  # also at exit, and when forgotten
        settings = {"parent": os.getpid(), "threads": threads, "script": str(script), "log": path}
        try:
            self._channel.send(settings)
            message = self._receive("while it started")
            if message[0] == "error":
                _, kind, text, trace = message
                raise PeerError(f"{script.name} cannot be loaded in the environment of {name}: {text}", kind, trace)
            _, self.functions, self.python = message
            if os.name == "posix":
                os.unlink(path)  # both sides hold it open; nothing is left behind however this process ends
            hidden = sorted(set(self.functions) & set(dir(self)))
            if hidden:
                raise ValueError(
                    f"{script.name} defines {', '.join(hidden)}, which a running peer uses itself; rename it"
                )
        except BaseException:
            self.kill()
            raise

    def __getattr__(self, function: str) -> Callable[..., Any]:
        if function.startswith("_"):
            raise AttributeError(function)
        if function not in self.functions:
            near = difflib.get_close_matches(function, self.functions, n=3) or self.functions
            raise AttributeError(
                f"the script of peer {self.name} has no function {function!r}; it has {', '.join(near)}"
            )

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(function, args, kwargs)

        call.__name__ = function
        return call

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        return not self._end.alive

    def close(self) -> None:
        """End the peer's process; waits up to a second for it to finish by itself, then kills it."""
        self._end()

    def kill(self) -> None:
        """End the peer's process at once, whatever it is doing."""
        if self._end.alive:
            self._process.kill()
            self._end()

    def _call(self, function: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.closed:
            raise PeerError(f"peer {self.name} has been closed")
        if not self._busy.acquire(blocking=False):
            raise PeerError(f"peer {self.name} is in the middle of a call; a callback must not call the peer it serves")
        try:
            return self._converse(function, args, kwargs)
        except Exception:
            raise
        except BaseException:
            self.kill()  # interrupted in mid-conversation: whose turn it is cannot be known
            raise
        finally:
            self._busy.release()

    def _converse(self, function: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        served: list[Callable[..., Any]] = []

        def register(callback: Callable[..., Any]) -> int:
            served.append(callback)
            return len(served) - 1

        encoded = [peer_server.encode(value, register) for value in args]
        self._send(("call", function, encoded, peer_server.encode(kwargs, register)))
        raised: Exception | None = None
        while True:
            message = self._receive(f"in {function}()")
            if message[0] == "ask":
                _, number, asked, named = message
                try:
                    value = served[number](*peer_server.decode(asked), **peer_server.decode(named))
                    answer: tuple[str, Any] = ("answer", peer_server.encode(value))
                except Exception as error:
                    raised = raised or error
                    answer = ("refused", f"{type(error).__name__}: {error}")
                self._send(answer)
                continue
            if raised is not None:
                raise raised
            if message[0] == "result":
                return peer_server.decode(message[1])
            _, kind, text, trace = message
            raise PeerError(f"{function}() of peer {self.name} raised {kind}: {text}", kind, trace)

    def _send(self, message: Any) -> None:
        import execnet

        try:
            self._channel.send(message)
        except execnet.DumpError as error:
            raise ValueError(
                f"the values for peer {self.name} cannot cross at once, 2 GiB is the limit: {error}"
            ) from None
        except OSError:
            raise self._ended("before it could be called") from None

    def _receive(self, moment: str) -> Any:
        try:
            return self._channel.receive()
        except EOFError:
            raise self._ended(moment) from None
        except self._channel.RemoteError as error:
            self.kill()
            raise PeerError(f"peer {self.name} broke off {moment}", "", str(error)) from None

    def _ended(self, moment: str) -> PeerError:
        """The error for a process that is gone, with its last words."""
        self._process.kill()  # the pipe is closed; should the process linger, it must not
        code = self._process.wait()
        words = self._log.read().splitlines()[-LOG_LINES:]
        self.close()
        how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
        return PeerError(f"the process of peer {self.name} {how} {moment}", "", "\n".join(words))


def end_gateway(group: Any, log: IO[str], path: str) -> None:
    group.terminate(timeout=1.0)
    log.close()
    Path(path).unlink(missing_ok=True)


_spawner: ThreadPoolExecutor | None = None


def spawner() -> ThreadPoolExecutor:
    """The one thread that starts peers, alive as long as this process.

    Linux ends a child that asked for it when the thread that started it ends, not when the process does; a peer opened
    in a short-lived thread would die with that thread.
    """
    global _spawner
    if _spawner is None:
        _spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="peers")
    return _spawner


def start_gateway(python: Path) -> tuple[Any, Any, Any]:
    """Start `python` with nothing of ours on its path; returns the execnet group, the process and an open channel."""
    import execnet

    group = execnet.Group()
    try:
        # -I: no PYTHON* variables, no user site, no current folder. execnet sends itself over the pipe.
        gateway = group.makegateway(f"popen//python={shlex.quote(python.as_posix())} -I -B")
        return group, cast(Any, gateway._io).popen, gateway.remote_exec(peer_server)
    except (OSError, EOFError, AssertionError) as error:
        group.terminate(timeout=0.1)
        raise PeerUnavailable(f"the interpreter {python} cannot be started: {error}") from error
