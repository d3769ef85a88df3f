"""GGUF files: checked before anything trusts them, and converted once to a safetensors folder."""

from cameraready.models.gguf.conversion import (
    already_converted,
    check_supported,
    converted,
    folder_of,
    needs_extra,
    supported_architectures,
)
from cameraready.models.gguf.header import Header, Tensor, read_header

__all__ = [
    "Header",
    "Tensor",
    "already_converted",
    "check_supported",
    "converted",
    "folder_of",
    "needs_extra",
    "read_header",
    "supported_architectures",
]
