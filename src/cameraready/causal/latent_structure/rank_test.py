"""The rank test over domains: are two sets of variables linked through at most r dimensions, whatever changes between domains?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any, Literal

import numpy as np
from scipy.special import chdtrc

from cameraready.causal.latent_structure.domains import Domains, summarise

Method = Literal["sum", "pooled", "fisher"]
#: A domain takes part in a test if it has this many rows more than the test has columns.
SPARE_ROWS = 5
#: Largest second-order term of the chi-squared approximation; beyond it the columns are tested in blocks.
SECOND_ORDER = 0.15


@dataclass(frozen=True)
class RankResult:
    """Outcome of one test of rank <= r.

    Attributes
    ----------
    statistic, df : float, int
        Chi-squared statistic and its degrees of freedom; NaN and 0 for a trivial test or one in blocks.
    pvalue : float
    domains : int
        How many domains had enough rows to take part.
    blocks : int
        1, or the number of blocks of columns of which the smallest p-value, times their number, is given.
    """

    statistic: float
    df: int
    pvalue: float
    domains: int
    blocks: int = 1


class RankTest:
    """Likelihood-ratio test of the rank of a cross-covariance, valid when coefficients and noise differ between domains.

    In every domain the canonical correlations of two sets of columns beyond the r-th are tested for zero by Lawley's (1959)
    corrected likelihood ratio, and the statistics are added: sum over domains, chi-squared with C (p - r)(q - r) degrees of
    freedom. Pooling rows instead is wrong as soon as coefficients change: a mean of matrices of rank r has a higher rank.
    Reconstructed from the abstract of Dong et al. (2026), who show that the rank constraints of heterogeneous data are those of
    homogeneous data; how they are tested here is our own derivation.

    Use it where groups, sites or periods may differ. Not for dependent rows within a domain (thin a series first) and not with
    fewer than about 8 rows a column and domain: then the test has little power and accepts nearly everything.

    Parameters
    ----------
    X : array or data frame of shape (n, p)
        Numbers. Names of columns, where there are any, may be used in place of their indices.
    domain : array-like of shape (n,), optional
        Label of the domain of each row; one domain by default.
    time : array-like of shape (n,), optional
        Rows are cut into windows of consecutive times, which serve as domains (within `domain` where both are given).
    method : {"sum", "pooled", "fisher"}
        ``"pooled"`` centres every domain and tests the common covariance: more power if only noise variances or means change,
        wrong size otherwise. ``"fisher"`` combines the p-values of the domains.
    windows : int or "auto"
        Rows of a window of time, see `cameraready.causal.latent_structure.domains.summarise`.
    missing : {"error", "drop"}
    close_fit : float, default 0
        0 tests that the rank is exactly at most r. A positive number tests that it nearly is: that the misfit per degree of freedom
        (RMSEA; Browne and Cudeck, 1992, with 0.05 for a close and 0.08 for a fair fit) is at most this. With thousands of rows of
        questionnaire data, where small cross-loadings are everywhere, only this finds structure.

    Raises
    ------
    ValueError
        Text, infinite or missing values, constant or linearly dependent columns, labels that do not fit.
    """

    def __init__(
        self,
        X: Any,
        domain: Any = None,
        *,
        time: Any = None,
        method: Method = "sum",
        windows: int | Literal["auto"] = "auto",
        missing: Literal["error", "drop"] = "error",
        close_fit: float = 0.0,
    ) -> None:
        self._start(summarise(X, domain, time, windows, missing), method, close_fit)

    @classmethod
    def from_domains(cls, domains: Domains, method: Method = "sum", close_fit: float = 0.0) -> RankTest:
        """The test on covariances that are at hand already."""
        test = cls.__new__(cls)
        test._start(domains, method, close_fit)
        return test

    def _start(self, domains: Domains, method: Method, close_fit: float) -> None:
        if method not in ("sum", "pooled", "fisher"):
            raise ValueError(f"method must be 'sum', 'pooled' or 'fisher', got {method!r}")
        if not 0.0 <= close_fit < 1.0:
            raise ValueError(f"close_fit must be at least 0 and below 1 (0.05 is a common choice), got {close_fit!r}")
        if close_fit and method == "fisher":
            raise ValueError("close_fit needs a sum of statistics; choose method='sum' or 'pooled'")
        self.domains = domains
        self.close_fit = close_fit
        self.method = method
        self.names = domains.names
        self.n_tests = 0
        used = domains.pooled() if method == "pooled" else domains
        self._correlations, self._rows = used.correlations, used.rows
        self._place = {name: i for i, name in enumerate(self.names)}
        self._partial: dict[tuple[int, ...], np.ndarray] = {}
        self._known: dict[tuple[Any, ...], RankResult] = {}

    # --- one test -------------------------------------------------------------------------------------------------

    def result(self, a: Iterable[Any], b: Iterable[Any], r: int, given: Iterable[Any] = ()) -> RankResult:
        """Test that columns `a` and `b` have a cross-covariance of rank at most `r`, after regression on `given`.

        Columns are indices or names. Columns in both `a` and `b` are taken as given, which lowers the rank in question by their
        number. Complexity O(C (p + q)^3); results are cached, and exchanging `a` and `b` changes nothing.

        Raises
        ------
        ValueError
            Unknown columns, `r` negative or no integer, or too few rows in every domain.
        """
        left, right, fixed = self._columns(a), self._columns(b), self._columns(given)
        if isinstance(r, bool) or not isinstance(r, (int, np.integer)) or r < 0:
            raise ValueError(f"r must be an integer of at least 0, got {r!r}")
        shared = (left & right) - fixed
        r, fixed = int(r) - len(shared), fixed | shared
        left, right = left - fixed, right - fixed
        if r < 0:
            return RankResult(float("inf"), 0, 0.0, len(self._rows))
        if min(len(left), len(right)) <= r:
            return RankResult(float("nan"), 0, 1.0, len(self._rows))
        first, second = sorted((tuple(sorted(left)), tuple(sorted(right))))
        key = (first, second, r, tuple(sorted(fixed)))
        if key not in self._known:
            self.n_tests += 1
            self._known[key] = self._test(*key)
        return self._known[key]

    def pvalue(self, a: Iterable[Any], b: Iterable[Any], r: int, given: Iterable[Any] = ()) -> float:
        """P-value of `result`."""
        return self.result(a, b, r, given).pvalue

    def rank(self, a: Iterable[Any], b: Iterable[Any], alpha: float = 0.01, given: Iterable[Any] = ()) -> int:
        """The smallest rank not rejected at level `alpha`. With little data that is too small, never evidence by itself."""
        a, b, given = list(a), list(b), list(given)
        most = min(len(set(a)), len(set(b)))
        return next((r for r in range(most) if self.pvalue(a, b, r, given) > alpha), most)

    def test(self, pcols: Sequence[int], qcols: Sequence[int], r: int, alpha: float) -> bool:
        """Whether rank <= `r` is not rejected: the form in which causal-learn's RLCD asks (its ``ranktest_method``)."""
        return self.pvalue(pcols, qcols, r) > alpha

    def _columns(self, columns: Iterable[Any]) -> frozenset[int]:
        found = set()
        for column in columns:
            at = self._place.get(column) if isinstance(column, str) else column
            index = isinstance(at, (int, np.integer)) and not isinstance(at, bool)
            if not index or not -1 < int(at) < len(self.names):
                raise ValueError(
                    f"there is no column {column!r}; columns are 0 to {len(self.names) - 1}, or their names"
                )
            found.add(int(at))
        return frozenset(found)

    def _test(self, a: tuple[int, ...], b: tuple[int, ...], r: int, given: tuple[int, ...]) -> RankResult:
        blocks = self._blocks(len(a), len(b), r, len(given))
        if blocks is None:
            return self._whole([a], [*a, *b], r, given)[0]
        parts_a, parts_b = (_parts(columns, count) for columns, count in zip((a, b), blocks, strict=True))
        results = [
            self._whole([left], [*left, *right], r, given)[0]
            for left in _unions(parts_a, r + 1)
            for right in _unions(parts_b, r + 1)
        ]
        smallest = min(result.pvalue for result in results)
        return RankResult(float("nan"), 0, min(1.0, smallest * len(results)), results[0].domains, len(results))

    def _blocks(self, p: int, q: int, r: int, given: int) -> tuple[int, int] | None:
        """Into how many parts the columns of either side must be cut for the approximation to be good; None for one."""
        rows = float(np.median(self._rows)) - given
        sizes, parts = [p, q], [1, 1]

        def block(side: int) -> int:
            return _block_size(sizes[side], parts[side], r)

        while not _accurate(block(0), block(1), rows):
            longer = int(block(1) >= block(0))
            if block(longer) <= r + 1:
                break
            parts[longer] = max(parts[longer] + 1, r + 2)
        return None if parts == [1, 1] else (parts[0], parts[1])

    # --- many tests -----------------------------------------------------------------------------------------------

    def scan(
        self, universe: Sequence[int], candidates: Sequence[Sequence[int]], r: int, given: Sequence[int] = ()
    ) -> np.ndarray:
        """P-values of rank <= r for each set of columns in `candidates` against the rest of `universe`: float64 (k,).

        One inverse of the universe's correlation matrix serves all candidates: O(C m^3 + k C p^3).
        """
        pvalues = np.ones(len(candidates))
        groups: dict[int, list[int]] = {}
        m = len(universe)
        for i, columns in enumerate(candidates):
            if min(len(columns), m - len(columns)) <= r:
                continue
            if self._blocks(len(columns), m - len(columns), r, len(given)) is None:
                groups.setdefault(len(columns), []).append(i)
            else:
                pvalues[i] = self.pvalue(columns, [j for j in universe if j not in set(columns)], r, given)
        for chosen in groups.values():
            self.n_tests += len(chosen)
            results = self._whole([candidates[i] for i in chosen], universe, r, given)
            pvalues[chosen] = [result.pvalue for result in results]
        return pvalues

    def _whole(
        self, candidates: Sequence[Sequence[int]], universe: Sequence[int], r: int, given: Sequence[int]
    ) -> list[RankResult]:
        """Tests without blocks; all candidates have one number p of columns."""
        p, q = len(candidates[0]), len(universe) - len(candidates[0])
        taking_part = self._rows - len(given) >= p + q + SPARE_ROWS
        if not taking_part.any():
            raise ValueError(
                f"a test of {p} against {q} columns needs at least {p + q + SPARE_ROWS + len(given)} rows in a domain; the"
                f" largest has {int(self._rows.max())}: use fewer columns or larger domains"
            )
        matrices = self._partial_correlations(tuple(sorted(given)))[taking_part]
        place = {column: i for i, column in enumerate(universe)}
        at = np.array([[place[column] for column in columns] for columns in candidates])
        squares = canonical_squares(matrices[:, np.asarray(universe)[:, None], np.asarray(universe)], at)
        rows = self._rows[taking_part] - len(given)
        statistics, df = lawley(squares[..., : min(p, q)], rows[:, None], p, q, r)
        total = statistics.sum(axis=0)
        if self.method == "fisher":
            logs = np.log(np.maximum(chdtrc(df, statistics), 1e-300))
            total, df = -2.0 * logs.sum(axis=0), 2
        all_df = df * int(taking_part.sum())
        misfit = self.close_fit**2 * df * float((rows - 1).sum())
        pvalues = _noncentral_tail(total, all_df, misfit) if misfit else chdtrc(all_df, total)
        return [
            RankResult(float(t), all_df, float(pvalue), int(taking_part.sum()))
            for t, pvalue in zip(total, pvalues, strict=True)
        ]

    def _partial_correlations(self, given: tuple[int, ...]) -> np.ndarray:
        """Correlations after regression on the columns `given`, whose own rows are left as those of independent columns."""
        if given not in self._partial:
            found = self._correlations
            if given:
                fixed, n = list(given), len(self.names)
                rest = [i for i in range(n) if i not in given]
                cross = found[:, rest][:, :, fixed]
                inner = found[:, fixed][:, :, fixed] + 1e-12 * np.eye(len(fixed))
                left = found[:, rest][:, :, rest] - cross @ np.linalg.solve(inner, cross.transpose(0, 2, 1))
                deviations = np.sqrt(np.maximum(np.einsum("cii->ci", left), 1e-12))
                found = np.broadcast_to(np.eye(n), found.shape).copy()
                found[:, np.asarray(rest)[:, None], rest] = left / (deviations[:, :, None] * deviations[:, None, :])
            if len(self._partial) > 256:
                self._partial.clear()
            self._partial[given] = found
        return self._partial[given]


