"""How strong a model's prior on demonstrations is: the probabilities it gives their tokens before any training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cameraready.posttraining._logprobs import IGNORED
from cameraready.posttraining.sft_objectives.objective import ProbabilityObjective
from cameraready.posttraining.sft_objectives.scoring import label_logprobs

#: What the shares of gradient are told of unless others are asked for.
OBJECTIVES = {
    "nll": ProbabilityObjective("nll"),
    "alpha=1": ProbabilityObjective(alpha=1.0),
    "alpha=10": ProbabilityObjective(alpha=10.0),
}


@dataclass(frozen=True, eq=False)
class PriorStrength:
    """The probabilities that a model gives the demonstrated tokens, in summary.

    Attributes
    ----------
    mean, median : float
        Of p over tokens.
    below, above : float
        Shares of tokens with p below 0.1 and above 0.9.
    percentiles : ndarray of shape (101,)
        Of p, from the least to the largest.
    tokens, demonstrations : int
    gradient_mass : mapping of str to ndarray of shape (10,)
        For each objective, the share of all gradient at the targets' logits (W_f) that comes from tokens with p in [0, 0.1), [0.1, 0.2) ...
        [0.9, 1].
    """

    mean: float
    percentiles: np.ndarray
    below: float
    above: float
    tokens: int
    demonstrations: int
    gradient_mass: Mapping[str, np.ndarray]

    def __repr__(self) -> str:
        return (
            f"PriorStrength(mean={self.mean:.3g}, median={self.median:.3g}, below={self.below:.3g}, above={self.above:.3g}, "
            f"tokens={self.tokens}, demonstrations={self.demonstrations})"
        )

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    @property
    def deciles(self) -> np.ndarray:
        """The nine deciles of p."""
        return self.percentiles[10:100:10]

    def quantile(self, share: float) -> float:
        """The p that this share of tokens stays below, to a percentile: ``threshold=prior.quantile(0.9)`` trains on the top tenth at first."""
        if not 0 <= share <= 1:
            raise ValueError(f"share must be from 0 to 1, got {share}")
        return float(np.interp(100 * share, np.arange(101), self.percentiles))

    @classmethod
    def of_logprobs(
        cls,
        logps: Tensor | np.ndarray | Sequence[float],
        *,
        demonstrations: int = 0,
        objectives: Mapping[str, ProbabilityObjective] = OBJECTIVES,
    ) -> PriorStrength:
        """The summary of log-probabilities of demonstrated tokens, in nats, any shape.

        Raises
        ------
        ValueError
            There are none, or one is NaN or above 0.
        """
        values = np.asarray(torch.as_tensor(logps).detach().cpu().double().numpy()).ravel()
        if not values.size:
            raise ValueError("the demonstrations have no tokens to learn: every completion is empty or cut off")
        if not (values <= 1e-6).all():
            raise ValueError("log-probabilities must be at most 0 and not NaN; does the model give NaN logits?")
        p = np.exp(values)
        bins = np.minimum((p * 10).astype(int), 9)
        mass = {}
        for name, objective in objectives.items():
            weights = objective.gradient_weight(torch.from_numpy(p)).numpy()
            total = weights.sum()
            shares = np.bincount(bins, weights, minlength=10) / total if total > 0 else np.full(10, np.nan)
            mass[name] = shares
        return cls(
            float(p.mean()),
            np.percentile(p, np.arange(101)),
            float((p < 0.1).mean()),
            float((p > 0.9).mean()),
            int(p.size),
            demonstrations,
            mass,
        )


def prior_strength(
    model: nn.Module,
    tokenizer: Any,
    dataset: Iterable[Any],
    *,
    limit: int | None = 256,
    max_length: int = 1024,
    batch_size: int = 8,
    objectives: Mapping[str, ProbabilityObjective] = OBJECTIVES,
) -> PriorStrength:
    """How strong the prior of `model` on `dataset` is: its probabilities of the completions' tokens, prompts left out.

    Measure it before training, on the demonstrations that will be trained on, with the model that will be trained, then ask `recommend`. Only
    completions count, as where TRL trains on them alone (``assistant_only_loss``, or prompts with completions); of ``messages``, that is the last.
    A forward pass over the demonstrations; the logits of a batch are never all made.

    Parameters
    ----------
    model : nn.Module
        A causal language model of transformers; run in evaluation mode and left as it was.
    tokenizer : PreTrainedTokenizerBase
    dataset : iterable
        Demonstrations in TRL's forms: mappings with ``prompt`` and ``completion``, texts or lists of chat messages, or with ``messages``
        whose last is the completion, or tokenized (``input_ids`` and ``labels``); or pairs (prompt, completion) of texts. A completion of
        text ends with the tokenizer's end-of-text token, as in TRL's training.
    limit : int, optional
        The first so many are read; None reads all.
    max_length : int
        Tokens of a demonstration; the rest is cut off.
    batch_size : int
    objectives : mapping of str to ProbabilityObjective
        Whose shares of gradient are told.

    Returns
    -------
    PriorStrength

    Raises
    ------
    ValueError
        A demonstration has another form (which one is said), or there are no completion tokens.
    TypeError
        `model` is a name and no model, or `dataset` a name, or several splits.
    """
    _check_given(model, dataset)
    for name, value in {
        "limit": 1 if limit is None else limit,
        "max_length": max_length,
        "batch_size": batch_size,
    }.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    for name, objective in objectives.items():
        if objective.needs_logits:
            raise ValueError(
                f"objective {name!r} is no function of a token's probability alone, so its gradient has no weight"
            )
    encoded = []
    for place, row in enumerate(dataset):
        if limit is not None and place >= limit:
            break
        ids, labels = demonstration(tokenizer, row, place)
        encoded.append((ids[:max_length], labels[:max_length]))
    if not encoded:
        raise ValueError("the dataset is empty; there must be one demonstration at least")
    found = [logps.cpu() for logps in _scored(model, tokenizer, encoded, batch_size)]
    return PriorStrength.of_logprobs(
        torch.cat(found) if found else torch.empty(0), demonstrations=len(encoded), objectives=objectives
    )


def _check_given(model: Any, dataset: Any) -> None:
    if not isinstance(model, nn.Module):
        how = f": load it first, AutoModelForCausalLM.from_pretrained({model!r})" if isinstance(model, str) else ""
        raise TypeError(f"model must be a language model of transformers, not a {type(model).__name__}{how}")
    if isinstance(dataset, str):
        raise TypeError(f"dataset must hold the demonstrations themselves, not the text {dataset[:60]!r}")
    if isinstance(dataset, Mapping):
        names = [str(name) for name in dataset]
        first = f", dataset[{names[0]!r}] for instance" if names else ""
        raise TypeError(
            f"dataset is a {type(dataset).__name__} of {', '.join(names) or 'nothing'}; give the demonstrations of one split{first}, or a list "
            "of mappings, one for each demonstration"
        )


def demonstration(tokenizer: Any, row: Any, place: int = 0) -> tuple[list[int], list[int]]:
    """Token ids of a demonstration and its labels, -100 on the prompt; `row` in one of the forms of `prior_strength`."""
    if isinstance(row, (tuple, list)) and len(row) == 2 and all(isinstance(part, str) for part in row):
        row = {"prompt": row[0], "completion": row[1]}
    if not isinstance(row, Mapping):
        raise ValueError(
            f"demonstration {place + 1} is {type(row).__name__}; expected a mapping or a pair (prompt, completion)"
        )
    if "input_ids" in row and "labels" in row:
        ids, labels = ([int(i) for i in row[name]] for name in ("input_ids", "labels"))
        if len(ids) != len(labels):
            raise ValueError(
                f"demonstration {place + 1} has {len(ids)} input_ids and {len(labels)} labels; there must be one for each"
            )
        return ids, labels
    if "messages" in row and "completion" not in row:
        if len(row["messages"]) < 2:
            raise ValueError(
                f"demonstration {place + 1} has {len(row['messages'])} messages; expected a question and its answer at least"
            )
        row = {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        before = tokenizer(prompt)["input_ids"]
        whole = tokenizer(prompt + completion)["input_ids"]
        if tokenizer.eos_token_id is not None and (not whole or whole[-1] != tokenizer.eos_token_id):
            whole = [*whole, tokenizer.eos_token_id]
    elif _are_messages(prompt) and _are_messages(completion):
        before = _templated(tokenizer, list(prompt), add_generation_prompt=True)
        whole = _templated(tokenizer, [*prompt, *completion])
    else:
        raise ValueError(
            f"demonstration {place + 1} has the columns {', '.join(map(str, row)) or 'none'}; expected prompt and completion, both text or "
            "both lists of messages, or messages, or input_ids and labels"
        )
    # Where the last token of the prompt swallows the first letter of the completion, it belongs to the completion.
    shared = 0
    while shared < min(len(before), len(whole)) and before[shared] == whole[shared]:
        shared += 1
    return list(whole), [IGNORED] * shared + list(whole[shared:])


def _are_messages(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(isinstance(each, Mapping) for each in value)


def _templated(tokenizer: Any, messages: list[Any], **options: Any) -> list[int]:
    if not tokenizer.chat_template:
        raise ValueError("the demonstrations are chat messages, and the tokenizer has no chat template; give texts")
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"])


@torch.no_grad()
def _scored(
    model: nn.Module, tokenizer: Any, encoded: list[tuple[list[int], list[int]]], size: int
) -> Iterable[Tensor]:
    """Log-probabilities of each batch's labels; demonstrations of like length go together."""
    device = next(model.parameters()).device
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    order = sorted((pair for pair in encoded if len(pair[0]) > 1), key=lambda pair: -len(pair[0]))
    with evaluating(model):
        for start in range(0, len(order), size):
            inputs, labels = padded(order[start : start + size], pad, device)
            logps, mask, _ = label_logprobs(model, labels, **inputs)
            yield logps[mask]


def padded(pairs: Sequence[tuple[list[int], list[int]]], pad: int, device: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of a model and labels, (B, T) each, filled up on the right."""
    longest = max(len(ids) for ids, _ in pairs)
    rows = [(ids + [pad] * (longest - len(ids)), labels + [IGNORED] * (longest - len(ids))) for ids, labels in pairs]
    lengths = torch.tensor([len(ids) for ids, _ in pairs], device=device)
    ids, labels = (torch.tensor([row[i] for row in rows], device=device) for i in range(2))
    mask = (torch.arange(longest, device=device) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask}, labels


@contextmanager
def evaluating(model: nn.Module) -> Any:
    """The model in evaluation mode, every module as it was afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
