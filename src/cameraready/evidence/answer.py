"""The first line of a finished run: one sentence of advice with the number behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import polars as pl

from cameraready.evidence.measures.blocks import done, with_engine_columns
from cameraready.evidence.outcomes import Verdict
from cameraready.evidence.rules import MIN_BLOCKS, significant
from cameraready.evidence.study import Answer, Study
from cameraready.evidence.verdicts import UNCOMPUTABLE, Evidence, evidence, why_uncomputable, workloads_in

Advice = Literal["better", "worse", "tie"]


@dataclass(frozen=True)
class _Finding:
    """What one level of one workload says; `advice` is None where it is too early or nothing can be said."""

    level: Any
    found: Evidence
    advice: Advice | None

    @property
    def key(self) -> tuple[Advice | None, str]:
        """Two findings with the same key give the same advice: the peer matters where it is to be kept."""
        return self.advice, self.found.peer if self.advice == "worse" else ""


class _Levels:
    """Several levels in a template: ``{level:,}`` gives ``"300 and 1,000"``."""

    def __init__(self, levels: Sequence[Any]) -> None:
        self.levels = levels

    def __format__(self, spec: str) -> str:
        return _joined([format(level, spec) for level in self.levels])

    def __str__(self) -> str:
        return format(self)


def answer(
    study: Study,
    frame: pl.DataFrame,
    *,
    verdicts: Sequence[Verdict] = (),
    unavailable: Mapping[str, str] | None = None,
) -> str:
    """One sentence that tells a reader what to do, by the study's `Answer`.

    The largest level of the answer's `by` that has enough blocks leads; smaller levels are named where they advise
    something else. Each workload gets a clause, the first one in full. With fewer than ten blocks the sentence says
    that it is too early to say. An answer that cannot be computed from the rows is a sentence that says why.

    Parameters
    ----------
    frame : polars DataFrame
        The rows of a run, failed trials included.
    verdicts : sequence of Verdict, optional
        Summed up where the study has no `Answer`.
    unavailable : mapping of arm to sentence, optional
        Arms that could not take part; the sentence names them.
    """
    plan = study.answer
    if plan is None:
        return _summed_up(verdicts)
    try:
        return _answer(study, plan, frame, unavailable or {})
    except (*UNCOMPUTABLE, LookupError, AttributeError) as error:  # the last two from a template
        return f"There is no answer: {why_uncomputable(error)}."


def _answer(study: Study, plan: Answer, frame: pl.DataFrame, unavailable: Mapping[str, str]) -> str:
    wanted = [w for w in workloads_in(frame) if plan.workloads is None or w in plan.workloads]
    if not wanted:
        return "Nothing to say yet: no trial has finished on a workload that the answer is about."
    findings = {w: _findings(study, plan, frame, w, unavailable) for w in wanted}
    if not any(finding.advice for found in findings.values() for finding in found):
        reasons = {w: _why_not(found) for w, found in findings.items()}
        if len(set(reasons.values())) == 1:
            return f"Too early to say: {reasons[wanted[0]]}."
        return f"Too early to say: {'; '.join(f'{why} on {w}' for w, why in reasons.items())}."
    # Workloads that can be advised on come first, so that the sentence opens with its number.
    wanted.sort(key=lambda w: not any(finding.advice for finding in findings[w]))
    clauses: list[str] = []
    for workload in wanted:
        clauses.append(_clause(study, plan, workload, findings[workload], first=not clauses, alone=len(wanted) == 1))
    sentence = "; ".join(clauses)
    missing = [arm for arm in unavailable if arm not in getattr(plan.measure, "exclude", ())]
    if missing:
        sentence += f" (without {_joined(missing)}, not available here)"
    return sentence[0].upper() + sentence[1:] + "."


def _findings(
    study: Study, plan: Answer, frame: pl.DataFrame, workload: str, unavailable: Mapping[str, str]
) -> list[_Finding]:
    """One finding per level, the largest first."""
    here = with_engine_columns(frame.filter(pl.col("workload").cast(pl.String) == workload))
    if not plan.by:
        return [_finding(study, plan, frame, workload, None, plan.where, unavailable)]
    if plan.by not in here.columns:
        return []
    counted = here.filter(done()) if plan.where is None else here.filter(done() & plan.where)
    levels = sorted(counted.get_column(plan.by).drop_nulls().unique().to_list(), reverse=True)
    findings = []
    for level in levels:
        at = pl.col(plan.by) == level
        where = at if plan.where is None else plan.where & at
        findings.append(_finding(study, plan, frame, workload, level, where, unavailable))
    return findings


def _finding(
    study: Study,
    plan: Answer,
    frame: pl.DataFrame,
    workload: str,
    level: Any,
    where: pl.Expr | None,
    unavailable: Mapping[str, str],
) -> _Finding:
    found = evidence(study, frame, plan.measure, workload, where, unavailable)
    if found.low is None or found.high is None or found.blocks < MIN_BLOCKS:
        return _Finding(level, found, None)
    smaller_is_better = getattr(plan.measure, "lower_is_better", True)
    advice: Advice = "tie"
    if found.high < plan.break_even:
        advice = "better" if smaller_is_better else "worse"
    elif found.low > plan.break_even:
        advice = "worse" if smaller_is_better else "better"
    return _Finding(level, found, advice)


def _clause(
    study: Study, plan: Answer, workload: str, findings: Sequence[_Finding], *, first: bool, alone: bool
) -> str:
    """What to do on one workload."""
    told = [finding for finding in findings if finding.advice is not None]
    where = "" if alone else f" on {workload}"
    if not told:
        return f"too early to say{where}: {_why_not(findings)}"
    lead, rest = told[0], told[1:]
    parts = [_full(plan, workload, lead, where) if first else _short(plan, workload, [lead], where)]
    if lead.found.failed_trials:
        parts[0] += f", but {study.method} failed in {_trials(lead.found.failed_trials)}"
    # Neighbouring levels with the same advice are named together.
    groups: list[list[_Finding]] = []
    for finding in rest:
        if finding.key == lead.key:
            continue
        if groups and groups[-1][0].key == finding.key:
            groups[-1].append(finding)
        else:
            groups.append([finding])
    parts += [f"{_label(plan, group)} {_short(plan, workload, group, '', say_level=False)}" for group in groups]
    return ", ".join(parts)


def _full(plan: Answer, workload: str, finding: _Finding, where: str) -> str:
    template = _template(plan, finding)
    text = template.format(**_fields(plan, workload, [finding]))
    named = "{level" in template
    if plan.by and not named:
        text += f" {_label(plan, [finding])}"
    return text if "{workload" in template or not where else f"{where.strip()} {text}"


def _short(plan: Answer, workload: str, group: Sequence[_Finding], where: str, *, say_level: bool = True) -> str:
    """The advice without its explanation (what follows the template's first colon), with the number in brackets."""
    advice = _template(plan, group[0]).partition(": ")[0]
    text = advice.format(**_fields(plan, workload, group))
    found = group[0].found
    if len(group) == 1 and found.estimate is not None and "{estimate" not in advice:
        level = f" {_label(plan, group)}" if say_level and plan.by and "{level" not in advice else ""
        text += f" ({significant(found.estimate)} {_limits(found)}{level})"
    return text if "{workload" in advice or not where else f"{where.strip()} {text}"


def _template(plan: Answer, finding: _Finding) -> str:
    assert finding.advice is not None
    return {"better": plan.better, "worse": plan.worse, "tie": plan.tie}[finding.advice]


def _fields(plan: Answer, workload: str, group: Sequence[_Finding]) -> dict[str, Any]:
    found = group[0].found
    return {
        "estimate": _number(found.estimate),
        "low": _number(found.low),
        "high": _number(found.high),
        "peer": found.peer or getattr(plan.measure, "peer", ""),
        "blocks": found.blocks,
        "workload": workload,
        "level": _Levels([finding.level for finding in reversed(group)]),
    }


def _label(plan: Answer, group: Sequence[_Finding]) -> str:
    return plan.by_label.format(level=_Levels([finding.level for finding in reversed(group)]))


def _limits(found: Evidence) -> str:
    return f"[{_number(found.low)}, {_number(found.high)}]"


def _number(x: float | None) -> str:
    return "unknown" if x is None else significant(x)


def _why_not(findings: Sequence[_Finding]) -> str:
    if not findings:
        return "no trial has finished"
    best = max(findings, key=lambda finding: finding.found.blocks)
    found = best.found
    if found.table is None:
        return found.untested
    if found.table.trouble:
        return found.table.trouble
    return f"{found.blocks} of the {MIN_BLOCKS} blocks needed"


def _trials(n: int) -> str:
    return f"{n:,} trial{'' if n == 1 else 's'}"


def _joined(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _summed_up(verdicts: Sequence[Verdict]) -> str:
    """The verdicts counted, for a study without a comparison to lead with."""
    counted = Counter(str(verdict.verdict) for verdict in verdicts if verdict.workload != "all")
    if not counted:
        return "The verdicts below are the answer: this study has no single comparison to lead with."
    words = {
        "holds": ("holds", "hold"),
        "fails": ("fails", "fail"),
        "not seen": ("is not seen", "are not seen"),
        "inconclusive": ("is inconclusive", "are inconclusive"),
        "untested": ("is untested", "are untested"),
    }
    parts = [
        f"{counted[word]} {one if counted[word] == 1 else more}" for word, (one, more) in words.items() if counted[word]
    ]
    return f"Of {sum(counted.values())} verdicts {_joined(parts)}."
