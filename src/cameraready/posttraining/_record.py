"""What a run of reinforcement learning writes down after each step, and how it is taken up again where it broke off."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

#: Columns of TRL's log, by the name they have in a row. What is told once a batch of completions holds until the next one.
_LOGGED = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "entropy": "entropy",
    "clip_ratio/low_mean": "clip_low",
    "clip_ratio/high_mean": "clip_high",
    "kl": "kl_reference",
}
_OF_BATCH = {
    "completions/mean_length": "tokens",
    "completions/clipped_ratio": "cut",
    "reward": "reward",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "zero_spread",
}
_BATCH = (*_OF_BATCH.values(), "all_right", "all_wrong")


class Book:
    """The rows of a run, in memory and in a folder beside the checkpoints.

    Parameters
    ----------
    folder : Path
    told : dict
        What makes this run the one it is; JSON values.
    steps : int

    Raises
    ------
    ValueError
        The folder holds another run, or is a file.
    """

    def __init__(self, folder: Path, told: dict[str, Any], steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.rows: list[dict[str, Any]] = []
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file; a run needs a folder")
        folder.mkdir(parents=True, exist_ok=True)
        mark = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()
        known = folder / "run.txt"
        if known.exists() and known.read_text(encoding="utf-8").strip() != mark:
            raise ValueError(f"{folder} holds a run with other settings; give another folder, or remove it")
        known.write_text(mark + "\n", encoding="utf-8")
        if self._written.exists():
            self.rows = [json.loads(line) for line in self._written.read_text(encoding="utf-8").splitlines()]

    @property
    def _written(self) -> Path:
        return self.folder / "rows.jsonl"

    @property
    def is_complete(self) -> bool:
        """Whether the folder holds the whole run."""
        return (self.folder / "complete").exists()

    def take_up(self) -> Path | None:
        """The last checkpoint before the end, None for a fresh start; rows behind it are forgotten, for they come again."""
        found = sorted((self.folder / "trainer").glob("checkpoint-*"), key=_step_of)
        usable = [path for path in found if _step_of(path) < self.steps and (path / "trainer_state.json").exists()]
        for path in found:
            if path not in usable:
                shutil.rmtree(path)
        done = _step_of(usable[-1]) if usable else 0
        self.rows = [row for row in self.rows if row["step"] <= done]
        if len(self.rows) != done:
            raise ValueError(
                f"{self._written} lacks rows of the {done} steps before the checkpoint; remove {self.folder}"
            )
        self._write()
        return usable[-1] if usable else None

    def add(self, row: dict[str, Any]) -> None:
        """One more row, on disk at once."""
        self.rows.append(row)
        with open(self._written, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """The run is over; asked for again, it is read."""
        self._write()
        (self.folder / "complete").touch()

    def _write(self) -> None:
        self._written.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")


def described(function: Any) -> str:
    """What tells a function from others: its name, and the plain values that it is bound to or closes over."""
    if function is None:
        return ""
    if isinstance(function, functools.partial):
        bound = [*function.args, *(value for _, value in sorted(function.keywords.items()))]
        return f"{described(function.func)}({', '.join(map(_plain, bound))})"
    name = getattr(function, "__qualname__", type(function).__qualname__)
    cells = getattr(function, "__closure__", None) or ()
    defaults = getattr(function, "__defaults__", None) or ()
    held = [_plain(cell.cell_contents) for cell in cells if _is_filled(cell)]
    return f"{getattr(function, '__module__', '')}.{name}({', '.join([*held, *map(_plain, defaults)])})"


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _plain(value: Any) -> str:
    """A value as text, without addresses of objects."""
    if callable(value) and not isinstance(value, type):
        return described(value)
    if isinstance(value, (str, bytes, int, float, complex, bool, type(None), Fraction)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_plain(key)}: {_plain(each)}' for key, each in value.items())}}}"
    return type(value).__qualname__


def weights_digest(model: Any) -> str:
    """A fingerprint of a model's weights: of each, its name, shape and sum."""
    import torch

    found = hashlib.sha256()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            total = float(weight.double().sum()) if weight.device.type != "meta" else 0.0
            found.update(f"{name} {tuple(weight.shape)} {total!r}\n".encode())
    return found.hexdigest()


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


