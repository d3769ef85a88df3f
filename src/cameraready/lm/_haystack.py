"""Puts facts into a filler text until the prompt has exactly so many tokens, and says where the facts stand."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cameraready.lm._corpora import special_tokens, texts_of

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
#: What may be added to reach the last tokens; short, so that some of it is one token for any tokenizer.
PADS = (" .", ".", " a", " the", " -", ",", "!", "\n", " x", "~", " and so on")

Template = Callable[[str], str]


@dataclass(frozen=True)
class Haystack:
    """What stands in a context beside the filler: `depths` are shares of the filler before each fact, ascending."""

    preface: str
    facts: Sequence[str]
    depths: Sequence[float]
    question: str
    lead: str

    def context(self, sentences: Sequence[str], tail: str = "") -> str:
        places = [int(depth * len(sentences)) for depth in self.depths]
        parts = [self.preface + "\n\n"]
        done = 0
        for fact, place in zip(self.facts, places, strict=True):
            parts += [sentence + " " for sentence in sentences[done:place]]
            parts.append(fact + " ")
            done = place
        parts += [sentence + " " for sentence in sentences[done:]]
        return "".join(parts).rstrip(" ") + tail


class Builder:
    """Puts haystacks together until they have exactly `length` tokens."""

    def __init__(
        self,
        tokenizer: Any,
        length: int,
        filler: str | Sequence[str],
        template: Template | None,
        generator: np.random.Generator,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"{type(tokenizer).__name__} does not say where in the text its tokens stand; a fast tokenizer does (AutoTokenizer"
                " gives one for nearly every model)"
            )
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        self.special = frozenset(special_tokens(tokenizer).values())
        self.tokenizer, self.length, self.filler, self.template = tokenizer, length, filler, template
        self.generator = generator

    def text(self, haystack: Haystack, sentences: Sequence[str] = (), tail: str = "") -> str:
        asked = f"{haystack.context(sentences, tail)}\n\n{haystack.question}"
        if self.template is None:
            return f"{asked} {haystack.lead}"
        return self.template(asked) + haystack.lead

    def length_of(self, haystack: Haystack, sentences: Sequence[str] = (), tail: str = "") -> int:
        return len(encoded(self.tokenizer, self.text(haystack, sentences, tail))["input_ids"])

    def build(self, haystack: Haystack, asked: Sequence[int], avoid: Sequence[str]) -> tuple[str, dict[str, Any]]:
        """The prompt, and what is known of it."""
        frame = self.length_of(haystack)
        if frame > self.length:
            raise ValueError(
                f"a prompt of {self.length} tokens cannot hold the question and {len(haystack.facts)} facts, which take {frame} tokens"
            )
        sentences = self._sentences(self.length - frame + 64, avoid)
        whole = self._whole_sentences(haystack, sentences, frame)
        prompt = self._exact(haystack, sentences, whole)
        return prompt, self._known(prompt, haystack, asked)

    def _sentences(self, tokens: int, avoid: Sequence[str]) -> list[str]:
        """Sentences of the filler of together at least `tokens` tokens, without those that give an answer away."""
        forbidden = {*avoid, *self.special}
        found: list[str] = []
        total = 0
        for tried, sentence in enumerate(sentences_of(self.filler, self.generator)):
            if tried > 10_000 and not found:
                break
            if any(word in sentence for word in forbidden):
                continue
            found.append(sentence)
            total += len(self.tokenizer(" " + sentence, add_special_tokens=False, verbose=False)["input_ids"])
            if total >= tokens:
                return found
        raise ValueError(
            f"the filler ends after {total} of the {tokens} tokens that are needed; take another or a shorter length"
        )

    def _whole_sentences(self, haystack: Haystack, sentences: Sequence[str], frame: int) -> int:
        """How many sentences fit."""
        low, high = 0, len(sentences)
        while low < high:  # the largest count that is not over
            middle = (low + high + 1) // 2
            if self.length_of(haystack, sentences[:middle]) <= self.length:
                low = middle
            else:
                high = middle - 1
        return low

    def _exact(self, haystack: Haystack, sentences: Sequence[str], whole: int) -> str:
        """Fill what is left with words of the next sentence, and then with the shortest of strings."""
        words = [word for sentence in sentences[whole : whole + 2] for word in sentence.split()]
        for fewer in range(min(whole, 3) + 1):
            kept = sentences[: whole - fewer]
            options = range(len(words), -1, -1) if fewer == 0 else [0]
            for count in options:
                tail = "".join(" " + word for word in words[:count])
                missing = self.length - self.length_of(haystack, kept, tail)
                if missing < 0:
                    continue
                padded = self._padded(haystack, kept, tail, missing)
                if padded is not None:
                    return padded
        raise ValueError(
            f"no filling of exactly {self.length} tokens was found for this tokenizer; take a length beside it"
        )

    def _padded(self, haystack: Haystack, sentences: Sequence[str], tail: str, missing: int) -> str | None:
        while missing:
            for pad in PADS:
                left = self.length - self.length_of(haystack, sentences, tail + pad)
                if 0 <= left < missing:
                    tail, missing = tail + pad, left
                    break
            else:
                return None
        return self.text(haystack, sentences, tail)

    def _known(self, prompt: str, haystack: Haystack, asked: Sequence[int]) -> dict[str, Any]:
        encoding = encoded(self.tokenizer, prompt)
        ids, offsets = list(encoding["input_ids"]), encoding["offset_mapping"]
        spans, place = [], 0
        for fact in haystack.facts:
            begin = prompt.index(fact, place)
            place = begin + len(fact)
            spans.append(token_span(offsets, begin, place))
        question = token_span(offsets, prompt.index(haystack.question, place), len(prompt))[0]
        return {
            "ids": ids,
            "needles": [spans[i] for i in sorted(asked)],
            "others": [span for i, span in enumerate(spans) if i not in set(asked)],
            "question": question,
            "depths": [haystack.depths[i] for i in sorted(asked)],
        }


def encoded(tokenizer: Any, text: str) -> Any:
    """Tokens of a prompt and where they stand, with the special tokens that the tokenizer adds, but never two that begin a text."""
    begins = tokenizer.bos_token
    return tokenizer(
        text,
        add_special_tokens=not (begins and text.startswith(begins)),
        return_offsets_mapping=True,
        verbose=False,
    )


def token_span(offsets: Sequence[tuple[int, int]], begin: int, end: int) -> tuple[int, int]:
    """First token that touches the characters ``begin:end``, and the one after the last."""
    touching = [i for i, (start, stop) in enumerate(offsets) if stop > begin and start < end and stop > start]
    return touching[0], touching[-1] + 1


def sentences_of(filler: str | Sequence[str], generator: np.random.Generator) -> Iterator[str]:
    """Sentences of the filler, documents in random order; without end for ``"noise"``."""
    if isinstance(filler, str) and filler == "noise":
        sentences = [part + "." for part in NOISE.removesuffix(".").split(". ")]
        yield from itertools.islice(itertools.cycle(sentences), int(generator.integers(len(sentences))), None)
    texts = texts_of(filler)
    for place in generator.permutation(len(texts)):
        for sentence in re.split(r"(?<=[.!?])\s+", texts[place]):
            if sentence.strip():
                yield " ".join(sentence.split())
