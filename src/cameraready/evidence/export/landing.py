"""Writes files whole or not at all: everything is prepared aside, then moved into place."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from cameraready.evidence.subject import UsageError


def land_files(folder: Path, files: Mapping[str, bytes]) -> list[str]:
    """Write `files` (name -> content) into `folder`, and give their paths. None is touched unless all could be written."""
    make_folder(folder)
    asides: list[tuple[Path, Path]] = []
    try:
        for name, content in files.items():
            place = folder / name
            if place.is_dir():
                raise UsageError(f"{place} is a folder; move it away, or name another --out")
            aside = folder / f".{name}.{os.getpid()}"
            asides.append((aside, place))
            aside.write_bytes(content)
        for aside, place in asides:
            aside.replace(place)
    finally:
        for aside, _ in asides:
            aside.unlink(missing_ok=True)
    return [str(place) for _, place in asides]


@contextlib.contextmanager
def landing_folder(place: Path) -> Iterator[Path]:
    """A folder beside `place` that becomes `place` when the block ends well, and vanishes when it does not."""
    make_folder(place.parent)
    if place.exists() and not place.is_dir():
        raise UsageError(f"{place} is a file; move it away, or name another --out")
    aside = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    old = aside.with_name(f"{aside.name}.old")
    try:
        os.chmod(aside, 0o777 & ~_umask())
        yield aside
        if place.exists():
            place.replace(old)
        try:
            aside.replace(place)
        except OSError:
            if old.exists():
                old.replace(place)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Make `folder` with its parents.

    Raises
    ------
    UsageError
        If a file is in the way.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"{folder} cannot be a folder: {error.filename} is a file") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
