"""Training of S policies at equal rollouts, with everything that a selection sees and pays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cameraready.posttraining._testbed import (
    AdamW,
    Batch,
    EnumerableTask,
    GRUs,
    clip_per_seed,
    exact,
    group_advantages,
    sample,
    seed_generators,
    uniform_prompts,
    warm_up,
)
from cameraready.posttraining.paced.balance import tb_loss
from cameraready.posttraining.paced.experiment.again import Rollouts
from cameraready.posttraining.paced.experiment.arms import Arm
from cameraready.posttraining.paced.experiment.estimates import Counters, Heads, Owns, Row
from cameraready.posttraining.paced.replay import ErrorReplay
from cameraready.posttraining.paced.sampler import PacedSampler


@dataclass(frozen=True)
class World:
    """An enumerable task whose first `pool` prompts are trained on, and whose others judge."""

    task: EnumerableTask
    pool: int
    width: int = 64
    warm_steps: int = 800

    @property
    def training(self) -> EnumerableTask:
        t, first = self.task, slice(0, self.pool)
        return EnumerableTask(
            t.name, t.tokens, t.lengths, t.correct[first], t.features[first], reward=t.reward[first],
            start=None if t.start is None else t.start[first], vocabulary=t.vocabulary,
        )  # fmt: skip

    @property
    def held_out(self) -> Tensor:
        """Prompts that are judged on; the pool itself where nothing is held out."""
        return torch.arange(self.pool if self.pool < self.task.prompts else 0, self.task.prompts)

    def policy(self, numbers: Sequence[int]) -> GRUs:
        """Networks of these seeds before training; warmed up on the pool alone where the task says to what."""
        made = GRUs(list(numbers), self.task.vocabulary, self.task.features.shape[1], width=self.width, layers=1)
        return (
            made
            if self.task.start is None
            else warm_up(made, self.training, steps=self.warm_steps, lr=1e-2, seeds=list(numbers))
        )


@dataclass(frozen=True)
class Settings:
    """Of a run; the same for every arm.

    Attributes
    ----------
    budget : int
        Rollouts of each run, rejected ones included.
    prompts, group, minibatches
        Of a step: prompts, rollouts of each, optimizer steps.
    beta : float
        Of the trajectory-balance loss.
    explore : float
        Of `PacedSampler`.
    replayed : int
        Rollouts taken from the buffer beside each step's fresh ones, and entering it at most; it holds twice as many, as in the paper.
    head_lr, forgetting : float
        Of the learned estimate and of the running average; chosen by `tuning`, of equally many.
    every : int
        Rollouts between evaluations, about.
    pool_every : int
        Evaluations between looks at the whole pool.
    """

    budget: int = 10_240
    prompts: int = 8
    group: int = 8
    minibatches: int = 2
    beta: float = 0.05
    explore: float = 0.1
    replayed: int = 16
    head_lr: float = 3e-3
    forgetting: float = 0.9
    every: int = 256
    pool_every: int = 4


class Run:
    """One arm, S runs at once. Each run draws from its own generator alone."""

    def __init__(
        self,
        world: World,
        policy: GRUs,
        arm: Arm,
        numbers: Sequence[int],
        settings: Settings,
        embeddings: Tensor,
        lr: float,
        own: Callable[[Tensor, int], Any] | None = None,
    ) -> None:
        self.world, self.arm, self.settings = world, arm, settings
        self.task, self.policy = world.task, policy.copy()
        self.runs = len(numbers)
        self.generators = seed_generators(list(numbers))
        self.heads = Heads(embeddings, numbers, beta=settings.beta, lr=settings.head_lr)
        self.counters = Counters(world.pool, self.runs, forgetting=settings.forgetting)
        noise = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(1))
        self.blind = Heads(
            noise, numbers, beta=settings.beta, lr=settings.head_lr
        )  # embeddings that tell nothing but who is who
        self.owns = None if own is None else Owns(own, embeddings, numbers)
        self.estimate_seconds = 0.0
        self.drawn = torch.zeros(self.runs, dtype=torch.int64)
        self.kept = torch.zeros(self.runs, dtype=torch.float64)
        self.with_spread = torch.zeros(self.runs, dtype=torch.float64)
        self.groups = 0
        self.step = 0
        self.beta_kl: list[Tensor] = []
        self.optimizer = AdamW(self.policy.parameters(), lr)
        options: dict[str, Any] = {"explore": settings.explore}
        self.samplers = [
            PacedSampler(Row(torch.zeros(world.pool)), settings.prompts, seed=number, **options) for number in numbers
        ]
        self.buffers = [
            ErrorReplay(2 * settings.replayed, add=settings.replayed, priority=arm.replay or "error", max_age=8, seed=number) for number in numbers
        ] if arm.replay else []  # fmt: skip
        self.index_of = {
            tuple(row[:length].tolist()): place
            for place, (row, length) in enumerate(zip(self.task.tokens, self.task.lengths, strict=True))
        }
        self.shares = {
            name: torch.full((self.runs,), torch.nan).double() for name in ("mixed", "all_right", "all_wrong")
        }
        self._known = torch.empty(0)

    # --- a step -------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Select, sample, learn, replay."""
        batch = self._collect()
        began = time.perf_counter()
        before = self.heads.accuracy()
        replayed = self._replayed()
        # The estimate is fitted before the policy moves: log Z belongs to the policy that sampled.
        self._learn_difficulty(batch, replayed)
        self.estimate_seconds += time.perf_counter() - began
        self.counters.update(batch.prompts, batch.rewards)
        self.blind.update(batch.prompts, batch.rewards)
        if self.owns is not None:
            self.owns.update(batch.prompts, batch.rewards)
        measured = self.step % 10 == 0
        if measured:
            with torch.no_grad():
                old = self.policy.all_log_probs(self.task, batch.prompts)
        log_z = (self.heads.accuracy() / self.settings.beta).gather(1, batch.prompts)
        size = batch.prompts.shape[1] // self.settings.minibatches
        for part in range(self.settings.minibatches):
            rows = slice(part * size, (part + 1) * size)
            self._update(batch.rows(rows), log_z[:, rows], replayed, part)
        if measured:
            with torch.no_grad():
                moved = exact.kl(old, self.policy.all_log_probs(self.task, batch.prompts)).mean(-1)
            self.beta_kl.append(self.settings.beta * moved.double())
        self._remember(batch, before)
        self.step += 1

    def _update(self, batch: Batch, log_z: Tensor, replayed: Rollouts | None, part: int) -> None:
        logps = self.policy.sample_log_probs(self.task, batch.prompts, batch.index)
        if self.arm.loss == "grpo":
            ratio = (logps - batch.old_logps).exp()
            advantage = group_advantages(batch.rewards)[..., None]
            clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = -torch.where(batch.mask, clipped, 0.0).sum(-1).mean((1, 2))
        else:
            squared, _ = tb_loss(
                logps,
                batch.old_logps,
                batch.rewards,
                log_z[..., None],
                self.settings.beta,
                batch.mask,
                reduction="none",
            )
            total, n = squared.sum((1, 2)), torch.full((self.runs,), squared[0].numel())
            if replayed is not None:
                some = replayed.part(part, self.settings.minibatches)
                again = self.policy.sample_log_probs(self.task, some.prompts, some.index[..., None])[:, :, 0]
                known = (self.heads.accuracy() / self.settings.beta).gather(1, some.prompts)
                # Places without a rollout (a buffer that is not full yet) have no token in their mask, and are left out.
                older, _ = tb_loss(
                    again, some.old_logps, some.rewards, known, self.settings.beta, some.mask, reduction="none"
                )
                total, n = total + older.sum(1), n + some.mask.any(-1).sum(1)
            loss = total / n
        gradients = torch.autograd.grad(loss.sum(), self.policy.parameters(), allow_unused=True)
        clip_per_seed(self.policy.parameters(), gradients, 1.0)
        self.optimizer.step()

    def _learn_difficulty(self, batch: Batch, replayed: Rollouts | None) -> None:
        prompts, rewards = batch.prompts, batch.rewards
        if replayed is None or self.arm.learns == "fresh":
            self.heads.update(prompts, rewards)
            return
        again = replayed.rewards if self.arm.learns == "naive" else replayed.group_means
        again = torch.where(replayed.mask.any(-1), again, torch.nan)[..., None]
        padding = again.new_full((*again.shape[:2], rewards.shape[2] - 1), torch.nan)
        again = torch.cat([again, padding], -1)
        self.heads.update(torch.cat([prompts, replayed.prompts], 1), torch.cat([rewards, again], 1))

    # --- selection ----------------------------------------------------------------------------------------------------

    def _collect(self) -> Batch:
        n, group = self.settings.prompts, self.settings.group
        if self.arm.selection == "dynamic":
            batch = self._until_informative()
        elif self.arm.selection == "learnable":
            wide = self._sample(uniform_prompts(self.world.pool, 2 * n, self.generators))
            p = wide.rewards.mean(-1)
            best = (p * (1 - p)).argsort(dim=1, descending=True, stable=True)[:, :n]
            batch = wide.rows(best)
        else:
            batch = self._sample(self._selected())
        top, bottom = batch.rewards.amax(-1), batch.rewards.amin(-1)
        self.shares = {
            "mixed": (top > bottom).double().mean(1),
            "all_right": ((top == bottom) & (top > 0)).double().mean(1),
            "all_wrong": ((top == bottom) & (top <= 0)).double().mean(1),
        }
        self.with_spread += (top > bottom).sum(1)
        self.groups += n
        self.kept += n * group
        return batch

    def _sample(self, prompts: Tensor) -> Batch:
        batch = sample(self.policy, self.task, prompts, self.settings.group, self.generators)
        self.drawn += batch.rewards[0].numel()
        return batch

    def _selected(self) -> Tensor:
        if self.arm.selection == "uniform":
            return uniform_prompts(self.world.pool, self.settings.prompts, self.generators)
        if self.arm.selection == "exact":
            if self.step % 4 == 0:
                self._known = self.pool_accuracy()
            values = self._known
        elif self.owns is not None:
            values = self.owns.accuracy()
        else:
            values = self.heads.accuracy() if self.arm.selection == "partition" else self.counters.accuracy()
        for sampler, row in zip(self.samplers, values, strict=True):
            sampler.estimate = Row(row)
        return torch.stack([sampler.select() for sampler in self.samplers])

    def _until_informative(self, waves: int = 10) -> Batch:
        """Groups of random prompts until each run has enough with both right and wrong answers (DAPO; Yu et al., 2025, arXiv:2503.14476)."""
        n = self.settings.prompts
        found: list[Batch] = []
        have = torch.zeros(self.runs, dtype=torch.int64)
        order = uniform_prompts(self.world.pool, min(waves * n, self.world.pool), self.generators)
        for prompts in order.split(n, dim=1):
            states = [g.get_state() for g in self.generators]
            batch = sample(self.policy, self.task, prompts, self.settings.group, self.generators)
            open_ = have < n
            for generator, state, going_on in zip(self.generators, states, open_.tolist(), strict=True):
                if not going_on:
                    generator.set_state(state)  # a run that has enough draws nothing
            self.drawn += torch.where(open_, batch.rewards[0].numel(), 0)
            found.append(batch)
            mixed = batch.rewards.amax(-1) > batch.rewards.amin(-1)
            have = have + torch.where(open_, mixed.sum(1), 0)
            if bool((have >= n).all()):
                break
        every = Batch.join(found)
        mixed = every.rewards.amax(-1) > every.rewards.amin(-1)
        # The first `n` with spread, and where waves ran out others in the order they came.
        return every.rows((~mixed).to(torch.int8).argsort(dim=1, stable=True)[:, :n])

    # --- replay -------------------------------------------------------------------------------------------------------

    def _replayed(self) -> Rollouts | None:
        if not self.arm.replay:
            return None
        n, longest = self.settings.replayed, self.task.tokens.shape[1]
        made = Rollouts.empty(self.runs, n, longest)
        for run, buffer in enumerate(self.buffers):
            found = buffer.sample(n)
            count, length = found.tokens.shape
            if not count:
                continue
            made.prompts[run, :count], made.rewards[run, :count] = (
                found.prompt_ids,
                found.rewards.to(made.rewards.dtype),
            )
            made.group_means[run, :count] = found.group_means.to(made.rewards.dtype)
            made.mask[run, :count, :length], made.old_logps[run, :count, :length] = found.mask, found.old_logps
            for place, (row, written) in enumerate(zip(found.tokens, found.mask, strict=True)):
                made.index[run, place] = self.index_of[tuple(row[written].tolist())]
        return made

    def _remember(self, batch: Batch, before: Tensor) -> None:
        for run, buffer in enumerate(self.buffers):
            buffer.add(
                batch.prompts[run], batch.tokens[run], batch.old_logps[run], batch.rewards[run], before[run][batch.prompts[run]],
                step=self.step, mask=batch.mask[run],
            )  # fmt: skip

    # --- what is measured ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def pool_accuracy(self) -> Tensor:
        """Exact expected reward of every prompt of the pool, (S, P)."""
        prompts = torch.arange(self.world.pool)
        return exact.mean_reward(self.policy.all_log_probs(self.task, prompts), self.task.reward[prompts])

    @torch.no_grad()
    def held_out(self) -> dict[str, Tensor]:
        """Exact means over held-out prompts."""
        prompts = self.world.held_out
        log_p, right = self.policy.all_log_probs(self.task, prompts), self.task.correct[prompts]
        p = exact.accuracy(log_p, right)
        columns = {
            "accuracy": p,
            "pass8": exact.pass_at_k(p, 8),
            "distinct8": exact.distinct(log_p, right, 8),
            "entropy": exact.sequence_entropy(log_p),
        }
        return {name: value.double().mean(-1) for name, value in columns.items()}


