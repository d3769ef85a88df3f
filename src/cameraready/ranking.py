"""Ranks cards by the words of a question. A word is compared once with each different word of all cards."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from functools import cache

from cameraready.card import Card

_STOP_WORDS = frozenset((
    "a", "an", "and", "are", "as", "at", "be", "by", "can", "do", "for", "from", "how", "i", "in", "is", "it", "my",
    "of", "on", "or", "that", "the", "this", "to", "use", "want", "what", "when", "with",
))  # fmt: skip
_ENDINGS = ("ations", "ation", "ings", "ing", "ers", "er", "ors", "or", "ions", "ion", "ed", "es", "s", "ly", "al")
_SAME, _SAME_STEM, _ALIKE = 1.0, 0.9, 0.6  # how much of the weight of a place a match is worth
_ALIKE_FROM = 0.9  # share of letters that two words have in common in the same order
_SENTENCE, _TAIL = 3, 0.4  # from so many words on, cards with less than this share of the best score are left out
_WEIGHTS = {
    "slug": 4.0,
    "exports": 4.0,
    "instead_of": 3.0,
    "purpose": 3.0,
    "title": 3.0,
    "use_when": 2.0,
    "room": 2.0,
    "kind": 2.0,
    "authors": 1.0,
}


def rank(question: str, cards: Sequence[Card]) -> list[Card]:
    """The cards that have a word of `question`: by how many they have, then by where, rarer words counting more.

    Of a sentence's cards those are left out that score far below the best: it always has a word, such as "model", that
    most cards have.

    Raises
    ------
    ValueError
        If `question` has no word to look for.
    """
    asked = [word for word in _words(question) if word not in _STOP_WORDS]
    if not asked:
        raise ValueError(f"{question!r} has no word to look for")
    texts = [_weighted_words(card) for card in cards]
    vocabulary = set().union(*texts)
    scores = [_scores(_matches(word, vocabulary), texts) for word in asked]
    rarity = [math.log(1 + len(cards) / (1 + sum(score > 0 for score in column))) for column in scores]
    scored = []
    for card, found in zip(cards, zip(*scores, strict=True), strict=True):
        hits = sum(score > 0 for score in found)
        if hits:
            scored.append((hits, sum(score * rare for score, rare in zip(found, rarity, strict=True)), card))
    most = max((hits for hits, _, _ in scored), default=0)
    if len(asked) >= _SENTENCE and most > 1:
        least = _TAIL * max(score for _, score, _ in scored)
        scored = [(hits, score, card) for hits, score, card in scored if hits == most or score >= least]
    return [card for _, _, card in sorted(scored, key=lambda item: (-item[0], -item[1], item[2].slug))]


def _scores(matches: dict[str, float], texts: Sequence[dict[str, float]]) -> list[float]:
    """For each text the best of: how well a word matches, times the weight of the place where the text has it."""
    return [max((matches[word] * text[word] for word in matches.keys() & text.keys()), default=0.0) for text in texts]


def _weighted_words(card: Card) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, weight in _WEIGHTS.items():
        value = getattr(card, name)
        for word in _words(value if isinstance(value, str) else " ".join(value)):
            found[word] = max(found.get(word, 0.0), weight)
    return found


def _matches(word: str, vocabulary: Iterable[str]) -> dict[str, float]:
    """The words of `vocabulary` that are `word`, or nearly, with how well they match, above 0 and at most 1."""
    stem = _stem(word)
    found = {}
    for other in vocabulary:
        if other == word:
            found[other] = _SAME
        elif _stem(other) == stem:
            found[other] = _SAME_STEM
        elif len(stem) >= 4 and (other.startswith(stem) or _alike(word, other) or _alike(stem, _stem(other))):
            found[other] = _ALIKE
    return found


def _alike(one: str, other: str) -> bool:
    if one[:1] != other[:1] or abs(len(one) - len(other)) > 2:
        return False
    matcher = difflib.SequenceMatcher(None, one, other)
    # The first two are upper bounds of the third, and cost much less.
    return (
        matcher.real_quick_ratio() >= _ALIKE_FROM
        and matcher.quick_ratio() >= _ALIKE_FROM
        and matcher.ratio() >= _ALIKE_FROM
    )


@cache
def _stem(word: str) -> str:
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 4:
            return word.removesuffix(ending)
    return word


_TOKEN = re.compile(r"[A-Za-z0-9]+")
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")


def _words(text: str) -> list[str]:
    """Lower-case words; ``OddShap`` gives both ``oddshap`` and its parts."""
    found = []
    for token in _TOKEN.findall(text):
        found.append(token.lower())
        if not token[1:].islower() or not token.isalpha():  # what remains are words like these, which have no parts
            parts = _PART.findall(token)
            found += [part.lower() for part in parts] if len(parts) > 1 else []
    return found
