"""The words and signs in which verdicts, scopes and numbers are shown, in a terminal as on a page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cameraready.evidence.outcomes import Verdict
from cameraready.evidence.rules import MIN_BLOCKS, significant


@dataclass(frozen=True)
class Look:
    """How a verdict is shown: always a word and a sign, so that nobody needs the colour."""

    sign: str
    tone: str  # name of the colour on the page
    colour: str  # the same in a terminal
    meaning: str


SHORT_NAME = 32  # characters of a workload's name that fit into a table

LOOKS = {
    "holds": Look("✓", "good", "green", "the whole 95 % interval obeys the rule"),
    "fails": Look("✗", "bad", "red", "the whole 95 % interval breaks the rule"),
    "not seen": Look(
        "○", "unseen", "yellow", "the interval breaks the rule, in a setting that cannot refute the paper"
    ),
    "inconclusive": Look("~", "open", "cyan", "the interval reaches both sides of the rule, or blocks are too few"),
    "untested": Look("–", "none", "bright_black", "not tested here"),
}

SCOPES = {
    "exact": "The paper's own setting: a miss here refutes the sentence as tested.",
    "reduced": "A smaller setting than the paper's: a pass supports the claim, a miss does not refute it.",
    "proxy": "A stand-in for the paper's setting: a pass supports the claim, a miss does not refute it.",
    "ours": "A promise of this package; the paper does not make it.",
}


#: The same in a few words, for the reader who does not look them up.
SCOPES_IN_SHORT = {
    "exact": "the paper’s setting",
    "reduced": "smaller than the paper’s",
    "proxy": "a stand-in",
    "ours": "not the paper’s claim",
}

TIERS = {
    "smoke": "a few seconds that show that the study runs; no verdicts",
    "desk": "real data and competitors, in minutes on an ordinary machine",
    "full": "the paper’s setting",
}

BASES = {
    "paper": "the paper alone",
    "official-code": "the authors’ code",
    "reconstruction": "a reconstruction: the paper leaves parts open",
}


def number(value: float | None) -> str:
    """`value` to three significant digits, or a dash where there is none."""
    return "–" if value is None or math.isnan(value) else significant(value)


def signed(text: str) -> str:
    """`text` with real minus signs before its numbers."""
    return re.sub(r"(?<![\w.\-])-(?=[\d.])", "−", text)


def interval(verdict: Verdict) -> str:
    """``[0.17, 0.26]``, or empty where the verdict has no interval, or one from too few blocks to mean anything."""
    if verdict.low is None or verdict.high is None or verdict.blocks < MIN_BLOCKS:
        return ""
    return f"[{number(verdict.low)}, {number(verdict.high)}]"


def estimate(verdict: Verdict) -> str:
    """``0.21 [0.17, 0.26]``, or what there is of it."""
    if verdict.estimate is None:
        return ""
    return f"{number(verdict.estimate)} {interval(verdict)}".strip()


def word(verdict: Verdict) -> str:
    """The verdict's word, marked while blocks are missing."""
    return f"{verdict.verdict} (provisional)" if verdict.provisional else verdict.verdict


def remarks(verdict: Verdict) -> list[str]:
    """What must be said beside the numbers: the peer compared with, failures, why there is no plain verdict."""
    found = [f"compared with {verdict.peer}, the best of the others"] if verdict.peer else []
    return [*found, verdict.reason] if verdict.reason else found


def told_elsewhere(verdict: Verdict) -> Verdict:
    """`verdict` without the remark that a page's "what would change this" makes more exactly."""
    crossing = f"the interval reaches both sides of the rule ({verdict.rule})"
    kept = [part for part in verdict.reason.split("; ") if part and part != crossing]
    return replace(verdict, reason="; ".join(kept))


def place(workload: str) -> str:
    """How a workload is called; the pooled verdict's is ``"all"``."""
    return "all together" if workload == "all" else workload


def places(workloads: Iterable[str]) -> dict[str, str]:
    """How workloads are called where room is short: long paths by their last part, if that tells them apart."""
    names = list(dict.fromkeys(workloads))
    short = {name: re.split(r"[/\\]", name)[-1] if len(name) > SHORT_NAME else place(name) for name in names}
    unique = len(set(short.values())) == len(short)
    return short if unique else {name: place(name) for name in names}


def counted(claims: Sequence[Verdict]) -> list[tuple[Look, int, str]]:
    """How often each verdict was given: look, count, and the word that agrees with it (``2 hold``, ``1 holds``)."""
    many = {"holds": "hold", "fails": "fail"}
    found = []
    for name, look in LOOKS.items():
        n = sum(verdict.verdict == name for verdict in claims)
        if n:
            found.append((look, n, name if n == 1 else many.get(name, name)))
    return found


def tally(claims: Sequence[Verdict]) -> str:
    """``"5 hold, 1 fails, 2 inconclusive"``, over all verdicts."""
    return ", ".join(f"{n} {name}" for _, n, name in counted(claims)) or "no claims"


def agreeing(claims: Iterable[Verdict]) -> list[list[Verdict]]:
    """Verdicts of one claim, those that say the same together."""
    groups: dict[tuple[str, bool], list[Verdict]] = {}
    for verdict in claims:
        groups.setdefault((verdict.verdict, verdict.provisional), []).append(verdict)
    return list(groups.values())


def by_claim(claims: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """Verdicts grouped by the claim they are about, in the order given."""
    groups: dict[str, list[Verdict]] = {}
    for verdict in claims:
        groups.setdefault(verdict.label, []).append(verdict)
    return groups


def duration(seconds: float) -> str:
    """``0.91 ms``, ``0.12 s``, ``48 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds < 0.1:
        return f"{significant(seconds * 1000, 2)} ms"
    if seconds < 1:
        return f"{significant(seconds, 2)} s"
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 90:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def count(n: int, noun: str) -> str:
    """``1 block``, ``12 blocks``."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")
