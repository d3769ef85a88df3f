"""One training run of the study, its arms, and how their learning rates were found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from cameraready.optim.depth_smoothing import DepthSmoothing, smooth_updates, smoothing_matrix
from cameraready.optim.depth_smoothing.blocks import groups_from, slots
from cameraready.optim.depth_smoothing.workloads import SHIPPED, Task

ALPHA = 0.2
TUNING_SEEDS = (1_000, 1_001, 1_002)

#: An arm: the base optimizer and the model give the optimizer that is stepped.
Arm = Callable[[optim.Optimizer, nn.Module], optim.Optimizer]


def arms(task: Task, seed: int = 0) -> dict[str, Arm]:
    """The optimizers that are compared; `seed` is that of the shuffled order."""

    def smoothed(alpha: float = ALPHA, **options: Any) -> Arm:
        def wrap(base: optim.Optimizer, model: nn.Module) -> optim.Optimizer:
            # The embeddings' optimizer, say, has no blocks to smooth.
            held = factors(task, model).keys() & {id(p) for group in base.param_groups for p in group["params"]}
            return DepthSmoothing(base, task.blocks(model), alpha=alpha, **options) if held else base

        return wrap

    def shortened(base: optim.Optimizer, model: nn.Module) -> optim.Optimizer:
        """Rates of the blocks cut by what smoothing makes of uncorrelated updates; decay stays as it was."""
        by_tensor = factors(task, model)
        for group in list(base.param_groups):
            for factor in sorted({by_tensor.get(id(p), 1.0) for p in group["params"]} - {1.0}):
                cut = [p for p in group["params"] if by_tensor.get(id(p), 1.0) == factor]
                group["params"] = [p for p in group["params"] if by_tensor.get(id(p), 1.0) != factor]
                decay = group.get("weight_decay", 0.0) / factor
                base.add_param_group({**group, "params": cut, "lr": group["lr"] * factor, "weight_decay": decay})
        return base

    return {
        "base": lambda base, model: base,
        "smooth": smoothed(),
        "shuffled": smoothed(kernel="shuffled", seed=seed),
        "average": smoothed(kernel="average"),
        "laplacian": smoothed(kernel="laplacian"),
        "before": smoothed(normalize="normalize_before"),
        "unnormalised": smoothed(normalize="none"),
        "lr-cut": shortened,
        "smooth-0.1": smoothed(0.1),
        "smooth-0.4": smoothed(0.4),
    }


def factors(task: Task, model: nn.Module) -> dict[int, float]:
    """By the id of each smoothed tensor: how long its update becomes without norm control, if neighbours are uncorrelated and as long."""
    found = {}
    for slot in slots(groups_from(task.blocks(model))):
        lengths = smoothing_matrix(len(slot.tensors), ALPHA).norm(dim=1).tolist()
        found.update({id(tensor): round(length, 9) for tensor, length in zip(slot.tensors, lengths, strict=True)})
    return found


#: Strength of the arms that one may put on an axis.
STRENGTH = {"base": 0.0, "smooth-0.1": 0.1, "smooth": ALPHA, "smooth-0.4": 0.4, "shuffled": ALPHA, "average": ALPHA}

#: Which of them run on which task; a task of the user's gets those of its last line.
COMPARED: dict[str, tuple[str, ...]] = {
    "text-adamw": ("base", "smooth", "shuffled", "average", "unnormalised", "lr-cut"),
    "text-muon": ("base", "smooth", "shuffled", "average"),
    "digits-vit": ("base", "smooth", "shuffled", "average"),
    "digits-mlp": (
        "base", "smooth", "shuffled", "average", "unnormalised", "lr-cut", "laplacian", "before", "smooth-0.1", "smooth-0.4",
    ),
    "text-large": ("base", "smooth", "shuffled", "average", "unnormalised", "lr-cut", "laplacian", "before"),
    "own": ("base", "smooth", "shuffled", "average", "unnormalised", "lr-cut"),
}  # fmt: skip

#: These run at the base's learning rate: the question is what they change there.
AT_THE_RATE_OF_BASE = ("unnormalised", "lr-cut")

#: Learning rates by task and arm: the best of the task's on seeds that the study does not use, one for Muon and the ViT, three for the others.
#: Made by ``python -m cameraready.optim.depth_smoothing.training``.
TUNED: dict[str, dict[str, float]] = {
    "text-adamw": dict.fromkeys(("base", "smooth", "shuffled", "average"), 0.016),
    "text-muon": dict.fromkeys(("base", "smooth", "shuffled", "average"), 0.08),
    "digits-vit": {"base": 0.003, "smooth": 0.003, "shuffled": 0.012, "average": 0.012},
    "digits-mlp": dict.fromkeys(
        ("base", "smooth", "shuffled", "average", "laplacian", "before", "smooth-0.1", "smooth-0.4"), 0.008
    ),
}


def rate_of(task: Task, name: str, arm: Arm, found: dict[tuple[str, str], float]) -> float:
    """The arm's learning rate: from the table, or tuned now and kept in `found` (user's tasks and arms)."""
    known = TUNED.get(task.name, {})
    name = "base" if name in AT_THE_RATE_OF_BASE else name
    if name in known:
        return known[name]
    if len(task.rates) == 1:
        return task.rates[0]
    if (task.name, name) not in found:
        arm = arms(task)["base"] if name == "base" else arm
        found[task.name, name] = tuned(task, arm)
    return found[task.name, name]


def tuned(task: Task, arm: Arm, seeds: Sequence[int] = TUNING_SEEDS[:1]) -> float:
    """The one of the task's rates with the lowest mean validation loss over seeds that the study does not use."""
    losses = {rate: sum(train(task, arm, rate, seed)["loss"] for seed in seeds) for rate in task.rates}
    usable = {rate: loss for rate, loss in losses.items() if loss == loss}
    if not usable:
        raise ValueError(f"the loss is not a number at any of the learning rates {list(task.rates)}")
    return min(usable, key=lambda rate: usable[rate])


