"""Paced selection on the user's own language model: does it find more groups that teach, and does its estimate know which?"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from cameraready.posttraining.paced.embedding import prompt_embeddings

#: `PacedSettings` of each arm.
ARMS: Mapping[str, Mapping[str, Any]] = {
    "paced": {"replay": 4},
    "selection": {},
    "uniform": {"selection": "uniform"},
    "grpo-selection": {"loss": "trl"},
    "grpo": {"selection": "uniform", "loss": "trl"},
}


@dataclass(frozen=True)
class Scale:
    """How much is run on a model: `small` ones are random and only prove that it runs."""

    pool: int = 64
    test: int = 16
    steps: int = 24
    prompts: int = 4
    group: int = 8
    new_tokens: int = 48
    lora_rank: int = 8
    judged: int = 16


SMALL = Scale(pool=8, test=2, steps=2, prompts=2, group=2, new_tokens=4, lora_rank=0, judged=4)


def train(workload: Any, *, arm: str, number: int, device: str, dtype: str) -> Iterator[dict[str, Any]]:
    """A row: rewards, groups with spread, held-out accuracy, the estimate against measured accuracies, and what it cost."""
    from cameraready.posttraining._rollouts import sample_groups
    from cameraready.posttraining._runs import grpo_run
    from cameraready.posttraining.paced import PacedGRPOTrainer, PacedSettings

    scale, lm = _scale(workload), workload.model(device, dtype or None)
    pool, test = _split(workload, lm, scale, number)
    began = time.perf_counter()
    embeddings = prompt_embeddings(lm.model, [lm.tokenizer(problem.prompt)["input_ids"] for problem in pool])
    embed_seconds = time.perf_counter() - began
    made: list[Any] = []

    def trainer(model: Any, tokenizer: Any, args: Any, dataset: Any, reward_funcs: Any) -> Any:
        chosen = PacedSettings(hidden=64, **ARMS[arm])
        made.append(
            PacedGRPOTrainer(
                model,
                reward_funcs,
                args=args,
                train_dataset=dataset,
                processing_class=tokenizer,
                settings=chosen,
                embeddings=embeddings,
            )
        )
        return made[0]

    def measured(problems: Sequence[Any], model: Any, tokenizer: Any) -> np.ndarray:
        groups = sample_groups(
            model, tokenizer, problems, n=scale.group, max_new_tokens=scale.new_tokens, seed=number, progress=False
        )
        return np.array([float(group.correct.float().mean()) for group in groups])

    def judged(trained: Any) -> dict[str, float]:
        some = list(np.random.default_rng([number, 5]).permutation(len(pool))[: scale.judged])
        truth = measured([pool[place] for place in some], trained.model, trained.tokenizer)
        estimate = made[0].head.accuracy(torch.tensor(some), clip=False).cpu().numpy()
        began = time.perf_counter()
        made[0].head.accuracy()
        found = {"estimate_seconds": time.perf_counter() - began, "mae": float(np.abs(estimate - truth).mean())}
        # Rewards as often as that have no ranks: the column is left out then.
        if np.ptp(estimate) > 0 and np.ptp(truth) > 0:
            found["spearman"] = float(spearmanr(estimate, truth).statistic)
        found["mae_constant"] = float(np.abs(truth - truth.mean()).mean())
        return {**found, "accuracy": float(measured(test, trained.model, trained.tokenizer).mean())}

    rows = grpo_run(
        lm, pool, trainer=trainer, steps=scale.steps, prompts=scale.prompts, group=scale.group, max_new_tokens=scale.new_tokens,
        lora_rank=scale.lora_rank, seed=number, after=judged, progress=False,
    )  # fmt: skip
    last = rows[-1]
    step_seconds = float(np.median([row["seconds"] for row in rows]))
    yield {
        "run": number,
        "kind": "summary",
        "reward": float(np.mean([row["reward"] for row in rows])),
        "spread": float(np.mean([1 - row["zero_spread"] for row in rows])),
        **{name: last[name] for name in ("mae", "mae_constant", "spearman", "accuracy") if name in last},
        "embed_seconds": embed_seconds,
        "step_seconds": step_seconds,
        "estimate_share": last["estimate_seconds"] / step_seconds,
        "drawn": float(scale.steps * scale.prompts * scale.group),
    }
    for row in rows:
        yield {
            "run": number,
            "kind": "course",
            "after": float(row["step"] * scale.prompts * scale.group),
            "reward_now": row["reward"],
            "mixed_now": 1 - row["zero_spread"],
        }


def _scale(workload: Any) -> Scale:
    return SMALL if workload.is_tiny else Scale()


def _few(workload: Any, scale: Scale) -> tuple[int, int] | None:
    """Pool and held-out problems of the user's prompts, a fifth of few ones held out; None where problems are generated."""
    if workload.prompts is None or workload.tasks != ("own",):
        return None
    different = len({prompt for prompt, _ in workload.prompts})
    test = min(scale.test, different // 5)
    return min(scale.pool, different - test), test


def check_pool(workload: Any) -> None:
    """Raise a SpecError where the user's prompts are too few to select from."""
    from cameraready.evidence import SpecError

    scale = _scale(workload)
    sizes = _few(workload, scale)
    if sizes is not None and (sizes[0] < 2 * scale.prompts or not sizes[1]):
        different = len({prompt for prompt, _ in workload.prompts})
        raise SpecError(
            f"{different} different prompts are too few: selection needs a pool of at least {2 * scale.prompts}, and a fifth of the prompts is held out to judge by"
        )


def _split(workload: Any, lm: Any, scale: Scale, number: int) -> tuple[list[Any], list[Any]]:
    pool, test = _few(workload, scale) or (scale.pool, scale.test)
    return workload.split(lm, train=pool, test=test, seed=number)
