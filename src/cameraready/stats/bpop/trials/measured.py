"""What a trial measures: recovery of a known order, agreement with enumeration, speed, and a user's own traces."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from cameraready.evidence import Context
from cameraready.stats.bpop import LatentPrior, PartialOrderModel, exact_posterior, posets
from cameraready.stats.bpop.inference.bitsets import encode
from cameraready.stats.bpop.inference.diagnostics import calibration_table
from cameraready.stats.bpop.inference.numpy_sampler import NumpyChain, trace_log_likelihood
from cameraready.stats.bpop.inference.sampler import Target, advance, begin_chain
from cameraready.stats.bpop.trials.rivals import Found, arms, inferred
from cameraready.stats.bpop.trials.simulation import Costs, execute
from cameraready.stats.bpop.trials.workloads import Workload, draw_traces

#: Numbers of actions at which steps are timed.
SIZES = (8, 16, 32, 64)


def recovered(
    workload: Workload,
    ctx: Context,
    instance: int,
    *,
    arm: str,
    draw: str,
    coverage: float,
    noise: float,
    n_iter: int,
    padded: bool,
) -> dict[str, Any]:
    """How near an arm comes to the true order, and what running its graph would save."""
    assert workload.order is not None
    truth = workload.order(instance, ctx.prepared)
    seed = [ctx.seed, instance, len(truth), round(100 * coverage), round(100 * noise), sum(map(ord, draw))]
    law: dict[str, Any] = {"draw": draw, "coverage": coverage, "noise": noise, "padded": padded}
    traces = draw_traces(truth, n_traces=20, seed=seed, **law)
    started = time.perf_counter()
    found = inferred(arms(ctx, n_iter)[arm], traces, len(truth), 1_000 * ctx.seed + instance)
    seconds = time.perf_counter() - started
    held_out = draw_traces(truth, n_traces=50, seed=[*seed, 1], **{**law, "coverage": 1.0, "padded": False})
    trace, costs = held_out[0], Costs.drawn(len(truth), np.random.default_rng([*seed, 2]))
    if not posets.is_linear_extension(trace, truth):
        trace = posets.frontier_walk(truth, np.random.default_rng([*seed, 3]))
    free = posets.incomparable(truth)
    seen = posets.seen_both_ways(traces, len(truth))
    return {
        **scores(found.order, truth),
        **execute(found.order, truth, costs, trace),
        **predictions(found, held_out, truth),
        **found.numbers,
        "ip_cov": float(seen[free].mean()) if free.any() else 1.0,
        "n_traces": len(traces),
        "n_actions": len(truth),
        "seconds": seconds,
    }


def scores(order: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Edges of the transitive reductions compared, and pairs of the closures: missing ones break runs, extra ones delay them."""
    mine, true = posets.cover(order), posets.cover(truth)
    wrong, reversed_ = mine ^ true, mine & true.T
    return {
        "edge_f1": f1(mine, true),
        "closure_f1": f1(order, truth),
        "shd": float(wrong.sum()),  # a reversed edge is one too many and one too few
        "reversed": float(reversed_.sum()),
        "missed": float((truth & ~order).sum()),
        "extra": float((order & ~truth).sum()),
    }


def f1(found: np.ndarray, true: np.ndarray) -> float:
    """Harmonic mean of precision and recall; 1 where there is nothing to find and nothing was found."""
    total = found.sum() + true.sum()
    return float(2 * (found & true).sum() / total) if total else 1.0


def predictions(found: Found, held_out: list[list[int]], truth: np.ndarray | None) -> dict[str, float]:
    """What an order says of traces that it has not seen, and whether its probabilities mean what they say.

    The loss gives every arm's order the same law: a uniform choice among what is ready, and 2 % of errors.
    """
    loss = -sum(trace_log_likelihood(trace, trace, found.order, 0.0, 0.02) for trace in held_out)
    row = {
        "feasible": float(np.mean([posets.is_linear_extension(trace, found.order) for trace in held_out])),
        "loss_per_step": loss / sum(map(len, held_out)),
    }
    if found.probability is not None and truth is not None:
        pairs = ~np.eye(len(truth), dtype=bool)
        row["ece"] = calibration_table(found.probability[pairs], truth[pairs].astype(float), 10)[1]
    return row


