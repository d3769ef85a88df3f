"""What is sent to a host once, before its first trial: the job, and the files that its workloads are read from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cameraready.evidence.execution.worker import Job
from cameraready.evidence.specs import Spec
from cameraready.evidence.specs.spec import checkpoint_files, file_digest

CHUNK = 8 * 2**20  # bytes of a piece: all pass through the scheduler, whose memory is not ours
JOB = "job.pickle"
PREPARED = "prepared"


@dataclass(frozen=True)
class Item:
    """Something to be sent: its name below the run's folder, and its content or the file that has it."""

    name: str
    content: bytes | Path

    def pieces(self) -> Iterator[tuple[bytes, bool]]:
        """The content in pieces, and whether a piece is the last."""
        if isinstance(self.content, bytes):
            starts = range(0, max(len(self.content), 1), CHUNK)
            for start in starts:
                yield self.content[start : start + CHUNK], start == starts[-1]
            return
        with open(self.content, "rb") as file:
            piece = file.read(CHUNK)
            while True:
                following = file.read(CHUNK)
                yield piece, not following
                if not following:
                    return
                piece = following


def packed(job: Job, digests: Mapping[str, str]) -> list[Item]:
    """A job and the files of its specs, to be sent; `digests` names the prepared arrays of each workload.

    Raises
    ------
    TypeError
        Something of the user's cannot be sent to another process.
    """
    files: dict[str, Item] = {}
    specs = {name: _relative(spec, files) for name, spec in job.specs.items()}
    prepared = {name: f"{PREPARED}/{digest}.npz" for name, digest in digests.items()}
    shipped = replace(job, specs=specs, prepared=prepared, shipped=True)
    return [*files.values(), Item(JOB, shipped.packed())]


def placed(job: Job, folder: Path) -> Job:
    """A shipped job whose paths lead into this host's `folder`."""
    prepared = {name: folder / path for name, path in job.prepared.items()}
    return replace(job, specs={n: _absolute(s, folder) for n, s in job.specs.items()}, prepared=prepared, shipped=False)


def _relative(spec: Spec, files: dict[str, Item]) -> Spec:
    if not isinstance(spec, Spec) or not (spec.path or "data" in spec.options):
        return spec

    def send(path: str) -> str:
        if Path(path).is_dir():
            folder = f"files/{spec.content_digest()[:16]}/{Path(path).name}"
            for file in checkpoint_files(path):
                files[f"{folder}/{file.name}"] = Item(f"{folder}/{file.name}", file)
            return folder
        name = f"files/{file_digest(path)[:16]}/{Path(path).name}"
        files[name] = Item(name, Path(path))
        return name

    options = {n: send(value) if n == "data" else value for n, value in spec.options.items()}
    return replace(spec, path=send(spec.path) if spec.path else "", options=options)


def _absolute(spec: Spec, folder: Path) -> Spec:
    if not isinstance(spec, Spec) or not (spec.path or "data" in spec.options):
        return spec
    options = {n: str(folder / value) if n == "data" else value for n, value in spec.options.items()}
    return replace(spec, path=str(folder / spec.path) if spec.path else "", options=options)
