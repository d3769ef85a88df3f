"""The compiled step of ATC: take a sample in, look at the splits of the segment, restart on an alarm.

State lies in four plain arrays, which `advance` changes in place, so that it can be pickled, copied and written out:

- ``counts`` int64 (N_COUNTS,): see the indices below.
- ``floats`` float64 (N_FLOATS, n_streams): rows below; of STATISTIC and THRESHOLD only the first entry counts.
- ``marks`` float64 (2, capacity, 2 + n_streams): splits that may still be the best. A mark is the number of samples before
  the split (BEFORE), the position in the stream of the first one after it (AFTER), both exact up to 2^53, and the sum of the
  samples before it, less ORIGIN each.
- ``window`` float64 (2, n_streams, WINDOW): absolute differences of the last samples in order of arrival, and ranked.
"""

from __future__ import annotations

import math

import numba
import numpy as np

#: Indices of ``counts``.
SEEN, USED, START, START_POSITION, LENGTH, N_FIRST, N_SECOND, ALARM, CHANGE, N_DIFFERENCES, N_ALARMS, EVALUATED = range(
    12
)
N_COUNTS = 12
#: Rows of ``floats``.
ORIGIN, TOTAL, PREVIOUS, SIGMA, INPUT, STATISTIC, THRESHOLD = range(7)
N_FLOATS = 7
#: Columns of ``marks`` before its sums.
BEFORE, AFTER, SUMS = range(3)
#: Kinds of scan.
HULL, EVERY, GEOMETRIC = range(3)
#: Differences that an estimated standard deviation looks back on.
WINDOW = 512
#: What one difference is worth in degrees of freedom of a standard deviation estimated from their median: 1 / (2 n v), v
#: the relative variance of the estimate for normal noise (simulated; 0.30 to 0.33 for n = 30 to 512).
EFFICIENCY = 0.31
#: Splits per octave of age that the geometric scan keeps, at least.
RESOLUTION = 2
#: Smaller standard deviations count as 0, so that nothing overflows but into an alarm.
SMALLEST = 1e-100
#: Room for marks that the geometric scan never exceeds: three an octave, 63 octaves.
GEOMETRIC_CAPACITY = 256


@numba.njit(cache=True, nogil=True)
def anytime_threshold(length: int, restart: int, alpha: float, n_streams: int) -> float:
    """The threshold of Gafni et al., 2026, arXiv:2602.11406, for a segment of `length` samples from time `restart` (from 1).

    For one stream ``sqrt(6 log L + 2 log(1/alpha_r) + 2 log(pi^2/3))`` with ``alpha_r = 6 alpha / (pi^2 r^2)``. For several
    the tail bound of a sub-Gaussian vector's norm (Hsu, Kakade and Zhang, 2012, Electron. Commun. Probab. 17, Theorem 2.1)
    with the same error probability.
    """
    spent = math.log(math.pi**2 * restart * restart / (6.0 * alpha))
    if n_streams == 1:
        return math.sqrt(6.0 * math.log(length) + 2.0 * spent + 2.0 * math.log(math.pi**2 / 3.0))
    x = 3.0 * math.log(length) + spent + math.log(math.pi**2 / 6.0)
    return math.sqrt(n_streams + 2.0 * math.sqrt(n_streams * x) + 2.0 * x)


@numba.njit(cache=True, nogil=True)
def students(threshold: float, n_differences: int) -> float:
    """`threshold` for a statistic divided by a standard deviation that was estimated from `n_differences` differences.

    Wallace's approximation of Student's t by a normal variable (1959, Ann. Math. Statist. 30), with the degrees of freedom of
    the median.
    """
    freedom = EFFICIENCY * n_differences
    exponent = threshold * threshold / freedom
    return math.sqrt(freedom * math.expm1(exponent)) if exponent < 500.0 else math.inf


@numba.njit(cache=True, nogil=True)
def insert_difference(window: np.ndarray, stream: int, n: int, difference: float) -> None:
    """Put the n-th absolute difference (from 0) of a stream into its window, in place of the oldest once it is full."""
    arrivals, ranked = window[0, stream], window[1, stream]
    slot = n % WINDOW
    held = min(n, WINDOW)
    if n >= WINDOW:
        at = np.searchsorted(ranked[:held], arrivals[slot])
        for i in range(at, held - 1):
            ranked[i] = ranked[i + 1]
        held -= 1
    at = np.searchsorted(ranked[:held], difference)
    for i in range(held, at, -1):
        ranked[i] = ranked[i - 1]
    ranked[at] = difference
    arrivals[slot] = difference


