"""What a study is: its workloads, its trials, its claims. Nothing here runs anything."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import polars as pl

    from cameraready.evidence.context import Context
    from cameraready.evidence.measures import Measure
    from cameraready.evidence.rules import Rule
    from cameraready.evidence.specs import Spec

Tier = Literal["smoke", "desk", "full"]
Scope = Literal["exact", "reduced", "proxy", "ours"]
Condition = Mapping[str, Any]
Row = Mapping[str, Any]

#: Columns that the engine adds to every row; a trial must not return them.
ENGINE_COLUMNS = ("workload", "seed", "trial", "status", "failure", "trial_seconds", "trial_peak_mb")


#: What `Study.accepts` may hold, in words.
ACCEPTED = {
    "table": "a table with the column to predict (data.csv:COLUMN; .csv, .tsv, .parquet, .jsonl)",
    "model": "a model file (LightGBM .txt, XGBoost .json or .ubj, .skops, .onnx), with its rows as "
    "model.json:data=rows.csv,target=COLUMN",
    "object": "an object of yours (package.module:object)",
    "hf": "a Hugging Face model (hf:Qwen/Qwen3-0.6B)",
    "checkpoint": "a language model on this machine (a folder with config.json and .safetensors, or model.gguf)",
    "gym": "a Gymnasium environment (gym:Hopper-v5)",
    "value": "from Python, the objects themselves (check(..., on=objects))",
}


@dataclass(frozen=True)
class Peer:
    """A competitor that runs in an environment of its own, because it cannot share ours.

    Parameters
    ----------
    requirement : str
        What to install, pinned: ``"shapiq==1.8.0"``. The part before the version is the peer's name.
    python : str
        Version specifier of the interpreter, such as ``">=3.12"``; empty means our own version.
    script : str
        File beside the study whose top-level functions become callable through ``ctx.peer(name)``. It runs in
        the peer's environment and must not import `cameraready`.
    also : sequence of str
        Further requirements.
    installer : {"uv", "pip"}
        ``"pip"`` fills the environment with pip, for peers that need a torch that only pip is told of.
    dependencies : bool
        False installs `requirement` and `also` without their dependencies.
    lock : str
        File beside the study with exact versions; empty resolves once and keeps the lock in the user's cache.
    """

    requirement: str
    python: str = ""
    script: str = ""
    also: Sequence[str] = ()
    installer: Literal["uv", "pip"] = "uv"
    dependencies: bool = True
    lock: str = ""

    @property
    def name(self) -> str:
        return re.split(r"[=<>!~\[; @]", self.requirement.strip(), maxsplit=1)[0].lower()


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper, in a form that a run can answer.

    Parameters
    ----------
    number : int
        The claim's number in the list that the card counts. Numbers beyond the card's count are our own (scope ``"ours"``).
    paper : str
        The paper's sentence in our words.
    tested : str
        The sentence we test.
    scope : {"exact", "reduced", "proxy", "ours"}
        How close the test is to the paper's setting.
    source : str
        Authors, year, arXiv id, table or figure.
    measure, rule
        What is computed from the rows, and what it must be. Fixed before the run.
    where : polars expression, optional
        Which rows count.
    workloads : sequence of str, optional
        Names of the workloads on which the claim makes sense, ``"own"`` standing for the user's; None means every workload.
    part : str
        Tells several tests of one claim apart: ``"a"``, ``"b"`` ...
    pooled : bool
        Whether a verdict over all workloads together is wanted as well.
    changed : str
        When the rule was changed after a run: what it was, and why it changed.
    """

    number: int
    paper: str
    tested: str
    scope: Scope
    source: str
    measure: Measure
    rule: Rule
    where: pl.Expr | None = None
    workloads: Sequence[str] | None = None
    part: str = ""
    pooled: bool = True
    changed: str = ""

    @property
    def label(self) -> str:
        return f"{self.number}{self.part}"


@dataclass(frozen=True)
class Untested:
    """A claim of the paper that this study does not test, and what a test would need."""

    number: int
    paper: str
    needs: str
    source: str = ""
    part: str = ""

    @property
    def label(self) -> str:
        return f"{self.number}{self.part}"


@dataclass(frozen=True)
class Figure:
    """A figure to draw from the rows: median of `y` over blocks against `x`, one line an arm, one panel a workload.

    Among `workloads`, ``"own"`` stands for every workload of the user's; None means every workload. Where `x` is measured, and so differs
    from block to block within a setting, `x_mean_by` names the column of the settings: each is drawn at the mean of its `x`.
    """

    title: str
    x: str
    y: str
    source: str = ""
    where: pl.Expr | None = None
    workloads: Sequence[str] | None = None
    log_x: bool = True
    log_y: bool = True
    x_title: str = ""
    y_title: str = ""
    x_mean_by: str = ""


