"""The forest of a page: every interval against the limit of its rule, on one scale where that is honest.

Ratios are: how many times better than its limit a ratio is means the same for every claim. Counts, differences, exponents
and ranges have no such scale; they are told in numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cameraready.evidence.outcomes import Verdict
from cameraready.evidence.report import drawing, wording
from cameraready.evidence.rules import MIN_BLOCKS, Above, Below
from cameraready.evidence.study import Claim, Untested

FURTHEST = 30.0  # times the limit or a part of it; what lies beyond is written at the edge
FEWEST = 2  # intervals that make a forest
HEIGHT = 18


@dataclass(frozen=True)
class Margin:
    """How many times better than its limit a ratio is: above 1 it obeys the rule. `low` <= `estimate` <= `high`."""

    low: float
    estimate: float
    high: float


def margin(claim: Claim | Untested | None, verdict: Verdict) -> Margin | None:
    """The margin of a ratio with one limit; None for anything else, and where there is no interval."""
    if not isinstance(claim, Claim) or not isinstance(claim.rule, Below | Above) or not claim.measure.log_scale:
        return None
    ends = (verdict.low, verdict.estimate, verdict.high)
    if verdict.rule != claim.rule.describe():  # measured under another rule
        return None
    if verdict.blocks < MIN_BLOCKS or claim.rule.limit <= 0 or any(x is None or not 0 < x < math.inf for x in ends):
        return None
    limit = claim.rule.limit
    times = [x / limit if isinstance(claim.rule, Above) else limit / x for x in ends if x is not None]
    return Margin(min(times), times[1], max(times))


@dataclass(frozen=True)
class Forest:
    """The common scale, and the margin of each verdict that has one, by (label, workload)."""

    margins: Mapping[tuple[str, str], Margin]
    domain: tuple[float, float]

    def axis(self) -> str:
        """Labels of the scale, as SVG: ``0.1×``, ``limit``, ``10×``."""
        texts = []
        for tick in self._ticks():
            label = "limit" if tick == 1 else f"{tick:g}×"
            share = self._share(tick)
            anchor = "start" if share < 5 else "end" if share > 95 else "middle"
            texts.append(f'<text x="{share:.1f}%" y="13" text-anchor="{anchor}">{label}</text>')
        return f'<svg class="strip axis" width="100%" height="{HEIGHT}" aria-hidden="true">{"".join(texts)}</svg>'

    def strip(self, verdict: Verdict) -> str:
        """The interval of `verdict` on the common scale, as SVG; empty if it has none."""
        found = self.margins.get((verdict.label, verdict.workload))
        if found is None:
            return ""
        tone, middle, limit = wording.LOOKS[verdict.verdict].tone, HEIGHT / 2, self._share(1.0)
        low, at, high = (self._share(x) for x in (found.low, found.estimate, found.high))
        if not self.domain[0] <= found.estimate <= self.domain[1]:
            mark = self._beyond(found.estimate)
        else:
            mark = (
                f'<line x1="{low:.1f}%" x2="{high:.1f}%" y1="{middle:g}" y2="{middle:g}"/>'
                f'<circle cx="{at:.1f}%" cy="{middle:g}" r="4.5"/>'
            )
        return (
            f'<svg class="strip {tone}" width="100%" height="{HEIGHT}" aria-hidden="true">'
            f'<rect x="{limit:.1f}%" width="{100 - limit:.1f}%" height="100%"/>'
            f'<line class="limit" x1="{limit:.1f}%" x2="{limit:.1f}%" y2="{HEIGHT}"/>'
            f"{mark}</svg>"
        )

    @staticmethod
    def _beyond(times: float) -> str:
        """An estimate outside the scale, in a number at the edge where it lies."""
        if times > 1:
            return f'<text class="beyond" x="99%" y="13" text-anchor="end">{wording.number(times)}× ›</text>'
        return f'<text class="beyond" x="1%" y="13">‹ {wording.number(times)}×</text>'

    def _share(self, times: float) -> float:
        """Position on the scale in per cent."""
        low, high = (math.log(end) for end in self.domain)
        return 100 * (min(max(math.log(times), low), high) - low) / (high - low)

    def _ticks(self) -> list[float]:
        low, high = self.domain
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        ticks = [10.0**power for power in powers if abs(power) % max(len(powers) // 3, 1) == 0]
        return ticks if len(ticks) > 1 else drawing.log_ticks(self.domain)


def grow(claims: Mapping[str, Claim | Untested], verdicts: Sequence[Verdict]) -> Forest | None:
    """The forest of a page; None where fewer than `FEWEST` verdicts share its scale."""
    found = {(v.label, v.workload): margin(claims.get(v.label), v) for v in verdicts}
    margins = {key: m for key, m in found.items() if m is not None}
    if len(margins) < FEWEST:
        return None
    low = max(min(0.5, *(m.low for m in margins.values())) / 1.2, 1 / FURTHEST)
    high = min(max(2.0, *(m.high for m in margins.values())) * 1.2, FURTHEST)
    return Forest(margins, (low, high))
