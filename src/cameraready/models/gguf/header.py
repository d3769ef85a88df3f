"""The header of a GGUF file, every count and extent in it held against the size of the file."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cameraready.models import ModelError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
#: Longest array that is read (the largest vocabularies hold under a million strings) and the longest whose values are kept.
_LONGEST_ARRAY, _KEPT_ARRAY = 1 << 24, 4096
_LONGEST_KEY, _MOST_DIMENSIONS = 65535, 4


@dataclass(frozen=True)
class Tensor:
    """One tensor as the header declares it.

    Attributes
    ----------
    shape : tuple of int
        As PyTorch has it: rows first.
    kind : str
        Its storage type, e.g. ``"Q4_K"``.
    n_bytes : int
        Size in the file.
    start : int
        First byte in the file.
    """

    shape: tuple[int, ...]
    kind: str
    n_bytes: int
    start: int


@dataclass(frozen=True)
class Header:
    """What a GGUF file says about itself; every extent lies within the file.

    Attributes
    ----------
    path : Path
    version : int
    metadata : dict
        Key-value pairs; of a long array only its length, as ``{"length": n}``.
    tensors : dict of str to Tensor
    """

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, Tensor] = field(repr=False)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def n_parameters(self) -> int:
        """Numbers in the file's tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the tensors as they lie in the file."""
        return sum(tensor.n_bytes for tensor in self.tensors.values())


