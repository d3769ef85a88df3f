"""What a finished run is: verdicts, rows, provenance; how it is written down and read back."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import polars as pl

from cameraready.catalog import Card
from cameraready.evidence.outcomes import Failure, Verdict
from cameraready.evidence.study import Study

RESULTS_JSON = "results.json"
RESULTS_PARQUET = "results.parquet"

#: Fields of a verdict that `results.json` keeps, in its order.
_CLAIM_FIELDS = (
    "label", "claim", "paper", "scope", "verdict", "workload", "estimate", "low", "high", "blocks", "rule", "measure",
    "source", "peer", "seconds", "provisional", "reason", "failed_trials", "lost_blocks", "changed",
)  # fmt: skip


@dataclass(repr=False)
class Result:
    """The outcome of putting a method to the test.

    Attributes
    ----------
    answer : str
        One sentence of advice with its number.
    claims : list of Verdict
        One per claim and workload, pooled ones under workload ``"all"``.
    rows : polars.DataFrame
        Everything measured, a failed trial being one row whose ``status`` is not ``"done"``.
    failures : list of Failure
    notes : list of str
        What the reader must know: arms left out and why, an interrupted run, a changed rule.
    component : object
        The method, ready to use on the (first) workload of the run.
    """

    card: Card
    study: Study
    tier: str
    answer: str
    claims: list[Verdict]
    rows: pl.DataFrame
    failures: list[Failure] = field(default_factory=list)
    workloads: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    command: str = ""
    commit: str = ""
    started: str = ""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    incomplete: bool = False
    interrupted: bool = False
    reference: str = ""  # "package.module:STUDY"
    _open_component: Callable[[], Any] | None = field(default=None, repr=False)

    @cached_property
    def component(self) -> Any:
        if self._open_component is None:
            raise AttributeError(
                f"the study of {self.card.slug} offers no ready-made component; import it: {self.card.module}"
            )
        return self._open_component()

    @property
    def claims_shown(self) -> list[Verdict]:
        """Verdicts in reading order: by claim, the pooled one last."""
        return sorted(self.claims, key=lambda v: (v.number, v.label, v.workload == "all"))

    def to_json(self) -> dict[str, Any]:
        """The content of ``results.json``: plain JSON values, non-finite numbers as null."""
        claims = [{name: _plain(getattr(verdict, name)) for name in _CLAIM_FIELDS} for verdict in self.claims_shown]
        return {
            "method": self.card.slug,
            "study": self.reference,
            "tier": self.tier,
            "answer": self.answer,
            "commit": self.commit,
            "started": self.started,
            "seconds": round(self.seconds, 1),
            "command": self.command,
            "environment": self.environment,
            "workloads": self.workloads,
            "incomplete": self.incomplete,
            "notes": self.notes,
            "claims": claims,
            "failed_trials": [_plain(asdict(failure)) for failure in self.failures],
        }

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``results.json`` and ``results.parquet`` into `folder`, whole or not at all."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        _replace(folder / RESULTS_JSON, lambda path: path.write_text(text, encoding="utf-8"))
        _replace(
            folder / RESULTS_PARQUET,
            lambda path: self.rows.write_parquet(path, compression="zstd", compression_level=19),
        )
        return folder

    def report(self, folder: str | os.PathLike[str]) -> Path:
        """Write the HTML report into `folder` and return the file's path."""
        from cameraready.evidence.report import write_report

        return write_report(self, Path(folder))

    def export(self, to: str, out: str | os.PathLike[str], **options: Any) -> list[str]:
        """Write the result for another tool; the places written. See `cameraready.evidence.export.export`."""
        from cameraready.evidence.export import export

        return export(self, to, Path(out), **options).places

    def _repr_html_(self) -> str:
        from cameraready.evidence.report import render_summary

        return render_summary(self)

    def __str__(self) -> str:
        lines = [self.answer]
        lines += [f"  {v.label:>4}  {v.verdict:<12}  {v.workload}  {v.claim}" for v in self.claims_shown]
        lines += [f"Note: {note}" for note in self.notes]
        return "\n".join(lines)

    __repr__ = __str__  # a REPL shows the answer, not card, study and rows


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    number = float(value)
    return number if math.isfinite(number) else None


def make_frame(records: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    """One frame of all rows; columns are the union, in order of appearance, missing entries null.

    Integers and floats mixed in a column become floats, anything mixed with text becomes text, and lists (a budget grid in
    a condition, say) become their JSON text, so that a frame always has plain columns.
    """
    columns: dict[str, list[Any]] = {}
    for index, record in enumerate(records):
        for name, value in record.items():
            column = columns.setdefault(name, [])
            column.extend([None] * (index - len(column)))
            column.append(json.dumps(value) if isinstance(value, list | tuple | dict) else value)
    series = []
    for name, values in columns.items():
        values.extend([None] * (len(records) - len(values)))
        kinds = {type(value) for value in values if value is not None}
        if str in kinds and len(kinds) > 1:
            values = [value if value is None or isinstance(value, str) else str(value) for value in values]
        elif bool in kinds and len(kinds) > 1:
            values = [None if value is None else float(value) for value in values]
        dtype = pl.Float64 if float in kinds and str not in kinds else None
        series.append(pl.Series(name, values, dtype=dtype, strict=dtype is None))
    return pl.DataFrame(series)


def environment(libraries: Sequence[str]) -> dict[str, str]:
    """Where a run happened: interpreter, machine, and versions of `libraries` that are installed."""
    found = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "cameraready": _version("cameraready") or "source tree",
    }
    for name in sorted(set(libraries)):
        installed = _version(name)
        if installed:
            found[name] = installed
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def commit_of(folder: Path) -> str:
    """The git commit that `folder` is checked out from, with ``+changes`` when it differs; empty outside a checkout."""
    try:
        head = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=normal", "--", str(folder)],
            capture_output=True, text=True, timeout=10, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):  # no git, or no checkout: the version alone identifies the code
        return ""
    return head + ("+changes" if changed else "")
