"""How long the commands take that run nothing: ``python -m tests.cli.speed [REPEATS] [CARDS]``, with 76 cards by default."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.cli import many_cards

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import cameraready": ["-c", "import cameraready"],
    "--help": ["--help"],
    "run --help": ["run", "--help"],
    "list": ["list"],
    "list --json": ["list", "--json"],
    "show method-07": ["show", "method-07"],
    "find explain predictions": ["find", "explain", "predictions"],
    "find --instead-of shap": ["find", "--instead-of", "shap"],
    "find, 12 words": ["find", "how do i explain single predictions of my black box neural model quickly"],
    "find, typing errors": ["find", "explian", "predictoins"],
    "cite method-07": ["cite", "method-07"],
}


def main(repeats: int = 11, n_cards: int = many_cards.N_CARDS) -> None:
    with tempfile.TemporaryDirectory() as folder:
        many_cards.build(Path(folder), n_cards)
        environment = {**os.environ, "PYTHONPATH": folder, "COLUMNS": "100"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled already
        print(f"{n_cards} cards, {repeats} runs each; seconds\n{'':<26}  minimum   median  processor")
        for name, words in COMMANDS.items():
            line = [sys.executable, *(words if words[0] == "-c" else ["-m", "cameraready.cli", *words])]
            subprocess.run(line, env=environment, capture_output=True, check=True)  # compiles
            wall, processor = zip(*(_seconds(line, environment) for _ in range(repeats)), strict=True)
            print(f"{name:<26}  {min(wall):7.3f}  {statistics.median(wall):7.3f}    {min(processor):7.3f}")


def _seconds(line: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Wall time of a process, and the processor time that it used."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(line, env=environment, stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
