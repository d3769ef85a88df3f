"""Dialogues of the study's small policies: sampled, scored, and enumerated exactly; all for S seeds at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cameraready.posttraining.cal_grpo.experiment.games import Game


@dataclass(frozen=True)
class Dialogues:
    """R dialogues of each of S seeds: prompts (S, R), words (S, R, K, L), what was said (S, R, K), verdicts and reach (S, R, K) bool."""

    prompts: Tensor
    words: Tensor
    said: Tensor
    right: Tensor
    reached: Tensor

    @property
    def rewards(self) -> Tensor:
        """Float64 with NaN where not reached."""
        return torch.where(self.reached, self.right.double(), torch.nan)

    @property
    def tokens(self) -> Tensor:
        """Words that each seed's policy wrote, (S,)."""
        return self.reached.flatten(1).sum(1) * self.words.shape[-1]

    def repeats(self) -> Tensor:
        """Share of later attempts that repeat an earlier one of the dialogue, (S,)."""
        same = (self.words[:, :, :, None] == self.words[:, :, None]).all(-1)  # (S, R, K, K)
        earlier = torch.ones(same.shape[-2:], dtype=torch.bool).tril(-1)
        again = (same & earlier).any(-1) & self.reached
        return again[..., 1:].flatten(1).sum(1) / self.reached[..., 1:].flatten(1).sum(1).clamp_min(1)


@torch.no_grad()
def converse(policy: Any, game: Game, prompts: Tensor, generators: list[torch.Generator]) -> Dialogues:
    """Let each seed's policy try at prompts (S, R); seed s draws from ``generators[s]`` alone."""
    seeds, rows = prompts.shape
    shape = (rows, game.attempts, game.length)
    numbers = torch.stack([torch.rand(shape, generator=g, dtype=torch.float64) for g in generators])
    features = game.features[prompts]
    words = torch.zeros(seeds, *shape, dtype=torch.int64)
    said = torch.zeros(seeds, rows, game.attempts, dtype=torch.int64)
    right, reached = torch.zeros_like(said, dtype=torch.bool), torch.zeros_like(said, dtype=torch.bool)
    going = torch.ones(seeds, rows, dtype=torch.bool)
    state, last = policy.begin(rows, features), None
    for k in range(game.attempts):
        if not game.sees:
            state, last = policy.begin(rows, features), None
        for place in range(game.length):
            state, logits = policy.advance(state, last)
            shares = logits[..., : game.words].double().softmax(-1).cumsum(-1)
            drawn = (numbers[:, :, k, place, None] * shares[..., -1:] > shares).sum(-1)
            words[:, :, k, place] = last = drawn.clamp_max(game.words - 1)
        verdict, said[:, :, k] = game.judge(prompts, words[:, :, k])
        reached[:, :, k], right[:, :, k] = going, verdict & going
        going = going & ~verdict
        if game.sees and k + 1 < game.attempts:
            state, _ = policy.advance(state, last)
            last = said[:, :, k]
    return Dialogues(prompts, words, said, right, reached)


def attempt_log_probs(policy: Any, game: Game, dialogues: Dialogues) -> Tensor:
    """Log-probability of each attempt, (S, R, K), with gradient; 0 where not reached."""
    words, reached = dialogues.words, dialogues.reached
    seeds, rows, attempts, length = words.shape
    features = game.features[dialogues.prompts]
    allowed = torch.arange(game.vocabulary) < game.words
    if game.sees:
        tokens = torch.cat([words, dialogues.said[..., None]], dim=-1).flatten(2)[..., :-1]
        mask = torch.cat([reached[..., None].expand_as(words), torch.zeros_like(reached)[..., None]], dim=-1)
        mask = mask.flatten(2)[..., :-1]
        # Where nothing is scored a word stands in for what was said, which the restricted softmax does not know.
        logps = _scored(policy, tokens, features, mask, allowed)
        logps = torch.cat([logps, logps.new_zeros(seeds, rows, 1)], dim=-1).view(seeds, rows, attempts, length + 1)
        return logps.sum(-1)
    features = features.repeat_interleave(attempts, dim=1)
    mask = reached[..., None].expand_as(words).reshape(seeds, rows * attempts, length)
    logps = _scored(policy, words.reshape(seeds, rows * attempts, length), features, mask, allowed)
    return logps.sum(-1).view(seeds, rows, attempts)