def train(
    task: Task, arm: Arm, rate: float, seed: int, *, steps: int = 0, device: str = "cpu", probe: bool = False
) -> dict[str, float]:
    """Train once and report on the validation batches.

    Rates rise over a tenth of the steps and then fall linearly to zero. With `probe`, a tenth into the run the base's own update is compared
    with what smoothing would make of it.
    """
    steps = steps or task.steps
    row: dict[str, float] = {"learning_rate": rate}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = task.model(seed).to(device)
        optimizers = [arm(base, model) for base in task.optimizers(model, rate)]
        warmup = max(1, steps // 10)
        schedules = [
            optim.lr_scheduler.LambdaLR(
                o, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
            )
            for o in optimizers
        ]
        model.train()
        for step, batch in zip(range(steps), task.batches(seed), strict=False):
            for optimizer in optimizers:
                optimizer.zero_grad()
            task.loss(model, moved(batch, device)).backward()
            watched = Updates(task, model) if probe and step == warmup else None
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
            if watched is not None:
                row["length"] = watched.length()
        model.eval()
        with torch.no_grad():
            held_out = [moved(batch, device) for batch in task.validation]
            row["loss"] = mean([task.loss(model, batch) for batch in held_out])
            if task.errors is not None:
                row["error"] = mean([task.errors(model, batch) for batch in held_out])
            cosine = residual_cosine(task, model, held_out[0])
            if cosine is not None:
                row["cosine"] = cosine
    return row


def mean(values: list[Tensor]) -> float:
    return float(torch.stack(values).mean())


def moved(batch: Any, device: str) -> Any:
    """A batch on the device: tensors, and tuples, lists and mappings of them."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        values = [moved(value, device) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def residual_cosine(task: Task, model: nn.Module, batch: Any) -> float | None:
    """Cosine of what neighbouring blocks add to the residual stream, mean over positions and depth (Meng et al., 2026, arXiv:2606.30813).

    None where blocks do not map one tensor to one of the same shape.
    """
    group = groups_from(task.blocks(model))[0]
    added: list[Tensor | None] = []

    def keep(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        out = output if isinstance(output, Tensor) else output[0]
        fits = bool(inputs) and isinstance(out, Tensor) and out.shape == inputs[0].shape
        added.append((out - inputs[0]).detach() if fits else None)

    hooks = [block.register_forward_hook(keep, with_kwargs=True) for block in group.blocks]
    try:
        task.loss(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    if len(added) < 2 or any(update is None for update in added):
        return None
    return mean([F.cosine_similarity(a, b, dim=-1).mean() for a, b in pairwise(added)])  # type: ignore[arg-type]


class Updates:
    """What the base does to the blocks in the step that comes, to be compared with its smoothed form."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        self.slots = slots(groups_from(task.blocks(model)))
        self.before = [[tensor.detach().clone() for tensor in slot.tensors] for slot in self.slots]

    def length(self) -> float:
        """Length of smoothed updates over that which uncorrelated ones would have, geometric mean over the matrices."""
        logs = []
        for slot, old in zip(self.slots, self.before, strict=True):
            if slot.tensors[0].ndim < 2:
                continue
            updates = [tensor.detach() - was for tensor, was in zip(slot.tensors, old, strict=True)]
            mixed = torch.stack([row for (row,) in smooth_updates([[u] for u in updates], ALPHA)])  # type: ignore[misc]
            own = torch.stack([update.norm() for update in updates])
            expected = (smoothing_matrix(len(own), ALPHA, dtype=own.dtype).square() @ own.square()).sqrt()
            logs.append((mixed.flatten(1).norm(dim=1) / expected).log())
        return float(torch.cat(logs).mean().exp())


if __name__ == "__main__":
    import sys

    torch.set_num_threads(1)
    for task_name in sys.argv[1:] or TUNED:
        the_task = SHIPPED[task_name]()
        seeds = TUNING_SEEDS[: 1 if task_name in ("text-muon", "digits-vit") else 3]
        best = {n: tuned(the_task, a, seeds) for n, a in arms(the_task).items() if n in TUNED[task_name]}
        print(f"    {task_name!r}: {best!r},", flush=True)
