"""Training of the study's small policies: one arm, all seeds side by side, each with its own learning rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cameraready.posttraining._testbed.gru import GRUs
from cameraready.posttraining.cal_grpo.advantages import attempt_advantages, credited
from cameraready.posttraining.cal_grpo.experiment.dialogue import (
    Chances,
    Dialogues,
    attempt_log_probs,
    converse,
    judged,
)
from cameraready.posttraining.cal_grpo.experiment.games import Game
from cameraready.posttraining.cal_grpo.rates import RunningRates

#: How each arm turns verdicts into advantages.
ARMS: Mapping[str, Mapping[str, Any]] = {
    "trajectory": {"method": "trajectory"},
    "naive": {"method": "naive"},
    "cal": {},
    "cal-ema": {"weights": "ema", "baseline": "ema"},
    "cal-baseline": {"baseline": "ema"},
    "half": {"lam": 0.5},
    "whole": {"lam": 1.0},
}
GROUP = 8
WIDTH, LAYERS = 32, 2


def policies(game: Game, seeds: Sequence[int]) -> GRUs:
    """Fresh networks, one for each seed."""
    return GRUs(seeds, game.vocabulary, game.features.shape[1], width=WIDTH, layers=LAYERS)


class Adam:
    """Adam over stacked parameters, a learning rate for each seed."""

    def __init__(self, parameters: Sequence[Tensor], rates: Tensor) -> None:
        self.parameters, self.rates, self.step_number = list(parameters), rates, 0
        self.first, self.second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))

    @torch.no_grad()
    def step(self) -> None:
        self.step_number += 1
        for p, m, v in zip(self.parameters, self.first, self.second, strict=True):
            m.lerp_(p.grad, 0.1)
            v.lerp_(p.grad.square(), 0.01)
            scale = v.div(1 - 0.99**self.step_number).sqrt_().add_(1e-6)
            rates = (self.rates / (1 - 0.9**self.step_number)).view(-1, *[1] * (p.dim() - 1))
            p.sub_(rates * m / scale)
            p.grad = None


def is_running(arm: Any) -> bool:
    """Whether an arm carries rates from step to step."""
    return not callable(arm) and any(
        isinstance(arm.get(name), str) and arm[name] == "ema" for name in ("weights", "baseline")
    )


class Credit:
    """Advantages of an arm for S runs at once, each with running rates of its own where the arm has them."""

    def __init__(self, arm: Any, game: Game, seeds: int) -> None:
        self.arm = arm
        self.rates = [RunningRates(game.attempts) for _ in range(seeds)] if is_running(arm) else []

    def of(self, dialogues: Dialogues) -> Tensor:
        """(S, R, K), 0 where not reached. Consecutive `GROUP` dialogues are a group."""
        seeds, rows, attempts = dialogues.reached.shape
        rewards = dialogues.rewards
        if self.rates:
            found = torch.stack(
                [self._running(*each) for each in zip(self.rates, rewards, dialogues.prompts, strict=True)]
            )
        else:
            run = torch.arange(seeds).repeat_interleave(rows)
            groups = torch.arange(seeds * rows) // GROUP
            flat = credited(self.arm, rewards.flatten(0, 1), groups, run)
            found = flat.view(seeds, rows, attempts)
        return found.nan_to_num(0.0)

    def _running(self, rates: RunningRates, rewards: Tensor, prompts: Tensor) -> Tensor:
        keys = prompts.tolist()
        groups = torch.arange(len(prompts)) // GROUP
        found = attempt_advantages(rewards, group_ids=groups, rates=rates, keys=keys, **self.arm)
        rates.update(rewards, keys=keys)
        return found


def drawn_prompts(game: Game, generators: Sequence[torch.Generator]) -> Tensor:
    """Prompts of a step, different ones, each `GROUP` times in a row: (S, R)."""
    chosen = [torch.randperm(game.prompts, generator=g)[: game.per_step] for g in generators]
    return torch.stack(chosen).repeat_interleave(GROUP, dim=1)


def objective(policy: GRUs, game: Game, dialogues: Dialogues, advantages: Tensor) -> Tensor:
    """Policy-gradient loss of each seed, (S,): a sum over attempts and words, divided by dialogues."""
    return -(advantages.float() * attempt_log_probs(policy, game, dialogues)).sum((1, 2)) / advantages.shape[1]


def train(
    policy: GRUs,
    game: Game,
    arm: Any,
    rates: Tensor,
    steps: int,
    seeds: Sequence[int],
    record: Callable[[int, Tensor, Chances], None] | None = None,
    every: int = 50,
) -> GRUs:
    """Train in place by on-policy gradients (one step a batch, so that no ratio leaves 1); `record` gets step, words written so far and chances."""
    generators = [torch.Generator().manual_seed(10_000 + seed) for seed in seeds]
    optimizer, credit = Adam(policy.parameters(), rates), Credit(arm, game, len(seeds))
    written = torch.zeros(len(seeds), dtype=torch.int64)
    for step in range(steps):
        if record is not None and step % every == 0:
            record(step, written, judged(policy, game))
        dialogues = converse(policy, game, drawn_prompts(game, generators), generators)
        written = written + dialogues.tokens
        objective(policy, game, dialogues, credit.of(dialogues)).sum().backward()
        optimizer.step()
    if record is not None:
        record(steps, written, judged(policy, game))
    return policy


def imitate(policy: GRUs, game: Game, seeds: Sequence[int], *, wanted: float = 0.2, most: int = 400) -> GRUs:
    """Warm start by imitating a guide.

    In mazes it takes a shortest way, and one move in six at random, and is imitated until the first attempts of the average seed succeed
    `wanted` of the time. Where one may ask it says any word first, and then, if that was the question, what it was told; 200 steps.
    """
    generators = [torch.Generator().manual_seed(20_000 + seed) for seed in seeds]
    optimizer = Adam(policy.parameters(), torch.full((len(seeds),), 1e-2))
    for step in range(200 if game.asks else most):
        if not game.asks and step % 10 == 0 and float(judged(policy, game).verified[:, 0].mean()) >= wanted:
            break
        shown = [(_asking if game.asks else _erring)(game, game.per_step * 4, g) for g in generators]
        at, tried = (torch.stack(each) for each in zip(*shown, strict=True))
        verdicts, said = zip(*(game.judge(at, tried[:, :, k]) for k in range(game.attempts)), strict=True)
        right = torch.stack(verdicts, dim=2)
        reached = right.cumsum(2) - right.long() == 0
        dialogues = Dialogues(at, tried, torch.stack(said, dim=2), right & reached, reached)
        (-attempt_log_probs(policy, game, dialogues).sum() / at.shape[1]).backward()
        optimizer.step()
    return policy


def _erring(game: Game, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Prompts (R,) and attempts (R, K, L) through mazes."""
    shape, ways = (rows, game.attempts, game.length), game.extra["ways"]
    chosen = torch.randint(game.prompts, (rows,), generator=generator)
    picked = torch.rand(shape[:2], generator=generator)
    guided = torch.stack([ways[p][(u * len(ways[p])).long()] for p, u in zip(chosen.tolist(), picked, strict=True)])
    random = torch.randint(game.words, shape, generator=generator)
    return chosen, torch.where(torch.rand(shape, generator=generator) < 1 / 6, random, guided)


def _asking(game: Game, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    chosen = torch.randint(game.prompts, (rows,), generator=generator)
    tried = torch.randint(game.words, (rows, game.attempts, 1), generator=generator)
    asked = tried[:, 0] == game.words - 1
    tried[:, 1] = torch.where(asked, game.truth[chosen][:, None], tried[:, 1])
    return chosen, tried
