"""Where a language model makes its logits, in which mode and with which arguments it is run."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from cameraready.models.structure.shapes import unwrapped


class Ending(NamedTuple):
    """How a model makes logits of its last hidden states: by its head, and what happens to the logits behind it, in order."""

    model: nn.Module
    head: nn.Module
    finish: tuple[Callable[[Tensor], Tensor], ...]
    vocab_size: int


#: By model: its head when it was last looked at, what happens behind it and the size of its vocabulary.
_ENDINGS: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any, int]] = weakref.WeakKeyDictionary()


def ending_of(model: nn.Module) -> Ending:
    """The last part of a model's `anatomy`, remembered for as long as it has the same head: looking at all layers takes a tenth of a second.

    Raises
    ------
    cameraready.models.UnknownArchitecture
        It is no decoder-only language model with attention.
    """
    from cameraready.models import anatomy

    head = None
    inner = next((part for part in unwrapped(model) if hasattr(part, "get_output_embeddings")), None)
    if inner is not None and model in _ENDINGS:
        head = inner.get_output_embeddings()
    if head is None or _ENDINGS[model][0]() is not head:
        with at_rest(model):  # it is run once, and draws no dropout
            parts = anatomy(model)
        head = parts.head
        _ENDINGS[model] = weakref.ref(head), parts.finish, parts.vocab_size
    _, finish, vocabulary = _ENDINGS[model]
    return Ending(model, head, finish, vocabulary)


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; each module gets back the mode that it had."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def positions_of(attention_mask: Tensor) -> Tensor:
    """Positions counted from each row's first token that is not padding, as generation counts them; shape (B, T)."""
    return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)


def takes(model: nn.Module, argument: str) -> bool:
    """Whether the transformers model inside all wrappers has such an argument of its forward pass."""
    from transformers import PreTrainedModel

    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)
    for kind in type(inner).__mro__:
        if "forward" not in vars(kind):
            continue
        parameters = inspect.signature(vars(kind)["forward"]).parameters
        if argument in parameters:
            return True
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return False
    return False
