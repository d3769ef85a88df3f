"""What a green-list watermark does to the text that a model writes: power, size and distortion, predicted."""

from __future__ import annotations

import numpy as np

from cameraready.lm.watermark_power.plan import Plan, z_threshold
from cameraready.lm.watermark_power.theory.constraints import Bars, Test, lengths_around, threshold_of
from cameraready.lm.watermark_power.theory.contexts import Contexts
from cameraready.lm.watermark_power.theory.greenmass import GreenMass, Scheme, check_delta, realised
from cameraready.lm.watermark_power.theory.power import Units, normal_power
from cameraready.lm.watermark_power.theory.tails import check_alpha, check_length, size


class Predictor:
    """Predicts a watermark's power, size and distortion on the contexts that it holds; see `WatermarkCalibrator`, which chooses by them."""

    def __init__(
        self,
        contexts: Contexts,
        *,
        texts: np.ndarray | None = None,
        vocab_size: int | None = None,
        scheme: Scheme = "lefthash",
        temperature: float = 1.0,
        truncated: bool = False,
        max_delta: float = 12.0,
    ) -> None:
        if scheme not in ("lefthash", "selfhash"):
            raise ValueError(f"scheme must be 'lefthash' or 'selfhash', got {scheme!r}")
        if len(contexts) == 0:
            raise ValueError("there are no contexts to calibrate on")
        self.contexts, self.vocab_size, self.scheme = contexts, vocab_size, scheme
        self.temperature, self.truncated = temperature, truncated
        self.max_delta = check_delta(max_delta)
        self.scored_share: float | None = None
        self.lengths: np.ndarray | None = None
        self._units = Units(len(contexts), texts)
        self._masses: dict[float, GreenMass] = {}

    def predict(
        self,
        gamma: float,
        delta: float,
        *,
        alpha: float,
        length: int,
        shortest: int | None = None,
        kept: float = 1.0,
        test: Test = "exact",
    ) -> Plan:
        """What watermark (gamma, delta) does: threshold, size, power and distortion.

        Parameters
        ----------
        gamma, delta : float
        alpha : float
            False-positive rate of one text.
        length : int
            Distinct scored n-grams.
        shortest : int, optional
            ``plan.least_power`` is the worst over the lengths from here to as far beyond `length`; just `length` by default.
        kept : float
            Share of the scored n-grams that survives, for ``plan.least_power``; the others are green by chance. ``plan.power`` is of unedited
            text.
        test : {"exact", "normal"}
            "normal" takes threshold and power from the normal approximation (the paper's); `size` is exact all the same.

        Notes
        -----
        O(contexts) for distortion, O(texts * length^2) for exact power; beyond 2,000 tokens power comes from the first two moments (within
        3e-3), in O(contexts). A length at which nothing is significant has power 0.
        """
        check_alpha(alpha)
        length = check_length(length)
        delta = check_delta(delta)
        mass = self._mass(gamma)
        effect = mass.effect(delta)
        count = threshold_of(test, alpha, length, mass.gamma)
        power = self._power(effect.rate, mass.gamma, alpha, length, count, test, exact=True)
        bars = Bars.of(test, alpha, lengths_around(length, length if shortest is None else shortest), mass.gamma, kept)
        least, _ = self._least(effect.rate, mass.gamma, alpha, bars, test, exact=True)
        return Plan(
            gamma=float(gamma),
            delta=delta,
            green_share=mass.gamma,
            alpha=alpha,
            length=length,
            shortest=bars.lengths[0],
            threshold_count=count,
            z_threshold=z_threshold(count, length, gamma),
            size=size(count, length, mass.gamma),
            power=power,
            least_power=min(least, power),
            kept=bars.kept,
            kl=self._average(effect.kl),
            reverse_kl=self._average(effect.reverse_kl),
            total_variation=self._average(effect.variation),
            log_perplexity_shift=self._average(effect.surprisal),
            green_rate=self._average(effect.rate),
            vocab_size=self.vocab_size,
            scheme=self.scheme,
            temperature=self.temperature,
            truncated=self.truncated,
        )

    def _mass(self, gamma: float) -> GreenMass:
        share = realised(gamma, self.vocab_size)
        if share not in self._masses:
            if len(self._masses) >= 64:  # about 1 kB a context each
                self._masses.pop(next(iter(self._masses)))
            self._masses[share] = GreenMass(self.contexts, share, self.vocab_size, self.scheme)
        return self._masses[share]

    def _average(self, values: np.ndarray) -> float:
        return float(self._units.means(values).mean())

    def _kl(self, gamma: float, delta: float) -> float:
        return self._average(self._mass(gamma).rate_and_kl(delta)[1])

    def _power(
        self, rate: np.ndarray, share: float, alpha: float, length: int, count: int, test: Test, *, exact: bool
    ) -> float:
        if test == "normal":
            return normal_power(self._average(rate), share, alpha, length)
        return float(self._units.found(rate, length, count, exact=exact).mean())

    def _least(
        self, rate: np.ndarray, share: float, alpha: float, bars: Bars, test: Test, *, exact: bool
    ) -> tuple[float, int]:
        """The least power over the lengths of `bars`, and that length. Exact power is computed for the three that are quickly seen to be worst."""
        rate = bars.kept * rate + (1 - bars.kept) * share
        pairs = list(zip(bars.lengths, bars.counts, strict=True))
        quick = [(self._power(rate, share, alpha, n, k, test, exact=False), n, k) for n, k in pairs]
        if not exact:
            return min(quick)[:2]
        worst = sorted(quick)[:3]
        return min((self._power(rate, share, alpha, n, k, test, exact=True), n) for _, n, k in worst)