class Recorder:
    """Listens to the reward functions and, as a callback, to the trainer; makes a row of each step.

    Use `recorder_of`, which makes it a `transformers.TrainerCallback`.
    """

    def __init__(
        self, book: Book, *, group: int, micro: int, temperature: float, each: Callable[[dict[str, Any]], None] | None,
        advance: Callable[[], None],
    ) -> None:  # fmt: skip
        self.book, self.each, self.advance = book, each, advance
        self.group, self.micro, self.temperature = group, micro, temperature
        self.trainer: Any = None
        self.batch: dict[str, Any] = {}
        self._rewards: dict[int, list[float]] = {}
        self._sampled: list[tuple[Any, Any, int]] = []  # ids, mask and length of completions, a micro-batch each
        self._sampled_logps: list[Any] = []
        self._began = self._aside = 0.0
        self._row: dict[str, Any] = {}
        self._heard = False  # whether the reward functions were called on a batch since the last row

    def attach(self, trainer: Any) -> None:
        """Listen to a trainer that is about to start, instead of its printing."""
        from transformers import PrinterCallback

        self.trainer = trainer
        trainer.remove_callback(PrinterCallback)
        if self.book.rows:  # what the last batch of completions was like holds on
            self.batch = {name: self.book.rows[-1][name] for name in _BATCH}
        trainer.add_callback(self)

    def listening(self, functions: Sequence[Callable[..., Any]]) -> list[Callable[..., Any]]:
        """The reward functions, unchanged but for being listened to."""
        return [self._listening(function, place, len(functions)) for place, function in enumerate(functions)]

    def _listening(self, function: Callable[..., Any], place: int, n: int) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function) or not callable(function):
            raise TypeError(f"reward functions must be plain functions, not {function!r}")

        def rewards(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            if "completion_ids" not in kwargs:  # a rollout that judges attempt by attempt: no batch of TRL's
                return found
            self._rewards[place] = [float("nan") if value is None else float(value) for value in found]
            if len(self._rewards) == n:
                self._scored(kwargs["prompts"], kwargs["completion_ids"])
            return found

        if hasattr(function, "__name__"):
            return functools.wraps(function)(rewards)
        rewards.__name__ = type(function).__name__  # by which TRL logs it
        return rewards

    # --- a batch of completions ---------------------------------------------------------------------------------------

    def _scored(self, prompts: Sequence[Any], completion_ids: Sequence[Sequence[int]]) -> None:
        import torch

        before = time.perf_counter()
        weights = getattr(self.trainer.args, "reward_weights", None) or [1.0] * len(self._rewards)
        rewards = torch.tensor([self._rewards[place] for place in sorted(self._rewards)], dtype=torch.float64)
        total = (rewards * torch.tensor(weights, dtype=torch.float64)[:, None]).nansum(0)
        self._rewards = {}
        groups = [total[start:end] for start, end in _stretches(prompts, self.group)]
        self.batch = {
            "reward": float(total.mean()),
            "reward_std": float(total.std(correction=0)),
            "all_right": sum(bool((group >= 1).all()) for group in groups) / len(groups),
            "all_wrong": sum(bool((group <= 0).all()) for group in groups) / len(groups),
            "zero_spread": sum(bool((group == group[0]).all()) for group in groups) / len(groups),
            "tokens": None,
            "cut": None,
        }
        self._heard = True
        if all(isinstance(prompt, str) for prompt in prompts):
            self._sampled = list(self._padded(prompts, completion_ids))
            self._sampled_logps = self._logps()
        else:
            self._sampled = []
        self._aside += time.perf_counter() - before

    def _padded(
        self, prompts: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> Iterator[tuple[Any, Any, int]]:
        """Micro-batches of prompts padded on the left with their completions padded on the right."""
        import torch

        prompt_ids = self.trainer.processing_class(text=list(prompts))["input_ids"]
        device = self.trainer.args.device
        for start in range(0, len(prompts), self.micro):
            left, right = prompt_ids[start : start + self.micro], completion_ids[start : start + self.micro]
            widths = max(map(len, left)), max(map(len, right))
            if min(map(len, left)) == 0 or widths[1] == 0:
                continue
            ids = torch.zeros(len(left), sum(widths), dtype=torch.int64, device=device)
            mask = torch.zeros_like(ids)
            for row, (first, second) in enumerate(zip(left, right, strict=True)):
                place = slice(widths[0] - len(first), widths[0] + len(second))
                ids[row, place] = torch.tensor([*first, *second], device=device)
                mask[row, place] = 1
            yield ids, mask, widths[1]

    def _logps(self) -> list[Any]:
        """Log-probabilities of the sampled tokens under the policy as it is now."""
        import torch

        from cameraready.posttraining._logprobs import completion_logprobs

        model = self.trainer.model
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                return [
                    completion_logprobs(model, ids, mask, length, temperature=self.temperature).logps
                    for ids, mask, length in self._sampled
                ]
        finally:
            model.train(was_training)

    def _divergence(self) -> float | None:
        if not self._sampled:
            return None
        total, count = 0.0, 0
        for (_, mask, length), old, new in zip(self._sampled, self._sampled_logps, self._logps(), strict=True):
            change = (new - old).double() * mask[:, -length:]
            total += float((change.expm1() - change).sum())
            count += int(mask[:, -length:].sum())
        return total / count if count else None

    # --- the trainer's events -----------------------------------------------------------------------------------------

    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        self._aside, self._began = 0.0, time.perf_counter()

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
        seconds = time.perf_counter() - self._began - self._aside
        self._row = {
            "step": int(state.global_step),
            "seconds": seconds,
            "kl": self._divergence(),
            "peak_mb": self._peak(),
        }

    def on_log(
        self, _args: Any, _state: Any, _control: Any, logs: dict[str, Any] | None = None, **_kwargs: Any
    ) -> None:
        if not self._row or "loss" not in (logs or {}):
            return
        for name, column in _OF_BATCH.items():
            if logs.get(name) is not None and (self.batch.get(column) is None or not self._heard):
                self.batch[column] = float(logs[name])
        self._heard = False
        told = {column: _number(logs.get(name)) for name, column in _LOGGED.items()}
        empty = dict.fromkeys(_BATCH)
        row = {**self._row, **empty, **self.batch, **told}
        self._row = {}
        self.book.add(row)
        self.advance()
        if self.each is not None:
            self.each(row)

    def _peak(self) -> float:
        import torch

        if self.trainer.args.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 1e6
        # Kilobytes on Linux, bytes on macOS.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def recorder_of(book: Book, **options: Any) -> Any:
    """A `Recorder` that is a `transformers.TrainerCallback` too."""
    import transformers

    return type("Recorder", (Recorder, transformers.TrainerCallback), {})(book, **options)


def _stretches(prompts: Sequence[Any], group: int) -> Iterator[tuple[int, int]]:
    """Where the completions of one prompt stand: stretches of equal prompts, cut into groups."""
    start = 0
    for place in range(1, len(prompts) + 1):
        if place == len(prompts) or prompts[place] != prompts[start] or place - start == group:
            yield start, place
            start = place


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
