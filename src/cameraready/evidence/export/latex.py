r"""The verdicts as a LaTeX table, to be brought into a paper by ``\input``. Needs booktabs and nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cameraready.evidence.export import Written
from cameraready.evidence.export.landing import land_files
from cameraready.evidence.outcomes import Verdict
from cameraready.evidence.report import page_name, wording
from cameraready.evidence.rules import MIN_BLOCKS
from cameraready.tex import escape

if TYPE_CHECKING:
    from cameraready.evidence.results import Result

# table* spans both columns of a two-column paper and is a plain table elsewhere; longtable refuses two columns. What
# does not fit a page goes on in a further float. A claim has a line of its own, so that the numbers fit narrow pages.
WORKLOAD_SHARE = 0.3
LINES_A_PAGE = 53  # of footnotesize, in the smallest usual page
CLAIM_CHARACTERS, WORKLOAD_CHARACTERS, CAPTION_CHARACTERS = 84, 24, 68  # on a line there

COLUMNS = rf"@{{\extracolsep{{\fill}}}}p{{{WORKLOAD_SHARE}\textwidth}}lllr@{{}}"
HEAD = r"Claim, workload & Scope & Verdict & Estimate [95\,\%] & Blocks \\"


def write_table(result: Result, out: Path) -> Written:
    """``NAME-verdicts.tex`` in the folder `out`, or the file `out` itself if it is called ``.tex``."""
    folder, name = (out.parent, out.name) if out.suffix == ".tex" else (out, f"{page_name(result)}-verdicts.tex")
    places = land_files(folder, {name: table(result).encode("ascii")})
    return Written(places, rf"In the paper: \usepackage{{booktabs}} and \input{{{Path(name).stem}}}")


def table(result: Result) -> str:
    """The source: one ``table*`` float, or several where one page does not hold it; ASCII only."""
    caption = _caption(result)
    parts = list(_pages(wording.by_claim(result.claims_shown), len(caption) / CAPTION_CHARACTERS))
    floats = [_float(part, caption, label_of(result), first=index == 0) for index, part in enumerate(parts)]
    head = f"% Verdicts of {escape(result.card.slug)}, written by cameraready. Needs \\usepackage{{booktabs}}.\n"
    return head + "\n".join(floats)


def label_of(result: Result) -> str:
    r"""What ``\ref`` takes: ``tab:cameraready-oddshap``."""
    return f"tab:cameraready-{page_name(result)}"


def _float(groups: Sequence[Sequence[Verdict]], caption: str, label: str, *, first: bool) -> str:
    body = "\\addlinespace\n".join("".join(f"{row} \\\\\n" for row in _rows(group)) for group in groups)
    named = (
        f"\\caption{{{caption}}}\n\\label{{{label}}}" if first else "\\addtocounter{table}{-1}\n\\caption{(continued)}"
    )
    return (
        f"\\begin{{table*}}[tp]\n\\centering\n{named}\n\\smallskip\n\\footnotesize\n\\setlength{{\\tabcolsep}}{{3pt}}\n"
        f"\\begin{{tabular*}}{{\\textwidth}}{{{COLUMNS}}}\n\\toprule\n{HEAD}\n\\midrule\n"
        f"{body}\\bottomrule\n\\end{{tabular*}}\n\\end{{table*}}\n"
    )


def _rows(group: Sequence[Verdict]) -> Iterator[str]:
    """The claim over the whole width, and under it a line a workload."""
    head = group[0]
    sentence = rf"\textbf{{{escape(head.label)}}}\enspace {escape(head.claim or head.paper)}"
    yield rf"\multicolumn{{5}}{{@{{}}p{{\textwidth}}@{{}}}}{{\raggedright {sentence}}}"
    for verdict in group:
        word = escape(verdict.verdict) + (r"\textsuperscript{p}" if verdict.provisional else "")
        blocks = f"{verdict.blocks:,}".replace(",", "{,}") if verdict.blocks else ""
        place = rf"\raggedright\quad {_breakable(wording.place(verdict.workload))}" if verdict.workload else ""
        yield " & ".join((place, escape(verdict.scope), word, estimate(verdict), blocks))


def estimate(verdict: Verdict) -> str:
    """``$0.0287$ $[0.0159, 0.0518]$``; empty where nothing was measured."""
    if verdict.estimate is None:
        return ""
    text = f"${number(verdict.estimate)}$"
    if verdict.low is not None and verdict.high is not None and verdict.blocks >= MIN_BLOCKS:
        text += f" $[{number(verdict.low)}, {number(verdict.high)}]$"
    return text


def number(value: float) -> str:
    r"""`value` to three significant digits, for math mode: ``12{,}300``, ``-3.1 \times 10^{-7}``, ``\infty``."""
    if math.isnan(value):
        return r"\mathrm{NaN}"
    if math.isinf(value):
        return r"\infty" if value > 0 else r"-\infty"
    mantissa, _, exponent = wording.number(value).partition("e")
    mantissa = mantissa.replace(",", "{,}")
    return rf"{mantissa} \times 10^{{{int(exponent)}}}" if exponent else mantissa


def _breakable(name: str) -> str:
    """A workload's name, which may be a path or an id, with places to break the line."""
    return r"\allowbreak{}".join(escape(part) for part in re.split(r"(?<=[/\\:._=-])(?=.)", name))