def read_header(path: str | Path) -> Header:
    """Read and check the header of a GGUF file, without its weights.

    Raises
    ------
    ModelError
        If the file is missing, no GGUF, of a version or byte order that cannot be read, truncated (the sentence says
        by how much) or declares counts, lengths or extents that the file cannot hold.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ModelError(f"There is no GGUF file {path}.")
    size = path.stat().st_size
    if size < 24:
        raise ModelError(f"{path} is no GGUF file: it has {size} bytes, and a header alone takes 24.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _Reader(path, content).header()


class _Reader:
    """Walks a header; every step is held against the end of the file."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path = path
        self.content = content
        self.size = len(content)
        self.at = 0

    def header(self) -> Header:
        if (magic := self.take(4)) != b"GGUF":
            hint = " It is a safetensors or other file?" if magic else ""
            raise ModelError(f"{self.path} is no GGUF file: it begins with {magic!r} and not with b'GGUF'.{hint}")
        version = self.number("<I")
        if version not in (2, 3):
            if int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3):
                raise ModelError(f"{self.path} is a big-endian GGUF file, which cannot be read here.")
            raise ModelError(f"{self.path} is of GGUF version {version}; versions 2 and 3 can be read.")
        n_tensors, n_pairs = self.number("<Q"), self.number("<Q")
        # The shortest pair takes 13 bytes, the shortest tensor 24.
        self.bounded(n_pairs, 13, "key-value pairs")
        self.bounded(n_tensors, 24, "tensors")
        metadata: dict[str, Any] = {}
        for _ in range(n_pairs):
            key = self.text("a key", _LONGEST_KEY)
            if not key or key in metadata:
                raise self.damaged(f"the key {key!r} is empty or comes twice")
            metadata[key] = self.value(self.number("<I"), key)
        declared = self.tensors(n_tensors)
        return Header(self.path, version, metadata, self.within_file(declared, metadata))

    def tensors(self, n_tensors: int) -> dict[str, Tensor]:
        sizes = _storage_types()
        declared: dict[str, Tensor] = {}
        for _ in range(n_tensors):
            name = self.text("a tensor's name", 1024)
            if not name or name in declared:
                raise self.damaged(f"the tensor {name!r} has no name or comes twice")
            n_dimensions = self.number("<I")
            if not 1 <= n_dimensions <= _MOST_DIMENSIONS:
                raise self.damaged(
                    f"the tensor {name!r} has {n_dimensions} dimensions; 1 to {_MOST_DIMENSIONS} are possible"
                )
            shape = tuple(self.number("<Q") for _ in range(n_dimensions))[::-1]
            kind, offset = self.number("<I"), self.number("<Q")
            if kind not in sizes:
                raise self.damaged(
                    f"the tensor {name!r} is stored as type {kind}, which the installed gguf does not know"
                )
            label, per_block, block_bytes = sizes[kind]
            count = math.prod(shape)
            if count == 0 or shape[-1] % per_block:
                raise self.damaged(
                    f"the tensor {name!r} of shape {shape} cannot be stored in {label} blocks of {per_block}"
                )
            declared[name] = Tensor(shape, label, count // per_block * block_bytes, offset)
        return declared

    def within_file(self, declared: dict[str, Tensor], metadata: dict[str, Any]) -> dict[str, Tensor]:
        if not declared:
            raise ModelError(f"{self.path} holds no weights, only a header; it is a vocabulary or was cut short.")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or isinstance(alignment, bool) or not 1 <= alignment <= 1 << 20:
            raise self.damaged(f"general.alignment is {alignment!r}")
        base = -(-self.at // alignment) * alignment
        tensors = {name: replace(tensor, start=base + tensor.start) for name, tensor in declared.items()}
        last = max(tensors, key=lambda name: tensors[name].start + tensors[name].n_bytes)
        needed = tensors[last].start + tensors[last].n_bytes
        if needed > self.size:
            raise ModelError(
                f"{self.path} is truncated or damaged: its tensors need {needed:,} bytes and the file has {self.size:,}, "
                f"{needed - self.size:,} too few ({last} lies beyond its end). Get it again."
            )
        reach = base
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
            if tensor.start < reach or (tensor.start - base) % alignment:
                raise self.damaged(f"the tensor {name!r} overlaps another or is not aligned")
            reach = tensor.start + tensor.n_bytes
        return tensors

    def value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text(f"the value of {key}", self.size)
        if kind != _ARRAY:
            raise self.damaged(f"the value of {key} is of type {kind}, which does not exist")
        inner, length = self.number("<I"), self.number("<Q")
        if inner not in _SCALARS and inner != _STRING:
            raise self.damaged(f"{key} is an array of type {inner}")
        width = 8 if inner == _STRING else struct.calcsize(_SCALARS[inner])
        self.bounded(length, width, f"items of {key}")
        if length > _LONGEST_ARRAY:
            raise self.damaged(f"{key} is said to have {length:,} items")
        if inner == _STRING:
            for _ in range(length):
                self.skip(self.number("<Q"), key)
        elif length <= _KEPT_ARRAY:
            return [self.number(_SCALARS[inner]) for _ in range(length)]
        else:
            self.skip(length * width, key)
        return {"length": length}

    def number(self, form: str) -> Any:
        width = struct.calcsize(form)
        self.fits(width, "a number")
        (found,) = struct.unpack_from(form, self.content, self.at)
        self.at += width
        return found

    def text(self, what: str, longest: int) -> str:
        length = self.number("<Q")
        if length > longest:
            raise self.damaged(f"{what} is said to be {length:,} bytes long")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.damaged(f"{what} is not UTF-8") from None

    def take(self, length: int) -> bytes:
        self.fits(length, "a text")
        self.at += length
        return self.content[self.at - length : self.at]

    def skip(self, length: int, key: str) -> None:
        self.fits(length, key)
        self.at += length

    def fits(self, length: int, what: str) -> None:
        if length > self.size - self.at:
            raise ModelError(
                f"{self.path} is truncated or damaged: {what} at byte {self.at:,} would take {length:,} bytes, and the file ends "
                f"after {self.size - self.at:,}. Get it again."
            )

    def bounded(self, count: int, each: int, what: str) -> None:
        if count * each > self.size - self.at:
            raise self.damaged(f"{count:,} {what} do not fit into {self.size:,} bytes")

    def damaged(self, why: str) -> ModelError:
        return ModelError(f"{self.path} has a damaged header: {why}. Get it again.")


def _storage_types() -> dict[int, tuple[str, int, int]]:
    """Of each storage type its name, numbers a block and bytes a block."""
    try:
        from gguf import GGML_QUANT_SIZES
    except ModuleNotFoundError:
        raise ModelError('GGUF files need gguf: pip install "cameraready[lm]"') from None
    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
