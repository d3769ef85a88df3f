"""Which trials a run consists of: a study's plan under the user's options."""

from __future__ import annotations

import hashlib
import itertools
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import psutil

from cameraready.amounts import memory
from cameraready.evidence import specs
from cameraready.evidence.execution import key
from cameraready.evidence.execution.ledger import Ledger
from cameraready.evidence.execution.processes import usable_cores
from cameraready.evidence.outcomes import Trial
from cameraready.evidence.peers import environments
from cameraready.evidence.results import make_frame
from cameraready.evidence.study import Claim, Study, Tier, Untested
from cameraready.evidence.subject import Subject, UsageError
from cameraready.evidence.verdicts import MIN_BLOCKS

OWN = "own"  # the name under which a user's own workload is planned


# --- workloads and arms ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """A workload of this run: what to open, under which name, and whether it is the user's."""

    name: str
    spec: specs.Spec
    own: bool
    digest: str

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.spec.kind, "own": self.own, "digest": self.digest}


def workloads_of(study: Study, tier: Tier, on: Any, data: str = "", tasks: Sequence[str] = ()) -> list[Load]:
    for what, given in (("data", data), ("tasks", tasks)):
        if given and what not in study.takes:
            raise UsageError(f"this study takes no {what} of the user's beside a workload (--on)")
        if given and on is None:
            raise UsageError(f"{what} go with a workload: name one with --on, a shipped one or yours")
    loads = _loads_of(study, tier, on)
    return [_with_own(load, data, tasks) for load in loads] if data or tasks else loads


def _with_own(load: Load, data: str, tasks: Sequence[str]) -> Load:
    """A workload together with the user's data and tasks; a shipped one is then no longer the one that verdicts name."""
    spec = specs.with_own(load.spec, data=data, tasks=tasks)
    shown = [Path(spec.options["data"]).name] if data else []
    name = load.name if load.own else "+".join([load.name, *shown, *(["tasks"] if tasks else [])])
    if spec.kind == "value":
        parts = [load.digest, *sorted(item for item in spec.options.items() if item[0] != "data")]
        if data:  # by its bytes, not by its place
            parts.append(specs.spec.file_digest(spec.options["data"]))
        return Load(name, spec, True, hashlib.sha256(json.dumps(parts).encode()).hexdigest())
    return Load(name, spec, True, spec.content_digest())


def _loads_of(study: Study, tier: Tier, on: Any) -> list[Load]:
    if on is None:
        return [_load_of(name, study, tier) for name in study.workloads[tier]]
    loads = []
    for index, item in enumerate(on if isinstance(on, list) else [on]):
        if isinstance(item, str):
            loads.append(_load_of(item, study, tier))
        elif "value" not in study.accepts:
            raise UsageError(f"this study takes no Python object; it takes {listed(study.accepts)} or a shipped name")
        else:
            name = OWN if index == 0 else f"{OWN}-{index + 1}"
            loads.append(Load(name, specs.value_spec(item).with_value(item), True, value_digest(item)))
    names = [load.name for load in loads]
    if len(set(names)) != len(names):
        raise UsageError(f"a workload is named twice: {', '.join(names)}")
    return loads


def _load_of(text: str, study: Study, tier: Tier) -> Load:
    shipped = list(dict.fromkeys(itertools.chain(*study.workloads.values())))
    spec = specs.parse(text, shipped=shipped, accepts=study.accepts)
    return Load(text, spec, spec.kind != "shipped", spec.content_digest())


