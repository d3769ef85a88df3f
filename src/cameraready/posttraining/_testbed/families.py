"""The enumerable tasks that the studies ship."""

import itertools

import torch
from torch import Tensor

from cameraready.posttraining._testbed.tasks import EnumerableTask


def arms(n: int = 100, *, good: int = 5, prompts: int = 1, rare: float = 0.02, seed: int = 0) -> EnumerableTask:
    """A bandit: completions are single tokens, `good` of them right, all of them rare at the start.

    Parameters
    ----------
    n, good : int
        Arms, and how many of them are right for each prompt.
    prompts : int
    rare : float
        Probability of all right arms together at the start; the others share the rest unequally (exponential weights).
    seed : int

    Notes
    -----
    Kind ``rare``: the right arms. No features.
    """
    if not 0 < good < n:
        raise ValueError(f"good must be between 1 and {n - 1}, got {good}")
    if not 0 < rare < 1:
        raise ValueError(f"rare must be between 0 and 1, got {rare}")
    g = torch.Generator().manual_seed(seed)
    correct = torch.zeros(prompts, n, dtype=torch.bool)
    for row in correct:
        row[torch.randperm(n, generator=g)[:good]] = True
    weights = torch.empty(prompts, n, dtype=torch.float64).exponential_(generator=g).masked_fill(correct, 0.0)
    start = torch.where(correct, rare / good, (1 - rare) * weights / weights.sum(-1, keepdim=True))
    tokens = torch.arange(n)[:, None]
    return EnumerableTask(
        "arms",
        tokens,
        torch.ones(n, dtype=torch.int64),
        correct,
        torch.zeros(prompts, 0),
        {"rare": correct},
        start=start,
    )


def two_strategies(
    prompts: int = 256,
    *,
    features: int = 16,
    digits: int = 6,
    routes: int = 8,
    rare: float = 0.02,
    skill: tuple[float, float] = (0.7, 0.95),
    vocabulary: int = 32,
    seed: int = 0,
) -> EnumerableTask:
    """Two formats for an answer that the features determine: a frequent one right about half of the time, a rare one always right.

    The answer is two digits, each the largest of `digits` linear functions of the features. ``F route digit digit END`` is right if both digits are and the route is one of the half that work for this prompt: which, no feature
    tells. ``R digit digit END`` is right if both digits are.

    Parameters
    ----------
    prompts, features, digits, routes : int
    rare : float
        Probability of the rare format's first token at the start.
    skill : pair of float
        Probability at the start that the digits are right, in the frequent and in the rare format.
    vocabulary : int
        At least ``3 + digits + routes``.
    seed : int

    Notes
    -----
    Kinds ``rare`` and ``frequent``. Demonstrations (``task.visit``) show both formats equally often.
    """
    if not (0 < rare < 1 and all(0 < s <= 1 for s in skill)):
        raise ValueError("rare and skill must be probabilities")
    if routes < 2 or digits < 2 or features < 1 or prompts < 1:
        raise ValueError("give at least two routes, two digits, one feature and one prompt")
    if vocabulary < 3 + digits + routes:
        raise ValueError(f"the vocabulary must hold at least {3 + digits + routes} tokens, got {vocabulary}")
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(prompts, features, generator=g)
    answer = torch.stack([(x @ torch.randn(features, digits, generator=g)).argmax(-1) for _ in range(2)], -1)
    works = torch.rand(prompts, routes, generator=g).argsort(-1) < routes // 2
    end, frequent, rarely = 0, 1, 2
    digit, route = 3, 3 + digits
    pairs = list(itertools.product(range(digits), repeat=2))
    tokens = [[frequent, route + r, digit + a, digit + b, end] for r in range(routes) for a, b in pairs]
    tokens += [[rarely, digit + a, digit + b, end, 0] for a, b in pairs]
    pair = torch.tensor(pairs)
    exactly = (pair[None] == answer[:, None]).all(-1)  # (P, digits^2)
    in_frequent = exactly[:, None] & works[..., None]
    correct = torch.cat([in_frequent.flatten(1), exactly], 1)
    is_rare = torch.arange(len(tokens)) >= routes * len(pairs)

    def guess(right: float) -> Tensor:
        return torch.where(exactly, right, (1 - right) / (len(pairs) - 1)).to(torch.float64)

    def mixture(share: float) -> Tensor:
        often = (1 - share) * guess(skill[0])[:, None].expand(-1, routes, -1).flatten(1) / routes
        return torch.cat([often, share * guess(skill[1])], 1)

    return EnumerableTask(
        "two_strategies",
        torch.tensor(tokens),
        torch.where(is_rare, 4, 5),
        correct,
        x,
        {"rare": is_rare, "frequent": ~is_rare},
        start=mixture(rare),
        visit=mixture(0.5),
        vocabulary=vocabulary,
    )


