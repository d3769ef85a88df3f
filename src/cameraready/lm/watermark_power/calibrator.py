"""Choosing the share of green tokens and the bias for a stated false-positive rate, power, length and distortion."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from scipy import optimize

from cameraready.lm.watermark_power.contexts import Contexts
from cameraready.lm.watermark_power.frontier import FrontierPoint, undominated
from cameraready.lm.watermark_power.greenmass import GreenMass, Scheme, check_delta, realised
from cameraready.lm.watermark_power.plan import Plan, RidgePoint, z_threshold
from cameraready.lm.watermark_power.power import Units, normal_power
from cameraready.lm.watermark_power.tails import check_alpha, check_length, normal_threshold, size, threshold_count

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Test = Literal["exact", "normal"]


class Infeasible(ValueError):
    """No watermark meets the constraints; the sentence says how near one comes."""


class WatermarkCalibrator:
    """Chooses (gamma, delta, threshold) of a green-list watermark from the text that a model really writes.

    Use it in place of the customary 0.25 or 0.5 and 2.0, whenever you can run the model on a few dozen of your prompts. Where you cannot,
    `high_entropy` gives the closed form, which promises more power than text with predictable tokens has. Do not use it for watermarks that are
    no bias on a list (SynthID, Gumbel).

    Make one with `from_model`, `from_probs` or `high_entropy`.

    Parameters
    ----------
    contexts : Contexts
    texts : integer array (n,), optional
        Which text each context comes from. Power is then averaged over texts; without it, contexts count as drawn independently, which is
        optimistic where texts differ.
    vocab_size : int, optional
        Width of the model's logits; gives the green share that is really possible.
    scheme : {"lefthash", "selfhash"}
        transformers' seeding schemes. "selfhash" favours at most the 40 most likely tokens.
    temperature, truncated :
        How the contexts were sampled (`from_model` fills them in); they decide what MarkLLM must be told.
    kept : float
        Share of scored tokens expected to survive editing; the others count as unwatermarked. 1 asks for no robustness.
    max_delta : float
        Largest bias that is considered.

    Attributes
    ----------
    scored_share : float or None
        Of `from_model`: distinct scored n-grams a generated token, to turn a length into a number of tokens.

    Notes
    -----
    Wang, He, Liu and Li, 2026, arXiv:2607.05694, whose formulas are those of `high_entropy` with ``test="normal"``.
    """

    def __init__(
        self,
        contexts: Contexts,
        *,
        texts: np.ndarray | None = None,
        vocab_size: int | None = None,
        scheme: Scheme = "lefthash",
        temperature: float = 1.0,
        truncated: bool = False,
        kept: float = 1.0,
        max_delta: float = 12.0,
    ) -> None:
        if scheme not in ("lefthash", "selfhash"):
            raise ValueError(f"scheme must be 'lefthash' or 'selfhash', got {scheme!r}")
        if not 0.0 < kept <= 1.0:
            raise ValueError(f"kept, the share of tokens that survive, must lie in (0, 1], got {kept!r}")
        if len(contexts) == 0:
            raise ValueError("there are no contexts to calibrate on")
        self.contexts, self.vocab_size, self.scheme = contexts, vocab_size, scheme
        self.temperature, self.truncated, self.kept = temperature, truncated, kept
        self.max_delta = check_delta(max_delta)
        self.scored_share: float | None = None
        self._units = Units(len(contexts), texts)
        self._masses: dict[float, GreenMass] = {}

    # --- ways to make one ------------------------------------------------------------------------------------------

    @classmethod
    def from_probs(
        cls,
        probabilities: np.ndarray,
        *,
        vocab_size: int | None = None,
        texts: np.ndarray | None = None,
        **options: Any,
    ) -> WatermarkCalibrator:
        """From next-token probabilities that you have.

        Parameters
        ----------
        probabilities : array (n, K)
            One row a context: all tokens, or the K most likely; the remainder is spread over the other ``vocab_size - K``. They must be what
            is sampled from: after temperature, top-k and top-p.
        vocab_size : int, optional
            Needed where rows do not sum to 1; K by default.
        texts, **options :
            As for the class.
        """
        p = np.asarray(probabilities, dtype=float)
        contexts = Contexts.of(p, vocab_size)
        return cls(contexts, texts=texts, vocab_size=vocab_size or p.shape[1], **options)

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 200,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        scheme: Scheme = "lefthash",
        seed: int = 0,
        batch_size: int = 16,
        top_tokens: int = 1024,
        **options: Any,
    ) -> WatermarkCalibrator:
        """Let the model write, and keep the distributions that it sampled from.

        Parameters
        ----------
        model : transformers causal LM
        tokenizer : its tokenizer; may be None where prompts are lists of token ids
        prompts : your traffic, as strings (already in the chat template, for a chat model) or token ids; 30 or more
        max_new_tokens : tokens a prompt; as many as the texts that you want to detect have
        temperature, top_k, top_p : as you will generate; applied in ``generate``'s order, before the watermark
        seed : of the sampling; the global generators are left as they were
        batch_size, top_tokens : rows at a time; probabilities kept of each distribution
        **options : as for the class

        Notes
        -----
        One unwatermarked generation of ``len(prompts) * max_new_tokens`` tokens; then no further run of the model.
        """
        from cameraready.lm.watermark_power.sampling import written

        text = written(
            model,
            tokenizer,
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            batch_size=batch_size,
            top_tokens=top_tokens,
        )
        truncated = top_k > 0 or top_p < 1.0
        made = cls(
            text.contexts,
            texts=text.texts,
            vocab_size=text.vocab_size,
            scheme=scheme,
            temperature=temperature,
            truncated=truncated,
            **options,
        )
        made.scored_share = text.scored_share
        return made

    @classmethod
    def high_entropy(cls, vocab_size: int | None = None, **options: Any) -> WatermarkCalibrator:
        """The paper's model of text: every green list holds exactly its share gamma of the probability, so that no model is run."""
        return cls(Contexts.limit(), vocab_size=vocab_size, **options)

    # --- predictions -----------------------------------------------------------------------------------------------

    def predict(self, gamma: float, delta: float, *, alpha: float, length: int, test: Test = "exact") -> Plan:
        """What watermark (gamma, delta) does: threshold, size, power and distortion.

        Parameters
        ----------
        gamma, delta : float
        alpha : float
            False-positive rate of one text.
        length : int
            Distinct scored n-grams.
        test : {"exact", "normal"}
            "normal" takes threshold and power from the normal approximation (the paper's); `size` is exact all the same.

        Notes
        -----
        O(contexts) for distortion, O(texts * length^2) for exact power. A length at which nothing is significant has power 0.
        """
        check_alpha(alpha)
        length = check_length(length)
        delta = check_delta(delta)
        mass = self._mass(gamma)
        effect = mass.effect(delta)
        count = _threshold(test, alpha, length, mass.gamma)
        return Plan(
            gamma=float(gamma),
            delta=delta,
            green_share=mass.gamma,
            alpha=alpha,
            length=length,
            threshold_count=count,
            z_threshold=z_threshold(count, length, gamma),
            size=size(count, length, mass.gamma),
            power=self._power(effect.rate, mass.gamma, alpha, length, count, test, exact=True),
            kl=self._average(effect.kl),
            reverse_kl=self._average(effect.reverse_kl),
            total_variation=self._average(effect.variation),
            log_perplexity_shift=self._average(effect.surprisal),
            green_rate=self._average(self._surviving(effect.rate, mass.gamma)),
            vocab_size=self.vocab_size,
            scheme=self.scheme,
            temperature=self.temperature,
            truncated=self.truncated,
        )

    # --- choices ---------------------------------------------------------------------------------------------------

    def minimise_distortion(
        self,
        *,
        alpha: float,
        power: float,
        length: int,
        gammas: Iterable[float] | None = None,
        test: Test = "exact",
    ) -> Plan:
        """The least KL divergence at which a share `power` of watermarked texts of `length` is found.

        For each gamma the smallest sufficient delta is solved for (power grows with delta), then the gamma of least divergence is taken.

        Raises
        ------
        Infeasible
            Where no gamma reaches the power with a bias up to `max_delta`; the message says what can be reached.
        """
        _check_power(power)
        count = {}
        ridge, best_reach = [], (0.0, 0.0)
        for gamma, share in self._grid(gammas, alpha, length):
            count[gamma] = _threshold(test, alpha, length, share)
            power_of = self._power_function(gamma, alpha, length, count[gamma], test)
            reach = power_of(self.max_delta)
            best_reach = max(best_reach, (reach, gamma))
            if reach < power:
                continue
            delta = _solve(lambda d, f=power_of: f(d) - power, self.max_delta)
            ridge.append(RidgePoint(gamma, delta, power_of(delta), self._kl(gamma, delta)))
        while ridge:
            best = min(ridge, key=lambda point: point.kl)
            delta = self._exact_delta(best, power, alpha, length, count[best.gamma], test)
            if delta is not None:
                return self._chosen(best.gamma, delta, alpha, length, test, ridge)
            ridge.remove(best)
        raise Infeasible(
            f"no watermark with delta <= {self.max_delta:g} finds {power:g} of texts of {length} tokens at alpha = {alpha:g}: the most is"
            f" {best_reach[0]:.3g}"
            + (f", at gamma = {best_reach[1]:g}" if best_reach[0] else "")
            + "; ask for less, or longer texts"
        )

    def maximise_power(
        self,
        *,
        alpha: float,
        length: int,
        max_kl: float,
        gammas: Iterable[float] | None = None,
        test: Test = "exact",
    ) -> Plan:
        """The most power at a divergence of at most `max_kl` nats a token."""
        _check_budget(max_kl)
        ridge = []
        for gamma, share in self._grid(gammas, alpha, length):
            delta = self._delta_of_kl(gamma, max_kl)
            count = _threshold(test, alpha, length, share)
            rate, kl = self._mass(gamma).rate_and_kl(delta)
            found = self._power(rate, share, alpha, length, count, test, exact=True)
            ridge.append(RidgePoint(gamma, delta, found, self._average(kl)))
        best = max(ridge, key=lambda point: (point.power, -point.kl))
        return self._chosen(best.gamma, best.delta, alpha, length, test, ridge)

    def required_length(
        self,
        *,
        alpha: float,
        power: float,
        max_kl: float,
        gammas: Iterable[float] | None = None,
        longest: int = 20_000,
    ) -> int:
        """The smallest number of distinct scored n-grams at which some watermark of divergence `max_kl` has the power.

        Power jumps down where the threshold steps up, so that a somewhat longer text may fall short again.

        Raises
        ------
        Infeasible
            Where not even `longest` suffices: texts with hardly any choice of words are never found.
        """
        _check_power(power)
        _check_budget(max_kl)
        check_alpha(alpha)
        if gammas is not None:
            gammas = list(gammas)
        low, high = 1, 16
        while self._best_at(high, alpha, power, max_kl, gammas) is False:
            low, high = high, 2 * high
            if low >= longest:
                raise Infeasible(
                    f"texts of up to {longest:,} tokens do not reach power {power:g} at alpha = {alpha:g} and {max_kl:g} nats a token;"
                    " allow more divergence, or ask for less"
                )
        while high - low > 1:
            middle = (low + high) // 2
            if self._best_at(middle, alpha, power, max_kl, gammas):
                high = middle
            else:
                low = middle
        # Steps of the threshold: a shorter length may do as well.
        for length in range(max(1, int(0.9 * high)), high):
            if self._best_at(length, alpha, power, max_kl, gammas):
                return length
        return high

    def frontier(
        self,
        *,
        alpha: float,
        length: int,
        gammas: Iterable[float] | None = None,
        deltas: Iterable[float] | None = None,
        n_resamples: int = 400,
        seed: int = 0,
    ) -> list[FrontierPoint]:
        """The (gamma, delta) that no other beats in both power and divergence, with 95 % intervals from resampled texts.

        Returns points by rising divergence. O(len(gammas) len(deltas)) predictions.
        """
        deltas = np.geomspace(0.1, self.max_delta, 24) if deltas is None else np.asarray(list(deltas), dtype=float)
        generator = np.random.default_rng(seed)
        units = len(self._units)
        draws = generator.multinomial(units, np.full(units, 1 / units), size=n_resamples) / units
        points = []
        for gamma, share in self._grid(gammas, alpha, length):
            count = threshold_count(alpha, length, share)
            for delta in deltas:
                rate, kl = self._mass(gamma).rate_and_kl(delta)
                rate, per_kl = self._surviving(rate, share), self._units.means(kl)
                power, powers = self._units.resampled(rate, length, count, draws)
                points.append(FrontierPoint.of(gamma, float(delta), power, powers, per_kl.mean(), draws @ per_kl))
        return undominated(points)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _mass(self, gamma: float) -> GreenMass:
        share = realised(gamma, self.vocab_size)
        if share not in self._masses:
            if len(self._masses) >= 64:  # about 1 kB a context each
                self._masses.pop(next(iter(self._masses)))
            self._masses[share] = GreenMass(self.contexts, share, self.vocab_size, self.scheme)
        return self._masses[share]

    def _grid(self, gammas: Iterable[float] | None, alpha: float, length: int) -> list[tuple[float, float]]:
        check_alpha(alpha)
        length = check_length(length)
        if gammas is None:
            grid = [g for g in default_gammas(alpha, length) if self.vocab_size is None or int(self.vocab_size * g) > 0]
        else:
            grid = [float(gamma) for gamma in gammas]
        if not grid:
            raise ValueError("gammas is empty: there is no share of green tokens to choose from")
        return [(gamma, realised(gamma, self.vocab_size)) for gamma in grid]

    def _average(self, values: np.ndarray) -> float:
        return float(self._units.means(values).mean())

    def _surviving(self, rate: np.ndarray, share: float) -> np.ndarray:
        return self.kept * rate + (1 - self.kept) * share

    def _kl(self, gamma: float, delta: float) -> float:
        return self._average(self._mass(gamma).rate_and_kl(delta)[1])

    def _power_function(
        self, gamma: float, alpha: float, length: int, count: int, test: Test
    ) -> Callable[[float], float]:
        mass = self._mass(gamma)
        return lambda delta: self._power(
            mass.rate_and_kl(delta)[0], mass.gamma, alpha, length, count, test, exact=False
        )

    def _power(
        self, rate: np.ndarray, share: float, alpha: float, length: int, count: int, test: Test, *, exact: bool
    ) -> float:
        rate = self._surviving(rate, share)
        if test == "normal":
            return normal_power(self._average(rate), share, alpha, length)
        return float(self._units.found(rate, length, count, exact=exact).mean())

    def _delta_of_kl(self, gamma: float, max_kl: float) -> float:
        if self._kl(gamma, self.max_delta) <= max_kl:
            return self.max_delta
        return _solve(lambda delta: self._kl(gamma, delta) - max_kl, self.max_delta, upper=False)

    def _exact_delta(
        self, point: RidgePoint, power: float, alpha: float, length: int, count: int, test: Test
    ) -> float | None:
        """The bias at which the exact power, and not its quick form, is reached; None where none is."""
        mass = self._mass(point.gamma)

        def reached(delta: float) -> float:
            return self._power(mass.rate_and_kl(delta)[0], mass.gamma, alpha, length, count, test, exact=True)

        below, delta = 0.0, point.delta
        while reached(delta) < power:
            if delta >= self.max_delta:
                return None
            below, delta = delta, min(1.02 * delta + 1e-3, self.max_delta)
        for _ in range(8 if below else 0):
            middle = (below + delta) / 2
            below, delta = (below, middle) if reached(middle) >= power else (middle, delta)
        return delta

    def _best_at(self, length: int, alpha: float, power: float, max_kl: float, gammas: list[float] | None) -> bool:
        for gamma, share in self._grid(gammas, alpha, length):
            count = threshold_count(alpha, length, share)
            if count > length:
                continue
            delta = self._delta_of_kl(gamma, max_kl)
            rate = self._mass(gamma).rate_and_kl(delta)[0]
            # The quick form first; only what is near is worth the exact one.
            quick = self._power(rate, share, alpha, length, count, "exact", exact=False)
            if quick > power - 0.01 and self._power(rate, share, alpha, length, count, "exact", exact=True) >= power:
                return True
        return False

    def _chosen(
        self, gamma: float, delta: float, alpha: float, length: int, test: Test, ridge: list[RidgePoint]
    ) -> Plan:
        return replace(self.predict(gamma, delta, alpha=alpha, length=length, test=test), ridge=tuple(ridge))


