"""Short runs of adapters on a real model: low-rank ones on its last layers, everything below computed once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cameraready.models import LanguageModel, anatomy
from cameraready.posttraining._logprobs import IGNORED, positions_of, takes
from cameraready.posttraining.sft_objectives import PriorStrength, ProbabilityObjective
from cameraready.posttraining.sft_objectives.experiment.continuum import schedule
from cameraready.posttraining.sft_objectives.prior import demonstration, evaluating, padded

#: Layers that get adapters, and their rank.
LAYERS, RANK = 2, 8
BATCH = 8

Pair = tuple[list[int], list[int]]


class Tuned:
    """A model whose last layers are tuned again and again from the same start; left as it was at the end.

    Hidden states below those layers are computed once for each demonstration, since no run changes them.
    """

    def __init__(self, lm: LanguageModel, demonstrations: Sequence[tuple[str, str]]) -> None:
        self.lm = lm
        self.pairs: list[Pair] = [demonstration(lm.tokenizer, row, i) for i, row in enumerate(demonstrations)]
        parts = anatomy(lm.model)
        self.layers: list[nn.Module] = [layer.module for layer in parts.layers]
        self.first = max(0, len(self.layers) - LAYERS)
        self.states: list[Tensor] = []
        self.tuple_out = False
        self.adapted: Any = None

    @contextmanager
    def opened(self) -> Iterator[Tuned]:
        """Adapters are put in, and taken out again with all else that was changed."""
        from peft import LoraConfig, get_peft_model

        model = self.lm.model
        flags = {name: p.requires_grad for name, p in model.named_parameters()}
        inside = {id(module) for layer in self.layers[self.first :] for module in layer.modules()}
        linear = (nn.Linear, _conv1d())
        names = [name for name, m in model.named_modules() if id(m) in inside and isinstance(m, linear)]
        with evaluating(model):
            self.states = self._cached()
            config = LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules=names)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
                self.adapted = get_peft_model(model, config)
            try:
                yield self
            finally:
                self.adapted.unload()
                if hasattr(model, "peft_config"):
                    del model.peft_config
                self.adapted, self.states = None, []
                for name, p in model.named_parameters():
                    p.requires_grad_(flags[name])

    @torch.no_grad()
    def _cached(self) -> list[Tensor]:
        """What goes into the first tuned layer, (T, hidden) for each demonstration."""
        found: list[Tensor] = []

        def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(args[0] if args else kwargs["hidden_states"])

        def look(_module: nn.Module, _args: Any, output: Any) -> None:
            self.tuple_out = isinstance(output, tuple)

        layer = self.layers[self.first]
        handles = [layer.register_forward_pre_hook(keep, with_kwargs=True), layer.register_forward_hook(look)]
        order = sorted(range(len(self.pairs)), key=lambda place: len(self.pairs[place][0]))
        states: dict[int, Tensor] = {}
        try:
            for start in range(0, len(order), BATCH):
                places = order[start : start + BATCH]
                inputs, _ = padded([self.pairs[place] for place in places], self.lm.pad_id, self.lm.device)
                found.clear()
                self._body(inputs)
                for row, place in enumerate(places):
                    states[place] = found[0][row, : len(self.pairs[place][0])].clone()
        finally:
            for handle in handles:
                handle.remove()
        return [states[place] for place in range(len(self.pairs))]

    def _body(self, inputs: dict[str, Tensor]) -> Tensor:
        """Final hidden states, normed, (B, T, hidden)."""
        decoder = anatomy(self.lm.model).decoder
        given: dict[str, Any] = {**inputs, "use_cache": False}
        if takes(self.lm.model, "position_ids"):
            given["position_ids"] = positions_of(inputs["attention_mask"])
        return decoder(**given).last_hidden_state

    def _hidden(self, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Final hidden states before each label of a batch, (n, hidden), and the labels (n,)."""
        inputs, labels = padded([self.pairs[place] for place in places], self.lm.pad_id, self.lm.device)
        with self._from(places, inputs["input_ids"].shape[1]):
            hidden = self._body(inputs)
        mask = labels[:, 1:] != IGNORED
        return hidden[:, :-1][mask], labels[:, 1:][mask]

    @contextmanager
    def _from(self, places: Sequence[int], length: int) -> Iterator[None]:
        """Layers below the tuned ones pass on what they get, and the first tuned one gets the cached states."""
        below = torch.stack(
            [nn.functional.pad(self.states[place], (0, 0, 0, length - len(self.states[place]))) for place in places]
        )

        def passed(hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Any:
            return (hidden_states,) if self.tuple_out else hidden_states

        def given(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return ((below, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": below})

        handle = self.layers[self.first].register_forward_pre_hook(given, with_kwargs=True)
        lower = self.layers[: self.first]
        for layer in lower:
            layer.forward = passed  # type: ignore[method-assign]
        try:
            yield
        finally:
            handle.remove()
            for layer in lower:
                del layer.forward

    def reset(self, seed: int) -> list[nn.Parameter]:
        """The adapters as new; the parameters to train."""
        generator = torch.Generator().manual_seed(seed)
        found = []
        for name, p in self.adapted.named_parameters():
            if not p.requires_grad:
                continue
            with torch.no_grad():
                if "lora_A" in name:
                    bound = p.shape[-1] ** -0.5
                    p.copy_(bound * (2 * torch.rand(p.shape, generator=generator) - 1))
                else:
                    p.zero_()
            found.append(p)
        return found

    def train(
        self, objective: ProbabilityObjective, places: Sequence[int], *, rate: float, seed: int
    ) -> dict[str, float]:
        """One epoch over `places` in this order, from new adapters; the norm of the first step's gradient and the share of tokens kept."""
        parameters = self.reset(seed)
        optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
        steps = -(-len(places) // BATCH)
        objective.stats.reset()
        first = 0.0
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule(step, steps)
            logps, means = self._label_logps(places[step * BATCH : (step + 1) * BATCH], objective.needs_logits)
            loss = objective.of_logprobs(logps[None], torch.ones_like(logps, dtype=torch.bool)[None], mean_logps=means)
            loss.backward()
            norm = float(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
            first = norm if step == 0 else first
            optimizer.step()
            optimizer.zero_grad()
        return {"norm": first, "kept": objective.stats.summary()["kept_fraction"]}

    def _label_logps(self, places: Sequence[int], means: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the labels, (n,), and where asked for the means over the vocabulary there, (1, n)."""
        hidden, labels = self._hidden(places)
        logps = anatomy(self.lm.model).logits(hidden, normed=True).float().log_softmax(-1)
        return logps.gather(-1, labels[:, None])[:, 0], logps.mean(-1)[None] if means else None

    @torch.no_grad()
    def judge(self, places: Sequence[int]) -> dict[str, float]:
        """On held-out demonstrations: ``nll`` in nats a token, ``accuracy``, the mean probability of writing exactly the answer at temperature
        1, and ``exact``, the share of answers of which every token is the likeliest, so that greedy decoding writes them exactly."""
        total, tokens, written, exact = 0.0, 0, 0.0, 0
        for start in range(0, len(places), BATCH):
            batch = places[start : start + BATCH]
            hidden, labels = self._hidden(batch)
            logps = anatomy(self.lm.model).logits(hidden, normed=True).float().log_softmax(-1)
            right = logps.argmax(-1) == labels
            chosen = logps.gather(-1, labels[:, None])[:, 0]
            sizes = [sum(label != IGNORED for label in self.pairs[place][1][1:]) for place in batch]
            written += sum(float(part.double().sum().exp()) for part in chosen.split(sizes))
            exact += sum(bool(part.all()) for part in right.split(sizes))
            total -= float(chosen.double().sum())
            tokens += len(labels)
        return {"nll_held_out": total / tokens, "accuracy": written / len(places), "exact": exact / len(places)}

    @torch.no_grad()
    def prior(self, places: Sequence[int]) -> PriorStrength:
        """Of the untrained model on these demonstrations, as `prior_strength` measures it."""
        self.reset(0)
        found = [self._label_logps(places[start : start + BATCH])[0] for start in range(0, len(places), BATCH)]
        return PriorStrength.of_logprobs(torch.cat(found), demonstrations=len(places))


def _conv1d() -> type[nn.Module]:
    from transformers.pytorch_utils import Conv1D

    return Conv1D
