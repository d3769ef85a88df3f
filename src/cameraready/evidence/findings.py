"""From the rows of a run to what the reader is told: verdicts on the claims it can speak to, the answer, notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from cameraready.evidence.answer import answer as make_answer
from cameraready.evidence.measures import VersusBest
from cameraready.evidence.outcomes import Failure, Outcome, Trial, Verdict
from cameraready.evidence.planning import OWN, Load, Selection, relevant
from cameraready.evidence.results import make_frame
from cameraready.evidence.study import Answer, Claim, Study, Untested
from cameraready.evidence.verdicts import ALL, judge

NO_VERDICT = "the smoke tier proves that a study runs and gives no verdict"


@dataclass(frozen=True)
class Findings:
    """Verdicts, the sentence of advice, and what else the reader must know."""

    verdicts: list[Verdict]
    answer: str
    notes: list[str]


def find(
    study: Study,
    selection: Selection,
    loads: Sequence[Load],
    rows: pl.DataFrame,
    missing: Sequence[Trial],
    unavailable: Mapping[str, str],
) -> Findings:
    """Judge the claims that the run's workloads can speak to; `missing` are trials that did not run."""
    claims, elsewhere = _claims_of_this_run(selection.claims, loads)
    judged = replace(study, claims=claims, answer=_answer_of_this_run(study.answer, loads))
    verdicts = [_mark_provisional(v, judged, missing) for v in judge(judged, rows, unavailable=unavailable)]
    own = {load.name for load in loads if load.own}
    verdicts = [_on_own_data(v) if v.workload in own or (v.workload == ALL and own) else v for v in verdicts]
    told = make_answer(judged, rows, verdicts=verdicts, unavailable=unavailable)
    notes = [
        f"the rule of claim {c.label} was changed: {c.changed}" for c in claims if isinstance(c, Claim) and c.changed
    ]
    notes += _against_own(judged, selection.own, rows)
    if elsewhere:
        notes.append(f"not part of this run, being about other workloads: {_numbers(elsewhere)}")
    if selection.tier == "smoke":
        verdicts = [
            v if v.verdict == "untested" else replace(v, verdict="inconclusive", reason=NO_VERDICT) for v in verdicts
        ]
    return Findings(verdicts, told, notes)


def _on_own_data(verdict: Verdict) -> Verdict:
    """The paper says nothing of the user's data: a miss there refutes no claim that was made in the paper's setting."""
    if verdict.scope != "exact":
        return verdict
    return replace(verdict, scope="proxy", verdict="not seen" if verdict.verdict == "fails" else verdict.verdict)


def _numbers(labels: Sequence[str]) -> str:
    return f"claim{'s' if len(labels) > 1 else ''} {', '.join(labels)}"


def _against_own(study: Study, own: Mapping[str, Any], rows: pl.DataFrame) -> list[str]:
    """The answer's comparison again, against each of the user's own methods alone."""
    if study.answer is None or not isinstance(study.answer.measure, VersusBest):
        return []
    notes = []
    for name in own:
        alone = replace(study.answer, measure=replace(study.answer.measure, peers=(name,), exclude=()))
        notes.append(f"against {name} alone: {make_answer(replace(study, answer=alone), rows)}")
    return notes


def collect(
    study: Study, trials: Sequence[Trial], outcomes: Mapping[str, Outcome]
) -> tuple[pl.DataFrame, list[Failure]]:
    """All rows of a run in one frame, a failed trial being one row; and the failures."""
    records: list[dict[str, Any]] = []
    failures: list[Failure] = []
    for trial in trials:
        outcome = outcomes.get(trial.key)
        if outcome is None:
            continue
        head = {"workload": trial.workload, **trial.condition, "seed": trial.seed}
        tail = {
            "trial": trial.key[:12],
            "status": outcome.status,
            "trial_seconds": round(float(outcome.seconds), 6),
            "trial_peak_mb": round(float(outcome.peak_mb), 1),
        }
        if outcome.status == "done":
            records.extend({**head, **row, **tail} for row in outcome.rows)
        else:
            error = outcome.error.strip()
            records.append({**head, **tail, "failure": error.splitlines()[-1] if error else ""})
            failures.append(
                Failure(
                    trial.workload,
                    trial.arm,
                    trial.block,
                    trial.seed,
                    dict(trial.condition),
                    outcome.status,
                    outcome.error,
                )
            )
    frame = make_frame(records) if records else pl.DataFrame(schema={"workload": pl.String, "status": pl.String})
    absent = [name for name in (study.arms, study.block, "status") if name not in frame.columns]
    return frame.with_columns(pl.lit(None, dtype=pl.String).alias(name) for name in absent), failures


def _mark_provisional(verdict: Verdict, study: Study, missing: Sequence[Trial]) -> Verdict:
    """Provisional: trials that the claim looks at have not run yet."""
    claim = next(c for c in study.claims if c.label == verdict.label)
    if not isinstance(claim, Claim):
        return verdict
    for workload in {t.workload for t in missing} if verdict.workload in ("all", "") else {verdict.workload}:
        waiting = [t.condition for t in missing if t.workload == workload]
        if waiting and relevant(study, claim, workload, waiting):
            return replace(verdict, provisional=True)
    return verdict


def _claims_of_this_run(
    claims: Sequence[Claim | Untested], loads: Sequence[Load]
) -> tuple[list[Claim | Untested], list[str]]:
    """The claims that some workload of the run can speak to, and the labels of the others.

    Among a claim's workloads, ``"own"`` stands for every workload of the user's.
    """
    names = {load.name for load in loads}
    here: list[Claim | Untested] = []
    elsewhere: list[str] = []
    for claim in claims:
        if isinstance(claim, Claim) and claim.workloads is not None:
            claim = replace(claim, workloads=_with_own(claim.workloads, loads))
            if not names.intersection(claim.workloads or ()):
                elsewhere.append(claim.label)
                continue
        here.append(claim)
    return here, elsewhere


def _answer_of_this_run(wanted: Answer | None, loads: Sequence[Load]) -> Answer | None:
    if wanted is None or wanted.workloads is None:
        return wanted
    return replace(wanted, workloads=_with_own(wanted.workloads, loads))


def _with_own(names: Sequence[str], loads: Sequence[Load]) -> list[str]:
    return [*names, *(load.name for load in loads if load.own and OWN in names)]
