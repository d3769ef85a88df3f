"""Choosing the share of green tokens and the bias for a stated false-positive rate, power, length and distortion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cameraready.lm.watermark_power.plan import LEAST_SELFHASH, Plan, RidgePoint
from cameraready.lm.watermark_power.theory.constraints import (
    KEPT,
    Bars,
    Infeasible,
    Test,
    check_budget,
    check_power,
    default_gammas,
    lengths_around,
    solved,
)
from cameraready.lm.watermark_power.theory.contexts import Contexts, as_probabilities
from cameraready.lm.watermark_power.theory.frontier import FrontierPoint, resamples, undominated
from cameraready.lm.watermark_power.theory.greenmass import Scheme, realised
from cameraready.lm.watermark_power.theory.predictor import Predictor
from cameraready.lm.watermark_power.theory.tails import check_alpha, check_length, number, threshold_count

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class WatermarkCalibrator(Predictor):
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
    max_delta : float
        Largest bias that is considered.

    Attributes
    ----------
    scored_share : float or None
        Of `from_model`: distinct scored n-grams a generated token, to turn a length into a number of tokens.
    lengths : array or None
        Of `from_model`: how many distinct scored n-grams each text had; a low quantile is a good `shortest`.

    Notes
    -----
    Wang, He, Liu and Li, 2026, arXiv:2607.05694, whose formulas are those of `high_entropy` with ``test="normal"``.
    """

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
        p = as_probabilities(probabilities)
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
        made.scored_share, made.lengths = text.scored_share, text.lengths
        return made

    @classmethod
    def high_entropy(cls, vocab_size: int | None = None, **options: Any) -> WatermarkCalibrator:
        """The paper's model of text: every green list holds exactly its share gamma of the probability, so that no model is run."""
        return cls(Contexts.limit(), vocab_size=vocab_size, **options)

    # --- choices ---------------------------------------------------------------------------------------------------

    def minimise_distortion(
        self,
        *,
        alpha: float,
        power: float,
        length: int,
        shortest: int | None = None,
        kept: float = KEPT,
        gammas: Iterable[float] | None = None,
        test: Test = "exact",
    ) -> Plan:
        """The least KL divergence at which a share `power` of watermarked texts is found, whatever their length from `shortest` on.

        For each gamma the smallest sufficient delta is solved for (power grows with delta), then the gamma of least divergence is taken.

        Parameters
        ----------
        alpha : float
            False-positive rate of one text.
        power : float
            Share of texts to be found, at every length from `shortest` to as far beyond `length`.
        length : int
            Typical number of distinct scored n-grams; the plan's threshold and power are about it.
        shortest : int, optional
            A tenth less by default. `from_model` keeps the lengths that texts had, in `lengths`.
        kept : float
            Share of the scored n-grams that survives editing; an edited token costs two, its own and that of the next token's list. ``kept=1``
            with ``shortest=length`` gives the least divergence of all, by a watermark that asks for every single token to be green: one
            token less, or one edited, and the text is never found.
        gammas : iterable of float, optional
            Shares to look at; 23 from 0.05 to 0.98 by default.
        test : {"exact", "normal"}

        Returns
        -------
        Plan
            ``plan.spare`` says how many red tokens a text of `length` may have.

        Raises
        ------
        Infeasible
            Where no gamma reaches the power with a bias up to `max_delta`; the message says what can be reached.
        """
        check_power(power)
        lengths = lengths_around(length, shortest)
        bars, ridge, best_reach = {}, [], (0.0, 0.0)
        for gamma, share in self._grid(gammas, alpha, lengths[0], kept):
            bars[gamma] = Bars.of(test, alpha, lengths, share, kept)
            power_of = self._power_function(gamma, alpha, bars[gamma], test)
            reach = power_of(self.max_delta)
            best_reach = max(best_reach, (reach, gamma))
            if reach < power:
                continue
            delta = solved(lambda d, f=power_of: f(d) - power, self.max_delta)
            ridge.append(RidgePoint(gamma, delta, power_of(delta), self._kl(gamma, delta)))
        left = list(ridge)
        while left:
            best = min(left, key=lambda point: point.kl)
            delta = self._exact_delta(best, power, alpha, bars[best.gamma], test)
            if delta is not None:
                return self._chosen(best.gamma, delta, alpha, length, bars[best.gamma], test, ridge)
            left.remove(best)
        raise Infeasible(
            f"no watermark with delta <= {self.max_delta:g} finds {power:g} of texts of {lengths[0]} to {lengths[-1]} tokens at alpha = {alpha:g}:"
            f" the most is {best_reach[0]:.3g}"
            + (f", at gamma = {best_reach[1]:g}" if best_reach[0] else "")
            + "; ask for less, or longer texts"
        )

    def maximise_power(
        self,
        *,
        alpha: float,
        length: int,
        max_kl: float,
        shortest: int | None = None,
        kept: float = KEPT,
        gammas: Iterable[float] | None = None,
        test: Test = "exact",
    ) -> Plan:
        """The most power at a divergence of at most `max_kl` nats a token: of edited text at the worst length, as in `minimise_distortion`."""
        check_budget(max_kl)
        lengths = lengths_around(length, shortest)
        ridge, bars = [], {}
        for gamma, share in self._grid(gammas, alpha, lengths[0], kept):
            delta = self._delta_of_kl(gamma, max_kl)
            bars[gamma] = Bars.of(test, alpha, lengths, share, kept)
            rate, kl = self._mass(gamma).rate_and_kl(delta)
            found, _ = self._least(rate, share, alpha, bars[gamma], test, exact=True)
            ridge.append(RidgePoint(gamma, delta, found, self._average(kl)))
        best = max(ridge, key=lambda point: (point.power, -point.kl))
        return self._chosen(best.gamma, best.delta, alpha, length, bars[best.gamma], test, ridge)

    def required_length(
        self,
        *,
        alpha: float,
        power: float,
        max_kl: float,
        kept: float = KEPT,
        gammas: Iterable[float] | None = None,
        longest: int = 20_000,
    ) -> int:
        """The smallest number of distinct scored n-grams at which some watermark of divergence `max_kl` has the power.

        Edited texts of a tenth less and more are then found as well, as in `minimise_distortion`. A somewhat longer text may fall short
        again, for power jumps down where the threshold steps up. About a hundred lengths are looked at, each in
        O(gammas * texts * length^2) where it is near.

        Raises
        ------
        Infeasible
            Where not even `longest` suffices: texts with hardly any choice of words are never found.
        """
        check_power(power)
        check_budget(max_kl)
        check_alpha(alpha)
        rates = [
            (share, self._mass(gamma).rate_and_kl(self._delta_of_kl(gamma, max_kl))[0])
            for gamma, share in self._grid(gammas, alpha, longest, kept)
        ]
        low, high = 1, 16
        while not self._suffices(high, alpha, power, rates, kept):
            low, high = high, 2 * high
            if low >= longest:
                raise Infeasible(
                    f"texts of up to {longest:,} tokens do not reach power {power:g} at alpha = {alpha:g} and {max_kl:g} nats a token;"
                    " allow more divergence, or ask for less"
                )
        while high - low > 1:
            middle = (low + high) // 2
            if self._suffices(middle, alpha, power, rates, kept):
                high = middle
            else:
                low = middle
        # Steps of the threshold: a shorter length may do as well.
        for length in np.unique(np.linspace(max(1, int(0.9 * high)), high - 1, 64).astype(int)).tolist():
            if length < high and self._suffices(length, alpha, power, rates, kept):
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
        """The (gamma, delta) that no other beats in both power (at `length` exactly) and divergence, with 95 % intervals from resampled texts.

        Returns points by rising divergence. O(len(gammas) len(deltas)) predictions.
        """
        length = check_length(length)
        deltas = np.geomspace(0.1, self.max_delta, 24) if deltas is None else np.asarray(list(deltas), dtype=float)
        if n_resamples < 1 or deltas.size == 0:
            raise ValueError(f"a frontier takes deltas and at least one resample, got {deltas.size} and {n_resamples}")
        draws = resamples(len(self._units), n_resamples, seed)
        points = []
        for gamma, share in self._grid(gammas, alpha, length, 1.0):
            count = threshold_count(alpha, length, share)
            for delta in deltas:
                rate, kl = self._mass(gamma).rate_and_kl(delta)
                power, powers = self._units.resampled(rate, length, count, draws)
                each = self._units.means(kl)
                points.append(FrontierPoint.of(gamma, float(delta), power, powers, each.mean(), draws @ each))
        return undominated(points)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _grid(
        self, gammas: Iterable[float] | None, alpha: float, shortest: int, kept: float
    ) -> list[tuple[float, float]]:
        check_alpha(alpha)
        if gammas is None:
            grid = [
                g for g in default_gammas(alpha, shortest, kept) if self.vocab_size is None or int(self.vocab_size * g)
            ]
            if self.scheme == "selfhash":
                grid = [gamma for gamma in grid if gamma >= LEAST_SELFHASH]
        else:
            grid = [number("gamma", gamma) for gamma in gammas]
        if not grid:
            raise ValueError("gammas is empty: there is no share of green tokens to choose from")
        return [(gamma, realised(gamma, self.vocab_size)) for gamma in grid]

    def _power_function(self, gamma: float, alpha: float, bars: Bars, test: Test) -> Callable[[float], float]:
        mass = self._mass(gamma)
        return lambda delta: self._least(mass.rate_and_kl(delta)[0], mass.gamma, alpha, bars, test, exact=False)[0]

    def _delta_of_kl(self, gamma: float, max_kl: float) -> float:
        if self._kl(gamma, self.max_delta) <= max_kl:
            return self.max_delta
        return solved(lambda delta: self._kl(gamma, delta) - max_kl, self.max_delta, upper=False)

    def _exact_delta(self, point: RidgePoint, power: float, alpha: float, bars: Bars, test: Test) -> float | None:
        """The bias at which the exact power, and not its quick form, is reached; None where none is."""
        mass = self._mass(point.gamma)

        def reached(delta: float) -> float:
            return self._least(mass.rate_and_kl(delta)[0], mass.gamma, alpha, bars, test, exact=True)[0]

        below, delta = 0.0, point.delta
        while reached(delta) < power:
            if delta >= self.max_delta:
                return None
            below, delta = delta, min(1.02 * delta + 1e-3, self.max_delta)
        for _ in range(8 if below else 0):
            middle = (below + delta) / 2
            below, delta = (below, middle) if reached(middle) >= power else (middle, delta)
        return delta

    def _suffices(
        self, length: int, alpha: float, power: float, rates: list[tuple[float, np.ndarray]], kept: float
    ) -> bool:
        lengths = lengths_around(length, None, most=21)
        for share, rate in rates:
            if share ** lengths[0] > alpha:  # not even all green is significant
                continue
            bars = Bars.of("exact", alpha, lengths, share, kept)
            # The quick form first; only what is near is worth the exact one.
            quick, _ = self._least(rate, share, alpha, bars, "exact", exact=False)
            if quick > power - 0.01 and self._least(rate, share, alpha, bars, "exact", exact=True)[0] >= power:
                return True
        return False

    def _chosen(
        self, gamma: float, delta: float, alpha: float, length: int, bars: Bars, test: Test, ridge: list[RidgePoint]
    ) -> Plan:
        plan = self.predict(
            gamma, delta, alpha=alpha, length=length, shortest=bars.lengths[0], kept=bars.kept, test=test
        )
        return replace(plan, ridge=tuple(ridge))
