"""The error of a model whose parts are not found."""

from __future__ import annotations

from cameraready.models import ModelError


class UnknownArchitecture(ModelError):
    """A model is not a decoder-only language model whose parts are found by structure; the message says what was missing."""
