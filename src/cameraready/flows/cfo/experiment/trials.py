"""The trials: exact rounds on grids, networks in the plane, molecules, and a user's own problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cameraready.flows._pictures import plane
from cameraready.flows._toy.distances import energy_distance
from cameraready.flows.cfo import NFT, AdjointMatching, ConstrainedFlowOptimizer, ExactTilt, FlowPolicy, FlowSolver
from cameraready.flows.cfo.exact import Optimum
from cameraready.flows.cfo.experiment import arms
from cameraready.flows.cfo.experiment.arms import Tuned
from cameraready.flows.cfo.experiment.problems import (
    PLANE,
    SPAN,
    Steering,
    grid_problem,
    plane_networks,
    plane_optimum,
)

if TYPE_CHECKING:
    from cameraready.evidence import Context

Rows = Iterator[dict[str, Any]]

GRIDS, PLANE_NAME, MOLECULES = "grids", "mixture-2d", "molecules"
#: Learning rates, chosen from three on networks of other seeds by energy distance to what is looked for: 3e-4, 1e-3 and 3e-3 for adjoint matching alone; 1e-4, 3e-4
#: and 1e-3 for NFT alone; 1e-3, 3e-3 and 1e-2 for either sweep, whose trainings are short. Arms with rounds keep the rate of their inner solver alone.
RATES = {
    "am": 1e-3,
    "nft": 3e-4,
    "cfo": 1e-3,
    "cfo-expectation": 1e-3,
    "cfo-nft": 3e-4,
    "cooper": 1e-3,
    "18-weights": 1e-2,
    "8-weights": 1e-3,
}
#: Of guidance, chosen from 0.1, 0.3 and 1 in the same way.
STRENGTH = 0.3
#: Draws of the pretrained networks from which one sample is picked when they are reweighted.
POOL = 20
#: The expectation form is run for so many times more exact rounds, for the sake of its slowest problem.
EXPECTATION = 10
#: Iterations of every arm in the plane (the paper's M), and CFO's rounds and iterations a round (K and N).
BUDGET, ROUNDS = 600, 20
SPLITS = {"cfo-3-rounds": 3, "cfo-100-rounds": 100}
PLANE_ARMS = (
    "pretrained",
    "am",
    "nft",
    "cfo",
    "cfo-expectation",
    "cfo-nft",
    *SPLITS,
    "18-weights",
    "8-weights",
    "cooper",
    "guidance",
    "rejection",
    "resampling",
)
MOLECULE_ARMS = ("pretrained", "am", "cfo", "cfo-expectation", "cfo-rdkit")
OWN_ARMS = ("pretrained", "am", "cfo", "cfo-expectation")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- grids --------------------------------------------------------------------------------------------------------------


def exact(workload: Any, ctx: Context, *, problem: int, rounds: int) -> Rows:
    """Rounds solved exactly, with either penalty and either test; and what fixed weights reach."""
    given = grid_problem(problem)
    best = given.optimum()
    kinds: dict[str, dict[str, Any]] = {
        "cfo": {"penalty": "per_sample"},
        "cfo-textbook": {"penalty": "per_sample", "contraction": "textbook"},
        "cfo-expectation": {"penalty": "expectation"},
    }
    for arm, settings in ctx.select(kinds).items():
        if not isinstance(settings, dict):
            continue  # a user's solver needs a network
        cfo = ConstrainedFlowOptimizer(ExactTilt(), lambda_min=-100.0, **settings)
        found = cfo.fit(
            given.prior,
            reward=given.reward,
            constraint=given.constraint,
            bound=given.bound,
            kl=given.kl,
            rounds=EXPECTATION * rounds if arm == "cfo-expectation" else rounds,
            generator=generator(0),
            progress=False,
        )
        gaps = [max(abs(gap) for gap in each.gap) for each in found.history]
        last = found.history[-1]
        law = found.model.log_weights.exp()
        yield {
            "arm": arm,
            "run": str(problem),
            "stage": "end",
            "gap": gaps[-1],
            "above": max(last.gap),
            "distance": float((law - best.law.log_weights.exp()).abs().sum() / 2),
            "lost": best.objective - (last.reward - given.kl * last.divergence),
            "rate": slowest_rate(gaps),
        }
        yield from (
            {"arm": arm, "run": str(problem), "stage": "round", "round": each.round, "gap": max(gap, 1e-16)}
            for each, gap in zip(found.history, gaps, strict=True)
            if each.round in (1, 2, 3, 5, 8, 12, 20, 35, 60, 100, 200)
        )
    yield {"arm": "18-weights", "run": str(problem), "stage": "end", "good_weights": good_weights(problem)}


def slowest_rate(gaps: list[float]) -> float:
    """The largest factor by which |G| changed from one round to the next, after three rounds, until rounding is reached."""
    pairs = [(a, b) for a, b in pairwise(gaps[2:]) if a > 1e-9]
    return max((b / a for a, b in pairs), default=0.0)


def good_weights(problem: int) -> int:
    """How many of the 18 weights meet every bound and lose at most a twentieth of what tuning without bounds gains."""
    given = grid_problem(problem)
    best, prior, kl = given.optimum(), given.prior, given.kl
    r, c = given.reward(prior.points), given.constraint(prior.points)
    bound = torch.tensor(given.bound, dtype=torch.float64)
    free = torch.softmax(prior.log_weights + r / kl, 0) @ r
    least = best.reward - 0.05 * float(free - prior.log_weights.exp() @ r)
    count = 0
    for weight in arms.WIDE:
        law = torch.softmax(prior.log_weights + (r - weight * (c - bound).sum(-1)) / kl, 0)
        count += bool((law @ c <= bound + 1e-9).all()) and float(law @ r) >= least
    return count


# --- the plane ------------------------------------------------------------------------------------------------------------


def solver_of(arm: str, rates: Mapping[str, float] = RATES) -> FlowSolver:
    """The inner solver of an arm in the plane, at its rate."""
    common: dict[str, Any] = {"batch": 64, "steps": 16, "sample_steps": 40, "micro_batch": 2000}
    kind = NFT if arm in ("nft", "cfo-nft") else AdjointMatching
    splits = dict.fromkeys(SPLITS, rates["cfo"])
    return kind(lr={**splits, **rates}.get(arm, rates["am"]), **common)


def plane_base(ctx_seeds: list[int], steps: int, *, keep: bool, quiet: bool = False) -> FlowPolicy:
    """Networks that learned the mixture, side by side."""
    net = plane_networks(ctx_seeds, steps, keep=keep, quiet=quiet).requires_grad_(True)
    return FlowPolicy(net, (2,), (len(ctx_seeds),)).freeze()


def plane_arm(workload: Any, ctx: Context, *, arm: str, runs: int, pretraining: int, budget: int, n: int) -> Rows:
    """One arm for all runs at once."""
    seeds = list(range(runs))
    base = plane_base(seeds, pretraining, keep=pretraining >= 1000)
    yield from plane_rows(
        arm, base, generator(1000 + PLANE_ARMS.index(arm)), budget=budget, n=n, pictures=budget >= BUDGET
    )


def plane_rows(
    arm: str,
    base: FlowPolicy,
    g: torch.Generator,
    *,
    budget: int,
    n: int,
    rates: Mapping[str, float] = RATES,
    strength: float = STRENGTH,
    pictures: bool = False,
    own: Mapping[str, Any] | None = None,
) -> Rows:
    """Tune, draw, compare with the true optimum."""
    solver = solver_of(arm, rates)
    tuned, sampler, extra = run_plane(arm, base, PLANE, g, solver, budget=budget, n=n, strength=strength, own=own or {})
    x = sampler(n)
    best = plane_optimum()
    rows = judged(PLANE, x, base.runs)
    if tuned is not None:
        kl = solver.divergence(tuned.policy, base, min(n, 1000), g)
        for row, value in zip(rows, kl.tolist(), strict=True):
            row["kl"] = value
            # By paths, and so at most too large. r - alpha KL - mu (c - B) = J* - alpha KL(p || p*) for every law p, feasible or not.
            paid = row["reward"] - PLANE.kl * value - float(best.price) * (row["constraint"] - PLANE.bound)
            row["kl_to_optimum"] = (best.objective - paid) / PLANE.kl
    goal = drawn(best, min(n, 1000), g)
    for number, row in enumerate(rows):
        row["energy"] = float(energy_distance(x[number, : len(goal)].double(), goal))
        yield {"arm": arm, "run": str(number), "stage": "end", **row, **{k: v[number] for k, v in extra.items()}}
    yield from round_rows(arm, tuned)
    if pictures and arm in ("pretrained", "am", "cfo", "cfo-expectation"):
        label = arm if arm != "cfo" else "cfo (per sample)"
        yield {
            "arm": arm,
            "run": "0",
            "stage": "picture",
            "picture": plane(goal[:350], x[0, :350], labels=("the optimum", label), span=(-4, 4, -4, 4), size=260),
            "alt": f"350 samples of {label} over 350 of the optimum: mean reward {rows[0]['reward']:.2f}, mean constraint {rows[0]['constraint']:.2f} "
            f"against the bound {PLANE.bound:g}",
            "caption": f"{label}: reward {rows[0]['reward']:.2f}, constraint {rows[0]['constraint']:.2f}",
        }


def run_plane(
    arm: str,
    base: FlowPolicy,
    task: Steering,
    g: torch.Generator,
    solver: FlowSolver,
    *,
    budget: int,
    n: int,
    strength: float,
    own: Mapping[str, Any],
) -> tuple[Tuned | None, Callable[[int], Tensor], dict[str, list[Any]]]:
    """The tuned networks (None where nothing is tuned), a sampler, and columns of the arm's own."""
    n_mc = max(n // 2, 50)
    extra: dict[str, list[Any]] = {}
    loop: dict[str, Any] = {"rounds": ROUNDS, "inner": max(budget // ROUNDS, 1), "n_mc": n_mc}
    if arm == "guidance":
        return None, arms.guided_best(base, task, g, strength=strength, steps=solver.sample_steps, n_mc=n_mc), extra
    if arm == "resampling":
        return None, lambda count: arms.resampled(solver, base, task, g, count, POOL, extra), extra
    if arm in own:
        tuned = arms.one_by_one(own[arm], base, task, g, **loop)
    elif arm == "pretrained":
        tuned = Tuned(base, 0)
    elif arm in ("am", "nft", "rejection"):
        tuned = arms.alone(solver, base, task, g, iterations=budget)
    elif arm in SPLITS:
        rounds = SPLITS[arm]
        drawn_each = max(n_mc * ROUNDS // rounds, 20)  # as many samples in all
        tuned = arms.cfo(solver, base, task, g, rounds=rounds, inner=max(budget // rounds, 1), n_mc=drawn_each)
    elif arm in ("18-weights", "8-weights"):
        weights = arms.WIDE if arm == "18-weights" else arms.NARROW
        tuned = arms.sweep(solver, base, task, g, weights=weights, iterations=max(budget, len(weights)), n_mc=n_mc)
        extra["weight"] = tuned.rounds.pop()["weight"]
    elif arm == "cooper":
        tuned = arms.cfo(solver, base, task, g, **loop, objective=arms.Cooper(task, base.runs))
    else:
        penalty = "expectation" if arm == "cfo-expectation" else "per_sample"
        tuned = arms.cfo(solver, base, task, g, **loop, penalty=penalty)
    if arm != "rejection":
        return tuned, lambda count: solver.draw(tuned.policy, count, g)[0], extra

    def accepted(count: int) -> Tensor:
        """Samples of the tuned networks that meet the bound by themselves."""
        kept: list[list[Tensor]] = [[] for _ in range(math.prod(base.runs))]
        have, made_n = [0] * len(kept), 0
        while min(have) < count:
            x, _ = solver.draw(tuned.policy, count, g)
            made_n += count
            if made_n > 500 * count:
                raise RuntimeError(
                    "fewer than one sample in 500 meets the bound, so that rejection cannot fill its share"
                )
            meets = task.constraint(x) <= task.bound
            for place, (each, keep) in enumerate(zip(x, meets, strict=True)):
                if have[place] < count:
                    kept[place].append(each[keep])
                    have[place] += int(keep.sum())
        extra["draws_each"] = [made_n / min(h, made_n) for h in have]
        return torch.stack([torch.cat(parts)[:count] for parts in kept])

    return None, accepted, extra


def judged(task: Steering, x: Tensor, runs: tuple[int, ...]) -> list[dict[str, Any]]:
    """Mean reward and constraint of samples (*runs, n, ...), a row a run."""
    r, c = task.reward(x).double(), task.constraint(x).double()
    r, c = (r, c) if runs else (r.unsqueeze(0), c.unsqueeze(0))
    return [
        {
            "reward": float(reward.mean()),
            "constraint": float(cost.mean()),
            "excess": float(cost.mean() - task.bound) / abs(task.bound),
            "within": float((cost <= task.bound).double().mean()),
        }
        for reward, cost in zip(r, c, strict=True)
    ]


def round_rows(arm: str, tuned: Tuned | None) -> Rows:
    """What is drawn over rounds: few of them where there are many."""
    rounds = [] if tuned is None else tuned.rounds
    every = max(1, len(rounds) // 12)
    for each in rounds[::every]:
        for run, excess in enumerate(each["excess"]):
            yield {"arm": arm, "run": str(run), "stage": "round", "round": each["round"], "excess": excess}


def drawn(best: Optimum, n: int, g: torch.Generator) -> Tensor:
    """Samples of the optimum, each moved within its cell of the grid."""
    side = round(math.sqrt(len(best.law.points)))
    width = (SPAN[1] - SPAN[0]) / (side - 1)
    places = torch.multinomial(best.law.log_weights.exp(), n, replacement=True, generator=g)
    return best.law.points[places] + width * (torch.rand(n, 2, generator=g, dtype=torch.float64) - 0.5)