def trained(
    world: World,
    policy: GRUs,
    arm: Arm,
    numbers: Sequence[int],
    settings: Settings,
    *,
    embeddings: Tensor | None = None,
    lr: float | None = None,
    look: Callable[[Run], None] | None = None,
    own: Callable[[Tensor, int], Any] | None = None,
) -> Iterator[tuple[Run, dict[str, Tensor]]]:
    """Train until every run has drawn its budget; yields at each evaluation, before the first step and after the last too.

    Parameters
    ----------
    embeddings : (P, F), optional
        What the learned estimate sees of the pool; by default the task's features.
    lr : float, optional
        By default the arm's own.
    look : callable, optional
        Called with the run at every `pool_every`-th evaluation.
    own : callable, optional
        Makes a user's estimate, for an arm that selects by it.
    """
    told = world.task.features[: world.pool] if embeddings is None else embeddings
    run = Run(world, policy, arm, numbers, settings, told, arm.lr if lr is None else lr, own)
    due, looked = 0, 0
    while True:
        ended = int(run.drawn.min()) >= settings.budget
        if ended or float(run.drawn.double().mean()) >= due:
            if look is not None and (ended or looked % settings.pool_every == 0):
                look(run)
            looked += 1
            due += settings.every
            yield run, {"drawn": run.drawn.double().clone(), **run.held_out(), **run.shares}
        if ended:
            return
        run.advance()
