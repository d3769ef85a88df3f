"""Constrained fine-tuning of flows put to the test: exact rounds on grids, networks in the plane, molecules, your own flow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from cameraready.evidence import (
    Claim,
    Context,
    Spec,
    SpecError,
    Study,
    Untested,
    above,
    always,
    average,
    below,
    difference,
    violations,
)
from cameraready.flows._workload import ACCEPTS
from cameraready.flows.cfo import AdjointMatching, ConstrainedFlowOptimizer
from cameraready.flows.cfo.experiment import larger, own, trials
from cameraready.flows.cfo.experiment.claims import (
    ANSWER,
    DRUGS,
    FIGURES,
    GALLERIES,
    GRID,
    MET,
    OF_OURS,
    PAPER,
    PLANE,
    TABLE,
    TOY,
)
from cameraready.flows.cfo.experiment.problems import PROBLEMS, RUNS
from cameraready.flows.cfo.experiment.trials import BUDGET, GRIDS, MOLECULE_ARMS, MOLECULES, PLANE_ARMS, PLANE_NAME

#: Steps with which the networks in the plane learn the mixture.
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
        size = (
            {"runs": 2, "pretraining": 40, "budget": 20, "n": 100}
            if smoke
            else {"runs": RUNS, "pretraining": PRETRAINING, "budget": BUDGET, "n": 4000}
        )
        for arm in arms:
            yield {"part": "plane_arm", "arm": arm, **size}
    elif workload == MOLECULES:
        size = (
            {"runs": 2, "budget": 4, "rounds": 2, "batch": 8, "n": 20}
            if smoke
            else {"runs": RUNS, "budget": 60, "rounds": 12, "batch": 32, "n": 200}
        )
        for arm in MOLECULE_ARMS:
            yield {"part": "molecule_arm", "arm": arm, **size}
    else:
        size = (
            {"budget": 10, "rounds": 2, "n": 100, "batch": 16}
            if smoke
            else {"budget": 150, "rounds": 15, "n": 1000, "batch": 128}
        )
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


# --- claims ----------------------------------------------------------------------------------------------------------

CLAIMS: list[Claim | Untested] = [
    Claim(
        1,
        part="a",
        paper="With adjoint matching inside, CFO meets the bound in two dimensions (c 0.12).",
        tested="Mixture in the plane: E[c] of CFO at most a twentieth above the bound.",
        scope="reduced",
        source=TOY,
        measure=average("excess", "cfo"),
        rule=MET,
        **PLANE,
    ),
    Claim(
        1,
        part="b",
        paper="Adjoint matching alone violates it (c 2.47 against 0.58 before).",
        tested="E[c] of adjoint matching alone more than a twentieth above the bound.",
        scope="reduced",
        source=TOY,
        measure=average("excess", "am"),
        rule=above(0.05),
        **PLANE,
    ),
    Claim(
        1,
        part="c",
        paper="CFO's reward (-4.75) lies above the pretrained model's (-7.62).",
        tested="Reward of CFO minus that of the pretrained model above 0.",
        scope="reduced",
        source=TOY,
        measure=difference("reward", "cfo", "pretrained"),
        rule=above(0.0),
        **PLANE,
    ),
    Claim(
        1,
        part="d",
        paper="It lies below that of adjoint matching alone (-2.93): the bound has its price.",
        tested="Reward of CFO minus that of adjoint matching alone below 0.",
        scope="reduced",
        source=TOY,
        measure=difference("reward", "cfo", "am"),
        rule=below(0.0),
        **PLANE,
    ),
    Claim(
        2,
        part="a",
        paper="With NFT inside, CFO meets the bound as well (c 0.06).",
        tested="E[c] of CFO with our zero-order solver at most a twentieth above the bound.",
        scope="reduced",
        source=TOY,
        measure=average("excess", "cfo-nft"),
        rule=MET,
        **PLANE,
    ),
    Claim(
        2,
        part="b",
        paper="NFT alone violates it (1.76).",
        tested="E[c] of the zero-order solver alone more than a twentieth above the bound.",
        scope="reduced",
        source=TOY,
        measure=average("excess", "nft"),
        rule=above(0.05),
        **PLANE,
    ),
    Claim(
        2,
        part="c",
        paper="CFO with NFT has more reward (-5.28) than the pretrained model.",
        tested="Its reward minus the pretrained model's above 0.",
        scope="reduced",
        source=TOY,
        measure=difference("reward", "cfo-nft", "pretrained"),
        rule=above(0.0),
        **PLANE,
    ),
    Claim(
        3,
        part="a",
        paper="Of 18 fixed weights from 1e-6 to 1e6 only 2 reach CFO's reward and meet the bound.",
        tested="Twelve problems on grids, tilted exactly: of the same weights fewer than 3 meet every bound and lose at most a twentieth of what tuning "
        "without bounds gains in reward, against the true optimum.",
        scope="reduced",
        source=f"{PAPER}, comparison with fixed weights",
        measure=average("good_weights", "18-weights"),
        rule=below(3.0),
        **GRID,
    ),
    Claim(
        3,
        part="b",
        paper="Finding the weight by trying costs 18 times as much.",
        tested="At the same total budget, divided among the 18 weights, the best one's law is further from the optimum: energy distance of CFO minus its, below 0.",
        scope="reduced",
        source=f"{PAPER}, comparison with fixed weights",
        measure=difference("energy", "cfo", "18-weights"),
        rule=below(0.0),
        **PLANE,
    ),
    Claim(
        4,
        part="a",
        paper="At a budget of 6000, 3 rounds of 2000 violate the bound (0.40).",
        tested="600 iterations as 3 rounds of 200: E[c] more than a twentieth above the bound.",
        scope="reduced",
        source=f"{PAPER}, budget split",
        measure=average("excess", "cfo-3-rounds"),
        rule=above(0.05),
        **PLANE,
    ),
    Claim(
        4,
        part="b",
        paper="100 rounds of 60 lose reward (-5.91) against 20 rounds of 300 (-4.75).",
        tested="600 iterations as 100 rounds of 6: reward minus that of 20 rounds of 30 below 0.",
        scope="reduced",
        source=f"{PAPER}, budget split",
        measure=difference("reward", "cfo-100-rounds", "cfo"),
        rule=below(0.0),
        **PLANE,
    ),
    Claim(
        5,
        part="a",
        paper="Molecules: CFO meets the bound on their energy (-82.28 against -80), adjoint matching alone does not (-78.31).",
        tested="Latent flow of ChEMBL's drugs, reward the share of sp3 carbons, bound 2.8 on synthetic accessibility (SA), surrogates of both: E[SA] of CFO (per-sample penalty) by the surrogate at most 2 % above the bound.",
        scope="proxy",
        source=TABLE,
        measure=average("excess", "cfo"),
        rule=below(0.02),
        **DRUGS,
    ),
    Claim(
        5,
        part="b",
        paper="The same against the true energies.",
        tested="E[SA] of the decoded molecules by rdkit, at most 2 % above the bound.",
        scope="proxy",
        source=TABLE,
        measure=average("true_excess", "cfo"),
        rule=below(0.02),
        **DRUGS,
    ),
    Claim(
        5,
        part="c",
        paper="Adjoint matching alone violates it.",
        tested="E[SA] by rdkit of adjoint matching alone more than 2 % above the bound.",
        scope="proxy",
        source=TABLE,
        measure=average("true_excess", "am"),
        rule=above(0.02),
        **DRUGS,
    ),
    Claim(
        5,
        part="d",
        paper="CFO raises the reward over the pretrained model's (8.39 D against 6.55 D).",
        tested="Share of sp3 carbons by rdkit, CFO minus the pretrained flow, above 0.",
        scope="proxy",
        source=TABLE,
        measure=difference("true_reward", "cfo", "pretrained"),
        rule=above(0.0),
        **DRUGS,
    ),
    Untested(
        5,
        part="e",
        paper="FlowMol on GEOM-Drugs: dipole 8.39 D at -82.28 Ha, 61.4 % of molecules feasible against 40.6 %, validity from 34 % to 9 %, 44 minutes against 727 of trying weights.",
        needs="FlowMol's checkpoint, xTB and a GPU with 24 GB; SELFIES are always molecules, so that validity cannot fall here",
        source=TABLE,
    ),
    Claim(
        6,
        part="a",
        paper="With rounds solved exactly, the bound is reached (Theorem 5.2, Corollary 5.3).",
        tested="Twelve problems on grids, the paper's per-sample penalty, 200 rounds: no G more than 1e-3 above 0, constraints having unit spread.",
        scope="exact",
        source=f"{PAPER}, Theorem 5.2",
        measure=violations((pl.col("arm") == "cfo") & (pl.col("above") > 1e-3), "E[c] above its bound"),
        rule=always(),
        **GRID,
    ),
    Claim(
        6,
        part="b",
        paper="|E[c] - B| goes to 0.",
        tested="The same: no |G| above 1e-3, on either side.",
        scope="exact",
        source=f"{PAPER}, Theorem 5.2",
        measure=violations((pl.col("arm") == "cfo") & (pl.col("gap") > 1e-3), "E[c] away from its bound"),
        rule=always(),
        changed="added after the run, which had it among its columns",
        **GRID,
    ),
    Claim(
        6,
        part="c",
        paper="Convergence is geometric.",
        tested="The same: after three rounds |G| is never more than 0.995 times that of the round before, down to 1e-9.",
        scope="exact",
        source=f"{PAPER}, Theorem 5.2",
        measure=violations((pl.col("arm") == "cfo") & (pl.col("rate") > 0.995), "a round without progress"),
        rule=always(),
        changed="added after the run, which had it among its columns",
        **GRID,
    ),
    Claim(
        6,
        part="d",
        paper="And the global optimum is reached (Theorem 5.4).",
        tested="The same: no total variation above 1e-3 from the analytic optimum p_pre exp((r - mu c) / alpha).",
        scope="exact",
        source=f"{PAPER}, Theorem 5.4",
        measure=violations((pl.col("arm") == "cfo") & (pl.col("distance") > 1e-3), "another law"),
        rule=always(),
        **GRID,
    ),
    Claim(
        6,
        part="e",
        paper="The same of the penalty on the expectation, which the authors' code evaluates.",
        tested="The expectation form, 2,000 rounds: neither |G| nor the total variation above 1e-6.",
        scope="reduced",
        source=f"{PAPER}, Theorem 5.4",
        measure=violations(
            (pl.col("arm") == "cfo-expectation") & ((pl.col("gap") > 1e-6) | (pl.col("distance") > 1e-6)),
            "a bound missed or another law",
        ),
        rule=always(),
        **GRID,
    ),
    Claim(
        6,
        part="f",
        paper="And its convergence is geometric.",
        tested="The expectation form: after three rounds |G| is never more than 0.995 times that of the round before, down to 1e-9 (rho grows where V shrinks by "
        "less than tau = 0.99).",
        scope="reduced",
        source=f"{PAPER}, Theorem 5.2",
        measure=violations((pl.col("arm") == "cfo-expectation") & (pl.col("rate") > 0.995), "a round without progress"),
        rule=always(),
        changed="the bar was below 1; 0.995 was set before the run, when 0.990 had been seen in the slowest problem",
        **GRID,
    ),
    *OF_OURS,
]

STUDY = Study(
    open=open_workload,
    workloads={
        "smoke": [GRIDS, PLANE_NAME],
        "desk": [GRIDS, PLANE_NAME, MOLECULES],
        "full": [GRIDS, PLANE_NAME, MOLECULES],
    },
    plan=plan,
    trial=trial,
    prepare=prepare,
    method="cfo",
    arms="arm",
    block="run",
    libraries={"*": ["torch"], "cooper": ["cooper-optim"], "cfo-rdkit": ["rdkit"]},
    accepts=ACCEPTS,
    own_arm="an inner solver of yours (a `Solver`; derive it from `FlowSolver`), as --with package.module:solver",
    component=component,
    settled=own.settled,
    covers="networks and noise in the plane, problems on grids, noise alone on molecules (one pretrained flow, one set of surrogates)",
    covers_own="the noise of tuning and drawing",
    claims=CLAIMS,
    answer=ANSWER,
    figures=FIGURES,
    galleries=GALLERIES,
    timeout=600.0,
    memory=4.0,
)
