"""The compiled steps of the sampler."""

from __future__ import annotations

import numba
import numpy as np

from cameraready.stats.bpop.inference.likelihood import log_likelihood, step_weights
from cameraready.stats.bpop.inference.sampler import (
    BETA,
    BETA_STEP,
    DIMENSION,
    ENTRY,
    EPS,
    EPS_STEP,
    EXCHANGE,
    MAX_BETA,
    MAX_RHO,
    RHO,
    RHO_STEP,
    ROW,
    SMALL_STEP,
)


@numba.njit(cache=True, nogil=True)
def _row_log_density(row: np.ndarray, k: int, rho: float) -> float:
    """Log-density of the first k entries of `row` under N(0, (1 - rho) I + rho 11'), less k/2 log 2 pi."""
    total, squares = 0.0, 0.0
    for j in range(k):
        total += row[j]
        squares += row[j] * row[j]
    spread = 1.0 - rho + rho * k
    quadratic = (squares - rho / spread * total * total) / (1.0 - rho)
    return -0.5 * (quadratic + (k - 1) * np.log(1.0 - rho) + np.log(spread))


@numba.njit(cache=True, nogil=True)
def _relate(latent: np.ndarray, k: int, i: int, after: np.ndarray, before: np.ndarray) -> bool:
    """Write row i's relations into both masks; whether any changed. O(n k)."""
    changed = False
    word, bit = i >> 6, np.uint64(1) << np.uint64(i & 63)
    for j in range(latent.shape[0]):
        if j == i:
            continue
        first, last = True, True
        for c in range(k):
            first = first and latent[i, c] > latent[j, c]
            last = last and latent[i, c] < latent[j, c]
        mine, its = np.uint64(1) << np.uint64(j & 63), j >> 6
        if ((after[i, its] & mine) != 0) != first:
            changed = True
            after[i, its] ^= mine
            before[j, word] ^= bit
        if ((before[i, its] & mine) != 0) != last:
            changed = True
            before[i, its] ^= mine
            after[j, word] ^= bit
    return changed


@numba.njit(cache=True, nogil=True)
def _redraw_entry(row: np.ndarray, k: int, c: int, rho: float, z: float) -> None:
    """Draw entry c of `row` from its conditional given the others, z being normal."""
    others = 0.0
    for d in range(k):
        if d != c:
            others += row[d]
    spread = 1.0 + (k - 2) * rho
    variance = (1.0 - rho) * (1.0 + (k - 1) * rho) / spread
    row[c] = rho / spread * others + np.sqrt(variance) * z


@numba.njit(cache=True, nogil=True)
def _rescale(latent: np.ndarray, k: int, of_means: float, of_deviations: float) -> None:
    """Multiply every row's mean over the first k entries, and the deviations from it, by a factor each."""
    for i in range(latent.shape[0]):
        mean = 0.0
        for d in range(k):
            mean += latent[i, d] / k
        for d in range(k):
            latent[i, d] = of_means * mean + of_deviations * (latent[i, d] - mean)


@numba.njit(cache=True, nogil=True)
def _move_rows(latent: np.ndarray, k: int, rho: float, move: int, i: int, j: int, u: np.ndarray, z: np.ndarray) -> bool:
    """Propose new values for row i, or rows i and j, in place; whether the prior has to be compared."""
    c = min(int(u[4] * k), k - 1)
    if move == ROW:
        step = SMALL_STEP ** u[3]
        own, shared = step * np.sqrt(1.0 - rho), step * np.sqrt(rho) * z[latent.shape[1]]
        for d in range(k):
            latent[i, d] += own * z[d] + shared
        return True
    if move == ENTRY:
        if u[3] < 0.5:
            _redraw_entry(latent[i], k, c, rho, z[0])
            return False
        latent[i, c] += SMALL_STEP ** u[5] * z[0]
        return True
    first, last = (0, k) if u[5] < 0.5 else (c, c + 1)  # whole rows, which the prior does not notice, or one entry
    for d in range(first, last):
        latent[i, d], latent[j, d] = latent[j, d], latent[i, d]
    return u[5] >= 0.5


@numba.njit(cache=True, nogil=True)
def _move_dimension(
    latent: np.ndarray, k: int, rho: float, log_dimension: np.ndarray, u: np.ndarray, z: np.ndarray
) -> tuple[int, float]:
    """Propose one dimension more or less, in place; the new number and the log-ratio of everything but the likelihood.

    A new column is drawn from its conditional given the others and inserted at a uniform place; a uniform column is
    deleted: what is proposed cancels against the prior of the rows.
    """
    n, largest = latent.shape
    up = k == 1 or (k < largest and u[2] < 0.5)
    forth = 1.0 if k == 1 or k == largest else 0.5
    proposed = k + 1 if up else k - 1
    back = 1.0 if proposed == 1 or proposed == largest else 0.5
    c = min(int(u[3] * (k + 1)), k) if up else min(int(u[3] * k), k - 1)
    for i in range(n):
        if up:
            for d in range(k, c, -1):
                latent[i, d] = latent[i, d - 1]
            _redraw_entry(latent[i], k + 1, c, rho, z[i])
        else:
            for d in range(c, k - 1):
                latent[i, d] = latent[i, d + 1]
    return proposed, log_dimension[proposed] - log_dimension[k] + np.log(back / forth)


