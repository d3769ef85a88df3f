"""Reinforcement learning of tiny recurrent policies on an enumerable task: one arm, all its seeds side by side, at equal measured KL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cameraready.posttraining import _testbed
from cameraready.posttraining.bandpo.experiment.arms import ARMS
from cameraready.posttraining.bandpo.experiment.matching import matched
from cameraready.posttraining.bandpo.loss import BUCKETS

#: Optimizer steps on each round of 16 prompts with 16 completions.
MINIBATCHES, PROMPTS, GROUP, RATE = 8, 16, 16, 2e-3
#: Seeds on which settings are chosen; never those of a verdict.
TUNING = (1000, 1001, 1002, 1003)


class Field:
    """A task with what a run on it takes."""

    def __init__(self, task: Any, *, seeds: int, rounds: int, tuning_rounds: int, warm_up: int) -> None:
        self.task, self.seeds, self.rounds, self.tuning_rounds, self.warm_up = (
            task,
            seeds,
            rounds,
            tuning_rounds,
            warm_up,
        )
        self.prompts = min(PROMPTS, task.prompts)
        self.minibatches = next(m for m in range(MINIBATCHES, 0, -1) if self.prompts % m == 0)


def prepared(field: Field) -> dict[str, np.ndarray]:
    """Policies taught the task's start, for the verdict's seeds and then the tuning's; and how far a round of clip 0.2 moves."""
    numbers = [*range(field.seeds), *TUNING]
    policy = _testbed.GRUs(numbers, field.task.vocabulary, field.task.features.shape[1])
    if field.task.start is not None:
        _testbed.warm_up(
            policy, field.task, steps=field.warm_up, prompts_per_step=min(32, field.task.prompts), seeds=numbers
        )
    state = {f"policy/{name}": value.numpy() for name, value in policy.state().items()}
    kl = _sweep(field, ARMS["clip"], state, (1.0,))
    if not kl[0] > 0:
        raise ValueError(
            f"on {field.task.name} a policy does not move in {field.tuning_rounds} rounds of clipped policy gradients, so that there is nothing to be "
            "clipped: in no group of 16 completions do rewards differ. Give a task that is right sometimes"
        )
    return {**state, "target": np.array(kl[0])}


def trained(
    field: Field, arm: Any, given: Mapping[str, np.ndarray], multiple: float | None = None
) -> list[dict[str, Any]]:
    """Rows of one arm, at the multiple of its usual setting that brings it to the target's KL or a given one: for each run its end, and its curve.

    Returns
    -------
    list of dict
        ``kind`` "end": setting, KL of a round and its ratio to the target, rounds until the goal (the length of the run where it was not
        reached; ``reached`` says which), numbers at the end, means over the run, numbers at equal KL spent.
        ``kind`` "curve": numbers by round. ``kind`` "bucket": shares of cut tokens by old probability.
    """
    target = float(given["target"])
    if multiple is None:
        multiple = matched(arm.multiples, _sweep(field, arm, given, arm.multiples), target)
    rows = run(
        field,
        arm,
        _policy(field, given, range(field.seeds)),
        range(field.seeds),
        [multiple] * field.seeds,
        field.rounds,
        2,
    )
    found = []
    for seed in range(field.seeds):
        curve = [row for row in rows if row["run"] == seed]
        found.append({"run": seed, "kind": "end", "multiple": multiple, **_end(field, curve, target)})
        found += buckets(seed, {name: sum(row[name] for row in curve[1:]) for name in curve[-1] if name[-2:-1] == "_"})
        found += [_point(row, rows) for row in curve if row["step"] % 4 == 0]
    return found