def canonical_squares(correlations: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Squared canonical correlations of sets of columns with all other columns.

    With the inverse P of the correlation matrix R, ``inv(P_AA)`` is what of A the others leave unexplained, so that the squares are
    the eigenvalues of ``I - inv(R_AA) inv(P_AA)``.

    Parameters
    ----------
    correlations : float64 array of shape (C, m, m)
    at : int array of shape (k, p)
        The columns of each set.

    Returns
    -------
    float64 array of shape (C, k, p)
        In descending order, within [0, 1); beyond the number of the other columns they are zero.
    """
    m, p = correlations.shape[-1], at.shape[1]
    regular = correlations + 1e-11 * np.eye(m)
    precision = np.linalg.inv(regular)
    rows, columns = at[:, :, None], at[:, None, :]
    factor = np.linalg.cholesky(regular[:, rows, columns])
    unexplained = np.linalg.inv(precision[:, rows, columns])
    half = np.linalg.solve(factor, unexplained)
    whitened = np.linalg.solve(factor, half.swapaxes(-1, -2))
    whitened = (whitened + whitened.swapaxes(-1, -2)) / 2
    squares = np.linalg.eigvalsh(np.eye(p) - whitened)[..., ::-1]
    return np.clip(squares, 0.0, 1.0 - 1e-13)


def lawley(squares: np.ndarray, rows: Any, p: int, q: int, r: int) -> tuple[np.ndarray, int]:
    """Lawley's (1959) corrected likelihood ratio that all canonical correlations beyond the r-th are zero.

    ``-[n - 1 - r - (p + q + 1) / 2 + sum_{i<=r} rho_i^-2] sum_{i>r} log(1 - rho_i^2)`` (Muirhead, 1982, section 11.3). Where a
    correlation before the r-th is near zero, the rank is below `r`, the test is conservative and the bracket has no meaning; it is
    kept at or below 2 (n - 1).

    Parameters
    ----------
    squares : float64 array of shape (..., min(p, q))
        Squared canonical correlations, descending.
    rows : array, broadcast against ``squares[..., 0]``
        n.

    Returns
    -------
    statistic : float64 array of shape (...)
    df : int
        (p - r)(q - r).
    """
    degrees = np.asarray(rows, dtype=float) - 1.0
    with np.errstate(divide="ignore"):
        inverse = (1.0 / squares[..., :r]).sum(axis=-1)
    factor = np.minimum(degrees - r - (p + q + 1) / 2 + inverse, 2.0 * degrees)
    return -factor * np.log1p(-squares[..., r:]).sum(axis=-1), (p - r) * (q - r)


def _noncentral_tail(x: np.ndarray, df: int, misfit: float) -> np.ndarray:
    from scipy.stats import ncx2

    return ncx2.sf(x, df, misfit)


def _accurate(p: int, q: int, rows: float) -> bool:
    """Whether the second-order term of the chi-squared approximation (Box, 1949) is small."""
    left = rows - 1 - (p + q + 1) / 2
    return left > 0 and p * q * (p * p + q * q - 5) / (48 * left * left) <= SECOND_ORDER


def _block_size(size: int, parts: int, r: int) -> int:
    """Columns of a union of r + 1 parts of which there are `parts`."""
    return size if parts == 1 else min(size, (r + 1) * -(-size // parts))


def _parts(columns: Sequence[int], count: int) -> list[tuple[int, ...]]:
    return [tuple(part.tolist()) for part in np.array_split(np.asarray(columns), min(count, len(columns)))]


def _unions(parts: Sequence[tuple[int, ...]], count: int) -> list[list[int]]:
    """All unions of `count` parts: r + 1 columns of full rank lie in at least one of them."""
    if len(parts) <= count or comb(len(parts), count) == 0:
        return [[column for part in parts for column in part]]
    return [[column for part in chosen for column in part] for chosen in combinations(parts, count)]