@numba.njit(cache=True, nogil=True)
def run_chain(
    steps: np.ndarray,
    start: np.ndarray,
    choice: np.ndarray,
    count: np.ndarray,
    latent: np.ndarray,
    dimension: np.ndarray,
    scalars: np.ndarray,
    after: np.ndarray,
    before: np.ndarray,
    counts: np.ndarray,
    uniforms: np.ndarray,
    normals: np.ndarray,
    cumulative: np.ndarray,
    log_dimension: np.ndarray,
    constants: np.ndarray,
    n_before: int,
    thin: int,
    orders: np.ndarray,
    kept_scalars: np.ndarray,
) -> None:
    """Make as many steps as `uniforms` (n_steps, 6) and `normals` has rows; see `sampler.advance`.

    Every move writes its proposal over the state, of which a copy is kept; one piece of code then compares the two, and
    puts back what was rejected.
    """
    n = latent.shape[0]
    rho_shape, beta_shape, beta_rate, eps_a, eps_b = constants
    k = dimension[0]
    rho, beta, eps, current = scalars
    old, touched = latent.copy(), np.empty(n, dtype=np.int64)
    new_after, new_before = after.copy(), before.copy()
    weight, new_weight, by_trace = np.empty(n + 1), np.empty(n + 1), np.empty(count.size)
    step_weights(beta, weight)
    new_weight[:] = weight
    for t in range(uniforms.shape[0]):
        u, z = uniforms[t], normals[t]
        move = 0
        while u[0] >= cumulative[move]:
            move += 1
        counts[move, 0] += 1
        log_u, ratio, possible, with_prior = np.log(max(u[1], 1e-300)), 0.0, True, False
        new_k, new_rho, new_beta, new_eps = k, rho, beta, eps
        n_touched = n
        if move > EXCHANGE:
            for i in range(n):
                touched[i] = i
        if move <= EXCHANGE:
            i = min(int(u[2] * n), n - 1)
            j, n_touched = i, 1
            if move == EXCHANGE:
                j, n_touched = min(int(u[3] * (n - 1)), n - 2), 2
                j += j >= i
            touched[n_touched - 1] = j
            touched[0] = i
            with_prior = _move_rows(latent, k, rho, move, i, j, u, z)
        elif move == RHO:
            factor = RHO_STEP + (1.0 / RHO_STEP - RHO_STEP) * u[2]
            new_rho = 1.0 - (1.0 - rho) * factor
            possible = 0.0 <= new_rho <= MAX_RHO
            with_prior = u[3] < 0.5
            ratio = (rho_shape - 2.0) * np.log(factor)
            if (
                possible and not with_prior
            ):  # the rows' standardised means and deviations stay, and with them their prior
                _rescale(latent, k, np.sqrt((1.0 + (k - 1) * new_rho) / (1.0 + (k - 1) * rho)), np.sqrt(factor))
        elif move == BETA:
            new_beta = beta * np.exp(BETA_STEP * z[0])
            possible = new_beta <= MAX_BETA
            ratio = beta_shape * np.log(new_beta / beta) - beta_rate * (new_beta - beta)
        elif move == EPS:
            new_eps = 1.0 / (1.0 + (1.0 - eps) / eps * np.exp(-EPS_STEP * z[0]))
            ratio = eps_a * np.log(new_eps / eps) + eps_b * np.log((1.0 - new_eps) / (1.0 - eps))
        elif move == DIMENSION:
            new_k, ratio = _move_dimension(latent, k, rho, log_dimension, u, z)
        accepted, value, changed = False, current, False
        if possible:
            if move not in (BETA, EPS):
                for a in range(n_touched):
                    r = touched[a]
                    if with_prior:
                        ratio += _row_log_density(latent[r], k, new_rho) - _row_log_density(old[r], k, rho)
                    changed = _relate(latent, new_k, r, new_after, new_before) or changed
            elif move == BETA:
                step_weights(new_beta, new_weight)
            if changed or move in (BETA, EPS):
                floor = current + log_u - ratio
                value = log_likelihood(
                    steps, start, choice, count, new_after, new_before, new_weight, new_eps, floor, by_trace
                )
                accepted = value > floor
            else:
                accepted = log_u < ratio
        if accepted:
            k, rho, beta, eps, current = new_k, new_rho, new_beta, new_eps, value
            weight[:] = new_weight
            counts[move, 1] += 1
        else:
            new_weight[:] = weight
        for a in range(n_touched):
            r = touched[a]
            if accepted:
                old[r] = latent[r]
            else:
                latent[r] = old[r]
        if changed:
            if accepted:
                after[:], before[:] = new_after, new_before
            else:
                new_after[:], new_before[:] = after, before
        done = n_before + t + 1
        if done % thin == 0 and done // thin <= orders.shape[0]:
            orders[done // thin - 1] = after
            keep = kept_scalars[done // thin - 1]
            keep[0], keep[1], keep[2], keep[3], keep[4] = k, rho, beta, eps, current
    dimension[0] = k
    scalars[0], scalars[1], scalars[2], scalars[3] = rho, beta, eps, current
