"""A run's rounds on disk: networks as safetensors, everything else as JSON, each file written whole or not at all."""

from __future__ import annotations

import hashlib
import json
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
        """Rounds, multipliers, numbers of the networks kept, and the generator's state.

        Raises
        ------
        ValueError
            The folder holds a run with other settings, which the message names, or its file cannot be read.
        """
        try:
            found = json.loads((self.folder / RUN).read_text(encoding="utf-8"))
            kept = found["settings"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(
                f"{self.folder / RUN} is no record of a run; name another folder, or remove this one"
            ) from None
        other = [key for key in {**kept, **self.settings} if kept.get(key) != self.settings.get(key)]
        if other:
            told = "; ".join(
                f"{key}: {kept.get(key)!r} there, {self.settings.get(key)!r} here" for key in sorted(other)
            )
            raise ValueError(
                f"{self.folder} holds a run with other settings ({told}); name another folder, or remove this one"
            )
        state = torch.tensor(list(bytes.fromhex(found["generator"])), dtype=torch.uint8)
        return {**found, "generator": state}

    def network(self, number: int) -> dict[str, Tensor]:
        """The parameters after a round."""
        from safetensors.torch import load_file

        return load_file(self._file(number))

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
            "rounds": rounds,
            "networks": sorted(networks),
            "lagrangian": lagrangian,
            "generator": bytes(generator.get_state().cpu().tolist()).hex(),
        }
        _write(self.folder / RUN, json.dumps(record).encode())
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


def _write(path: Path, content: bytes) -> None:
    """Write a file under another name and move it into place."""
    part = path.with_suffix(path.suffix + ".part")
    with open(part, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