def _scored(policy: Any, tokens: Tensor, features: Tensor, mask: Tensor, allowed: Tensor) -> Tensor:
    logits = policy.logits(tokens, features).masked_fill(~allowed, -1e30)
    picked = logits.log_softmax(-1).gather(-1, torch.where(mask, tokens, 0)[..., None])[..., 0]
    return torch.where(mask, picked, 0.0)


@dataclass(frozen=True)
class Chances:
    """Of each seed: success at attempt k (S, P, K) and reach (S, P, K) by prompt; ``repeats`` (S,), share of later attempts that repeat."""

    success: Tensor
    reach: Tensor
    repeats: Tensor

    @property
    def verified(self) -> Tensor:
        """V@k, the mean over prompts, (S, K)."""
        return self.success.cumsum(-1).mean(1)

    @property
    def rates(self) -> Tensor:
        """p_k, prompts pooled, (S, K)."""
        return self.success.mean(1) / self.reach.mean(1).clamp_min(1e-12)


@torch.no_grad()
def enumerated(policy: Any, game: Game) -> Chances:
    """Exact chances in games whose attempts are one word: every history that leads on is walked once.

    Histories are shared by the prompts that cannot be told apart by what was seen and said so far.
    """
    if game.length != 1:
        raise ValueError(f"attempts of {game.length} words are too many to list; sample them")
    seeds, prompts, words = policy.seeds, game.prompts, game.words
    everyone = torch.arange(prompts)[:, None].expand(-1, words)
    right, said = game.judge(everyone, torch.arange(words).expand(prompts, -1)[..., None])  # (P, M)
    shown, kind = torch.unique(game.features, dim=0, return_inverse=True)
    alive = kind[None] == torch.arange(len(shown))[:, None]  # (H, P)
    tried = torch.zeros(len(shown), words, dtype=torch.bool)
    mass = torch.ones(seeds, len(shown), dtype=torch.float64)
    state, last = policy.begin(len(shown), shown), None
    success, reach = (torch.zeros(seeds, prompts, game.attempts, dtype=torch.float64) for _ in range(2))
    again, later = torch.zeros(seeds, dtype=torch.float64), torch.zeros(seeds, dtype=torch.float64)
    start = state
    for k in range(game.attempts):
        state, logits = policy.advance(state, last)
        shares = logits[..., :words].double().softmax(-1)  # (S, H, M)
        there = alive.double()
        reach[..., k] = mass @ there
        hits = shares @ right.double().T  # (S, H, P)
        success[..., k] = (mass[..., None] * hits * there).sum(1)
        if k:
            weight = mass * there.sum(1)
            again += (weight * (shares * tried).sum(-1)).sum(1)
            later += weight.sum(1)
        if k + 1 == game.attempts:
            break
        parent, guess, word, alive_next = [], [], [], []
        for feedback in torch.unique(said[~right]).tolist():
            goes_on = ~right & (said == feedback)  # (P, M)
            kept = alive[:, None] & goes_on.T[None]  # (H, M, P)
            where = kept.any(-1).nonzero()
            parent.append(where[:, 0])
            guess.append(where[:, 1])
            word.append(torch.full((len(where),), int(feedback)))
            alive_next.append(kept[where[:, 0], where[:, 1]])
        up, at, told = torch.cat(parent), torch.cat(guess), torch.cat(word)
        alive = torch.cat(alive_next)
        mass = mass[:, up] * shares[:, up, at]
        tried = tried[up].scatter(1, at[:, None], True)
        if game.sees:
            state, _ = policy.advance([h[:, up] for h in state], at.expand(seeds, -1))
            last = told.expand(seeds, -1)
        else:
            rows = alive.double().argmax(1)
            state, last = policy.begin(len(rows), game.features[rows]), None
    del start
    return Chances(success, reach, again / later.clamp_min(1e-12))


def sampled(policy: Any, game: Game, each: int, seed: int) -> Chances:
    """The same from `each` dialogues a prompt, drawn alike for all policies."""
    generators = [torch.Generator().manual_seed(seed * 1_000 + s) for s in range(policy.seeds)]
    prompts = torch.arange(game.prompts).repeat_interleave(each).expand(policy.seeds, -1)
    found = converse(policy, game, prompts, generators)
    shape = (policy.seeds, game.prompts, each, game.attempts)
    return Chances(
        found.right.view(shape).double().mean(2), found.reached.view(shape).double().mean(2), found.repeats().double()
    )


def judged(policy: Any, game: Game, seed: int = 0, each: int = 32) -> Chances:
    """Exact where it can be, else sampled."""
    return enumerated(policy, game) if game.length == 1 else sampled(policy, game, each, seed)
