"""Networks that are trained once on a machine: kept as safetensors under the digest of their recipe."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from cameraready.models._cache import entry, holds, models_folder

_WEIGHTS = "network.safetensors"
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def folder_of(recipe: dict[str, Any]) -> Path:
    """Where the network of a recipe is kept: ``flows/NAME-DIGEST`` in ``$CAMERAREADY_MODELS``, else in the folder for models.

    Raises
    ------
    ValueError
        The recipe has no fitting ``name`` or ``version``, or holds what JSON cannot.
    """
    return models_folder() / "flows" / f"{recipe.get('name')}-{_digest(recipe)[:16]}"


def cached(
    recipe: dict[str, Any], build: Callable[[], nn.Module], train: Callable[..., nn.Module], *, quiet: bool = False
) -> nn.Module:
    """The network of a recipe: read where it is kept, else trained once and kept.

    Parameters
    ----------
    recipe : dict of JSON values
        Everything that decides the weights: ``name`` (lower case, hyphens), ``version`` (an integer, to be raised when code or data change), network, data,
        steps, seeds ... Another recipe is another file.
    build : callable
        ``build()`` gives the network with its initial weights.
    train : callable
        ``train(network)`` gives the trained network. If it has a parameter ``checkpoint`` it is called as ``train(network, checkpoint=path)``; what it keeps
        there outlives an interruption and is removed when the training is done.
    quiet : bool
        Say nothing on stderr.

    Returns
    -------
    nn.Module
        In evaluation mode, without gradients; a new object at each call.

    Raises
    ------
    ValueError
        The recipe is not one; or the network that `build` makes does not fit the weights kept under this recipe (it changed and the version did not).

    Notes
    -----
    Two processes that ask at once train once: the second waits for the lock. The file appears whole or not at all. A file that was damaged (its hash differs)
    is told on stderr and made again.
    """
    from safetensors.torch import load_file, save_file

    digest, folder = _digest(recipe), folder_of(recipe)
    name = recipe["name"]
    checkpoint = folder.with_name(f"{folder.name}.checkpoint")

    def say(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    def make(into: Path) -> dict[str, Any]:
        say(f"{name}: training a small network once; it will be kept in {folder}.")
        resumable = "checkpoint" in inspect.signature(train).parameters
        net = train(build(), checkpoint=checkpoint) if resumable else train(build())
        bad = [key for key, value in net.state_dict().items() if not bool(value.isfinite().all())]
        if bad:
            raise FloatingPointError(
                f"training {name!r} ended with weights that are not finite ({bad[0]}); nothing is kept"
            )
        save_file({key: value.contiguous() for key, value in net.state_dict().items()}, into / _WEIGHTS)
        return {"recipe": recipe}

    if not holds(folder, digest):
        if folder.exists():
            say(f"{name}: the network in {folder} is damaged; it is trained again.")
        elif _busy(folder):
            say(f"{name}: another process is training this network; waiting for it.")
        entry(folder, source=digest, build=make)
        checkpoint.unlink(missing_ok=True)
    net = build()
    try:
        net.load_state_dict(load_file(folder / _WEIGHTS))
    except RuntimeError as error:
        raise ValueError(
            f"The network of recipe {name!r} does not fit the weights kept in {folder}: what builds it has changed, so raise the recipe's "
            f"version. {error}"
        ) from None
    return net.eval().requires_grad_(False)


def _digest(recipe: dict[str, Any]) -> str:
    name, version = recipe.get("name"), recipe.get("version")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"a recipe needs a 'name' of lower-case letters, digits and hyphens, got {name!r}")
    if isinstance(version, bool) or not isinstance(version, int):
        raise ValueError(f"recipe {name!r} needs a 'version', an integer, got {version!r}")
    try:
        text = json.dumps(recipe, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"recipe {name!r} must hold JSON values only: {error}") from None
    if json.loads(text) != recipe:
        raise ValueError(f"recipe {name!r} must hold JSON values only (lists, no tuples; keys are strings)")
    return hashlib.sha256(text.encode()).hexdigest()


def _busy(folder: Path) -> bool:
    """Whether another process holds the lock of this entry now."""
    from filelock import FileLock, Timeout

    lock = folder.with_name(folder.name + ".lock")
    if not lock.exists():
        return False
    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True
