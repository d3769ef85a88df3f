"""How cards and verdicts look in a terminal."""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from cameraready.catalog import Card

if TYPE_CHECKING:
    from cameraready.evidence.outcomes import Verdict
    from cameraready.evidence.results import Result

PIPED_WIDTH = 110  # where nobody says how wide the reader's screen is


def console() -> Console:
    """Where results go: stdout, coloured on a terminal only (NO_COLOR is honoured), never cut off."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an old code page has no check marks; the words remain
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED_WIDTH
    return Console(width=max(width, 40), highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Machine output: JSON on stdout, nothing else."""
    import json

    print(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False))


def paragraph(text: str, width: int, indent: str = "", first: str | None = None) -> str:
    """`text` wrapped to `width`, its lines indented by `indent`, the first one led by `first`."""
    lead = indent if first is None else first
    return textwrap.fill(text, width, initial_indent=lead, subsequent_indent=indent, break_on_hyphens=False)


def print_methods(out: Console, cards: Sequence[Card], by_room: bool) -> None:
    """One paragraph a method, under its room's name if wanted. Piped output keeps a method on a line, for grep."""
    width = out.width if out.is_terminal else 10_000
    indent = "  " if by_room else ""
    name_width = max((len(card.slug) for card in cards), default=0) + 2
    room = None
    lines = []
    for card in cards:
        if by_room and card.room != room:
            room = card.room
            lines.append(Text(room, style="bold"))
        lead = f"{indent}{card.slug:<{name_width}}"
        text = Text(paragraph(card.purpose, width, " " * len(lead), first=lead))
        text.stylize("bold cyan", len(indent), len(indent) + len(card.slug))
        lines.append(text)
    out.print(Text("\n").join(lines))  # at once: printing has a price of its own


def print_verdicts(out: Console, claims: Sequence[Verdict]) -> None:
    """Each claim as a sentence, and under it a line a workload."""
    from cameraready.evidence.report import wording

    words = max((len(wording.word(v)) for v in claims), default=0)
    columns = [max((len(cell) for cell in column), default=0) for column in zip(*map(_cells, claims), strict=True)]
    labels = max((len(v.label) for v in claims), default=0) + 2
    pad = " " * labels
    for label, group in wording.by_claim(claims).items():
        scope = f" ({group[0].scope})" if group[0].scope else ""
        sentence = f"{group[0].claim or group[0].paper}{scope}"
        out.print(Text(paragraph(sentence, out.width, pad, first=f"{label:<{labels}}")))
        for verdict in group:
            look = wording.LOOKS[verdict.verdict]
            line = Text(pad)
            line.append(f"{look.sign} {wording.word(verdict):<{words}}", style=f"bold {look.colour}")
            for cell, width in zip(_cells(verdict), columns, strict=True):
                line.append(f"  {cell:<{width}}")
            line.rstrip()
            out.print(line)
            if remarks := wording.remarks(verdict):
                out.print(Text(paragraph("; ".join(remarks), out.width, pad + "  "), style="dim"))


def _cells(verdict: Verdict) -> tuple[str, ...]:
    from cameraready.evidence.report import wording

    blocks = wording.count(verdict.blocks, "block") if verdict.blocks else ""
    return wording.place(verdict.workload), wording.estimate(verdict), verdict.rule, blocks


def print_result(out: Console, result: Result, page: str, name: str = "") -> None:
    """The answer, then the verdicts, then what went wrong, then where the report is."""
    out.print(Text(f"{name}: {result.answer}" if name else result.answer, style="bold"))
    out.print()
    print_verdicts(out, result.claims_shown)
    out.print()
    if result.failures:
        out.print(paragraph(failures_sentence(result), out.width))
    for note in result.notes:
        out.print(paragraph(note, out.width, "  ", first="Note: "))
    out.print(f"Report: {page}")


def failures_sentence(result: Result) -> str:
    """``3 trials failed: svarm 2 (timeout), kernel 1 (raised). The report shows why.``"""
    from cameraready.evidence.report import wording

    counts: dict[tuple[str, str], int] = {}
    for failure in result.failures:
        key = (failure.arm or "trial", failure.status)
        counts[key] = counts.get(key, 0) + 1
    listed = ", ".join(f"{arm} {n} ({status})" for (arm, status), n in counts.items())
    return f"{wording.count(len(result.failures), 'trial')} failed: {listed}. The report shows why."
