"""From the rows of a run to one verdict per claim and workload, fair to every arm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from cameraready.evidence.measures import BlockTable, Measure, MissingColumn, Violations
from cameraready.evidence.measures.blocks import arms_in, done, require_columns, with_engine_columns
from cameraready.evidence.measures.intervals import interval
from cameraready.evidence.outcomes import Verdict, VerdictWord
from cameraready.evidence.rules import MIN_BLOCKS, Always, Judgement
from cameraready.evidence.study import Claim, Study, Untested

#: Name of the workload of a pooled verdict.
ALL = "all"

#: What a claim that does not fit the rows can raise.
UNCOMPUTABLE = (ValueError, TypeError, pl.exceptions.PolarsError)

Planned = Mapping[tuple[str, str], int] | Mapping[str, int]


@dataclass(frozen=True)
class Evidence:
    """What the rows of one workload, or of several together, say about one measure.

    `untested` is a sentence where nothing can be said at all; `table` is None then.
    """

    table: BlockTable | None = None
    strata: np.ndarray | None = None
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    peer: str = ""
    failed_trials: int = 0
    failed_arms: tuple[str, ...] = ()
    seconds: float = 0.0
    untested: str = ""

    @property
    def blocks(self) -> int:
        return 0 if self.table is None else len(self.table.names)

    @property
    def remarks(self) -> list[str]:
        """What a reader must know beside the numbers: failures, blocks lost, how odd values were counted."""
        if self.table is None:
            return []
        told = []
        if self.failed_trials:
            told.append(f"{_count(self.failed_trials, 'trial')} of {' and '.join(self.failed_arms)} failed")
        invalid = [why for why in self.table.broken.values() if "failed" not in why]
        if invalid:
            told.append(f"{_count(len(invalid), 'block')} left out: {_summary(invalid)}")
        if self.table.lost:
            told.append(f"{_count(len(self.table.lost), 'block')} lost: {_summary(self.table.lost.values())}")
        return told + list(self.table.notes)


def judge(
    study: Study, frame: pl.DataFrame, *, planned: Planned | None = None, unavailable: Mapping[str, str] | None = None
) -> list[Verdict]:
    """The verdict on every claim of `study`, on each workload and, where the claim wants it, on all of them together.

    Parameters
    ----------
    frame : polars DataFrame
        The rows of a run, failed trials included (``status`` other than ``"done"``, measurements null).
    planned : mapping, optional
        Blocks planned for each workload, or for each (workload, claim label); a verdict from fewer is provisional.
    unavailable : mapping of arm to sentence, optional
        Arms that could not take part, and why.

    Returns
    -------
    list of Verdict
        In the order of the claims; within a claim the workloads as they appear in `frame`, then ``"all"``.

    Notes
    -----
    A claim that cannot be computed (text in a measured column, a `where` that is no condition, a census with another
    rule than `always`) is "untested", its reason says why, and the other claims are judged.
    """
    unavailable = unavailable or {}
    verdicts: list[Verdict] = []
    for claim in study.claims:
        if isinstance(claim, Untested):
            verdicts.append(_untested(claim))
            continue
        present = workloads_in(frame)
        wanted = [w for w in present if claim.workloads is None or w in claim.workloads]
        if _mispaired(claim):
            reason = "violations() goes with always(), and always() with nothing else"
            verdicts.append(_verdict(claim, "", Evidence(untested=reason), None))
            continue
        if not wanted:
            needs = ", ".join(claim.workloads or ())
            reason = f"this run has none of its workloads: {needs}" if needs else "this run has no rows"
            verdicts.append(_verdict(claim, "", Evidence(untested=reason), None))
            continue
        each = {w: evidence(study, frame, claim.measure, w, claim.where, unavailable) for w in wanted}
        verdicts += [_verdict(claim, w, found, _planned(planned, [w], claim)) for w, found in each.items()]
        if claim.pooled and len(wanted) > 1:
            verdicts.append(_pooled(claim, each, _planned(planned, wanted, claim)))
    return verdicts


def workloads_in(frame: pl.DataFrame) -> list[str]:
    """The workloads of a run in order of appearance."""
    if "workload" not in frame.columns:
        raise ValueError("the rows have no column 'workload'; they did not come from the engine")
    return frame.get_column("workload").drop_nulls().cast(pl.String).unique(maintain_order=True).to_list()


def evidence(
    study: Study,
    frame: pl.DataFrame,
    measure: Measure,
    workload: str,
    where: pl.Expr | None,
    unavailable: Mapping[str, str],
) -> Evidence:
    """What the rows of `workload` that satisfy `where` say about `measure`; untested where they cannot be computed with."""
    try:
        return _evidence(study, frame, measure, workload, where, unavailable)
    except UNCOMPUTABLE as error:
        here = with_engine_columns(frame.filter(pl.col("workload").cast(pl.String) == workload))
        if isinstance(error, pl.exceptions.PolarsError) and here.filter(done()).is_empty():
            return Evidence(untested="no trial of this run returned rows for it")
        return Evidence(untested=why_uncomputable(error))


def why_uncomputable(error: Exception) -> str:
    """The first line of an error, as a reason: polars appends its query plan."""
    first = next(iter(str(error).strip().splitlines()), "").rstrip(".: ")
    is_sentence = isinstance(error, ValueError) and bool(first)
    return first if is_sentence else f"it cannot be computed from the rows: {first or type(error).__name__}"


def _evidence(
    study: Study,
    frame: pl.DataFrame,
    measure: Measure,
    workload: str,
    where: pl.Expr | None,
    unavailable: Mapping[str, str],
) -> Evidence:
    rows = with_engine_columns(frame.filter(pl.col("workload").cast(pl.String) == workload))
    if where is not None:
        try:
            rows = _with_columns(rows, where.meta.root_names())
        except MissingColumn as error:
            return Evidence(untested=str(error))
        meets = _meeting(rows, where)
        kind = meets.dtype
        if kind not in (pl.Boolean, pl.Null):
            return Evidence(untested=f"its `where` is no condition: it gives {kind}, not true or false")
        # A failed trial counts unless its condition rules it out: what it would have returned is unknown, not false.
        meets = meets.cast(pl.Boolean)
        rows = rows.filter(pl.when(done()).then(meets.fill_null(False)).otherwise(meets.fill_null(True)))
    if rows.is_empty():
        return Evidence(untested="no row of this run meets the claim's condition")
    for column in (study.arms, study.block):
        if column not in rows.columns:
            rows = rows.with_columns(pl.lit(None, dtype=pl.String).alias(column))
    seconds = _seconds(rows)
    present = arms_in(rows, study.arms)
    anonymous = not rows.filter(~done() & pl.col(study.arms).is_null()).is_empty()
    absent = [arm for arm in measure.arms() if arm not in present]
    if absent and not anonymous:
        why = "; ".join(f"{arm}: {unavailable.get(arm, 'it has no rows in this run')}" for arm in absent)
        return Evidence(untested=why, seconds=seconds)
    try:
        table = measure.blocks(_with_columns(rows, measure.columns()), study.arms, study.block)
    except MissingColumn as error:
        return Evidence(untested=str(error), seconds=seconds)
    if measure.named_arms() is None and not isinstance(measure, Violations):
        missing = [f"not compared with {arm}: {why}" for arm, why in unavailable.items() if arm not in present]
        table = replace(table, notes=(*table.notes, *missing))
    subjects = tuple(dict.fromkeys((study.method, *measure.subjects())))
    failures = rows.filter(
        ~done() & (pl.col(study.arms).cast(pl.String).is_in(list(subjects)) | pl.col(study.arms).is_null())
    )
    guilty = tuple(arm for arm in subjects if arm in arms_in(failures, study.arms)) or (study.method,)
    found = Evidence(table, failed_trials=failures.get_column("trial").n_unique(), failed_arms=guilty, seconds=seconds)
    return _estimated(found, measure)


def _with_columns(rows: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """`rows` itself if it has `columns`; with nulls for them where every trial failed; otherwise `MissingColumn`."""
    if rows.filter(done()).is_empty():
        missing = [column for column in columns if column not in rows.columns]
        return rows.with_columns(pl.lit(None, dtype=pl.Float64).alias(column) for column in missing)
    require_columns(rows, columns)
    return rows


def _meeting(rows: pl.DataFrame, where: pl.Expr) -> pl.Series:
    """`where` of each row; a column without any value, whatever its type, makes the condition unknown (null), not an error."""
    blank = [name for name in where.meta.root_names() if rows.get_column(name).null_count() == rows.height]
    typeless = rows.with_columns(pl.lit(None, dtype=pl.Null).alias(name) for name in blank)
    try:
        found = typeless.select(where.alias("_")).to_series()
    except pl.exceptions.PolarsError:
        if not blank:
            raise
        return pl.repeat(None, rows.height, dtype=pl.Boolean, eager=True)
    # A condition of literals alone is one value.
    return found if len(found) == rows.height else found.new_from_index(0, rows.height)


def _estimated(found: Evidence, measure: Measure) -> Evidence:
    """`found` with estimate and interval, where its values allow them."""
    table = found.table
    if table is None or table.trouble or not len(table.names):
        return found
    result = interval(measure, table.values, found.strata)
    numbers = [float(x) if np.isfinite(x) else None for x in result]
    peer = measure.chosen(table.values, table.arms)
    return replace(found, estimate=numbers[0], low=numbers[1], high=numbers[2], peer=peer)


def pool(measure: Measure, each: Mapping[str, Evidence]) -> Evidence:
    """The evidence of several workloads as one; resampling and variances stay within workloads."""
    usable = {w: e for w, e in each.items() if e.table is not None and (len(e.table.names) or e.table.trouble)}
    left_out = [w for w in each if w not in usable]
    if len(usable) < 2:
        return Evidence(untested=f"only {len(usable)} of {len(each)} workloads can be pooled")
    tables = {w: e.table for w, e in usable.items() if e.table is not None}
    # Failures count wherever they happened, also where they left nothing to pool.
    everything = {w: e.table for w, e in each.items() if e.table is not None}
    common = [arm for arm in next(iter(tables.values())).arms if all(arm in t.arms for t in tables.values())]
    notes = [f"{w}: {note}" for w, t in tables.items() for note in t.notes]
    trouble = next((f"{w}: {t.trouble}" for w, t in tables.items() if t.trouble), "")
    if any(t.arms for t in tables.values()):
        partial = sorted({arm for t in tables.values() for arm in t.arms} - set(common))
        if partial:
            notes.append(f"{', '.join(partial)} took part on some workloads only and cannot be the best peer of all")
        if not common:
            trouble = trouble or "no peer took part on all workloads"
        picked = {w: t.values[:, [t.arms.index(arm) for arm in common]] for w, t in tables.items()}
    else:
        picked = {w: t.values for w, t in tables.items()}
    if left_out:
        notes.append(f"without {', '.join(left_out)}, where the claim could not be tested")
    values = np.empty((0, 1)) if trouble else np.concatenate(list(picked.values()))
    table = BlockTable(
        tuple(f"{w}/{name}" for w, t in tables.items() for name in t.names),
        values,
        tuple(common),
        {f"{w}/{b}": why for w, t in everything.items() for b, why in t.broken.items()},
        {f"{w}/{b}": why for w, t in everything.items() for b, why in t.lost.items()},
        tuple(f"{w}/{b}" for w, t in everything.items() for b in t.unfinished),
        tuple(notes),
        trouble,
    )
    strata = np.repeat(np.arange(len(tables)), [len(t.names) for t in tables.values()])
    found = Evidence(
        table,
        strata,
        failed_trials=sum(e.failed_trials for e in each.values()),
        failed_arms=tuple(dict.fromkeys(arm for e in each.values() for arm in e.failed_arms if e.failed_trials)),
        seconds=sum(e.seconds for e in usable.values()),
    )
    return _estimated(found, measure)


def _pooled(claim: Claim, each: Mapping[str, Evidence], planned: int | None) -> Verdict:
    try:
        found = pool(claim.measure, each)
    except UNCOMPUTABLE as error:
        found = Evidence(untested=why_uncomputable(error))
    verdict = _verdict(claim, ALL, found, planned)
    return replace(verdict, value={w: e.estimate for w, e in each.items() if e.estimate is not None})


def _verdict(claim: Claim, workload: str, found: Evidence, planned: int | None) -> Verdict:
    """The word, and the sentence that goes with it."""
    table = found.table
    reasons: list[str]
    word: VerdictWord
    if table is None:
        word, reasons, lost, finished = "untested", [found.untested], 0, 0
    else:
        word, reasons = _word(claim, found)
        lost = len(table.lost)
        finished = found.blocks + len((set(table.lost) | set(table.broken)) - set(table.names))
    return Verdict(
        label=claim.label,
        number=claim.number,
        claim=claim.tested,
        paper=claim.paper,
        scope=claim.scope,
        verdict=word,
        workload=workload,
        rule=claim.rule.describe(),
        measure=claim.measure.describe(),
        source=claim.source,
        estimate=found.estimate,
        low=found.low,
        high=found.high,
        blocks=found.blocks,
        peer=found.peer,
        seconds=found.seconds,
        provisional=table is not None and (bool(table.unfinished) or (planned is not None and finished < planned)),
        reason="; ".join(reasons),
        failed_trials=found.failed_trials,
        lost_blocks=lost,
        changed=claim.changed,
    )


def _word(claim: Claim, found: Evidence) -> tuple[VerdictWord, list[str]]:
    table = found.table
    assert table is not None
    remarks = found.remarks
    refuted: VerdictWord = "fails" if claim.scope in ("exact", "ours") else "not seen"
    if table.trouble:
        return "inconclusive", [table.trouble, *remarks]
    nan = float("nan")
    estimate, low, high = (nan if x is None else x for x in (found.estimate, found.low, found.high))
    judgement: Judgement = claim.rule.judge(estimate, low, high)
    if isinstance(claim.rule, Always) and judgement == "no":
        # One counter-example refutes "never", however few the blocks.
        return refuted, [f"{_count(int(estimate), 'violation')}", *remarks]
    if found.blocks < MIN_BLOCKS:
        return "inconclusive", [f"{_count(found.blocks, 'block')}; {MIN_BLOCKS} are needed", *remarks]
    if judgement == "no":
        return refuted, remarks
    if judgement == "open":
        return "inconclusive", [f"the interval reaches both sides of the rule ({claim.rule.describe()})", *remarks]
    if found.failed_trials or table.broken:
        return "inconclusive", ["the numbers obey the rule, but failures forbid 'holds'", *remarks]
    return "holds", remarks


def _untested(claim: Untested) -> Verdict:
    return Verdict(
        label=claim.label,
        number=claim.number,
        claim="",
        paper=claim.paper,
        scope="",
        verdict="untested",
        workload="",
        source=claim.source,
        reason=f"needs {claim.needs}",
    )


def _mispaired(claim: Claim) -> bool:
    return isinstance(claim.measure, Violations) != isinstance(claim.rule, Always)


def _planned(planned: Planned | None, workloads: Iterable[str], claim: Claim) -> int | None:
    """Blocks planned for a claim on `workloads`; None where the plan does not say."""
    counts = []
    for workload in workloads:
        plan: dict[object, int] = {**(planned or {})}  # type: ignore[dict-item]
        count = plan.get((workload, claim.label), plan.get(workload))
        if count is None:
            return None
        counts.append(count)
    return sum(counts)


def _seconds(rows: pl.DataFrame) -> float:
    """Summed time of the trials behind `rows`, each counted once."""
    if "trial_seconds" not in rows.columns:
        return 0.0
    # In order of appearance: a sum in whatever order `unique` leaves differs in the last digit from run to run.
    trials = rows.unique("trial", maintain_order=True)
    return float(trials.get_column("trial_seconds").cast(pl.Float64).fill_null(0.0).sum())


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _summary(reasons: Iterable[str]) -> str:
    """Equal reasons counted: ``"kernel failed (3), shap returned NaN or infinity (1)"``."""
    counted: dict[str, int] = {}
    for reason in reasons:
        counted[reason] = counted.get(reason, 0) + 1
    return ", ".join(f"{reason} ({n})" if len(counted) > 1 or n > 1 else reason for reason, n in counted.items())
