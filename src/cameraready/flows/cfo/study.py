"""Constrained fine-tuning of flows put to the test: exact rounds on grids, networks in the plane, molecules, your own flow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from cameraready.evidence import (
    Answer,
    Claim,
    Context,
    Figure,
    Gallery,
    Spec,
    SpecError,
    Study,
    Untested,
    above,
    always,
    average,
    below,
    difference,
    versus_best,
    violations,
    within,
)
from cameraready.flows._workload import ACCEPTS
from cameraready.flows.cfo import AdjointMatching, ConstrainedFlowOptimizer
from cameraready.flows.cfo.experiment import larger, own, trials
from cameraready.flows.cfo.experiment.problems import PROBLEMS, RUNS
from cameraready.flows.cfo.experiment.trials import BUDGET, GRIDS, MOLECULE_ARMS, MOLECULES, PLANE_ARMS, PLANE_NAME

PRETRAINING = 4000


def open_workload(spec: Spec) -> Any:
    """A shipped name, the molecules, or the user's flow with a reward and a constraint."""
    if spec.kind != "shipped":
        return own.open_own(spec)
    if spec.name != MOLECULES:
        return spec.name
    from cameraready.flows._molecules import molecules

    try:
        return molecules("fsp3", bound=2.8)
    except ImportError as error:
        raise SpecError(str(error)) from None


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    smoke = tier == "smoke"
    if workload == GRIDS:
        for problem in range(2 if smoke else PROBLEMS):
            yield {"part": "exact", "problem": problem, "rounds": 40 if smoke else 200}
    elif workload == PLANE_NAME:
        arms = ("pretrained", "am", "cfo", "cfo-nft", "8-weights", "cooper") if smoke else PLANE_ARMS
        size = {"runs": 2, "pretraining": 40, "budget": 20, "n": 100} if smoke else {"runs": RUNS, "pretraining": PRETRAINING, "budget": BUDGET, "n": 4000}
        for arm in arms:
            yield {"part": "plane_arm", "arm": arm, **size}
    elif workload == MOLECULES:
        size = {"runs": 2, "budget": 4, "rounds": 2, "batch": 8, "n": 20} if smoke else {"runs": RUNS, "budget": 60, "rounds": 12, "batch": 32, "n": 200}
        for arm in MOLECULE_ARMS:
            yield {"part": "molecule_arm", "arm": arm, **size}
    else:
        size = {"budget": 10, "rounds": 2, "n": 100, "batch": 16} if smoke else {"budget": 150, "rounds": 15, "n": 1000, "batch": 128}
        for run in range(2 if smoke else RUNS):
            yield {"part": "own_arm", "run": str(run), **size}


PARTS: Mapping[str, Any] = {
    "exact": trials.exact,
    "plane_arm": trials.plane_arm,
    "molecule_arm": larger.molecule_arm,
    "own_arm": larger.own_arm,
}


def trial(workload: Any, ctx: Context, *, part: str, **condition: Any) -> list[dict[str, Any]]:
    return list(PARTS[part](workload, ctx, **condition))


def prepare(workload: Any, ctx: Context) -> Mapping[str, Any]:
    """Trains, or finds trained, the networks that the trials begin with, outside their time."""
    if isinstance(workload, own.OwnProblem):
        workload.network  # noqa: B018 (a table's flow is trained when it is first asked for)
    return {}


def component(workload: Any) -> ConstrainedFlowOptimizer:
    """The optimizer, with the form whose rounds aim at the problem's own optimum."""
    return ConstrainedFlowOptimizer(AdjointMatching(), penalty="expectation")
