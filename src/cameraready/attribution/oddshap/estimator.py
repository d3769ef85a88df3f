"""OddSHAP: Shapley values from paired samples, regressing the odd part of a game on few, well-chosen parities."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload

import numpy as np

from cameraready.attribution._game import Game, checked_values, shapley_of_all
from cameraready.attribution.oddshap.regression import parities, regress
from cameraready.attribution.oddshap.sampling import CoalitionSequence
from cameraready.attribution.oddshap.spectrum import largest_terms, shapley_values
from cameraready.attribution.oddshap.surrogate import fit_surrogate

LowBudget = Literal["tree", "kernel", "raise"]


class LowBudgetWarning(UserWarning):
    """The budget is below eta evaluations per player, and another estimator than OddSHAP's regression answered."""


@dataclass(frozen=True)
class ShapleyEstimate:
    """Estimated Shapley values of one game.

    Attributes
    ----------
    values : float array (n_players,)
        Attributions. They sum to v(all) - v(none).
    baseline : float
        v(none).
    standard_errors : float array (n_players,)
        Sampling errors; zero where every coalition was evaluated, NaN where the method has none (``"tree"``, or fewer
        rows than terms).
    budget : int
        Evaluations asked for.
    n_evaluations : int
        Evaluations this estimate rests on, at most 2^n_players.
    method : {"odd", "exact", "tree", "kernel"}
        OddSHAP's regression, full enumeration, or the estimator that stood in at a low budget.
    members : bool array (n_terms, n_players)
        Sets T of the fitted function sum of beta_T (-1)^|S n T|.
    coefficients : float array (n_terms,)
        Their beta_T.
    """

    values: np.ndarray
    baseline: float
    standard_errors: np.ndarray
    budget: int
    n_evaluations: int
    method: Literal["odd", "exact", "tree", "kernel"]
    members: np.ndarray = field(repr=False)
    coefficients: np.ndarray = field(repr=False)

    @property
    def low_budget(self) -> bool:
        """Whether another estimator stood in because the budget was below eta evaluations per player."""
        return self.method in ("tree", "kernel")

    @property
    def terms(self) -> list[tuple[int, ...]]:
        """The sets of the fitted function, as tuples of players."""
        return [tuple(np.flatnonzero(row).tolist()) for row in self.members]

    def predict(self, coalitions: np.ndarray) -> np.ndarray:
        """The fitted function (m,) at a bool array (m, n_players); its exact Shapley values are `values`.

        After ``"exact"`` and ``"tree"`` it is the additive function with these values.
        """
        return self.coefficients @ parities(self.members, np.asarray(coalitions, dtype=bool))

    def to_shapiq(self) -> Any:
        """The same values as `shapiq.InteractionValues` of index ``"SV"`` (needs shapiq)."""
        try:
            from shapiq import InteractionValues
        except ImportError as error:
            raise ImportError("to_shapiq() needs shapiq (Python 3.12 or later): pip install shapiq") from error
        n = len(self.values)
        return InteractionValues(
            values=np.concatenate([[self.baseline], self.values]),
            index="SV",
            min_order=0,
            max_order=1,
            n_players=n,
            interaction_lookup={(): 0, **{(player,): player + 1 for player in range(n)}},
            baseline_value=self.baseline,
            estimated=self.method != "exact",
            estimation_budget=self.budget,
        )


