"""A chosen watermark, and how the libraries that embed it are told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

from cameraready.lm.watermark_power.theory.greenmass import Scheme

if TYPE_CHECKING:
    from transformers import WatermarkingConfig

#: transformers' default key, the millionth prime; take your own and keep it secret.
DEFAULT_KEY = 15485863
#: Below this share "selfhash" finds no green token among its 40 candidates more than once in a thousand million tokens.
LEAST_SELFHASH = 0.4


@dataclass(frozen=True)
class RidgePoint:
    """The solution of the same problem at one gamma: equally powerful (or equally distorting) choices lie on the ridge."""

    gamma: float
    delta: float
    power: float
    kl: float


@dataclass(frozen=True)
class Plan:
    """A green-list watermark with its threshold, and what is to be expected of it.

    Attributes
    ----------
    gamma, delta : float
        Green share of the vocabulary and bias on green logits; the bias acts after temperature, top-k and top-p, where transformers puts it.
    green_share : float
        What the vocabulary really gives: ``int(gamma * V) / V``.
    alpha : float
        The false-positive rate asked for; `size` is the one that the threshold has, exactly.
    length, shortest : int
        Number of distinct scored n-grams that power and threshold are about, and the least number that the choice provides for.
    threshold_count : int
        At `length`, this many green tokens or more mean "watermarked"; ``length + 1`` where nothing can be significant.
    z_threshold : float
        The same for detectors that compare a z-score with ``>``; valid at `length` alone. At other lengths use `exact_detect`.
    power, least_power : float
        Predicted share of watermarked texts that are found: unedited ones of `length` n-grams; and the worst of the lengths provided for, when
        a share `kept` of the n-grams survives.
    kept : float
    kl, reverse_kl, total_variation : float
        Per token: KL(watermarked || original), KL(original || watermarked), in nats; total variation distance.
    log_perplexity_shift : float
        Change of the log-perplexity under the original model, nats a token.
    green_rate : float
        Predicted share of green tokens in unedited watermarked text.
    ridge : tuple of RidgePoint
        The best of every gamma that was looked at.
    """

    gamma: float
    delta: float
    green_share: float
    alpha: float
    length: int
    shortest: int
    threshold_count: int
    z_threshold: float
    size: float
    power: float
    least_power: float
    kept: float
    kl: float
    reverse_kl: float
    total_variation: float
    log_perplexity_shift: float
    green_rate: float
    vocab_size: int | None = None
    scheme: Scheme = "lefthash"
    temperature: float = 1.0
    truncated: bool = False
    ridge: tuple[RidgePoint, ...] = ()

    @property
    def spare(self) -> int:
        """Red tokens that a text of `length` may have and still be found; 0 means that a single edited token can lose it."""
        return self.length - self.threshold_count

    def to_transformers(self, *, hashing_key: int = DEFAULT_KEY, context_width: int = 1) -> WatermarkingConfig:
        """For ``model.generate(..., watermarking_config=...)``.

        Parameters
        ----------
        hashing_key : int
            Your secret, not 0; the default is everybody's. "lefthash" seeds with key times previous token, so that after token 0 every key has
            the same list.
        context_width : int
            For "selfhash", how many tokens the list depends on, the scored one included. "lefthash" uses the previous token alone, whatever
            is asked for.

        Raises
        ------
        ValueError
            For "selfhash" with few green tokens: transformers (5.24) stops generating where none of the 40 likeliest tokens is green.
        """
        if self.scheme == "selfhash" and self.gamma < LEAST_SELFHASH:
            raise ValueError(
                f"with selfhash and gamma = {self.gamma:g} transformers stops generating wherever none of the 40 likeliest tokens is green,"
                f" once in about {(1 - self.gamma) ** -40:,.0f} tokens; take gamma >= {LEAST_SELFHASH}, or lefthash"
            )
        _whole("hashing_key", hashing_key)
        _whole("context_width", context_width, least=1)
        from transformers import WatermarkingConfig

        config = WatermarkingConfig(
            greenlist_ratio=self.gamma,
            bias=self.delta,
            hashing_key=hashing_key,
            seeding_scheme=self.scheme,
            context_width=context_width,
        )
        config.validate()
        return config

    def to_markllm(self, *, hash_key: int = DEFAULT_KEY, prefix_length: int = 1) -> dict[str, Any]:
        """MarkLLM's KGW configuration, to be written with ``json.dump`` and loaded by ``AutoWatermark.load("KGW", algorithm_config=...)``.

        MarkLLM adds its bias before the temperature divides the logits, so that `delta` is multiplied by the temperature here.

        Raises
        ------
        ValueError
            Where the plan was made for top-k or top-p sampling, which MarkLLM would apply to biased logits: another watermark, whose
            divergence from the original can be infinite; or for "selfhash", of which MarkLLM has another form.
        """
        _whole("hash_key", hash_key)
        _whole("prefix_length", prefix_length, least=1)
        if self.truncated:
            raise ValueError(
                "this plan was calibrated for top-k or top-p sampling, which MarkLLM applies after its bias and transformers before it;"
                " calibrate without top_k and top_p, or generate with to_transformers()"
            )
        if self.scheme != "lefthash":
            raise ValueError(
                f"MarkLLM's self-hash differs from transformers' {self.scheme!r}; calibrate with scheme='lefthash'"
            )
        return {
            "algorithm_name": "KGW",
            "gamma": self.gamma,
            "delta": self.delta * self.temperature,
            "hash_key": hash_key,
            "prefix_length": prefix_length,
            "z_threshold": self.z_threshold,
            "f_scheme": "time",
            "window_scheme": "left",
        }


def _whole(name: str, value: Any, least: int | None = None) -> None:
    """Raises ValueError unless `value` is a whole number, not below `least`; without one, a key: 64 bits, not 0."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if least is not None and not (whole and value >= least):
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    if least is None and not (whole and -(2**63) <= value < 2**63 and value != 0):
        raise ValueError(f"{name} must be a whole number of 64 bits, and not 0, got {value!r}")


def z_threshold(count: int, length: int, gamma: float) -> float:
    """A z-score that `count` green tokens of `length` exceed and ``count - 1`` do not: half-way between theirs."""
    return (count - 0.5 - gamma * length) / math.sqrt(length * gamma * (1 - gamma))
