"""How the arms' learning rates and the estimates' settings were chosen: on seeds that no verdict uses, equally many settings for each.

``python -m cameraready.posttraining.paced.experiment.tuning`` prints the tables that `arms` and `training.Settings` hold.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import torch

from cameraready.posttraining._testbed import GRUs, many_answers
from cameraready.posttraining.paced.experiment.arms import ARMS, RATES
from cameraready.posttraining.paced.experiment.measures import rollouts_to
from cameraready.posttraining.paced.experiment.training import Run, Settings, World, trained

SEEDS = (1000, 1001, 1002, 1003)
HEAD_RATES, FORGETTING = (1e-3, 3e-3, 1e-2), (0.7, 0.9, 1.0)
BUDGET = 5_120


def rollouts_by_rate(world: World, policy: GRUs, name: str, rates: Sequence[float] = RATES) -> dict[float, float]:
    """Mean rollouts to the target of an arm at each rate; runs that do not get there count with the budget."""
    found = {}
    for rate in rates:
        settings = Settings(budget=BUDGET)
        points = [at for _, at in trained(world, policy, ARMS[name], SEEDS, settings, lr=rate)]
        found[rate] = float(rollouts_to(points, limit=BUDGET)[0].mean())
    return found


def errors_by_setting(world: World, policy: GRUs) -> dict[str, dict[float, float]]:
    """Mean absolute error over the pool of each estimate at each setting, in runs with uniform prompts at the smallest rate."""
    found: dict[str, dict[float, float]] = {"partition": {}, "running-average": {}}
    for head_lr, forgetting in zip(HEAD_RATES, FORGETTING, strict=True):
        settings = dataclasses.replace(Settings(), head_lr=head_lr, forgetting=forgetting, budget=BUDGET)
        errors: dict[str, list[torch.Tensor]] = {name: [] for name in found}

        def look(run: Run, errors: dict[str, list[torch.Tensor]] = errors) -> None:
            if run.step:
                truth = run.pool_accuracy()
                for name, estimate in (("partition", run.heads), ("running-average", run.counters)):
                    errors[name].append((estimate.accuracy() - truth).abs().mean())

        for _ in trained(world, policy, ARMS["uniform"], SEEDS, settings, lr=RATES[0], look=look):
            pass
        for name, setting in (("partition", head_lr), ("running-average", forgetting)):
            found[name][setting] = float(torch.stack(errors[name]).mean())
    return found


def main(names: Sequence[str]) -> None:
    world = World(many_answers(400), 300)
    policy = world.policy(SEEDS)
    print(errors_by_setting(world, policy), flush=True)
    for name in names or ARMS:
        found = rollouts_by_rate(world, policy, name)
        print(
            name,
            min(found, key=lambda rate: found[rate]),
            {rate: round(value) for rate, value in found.items()},
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