@dataclass(frozen=True)
class Gallery:
    """Pictures that trials returned (samples, trajectories, molecules), shown in the report arm by arm.

    Parameters
    ----------
    picture : str
        The column that holds them: an SVG document as text, or ``"data:image/png;base64,..."``; null in other rows. At most
        100,000 characters each, and the shipped rows of a study have 200 kB in all.
    alt : str
        The column with what a screen reader says; empty: title and arm.
    caption : str
        The column with a line to stand below each.
    workloads : sequence of str, optional
        As for `Figure`.
    per_arm : int
        At most so many for each arm and workload, in the order of the rows.
    """

    title: str
    picture: str = "picture"
    alt: str = ""
    caption: str = ""
    source: str = ""
    where: pl.Expr | None = None
    workloads: Sequence[str] | None = None
    per_arm: int = 8


@dataclass(frozen=True)
class Answer:
    """How the first line of a finished run is made.

    `measure` compares the method with the best peer (see `measures.versus_best`); below `break_even` the method is
    better. The templates may use ``{estimate}``, ``{low}``, ``{high}``, ``{peer}``, ``{blocks}``, ``{workload}`` and
    ``{level}``, the value of column `by` (the largest one leads the sentence).
    """

    measure: Measure
    better: str
    worse: str
    tie: str
    by: str = ""
    by_label: str = "at {level}"
    break_even: float = 1.0
    where: pl.Expr | None = None
    workloads: Sequence[str] | None = None

    def check_templates(self) -> None:
        """Raises ValueError for a template with a placeholder that is not filled in."""
        known = ("estimate", "low", "high", "peer", "blocks", "workload", "level")
        for which in ("better", "worse", "tie", "by_label"):
            fields = ("level",) if which == "by_label" else known
            template = getattr(self, which)
            try:
                used = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
            except ValueError as error:
                raise ValueError(f"the answer's template {which!r} cannot be read ({error}): {template!r}") from None
            for name in used:
                if name not in fields:
                    listed = ", ".join(f"{{{each}}}" for each in fields)
                    raise ValueError(f"the answer's template {which!r} has the unknown {{{name}}}; known: {listed}")


