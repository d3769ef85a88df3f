"""Coupled clipping put to the test: bias without noise, error at equal privacy, what no private method can avoid, and audits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import polars as pl
import torch

from cameraready.evidence import (
    Answer,
    Claim,
    Context,
    Figure,
    Study,
    above,
    always,
    average,
    below,
    growth,
    interleave,
    ratio,
    versus_best,
    violations,
    within,
)  # fmt: skip
from cameraready.optim.dp_c4.arms import (
    ARMS,
    DECAY,
    EVALUATIONS,
    NETWORK_EVALUATIONS,
    Budget,
    Settings,
    audited_scores,
    calibrated,
    coupled_run,
    network_noise,
    noise_for,
    one_step,
    residual,
    take_over,
    train_network,
)
from cameraready.optim.dp_c4.audit import audit_one_run
from cameraready.optim.dp_c4.optimizer import C4Optimizer
from cameraready.optim.dp_c4.sampling import Sampling
from cameraready.optim.dp_c4.schedules import GeometricThreshold
from cameraready.optim.dp_c4.tuning import GRIDS, NETWORK_LR, tuned, tuned_network
from cameraready.optim.dp_c4.workloads import KNOWN, AllDigits, Canaries, Problem, Workload, open_workload

SHEET = "DP-C4, 2026, OpenReview nw0pePP5qd, abstract, through the reconstruction of this package"
OURS = "this study"

# --- trials ----------------------------------------------------------------------------------------------------------

EPSILONS = (0.5, 2.0, 8.0)
NETWORK_EPSILONS = (1.0, 2.0, 4.0, 8.0)
PEERS = ("dp-sgd", "dp-sgd-poisson", "auto-s", "adaclip", "decay")
VARIANTS = ("c4-uniform", "clip21", "c4-snapshot")
NETWORK_ARMS = tuple(NETWORK_LR)
LENGTHS = (40, 160, 640)
SHORT = ("breast-cancer", "digits")
SMOKE_EVALUATIONS = 10
#: Runs of the audit: what ours releases, and two broken versions of it.
AUDITED = ("c4", "c4-snapshot", "no-noise", "mean-reference")


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    smoke = tier == "smoke"
    if workload == "canaries":
        for epsilon in (1.0,) if smoke else (1.0, 2.0):
            for arm in AUDITED:
                yield {"part": "audit", "arm": arm, "epsilon": epsilon}
        return
    if workload == "digits-network":
        for epsilon in NETWORK_EPSILONS:
            for arm in NETWORK_ARMS:
                yield {"part": "network", "arm": arm, "epsilon": epsilon}
        return
    if workload == "small":
        for arm in ARMS:
            yield {"part": "compare", "arm": arm, "epsilon": 2.0, "steps": SMOKE_EVALUATIONS}
        return
    if workload in SHORT:
        for arm in ("c4", "dp-sgd"):
            yield {"part": "bias", "arm": arm, "epsilon": 0.0}
        for steps in LENGTHS:
            yield {"part": "noise", "arm": "c4", "epsilon": 2.0, "steps": steps, "pace": "stretched"}
        for epsilon in (0.5, 8.0):
            yield {"part": "noise", "arm": "c4", "epsilon": epsilon, "steps": 160, "pace": "stretched"}
        yield {"part": "noise", "arm": "c4", "epsilon": 2.0, "steps": 640, "pace": "fixed"}
    for epsilon in EPSILONS:
        for arm in ARMS:
            # The variants answer a claim about one budget.
            if arm not in ("c4-uniform", "clip21") or epsilon == 2.0:
                yield {"part": "compare", "arm": arm, "epsilon": epsilon}
    if workload == "digits":
        yield {"part": "speed", "epsilon": 0.0}


def prepare(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """Settings of every arm at every budget, from a public twin, and the smallest loss."""
    if isinstance(workload, Canaries):
        return {}
    if isinstance(workload, AllDigits):
        images = workload.split(0)
        found = tuned_network(images, Budget(2.0, images.delta, NETWORK_EVALUATIONS))
        for epsilon in NETWORK_EPSILONS:
            network_noise(Budget(epsilon, images.delta, NETWORK_EVALUATIONS))
        settings = {arm: np.array([settings.lr, settings.second]) for arm, settings in found.items()}
        return {**settings, "calibrated": calibrated()}
    best = workload.optimum()
    found_settings: dict[str, Any] = {"optimum": np.array(workload.value(best)), "weights": best}
    small = workload.name == "small"
    for epsilon in (2.0,) if small else EPSILONS:
        budget = Budget(epsilon, workload.delta, SMOKE_EVALUATIONS if small else EVALUATIONS)
        for arm, chosen in tuned(workload, budget, list(GRIDS)).items():
            found_settings[f"{arm} {epsilon}"] = np.array([chosen.lr, chosen.second])
    if workload.name in SHORT:
        for steps in LENGTHS:
            chosen = tuned(workload, Budget(2.0, workload.delta, steps), ["c4"])["c4"]
            found_settings[f"steps {steps}"] = np.array([chosen.lr, chosen.second])
    return {**found_settings, "calibrated": calibrated()}


def trial(
    workload: Any,
    ctx: Context,
    *,
    part: str,
    epsilon: float,
    arm: str = "",
    steps: int = EVALUATIONS,
    pace: str = "",
) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    if "calibrated" in ctx.prepared:
        take_over(ctx.prepared["calibrated"])
    if part == "audit":
        return [audited(workload, ctx.seed, arm, epsilon)]
    if part == "network":
        images = workload.split(ctx.seed)
        budget = Budget(epsilon, images.delta, NETWORK_EVALUATIONS)
        return [{"error": train_network(images, arm, budget, Settings(*ctx.prepared[arm]), 100 + ctx.seed)}]
    if part == "bias":
        return [{"residual": residual(workload, arm, ctx.seed)}]
    if part == "noise":
        return [injected(workload, ctx, Budget(epsilon, workload.delta, steps), pace)]
    if part == "speed":
        rows = torch.from_numpy(workload.gradients(np.zeros(workload.d)))
        calls = {name: one_step(name, rows, ctx.seed) for name in ("c4", "dp-sgd")}
        timed = interleave(calls, warmup=3, repeats=20)
        return [{"arm": row["arm"], "repeat": row["repeat"], "step_seconds": row["seconds"]} for row in timed]
    return [compared(workload, ctx, arm, Budget(epsilon, workload.delta, steps))]


def compared(problem: Problem, ctx: Context, arm: str, budget: Budget) -> dict[str, Any]:
    """Excess loss of a run within the budget, and the share of training records on the wrong side."""
    seed = 100 + ctx.seed
    run = ctx.select(ARMS)[arm]
    if arm in ARMS:
        weights = run(problem, budget, Settings(*ctx.prepared[f"{arm} {budget.epsilon}"]), seed)
    else:
        weights = np.asarray(run(problem, budget, None, seed), dtype=float)
    if weights.shape != (problem.d,) or not np.isfinite(weights).all():
        raise ValueError(f"{arm} returned no {problem.d} finite weights but shape {weights.shape}")
    row = {"excess": problem.value(weights) - float(ctx.prepared["optimum"])}
    if problem.loss == "logistic":
        row["wrong"] = float(np.mean(np.sign(problem.features @ weights) != problem.target))
    return row


def injected(problem: Problem, ctx: Context, budget: Budget, pace: str) -> dict[str, Any]:
    """How noise falls from step to step, and what of it is in the estimated gradient at the end.

    Thresholds fall by the same factor over the whole run whatever its length (pace ``"stretched"``), or by the same factor each step (``"fixed"``).
    """
    settings = Settings(*ctx.prepared[f"steps {budget.evaluations}"])
    weights, optimizer = coupled_run(problem, budget, settings, 100 + ctx.seed, DECAY if pace == "fixed" else None)
    releases = optimizer.ledger.releases
    stds = np.array([release.noise_multiplier * release.threshold for release in releases]) / problem.n
    (p,) = optimizer.params
    memory = optimizer.memory.of(p)
    found = float((memory["running"] - memory["references"].mean(dim=0)).square().sum())
    expected = problem.d * float(np.sum(stds**2))
    bound = problem.d * (settings.second / (problem.n * budget.epsilon)) ** 2
    return {
        "noise_fall": float(stds[-1] / stds[0]),
        "left_over_expected": found / expected,
        "left_over_bound": found / bound,
        "excess": problem.value(weights) - float(ctx.prepared["optimum"]),
        "spent": optimizer.get_epsilon(problem.delta),
    }


def audited(canaries: Canaries, seed: int, arm: str, claimed: float) -> dict[str, Any]:
    """Membership of canaries guessed from everything that a run publishes."""
    noise = noise_for(Budget(claimed, canaries.delta, canaries.steps), canaries.steps)
    report = audit_one_run(
        lambda included: audited_scores(canaries, arm, noise, included, seed),
        canaries.n_canaries,
        claimed_epsilon=claimed,
        delta=canaries.delta,
        generator=torch.Generator().manual_seed(seed),
        confidence=0.99,
    )
    return {"epsilon_lower": report.epsilon_lower, "guessed_right": report.correct / report.guesses}


# --- claims ----------------------------------------------------------------------------------------------------------


def compare(epsilon: float) -> pl.Expr:
    return (pl.col("part") == "compare") & (pl.col("epsilon") == epsilon)


def network(epsilon: float) -> pl.Expr:
    return (pl.col("part") == "network") & (pl.col("epsilon") == epsilon)


def ready_optimizer(workload: Any) -> C4Optimizer:
    """An optimizer of table mode over the workload's linear model, without noise: set ``noise_multiplier`` or use `make_private_c4`."""
    if not isinstance(workload, Problem):
        raise AttributeError("there is no linear model to make an optimizer for")
    weights = torch.nn.Parameter(torch.zeros(workload.d, dtype=torch.float64))
    unit = float(np.median(np.linalg.norm(workload.features, axis=1)))
    return C4Optimizer(
        torch.optim.SGD([weights], lr=1.0 / unit**2, weight_decay=workload.l2),
        noise_multiplier=0.0,
        schedule=GeometricThreshold(0.1 * unit, 0.98, floor=0.01 * unit),
        sampling=Sampling("full", workload.n),
        mode="table",
    )