def _caption(result: Result) -> str:
    card = result.card
    title = f" ({escape(card.title)})" if card.title != card.slug else ""
    date = result.started[:10]
    facts = [f"{escape(result.tier)} run"]
    facts += [f"of {escape(date)}"] if date else []
    sha, changed, _ = result.commit.partition("+")
    if sha:
        facts.append(rf"at commit \texttt{{{escape(sha[:12])}}}" + (" with uncommitted changes" if changed else ""))
    shown = [verdict for verdict in result.claims if verdict.verdict != "untested"]
    notes = [
        "Estimates with their 95\\,\\% intervals over blocks; the rule of each claim was fixed before the run.",
        *([r"\textsuperscript{p}~Provisional: blocks are missing."] if any(v.provisional for v in shown) else []),
        *(["The run is not complete."] if result.incomplete else []),
    ]
    made_by = f"cameraready {escape(result.environment.get('cameraready', ''))}".rstrip()
    return f"Claims of {escape(card.slug)}{title} put to the test: {' '.join(facts)}, {made_by}. {' '.join(notes)}"


# --- how much a page holds ------------------------------------------------------------------------------------------


def _pages(claims: dict[str, list[Verdict]], caption_lines: float) -> Iterator[list[list[Verdict]]]:
    """Groups of verdicts, as many as fit a page; a group that is longer than a page is cut."""
    page: list[list[Verdict]] = []
    room = LINES_A_PAGE - 1.3 * caption_lines  # its lines are higher
    for group in claims.values():
        for part in _cut(group):
            lines = _lines(part)
            if page and lines > room:
                yield page
                page, room = [], LINES_A_PAGE
            page.append(part)
            room -= lines
    yield page


def _cut(group: list[Verdict]) -> Iterator[list[Verdict]]:
    part: list[Verdict] = []
    for verdict in group:
        if part and _lines([*part, verdict]) > 0.7 * LINES_A_PAGE:  # the first page has a caption too
            yield part
            part = []
        part.append(verdict)
    yield part


def _lines(group: Sequence[Verdict]) -> float:
    """Lines that a claim takes, with the space above it."""
    claim = math.ceil(len(f"{group[0].label} {group[0].claim or group[0].paper}") / CLAIM_CHARACTERS)
    places = [math.ceil(len(wording.place(v.workload)) / WORKLOAD_CHARACTERS) for v in group]
    return claim + sum(max(n, 1) for n in places) + 0.5