@numba.njit(cache=True, nogil=True)
def spread(window: np.ndarray, stream: int, n: int) -> float:
    """Standard deviation of the noise from `n` differences: their median; their root mean square where the median is 0."""
    held = min(n, WINDOW)
    ranked = window[1, stream]
    half = held // 2
    median = ranked[half] if held % 2 else 0.5 * (ranked[half - 1] + ranked[half])
    if median > 0.0:
        return median / (0.6744897501960817 * math.sqrt(2.0))
    largest = ranked[held - 1]
    if largest == 0.0:
        return 0.0
    total = 0.0
    for i in range(held):
        total += (ranked[i] / largest) ** 2
    return largest * math.sqrt(total / (2.0 * held))


@numba.njit(cache=True, nogil=True)
def push_hull(counts: np.ndarray, floats: np.ndarray, marks: np.ndarray) -> None:
    """Add the point (L, S_L) to both hulls of the points (j, S_j): row 0 holds the upper one, row 1 the lower one.

    The splits with a statistic of at least c > 0 lie above (below) a concave (convex) curve through the origin, so that
    where any point does, a vertex of the upper (lower) hull does: the best split is a vertex.
    """
    length, total = float(counts[LENGTH]), floats[TOTAL, 0]
    for row in range(2):
        sign = 1.0 if row == 0 else -1.0
        size = counts[N_FIRST + row]
        while size > 0:
            # The start (0, 0) is a vertex without a mark.
            before_j = marks[row, size - 2, BEFORE] if size > 1 else 0.0
            before_s = marks[row, size - 2, SUMS] if size > 1 else 0.0
            last_j, last_s = marks[row, size - 1, BEFORE], marks[row, size - 1, SUMS]
            if sign * (last_s - before_s) * (length - last_j) > sign * (total - last_s) * (last_j - before_j):
                break
            size -= 1
        put_mark(counts, floats, marks, row, size)


@numba.njit(cache=True, nogil=True)
def put_mark(counts: np.ndarray, floats: np.ndarray, marks: np.ndarray, row: int, size: int) -> None:
    """Write the split after all samples so far as the last of `size` + 1 marks of a row."""
    marks[row, size, BEFORE], marks[row, size, AFTER] = counts[LENGTH], counts[SEEN]
    for c in range(floats.shape[1]):
        marks[row, size, SUMS + c] = floats[TOTAL, c]
    counts[N_FIRST + row] = size + 1


@numba.njit(cache=True, nogil=True)
def thin(counts: np.ndarray, marks: np.ndarray) -> None:
    """Keep splits at 1, 2, 4 ... samples from the start, and of those of age a the multiples of a power of two near a / 3.

    The spacing doubles with the age, so that what is kept later was kept before.
    """
    length, kept = counts[LENGTH], 0
    for i in range(counts[N_FIRST]):
        j = int(marks[0, i, BEFORE])
        spacing = 1
        while spacing * 2 * RESOLUTION <= length - j:
            spacing *= 2
        if j & (j - 1) == 0 or j % spacing == 0:
            if kept != i:
                marks[0, kept] = marks[0, i]
            kept += 1
    counts[N_FIRST] = kept


@numba.njit(cache=True, nogil=True)
def best_split(counts: np.ndarray, floats: np.ndarray, marks: np.ndarray, rows: int) -> tuple[float, int]:
    """The largest statistic over the marks, and the position after its split (-1 where there is none).

    With j of L samples before the split and sum S_j, it is the norm of (S_j - j/L S_L) / sigma over sqrt(j (L - j) / L).
    """
    length, n_streams = float(counts[LENGTH]), floats.shape[1]
    best, change, evaluated = 0.0, -1, 0
    one = n_streams == 1
    scale = inverse(floats[SIGMA, 0])
    slope = floats[TOTAL, 0] / length * scale
    for row in range(rows):
        for i in range(counts[N_FIRST + row]):
            before = marks[row, i, BEFORE]
            if one:
                value = marks[row, i, SUMS] * scale - before * slope
                value *= value
            else:
                value = squared_norm(floats, marks[row, i], before / length)
            value /= before * (length - before)
            if value > best:
                best, change = value, int(marks[row, i, AFTER])
        evaluated += counts[N_FIRST + row]
    counts[EVALUATED] = evaluated
    return math.sqrt(best * length), change


@numba.njit(cache=True, nogil=True)
def inverse(sigma: float) -> float:
    """1 / sigma; 0 for a stream that has not varied yet, which then has no say."""
    return 1.0 / sigma if sigma >= SMALLEST else 0.0


@numba.njit(cache=True, nogil=True)
def squared_norm(floats: np.ndarray, mark: np.ndarray, share: float) -> float:
    total = 0.0
    for c in range(floats.shape[1]):
        value = (mark[SUMS + c] - share * floats[TOTAL, c]) * inverse(floats[SIGMA, c])
        total += value * value
    return total


@numba.njit(cache=True, nogil=True)
def restart(counts: np.ndarray, floats: np.ndarray) -> None:
    """Begin a segment with the sample in INPUT, the last one that was taken in."""
    counts[START], counts[START_POSITION] = counts[USED] - 1, counts[SEEN] - 1
    counts[LENGTH] = 1
    counts[N_FIRST] = counts[N_SECOND] = 0
    floats[ORIGIN] = floats[INPUT]
    floats[TOTAL] = 0.0