@dataclass(frozen=True)
class Cost:
    """What the trials on a workload would take, told without opening it.

    Parameters
    ----------
    hours : float or None
        On one worker; None where that cannot be told.
    memory_gib : float
        The most that one worker holds, GiB.
    downloads : sequence of str
        What would be fetched, with sizes.
    notes : sequence of str
        What was assumed, one sentence each.
    """

    hours: float | None
    memory_gib: float
    downloads: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Study:
    """A method put to the test. Read `docs/` for a worked example; `study.py` of a method reads top to bottom.

    Parameters
    ----------
    open : callable
        ``open(spec) -> workload``; called once in every worker and kept there. `spec` is a `Spec`: shipped names
        and the user's own (``--on``) take the same path.
    workloads : mapping of tier to names
        The shipped workloads of each tier.
    plan : callable
        ``plan(tier, workload_name) -> iterable of conditions`` (dicts of JSON values), ordered block by block. A
        user's own workload is planned under the name ``"own"``.
    trial : callable
        ``trial(workload, ctx, **condition) -> row or rows`` (dicts of numbers and strings).
    method : str
        The arm that is the method itself.
    arms : str
        The column that names the arm: a key of the conditions, or a column of the rows.
    block : str
        The column that names the unit that repeats; ``"seed"`` repeats by seed.
    seeds : mapping of tier to int
        How many seeds each condition runs with (``--seeds`` overrides). 1 where the plan holds the blocks.
    prepare : callable, optional
        ``prepare(workload, ctx) -> dict of arrays``: costly ground truth, computed once a workload, cached by
        content, outside the trials' time; trials see it as ``ctx.prepared``.
    alone : bool or callable
        True, or a predicate of the condition, for trials that measure time or memory: each runs in a fresh
        process with nothing else running.
    takes : sequence of str
        What of the user's own `open` reads beside a model: ``"data"`` (``--data prompts.jsonl:prompt,answer``, in
        ``spec.options["data"]`` and ``["data_columns"]``) and ``"tasks"`` (``--tasks lm-eval:NAME``, in
        ``spec.options["tasks"]``).
    cost : callable, optional
        ``cost(spec, conditions, device, dtype) -> Cost`` of the trials with these conditions, for ``--dry-run`` on a
        workload that is the user's; it must not open the workload.
    libraries : mapping of arm to names
        The distributions (or peers, by name) whose versions an arm depends on; ``"*"`` means every arm.
    peers : sequence of Peer
        Competitors in environments of their own.
    accepts : sequence of str
        Kinds of spec that `open` takes beside shipped names: ``"table"``, ``"model"``, ``"object"``, ``"hf"``,
        ``"checkpoint"``, ``"gym"``, ``"value"``.
    own_arm : str
        What a user's own method (``--with``) must be; a sentence.
    settled : callable, optional
        ``settled(workload, conditions) -> text``: for a user's workload on which there is nothing to find out (the
        problem is solved exactly within the budget, say) a sentence that tells so instead of a run; else empty.
    component : callable, optional
        ``component(workload) -> object`` ready to use on that workload (``result.component``).
    covers : str
        What an interval covers, in words a layman reads.
    covers_own : str
        The same on a user's own workload; empty means `covers`.
    timeout, memory : float
        Limits of one trial: seconds, and GiB over what the worker held before.
    """

    open: Callable[[Spec], Any]
    workloads: Mapping[Tier, Sequence[str]]
    plan: Callable[[Tier, str], Iterable[Condition]]
    trial: Callable[..., Row | Iterable[Row]]
    method: str
    arms: str
    block: str
    claims: Sequence[Claim | Untested] = ()
    answer: Answer | None = None
    figures: Sequence[Figure] = ()
    galleries: Sequence[Gallery] = ()
    seeds: Mapping[Tier, int] = field(default_factory=lambda: {"smoke": 1, "desk": 1, "full": 1})
    prepare: Callable[[Any, Context], Mapping[str, Any]] | None = None
    alone: bool | Callable[[Condition], bool] = False
    libraries: Mapping[str, Sequence[str]] = field(default_factory=dict)
    peers: Sequence[Peer] = ()
    accepts: Sequence[str] = ()
    own_arm: str = ""
    takes: Sequence[str] = ()
    cost: Callable[[Spec, Sequence[Condition], str, str], Cost] | None = None
    settled: Callable[[Any, Sequence[Condition]], str] | None = None
    component: Callable[[Any], Any] | None = None
    covers: str = ""
    covers_own: str = ""
    timeout: float = 600.0
    memory: float = 4.0

    def __post_init__(self) -> None:
        unknown = set(self.workloads) - set(get_args(Tier))
        if unknown:
            raise ValueError(f"workloads name unknown tiers {sorted(unknown)}; tiers are smoke, desk and full")
        if "smoke" not in self.workloads or "desk" not in self.workloads:
            raise ValueError("a study needs workloads for the tiers 'smoke' and 'desk'; 'full' may be an empty list")
        labels = [claim.label for claim in self.claims]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(
                f"claims {', '.join(twice)} appear twice; tell parts of one claim apart with part='a', 'b' ..."
            )
        names = [peer.name for peer in self.peers]
        if len(set(names)) != len(names):
            raise ValueError(f"peers share a name: {', '.join(names)}")
        for tier, count in self.seeds.items():
            if count < 1:
                raise ValueError(f"seeds of tier {tier!r} must be at least 1, got {count}")
        self._check_workloads_of_claims()
        if self.answer is not None:
            self.answer.check_templates()

    def _check_workloads_of_claims(self) -> None:
        known = {name for names in self.workloads.values() for name in names} | {"own"}
        for claim in self.claims:
            wanted = list(claim.workloads or ()) if isinstance(claim, Claim) else []
            # A run on the user's workloads appends their names to a claim that is about "own".
            stated = wanted[: wanted.index("own")] if "own" in wanted else wanted
            unknown = [name for name in stated if name not in known]
            if unknown:
                raise ValueError(
                    f"claim {claim.label} is about {', '.join(unknown)}, which the study does not have; its workloads:"
                    f" {', '.join(sorted(known))}"
                )

    def runs_alone(self, condition: Condition) -> bool:
        return self.alone(condition) if callable(self.alone) else self.alone

    def peer(self, name: str) -> Peer:
        for peer in self.peers:
            if peer.name == name:
                return peer
        known = ", ".join(peer.name for peer in self.peers) or "none"
        raise ValueError(f"the study has no peer named {name!r}; its peers: {known}")

    def peers_of(self, arm: str) -> list[Peer]:
        """The peers whose environment `arm` needs."""
        wanted = set(self.libraries.get(arm, ())) | set(self.libraries.get("*", ()))
        return [peer for peer in self.peers if peer.name in wanted]


def study_folder(study: Study) -> Path:
    """The folder of the module that defines the study (where peer scripts and locks lie)."""
    import sys

    module = sys.modules[study.trial.__module__]
    if module.__file__ is None:
        raise ValueError(f"module {module.__name__} has no file; a study must live in a file")
    return Path(module.__file__).parent
