"""Commands that take texts as they are typed.

Newer versions of typer convert every value through pydantic, even a text to a text and a missing option to None.
Importing pydantic takes longer than all else that `cameraready list` does, so it is left for the values that need it:
numbers and paths.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from typer.core import TyperCommand, TyperGroup

_TEXTS = (str, list[str], str | None, list[str] | None)


class PlainCommand(TyperCommand):
    """A command that converts only what is no text. Texts that are to be parsed by typer need a plain TyperCommand."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _spare_texts(self, ctx)
        return super().parse_args(ctx, args)


class PlainGroup(TyperGroup):
    """A group that converts only what is no text."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _spare_texts(self, ctx)
        return super().parse_args(ctx, args)


def _spare_texts(command: Any, ctx: Any) -> None:
    texts = _names_of_texts(inspect.unwrap(command.callback))
    for param in command.get_params(ctx):
        # Found before the method of its class. A version of typer that asks another method is only slower.
        param.process_value = functools.partial(_process, param, param.process_value, param.name in texts)


@functools.cache
def _names_of_texts(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(name for name, hint in get_type_hints(function).items() if hint in _TEXTS)


def _process(param: Any, convert: Callable[[Any, Any], Any], is_text: bool, ctx: Any, value: Any) -> Any:
    many = getattr(param, "multiple", False) or param.nargs == -1
    if value is None and not param.required:
        taken = () if many else None
    elif is_text and all(isinstance(item, str) for item in (value if many and value is not None else [value])):
        taken = value
    else:
        return convert(ctx, value)
    if param.required and param.value_is_missing(taken):
        return convert(ctx, value)  # which says so
    return taken if param.callback is None else param.callback(ctx, param, taken)
