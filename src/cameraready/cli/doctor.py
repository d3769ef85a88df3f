"""`doctor`: whether this machine and this installation are ready for a run."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from cameraready.cli import failing
from cameraready.cli.browse import complete_method
from cameraready.cli.failing import BadUsage

OLDEST_PYTHON = (3, 11)
LOW_MEMORY_GIB, LOW_DISK_GIB = 3.0, 2.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. Only ``broken`` makes the command fail."""

    state: Literal["fine", "note", "broken"]
    what: str
    text: str


def diagnose(
    method: Annotated[
        str | None,
        typer.Argument(help="Look at this method's study and its competitors as well.", autocompletion=complete_method),
    ] = None,
    ledger: Annotated[Path | None, typer.Option(help="The ledger to look at, if not the usual one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check that machine and installation are ready for a run.

    Looks at Python, extras, ledger, caches, competitors' interpreters, cores and memory. Exit code 1 if something is
    broken.
    """
    from cameraready.cli import terminal

    checks: list[Callable[[], Iterator[Finding]]] = [
        _python,
        _catalog,
        _extras,
        lambda: _ledger(ledger),
        _peer_environments,
        _interpreters,
        _machine,
        _linear_algebra,
    ]
    if method is not None:
        checks.append(lambda: _method(method))
    found = [finding for check in checks for finding in _guarded(check)]
    broken = [finding for finding in found if finding.state == "broken"]
    if as_json:
        terminal.print_json([asdict(finding) for finding in found])
    else:
        _print(found, len(broken))
    if broken:
        raise typer.Exit(failing.ERROR)


def _print(found: list[Finding], n_broken: int) -> None:
    from rich.text import Text

    from cameraready.cli import terminal

    out = terminal.console()
    width = max(len(finding.what) for finding in found) + 2
    for finding in found:
        sign, style = {"fine": ("✓", "green"), "note": ("·", "yellow"), "broken": ("✗", "bold red")}[finding.state]
        lead = f"{sign} {finding.what:<{width}}"
        text = Text(terminal.paragraph(finding.text, out.width, " " * len(lead), first=lead))
        text.stylize(style, 0, len(lead))
        out.print(text)
    out.print()
    if n_broken:
        out.print("1 thing is broken." if n_broken == 1 else f"{n_broken} things are broken.", style="bold red")
    else:
        out.print("Ready.", style="bold green")


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A check's findings. One that cannot be made because something is not installed is a note: `_extras` says what."""
    try:
        yield from check()
    except ModuleNotFoundError as error:
        yield Finding("note", "not checked", failing.sentence(error))


def _python() -> Iterator[Finding]:
    import cameraready

    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("fine", "cameraready", f"{cameraready.__version__}, in {Path(cameraready.__file__).parent}")
    if sys.version_info < OLDEST_PYTHON:
        yield Finding("broken", "python", f"{version} is too old; 3.11 or newer is needed")
    else:
        yield Finding("fine", "python", f"{version}, {sys.executable}")


def _catalog() -> Iterator[Finding]:
    from cameraready.catalog import CardError, catalog, rooms

    try:
        n = len(catalog())
        yield Finding("fine", "catalogue", f"{n} method{'s' if n != 1 else ''} in {', '.join(rooms())}")
    except CardError as error:
        yield Finding("broken", "catalogue", str(error))


def _extras() -> Iterator[Finding]:
    from importlib.metadata import PackageNotFoundError, version

    extras = failing.extras()
    if not extras:
        yield Finding("note", "extras", "unknown: this is a source tree that was never installed (pip install -e .)")
    for extra, distributions in extras.items():
        if extra in ("all", "dev"):
            continue
        missing = []
        for name in distributions:
            try:
                version(name)
            except PackageNotFoundError:
                missing.append(name)
        if missing:
            yield Finding("note", f"extra {extra}", f'without {", ".join(missing)}: pip install "cameraready[{extra}]"')
        else:
            yield Finding("fine", f"extra {extra}", "installed")


def _ledger(path: Path | None) -> Iterator[Finding]:
    from cameraready.evidence.execution.ledger import Ledger, LedgerError, default_path

    path = default_path() if path is None else path
    if not path.exists():
        yield Finding("fine", "ledger", f"none yet; the first run makes {path}")
    else:
        try:
            with Ledger.open(path) as store:
                store.check()
                size = _size(path.stat().st_size)
                yield Finding("fine", "ledger", f"{path}, {store.count():,} finished trials, {size}")
        except LedgerError as error:
            yield Finding("broken", "ledger", str(error))
    folder = _existing(path.parent)
    if not os.access(folder, os.W_OK):
        yield Finding(
            "broken", "ledger folder", f"{folder} cannot be written to; set CAMERAREADY_HOME to a folder of yours"
        )
    free = shutil.disk_usage(folder).free / 2**30
    state: Literal["fine", "note"] = "fine" if free >= LOW_DISK_GIB else "note"
    yield Finding(state, "disk", f"{free:,.1f} GiB free at {folder}")


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _peer_environments() -> Iterator[Finding]:
    from cameraready.evidence.peers.environments import cache_folder

    folder = cache_folder()
    built = [path for path in folder.glob("*") if path.is_dir()] if folder.exists() else []
    size = sum(os.lstat(Path(top, name)).st_size for top, _, names in os.walk(folder) for name in names)
    text = f"{len(built)} built, {_size(size)} in {folder}" if built else f"none built yet; they go to {folder}"
    yield Finding("fine", "competitors", text)


def _interpreters() -> Iterator[Finding]:
    from concurrent.futures import ThreadPoolExecutor

    from cameraready.evidence.peers.interpreters import of_pyenv, on_path, probe

    candidates = dict.fromkeys(path.resolve() for path in (Path(sys.executable), *on_path(), *of_pyenv()))
    with ThreadPoolExecutor(4) as probing:
        found = {interpreter.minor: interpreter for interpreter in probing.map(probe, candidates) if interpreter}
    usable = sorted(found, key=lambda minor: [int(part) for part in minor.split(".")])
    listed = ", ".join(f"{found[minor].version} ({found[minor].path})" for minor in usable)
    yield Finding("fine", "interpreters", f"{listed}; uv downloads others when a competitor needs one")


def _machine() -> Iterator[Finding]:
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = psutil.virtual_memory()
    free, total = memory.available / 2**30, memory.total / 2**30
    yield Finding("fine", "cores", f"{cores} usable; a run starts that many workers unless --jobs says otherwise")
    if free < LOW_MEMORY_GIB:
        yield Finding("note", "memory", f"only {free:.1f} of {total:.1f} GiB free; use --jobs 1")
    else:
        yield Finding("fine", "memory", f"{free:.1f} of {total:.1f} GiB free")


def _linear_algebra() -> Iterator[Finding]:
    import numpy as np
    from threadpoolctl import threadpool_info

    libraries = {
        f"{pool['internal_api']} {pool.get('version') or ''}".strip()
        for pool in threadpool_info()
        if pool["user_api"] == "blas"
    }
    text = ", ".join(sorted(libraries)) or "unknown"
    yield Finding("fine", "linear algebra", f"numpy {np.__version__} on {text}; workers use one thread each")


def _method(name: str) -> Iterator[Finding]:
    from cameraready.catalog import UnknownMethod
    from cameraready.evidence.checking import UsageError, load_subject
    from cameraready.evidence.peers import environments
    from cameraready.evidence.peers.interpreters import find_python

    try:
        subject = load_subject(name)
    except UnknownMethod as error:
        raise BadUsage(str(error)) from error
    except UsageError as error:
        yield Finding("broken", name, str(error))
        return
    yield Finding("fine", subject.card.slug, f"its study can be imported, {len(subject.study.claims)} claims")
    for peer in subject.study.peers:
        if environments.is_built(peer, subject.folder):
            yield Finding("fine", peer.name, f"{peer.requirement}, environment built")
            continue
        found = find_python(peer.python)
        python = (
            f"Python {found.version} at {found.path}"
            if found
            else f"a Python {peer.python} that uv will have to download"
        )
        yield Finding("fine" if found else "note", peer.name, f"{peer.requirement} will be built with {python}")


def _size(n_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} GB"
