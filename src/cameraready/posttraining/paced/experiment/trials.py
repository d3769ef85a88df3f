"""One arm, all runs at once: from training to rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cameraready.posttraining._testbed import exact
from cameraready.posttraining.paced.balance import log_z_intercept
from cameraready.posttraining.paced.experiment.arms import ARMS, RATES, Arm
from cameraready.posttraining.paced.experiment.measures import at_rollouts, at_target, quality, rollouts_to
from cameraready.posttraining.paced.experiment.training import Run, trained
from cameraready.posttraining.paced.experiment.worlds import Place

#: What is shown as curves, of which arms, at how many points.
SHOWN = "slow"
CURVES, POINTS = ("uniform", "selection", "paced", "dynamic", "grpo", "grpo-selection"), 10
#: Of a step's groups: with right and wrong answers, with right ones alone, with wrong ones alone.
SHARES = ("mixed", "all_right", "all_wrong")
#: Share of the budget after which arms are compared at equal rollouts: about what GRPO needs to the target on the seeds of `tuning`.
EARLY = {"tuned": 1 / 8, "slow": 1 / 4}
#: Above this mean accuracy of the pool there is little left to rank.
LEARNT = 0.9


class Watch:
    """Looks at the estimates now and then, against exact accuracies of the pool."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def __call__(self, run: Run) -> None:
        if not run.step:
            return
        truth = run.pool_accuracy()
        row = {"drawn": run.drawn.double().clone(), "pool": truth.double().mean(-1)}
        for name, estimate in (("", run.heads), ("_running", run.counters), ("_blind", run.blind)):
            row |= {column + name: value for column, value in quality(estimate.accuracy(), truth).items()}
        self.seen.append(row)

    def means(self) -> dict[str, Tensor]:
        """Of each column over the looks of each run, the first one and those before the pool was learnt; NaN looks left out."""
        if not self.seen:
            return {}
        table = {name: torch.stack([row[name] for row in self.seen]) for name in self.seen[0]}
        counts = table["pool"] < LEARNT
        counts[0] = True
        return {
            name: torch.where(counts, values, torch.nan).nanmean(0)
            for name, values in table.items()
            if name not in ("drawn", "pool")
        }


def train(
    place: Place, prepared: Mapping[str, Any], *, arm: str, rate: str, own: Callable[[Tensor, int], Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Rows of an arm, or of a user's `own` estimate: a summary of each run, and for some arms its course."""
    policy, watch = place.policy(prepared), Watch()
    chosen, limit = (ARMS[arm] if own is None else Arm(selection="own")), float(place.settings.budget)
    target = place.aim(policy)
    lr = chosen.lr if rate == "tuned" else RATES[0]
    began, points, run = time.perf_counter(), [], None
    for run, point in trained(place.world, policy, chosen, place.numbers, place.settings, lr=lr, look=watch, own=own):  # noqa: B007
        points.append(point)
    assert run is not None
    seconds = time.perf_counter() - began
    rollouts, reached = rollouts_to(points, limit=limit, target=target)
    columns: dict[str, Tensor] = {
        "rollouts": rollouts,
        "reached": reached.double(),
        "drawn": run.drawn.double(),
        "trained_on": run.kept,
    }
    for name in ("accuracy", "pass8", "distinct8", "entropy"):
        columns[name] = at_rollouts(points, name, limit)
        # Early, where arms differ: later all have learnt what there is.
        columns[f"{name}_early"] = at_rollouts(points, name, limit * EARLY[rate])
        if name != "accuracy":
            columns[f"{name}_at"] = at_target(points, name, limit=limit, target=target)
    columns |= watch.means()
    columns["spearman_gain"] = columns["spearman"] - columns["spearman_running"]
    columns["mae_gain"] = columns["mae_running"] - columns["mae"]
    columns["beta_kl"] = torch.stack(run.beta_kl).mean(0)
    columns["spread"] = run.with_spread / run.groups
    # Groups that were sampled for one that carries a signal: what a selection saves.
    columns["per_signal"] = run.drawn.double() / place.settings.group / run.with_spread.clamp(min=1)
    shared = {"kind": "summary", "estimate_share": run.estimate_seconds / seconds}
    for row, number in enumerate(place.numbers):
        yield {"run": number, **shared, **{name: _rounded(value[row]) for name, value in columns.items()}}
    if arm in CURVES and (rate == SHOWN or place.target is None):
        yield from _course(place, points, watch, limit)


def _course(place: Place, points: list[dict[str, Tensor]], watch: Watch, limit: float) -> Iterator[dict[str, Any]]:
    points = [
        {**points[1], **{name: points[0][name] for name in points[0] if name not in SHARES}},
        *points[1:],
    ]  # no group yet at 0
    for at in torch.linspace(0, limit, POINTS + 1):
        columns = {
            name: at_rollouts(points, name, at) for name in ("accuracy", "pass8", "distinct8", "entropy", *SHARES)
        }
        if watch.seen:
            columns |= {name: at_rollouts(watch.seen, name, at) for name in ("mae", "mae_running")}
        for row, number in enumerate(place.numbers):
            yield {
                "run": number, "kind": "course", "after": float(at), **{f"{name}_now": _rounded(value[row], 4) for name, value in columns.items()}
            }  # fmt: skip


def proposition(place: Place, prepared: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Proposition 4.1 by enumeration of every answer to every prompt of the pool, in float64."""
    policy = place.policy(prepared)
    task, beta = place.world.training, place.settings.beta
    moved = policy.copy()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        old, new = (torch.log_softmax(p.all_log_probs(task).double(), -1) for p in (policy, moved))
    reward = task.reward.double().expand_as(old)
    intercept = log_z_intercept(new, old, reward, beta, probabilities=old.exp())
    p, divergence = exact.mean_reward(old, task.reward), exact.kl(old, new)
    deviation = (intercept - p / beta - divergence).abs().amax(-1)
    partition = beta * exact.log_partition(old, task.reward, beta)
    for row, number in enumerate(place.numbers):
        yield {
            "run": number, "kind": "exact", "arm": "intercept", "deviation": float(deviation[row]),
            "divergence": float(divergence[row].mean()), "partition_error": float((partition[row] - p[row]).abs().mean()),
        }  # fmt: skip


def _rounded(value: Tensor, digits: int = 6) -> float:
    """Rows are shipped: no digit that means nothing."""
    return float(f"{float(value):.{digits}g}")