def default_gammas(alpha: float, length: int) -> list[float]:
    """Shares from 0.05 to 0.98, and the largest at which all-green text of this length is significant, ``alpha^(1 / length)``."""
    grid = [round(0.05 * i, 2) for i in range(1, 19)] + [0.92, 0.94, 0.96, 0.98]
    largest = alpha ** (1 / length) * (1 - 1e-9)
    return sorted({*grid, largest} if 0.01 < largest < 0.999 else set(grid))


def _threshold(test: Test, alpha: float, length: int, share: float) -> int:
    if test == "exact":
        return threshold_count(alpha, length, share)
    if test == "normal":
        return normal_threshold(alpha, length, share)
    raise ValueError(f"test must be 'exact' or 'normal', got {test!r}")


def _solve(function: Callable[[float], float], upper_limit: float, *, upper: bool = True) -> float:
    """Where a growing function crosses zero, on the side where it is not negative (`upper`) or not positive."""
    root = float(optimize.brentq(function, 0.0, upper_limit, xtol=1e-7))
    step = 1e-7
    while (function(root) < 0) if upper else (function(root) > 0):
        root = min(max(root + (step if upper else -step), 0.0), upper_limit)
        step *= 2
    return root


def _check_power(power: float) -> None:
    if not 0.0 < power < 1.0:
        raise ValueError(f"power must lie strictly between 0 and 1, got {power!r}")


def _check_budget(max_kl: float) -> None:
    if not (math.isfinite(max_kl) and max_kl > 0):
        raise ValueError(f"max_kl, in nats a token, must be a finite number above 0, got {max_kl!r}")
