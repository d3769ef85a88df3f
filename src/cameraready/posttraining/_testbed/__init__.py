"""Policies over enumerable tasks, many seeds at once, whose accuracies, entropies, divergences and gradients are exact."""

from cameraready.posttraining._testbed import exact
from cameraready.posttraining._testbed.censoring import Censored, censored, first_time
from cameraready.posttraining._testbed.families import arms, many_answers, two_strategies
from cameraready.posttraining._testbed.gru import GRUs, seed_generators
from cameraready.posttraining._testbed.optimizers import SGD, AdamW, clip_per_seed
from cameraready.posttraining._testbed.sampling import Batch, group_advantages, sample
from cameraready.posttraining._testbed.tabular import Tabular
from cameraready.posttraining._testbed.tasks import EnumerableTask, from_function
from cameraready.posttraining._testbed.training import Context, train, uniform_prompts, warm_up

__all__ = [
    "SGD",
    "AdamW",
    "Batch",
    "Censored",
    "Context",
    "EnumerableTask",
    "GRUs",
    "Tabular",
    "arms",
    "censored",
    "clip_per_seed",
    "exact",
    "first_time",
    "from_function",
    "group_advantages",
    "many_answers",
    "sample",
    "seed_generators",
    "train",
    "two_strategies",
    "uniform_prompts",
    "warm_up",
]
