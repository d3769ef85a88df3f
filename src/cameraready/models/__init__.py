"""One opener for language models, and the means to look inside them; nothing heavy is imported before it is used.

`open_model` opens a hub id, a local folder, a GGUF or a packaged model. `anatomy` finds the parts of any decoder-only
model by structure, `capture` and `intervene` read and change what flows through it and always clean up, `tiny_model`
and `tiny_tokenizer` make small ones in code. `cost_of` tells memory and hours from a configuration alone, and
`as_lm_eval` lets lm-eval's tasks judge any model, modified or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cameraready.models.cost import Cost, cost_of
    from cameraready.models.hooks import capture, intervene
    from cameraready.models.lm_eval import as_lm_eval, evaluate
    from cameraready.models.opener import LanguageModel, open_model, opened
    from cameraready.models.structure import Anatomy, UnknownArchitecture, anatomy
    from cameraready.models.tiny import tiny_model, tiny_tokenizer

__all__ = [
    "Anatomy",
    "Cost",
    "LanguageModel",
    "ModelError",
    "UnknownArchitecture",
    "anatomy",
    "as_lm_eval",
    "capture",
    "cost_of",
    "evaluate",
    "intervene",
    "open_model",
    "opened",
    "tiny_model",
    "tiny_tokenizer",
]

_LAZY = {
    "Anatomy": "structure",
    "Cost": "cost",
    "LanguageModel": "opener",
    "UnknownArchitecture": "structure",
    "anatomy": "structure",
    "as_lm_eval": "lm_eval",
    "capture": "hooks",
    "cost_of": "cost",
    "evaluate": "lm_eval",
    "intervene": "hooks",
    "open_model": "opener",
    "opened": "opener",
    "tiny_model": "tiny",
    "tiny_tokenizer": "tiny",
}


class ModelError(ValueError):
    """A model that cannot be had, opened or used as asked; its message says what to do."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'cameraready.models' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"cameraready.models.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
