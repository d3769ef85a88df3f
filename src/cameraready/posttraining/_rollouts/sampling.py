"""Draws continuations from a language model's own distribution, a batch of rows at a time, each row with random numbers of its own."""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cameraready.models import LanguageModel, ModelError
from cameraready.models._loading import context_of
from cameraready.posttraining._logprobs import at_rest, positions_of, takes

#: What models call their keys and values, or their state; transformers 5.24 made it one name.
_CACHES = ("cache", "past_key_values", "cache_params")


@dataclass(frozen=True, eq=False)
class Drawn:
    """One continuation: its tokens (an end token included), their log-probabilities, and whether an end token ended it."""

    ids: Tensor
    logps: Tensor
    finished: bool


class Sampler:
    """A language model made ready to continue rows of tokens; `draw` leaves it as it was.

    Draws come from softmax(logits / temperature) of the model alone: penalties and cuts of its generation configuration are not applied.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, *, temperature: float, top_p: float, batch: int) -> None:
        if not isinstance(model, nn.Module) or not callable(tokenizer):
            raise TypeError(
                f"a model and its tokenizer were expected, got {type(model).__name__} and {type(tokenizer).__name__}"
            )
        if not 0 < temperature < float("inf"):
            raise ValueError(f"temperature must be above 0, got {temperature}")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
        if batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}")
        while not hasattr(model, "get_input_embeddings") and isinstance(getattr(model, "module", None), nn.Module):
            model = model.module  # data parallelism has nothing to do where nothing is trained
        self.model, self.tokenizer = model, tokenizer
        self.lm = LanguageModel(model, tokenizer, type(model).__name__, "value")
        self.temperature, self.top_p, self.batch = float(temperature), float(top_p), batch
        self.context = context_of(model.config)
        self.ends = self._end_tokens()
        self._cache = next((name for name in _CACHES if takes(model, name)), "")
        if not self._cache or getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError(
                f"{type(model).__name__} cannot be read a token at a time: it takes no cache, or has tokens of its own in front "
                "(prompt tuning); sample it by its own generate"
            )
        self._few = {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}
        self._positions = takes(model, "position_ids")

    def _end_tokens(self) -> Tensor:
        declared = [
            self.tokenizer.eos_token_id,
            getattr(getattr(self.model, "generation_config", None), "eos_token_id", None),
        ]
        ends = {int(i) for found in declared if found is not None for i in np.atleast_1d(np.asarray(found))}
        if not ends:
            warnings.warn(
                "neither tokenizer nor model declares an end token, so every completion runs to max_new_tokens; set tokenizer.eos_token "
                "if the model has one",
                stacklevel=4,
            )
        return torch.tensor(sorted(ends), dtype=torch.long, device=self.lm.device)

    def encode(self, prompt: str, place: int) -> Tensor:
        """The tokens of a prompt, shape (T,); a sentence names its place where it has none."""
        try:
            return self.lm.encode(prompt)[0]
        except (ModelError, TypeError) as error:
            raise ValueError(f"the prompt of problem {place} cannot be given to the model: {error}") from error

    def encode_further(self, text: str) -> Tensor:
        """The tokens of a text in the middle of a row, without special tokens of the tokenizer's own; shape (T,)."""
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        return torch.tensor(ids, dtype=torch.long, device=self.lm.device)

    def decode(self, ids: Tensor) -> str:
        """The text of a continuation, without special tokens."""
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    def draw(
        self, rows: Sequence[Tensor], uniforms: Sequence[np.ndarray], budgets: Sequence[int], *, shown: Shown
    ) -> list[Drawn]:
        """One continuation of each row, of at most `budgets` tokens.

        Rows that are the same object are read once for all of them. Each token is drawn by one number of `uniforms` (float64 in [0, 1),
        as many as the budget), so that a row's draws depend on no other row.
        """
        found: list[Drawn] = []
        with at_rest(self.model), torch.no_grad():
            for start in range(0, len(rows), self.batch):
                part = slice(start, start + self.batch)
                found += self._draw(rows[part], uniforms[part], budgets[part])
                shown.advance(len(rows[part]))
        return found

    def _draw(self, rows: Sequence[Tensor], uniforms: Sequence[np.ndarray], budgets: Sequence[int]) -> list[Drawn]:
        device, longest = self.lm.device, max(budgets)
        logits, cache, mask = self._read(rows)
        numbers = np.zeros((len(rows), longest))
        for row, (drawn, budget) in enumerate(zip(uniforms, budgets, strict=True)):
            numbers[row, :budget] = drawn[:budget]
        chosen, logps = [], []
        allowed = torch.tensor(budgets, device=device)
        lengths, finished = allowed.clone(), torch.zeros(len(rows), dtype=torch.bool, device=device)
        alive = torch.arange(len(rows), device=device)  # the rows that the cache still holds
        for step in range(longest):
            token, logp = self._pick(logits, numbers[alive.cpu().numpy(), step])
            chosen.append(torch.zeros(len(rows), dtype=torch.long, device=device).scatter(0, alive, token))
            logps.append(torch.zeros(len(rows), dtype=logp.dtype, device=device).scatter(0, alive, logp))
            ended = torch.isin(token, self.ends)
            lengths[alive[ended]], finished[alive[ended]] = step + 1, True
            going = ~ended & (allowed[alive] > step + 1)
            if not going.any():
                break
            if not going.all():
                kept = going.nonzero()[:, 0]
                if hasattr(cache, "reorder_cache"):
                    cache.reorder_cache(
                        kept
                    )  # selects, too; batch_select_indices leaves out the states of linear attention
                    alive, token, mask = alive[kept], token[kept], mask[kept]
            mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
            logits, cache = self._forward(token[:, None], mask, positions_of(mask)[:, -1:], cache)
        ids, scores = torch.stack(chosen, 1), torch.stack(logps, 1)
        return [
            Drawn(ids[row, :length].clone(), scores[row, :length].clone(), bool(finished[row]))
            for row, length in enumerate(lengths.tolist())
        ]

    def _read(self, rows: Sequence[Tensor]) -> tuple[Tensor, Any, Tensor]:
        """Logits behind each row, the cache of all and their mask; the same row only once."""
        places: dict[int, int] = {}
        owners = [places.setdefault(id(row), len(places)) for row in rows]
        different = [rows[owners.index(place)] for place in range(len(places))]
        repeated = len(different) < len(rows)
        ids, mask = padded_left(different, self.lm.pad_id)
        logits, cache = self._forward(ids, mask, positions_of(mask), None)
        if repeated and not hasattr(cache, "reorder_cache"):
            ids, mask = padded_left(rows, self.lm.pad_id)
            return *self._forward(ids, mask, positions_of(mask), None), mask
        if repeated:
            index = torch.tensor(owners, device=ids.device)
            cache.reorder_cache(index)
            logits, mask = logits[index], mask[index]
        return logits, cache, mask

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Logits behind each row, and the keys and values so far."""
        inputs = {"input_ids": ids, "use_cache": True, **self._few}
        if cache is not None:
            inputs[self._cache] = cache
        if cache is None or not all(getattr(cache, "is_linear", [False])):  # a state alone has left padding behind it
            inputs["attention_mask"] = mask
        if self._positions:
            inputs["position_ids"] = positions
        output = self.model(**inputs)
        cache = next((found for name in _CACHES if (found := getattr(output, name, None)) is not None), None)
        if cache is None:
            raise ValueError(f"{type(self.model).__name__} returned no keys and values, so it cannot be sampled from")
        return output.logits[:, -1], cache

    def _pick(self, logits: Tensor, numbers: np.ndarray) -> tuple[Tensor, Tensor]:
        """The token of each row where the distribution's cumulative sum passes the row's number, and its log-probability."""
        exact = torch.promote_types(logits.dtype, torch.float32)
        logps = torch.log_softmax(logits.to(exact) / self.temperature, dim=-1)
        chances = logps.exp() if self.top_p == 1 else nucleus(logps.exp(), self.top_p)
        cumulative = summed(chances)
        total = cumulative[:, -1:]
        if not bool(torch.isfinite(total).all()):
            raise ValueError(
                f"the logits of {type(self.model).__name__} are not numbers; its weights or its dtype are at fault"
            )
        wanted = torch.from_numpy(numbers).to(cumulative)[:, None] * total
        wanted = torch.minimum(wanted, torch.nextafter(total, torch.zeros_like(total)))
        token = torch.searchsorted(cumulative, wanted, right=True)
        return token[:, 0], logps.gather(-1, token)[:, 0]


def summed(chances: Tensor) -> Tensor:
    """Cumulative sums in float64, so that 150,000 words before it do not blur a small probability (in float32 on devices without)."""
    return chances.cumsum(-1, dtype=chances.dtype if chances.device.type == "mps" else torch.float64)


def nucleus(chances: Tensor, top_p: float) -> Tensor:
    """`chances` (B, V) with 0 for all but the fewest most likely tokens that have `top_p` together (Holtzman et al., 2020, arXiv:1904.09751)."""
    ordered, order = chances.sort(dim=-1, descending=True, stable=True)
    kept = summed(ordered) - ordered < top_p
    return torch.zeros_like(chances).scatter(-1, order, ordered * kept)


def padded_left(rows: Sequence[Tensor], pad: int) -> tuple[Tensor, Tensor]:
    """Rows of different lengths as (B, T) with `pad` in front, and their mask."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad, dtype=torch.long, device=rows[0].device)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, longest - len(row) :] = row
        mask[place, longest - len(row) :] = 1
    return ids, mask


def uniforms(seed: int, prompt: Tensor, occurrence: int, sample: int, attempt: int, count: int) -> np.ndarray:
    """Random numbers of one row: they depend on seed, prompt, how often it occurred before, sample and attempt, and on nothing else."""
    digest = hashlib.sha256(np.asarray(prompt.tolist(), dtype=np.int64).tobytes()).digest()
    entropy = [seed, *np.frombuffer(digest, dtype=np.uint32).tolist(), occurrence, sample, attempt]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy))).random(count)


class Shown:
    """A progress bar on standard error, if that is a terminal or `progress` says so."""

    def __init__(self, total: int, label: str, progress: bool | None) -> None:
        self._bar: Any = None
        if sys.stderr.isatty() if progress is None else progress:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True))
            self._task = self._bar.add_task(label, total=total)

    def __enter__(self) -> Shown:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        """`count` more completions are done."""
        if self._bar is not None:
            self._bar.advance(self._task, count)
