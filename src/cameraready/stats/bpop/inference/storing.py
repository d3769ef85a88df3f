"""A posterior in a file: NumPy's own format with a JSON header, and no pickle."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import asdict
from os import PathLike
from typing import Any

import numpy as np

from cameraready.stats.bpop.inference.bitsets import EncodedTraces
from cameraready.stats.bpop.inference.prior import LatentPrior
from cameraready.stats.bpop.inference.sampler import Chain, Target

FORMAT = "cameraready.stats.bpop 1"
_TRACES = ("steps", "start", "choice", "count")
_CHAIN = ("latent", "dimension", "scalars", "after", "before", "counts")


def write(
    path: str | PathLike[str],
    *,
    actions: Sequence[Hashable],
    places: Sequence[Sequence[int]],
    settings: dict[str, Any],
    target: Target,
    chains: Sequence[Chain],
    orders: Sequence[np.ndarray],
    scalars: Sequence[np.ndarray],
) -> None:
    """Write everything that a posterior consists of."""
    header = {
        "format": FORMAT,
        "actions": [_plain(action) for action in actions],
        "places": [list(map(int, trace)) for trace in places],
        "settings": settings,
        "prior": asdict(target.prior),
        "beta": target.beta,
        "eps": target.eps,
        "chains": [{"n_done": c.n_done, "generator": c.generator.bit_generator.state} for c in chains],
    }
    arrays = {f"traces.{name}": getattr(target.traces, name) for name in _TRACES}
    for i, chain in enumerate(chains):
        arrays |= {f"chain{i}.{name}": getattr(chain, name) for name in _CHAIN}
        arrays |= {f"kept{i}.orders": orders[i], f"kept{i}.scalars": scalars[i]}
    with open(path, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, header=np.array(json.dumps(header)), **arrays)


def read(path: str | PathLike[str]) -> dict[str, Any]:
    """The arguments that `write` was given, less the path.

    Raises
    ------
    ValueError
        For a file that `write` did not make.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            stored = {name: file[name] for name in file.files}
        header = json.loads(str(stored["header"]))
        known = header["format"] == FORMAT
    except (KeyError, TypeError, ValueError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path} is no posterior that was saved here ({error})") from None
    if not known:
        raise ValueError(f"{path} has the format {header['format']!r}, expected {FORMAT!r}")
    actions = [_hashable(action) for action in header["actions"]]
    traces = EncodedTraces(**{name: stored[f"traces.{name}"] for name in _TRACES})
    law = LatentPrior(**header["prior"]), tuple(header["beta"]), tuple(header["eps"])
    chains = []
    for i, told in enumerate(header["chains"]):
        generator = np.random.default_rng()
        generator.bit_generator.state = told["generator"]
        arrays = {name: stored[f"chain{i}.{name}"] for name in _CHAIN}
        chains.append(Chain(generator=generator, n_done=told["n_done"], **arrays))
    return {
        "actions": actions,
        "places": header["places"],
        "settings": header["settings"],
        "target": Target(traces, len(actions), *law),
        "chains": chains,
        "orders": [stored[f"kept{i}.orders"] for i in range(len(chains))],
        "scalars": [stored[f"kept{i}.scalars"] for i in range(len(chains))],
    }


def _plain(action: Hashable) -> Any:
    """`action` as JSON has it; a tuple becomes a list."""
    if isinstance(action, np.generic):
        action = action.item()
    if isinstance(action, tuple):
        return [_plain(part) for part in action]
    if action is None or isinstance(action, (str, int, float, bool)):
        return action
    raise TypeError(f"the action {action!r} is neither text nor a number, nor a tuple of them, and cannot be saved")


def _hashable(action: Any) -> Hashable:
    return tuple(_hashable(part) for part in action) if isinstance(action, list) else action
