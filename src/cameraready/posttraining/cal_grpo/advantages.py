"""Advantages of attempts: calibrated, naive or of the whole trajectory (Ildiz et al., 2026, arXiv:2604.17912)."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import numpy as np

from cameraready.posttraining.cal_grpo.attempts import Attempts, as_numpy, attempts_of, later_failures
from cameraready.posttraining.cal_grpo.rates import RunningRates

Method = Literal["cal", "naive", "trajectory"]
METHODS = ("cal", "naive", "trajectory")
#: What TRL adds to a standard deviation before it divides by it.
EPSILON = 1e-4


def attempt_advantages(
    rewards: Any,
    reached: Any = None,
    group_ids: Any = None,
    *,
    method: Method = "cal",
    lam: float = 0.0,
    baseline: Any = "loo",
    weights: Any = "group",
    rates: RunningRates | None = None,
    keys: Any = None,
    scale: Literal["group", "batch"] | None = None,
    pool_ids: Any = None,
) -> Any:
    """One advantage for each attempt of trajectories that stop at their first success.

    With p_k the probability to succeed at attempt k once it is reached, Verification@K is ``1 - prod_k (1 - p_k)``, and its gradient is
    ``sum_k P(reach k) w_k grad p_k`` with ``w_k = prod_{j > k} (1 - p_j)``, the probability that all later attempts fail.

    - ``"cal"``: ``w_k (r_k - p_k)``, whose policy gradient has that mean when the chance of later success does not depend on which wrong
      answer was given. ``lam`` adds that share of the rest, ``(1 - r_k) (R - (1 - w_k))``, the credit for a failure that
      helped: with ``lam=1`` the attempt gets ``R - V_k``, V_k the chance of success from attempt k on, which is unbiased in any case.
    - ``"naive"``: ``r_k - p_k``, which over-weights attempt k by 1 / w_k.
    - ``"trajectory"``: ``R`` less the group's rate, for all attempts alike (GRPO with one reward a trajectory).

    For a loss that divides by trajectories or by a constant. Dividing by the attempts reached would remove P(reach k), dividing by
    a sequence's own length would penalise trajectories of many attempts.

    Use it when the model is retried with the failure in context, after a hard verdict. Prefer ``"trajectory"`` or ``lam`` near 1 when
    the verdict says more than "wrong" (failed tests, higher or lower): calibration cannot praise a failure that taught something.

    Parameters
    ----------
    rewards : array or tensor (T, K)
        The verifier's verdict, 0 or 1; NaN (or ``reached`` false) where the attempt was not made. A trajectory cut off before attempt K
        without success counts as failed at its last attempt and in no later count.
    reached : bool array (T, K), optional
    group_ids : (T,), optional
        Which trajectories share a prompt; any ids. One group by default.
    method : {"cal", "naive", "trajectory"}
    lam : float in [0, 1]
        For ``"cal"`` alone.
    baseline : "loo", "mean", "ema" or array (K,) or (T, K)
        p_k: the rate of the others in the group that reached the attempt (0 if there are none: no bias, but a large variance where few
        get that far), or of all of them (shrinks late attempts the most), of ``rates``, or a known one. For ``lam`` and
        ``"trajectory"`` likewise of R, where only "loo" and "mean" are defined.
    weights : "group", "ema" or array (K,) or (T, K)
        Where w comes from: the group's own rates, ``rates`` (steadier, but behind the policy; see `RunningRates`), or known ones. Where nobody of
        a group reached attempt k, the other groups of the call stand in.
    rates : RunningRates, optional
        For ``weights="ema"`` and ``baseline="ema"``. It is read, not updated: call its ``update`` afterwards.
    keys : sequence (T,), optional
        Under which ``rates`` knows the prompts; one for all by default.
    scale : {"group", "batch"}, optional
        Divide by the standard deviation of R in the group (or call), plus 1e-4: one divisor for all attempts. A scale of their own would
        undo the calibration. Groups whose outcomes are all equal stay as they are.
    pool_ids : (T,), optional
        Independent runs that are computed in one call: groups stand in for one another within a pool only.

    Returns
    -------
    array or tensor (T, K)
        Of the library, device and floating dtype of ``rewards`` (float64 for integers and booleans); NaN where not reached. Computed in
        float64 on the CPU in O(T K).

    Raises
    ------
    ValueError
        For verdicts that are neither 0 nor 1, NaN where reached, attempts after a success or out of order, and options that do not fit.
    TypeError
        Rewards that are no numbers.

    Warns
    -----
    UserWarning
        For groups of one trajectory, unless the baseline is a known or a running one.
    """
    table = attempts_of(rewards, reached, group_ids, pool_ids)
    _check(method, lam, baseline, scale, weights, rates)
    sizes = table.n[:, 0] if table.n.size else np.zeros(0)
    if (sizes == 1).any() and isinstance(baseline, str) and baseline != "ema":
        warnings.warn(
            f"{int((sizes == 1).sum())} of {len(sizes)} groups have a single trajectory, which has no others for a baseline (it is 0, or with "
            "'mean' its own) nor for weights; sample at least two trajectories a prompt, or pass baseline and weights",
            UserWarning,
            stacklevel=2,
        )
    if method == "trajectory":
        whole = table.solved[:, None] - _others(
            table, table.solved[:, None] & table.reached[:, :1], baseline, first=True
        )
        found = np.repeat(whole, table.shape[1], axis=1)
    else:
        found = table.success - _baseline(table, baseline, rates, keys)
        if method == "cal":
            found = found * _weights(table, weights, rates, keys)
            if lam:
                solved = table.solved[:, None] & table.reached
                found = (1 - lam) * found + lam * (solved - _others(table, solved, baseline))
    if scale is not None:
        found = found / _divisor(table, scale)
    return like(rewards, np.where(table.reached, found, np.nan))


def credited(arm: Any, rewards: Any, group_ids: Any, pool_ids: Any = None) -> Any:
    """Advantages by an arm of a study: options of `attempt_advantages`, or a function of rewards (T, K) and group ids (T,), as arrays."""
    if not callable(arm):
        return attempt_advantages(rewards, group_ids=group_ids, pool_ids=pool_ids, **arm)
    table = as_numpy(rewards)
    found = np.asarray(arm(table, as_numpy(group_ids)), dtype=np.float64)
    name = getattr(arm, "__name__", type(arm).__name__)
    if found.shape != table.shape:
        raise ValueError(f"{name} must return an advantage for each attempt, {table.shape}, got shape {found.shape}")
    if not np.isfinite(found[~np.isnan(table)]).all():
        raise ValueError(f"{name} returned NaN or an infinite advantage for an attempt that was made")
    return like(rewards, found)


def attempt_weights(rewards: Any, reached: Any = None, group_ids: Any = None, *, pool_ids: Any = None) -> Any:
    """w_k for each trajectory's group, the probability that all attempts after k fail, estimated from the group.

    ``prod_{j > k} (1 - c_j / n_j)``, which is ``n_fail / (n_k - c_k)`` where no failing trajectory was cut off; 1 for the last attempt.

    Parameters and errors as for `attempt_advantages`.

    Returns
    -------
    array or tensor (T, K)
    """
    table = attempts_of(rewards, reached, group_ids, pool_ids)
    return like(rewards, later_failures(table.rates())[table.group])


def spread_to_tokens(advantages: Any, attempt_ids: Any) -> Any:
    """Write each attempt's advantage on its tokens.

    Parameters
    ----------
    advantages : array or tensor (T, K)
    attempt_ids : int array or tensor (T, L)
        The attempt that each token belongs to, 0 to K - 1, as recorded when it was sampled; negative for prompt, feedback and padding.

    Returns
    -------
    array or tensor (T, L)
        0 where the id is negative; library, device and dtype of ``advantages``.

    Raises
    ------
    ValueError
        Shapes that do not match, ids of K or more, and tokens of an attempt that has no advantage (NaN: it was not reached).
    """
    values, ids = as_numpy(advantages), as_numpy(attempt_ids)
    if values.ndim != 2 or ids.ndim != 2 or len(values) != len(ids):
        raise ValueError(
            f"advantages (T, K) and attempt_ids (T, L) must have equal T, got shapes {values.shape} and {ids.shape}"
        )
    if ids.dtype.kind not in "iu":
        raise ValueError(f"attempt_ids must be integers, got {ids.dtype}")
    if ids.size and ids.max() >= values.shape[1]:
        raise ValueError(
            f"attempt_ids go up to {ids.max()}, but there are advantages of {values.shape[1]} attempts only"
        )
    own = ids >= 0
    spread = np.where(own, np.take_along_axis(values, np.where(own, ids, 0), axis=1) if ids.size else 0.0, 0.0)
    if np.isnan(spread).any():
        row, place = np.argwhere(np.isnan(spread))[0]
        raise ValueError(
            f"token {place} of trajectory {row} belongs to attempt {ids[row, place]}, which has no advantage (NaN: not reached)"
        )
    return like(advantages, spread)


# --- pieces --------------------------------------------------------------------------------------------------------------


def _check(method: str, lam: float, baseline: Any, scale: str | None, weights: Any, rates: RunningRates | None) -> None:
    for name, value, allowed in (("method", method, METHODS), ("scale", scale, (None, "group", "batch"))):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    if not 0 <= lam <= 1:
        raise ValueError(f"lam must be from 0 (calibrated) to 1 (the whole trajectory's outcome), got {lam}")
    if lam and method != "cal":
        raise ValueError(f"lam is the share of the rest that method='cal' leaves out; it has no meaning for {method!r}")
    for name, value, words in (("weights", weights, ("group", "ema")), ("baseline", baseline, ("loo", "mean", "ema"))):
        if isinstance(value, str):
            if value not in words:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, words))} or an array, got {value!r}")
            if value == "ema" and rates is None:
                raise ValueError(f"{name}='ema' comes from a running estimate: pass rates=RunningRates(attempts)")
    if (lam or method == "trajectory") and not (isinstance(baseline, str) and baseline in ("loo", "mean")):
        raise ValueError("the trajectory's outcome has the baselines 'loo' and 'mean' only")


def _others(table: Attempts, values: np.ndarray, baseline: str, *, first: bool = False) -> np.ndarray:
    """Mean of values (T, K) over the trajectories of the group that reached the attempt, without or with the trajectory itself."""
    total, n = table.per_group(values)[table.group], table.n[table.group]
    n = n[:, :1] if first else n
    if baseline == "mean":
        return total / np.maximum(n, 1)
    # A lone trajectory has baseline 0; advantage 0 instead would bias late attempts, which few trajectories reach.
    return np.where(n > 1, (total - values) / np.maximum(n - 1, 1), 0.0)


def _baseline(table: Attempts, baseline: Any, rates: RunningRates | None, keys: Any) -> np.ndarray:
    """p (T, K)."""
    if not isinstance(baseline, str):
        return _given("baseline", baseline, table)
    if rates is not None and baseline == "ema":
        known = _running(rates, keys, table)
        return np.where(np.isnan(known), _others(table, table.success, "loo"), known)
    return _others(table, table.success, baseline)


def _weights(table: Attempts, weights: Any, rates: RunningRates | None, keys: Any) -> np.ndarray:
    """w (T, K)."""
    if not isinstance(weights, str):
        return _given("weights", weights, table)
    p = table.rates()[table.group]
    if rates is not None and weights == "ema":
        known = _running(rates, keys, table)
        p = np.where(np.isnan(known), p, known)
    return later_failures(p)


def _given(name: str, values: Any, table: Attempts) -> np.ndarray:
    given = as_numpy(values).astype(np.float64)
    try:
        given = np.broadcast_to(given, table.shape)
    except ValueError:
        raise ValueError(f"{name} must be (K,) or (T, K), here {table.shape}, got {given.shape}") from None
    if not ((given >= 0) & (given <= 1))[table.reached].all():
        raise ValueError(f"{name} must be probabilities, from 0 to 1")
    return given


def _running(rates: RunningRates, keys: Any, table: Attempts) -> np.ndarray:
    if rates.attempts != table.shape[1]:
        raise ValueError(f"rates is for {rates.attempts} attempts, rewards has {table.shape[1]}")
    found = rates.rates([None] * table.shape[0] if keys is None else keys)
    if found.shape != table.shape:
        raise ValueError(f"keys must name the prompt of each of the {table.shape[0]} trajectories, got {len(found)}")
    return found


def _divisor(table: Attempts, scale: str) -> np.ndarray:
    """Standard deviation of R plus epsilon, (T, 1); 1 where all outcomes are equal."""
    there = table.reached[:, 0] if table.shape[1] else np.zeros(table.shape[0], dtype=bool)
    codes = table.group if scale == "group" else table.pool
    n = np.bincount(codes, weights=there)
    solved = np.bincount(codes, weights=table.solved & there)
    variance = solved * (n - solved) / np.maximum(n * (n - 1), 1)
    return np.where(variance > 0, np.sqrt(variance) + EPSILON, 1.0)[codes][:, None]


def like(example: Any, values: np.ndarray) -> Any:
    """An array of the example's library, device and floating dtype."""
    if hasattr(example, "detach"):
        import torch

        dtype = example.dtype if example.is_floating_point() else torch.float64
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64)).to(device=example.device, dtype=dtype)
    dtype = getattr(example, "dtype", None)
    return values.astype(dtype if dtype is not None and dtype.kind == "f" else np.float64)