AUDIT = pl.col("part") == "audit"
STRETCHED = (pl.col("part") == "noise") & (pl.col("pace") == "stretched")
STUDY = Study(
    open=open_workload,
    workloads={
        "smoke": ["small", "canaries"],
        "desk": [*KNOWN, "digits-network", "canaries"],
        "full": [*KNOWN, "digits-network", "canaries"],
    },
    plan=plan,
    trial=trial,
    prepare=prepare,
    method="c4",
    arms="arm",
    block="seed",
    seeds={"smoke": 1, "desk": 12, "full": 40},
    alone=lambda condition: condition["part"] == "speed",
    libraries={"*": ["torch", "opacus", "dp-accounting", "scikit-learn"]},
    accepts=["table", "value"],
    own_arm="a callable (problem, budget, settings, seed) -> weights, array of shape (d,); problem has n, d, l2, delta and gradients(weights) -> (n, d), budget has epsilon, delta and evaluations, settings is None",
    component=ready_optimizer,
    covers="the noise and the samples that are drawn, on the same data",
    claims=[
        Claim(
            1,
            part="a",
            paper="Coupled clipping removes the solution bias of clipping.",
            tested="Without noise, logistic regression on 200 rows, thresholds with a floor: the gradient at the end is at most 1e-8.",
            scope="exact",
            source=SHEET,
            measure=violations(pl.col("residual") > 1e-8, "a gradient above 1e-8"),
            rule=always(),
            where=(pl.col("part") == "bias") & (pl.col("arm") == "c4"),
            workloads=SHORT,
        ),
        Claim(
            1,
            part="b",
            paper="Plain clipping has that bias.",
            tested="Clipped gradient descent with the floor as its threshold: the gradient at the end is above 1e-3.",
            scope="exact",
            source=SHEET,
            measure=violations(pl.col("residual") <= 1e-3, "a gradient of at most 1e-3"),
            rule=always(),
            where=(pl.col("part") == "bias") & (pl.col("arm") == "dp-sgd"),
            workloads=SHORT,
        ),
        *(
            Claim(
                2,
                part=part,
                paper="At equal privacy the error is lower than that of DP-SGD and its variants.",
                tested=f"Excess loss at epsilon {epsilon:g} below that of the best of DP-SGD (all records, Poisson samples), AUTO-S, AdaClip, decaying noise.",
                scope="proxy",
                source=SHEET,
                measure=versus_best("excess", "c4", PEERS),
                rule=below(1.0),
                where=compare(epsilon),
                workloads=KNOWN,
                pooled=False,
            )
            for part, epsilon in zip("abc", EPSILONS, strict=True)
        ),
        Claim(
            2,
            part="d",
            paper="So is that of the variant that needs less memory.",
            tested="Snapshot mode on Poisson samples, epsilon 2: excess loss below that of the best of the same five.",
            scope="proxy",
            source=SHEET,
            measure=versus_best("excess", "c4-snapshot", PEERS),
            rule=below(1.0),
            where=compare(2.0),
            workloads=KNOWN,
            pooled=False,
        ),
        Claim(
            3,
            part="a",
            paper="The variance of the noise vanishes.",
            tested="In 640 steps at epsilon 2, thresholds falling by 2 % a step, the noise of a step falls below a hundredth of the first one's (so by construction).",
            scope="exact",
            source=SHEET,
            measure=average("noise_fall", "c4"),
            rule=below(0.01),
            where=(pl.col("part") == "noise") & (pl.col("pace") == "fixed"),
            workloads=SHORT,
            pooled=False,
        ),
        Claim(
            3,
            part="b",
            paper="The error vanishes with the number of steps, the budget being what it is.",
            tested="Excess loss at epsilon 2 over 40, 160 and 640 steps, settings tuned for each, falls at least like steps to the power -1/2.",
            scope="exact",
            source=f"{SHEET}; the method's sheet says why it cannot",
            measure=growth("excess", "steps", "c4"),
            rule=below(-0.5),
            where=STRETCHED & (pl.col("epsilon") == 2.0),
            workloads=SHORT,
            pooled=False,
            changed="In a first run thresholds fell by 2 % a step whatever the number of steps, with settings tuned for 100 steps, so that long runs stood still; "
            "the rule is the same (it failed there too, with 0.95 and 0.16).",
        ),
        *(
            Claim(
                4,
                part=part,
                paper="A tailored allocation of the budget over the steps lowers the error.",
                tested=f"Multipliers by thresholds: excess loss at epsilon 2 below that of equal ones on {name}.",
                scope="proxy",
                source=SHEET,
                measure=ratio("excess", "c4", "c4-uniform"),
                rule=below(1.0),
                where=compare(2.0),
                workloads=[name],
            )
            for part, name in zip("abcd", KNOWN, strict=True)
        ),
        *(
            Claim(
                5,
                part=part,
                paper="Non-convex problems too are solved better than by DP-SGD.",
                tested=f"Network of 32 hidden units on digits, epsilon {epsilon:g}: held-out error below that of the better of Opacus with all records and with samples.",
                scope="reduced",
                source=SHEET,
                measure=versus_best("error", "c4", ("dp-sgd", "dp-sgd-poisson"), kind="difference"),
                rule=below(0.0),
                where=network(epsilon),
                workloads=["digits-network"],
            )
            for part, epsilon in zip("abcd", NETWORK_EPSILONS, strict=True)
        ),
        Claim(
            6,
            paper="The privacy claimed is real.",
            tested="No one-run audit with 300 canaries refutes epsilon 1 or 2 (confidence 99 %), in table and in snapshot mode.",
            scope="exact",
            source="the method's sheet",
            measure=violations(pl.col("epsilon_lower") > pl.col("epsilon"), "a lower bound above the claim"),
            rule=always(),
            where=AUDIT & pl.col("arm").is_in(("c4", "c4-snapshot")),
            workloads=["canaries"],
        ),
        Claim(
            7,
            part="a",
            paper="(Ours.) The audit sees missing noise.",
            tested="Without noise the same audits refute epsilon 1 and 2, every time.",
            scope="ours",
            source=OURS,
            measure=violations(pl.col("epsilon_lower") <= pl.col("epsilon"), "a lower bound not above the claim"),
            rule=always(),
            where=AUDIT & (pl.col("arm") == "no-noise"),
            workloads=["canaries"],
        ),
        Claim(
            7,
            part="b",
            paper="(Ours.) The implementation for which the error would vanish is not private.",
            tested="Publishing the exact mean reference, with noise of the present threshold, is refuted at epsilon 1 and 2, every time.",
            scope="ours",
            source=OURS,
            measure=violations(pl.col("epsilon_lower") <= pl.col("epsilon"), "a lower bound not above the claim"),
            rule=always(),
            where=AUDIT & (pl.col("arm") == "mean-reference"),
            workloads=["canaries"],
        ),
        Claim(
            8,
            part="a",
            paper="(Ours.) The noise of all steps stays in the estimated gradient.",
            tested="Squared distance of G from the mean reference over d sum (sigma tau / n)^2 is one within 15 %.",
            scope="ours",
            source=OURS,
            measure=average("left_over_expected", "c4"),
            rule=within(0.85, 1.15),
            where=STRETCHED,
            workloads=SHORT,
            pooled=False,
        ),
        Claim(
            8,
            part="b",
            paper="(Ours.) It is of the order that no private method goes below.",
            tested="That distance is above d S^2 / (n epsilon)^2, S being the sum of the thresholds (the order of the lower bound; its constant is not known), at epsilon 0.5, 2 and 8; up to chance this follows from the calibration.",
            scope="ours",
            source=OURS,
            measure=average("left_over_bound", "c4"),
            rule=above(1.0),
            where=STRETCHED,
            workloads=SHORT,
            pooled=False,
        ),
        Claim(
            8,
            part="c",
            paper="(Ours.) The log of a run tells its epsilon.",
            tested="Epsilon computed again from the log lies between 0.99 of the budget and the budget.",
            scope="ours",
            source=OURS,
            measure=violations(
                (pl.col("spent") > pl.col("epsilon")) | (pl.col("spent") < 0.99 * pl.col("epsilon")), "another epsilon"
            ),
            rule=always(),
            where=STRETCHED,
            workloads=SHORT,
        ),
        Claim(
            9,
            paper="(Ours.) References cost little time.",
            tested="A step of table mode on 1,797 records takes at most three times Opacus's, per-sample gradients given.",
            scope="ours",
            source=OURS,
            measure=ratio("step_seconds", "c4", "dp-sgd", repeats="median"),
            rule=below(3.0),
            where=pl.col("part") == "speed",
            workloads=["digits"],
        ),
        Claim(
            10,
            paper="(Ours.) On a table of your own the error is lower than that of the best of the five.",
            tested="Excess loss below that of the best of DP-SGD (all records, Poisson samples), AUTO-S, AdaClip, decaying noise, mean over budgets.",
            scope="ours",
            source=OURS,
            measure=versus_best("excess", "c4", PEERS),
            rule=below(1.0),
            where=pl.col("part") == "compare",
            workloads=[*KNOWN, "own"],
            pooled=False,
        ),
    ],
    answer=Answer(
        measure=versus_best("excess", "c4", exclude=VARIANTS),
        where=pl.col("part") == "compare",
        workloads=[*KNOWN, "own"],
        by="epsilon",
        by_label="at epsilon {level:g}",
        better="use DP-C4 here: its excess loss is {estimate} times [{low}, {high}] that of {peer} on {workload}",
        worse="keep {peer} here: DP-C4's excess loss is {estimate} times [{low}, {high}] as large on {workload}",
        tie="no difference seen: DP-C4's excess loss is {estimate} times [{low}, {high}] that of {peer} on {workload}",
    ),
    figures=[
        Figure(
            "Excess loss at equal privacy and equal gradient evaluations",
            x="epsilon",
            y="excess",
            where=pl.col("part") == "compare",
            workloads=[*KNOWN, "own"],
            x_title="epsilon",
            y_title="excess loss",
        ),
        Figure(
            "The error does not vanish with the steps",
            x="steps",
            y="excess",
            where=STRETCHED & (pl.col("epsilon") == 2.0),
            workloads=SHORT,
            x_title="steps",
            y_title="excess loss at epsilon 2",
        ),
        Figure(
            "A network on digits",
            x="epsilon",
            y="error",
            where=pl.col("part") == "network",
            workloads=["digits-network"],
            x_title="epsilon",
            y_title="held-out error",
        ),
    ],
)