@numba.njit(cache=True, nogil=True)
def take_in(
    scan: int, estimated: bool, counts: np.ndarray, floats: np.ndarray, marks: np.ndarray, window: np.ndarray
) -> None:
    """Add the sample in INPUT to the segment, after a mark at the split before it; update the standard deviation."""
    if counts[LENGTH] > 0:
        if scan == HULL:
            push_hull(counts, floats, marks)
        else:
            put_mark(counts, floats, marks, 0, counts[N_FIRST])
    if estimated and counts[USED] > 0:
        n = counts[N_DIFFERENCES]
        for c in range(floats.shape[1]):
            insert_difference(window, c, n, abs(floats[INPUT, c] - floats[PREVIOUS, c]))
            floats[SIGMA, c] = spread(window, c, n + 1)
        counts[N_DIFFERENCES] = n + 1
    counts[SEEN] += 1
    counts[USED] += 1
    floats[PREVIOUS] = floats[INPUT]
    if counts[LENGTH] == 0:
        restart(counts, floats)
        return
    floats[TOTAL] += floats[INPUT] - floats[ORIGIN]
    counts[LENGTH] += 1
    if scan == GEOMETRIC:
        thin(counts, marks)


@numba.njit(cache=True, nogil=True)
def step(
    scan: int,
    alpha: float,
    constant: float,
    warmup: int,
    counts: np.ndarray,
    floats: np.ndarray,
    marks: np.ndarray,
    window: np.ndarray,
) -> bool:
    """Take in the sample in INPUT; False, with nothing done, where ``marks`` has no room for it.

    `constant` is a fixed threshold, or NaN for the anytime one; `warmup` is 0 where sigma is known.
    """
    if max(counts[N_FIRST], counts[N_SECOND]) >= marks.shape[1]:
        return False
    n_streams = floats.shape[1]
    counts[ALARM] = 0
    for c in range(n_streams):
        if math.isnan(floats[INPUT, c]):
            counts[SEEN] += 1
            floats[STATISTIC, 0] = floats[THRESHOLD, 0] = math.nan
            return True
    take_in(scan, warmup > 0, counts, floats, marks, window)
    best, change = best_split(counts, floats, marks, 2 if scan == HULL else 1)
    limit = constant
    if math.isnan(constant):
        limit = anytime_threshold(counts[LENGTH], counts[START] + 1, alpha, n_streams)
        if warmup > 0:
            limit = students(limit, min(max(counts[N_DIFFERENCES], 1), WINDOW))
    if counts[N_DIFFERENCES] < warmup:
        limit = math.inf
    floats[STATISTIC, 0], floats[THRESHOLD, 0] = best, limit
    if best > 0.0 and best >= limit:
        counts[ALARM] = 1
        counts[N_ALARMS] += 1
        counts[CHANGE] = change
        restart(counts, floats)
    return True


@numba.njit(cache=True, nogil=True)
def advance_one(
    x: float,
    scan: int,
    alpha: float,
    constant: float,
    warmup: int,
    counts: np.ndarray,
    floats: np.ndarray,
    marks: np.ndarray,
    window: np.ndarray,
) -> bool:
    """`step` with the sample `x` of a single stream."""
    floats[INPUT, 0] = x
    return step(scan, alpha, constant, warmup, counts, floats, marks, window)


@numba.njit(cache=True, nogil=True)
def advance(
    values: np.ndarray,
    scan: int,
    alpha: float,
    constant: float,
    warmup: int,
    counts: np.ndarray,
    floats: np.ndarray,
    marks: np.ndarray,
    window: np.ndarray,
    means: np.ndarray,
    record: np.ndarray,
    changes: np.ndarray,
) -> int:
    """Take in `values` (n, n_streams), NaN in a row for a missing sample; returns how many were taken in.

    It stops early where ``marks`` has no room. ``means`` (n, n_streams), ``record`` (n, 2) and ``changes`` (n,) get the mean
    before each sample, statistic and threshold after it, and -1 or the position of the change behind an alarm; with no rows
    they are left alone.
    """
    n_streams = values.shape[1]
    for i in range(len(values)):
        if len(means) > 0:
            length = counts[LENGTH]
            for c in range(n_streams):
                means[i, c] = floats[ORIGIN, c] + floats[TOTAL, c] / length if length else math.nan
        for c in range(n_streams):
            floats[INPUT, c] = values[i, c]
        if not step(scan, alpha, constant, warmup, counts, floats, marks, window):
            return i
        if len(means) > 0:
            record[i, 0], record[i, 1] = floats[STATISTIC, 0], floats[THRESHOLD, 0]
            changes[i] = counts[CHANGE] if counts[ALARM] else -1
    return len(values)
