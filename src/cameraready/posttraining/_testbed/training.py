"""Reinforcement learning of S policies at once on an enumerable task, and the supervised warm-up before it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cameraready.posttraining._testbed import exact, walking
from cameraready.posttraining._testbed.gru import seed_generators
from cameraready.posttraining._testbed.optimizers import clip_per_seed, make_optimizer
from cameraready.posttraining._testbed.sampling import Batch, sample


@dataclass
class Context:
    """What a loss may want to know beside the batch.

    Attributes
    ----------
    policy, task
        As given to `train`.
    step : int
        Optimizer steps on rollouts begun so far, from 0.
    minibatch : int
        Number of the minibatch within the step (over all epochs).
    batch : Batch
        All groups of the step, of which the loss sees a minibatch.
    generators : list of S torch.Generator
    """

    policy: Any
    task: Any
    step: int
    minibatch: int
    batch: Batch
    generators: Sequence[torch.Generator]


Loss = Callable[[Tensor, Batch, Context], tuple[Tensor, dict[str, Tensor]]]


@dataclass
class _Sums:
    """Means of the losses' statistics since the last record."""

    total: dict[str, Tensor] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)

    def add(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            value = value.detach().to(torch.float64)
            self.total[name] = self.total[name] + value if name in self.total else value
            self.count[name] = self.count.get(name, 0) + 1

    def take(self) -> dict[str, Tensor]:
        means = {name: total / self.count[name] for name, total in self.total.items()}
        self.total, self.count = {}, {}
        return means


def train(
    policy: Any,
    task: Any,
    *,
    loss: Loss,
    steps: int,
    prompts_per_step: int = 16,
    group: int = 16,
    minibatches: int = 1,
    epochs: int = 1,
    lr: float | Tensor = 1e-3,
    optimizer: str | Callable[[list[Tensor]], Any] = "adamw",
    clip_norm: float | None = 1.0,
    seeds: int | Sequence[int] | None = None,
    choose: Callable[[Any, int, Sequence[torch.Generator]], Tensor] | None = None,
    collect: Callable[[Any, int, Sequence[torch.Generator]], Batch] | None = None,
    after: Callable[[Any, int, Batch], None] | None = None,
    record: Callable[[Any, int, Tensor], dict[str, Tensor]] | None = None,
    every: int = 10,
    kl_every: int = 5,
    kl_prompts: int | None = None,
    evaluate: Tensor | None = None,
    ks: Sequence[int] = (16,),
    generators: Sequence[torch.Generator] | None = None,
) -> list[dict[str, Any]]:
    """Train policies in place on sampled groups; each seed by itself, all in the same products.

    Parameters
    ----------
    policy : GRUs or Tabular
    task : EnumerableTask
    loss : callable(logps, batch, context) -> (losses, stats)
        ``logps`` (S, B', n, T) with gradient, 0 where the batch's mask is false; `batch` the minibatch, whole groups; losses (S,), one for each seed; stats a dictionary of (S,) tensors, averaged between records.
    steps : int
        Rounds of sampling.
    prompts_per_step, group : int
        Prompts and completions of each in a round.
    minibatches, epochs : int
        Optimizer steps on a round: it is cut into this many minibatches by prompts, this many times.
    lr : float or (S,) tensor
        A tensor gives each seed its own, so a sweep can run side by side.
    optimizer : {"adamw", "sgd"} or callable(parameters) -> torch.optim.Optimizer
        "adamw" has betas (0.9, 0.999) and no weight decay. A callable's optimizer must work elementwise, or the seeds mix.
    clip_norm : float or None
        Largest gradient norm of each seed.
    seeds : int or sequence of int, optional
        The seeds' numbers, in the rows as ``run``; they also start the generators. By default 0, 1, ...
    choose : callable(policy, step, generators) -> prompts (S, B), optional
        By default drawn without replacement, uniformly from the task.
    collect : callable(policy, step, generators) -> Batch, optional
        Instead of `choose` and sampling: for methods that filter or mix rollouts. All rows' ``rollouts`` then count its groups; a filter adds what it threw away through `record`.
    after : callable(policy, step, batch), optional
        Called after each round's updates (a difficulty estimate, a buffer).
    record : callable(policy, step, log_p) -> dict of (S,) tensors, optional
        More columns, given the exact log-probabilities (S, P', N) of the evaluated prompts.
    every : int
        Rounds between exact evaluations; the first is before training, the last after it.
    kl_every : int
        Rounds between exact measurements of KL(old || new) over a round's prompts; the sum over rounds is the KL spent. 0 for none.
    kl_prompts : int, optional
        Measure it over the first so many prompts of a round, by default all: cheaper where completions are thousands.
    evaluate : (P',) int64, optional
        Prompts evaluated; by default all.
    ks : sequence of int
        Numbers of tries for pass@k and distinct right answers.
    generators : list of S torch.Generator, optional
        To go on with those of an earlier call.

    Returns
    -------
    list of dict, one for each seed and record: ``run``, ``step``, ``rollouts``, ``accuracy``, ``reward``, ``entropy`` (sequence, nats), ``token_entropy``, ``pass@k``, ``distinct@k``, ``kl`` (mean of a round since the last record),
    ``kl_spent``, ``kl_start`` (KL(now || start)), ``mass_KIND`` for the task's kinds, then the means of the loss's statistics and `record`'s columns. Numbers are means over prompts; NaN where not measured yet.

    Raises
    ------
    ValueError
        If sizes do not fit, or a loss is not finite (the message names the seed and the round).
    """
    if steps < 0 or every < 1 or minibatches < 1 or epochs < 1:
        raise ValueError("steps must not be negative; every, minibatches and epochs must be at least 1")
    if collect is None and choose is None and prompts_per_step > task.prompts:
        raise ValueError(f"the task has {task.prompts} prompts, fewer than {prompts_per_step} for a round")
    numbers = _numbers(policy, seeds)
    generators = seed_generators(numbers, generators)
    parameters = policy.parameters()
    update = make_optimizer(optimizer, parameters, lr)
    evaluated = torch.arange(task.prompts) if evaluate is None else torch.as_tensor(evaluate)
    rows: list[dict[str, Any]] = []
    sums = _Sums()
    spent = torch.zeros(policy.seeds, dtype=torch.float64)
    start: Tensor | None = None
    rollouts = 0
    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            with torch.no_grad():
                log_p = policy.all_log_probs(task, evaluated)
                start = log_p if start is None else start
                columns = _evaluation(task, log_p, evaluated, ks)
                columns |= {
                    "kl_spent": spent,
                    "kl_start": exact.kl(log_p, start).mean(-1),
                    "kl": torch.full_like(spent, torch.nan),
                }
                columns |= sums.take()
                if record is not None:
                    columns |= record(policy, step, log_p)
            rows += _rows(numbers, step, rollouts, columns)
        if step == steps:
            break
        if collect is not None:
            batch = collect(policy, step, generators)
        else:
            if choose is None:
                prompts = uniform_prompts(task.prompts, prompts_per_step, generators)
            else:
                prompts = choose(policy, step, generators)
            batch = sample(policy, task, prompts, group, generators)
        size, rest = divmod(batch.prompts.shape[1], minibatches)
        if rest:
            raise ValueError(f"{batch.prompts.shape[1]} prompts cannot be cut into {minibatches} equal minibatches")
        rollouts += batch.rewards[0].numel()
        watched = batch.prompts[:, :kl_prompts] if kl_every and step % kl_every == 0 else None
        old = None if watched is None else _exactly(policy, task, watched)
        for part in range(minibatches * epochs):
            begin = part % minibatches * size
            small = batch.rows(slice(begin, begin + size))
            context = Context(policy, task, step, part, batch, generators)
            losses, stats = loss(policy.sample_log_probs(task, small.prompts, small.index), small, context)
            sums.add(
                {"loss": losses, "gradient_norm": _step(losses, parameters, update, clip_norm, numbers, step)} | stats
            )
        if watched is not None and old is not None:
            moved = exact.kl(old, _exactly(policy, task, watched)).mean(-1)
            sums.add({"kl": moved})
            spent = spent + moved * min(kl_every, steps - step)
        if after is not None:
            after(policy, step, batch)
    return rows


def uniform_prompts(prompts: int, count: int, generators: Sequence[torch.Generator]) -> Tensor:
    """Prompts (S, count) drawn without replacement, each seed's from its own generator."""
    return torch.stack([torch.randperm(prompts, generator=g)[:count] for g in generators])


def _numbers(policy: Any, seeds: int | Sequence[int] | None) -> list[int]:
    """The seeds' numbers, one for each policy."""
    numbers = (
        list(range(policy.seeds if seeds is None else seeds))
        if seeds is None or isinstance(seeds, int)
        else [int(s) for s in seeds]
    )
    if len(numbers) != policy.seeds:
        raise ValueError(f"the policy has {policy.seeds} seeds, got {len(numbers)} numbers for them")
    return numbers


@torch.no_grad()
def _exactly(policy: Any, task: Any, prompts: Tensor) -> Tensor:
    return policy.all_log_probs(task, prompts)


def _step(
    losses: Tensor, parameters: list[Tensor], update: Any, clip_norm: float | None, numbers: Sequence[int], step: int
) -> Tensor:
    """One optimizer step; gradient norms (S,) before clipping."""
    if losses.shape != (len(numbers),):
        raise ValueError(
            f"the loss must be one number for each of the {len(numbers)} seeds, got shape {tuple(losses.shape)}"
        )
    if not losses.requires_grad:
        raise ValueError("the loss does not depend on the policy: compute it from the log-probabilities it is given")
    _finite(losses, numbers, step)
    norms = clip_per_seed(parameters, torch.autograd.grad(losses.sum(), parameters, allow_unused=True), clip_norm)
    _finite(norms, numbers, step)
    update.step()
    return norms


def _evaluation(task: Any, log_p: Tensor, prompts: Tensor, ks: Sequence[int]) -> dict[str, Tensor]:
    p = exact.accuracy(log_p, task.correct[prompts])
    columns = {
        "accuracy": p,
        "reward": exact.mean_reward(log_p, task.reward[prompts]),
        "entropy": exact.sequence_entropy(log_p),
        "token_entropy": exact.token_entropy(log_p, task.lengths),
    }
    for k in ks:
        columns[f"pass@{k}"] = exact.pass_at_k(p, k)
        columns[f"distinct@{k}"] = exact.distinct(log_p, task.correct[prompts], k)
    columns |= {f"mass_{name}": exact.mass(log_p, kind[prompts]) for name, kind in task.kinds.items()}
    return {name: value.mean(-1) for name, value in columns.items()}


def _rows(numbers: Sequence[int], step: int, rollouts: int, columns: dict[str, Tensor]) -> list[dict[str, Any]]:
    table = {name: value.detach().to(torch.float64).tolist() for name, value in columns.items()}
    return [
        {"run": run, "step": step, "rollouts": rollouts} | {name: value[i] for name, value in table.items()}
        for i, run in enumerate(numbers)
    ]


def _finite(values: Tensor, numbers: Sequence[int], step: int) -> None:
    bad = torch.nonzero(~torch.isfinite(values))
    if len(bad):
        raise ValueError(
            f"the loss or its gradient is {values[bad[0, 0]].item()} for seed {numbers[int(bad[0, 0])]} in round {step}"
        )


def warm_up(
    policy: Any,
    task: Any,
    weights: Tensor | None = None,
    steps: int = 200,
    *,
    prompts_per_step: int = 64,
    demonstrations: int = 8,
    visit: Tensor | None = None,
    lr: float = 3e-3,
    clip_norm: float | None = 1.0,
    seeds: int | Sequence[int] | None = None,
    generators: Sequence[torch.Generator] | None = None,
) -> Any:
    """Teach policies a distribution over completions, in place: cross-entropy to the exact next-token distribution at prefixes of demonstrations.

    Parameters
    ----------
    policy : GRUs or Tabular
    task : EnumerableTask
    weights : (P, N) float, optional
        The distribution, by default ``task.start``.
    steps, prompts_per_step, demonstrations : int
        In each step every seed draws its own prompts and demonstrations of each.
    visit : (P, N) float, optional
        Distribution of the demonstrations, by default the task's own or `weights`. One that visits rare prefixes more often teaches what follows them sooner and does not change what is taught.
    lr : float
        At the start; it falls to a tenth of it along a cosine. AdamW.
    clip_norm : float or None
    seeds, generators
        As in `train`.

    Returns
    -------
    The policy.

    Raises
    ------
    ValueError
        If no distribution is known, or one has negative or no weight.
    """
    if weights is None:
        if task.start is None:
            raise ValueError("this task has no start distribution: give weights of shape (prompts, completions)")
        weights = task.start
        visit = task.visit if visit is None else visit
    visit = weights if visit is None else visit
    for what, table in (("weights", weights), ("visit", visit)):
        if table.shape != task.correct.shape or bool((table < 0).any()) or not bool((table.sum(-1) > 0).all()):
            raise ValueError(
                f"{what} must have shape {tuple(task.correct.shape)}, none negative, some positive for each prompt"
            )
    generators = seed_generators(_numbers(policy, seeds), generators)
    parameters = policy.parameters()
    tables = [table.to(parameters[0].dtype) for table in task.trie.conditionals(weights)]
    cumulative = visit.to(torch.float64).cumsum(-1)
    update = make_optimizer("adamw", parameters, lr)
    count = min(prompts_per_step, task.prompts)
    for step in range(steps):
        update.scale = 0.55 + 0.45 * float(torch.cos(torch.tensor(torch.pi * step / steps)))
        prompts = uniform_prompts(task.prompts, count, generators)
        draws = torch.stack([torch.rand(count, demonstrations, generator=g, dtype=torch.float64) for g in generators])
        edges = cumulative[prompts]
        index = torch.searchsorted(edges, draws * edges[..., -1:], right=True).clamp_max(task.completions - 1)
        losses = _distillation(policy, task, prompts, index, tables)
        clip_per_seed(parameters, torch.autograd.grad(losses.sum(), parameters, allow_unused=True), clip_norm)
        update.step()
    return policy


def _distillation(policy: Any, task: Any, prompts: Tensor, index: Tensor, tables: list[Tensor]) -> Tensor:
    """Cross-entropy (S,) to the teacher's next-token distributions, summed over tokens, mean over demonstrations."""
    seeds, batch, n = index.shape
    walk = policy.walk(task, prompts)
    previous = walking.roots(seeds, batch, n)
    path = task.trie.path[index]
    losses: Any = 0.0
    for depth, level in enumerate(task.trie.levels):
        active = path[..., depth] >= 0
        if not bool(active.any()):
            break
        seen = walking.visits(path[..., depth].clamp_min(0), active, previous, len(level))
        log_p = walk.level(depth, seen.parent, seen.node, seen.origin)
        teacher = tables[depth][prompts.gather(1, seen.origin), seen.node]
        visited = torch.zeros(log_p.shape[:2].numel(), dtype=log_p.dtype).index_add_(
            0, seen.row[active], torch.ones((), dtype=log_p.dtype).expand(int(active.sum()))
        )
        cross = -(teacher * log_p.masked_fill(~level.allowed[seen.node], 0.0)).sum(-1)
        losses = losses + (cross * visited.view_as(cross)).sum(1)
        previous = seen.row
    return losses / (batch * n)
