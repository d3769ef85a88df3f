"""A synthetic continuum: small recurrent language models, pre-trained for a controlled number of steps on a source that is known exactly.

The source has a few keys, each a permutation of the alphabet. A prompt is a key and some letters, the answer what the key's permutation makes
of the last of them, again and again. All models of a run are trained at once, their weights stacked along the first axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from cameraready.posttraining.sft_objectives import ProbabilityObjective

KEYS, LETTERS, PROMPT, ANSWER, WIDTH = 4, 24, 3, 6, 48
#: Prompts whose letters add up to a multiple of this judge; no demonstration has one.
EVERY = 5
#: Prompts that judge a run.
JUDGED = 64

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Source:
    """The permutations of S runs, int64 (S, KEYS, LETTERS)."""

    tables: Tensor

    @classmethod
    def drawn(cls, seeds: Sequence[int]) -> Source:
        """A source of its own for each seed; a run's does not depend on which others there are."""
        tables = []
        for seed in seeds:
            generator = torch.Generator().manual_seed(1_000_003 + seed)
            tables.append(torch.stack([torch.randperm(LETTERS, generator=generator) for _ in range(KEYS)]))
        return cls(torch.stack(tables))

    def select(self, runs: Tensor) -> Source:
        """The sources of some runs, in this order, repeats allowed."""
        return Source(self.tables[runs])

    def sequences(self, prompts: Tensor) -> Tensor:
        """Prompts (S, B, 1 + PROMPT), whose first entry is a key, with their answers: (S, B, 1 + PROMPT + ANSWER), keys behind the letters."""
        runs, keys = torch.arange(len(self.tables))[:, None], prompts[..., 0]
        written = list((prompts + LETTERS * (torch.arange(1 + PROMPT) == 0)).unbind(-1))
        for _ in range(ANSWER):
            written.append(self.tables[runs, keys, written[-1]])
        return torch.stack(written, -1)

    def draw(self, n: int, noise: float, generators: Sequence[torch.Generator]) -> Tensor:
        """`n` demonstrations a run, a share `noise` of whose answers' tokens is replaced by any letter."""
        written = self.sequences(torch.stack([_prompts(n, generator, judged=False) for generator in generators]))
        replaced = torch.stack([torch.rand(n, ANSWER, generator=generator) < noise for generator in generators])
        others = torch.stack([torch.randint(LETTERS, (n, ANSWER), generator=generator) for generator in generators])
        answers = written[..., -ANSWER:]
        answers.copy_(torch.where(replaced, others, answers))
        return written

    def judged(self) -> Tensor:
        """Held-out prompts with their right answers, (S, JUDGED, 1 + PROMPT + ANSWER); the same prompts for all runs."""
        prompts = _prompts(JUDGED, torch.Generator().manual_seed(5_000_011), judged=True)
        return self.sequences(prompts.expand(len(self.tables), -1, -1))


def _prompts(n: int, generator: torch.Generator, *, judged: bool) -> Tensor:
    """Prompts of one run, (n, 1 + PROMPT): a key and letters."""
    keys = torch.randint(KEYS, (n, 1), generator=generator)
    letters = torch.randint(LETTERS, (n, PROMPT), generator=generator)
    # The first letter, which has no bearing on the answer, decides on which side a prompt is.
    rest = letters[:, 1:].sum(-1)
    step = EVERY * torch.randint((LETTERS - EVERY) // EVERY, (n,), generator=generator)
    shift = torch.zeros(n, dtype=torch.long) if judged else torch.randint(1, EVERY, (n,), generator=generator)
    letters[:, 0] = step + (shift - rest) % EVERY
    return torch.cat([keys, letters], -1)


def initial(seeds: Sequence[int]) -> Weights:
    """Random weights of one recurrent network a seed."""
    shapes = {
        "into": (LETTERS + KEYS, 3 * WIDTH),
        "again": (WIDTH, 3 * WIDTH),
        "bias": (1, WIDTH),
        "out": (WIDTH, LETTERS),
        "level": (1, LETTERS),
    }
    drawn: dict[str, list[Tensor]] = {name: [] for name in shapes}
    for seed in seeds:
        generator = torch.Generator().manual_seed(2_000_003 + seed)
        for name, shape in shapes.items():
            scale = {"into": 0.5, "again": 1 / math.sqrt(WIDTH), "out": 1 / math.sqrt(WIDTH)}.get(name, 0.0)
            drawn[name].append(scale * torch.randn(shape, generator=generator))
    return {name: torch.stack(values) for name, values in drawn.items()}


def answer_logits(weights: Mapping[str, Tensor], written: Tensor) -> Tensor:
    """Logits of the answers' letters, teacher forced: (S, B, 1 + PROMPT + ANSWER) -> (S, B, ANSWER, LETTERS). A gated recurrent unit."""
    runs, n = written.shape[:2]
    hot = functional.one_hot(written[..., :-1].transpose(1, 2), LETTERS + KEYS).to(weights["into"].dtype)
    into = torch.bmm(hot.reshape(runs, -1, LETTERS + KEYS), weights["into"]).view(runs, -1, n, 3 * WIDTH)
    hidden = into.new_zeros(runs, n, WIDTH)
    kept = []
    for step in range(into.shape[1]):
        again = torch.bmm(hidden, weights["again"])
        gates = torch.sigmoid(into[:, step, :, : 2 * WIDTH] + again[..., : 2 * WIDTH])
        update, reset = gates.split(WIDTH, -1)
        proposed = torch.tanh(into[:, step, :, 2 * WIDTH :] + reset * (again[..., 2 * WIDTH :] + weights["bias"]))
        hidden = torch.lerp(proposed, hidden, update)
        if step >= PROMPT:
            kept.append(hidden)
    states = torch.stack(kept, 2).reshape(runs, -1, WIDTH)
    return torch.baddbmm(weights["level"], states, weights["out"]).view(runs, n, ANSWER, LETTERS)


@torch.no_grad()
def judge(weights: Mapping[str, Tensor], source: Source) -> dict[str, Tensor]:
    """On held-out prompts, a number a run: ``accuracy``, the probability of writing exactly the right answer at temperature 1; ``greedy``, the
    share of prompts whose likeliest tokens are all right; ``kl``, of the source from the model in nats a token."""
    written = source.judged()
    logps = answer_logits(weights, written).log_softmax(-1)
    right = logps.gather(-1, written[..., -ANSWER:, None])[..., 0]
    return {
        "accuracy": right.sum(-1).exp().mean(-1),
        "greedy": (logps.argmax(-1) == written[..., -ANSWER:]).all(-1).double().mean(-1),
        "kl": -right.mean((-2, -1)),
    }


@torch.no_grad()
def demonstrated_logps(weights: Mapping[str, Tensor], written: Tensor) -> Tensor:
    """Log-probabilities of demonstrated answers, (S, B, ANSWER)."""
    return answer_logits(weights, written).log_softmax(-1).gather(-1, written[..., -ANSWER:, None])[..., 0]


@dataclass
class AdamW:
    """AdamW with a learning rate for each run, gradients clipped to norm 1 run by run."""

    weights: Weights
    decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)

    def __post_init__(self) -> None:
        self.first = {name: torch.zeros_like(value) for name, value in self.weights.items()}
        self.second = {name: torch.zeros_like(value) for name, value in self.weights.items()}
        self.steps = 0

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], rates: Tensor) -> Tensor:
        """One step with learning rates (S,); returns the norms of the gradients, (S,)."""
        self.steps += 1
        norms = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()]).sum(0).sqrt()
        scale = (1 / norms.clamp_min(1.0))[:, None, None]
        a, b = self.betas
        rates = rates[:, None, None]
        for name, weight in self.weights.items():
            gradient = gradients[name] * scale
            self.first[name].lerp_(gradient, 1 - a)
            self.second[name].mul_(b).addcmul_(gradient, gradient, value=1 - b)
            size = (self.second[name] / (1 - b**self.steps)).sqrt_().add_(1e-8)
            weight.mul_(1 - rates * self.decay)
            weight.sub_(rates / (1 - a**self.steps) * self.first[name] / size)
        return norms


