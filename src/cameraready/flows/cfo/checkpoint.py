"""A run's rounds on disk: networks as safetensors, everything else as JSON, each file written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RUN = "run.json"


class Checkpoint:
    """A folder that holds a run after its last finished round.

    Parameters
    ----------
    folder : Path
        Made if it is not there.
    settings : dict of JSON values
        What must be the same for a run to go on.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, json.loads(json.dumps(settings))

    def exists(self) -> bool:
        """Whether a round has been written."""
        return (self.folder / RUN).is_file()

    def load(self) -> dict[str, Any]:
        """Rounds (plain dicts, round 0 first), multipliers, numbers of the networks kept, and the generator's state.

        Raises
        ------
        ValueError
            The folder holds a run with other settings, which the message names, or its file cannot be read.
        """
        try:
            found = json.loads((self.folder / RUN).read_text(encoding="utf-8"), parse_constant=_refused)
            kept, rounds = dict(found["settings"]), [_decoded(dict(each)) for each in found["rounds"]]
            networks = [operator.index(number) for number in found["networks"]]
            state = torch.tensor(list(bytes.fromhex(found["generator"])), dtype=torch.uint8)
            lagrangian = dict(found["lagrangian"])
            if not rounds or rounds[-1]["round"] != len(rounds) - 1 or rounds[-1]["round"] not in networks:
                raise ValueError("rounds are missing")
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{self.folder / RUN} is no record of a run; name another folder, or remove this one"
            ) from None
        other = [key for key in {**kept, **self.settings} if not _same(kept.get(key), self.settings.get(key))]
        if other:
            told = "; ".join(
                f"{key}: {kept.get(key)!r} there, {self.settings.get(key)!r} here" for key in sorted(other)
            )
            raise ValueError(
                f"{self.folder} holds a run with other settings ({told}); name another folder, or remove this one"
            )
        return {"rounds": rounds, "networks": networks, "lagrangian": lagrangian, "generator": state}

    def network(self, number: int) -> dict[str, Tensor]:
        """The parameters after a round.

        Raises
        ------
        ValueError
            The file is missing or damaged.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(self._file(number))
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"the network of round {number} cannot be read from {self._file(number)} ({error}); remove {self.folder} to begin anew"
            ) from None

    def save(
        self,
        rounds: list[dict[str, Any]],
        networks: dict[int, dict[str, Tensor]],
        lagrangian: dict[str, Any],
        generator: torch.Generator,
    ) -> None:
        """Write what is new; the record comes last, so that it never names a network that is not there."""
        from safetensors.torch import save

        self.folder.mkdir(parents=True, exist_ok=True)
        newest = rounds[-1]["round"]
        for number, state in networks.items():
            if number == newest or not self._file(number).is_file():
                _write(self._file(number), save({key: value.clone().contiguous() for key, value in state.items()}))
        record = {
            "settings": self.settings,
            "rounds": [_encoded(each) for each in rounds],
            "networks": sorted(networks),
            "lagrangian": lagrangian,
            "generator": bytes(generator.get_state().cpu().tolist()).hex(),
        }
        _write(self.folder / RUN, json.dumps(record, allow_nan=False).encode())
        for left in self.folder.glob("round-*.safetensors"):
            if left.name not in {self._file(number).name for number in networks}:
                left.unlink()

    def _file(self, number: int) -> Path:
        return self.folder / f"round-{number:04d}.safetensors"


def digest(state: dict[str, Tensor]) -> str:
    """A digest of a network's parameters."""
    sha = hashlib.sha256()
    for key in sorted(state):
        value = state[key].detach().to("cpu").contiguous()
        sha.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
        sha.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def _encoded(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _encoded(each) for key, each in value.items()}
    return [_encoded(each) for each in value] if isinstance(value, list) else value


def _decoded(value: Any) -> Any:
    if value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, dict):
        return {key: _decoded(each) for key, each in value.items()}
    return [_decoded(each) for each in value] if isinstance(value, list) else value


def _same(kept: Any, given: Any) -> bool:
    """Equal; lists of numbers (what reward and constraint say of a few states) to rounding of other batches."""
    if isinstance(kept, list) and isinstance(given, list) and len(kept) == len(given):
        return all(_same(a, b) for a, b in zip(kept, given, strict=True))
    if isinstance(kept, float) and isinstance(given, float):
        return math.isclose(kept, given, rel_tol=1e-4, abs_tol=1e-6)
    return bool(kept == given)


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _write(path: Path, content: bytes) -> None:
    """Write a file under another name and move it into place."""
    part = path.with_suffix(path.suffix + ".part")
    with open(part, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