@dataclass(frozen=True)
class OddShap:
    """Shapley values of any set function from a budget of evaluations (Fumagalli et al., 2026, arXiv:2602.01399, Alg. 1).

    Shapley values depend only on a game's odd part v_odd(S) = (v(S) - v(S^c)) / 2. OddSHAP evaluates coalitions in pairs
    (S, S^c), lets boosted trees propose which odd sets of players interact, and fits v_odd by Shapley-weighted least
    squares on the parities of these sets and of all single players.

    Use it when evaluations are what costs, features interact, and you can afford `eta` evaluations or more for each of
    10 to some hundred players. Do not use it for a tree ensemble (TreeSHAP is exact and cheaper).

    Parameters
    ----------
    n_players : int
        Number of players (features), at least 1.
    eta : int
        Evaluations per regression term; the paper's 10. Fewer gives more terms and more variance.
    surrogate : {"boosting", "lightgbm"} or estimator
        What proposes interactions: trees as LightGBM grows them at depth 10, compiled for this case (the first call
        compiles for a few seconds, once per installation); LightGBM itself; or any regressor made of trees that
        `cameraready.attribution.oddshap.surrogate.read_forest` can read.
    max_terms : int, optional
        Most interactions; the paper's ceil(budget / eta) - n_players if None. The cost of the solve is cubic in it; 0 leaves
        paired KernelSHAP.
    low_budget : {"tree", "kernel", "raise"}
        What answers below `eta` evaluations per player: the Shapley values of the surrogate (the paper's choice; the gap to
        v(all) - v(none) is shared equally), regression without interactions, or a ValueError. The first two warn with
        `LowBudgetWarning` and say so in the result. On the tables we tried ``"kernel"`` was the more accurate from three
        evaluations per player on, and it has standard errors.
    seed : int, numpy.random.Generator or None
        Source of randomness. With an int, every call draws the same coalitions.
    paired : bool
        False draws coalitions singly (for ablations).
    terms : {"odd", "all"}
        ``"all"`` keeps sets of even size too (for ablations).

    Notes
    -----
    Differences from the paper's published implementation: coalitions of a size are drawn without replacement and sizes in
    shuffled rounds, so that none is evaluated twice and every prefix of the sequence is a sample. With an odd budget the last coalition
    informs the trees but not the regression, to which its even part would be noise.

    m evaluations take O(m n) for sampling, O(m n) for each of 100 trees and O(m K^2) for the solve with K = m / eta terms.

    Examples
    --------
    >>> import numpy as np
    >>> game = lambda coalitions: coalitions @ np.arange(6.0) + 3.0 * coalitions[:, :3].all(axis=1)
    >>> OddShap(6, seed=0).approximate(64, game).values.round(6)
    array([1., 2., 3., 3., 4., 5.])
    """

    n_players: int
    eta: int = field(default=10, kw_only=True)
    surrogate: Any = field(default="boosting", kw_only=True)
    max_terms: int | None = field(default=None, kw_only=True)
    low_budget: LowBudget = field(default="tree", kw_only=True)
    seed: int | np.random.Generator | None = field(default=None, kw_only=True)
    paired: bool = field(default=True, kw_only=True)
    terms: Literal["odd", "all"] = field(default="odd", kw_only=True)

    def __post_init__(self) -> None:
        for name, lowest in (("n_players", 1), ("eta", 1), ("max_terms", 0)):
            value = getattr(self, name)
            if value is None and name == "max_terms":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < lowest:
                raise ValueError(f"{name} must be an integer of at least {lowest}, got {value!r}")
        for name, known in (("low_budget", ("tree", "kernel", "raise")), ("terms", ("odd", "all"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")
        if isinstance(self.surrogate, str) and self.surrogate not in ("boosting", "lightgbm"):
            raise ValueError(
                f"surrogate must be 'boosting', 'lightgbm' or a regressor made of trees, got {self.surrogate!r}"
            )
        if not isinstance(self.surrogate, str) and not hasattr(self.surrogate, "fit"):
            raise TypeError(f"surrogate must have a fit method, got {type(self.surrogate).__name__}")

    @overload
    def approximate(self, budget: int, game: Game) -> ShapleyEstimate: ...
    @overload
    def approximate(self, budget: Sequence[int], game: Game) -> list[ShapleyEstimate]: ...
    def approximate(self, budget: int | Sequence[int], game: Game) -> ShapleyEstimate | list[ShapleyEstimate]:
        """Shapley values of `game` from at most `budget` evaluations.

        Parameters
        ----------
        budget : int or sequence of int
            Evaluations, at least 2 (the empty and the full coalition are always among them); 2^n_players or more
            evaluates every coalition, and the values are exact. Several budgets share one set of evaluations, as many as the
            largest; each estimate is the one that its budget alone would give.
        game : callable
            bool array (m, n_players) -> numbers (m,), one for each coalition.

        Returns
        -------
        ShapleyEstimate, or a list of them in the order of the budgets.

        Raises
        ------
        ValueError
            If a budget is below 2, or below eta * n_players with ``low_budget="raise"``; if the game returns NaN or infinite
            values or a wrong number of them.
        TypeError
            If the game returns something other than numbers.
        """
        several = not isinstance(budget, (int, np.integer))
        budgets = [_checked_budget(b) for b in (budget if several else [budget])]
        if not budgets:
            raise ValueError("the sequence of budgets is empty")
        for b in budgets:
            self._check_low(b)
        approximation = self.begin(game)
        approximation.evaluate(max(budgets))
        estimates = [approximation.silent_estimate(b) for b in budgets]
        for estimate in estimates:
            self._warn_if_low(estimate, stacklevel=3)
        return estimates if several else estimates[0]

    def begin(self, game: Game) -> Approximation:
        """An approximation of `game` whose budget can be raised step by step without losing evaluations."""
        return Approximation(self, game)

    def _is_low(self, budget: int) -> bool:
        return budget < min(self.eta * self.n_players, 2**self.n_players)

    def _warn_if_low(self, estimate: ShapleyEstimate, stacklevel: int) -> None:
        if estimate.low_budget:
            answered = "the tree surrogate" if estimate.method == "tree" else "a regression without interactions"
            warnings.warn(
                f"a budget of {estimate.budget} is below eta * n_players = {self.eta * self.n_players}: these are the values "
                f"of {answered}, not of OddSHAP's regression",
                LowBudgetWarning,
                stacklevel=stacklevel,
            )

    def _check_low(self, budget: int) -> None:
        if self.low_budget == "raise" and self._is_low(budget):
            raise ValueError(
                f"a budget of {budget} is below eta * n_players = {self.eta * self.n_players}; raise the budget, or choose "
                "low_budget='tree' or 'kernel'"
            )


class Approximation:
    """Evaluations of one game along a fixed sequence of coalitions, and the estimates that they give.

    Made by `OddShap.begin`. Estimates at any budget reuse what has been evaluated.
    """

    def __init__(self, settings: OddShap, game: Game) -> None:
        self._settings = settings
        self._game = game
        generator = np.random.default_rng(settings.seed)
        self._surrogate_seed = int(generator.integers(2**31))
        self._sequence = CoalitionSequence(settings.n_players, paired=settings.paired, generator=generator)
        self._values = np.zeros(0)

    @property
    def n_evaluations(self) -> int:
        """Coalitions evaluated so far."""
        return len(self._values)

    def evaluate(self, budget: int) -> None:
        """Evaluate the game until `budget` coalitions (at most all 2^n_players) are known."""
        budget = min(_checked_budget(budget), 2**self._settings.n_players)
        if budget > len(self._values):
            coalitions = self._sequence.coalitions(len(self._values), budget)
            found = checked_values(self._game(coalitions), len(coalitions))
            self._values = np.concatenate([self._values, found])

    def estimate(self, budget: int) -> ShapleyEstimate:
        """The estimate from the first `budget` evaluations, which are made if they have not been."""
        estimate = self.silent_estimate(budget)
        self._settings._warn_if_low(estimate, stacklevel=3)
        return estimate

    def silent_estimate(self, budget: int) -> ShapleyEstimate:
        """`estimate` without the warning, for callers that announce a low budget themselves."""
        settings, n = self._settings, self._settings.n_players
        settings._check_low(budget)
        self.evaluate(budget)
        used = min(budget, 2**n)
        # In units near the largest difference, so that squares neither vanish nor overflow; powers of two are exact.
        exponent = _exponent(self._values[:used])
        estimate = self._solve(budget, np.ldexp(self._values[:used], -exponent))
        return replace(
            estimate,
            values=np.ldexp(estimate.values, exponent),
            baseline=float(self._values[0]),
            standard_errors=np.ldexp(estimate.standard_errors, exponent),
            coefficients=np.ldexp(estimate.coefficients, exponent),
        )

    def _solve(self, budget: int, values: np.ndarray) -> ShapleyEstimate:
        settings, n = self._settings, self._settings.n_players
        if len(values) == 2**n:
            exact = shapley_of_all(self._sequence.coalitions(0, len(values)), values)
            return self._additive(exact, np.zeros(n), budget, values, "exact")
        if settings._is_low(budget):
            if settings.low_budget == "tree":
                return self._from_trees(budget, values)
            return self._regression(budget, values, 0, "kernel")
        n_terms = math.ceil(budget / settings.eta) - n
        if settings.terms == "all":
            n_terms -= 1  # the empty set's
        if settings.max_terms is not None:
            n_terms = min(n_terms, settings.max_terms)
        return self._regression(budget, values, n_terms, "odd")

    def _regression(
        self, budget: int, values: np.ndarray, n_interactions: int, method: Literal["odd", "kernel"]
    ) -> ShapleyEstimate:
        settings, n = self._settings, self._settings.n_players
        members = np.eye(n, dtype=bool)
        if n_interactions > 0:
            smallest = 3 if settings.terms == "odd" else 2
            found, _ = largest_terms(
                self._surrogate(values), n, n_interactions, parity=settings.terms, min_size=smallest
            )
            members = np.concatenate([members, found])
        if settings.terms == "all":
            members = np.concatenate([np.zeros((1, n), dtype=bool), members])
        fit = regress(members, self._sequence.units(len(values)), values)
        coefficients = fit.coefficients
        if settings.terms == "odd":
            members = np.concatenate([np.zeros((1, n), dtype=bool), members])
            coefficients = np.concatenate([[(values[0] + values[1]) / 2], coefficients])
        return ShapleyEstimate(
            fit.values, float(values[0]), fit.standard_errors, budget, len(values), method, members, coefficients
        )

    def _from_trees(self, budget: int, values: np.ndarray) -> ShapleyEstimate:
        n = self._settings.n_players
        found = shapley_values(self._surrogate(values), n)
        found += (values[1] - values[0] - found.sum()) / n
        return self._additive(found, np.full(n, np.nan), budget, values, "tree")

    def _additive(
        self, found: np.ndarray, errors: np.ndarray, budget: int, values: np.ndarray, method: Literal["exact", "tree"]
    ) -> ShapleyEstimate:
        n = self._settings.n_players
        members = np.concatenate([np.zeros((1, n), dtype=bool), np.eye(n, dtype=bool)])
        coefficients = np.concatenate([[values[0] + found.sum() / 2], -found / 2])
        return ShapleyEstimate(found, float(values[0]), errors, budget, len(values), method, members, coefficients)

    def _surrogate(self, values: np.ndarray) -> Any:
        # The empty and the full coalition are fitted exactly by the constraint, so the trees need not see them.
        coalitions = self._sequence.coalitions(2, len(values))
        return fit_surrogate(self._settings.surrogate, coalitions, values[2:], self._surrogate_seed)


def _exponent(values: np.ndarray) -> int:
    """floor(log2) of the largest |v - v(empty)|, or of the largest |v| where all are equal."""
    halves = values / 2  # whose differences do not overflow
    largest = np.abs(halves - halves[0]).max() or np.abs(halves).max()
    return int(np.frexp(largest)[1])


def _checked_budget(budget: Any) -> int:
    if isinstance(budget, bool) or not isinstance(budget, (int, np.integer)) or budget < 2:
        raise ValueError(
            f"a budget is a whole number of evaluations, at least 2 (the empty and the full coalition), got {budget!r}"
        )
    return int(budget)
