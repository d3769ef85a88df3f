"""Numbers in the tables of a guide, held to the results that ship."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path


def measured_lines(guide: Path, heading: str) -> list[str]:
    """The lines of tables under a heading that show an estimate with its interval."""
    section = guide.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("|") and "[" in line]


def not_shown(lines: Sequence[str], package: str, wanted: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of the wanted verdicts, each a label and a workload, that no line shows with estimate, interval and verdict."""
    saved = json.loads((resources.files(package) / "results.json").read_text())
    claims = {(claim["label"], claim["workload"]): claim for claim in saved["claims"]}

    def is_shown(claim: dict[str, float | str]) -> bool:
        number = f"{claim['estimate']:.3g} [{claim['low']:.3g}, {claim['high']:.3g}]"
        return any(number in line and f"| {claim['verdict']} |" in line for line in lines)

    return [key for key in wanted if not is_shown(claims[key])]