def gentle(field: Field, arm: Any, given: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """The same at its usual setting, and at a learning rate at which ratios hardly leave 1."""
    seeds = range(field.seeds)
    rows = run(
        field, arm, _policy(field, given, seeds), seeds, [1.0] * field.seeds, field.rounds, field.rounds, RATE / 10
    )
    ends = [row for row in rows if row["step"] == field.rounds]
    return [
        {"run": row["run"], "kind": "end", "accuracy": row["accuracy"], "clip_up": row.get("clip_up", 0.0)}
        for row in ends
    ]


def run(
    field: Field,
    arm: Any,
    policy: Any,
    seeds: Sequence[int],
    multiples: Sequence[float],
    rounds: int,
    every: int,
    rate: float = RATE,
) -> list[dict[str, Any]]:
    """Train `policy` by `arm`; rows of `_testbed.train`, the k-th policy as run k."""
    scale = torch.tensor(list(multiples), dtype=torch.float32)
    fixed = arm.sweeps == "lr"
    setting = torch.full_like(scale, arm.usual) if fixed else arm.usual * scale

    def loss(logps: Tensor, batch: Any, context: Any) -> tuple[Tensor, dict[str, Tensor]]:
        advantages = _testbed.group_advantages(batch.rewards)
        return arm(logps, batch.old_logps, advantages, batch.mask, setting)

    task = field.task
    return _testbed.train(
        policy,
        task,
        loss=loss,
        steps=rounds,
        prompts_per_step=field.prompts,
        group=GROUP,
        minibatches=field.minibatches,
        lr=rate * scale if fixed else rate,
        seeds=list(range(len(scale))),
        generators=[torch.Generator().manual_seed(7_000 + seed) for seed in seeds],
        every=every,
        kl_every=2,
        evaluate=torch.arange(0, task.prompts, max(task.prompts // 64, 1)),
    )


def _sweep(field: Field, arm: Any, given: Mapping[str, np.ndarray], multiples: Sequence[float]) -> list[float]:
    """Mean KL of a round on the tuning seeds, for each multiple; all side by side."""
    places = [field.seeds + place for place in range(len(TUNING))]
    policy = _policy(field, given, places * len(multiples))
    each = [multiple for multiple in multiples for _ in TUNING]
    rows = run(field, arm, policy, [*TUNING] * len(multiples), each, field.tuning_rounds, field.tuning_rounds)
    spent = np.array([row["kl_spent"] for row in rows if row["step"] == field.tuning_rounds])
    return (spent.reshape(len(multiples), len(TUNING)).mean(1) / field.tuning_rounds).tolist()


def _policy(field: Field, given: Mapping[str, np.ndarray], places: Sequence[int]) -> Any:
    numbers = [*range(field.seeds), *TUNING]
    policy = _testbed.GRUs(numbers, field.task.vocabulary, field.task.features.shape[1])
    state = {
        name.removeprefix("policy/"): torch.from_numpy(np.array(value))
        for name, value in given.items()
        if name.startswith("policy/")
    }
    return policy.load(state).select(list(places))


def _goal(field: Field, curve: Sequence[Mapping[str, Any]]) -> tuple[str, float]:
    """What is waited for: the rare strategy in half of the answers, or else half of the way from the first accuracy to 1."""
    if "rare" in field.task.kinds:
        return "mass_rare", 0.5
    return "accuracy", 0.5 * (1.0 + curve[0]["accuracy"])


def _end(field: Field, curve: Sequence[Mapping[str, Any]], target: float) -> dict[str, Any]:
    last, later = curve[-1], curve[1:]
    column, level = _goal(field, curve)
    times = _testbed.first_time(curve, column, level)
    waited = _testbed.censored(list(times.values()), field.rounds).rows("rounds_to_goal")[0]
    steps, spent = [row["step"] for row in curve], [row["kl_spent"] for row in curve]
    per_round = float(np.interp(field.tuning_rounds, steps, spent)) / field.tuning_rounds
    found = {
        "kl_round": per_round,
        "kl_ratio": per_round / target,
        "rounds_to_goal": waited["rounds_to_goal"],
        "reached": float(waited["rounds_to_goal_seen"]),
    }
    for name in ("accuracy", "token_entropy", "entropy", "pass@16", "distinct@16"):
        values, plain = [row[name] for row in curve], name.replace("@", "")
        found[plain] = values[-1]
        found[f"{plain}_mean"] = float(np.trapezoid(values, steps) / (steps[-1] - steps[0]))
        # Halfway through the budget of KL: the same for all arms of a workload.
        found[f"{plain}_at_kl"] = float(np.interp(0.5 * target * field.rounds, spent, values))
    found |= {name: float(np.mean([row[name] for row in later])) for name in ("clip_up", "clip_down") if name in last}
    return {name: float(f"{value:.6g}") for name, value in found.items()}


def buckets(run: int, sums: Mapping[str, float]) -> list[dict[str, Any]]:
    """Rows with the shares of tokens that were cut, by old probability; buckets without a token are left out."""
    rows = []
    for place, edge in enumerate((*BUCKETS, 1.0)):
        if sums.get(f"tokens_{place}", 0) > 0:
            up, down = (sums[f"{side}_{place}"] / sums[f"tokens_{place}"] for side in ("up", "down"))
            rows.append(
                {
                    "run": run,
                    "kind": "bucket",
                    "p_up_to": edge,
                    "share_up": float(f"{up:.4g}"),
                    "share_down": float(f"{down:.4g}"),
                }
            )
    return rows


def _point(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A point of a run's curve; KL spent is the mean over the arm's runs, so that runs share their abscissa."""
    names = {
        "token_entropy": "entropy_now",
        "accuracy": "accuracy_now",
        "mass_rare": "rare_now",
        "pass@16": "pass16_now",
    }
    spent = float(np.mean([each["kl_spent"] for each in rows if each["step"] == row["step"]]))
    point = {to: row[name] for name, to in names.items() if row.get(name) is not None and row[name] == row[name]} | {
        "spent": spent
    }
    return {
        "run": row["run"],
        "kind": "curve",
        "round": row["step"],
        **{name: float(f"{value:.4g}") for name, value in point.items()},
    }
