"""What a policy does on an enumerable task, in closed form: no number here has a sampling error.

All functions take exact sequence log-probabilities ``log_p`` of shape (..., N), normalised over the last axis, as `GRUs.all_log_probs` and `Tabular.all_log_probs` give them: (S, P, N) for S seeds, P prompts and N completions.
Masks and rewards of shape (P, N) broadcast. To work on some of the prompts, index both.
"""

from typing import Any

import torch
from torch import Tensor


def mass(log_p: Tensor, kind: Tensor) -> Tensor:
    """Probability of a set of completions.

    Parameters
    ----------
    log_p : (..., N) float
    kind : (..., N) bool

    Returns
    -------
    (...) float
    """
    return torch.where(kind, log_p.exp(), 0.0).sum(-1)


def accuracy(log_p: Tensor, correct: Tensor) -> Tensor:
    """Expected accuracy of one completion, (...): the probability of all right ones; 0 where a prompt has none."""
    return mass(log_p, correct)


def mean_reward(log_p: Tensor, reward: Tensor) -> Tensor:
    """Expected reward of one completion, (...)."""
    return (log_p.exp() * reward.to(log_p.dtype)).sum(-1)


def log_partition(log_p: Tensor, reward: Tensor, beta: float) -> Tensor:
    """Log-partition function of the tilted policy ``p(y) exp(r(y) / beta)``, (...).

    Raises
    ------
    ValueError
        If `beta` is not positive.
    """
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}")
    return torch.logsumexp(log_p + reward.to(log_p.dtype) / beta, -1)


def tilted(log_p: Tensor, reward: Tensor, beta: float) -> Tensor:
    """Log-probabilities (..., N) of the optimum of reward less beta times KL to ``p``: ``p(y) exp(r(y) / beta) / Z``."""
    return log_p + reward.to(log_p.dtype) / beta - log_partition(log_p, reward, beta)[..., None]


def sequence_entropy(log_p: Tensor) -> Tensor:
    """Entropy of the whole completion in nats, (...)."""
    return -torch.where(log_p > -torch.inf, log_p.exp() * log_p, 0.0).sum(-1)


def token_entropy(log_p: Tensor, lengths: Tensor) -> Tensor:
    """Mean entropy of a generated token in nats, (...).

    By the chain rule the entropies of the tokens' conditional distributions sum, on average over completions, to the entropy of the sequence; divided by the expected length this is what a trainer's log shows as entropy,
    without its noise. Tokens without a choice count with entropy 0.
    """
    return sequence_entropy(log_p) / (log_p.exp() * lengths.to(log_p.dtype)).sum(-1)


def kl(old_log_p: Tensor, new_log_p: Tensor) -> Tensor:
    """Kullback-Leibler divergence KL(old || new) of whole completions in nats, (...)."""
    return torch.where(old_log_p > -torch.inf, old_log_p.exp() * (old_log_p - new_log_p), 0.0).sum(-1)


def pass_at_k(p: Tensor, k: int) -> Tensor:
    """Probability that at least one of `k` independent completions is right, given the accuracy ``p`` (...)."""
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    return -torch.expm1(k * torch.log1p(-p.clamp(0, 1)))


def distinct(log_p: Tensor, correct: Tensor, k: int) -> Tensor:
    """Expected number of different right completions among `k` independent ones, (...)."""
    return torch.where(correct, pass_at_k(log_p.exp(), k), 0.0).sum(-1)


def expected_gradient(
    policy: Any, task: Any, prompts: Tensor | None = None, *, reward: Tensor | None = None, chunk: int = 16
) -> list[Tensor]:
    """Exact gradient of the mean reward over prompts, for each seed.

    Parameters
    ----------
    policy : GRUs or Tabular
    task : EnumerableTask
    prompts : (B,) or (S, B) int64, optional
        By default all.
    reward : (P, N) float, optional
        By default the task's.
    chunk : int
        Prompts differentiated at a time; bounds memory, changes nothing.

    Returns
    -------
    list of tensors like ``policy.parameters()``
    """
    reward = task.reward if reward is None else reward
    rows = torch.arange(task.prompts) if prompts is None else torch.as_tensor(prompts)
    if not rows.numel():
        raise ValueError("the gradient of a mean over no prompts is not defined: give at least one prompt")
    parameters = policy.parameters()
    total = [torch.zeros_like(p) for p in parameters]
    for part in rows.split(chunk, dim=-1):
        value = (policy.all_log_probs(task, part).exp() * reward[part].to(parameters[0].dtype)).sum() / rows.shape[-1]
        for sum_, g in zip(total, torch.autograd.grad(value, parameters, allow_unused=True), strict=True):
            if g is not None:
                sum_ += g
    return total