def many_answers(
    prompts: int = 300,
    *,
    features: int = 16,
    base: int = 8,
    synonyms: int = 3,
    steepness: float = 6.0,
    noise: float = 0.2,
    vocabulary: int = 32,
    seed: int = 0,
) -> EnumerableTask:
    """Prompts of widely different difficulty, each with several right answers.

    A prompt asks for two residues u and v modulo `base`; it is answered by ``a b END`` where a = u and b = v modulo `base`: `synonyms` squared right answers out of (base * synonyms) squared. Its features are a rotation of what tells u,
    what tells v, and its difficulty, with noise. At the start the policy answers by skill or at random, depending on the difficulty, seldom in between: a pool of mostly all-right and all-wrong groups, in which what is learnt on prompts
    of medium difficulty carries over to the hard ones.

    Parameters
    ----------
    prompts : int
    features : int
        At least ``2 * base - 1``.
    base, synonyms : int
    steepness : float
        How fast the initial competence, ``sigmoid(-steepness * difficulty)`` with standard normal difficulty, falls.
    noise : float
        Standard deviation added to every feature.
    vocabulary : int
        At least ``1 + base * synonyms``.
    seed : int

    Notes
    -----
    The start distribution prefers some synonyms to others when it answers by skill.
    """
    if base < 2 or synonyms < 1 or prompts < 1:
        raise ValueError("give a base of at least two, one synonym and one prompt")
    if features < 2 * base - 1:
        raise ValueError(
            f"two residues modulo {base} and a difficulty need at least {2 * base - 1} features, got {features}"
        )
    if vocabulary < 1 + base * synonyms:
        raise ValueError(f"the vocabulary must hold at least {1 + base * synonyms} tokens, got {vocabulary}")
    g = torch.Generator().manual_seed(seed)
    u, v = torch.randint(base, (2, prompts), generator=g)
    difficulty = torch.randn(prompts, generator=g)
    corners = (
        torch.linalg.qr(torch.cat([torch.ones(base, 1), torch.eye(base)[:, 1:]], 1)).Q[:, 1:] * base**0.5
    )  # of a simplex
    told = torch.cat([corners[u], corners[v], difficulty[:, None]], 1)
    told = torch.nn.functional.pad(told, (0, features - told.shape[1]))
    told = told + noise * torch.randn(prompts, features, generator=g)
    rotation = torch.linalg.qr(torch.randn(features, features, generator=g)).Q
    competence = torch.sigmoid(-steepness * difficulty).to(torch.float64)[:, None]
    pairs = torch.tensor(list(itertools.product(range(base * synonyms), repeat=2)))
    correct = (pairs[:, 0] % base == u[:, None]) & (pairs[:, 1] % base == v[:, None])
    preference = 0.5 ** (pairs // base).sum(-1).to(torch.float64) * correct
    start = competence * preference / preference.sum(-1, keepdim=True) + (1 - competence) / len(pairs)
    tokens = torch.nn.functional.pad(pairs + 1, (0, 1))
    lengths = torch.full((len(tokens),), 3)
    x = told @ rotation.T
    return EnumerableTask("many_answers", tokens, lengths, correct, x, start=start, vocabulary=vocabulary)
