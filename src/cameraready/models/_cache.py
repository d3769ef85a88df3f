"""Where model files lie on this machine, folders in it that appear whole or not at all, and what tells weights apart."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cameraready.models import ModelError

#: Of the layout of an entry; entries of another number are made again.
FORMAT = 1

_MANIFEST = "manifest.json"
_SEEN = "verified.json"


def models_folder() -> Path:
    """``$CAMERAREADY_MODELS``, else ``$CAMERAREADY_HOME/models``, else ``models`` in the user's cache folder."""
    if folder := os.environ.get("CAMERAREADY_MODELS"):
        return Path(folder).expanduser()
    if home := os.environ.get("CAMERAREADY_HOME"):
        return Path(home).expanduser() / "models"
    try:
        import platformdirs
    except ModuleNotFoundError:
        raise ModelError(
            "Where may models be kept? Set CAMERAREADY_MODELS to a folder, or install what finds the user's cache "
            'folder: pip install "cameraready[lm]".'
        ) from None
    return platformdirs.user_cache_path("cameraready") / "models"


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file of `path` (made beside it); a process that ends lets go of it, however it ends."""
    from filelock import FileLock

    lock = path.with_name(path.name + ".lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.open("ab").close()
    except OSError as error:
        raise ModelError(
            f"The folder for models {lock.parent} cannot be written to ({error.strerror}); set CAMERAREADY_MODELS to a "
            "folder of yours."
        ) from None
    with FileLock(lock):
        yield


def entry(folder: Path, *, source: str, build: Callable[[Path], dict[str, Any]]) -> Path:
    """The folder `folder`, whole: taken as it is when its manifest holds, else made by `build` under a lock.

    Parameters
    ----------
    folder : Path
        Where the entry belongs.
    source : str
        SHA-256 of what it is made from; an entry made from anything else is not used.
    build : callable
        ``build(empty_folder) -> facts`` writes the files; `facts` go into the manifest. If it raises, nothing is left.
    """
    if holds(folder, source):
        return folder
    with locked(folder):
        if holds(folder, source):  # another process made it while we waited
            return folder
        if folder.exists() and not folder.is_dir():
            raise ModelError(f"{folder} is a file where a model's folder belongs; remove it.")
        _clear_leftovers(folder)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
        try:
            facts = build(made)
            _write_manifest(made, source, facts)
            if folder.exists():
                shutil.rmtree(folder)
            made.chmod(0o755)
            made.rename(folder)
        except OSError as error:
            if error.errno is None or not error.strerror:
                raise
            raise ModelError(f"Could not write the model into {folder.parent}: {error.strerror}.") from error
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def holds(folder: Path, source: str) -> bool:
    """Whether `folder` is a whole entry made from `source`: its manifest, sizes and hashes are right, and nothing else is there.

    A file that the manifest does not name would be read by transformers all the same (an adapter, an index of shards).
    Hashes are computed when an entry is first met, and again when a file's size, inode or times of change have moved.
    """
    manifest = read_manifest(folder)
    if manifest is None or manifest.get("format") != FORMAT or manifest.get("source_sha256") != source:
        return False
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        return False
    try:
        known = {*files, _MANIFEST, _SEEN}
        if any(path.name not in known and not path.name.startswith(".") for path in folder.iterdir()):
            return False
        if any((folder / name).stat().st_size != facts["size"] for name, facts in files.items()):
            return False
        now = {name: _stamp(folder / name) for name in files}
        digest = sha256_of(folder / _MANIFEST)
        if _read_json(folder / _SEEN) == {"manifest": digest, "stamps": now}:
            return True
        if any(sha256_of(folder / name) != facts["sha256"] for name, facts in files.items()):
            return False
    except (OSError, KeyError, TypeError):
        return False
    _remember(folder, {"manifest": digest, "stamps": now})
    return True


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of an entry; None where there is none that can be read."""
    found = _read_json(folder / _MANIFEST)
    return found if isinstance(found, dict) else None


def _write_manifest(folder: Path, source: str, facts: dict[str, Any]) -> None:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    files = {name: {"size": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)} for name in names}
    manifest = {"format": FORMAT, "source_sha256": source, **facts, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    for name in (*names, _MANIFEST):
        (folder / name).chmod(0o644)  # safetensors are written for their owner alone
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())  # on the disk before the folder has its name


def _clear_leftovers(folder: Path) -> None:
    """Remove what builds of this entry left that were killed; we hold the lock, so nobody works there."""
    for left in folder.parent.glob(f".{folder.name}.*.part"):
        shutil.rmtree(left, ignore_errors=True)


def _stamp(path: Path) -> list[int]:
    facts = path.stat()
    return [facts.st_size, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns]


def _remember(folder: Path, seen: dict[str, Any]) -> None:
    """Note that the hashes were right; a folder that cannot be written to is hashed again the next time."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".verified.", delete=False) as file:
            json.dump(seen, file)
        os.chmod(file.name, 0o644)
        os.replace(file.name, folder / _SEEN)
    except OSError:
        return


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


#: What makes a model: weights, configuration, tokenizer, templates.
_COUNTS = (".safetensors", ".json", ".model", ".txt", ".jinja")


def digest_of_text(text: str) -> str:
    """The SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of_folder(folder: Path) -> str:
    """Of configuration, tokenizer and weights, names and contents; reads every byte."""
    files = sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and path.suffix in _COUNTS and path.name not in (_MANIFEST, _SEEN)
    )
    return digest_of_text("\n".join(f"{path.name} {sha256_of(path)}" for path in files))


def digest_of_weights(model: Any) -> str:
    """Of a model's named weights and buffers, their dtypes and shapes, wherever they lie."""
    import torch

    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        raw = weight.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        digest.update(memoryview(raw))
    return digest.hexdigest()
