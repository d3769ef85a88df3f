"""How a command fails: one sentence on stderr, and the exit code."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import typer

ERROR, USAGE, CLAIM_FAILED, INTERRUPTED = 1, 2, 3, 130

MEANT_FOR_PEOPLE = (ValueError, RuntimeError, ImportError, ModuleNotFoundError, MemoryError)

_state = {"tracebacks": False}
_RUNS = ("run_methods",)  # commands whose work is kept trial by trial


class BadUsage(Exception):
    """The command line cannot be carried out as written; ends with exit code 2."""


def show_tracebacks(wanted: bool) -> None:
    """Show tracebacks of errors (``--debug``, or CAMERAREADY_DEBUG in the environment)."""
    _state["tracebacks"] = wanted or bool(os.environ.get("CAMERAREADY_DEBUG"))


def in_one_sentence(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, with any exception turned into a sentence on stderr and an exit code."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except (typer.Exit, typer.Abort):
            raise
        except BrokenPipeError:
            # The reader (`head`, say) has seen enough. Python would complain again when it flushes at exit.
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(ERROR) from None
        except KeyboardInterrupt:
            kept = (
                " Finished trials are kept; the same command goes on from there." if command.__name__ in _RUNS else ""
            )
            say(f"Interrupted.{kept}")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            tell(error)
            raise typer.Exit(USAGE if isinstance(error, BadUsage) else ERROR) from None

    return guarded


def tell(error: Exception, about: str = "") -> None:
    """Print `error` to stderr as a sentence, with its traceback under ``--debug``."""
    if _state["tracebacks"]:
        say("".join(traceback.format_exception(error)).rstrip())
    say(f"Error: {about}: {sentence(error)}" if about else f"Error: {sentence(error)}")


def sentence(error: Exception) -> str:
    """What went wrong, for the person at the terminal."""
    text = " ".join(str(error).split("\n")).strip()
    if isinstance(error, ModuleNotFoundError) and error.name and "pip install" not in text:
        if error.name.startswith("cameraready."):
            return f"this installation is incomplete: it has no module {error.name}"
        return missing(error.name)
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    # What the package raises on purpose is a sentence; anything else is named, for it may be a mistake of ours.
    ours = type(error).__module__.partition(".")[0] == "cameraready" or type(error) in MEANT_FOR_PEOPLE
    if ours and text:
        return text
    return f"{type(error).__name__}: {text or 'no message'} (cameraready --debug ... shows where)"


def missing(module: str) -> str:
    """The line that says how to get a module that is not installed."""
    name = module.partition(".")[0]
    # A wheel spells out the extras that others are made of: the smallest that has the module is the one to name.
    holding = [extra for extra, modules in extras().items() if name.replace("_", "-") in modules]
    extra = min(holding, key=lambda extra: len(extras()[extra]), default=None)
    if extra is None:
        return f"{name} is not installed: pip install {name.replace('_', '-')}"
    return f'{name} is not installed: pip install "cameraready[{extra}]"'


def extras() -> dict[str, list[str]]:
    """The distributions of every extra, read from our own metadata; empty in a source tree that was never installed."""
    import re
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        lines = metadata("cameraready").get_all("Requires-Dist") or []
    except PackageNotFoundError:
        return {}
    found: dict[str, list[str]] = {}
    for line in lines:
        marker = re.search(r"""extra\s*==\s*['"]([\w-]+)['"]""", line)
        name = re.match(r"[\w.-]+", line)
        if marker and name and name[0] != "cameraready":
            found.setdefault(marker[1], []).append(name[0].lower())
    return found


def say(text: str) -> None:
    """Print to stderr, which is where everything goes that is no result."""
    print(text, file=sys.stderr, flush=True)
