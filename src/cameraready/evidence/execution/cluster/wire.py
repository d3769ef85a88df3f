"""Messages between a Dask worker and its host process: pickles behind their length, through pipes."""

from __future__ import annotations

import pickle
import struct
from typing import Any, BinaryIO

_LENGTH = struct.Struct("!Q")


def send(stream: BinaryIO, message: Any) -> None:
    """Write one message. Raises `OSError` where nobody reads any more."""
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(_LENGTH.pack(len(content)) + content)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """The next message. Raises `EOFError` at the end of the stream, also in the middle of a message."""
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    return pickle.loads(_exactly(stream, length))


def _exactly(stream: BinaryIO, n: int) -> bytes:
    content = stream.read(n)
    if content is None or len(content) < n:
        raise EOFError("the other side has ended")
    return content
