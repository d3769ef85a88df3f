"""The trajectory-balance loss against the sampling policy, and the intercept that it learns.

Kim et al., 2026, arXiv:2602.12642; trajectory balance: Malkin et al., 2022, arXiv:2201.13259. Names follow torchgfn.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Balance(NamedTuple):
    """What `tb_loss` computed on its way, detached, in torchgfn's names; shapes are the rewards'.

    Attributes
    ----------
    log_pf : Tensor
        Log-probability of each sequence under the policy in training (its length-normalised one where that was asked for).
    log_rewards : Tensor
        Of each sequence: ``old_logp + reward / beta``, the log of the unnormalised target.
    scores : Tensor
        ``log_pf - log_rewards``. A text has one order of its tokens, so that torchgfn's backward log-probability is 0.
    deltas : Tensor
        ``scores + log_z``, the residuals that are squared.
    used : Tensor of bool
        False for sequences that were left out of the loss; their numbers above are NaN.
    """

    log_pf: Tensor
    log_rewards: Tensor
    scores: Tensor
    deltas: Tensor
    used: Tensor


def tb_loss(
    logp: Tensor,
    old_logp: Tensor,
    reward: Tensor,
    log_z: Tensor,
    beta: float,
    mask: Tensor | None = None,
    *,
    length_normalize: bool = False,
    weights: Tensor | None = None,
    nonfinite: Literal["raise", "exclude"] = "raise",
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> tuple[Tensor, Balance]:
    """Squared residual of trajectory balance, ``(log_z + log pi - log pi_old - reward / beta)^2``, of sequences drawn from ``pi_old``.

    The policy that makes it vanish on every text is ``pi_old(y) exp(reward(y) / beta) / Z``, so that several right answers keep their
    proportions. At ``pi = pi_old`` its gradient is that of REINFORCE with the learned baseline ``beta * log_z``, times ``2 / beta``.

    Parameters
    ----------
    logp : Tensor, shape (..., L), or (...) for sums over tokens
        Log-probabilities under the policy in training, with gradient, of any float dtype; half precision is summed, and the loss given, in float32.
    old_logp : Tensor, same shape
        Under the policy that sampled the text, at the temperature of sampling; taken as constants. For replayed texts those stored when
        they were drawn. Values recomputed by another kernel shift the residual in proportion to the length.
    reward : Tensor, shape (...)
        Any finite numbers. Not centred and not scaled by a group: advantages are another loss.
    log_z : Tensor, broadcastable to (...)
        Log-partition of each sequence's prompt (`PartitionHead.log_z`), never clipped; detach it to train the policy alone.
    beta : float
        Temperature of the reward, positive; 0.05 in the paper.
    mask : Tensor, shape (..., L), optional
        True or 1 at the tokens that the policy wrote; padding, tool output and feedback are left out. It says that the last axis is tokens.
    length_normalize : bool
        Divide both log-probabilities by the number of tokens (as FlowRL does; Zhu et al., 2025, arXiv:2509.15207). The intercept then no longer
        is accuracy plus a divergence, but accuracy plus a length-weighted one. Needs `mask` or an axis of tokens.
    weights : Tensor, shape (...), optional
        Of each squared residual (importance weights of replayed texts), taken as constants; the mean is over the number of sequences.
    nonfinite : {"raise", "exclude"}
        What to do with a sequence whose reward is NaN or infinite, or whose log-probability is: refuse, or leave it out of loss and mean.
    reduction : {"mean", "sum", "none"}

    Returns
    -------
    loss : Tensor, scalar, or shape (...)
        0 with a graph where no sequence is left: a batch may be empty. A sequence without a single token of the policy's is left out.
    balance : Balance

    Raises
    ------
    ValueError
        Shapes that do not fit, `beta` not positive, values that are not finite under ``"raise"``; and, always, a `log_z` or a weight that is not
        finite: its head has diverged, and leaving sequences out would hide it.

    Notes
    -----
    Kim et al., 2026, arXiv:2602.12642, Sec. 4. Use it where many answers are right and diversity counts; with one right answer and a policy
    that must only become accurate, GRPO's loss is the simpler choice. All-right and all-wrong groups carry signal here: keep them.
    """
    _check(logp, old_logp, reward, beta, mask, weights)
    # Sums over tokens in half precision would be off by nats.
    dtype = torch.promote_types(torch.promote_types(logp.dtype, old_logp.dtype), torch.float32)
    logp, old_logp = logp.to(dtype), old_logp.to(dtype)
    log_pf, old, lengths = (
        _sums(logp, reward, mask),
        _sums(old_logp.detach(), reward, mask),
        _lengths(logp, reward, mask),
    )
    if length_normalize:
        if lengths is None:
            raise ValueError("length_normalize needs log-probabilities per token, not sums over tokens")
        log_pf, old = log_pf / lengths.clamp(min=1), old / lengths.clamp(min=1)
    reward = reward.detach().to(dtype)
    log_z = log_z.to(dtype).expand(reward.shape)
    written = torch.ones_like(reward, dtype=torch.bool) if lengths is None else lengths > 0
    _refuse_diverged(log_z, weights, written)
    finite = torch.isfinite(reward) & torch.isfinite(log_pf.detach()) & torch.isfinite(old)
    if nonfinite == "raise":
        _refuse(written & ~finite, reward, log_pf.detach())
    elif nonfinite != "exclude":
        raise ValueError(f"nonfinite must be 'raise' or 'exclude', got {nonfinite!r}")
    used = written & finite
    # Left-out entries are replaced before any arithmetic, so that no NaN reaches a gradient.
    zero = log_pf.new_zeros(())
    log_pf, old, reward = (torch.where(used, x, zero) for x in (log_pf, old, reward))
    log_rewards = old + reward / beta
    scores = log_pf - log_rewards
    deltas = scores + torch.where(used, log_z, zero)
    squared = torch.where(used, deltas.square(), zero)
    if weights is not None:
        squared = squared * torch.where(used, weights.detach().to(dtype), zero)
    nan = torch.full_like(zero, math.nan)
    info = Balance(*(torch.where(used, x.detach(), nan) for x in (log_pf, log_rewards, scores, deltas)), used)
    if reduction == "none":
        return squared, info
    if reduction == "sum":
        return squared.sum(), info
    if reduction != "mean":
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    return squared.sum() / used.sum().clamp(min=1), info


def log_z_intercept(
    logp: Tensor,
    old_logp: Tensor,
    reward: Tensor,
    beta: float,
    *,
    probabilities: Tensor | None = None,
) -> Tensor:
    """The log-partition that minimises `tb_loss` for a policy held fixed: the mean of ``reward / beta + log pi_old - log pi``.

    Over all texts with ``probabilities = pi_old`` it is ``p_old / beta + KL(pi_old || pi)``, p_old being the expected reward. It is the
    log-partition of ``pi_old exp(reward / beta)`` only once the policy has reached that target: with p_old = 0.3 and beta = 0.05 the one is
    0.3 / beta, the other 0.94 / beta.

    Parameters
    ----------
    logp, old_logp, reward : Tensor, shape (..., n)
        Of n sequences of one prompt, sums over tokens.
    beta : float
    probabilities : Tensor, shape (..., n), optional
        Weights that add up to 1; None takes the plain mean, right for texts drawn from ``pi_old``. Texts of weight 0 are left out.

    Returns
    -------
    Tensor, shape (...)

    Notes
    -----
    Kim et al., 2026, arXiv:2602.12642, Proposition 4.1.
    """
    if not beta > 0 or not math.isfinite(beta):
        raise ValueError(f"beta must be a positive number, got {beta}")
    values = reward.to(logp.dtype) / beta + old_logp - logp
    if probabilities is None:
        return values.mean(dim=-1)
    return torch.where(probabilities > 0, probabilities * values, torch.zeros_like(values)).sum(dim=-1)


def _check(
    logp: Tensor, old_logp: Tensor, reward: Tensor, beta: float, mask: Tensor | None, weights: Tensor | None
) -> None:
    if not beta > 0 or not math.isfinite(beta):
        raise ValueError(f"beta must be a positive number, got {beta}")
    if logp.shape != old_logp.shape:
        raise ValueError(
            f"log-probabilities of the two policies must have one shape, got {tuple(logp.shape)} and {tuple(old_logp.shape)}"
        )
    per_token = logp.ndim == reward.ndim + 1 and logp.shape[:-1] == reward.shape
    if not per_token and logp.shape != reward.shape:
        raise ValueError(
            f"rewards of shape {tuple(reward.shape)} go with log-probabilities of that shape, or of that shape and an axis of tokens;"
            f" got {tuple(logp.shape)}"
        )
    if mask is not None and (not per_token or mask.shape != logp.shape):
        raise ValueError(
            f"a mask goes with log-probabilities per token and has their shape; got {tuple(mask.shape)} and {tuple(logp.shape)}"
        )
    if weights is not None and weights.shape != reward.shape:
        raise ValueError(f"weights must have the rewards' shape {tuple(reward.shape)}, got {tuple(weights.shape)}")


def _sums(logp: Tensor, reward: Tensor, mask: Tensor | None) -> Tensor:
    if logp.ndim == reward.ndim:
        return logp
    if mask is None:
        return logp.sum(dim=-1)
    return torch.where(mask.bool(), logp, torch.zeros_like(logp)).sum(dim=-1)


def _lengths(logp: Tensor, reward: Tensor, mask: Tensor | None) -> Tensor | None:
    """Tokens of each sequence, None for log-probabilities that are sums already."""
    if logp.ndim == reward.ndim:
        return None
    if mask is None:
        return torch.full(reward.shape, logp.shape[-1], device=logp.device)
    return mask.bool().sum(dim=-1)


def _refuse_diverged(log_z: Tensor, weights: Tensor | None, written: Tensor) -> None:
    for name, values in (("log_z", log_z), ("weights", weights)):
        bad = 0 if values is None else int((written & ~torch.isfinite(values.detach())).sum())
        if bad:
            raise ValueError(f"{name} of {bad} of {written.numel()} sequences is not finite: what made it has diverged")


def _refuse(bad: Tensor, reward: Tensor, log_pf: Tensor) -> None:
    if not bool(bad.any()):
        return
    unscored = int((bad & ~torch.isfinite(reward)).sum())
    if unscored:
        raise ValueError(
            f"{unscored} of {bad.numel()} rewards are NaN or infinite: the verifier gave no score; score them, or leave these sequences out"
            " with nonfinite='exclude'"
        )
    whose = "the policy in training" if bool((bad & ~torch.isfinite(log_pf)).any()) else "the policy that sampled"
    raise ValueError(
        f"{int(bad.sum())} of {bad.numel()} sequences have no finite log-probability under {whose}: a token of probability 0 (top-k, top-p, a"
        " banned token, another vocabulary) can't be balanced; sample without truncation, or leave them out with nonfinite='exclude'"
    )
