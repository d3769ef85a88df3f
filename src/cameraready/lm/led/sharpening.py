"""A small model that learns to walk, and is then sharpened by reinforcement learning until it hardly explores any more."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from cameraready.lm.led.chains import ANSWER, PROMPT, VOCABULARY, Walk, draw, prompts_of, right

LAYERS = 6


@dataclass(frozen=True)
class Budget:
    """Steps and sizes: of imitation, then of reinforcement."""

    imitate: int = 150
    reinforce: int = 200
    batch: int = 256
    prompts: int = 32
    samples: int = 8


@dataclass(frozen=True)
class Learner:
    """A model, the problems it was taught with, and others that it has never seen."""

    model: Any
    seen: list[Walk]
    unseen: list[Walk]


def new_model(seed: int) -> Any:
    """A Llama of LAYERS layers and width 64, 250,000 weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def taught(seed: int, budget: Budget, *, unseen: int = 100, seen: int = 3000) -> Learner:
    """A model that has imitated right answers, drawn evenly among those of each problem."""
    generator = torch.Generator().manual_seed(seed)
    walks = draw(seen, generator)
    avoid = frozenset(tuple(walk.prompt.tolist()) for walk in walks)
    learner = Learner(new_model(seed), walks, draw(unseen, generator, avoid))
    imitate(learner.model, walks, budget, generator)
    return learner


def imitate(model: Any, walks: list[Walk], budget: Budget, generator: torch.Generator, rate: float = 4e-3) -> None:
    """Cross-entropy on answers, AdamW with a warm-up of 20 steps and a linear descent over the last third."""
    prompts, counts = prompts_of(walks), torch.tensor([len(walk.answers) for walk in walks])
    first = counts.cumsum(0) - counts
    answers = torch.cat([walk.answers for walk in walks])
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model.train()
    for step in range(budget.imitate):
        left = (budget.imitate - step) / budget.imitate
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / 20, 1.0, 3 * left)
        row = torch.randint(len(walks), (budget.batch,), generator=generator)
        pick = (torch.rand(budget.batch, generator=generator) * counts[row]).long()
        wanted = answers[first[row] + pick]
        logits = model(torch.cat([prompts[row], wanted], dim=1), use_cache=False).logits
        _step(model, optimizer, cross_entropy(logits[:, PROMPT - 1 : -1].flatten(0, 1), wanted.flatten()))
    model.eval()


def reinforce(learner: Learner, seed: int, budget: Budget, rate: float = 5e-4) -> None:
    """Policy gradient with advantages normalised within each prompt's samples (GRPO without clipping or a KL term), reward 1 for a right answer."""
    generator = torch.Generator().manual_seed(seed + 1_000_003)
    model, prompts = learner.model, prompts_of(learner.seen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for _ in range(budget.reinforce):
        row = torch.randint(len(prompts), (budget.prompts,), generator=generator)
        ids = rollouts(model, prompts[row].repeat_interleave(budget.samples, dim=0), generator)
        reward = right(ids).float().view(budget.prompts, budget.samples)
        advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
        tells = (advantage != 0).flatten()
        if not bool(tells.any()):
            continue
        ids, advantage = ids[tells], advantage.flatten()[tells]
        log_p = model(ids, use_cache=False).logits[:, PROMPT - 1 : -1].log_softmax(-1)
        log_p = log_p.gather(-1, ids[:, PROMPT:, None]).squeeze(-1)
        _step(model, optimizer, -(advantage[:, None] * log_p).sum() / (budget.prompts * budget.samples * ANSWER))


@torch.no_grad()
def rollouts(model: Any, prompts: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Prompts (n, PROMPT) with answers sampled at temperature 1: (n, PROMPT + ANSWER)."""
    from transformers import DynamicCache

    ids, last, cache = prompts, prompts, {cache_argument(model): DynamicCache()}
    for _ in range(ANSWER):
        out = model.model(last, **cache, use_cache=True)
        logits = model.lm_head(out.last_hidden_state[:, -1])
        last = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, last], dim=1)
    return ids


def cache_argument(model: Any) -> str:
    """What this transformers calls the cache that a model is given."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _step(model: Any, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
