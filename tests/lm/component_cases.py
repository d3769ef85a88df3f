"""What each method of the room hands to the conformance test that its components share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """A way to use a component on a causal language model, as its user would.

    `use(model, tokenizer)` must leave the model's weights alone (work on a copy where the component changes them);
    `refuses` names the kinds of tiny model that the component cannot serve and must refuse with a sentence.
    """

    name: str
    use: Callable[[Any, Any], Any]
    refuses: tuple[str, ...] = ()
