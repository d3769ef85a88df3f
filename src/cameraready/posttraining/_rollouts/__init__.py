"""Completions that a language model samples for problems that a program can check, in groups or as dialogues, and how they are counted."""

from cameraready.posttraining._rollouts.counting import (
    Estimate,
    canonical_expression,
    distinct_at_k,
    distinct_solutions,
    normaliser,
    pass_at,
    repeats,
)
from cameraready.posttraining._rollouts.dialogues import Dialogue, sample_attempts
from cameraready.posttraining._rollouts.groups import Group, Packed, pack, sample_groups
from cameraready.posttraining._rollouts.verifying import dataset, reward_func, score

__all__ = [
    "Dialogue",
    "Estimate",
    "Group",
    "Packed",
    "canonical_expression",
    "dataset",
    "distinct_at_k",
    "distinct_solutions",
    "normaliser",
    "pack",
    "pass_at",
    "repeats",
    "reward_func",
    "sample_attempts",
    "sample_groups",
    "score",
]