def losses(objective: ProbabilityObjective, weights: Mapping[str, Tensor], written: Tensor) -> Tensor:
    """The objective's loss of each run's batch, (S,)."""
    logits = answer_logits(weights, written)
    logps = logits.log_softmax(-1)
    chosen = logps.gather(-1, written[..., -ANSWER:, None])[..., 0]
    runs = len(chosen)
    flat, mask = chosen.reshape(runs, -1), torch.ones(runs, chosen[0].numel(), dtype=torch.bool)
    means = logps.mean(-1).reshape(runs, -1) if objective.needs_logits else None
    values = objective.of_logprobs(flat, mask, mean_logps=means, reduction="none").sum(-1)
    if objective.normalize == "all":
        return values / flat.shape[1]
    return values / objective.keeps(flat.detach().exp()).sum(-1).clamp_min(1)


def train(
    weights: Mapping[str, Tensor],
    source: Source,
    objective: ProbabilityObjective,
    *,
    rates: Tensor,
    noise: float,
    steps: int,
    batch: int,
    seeds: Sequence[int],
) -> tuple[Weights, Tensor]:
    """Fine-tune every run for one epoch of fresh demonstrations: warm-up over a tenth of the steps, then a cosine to zero.

    Returns the new weights and the norms of the first step's gradients (S,).
    """
    generators = [torch.Generator().manual_seed(3_000_017 + seed) for seed in seeds]
    demonstrations = source.draw(steps * batch, noise, generators)
    trained = {name: value.clone().requires_grad_() for name, value in weights.items()}
    optimizer = AdamW(trained)
    first: Tensor | None = None
    for step in range(steps):
        loss = losses(objective, trained, demonstrations[:, step * batch : (step + 1) * batch]).sum()
        gradients = dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))
        norms = optimizer.step(gradients, rates * schedule(step, steps))
        first = norms if first is None else first
    assert first is not None
    return {name: value.detach() for name, value in trained.items()}, first


def schedule(step: int, steps: int) -> float:
    """Factor of the learning rate."""
    warm = max(1, round(0.1 * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def pretrain(seeds: Sequence[int], marks: Sequence[int], *, other: bool = False, batch: int = 32) -> list[Weights]:
    """Weights after each number of steps in `marks` on clean demonstrations of the runs' sources (or of others), by log-likelihood."""
    source = Source.drawn([seed + 500_000 for seed in seeds] if other else seeds)
    weights = {name: value.requires_grad_() for name, value in initial(seeds).items()}
    optimizer = AdamW(weights)
    generators = [torch.Generator().manual_seed(4_000_037 + seed) for seed in seeds]
    rates = torch.full((len(seeds),), 5e-3)
    found = []
    for step in range(max(marks) + 1):
        if step in marks:
            found.append({name: value.detach().clone() for name, value in weights.items()})
        loss = losses(ProbabilityObjective("nll"), weights, source.draw(batch, 0.0, generators)).sum()
        gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
        optimizer.step(gradients, rates)
    return found
