"""What reward functions said of a batch of completions, by prompt: TRL hands on advantages alone."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

#: Column that tells a reward function which prompt it is about.
INDEX = "paced_index"


class Heard:
    """What the reward functions said of the batch of completions at hand, by function."""

    def __init__(self) -> None:
        self._said: dict[int, tuple[list[int], list[tuple[int, ...]], list[float]]] = {}
        self._functions = 0

    def listening(self, function: Any, place: int) -> Callable[..., Any]:
        """The reward function, unchanged but for being listened to."""
        if not callable(function) or isinstance(function, torch.nn.Module):
            raise ValueError(
                f"reward functions must be functions; a reward model goes into one that calls it; got {type(function).__name__}"
            )
        self._functions = max(self._functions, place + 1)
        name = getattr(function, "__name__", type(function).__name__)
        if inspect.iscoroutinefunction(function):

            async def asked(**kwargs: Any) -> Any:
                index = kwargs.pop(INDEX, None)
                return self._note(place, index, kwargs, await function(**kwargs))
        else:

            def asked(**kwargs: Any) -> Any:
                index = kwargs.pop(INDEX, None)
                return self._note(place, index, kwargs, function(**kwargs))

        if hasattr(function, "__name__"):
            return wraps(function)(asked)
        asked.__name__ = name
        return asked

    def _note(self, place: int, index: Sequence[int] | None, kwargs: Any, rewards: Any) -> Any:
        if index is None:  # a data set for evaluation
            return rewards
        if place in self._said:
            self._said = {}
        values = [float("nan") if value is None else float(value) for value in rewards]
        self._said[place] = (list(index), [tuple(map(int, ids)) for ids in kwargs["completion_ids"]], values)
        return rewards

    def take(self, weights: Tensor) -> dict[tuple[int, tuple[int, ...]], list[float]] | None:
        """Rewards of each (prompt, completion), weighted and summed as TRL does; None where nothing new was said."""
        if len(self._said) < self._functions:
            return None
        index, completions, _ = self._said[0]
        table = torch.tensor([self._said[place][2] for place in range(self._functions)])
        totals = (table * weights.cpu()[:, None]).nansum(0)
        totals[torch.isnan(table).all(0)] = float("nan")
        found: dict[tuple[int, tuple[int, ...]], list[float]] = defaultdict(list)
        for place, key in enumerate(zip(index, completions, strict=True)):
            found[key].append(float(totals[place]))
        self._said = {}
        return found


def misfit(rewards: Tensor, target: float) -> str:
    """What is odd about a batch's rewards, as a sentence: none scored, or a target that is not where they are; else empty."""
    scored = rewards[~torch.isnan(rewards)]
    if not len(scored):
        return (
            "no completion of this batch was scored: reward functions gave None or NaN, and nothing is learned from it"
        )
    low, high = float(scored.min()), float(scored.max())
    if low >= 0 and high <= 1 and 0 <= target <= 1:
        return ""
    return (
        f"rewards of this batch lie between {low:g} and {high:g}, and prompts are chosen whose expected reward is near target={target:g};"
        " set PacedSettings(target=...) to the middle of the range that rewards can have"
    )


def with_indices(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a GRPO trainer with the column `INDEX` in its training data."""
    data = kwargs.get("train_dataset", args[1] if len(args) > 1 else None)
    if data is None or not hasattr(data, "add_column") or not hasattr(data, "__len__"):
        raise ValueError(
            "PacedGRPOTrainer needs a train_dataset that can be indexed (datasets.Dataset): it looks at every prompt of the pool"
        )
    if "prompt" not in data.column_names:
        raise ValueError(f"the train_dataset has no column 'prompt'; it has {', '.join(data.column_names)}")
    if INDEX in data.column_names:
        data = data.remove_columns(INDEX)
    data = data.add_column(INDEX, list(range(len(data))))
    if "train_dataset" in kwargs:
        return args, {**kwargs, "train_dataset": data}
    return (args[0], data, *args[2:]), kwargs


def positions(prompt_ids: Sequence[Sequence[int]]) -> dict[tuple[int, ...], int]:
    found: dict[tuple[int, ...], int] = {}
    for place, ids in enumerate(prompt_ids):
        first = found.setdefault(tuple(ids), place)
        if first != place:
            raise ValueError(
                f"prompts {first} and {place} of the dataset are the same; each prompt may stand there once"
            )
    return found