def own_traces(workload: Workload, ctx: Context, instance: int, *, arm: str) -> dict[str, Any]:
    """On a user's traces: half of them, drawn by the instance, are shown to the arm, the others are held out."""
    assert workload.traces is not None
    actions = list(dict.fromkeys(action for trace in workload.traces for action in trace))
    places = [[actions.index(action) for action in trace] for trace in workload.traces]
    shown = np.random.default_rng([ctx.seed, instance]).permutation(len(places))
    half = len(places) // 2
    found = inferred(arms(ctx, 50_000)[arm], [places[i] for i in shown[:half]], len(actions), instance)
    free = posets.incomparable(found.order)
    pairs = len(actions) * (len(actions) - 1) / 2
    return {
        **predictions(found, [places[i] for i in shown[half:]], None),
        **found.numbers,
        "free_share": float(free.sum() / pairs) if pairs else 0.0,
        "noise": 0.0,  # none was added
    }


def enumerated(workload: Workload, ctx: Context, instance: int) -> dict[str, Any]:
    """The sampler's probabilities against those of all partial orders enumerated."""
    assert workload.order is not None
    truth = workload.order(instance, ctx.prepared)
    n, generator = len(truth), np.random.default_rng([ctx.seed, instance])
    traces = [posets.frontier_walk(truth, generator, beta=1.0, eps=0.1) for _ in range(3 + 2 * (instance // 4))]
    exact = exact_posterior(traces, range(n), eps=0.05, seed=instance)
    fitted = PartialOrderModel(n_iter=200_000, eps=0.05, seed=instance, thin=20).fit(traces, actions=range(n))
    gap = np.abs(fitted.edge_probability.to_numpy() - exact.edge_probability)
    return {"arm": "bpop", "n_actions": n, "edge_gap": float(gap.max())}


def speed(workload: Workload, ctx: Context, instance: int) -> list[dict[str, Any]]:
    """Seconds a step of the compiled sampler and of the same one in NumPy, in turn, on the same chain, at four sizes."""
    return [row for n_actions in SIZES for row in timed_steps(ctx, instance, n_actions)]


def timed_steps(ctx: Context, instance: int, n_actions: int) -> list[dict[str, Any]]:
    generator = np.random.default_rng([ctx.seed, instance, n_actions])
    truth = LatentPrior(dimension=3).draw(n_actions, 1, generator)[0]
    traces = [posets.frontier_walk(truth, generator, beta=1.0, eps=0.02) for _ in range(20)]
    target = Target(encode(traces, n_actions), n_actions, LatentPrior(), (2.0, 2.0), (0.0, 0.02))
    latent = generator.standard_normal((n_actions, 3))
    compiled = begin_chain(target, latent, np.random.default_rng(instance))
    plain = NumpyChain(target, traces, latent, np.random.default_rng(instance))
    orders, scalars = np.zeros((0, *compiled.after.shape), dtype=np.uint64), np.zeros((0, 5))

    def fast(n_steps: int) -> None:
        advance(target, compiled, n_steps, thin=1, orders=orders, scalars=scalars)

    sides = ctx.select({"bpop": (fast, 4_000), "numpy": (plain.advance, 40 if n_actions <= 16 else 10)})
    for run, _ in sides.values():
        run(10)  # imports and first use are not what is compared
    rows = []
    for repeat in range(3):
        for name in list(sides)[:: 1 if repeat % 2 else -1]:
            run, n_steps = sides[name]
            started = time.perf_counter()
            run(n_steps)
            seconds = (time.perf_counter() - started) / n_steps
            rows.append({"arm": name, "n_actions": n_actions, "seconds_per_step": seconds})
    return rows