def own_arms(with_: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    if isinstance(with_, Mapping):
        return dict(with_)
    if isinstance(with_, str):
        with_ = [with_]
    return {text: specs.load_object(text) for text in with_}


def seed_list(study: Study, tier: Tier, seeds: int | Sequence[int] | None) -> list[int]:
    if seeds is None:
        return list(range(study.seeds.get(tier, 1)))
    if isinstance(seeds, int):
        if seeds < 1:
            raise UsageError(f"seeds must be at least 1, got {seeds}")
        return list(range(seeds))
    return [int(seed) for seed in seeds]


# --- which trials ---------------------------------------------------------------------------------------------------


@dataclass
class Selection:
    """Turns a study's plan into trials, under the user's options."""

    subject: Subject
    tier: Tier
    own: Mapping[str, Any]
    without: frozenset[str]
    changes: Mapping[str, Any]
    seeds: Sequence[int]
    only: Sequence[int | str] | None
    device: str = "cpu"
    dtype: str = ""
    claims: list[Claim | Untested] = field(init=False)

    def __post_init__(self) -> None:
        study = self.subject.study
        self.claims = list(study.claims)
        if self.only is not None:
            wanted = {str(item) for item in self.only}
            self.claims = [c for c in study.claims if c.label in wanted or str(c.number) in wanted]
            known = {c.label for c in study.claims} | {str(c.number) for c in study.claims}
            unknown = sorted(wanted - known)
            if unknown:
                raise UsageError(
                    f"there is no claim {', '.join(unknown)}; claims: {', '.join(c.label for c in study.claims)}"
                )
        clash = sorted(set(self.own) & self._known_arms())
        if clash:
            raise UsageError(f"an arm named {', '.join(clash)} exists already; give yours another name")
        unknown_arms = sorted(self.without - self._known_arms())
        if self._known_arms() and unknown_arms:
            raise UsageError(
                f"there is no arm {', '.join(unknown_arms)}; arms: {', '.join(sorted(self._known_arms()))}"
            )
        if self._known_arms() and study.method not in self._known_arms():
            raise UsageError(
                f"the study names {study.method!r} as its method, but plans only {listed(sorted(self._known_arms()))}"
            )
        if self.subject.study.method in self.without:
            raise UsageError(f"{self.subject.study.method} is the method under test and cannot be left out")

    def _known_arms(self) -> set[str]:
        """Arms that conditions name; empty where they appear in rows only."""
        study = self.subject.study
        tiers = [tier for tier in get_args(Tier) if tier in study.workloads]
        plans = (_planned(study, tier, name) for tier in tiers for name in study.workloads[tier] or [OWN])
        return {str(c[study.arms]) for plan in plans for c in plan if study.arms in c}

    def conditions(self, load: Load) -> list[dict[str, Any]]:
        study = self.subject.study
        found = _planned(study, self.tier, OWN if load.own else load.name)
        usable = {name for condition in found for name in condition} - {study.arms}
        unknown = sorted(set(self.changes) - usable)
        if unknown and found:
            raise UsageError(f"nothing to set named {', '.join(unknown)}; the conditions have {listed(sorted(usable))}")
        found = list(itertools.chain(*(self._changed(condition) for condition in found)))
        found = list(itertools.chain(*(self._with_own(condition) for condition in found)))
        unique = {json.dumps(condition, sort_keys=True): condition for condition in found}
        return [c for c in unique.values() if str(c.get(study.arms, "")) not in self.without]

    def _changed(self, condition: dict[str, Any]) -> Iterable[dict[str, Any]]:
        names = [name for name in self.changes if name in condition]
        grids = [v if isinstance(v := self.changes[name], list | tuple) else [v] for name in names]
        for name, value in ((n, v) for n, grid in zip(names, grids, strict=True) for v in grid):
            if _kind(value) != _kind(condition[name]):
                raise UsageError(f"{name} is {_kind(condition[name])} in the plan, got {value!r}")
        for values in itertools.product(*grids):
            yield {**condition, **dict(zip(names, values, strict=True))}

    def _with_own(self, condition: dict[str, Any]) -> Iterable[dict[str, Any]]:
        yield condition
        if condition.get(self.subject.study.arms) == self.subject.study.method:
            for name in self.own:
                yield {**condition, self.subject.study.arms: name}

    def arms_planned(self, loads: Sequence[Load]) -> set[str]:
        study = self.subject.study
        named = {str(c[study.arms]) for load in loads for c in self.conditions(load) if study.arms in c}
        return named or (set(study.libraries) - {"*"} - self.without)

    def trials(self, loads: Sequence[Load]) -> list[Trial]:
        """All trials, block by block; workloads take turns with as many blocks as a verdict needs.

        A run that is cut short then has verdicts on some workloads, rather than too few blocks on each.
        """
        lanes = [_in_turns(self._blocks(load)) for load in loads]
        turns = itertools.zip_longest(*lanes, fillvalue=())
        return [trial for turn in turns for trials in turn for trial in trials]

    def _blocks(self, load: Load) -> list[list[Trial]]:
        study, slug = self.subject.study, self.subject.card.slug
        code = self.subject.code
        conditions = self.conditions(load)
        if self.only is not None:
            name = OWN if load.own else load.name
            conditions = _needed(study, self.claims, name, conditions, frozenset(self.own))
        arms = {str(condition.get(study.arms, "")) for condition in conditions}
        planned_as = {arm: study.method if arm in self.own else arm for arm in arms}
        versions = {arm: key.arm_versions(study, planned_as[arm], self.subject.folder) for arm in arms}
        settings = {arm: self.settings(arm) for arm in arms}
        blocks: dict[tuple[int, str], list[Trial]] = {}
        for seed in self.seeds:
            for condition in conditions:
                arm = str(condition.get(study.arms, ""))
                block = str(seed) if study.block == "seed" else str(condition.get(study.block, ""))
                trial = Trial(
                    key=key.trial_key(
                        code=code,
                        content=load.digest,
                        condition=condition,
                        seed=seed,
                        versions=versions[arm],
                        settings=settings[arm],
                    ),
                    method=slug,
                    workload=load.name,
                    condition=condition,
                    seed=seed,
                    arm=arm,
                    block=block,
                    alone=study.runs_alone(condition),
                )
                blocks.setdefault((seed, block), []).append(trial)
        return list(blocks.values())

    def settings(self, arm: str) -> dict[str, Any]:
        """What shapes a trial's rows beside its condition: device, and the user's own code in this arm."""
        found: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        mine = [arm] if arm in self.own else [] if arm else sorted(self.own)
        if mine:
            found["own"] = {name: value_digest(self.own[name]) for name in mine}
        if not arm and self.without:
            found["without"] = sorted(self.without)
        return found


def _planned(study: Study, tier: Tier, workload: str) -> list[dict[str, Any]]:
    """The plan's conditions, checked: dicts of JSON values."""
    where = f"plan({tier!r}, {workload!r})"
    conditions = study.plan(tier, workload)
    if conditions is None or isinstance(conditions, str | Mapping):
        raise UsageError(f"{where} must return or yield dicts, got {type(conditions).__name__}")
    found = []
    for condition in conditions:
        if not isinstance(condition, Mapping):
            raise UsageError(f"{where} must yield dicts of JSON values, got {condition!r}")
        for name, value in condition.items():
            try:
                json.dumps(value)
            except TypeError:
                raise UsageError(f"{where} yields {name}={value!r}; conditions hold JSON values") from None
        found.append(dict(condition))
    return found


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    return "a number" if isinstance(value, int | float) else "text" if isinstance(value, str) else "another value"


def _in_turns(blocks: list[list[Trial]]) -> list[list[Trial]]:
    starts = range(0, len(blocks), MIN_BLOCKS)
    return [list(itertools.chain.from_iterable(blocks[start : start + MIN_BLOCKS])) for start in starts]


def _needed(
    study: Study, claims: Sequence[Any], workload: str, conditions: list[dict[str, Any]], own: frozenset[str]
) -> list[dict[str, Any]]:
    """The conditions whose rows some claim looks at; where that depends on what a trial measures, the trial is needed.

    The user's own arms are needed wherever the method is.
    """
    as_method = [{**c, study.arms: study.method} if c.get(study.arms) in own else c for c in conditions]
    kept = [False] * len(conditions)
    for claim in claims:
        if not isinstance(claim, Claim):
            continue
        for index in relevant(study, claim, workload, as_method):
            kept[index] = True
    return [condition for condition, keep in zip(conditions, kept, strict=True) if keep]


def relevant(study: Study, claim: Claim, workload: str, conditions: Sequence[Mapping[str, Any]]) -> list[int]:
    """Indices of the conditions whose rows `claim` looks at on `workload`."""
    if claim.workloads is not None and workload not in claim.workloads:
        return []
    if not conditions:
        return []
    indices = range(len(conditions))
    if claim.where is not None:
        frame = make_frame(conditions)
        if set(claim.where.meta.root_names()) <= set(frame.columns):
            mask = frame.select(claim.where.fill_null(False).alias("_")).to_series()
            indices = [i for i in indices if mask[i]]  # type: ignore[assignment]
    arms = claim.measure.named_arms()
    return [
        i for i in indices if arms is None or study.arms not in conditions[i] or str(conditions[i][study.arms]) in arms
    ]


def value_digest(value: Any) -> str:
    """Digest of a Python object's content; for what cannot be serialised, a token that no other run shares."""
    import cloudpickle

    try:
        content = cloudpickle.dumps(value)
    except Exception:  # what an object's own serialiser raises is its own choice
        return secrets.token_hex(16)
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def listed(items: Iterable[str]) -> str:
    return ", ".join(items) or "nothing"


# --- what a run would cost ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What a run would do (``--dry-run``)."""

    trials: int
    finished: int
    blocks: Mapping[str, int]
    hours: float | None  # None while nothing comparable was ever run
    downloads: Sequence[str]
    memory_gib: float
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        missing = self.trials - self.finished
        lasts = "unknown, nothing like it has run yet" if self.hours is None else f"about {_duration(self.hours)}"
        lines = [
            f"{self.trials} trials, {self.finished} of them already in the ledger; {missing} to run: {lasts}",
            "blocks: " + ", ".join(f"{name} {count}" for name, count in self.blocks.items()),
            "downloads: " + (", ".join(self.downloads) if self.downloads else "none"),
            f"memory: at most {memory(self.memory_gib * 2**30)}",
            *self.notes,
        ]
        return "\n".join(lines)


def _duration(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{max(hours * 60, 0.1):.1f} minutes"


def dry_plan(selection: Selection, loads: Sequence[Load], store: Ledger, jobs: int | None) -> Plan:
    """What a run would do, from the ledger's experience with the method."""
    subject, study, trials = selection.subject, selection.subject.study, selection.trials(loads)
    finished = store.finished([t.key for t in trials])
    missing = [t for t in trials if t.key not in finished]
    workers = jobs or usable_cores()
    costs = {}
    if study.cost is not None:
        for load in (load for load in loads if load.own and load.spec.kind != "value"):
            wanted = [t.condition for t in missing if t.workload == load.name]
            try:
                costs[load.name] = study.cost(load.spec, wanted, selection.device, selection.dtype)
            except ValueError as error:
                raise UsageError(f"what {load.name} would cost cannot be told: {error}") from error
    unknown = [t for t in missing if t.workload not in costs]
    hours: float | None = 0.0
    if unknown:
        seconds = store.mean_seconds(subject.card.slug)
        shared = sum(not t.alone for t in unknown)
        work = shared / workers + len(unknown) - shared
        hours = None if seconds is None else work * seconds / 3600
    for cost in costs.values():
        hours = None if hours is None or cost.hours is None else hours + cost.hours
    downloads = sorted(
        {text for cost in costs.values() for text in cost.downloads}
        | {
            f"{peer.requirement} and what it needs, into an environment of its own"
            for arm in selection.arms_planned(loads)
            for peer in subject.study.peers_of(arm)
            if not environments.is_built(peer, subject.folder)
        }
    )
    blocks = {load.name: len({(t.seed, t.block) for t in trials if t.workload == load.name}) for load in loads}
    memory = max([cost.memory_gib for cost in costs.values()] + [study.memory * workers] * (len(costs) < len(loads)))
    notes = list(dict.fromkeys(note for cost in costs.values() for note in cost.notes))
    free = psutil.virtual_memory().available / 2**30
    largest = max((cost.memory_gib for cost in costs.values()), default=0.0)
    if selection.device == "cpu" and largest > free:
        notes.insert(0, f"that does not fit: {free:.3g} GiB of this machine's memory are free")
    return Plan(len(trials), len(finished), blocks, hours, downloads, memory, notes)
