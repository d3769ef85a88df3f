"""The driver's connection to a Dask scheduler: made, watched, and told in sentences where it fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from cameraready.evidence.subject import UsageError

CONNECT_SECONDS = 8.0
SCHEMES = ("tcp", "tls", "ws", "wss", "ucx")
_CALL_SECONDS = 10.0


def resolve(scheduler: Any) -> tuple[str, Any]:
    """Address and security of a scheduler given as an address or as a `distributed.Client`.

    Raises
    ------
    UsageError
        It is neither, or the extra is not installed.
    """
    if isinstance(scheduler, str):
        _check_address(scheduler)
    try:
        import distributed
    except ModuleNotFoundError as error:
        raise UsageError(
            f'running on a cluster needs {error.name}: pip install "cameraready[study,cluster]"'
        ) from error
    if isinstance(scheduler, distributed.Client):
        if scheduler.status != "running" or scheduler.scheduler is None:
            raise UsageError("the Dask client given as scheduler is closed")
        return str(scheduler.scheduler.address), scheduler.security
    if isinstance(scheduler, str) and scheduler.strip():
        address = scheduler.strip()
        return address if "://" in address else f"tcp://{address}", None
    raise UsageError(
        f"scheduler must be an address such as tcp://host:8786, or a dask.distributed.Client; got {scheduler!r}"
    )


def _check_address(scheduler: str) -> None:
    """Raises `UsageError` for what cannot be an address; this takes no network and none of Dask."""
    text = scheduler.strip()
    scheme, has_scheme, rest = text.partition("://")
    host, colon, port = (rest if has_scheme else text).rpartition(":")
    fine = (not has_scheme or scheme in SCHEMES) and bool(host) and colon and port.isdecimal() and int(port) < 65_536
    if not fine and not (has_scheme and scheme == "inproc"):
        raise UsageError(
            f"scheduler must be an address such as tcp://host:8786 ({', '.join(SCHEMES)}), or a dask.distributed.Client;"
            f" got {scheduler!r}"
        )


@contextlib.contextmanager
def attempts_unlogged() -> Iterator[None]:
    """Dask does not log that a scheduler cannot be reached; we say it in a sentence."""
    log = logging.getLogger("distributed.client")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


class LinkLost(ConnectionError):
    """The scheduler is not there, or no longer."""


class _Call:
    """A call that is made where it is unpickled.

    Schedulers unpickle what they pass on, and need not have this package: they see a call of `pickle.loads`, with bytes.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._function = function
        self._args = args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._function, self._args


class Link:
    """An open connection. Only for use in the event loop in which it was opened."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @classmethod
    async def open(cls, address: str, security: Any, timeout: float = CONNECT_SECONDS) -> Link:
        """Connect. Raises `LinkLost` with the reason in a few words."""
        from distributed import Client

        client = Client(
            address, security=security, asynchronous=True, set_as_default=False, timeout=timeout, name="cameraready"
        )
        try:
            await asyncio.wait_for(client, timeout + 1.0)
        except Exception as error:
            with contextlib.suppress(Exception):  # there is nothing to close
                await client.close(timeout=0)
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise LinkLost(reason[0]) from error
        return cls(client)

    @property
    def is_up(self) -> bool:
        return self._client.status == "running"

    async def workers(self) -> dict[str, int]:
        """Threads of each Dask worker, by address. Raises `LinkLost`."""
        try:
            return dict(await asyncio.wait_for(self._client.scheduler.ncores(), _CALL_SECONDS))
        except (OSError, TimeoutError, AttributeError) as error:  # Attribute: the client is reconnecting
            raise LinkLost(str(error)) from error

    async def call(
        self, key: str, function: Callable[..., Any], *args: Any, to: str | None = None, priority: int = 0, **more: Any
    ) -> Any:
        """The value of a task that runs on the worker at `to`, on any where there is none named. Cancelled with us."""
        packed = pickle.dumps(_Call(partial(function, **more), args))
        future = self._client.submit(pickle.loads, packed, key=key, workers=to and [to], retries=0, priority=priority)
        try:
            return await future
        finally:
            future.release()

    async def close(self) -> None:
        """Release everything that runs for us on the cluster."""
        with contextlib.suppress(Exception):  # the scheduler may be gone
            await asyncio.wait_for(self._client.close(timeout=2), 5.0)
