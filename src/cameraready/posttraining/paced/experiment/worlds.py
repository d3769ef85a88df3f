"""The worlds that arms are trained on: the shipped pools of prompts, and a user's own enumerable task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from cameraready.posttraining._testbed import EnumerableTask, GRUs, exact, many_answers
from cameraready.posttraining.paced.experiment.measures import TARGET
from cameraready.posttraining.paced.experiment.training import Settings, World

POOL, SMALL = "many-answers", "many-answers-small"
NAMES = (POOL, SMALL)


@dataclass(frozen=True)
class Place:
    """A world with the seeds of the runs in a trial, their settings, and the held-out accuracy that is to be reached."""

    world: World
    settings: Settings
    numbers: tuple[int, ...] = tuple(range(16))
    target: float | None = TARGET

    def prepared(self) -> dict[str, np.ndarray]:
        """The policies before training."""
        return {name: value.numpy() for name, value in self.world.policy(self.numbers).state().items()}

    def part(self, number: int, of: int = 3) -> Place:
        """Every `of`-th run."""
        return replace(self, numbers=self.numbers[number::of])

    def policy(self, prepared: Mapping[str, Any]) -> GRUs:
        """These runs' policies, of what `prepared` gave for runs 0, 1, ..."""
        task = self.world.task
        made = GRUs(list(self.numbers), task.vocabulary, task.features.shape[1], width=self.world.width, layers=1)
        return made.load(
            {name: torch.as_tensor(np.array(value)[list(self.numbers)]) for name, value in prepared.items()}
        )

    def aim(self, policy: GRUs) -> float:
        """Held-out accuracy to be reached: half of what is missing, where no other is set."""
        if self.target is not None:
            return self.target
        prompts = self.world.held_out
        with torch.no_grad():
            now = exact.accuracy(
                policy.all_log_probs(self.world.task, prompts), self.world.task.correct[prompts]
            ).mean()
        return (1 + float(now)) / 2


def place_of(workload: Any) -> Place:
    """The place that a shipped name or a user's task stands for."""
    if workload == POOL:
        return Place(World(many_answers(400), 300), Settings())
    if workload == SMALL:
        return Place(
            World(many_answers(50), 40, width=16, warm_steps=60),
            Settings(budget=640, prompts=8, every=320),
            numbers=(0, 1),
            target=0.2,
        )
    task: EnumerableTask = workload
    if task.prompts < 4:
        raise ValueError(f"selection needs a pool of at least 4 prompts, and the task has {task.prompts}")
    # A task without features tells prompts apart by their number alone: so do the policy and the estimate then.
    if not task.features.shape[1]:
        task = EnumerableTask(
            task.name, task.tokens, task.lengths, task.correct, torch.eye(task.prompts), task.kinds,
            reward=task.reward, start=task.start, vocabulary=task.vocabulary,
        )  # fmt: skip
    # Where each prompt has a feature to itself, nothing carries over to prompts that are held out.
    alone = task.features.shape[1] == task.prompts and torch.equal(
        task.features, torch.eye(task.prompts).to(task.features)
    )
    pool = task.prompts if alone or task.prompts < 20 else task.prompts - task.prompts // 4
    return Place(World(task, pool), Settings(prompts=max(min(8, pool // 2) // 2 * 2, 2)), target=None)
