"""Runs of reinforcement learning on a real language model, step by step: what the studies show of the user's own model.

`grpo_run` trains by TRL's GRPO, or by any trainer made from it, and returns one row a step; `demonstration` is its short form on sums for a
small model; `recipe` the settings of a run on one GPU. Verdicts do not come from here: five steps of one model tell how a run reads, not
which method is better.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cameraready.posttraining._record import Book, described, recorder_of, weights_digest
from cameraready.posttraining._trl import import_trl

if TYPE_CHECKING:
    from cameraready.lm._problems import Problem
    from cameraready.models import LanguageModel

#: Settings of `GRPOConfig` for one GPU of 80 GB, by the size of the model; one batch of 256 completions is trained on in four optimizer steps.
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "1.5B": {
        "learning_rate": 1e-6,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 8,
        "steps_per_generation": 32,
    },
    "3B": {
        "learning_rate": 1e-6,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 16,
        "steps_per_generation": 64,
    },
}
_OF_ALL: Mapping[str, Any] = {
    "num_generations": 16,
    "max_completion_length": 1024,
    "num_iterations": 1,
    "temperature": 1.0,
    "beta": 0.0,
    "max_steps": 300,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 10,
    "max_grad_norm": 1.0,
    "gradient_checkpointing": True,
    "logging_steps": 1,
    "save_steps": 50,
    "report_to": [],
}


def grpo_run(
    lm: LanguageModel,
    problems: Sequence[Problem],
    *,
    trainer: Callable[..., Any] | None = None,
    steps: int = 5,
    prompts: int = 2,
    group: int = 8,
    max_new_tokens: int = 32,
    temperature: float = 1.0,
    learning_rate: float | None = None,
    beta: float = 0.0,
    iterations: int = 1,
    lora_rank: int = 0,
    micro_batch: int | None = None,
    checkpointing: bool = False,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    reward_funcs: Sequence[Callable[..., list[float]]] | None = None,
    folder: str | Path | None = None,
    save_every: int = 0,
    each: Callable[[dict[str, Any]], None] | None = None,
    after: Callable[[LanguageModel], Mapping[str, Any]] | None = None,
    progress: bool | None = None,
) -> list[dict[str, Any]]:
    """Train a copy of a language model on problems that a program checks, and say after each step how the run goes.

    The model that is given is left as it was, and so are the global random states.

    Parameters
    ----------
    lm : LanguageModel
    problems : sequence of Problem
        The reward of a completion is 1 where ``problem.check`` takes it, else 0.
    trainer : callable, optional
        ``trainer(model, tokenizer, args, dataset, reward_funcs)`` -> a `trl.GRPOTrainer` or something made from it; TRL's own by default.
    steps : int
        Optimizer steps in all.
    prompts, group : int
        Prompts of a step, and completions of each (at least 2).
    max_new_tokens : int
    temperature : float
    learning_rate : float, optional
        1e-6 for all weights and 1e-4 for adapters by default, constant.
    beta : float
        Weight of the divergence from the model as it was given.
    iterations : int
        Optimizer steps on each batch of completions; ratios differ from 1, and are clipped, only from the second on.
    lora_rank : int
        0 trains all weights, else adapters of this rank on all linear layers but the head (needs PEFT); the frozen weights are shared
        with the model that was given.
    micro_batch : int, optional
        Completions of one backward pass; must divide ``prompts * group``.
    checkpointing : bool
        Compute activations again in the backward pass: a third slower, and far less memory.
    seed : int
        Of sampling, of the order of prompts and of new adapters.
    settings : mapping, optional
        Further settings of `trl.GRPOConfig` (``{"loss_type": "dr_grpo"}``).
    reward_funcs : sequence of callable, optional
        Instead of the problems' checks: TRL's reward functions; their sum is the reward.
    folder : path, optional
        Where checkpoints and rows go. A run that was broken off is taken up from its last checkpoint, and ends as if it had not been. Functions
        are told apart by their names and by the plain values that they hold, not by their code.
    save_every : int
        Steps between checkpoints; a multiple of `iterations`, 0 for none.
    each : callable, optional
        Called with each row as it comes.
    after : callable, optional
        Called with the trained model at the end; the numbers that it returns join the last row.
    progress : bool, optional
        Show a bar on stderr; None does where that is a terminal.

    Returns
    -------
    list of dict
        One a step, in order: ``step`` (from 1); ``reward`` and ``reward_std`` over the completions of the batch that the step trained on;
        ``all_right``, ``all_wrong`` and ``zero_spread``, shares of groups with all rewards at least 1, with none above 0, and with equal
        rewards, which give no gradient;
        ``entropy`` of the policy a token (nats); ``clip_low`` and ``clip_high``, shares of tokens whose ratio was clipped below and above
        (None where the trainer does not log them); ``kl``, the divergence of the sampler from the policy after the step a token (nats; the
        estimator exp(d) - d - 1 on the sampled tokens, d their change of log-probability); ``kl_reference``, from the model as it
        was given (None without `beta`); ``tokens`` of a completion; ``cut``, the share that did not end by itself; ``loss``,
        ``grad_norm``; ``seconds`` of the step without measuring `kl`; ``peak_mb`` of memory so far (of the process on a CPU, of the device's
        allocator on a GPU). Of a trainer with rollouts of its own, whose rewards TRL does not ask for batch by batch, rewards are those that
        it logs, and `all_right`, `all_wrong` and `kl` are None.

    Raises
    ------
    ImportError
        TRL or PEFT is missing.
    ValueError
        A number is out of range, prompts do not fit the model's context, or the folder holds another run.
    """
    _check(lm, problems, steps, prompts, group, max_new_tokens, iterations, lora_rank, micro_batch, save_every, beta)
    trl = import_trl()
    from cameraready.posttraining import _rollouts

    problems = [replace(problem, prompt=_begun_once(problem.prompt, lm.tokenizer)) for problem in problems]
    micro, on_cpu = micro_batch or prompts * group, lm.device.type == "cpu"
    chosen: dict[str, Any] = {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": prompts * group // micro,
        "num_generations": group,
        "num_iterations": iterations,
        "max_completion_length": max_new_tokens,
        "temperature": temperature,
        "learning_rate": learning_rate if learning_rate is not None else (1e-4 if lora_rank else 1e-6),
        "lr_scheduler_type": "constant",
        "beta": beta,
        "max_steps": steps,
        "seed": seed,
        "gradient_checkpointing": checkpointing,
        "bf16": not on_cpu,
        "use_cpu": on_cpu,
        "logging_steps": 1,
        "disable_tqdm": True,
        "report_to": [],
        "save_strategy": "steps" if save_every else "no",
        "save_total_limit": 2,
        **({"save_steps": save_every} if save_every else {}),
        **(settings or {}),
    }
    with contextlib.ExitStack() as stack:
        where = Path(folder) if folder is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        told = {
            "model": lm.name,
            "weights": weights_digest(lm.model) if folder is not None else "",
            "trainer": described(trainer),
            "after": described(after),
            "rewards": [described(function) for function in reward_funcs or ()],
            "lora_rank": lora_rank,
            "problems": [(problem.prompt, problem.answer, described(problem.check)) for problem in problems],
            **chosen,
        }
        book = Book(where, told, steps)
        if book.is_complete:
            return book.rows
        checkpoint = book.take_up()
        stack.enter_context(_own_randomness())
        stack.enter_context(_without_bars())
        model, tokenizer = _trainable(lm, lora_rank, seed), copy.deepcopy(lm.tokenizer)
        recorder = recorder_of(
            book,
            group=group,
            micro=micro,
            temperature=temperature,
            each=each,
            advance=stack.enter_context(_bar(steps, progress)),
        )
        rewards = list(reward_funcs) if reward_funcs is not None else [_rollouts.reward_func(problems)]
        args = trl.GRPOConfig(output_dir=str(where / "trainer"), **chosen)
        made = (trainer or _grpo)(model, tokenizer, args, _rollouts.dataset(problems), recorder.listening(rewards))
        recorder.attach(made)
        made.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if after is not None:
            from cameraready.models import LanguageModel

            book.rows[-1] |= dict(after(LanguageModel(made.model.eval(), tokenizer, lm.name, "value")))
        book.close()
    return book.rows


def demonstration(
    lm: LanguageModel,
    *,
    trainer: Callable[..., Any] | None = None,
    steps: int = 5,
    seed: int = 0,
    each: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Five short steps on sums that a small model gets right about half of the time: how a run reads, without a verdict.

    Two prompts with 4 completions of at most 16 tokens a step, two optimizer steps on each batch, adapters of rank 8.

    Parameters
    ----------
    lm, trainer, steps, seed, each
        As of `grpo_run`.

    Returns
    -------
    list of dict
        As of `grpo_run`.
    """
    from cameraready.lm import _tasks

    drawn = _tasks.arithmetic(n=64, seed=seed)
    problems = [replace(problem, prompt=lm.prompt(problem.prompt)) for problem in drawn]
    return grpo_run(
        lm,
        problems,
        trainer=trainer,
        steps=steps,
        prompts=2,
        group=4,
        max_new_tokens=16,
        iterations=2,
        lora_rank=8,
        seed=seed,
        each=each,
    )


def recipe(size: str, output_dir: str | Path, **changes: Any) -> Any:
    """The `trl.GRPOConfig` of a run of a model of 1.5B or 3B weights on one GPU of 80 GB.

    300 steps of 16 prompts with 16 completions of up to 1,024 tokens, four optimizer steps on each batch of completions, no reference
    model. It takes hours to a day; with vLLM beside it (``use_vllm=True, vllm_mode="colocate"``) a third of that.

    Parameters
    ----------
    size : str
        A name of `RECIPES`.
    output_dir : path
    **changes
        Settings that replace those of the recipe.

    Raises
    ------
    ValueError
        There is no recipe of that size.
    """
    if size not in RECIPES:
        raise ValueError(f"there is no recipe for {size!r}; there are {', '.join(RECIPES)}")
    return import_trl().GRPOConfig(output_dir=str(output_dir), **{**_OF_ALL, **RECIPES[size], **changes})


def _grpo(model: Any, tokenizer: Any, args: Any, dataset: Any, reward_funcs: Any) -> Any:
    return import_trl().GRPOTrainer(
        model=model, processing_class=tokenizer, args=args, train_dataset=dataset, reward_funcs=reward_funcs
    )


def _check(
    lm: Any, problems: Any, steps: int, prompts: int, group: int, max_new_tokens: int, iterations: int, lora_rank: int,
    micro_batch: int | None, save_every: int, beta: float,
) -> None:  # fmt: skip
    least = {
        "steps": 1,
        "prompts": 1,
        "group": 2,
        "max_new_tokens": 1,
        "iterations": 1,
        "lora_rank": 0,
        "save_every": 0,
    }
    given = (steps, prompts, group, max_new_tokens, iterations, lora_rank, save_every)
    for (label, lowest), number in zip(least.items(), given, strict=True):
        if isinstance(number, bool) or not isinstance(number, int) or number < lowest:
            why = "; one completion has none to be compared with" if label == "group" else ""
            raise ValueError(f"{label} must be a whole number, at least {lowest}, got {number!r}{why}")
    if micro_batch is not None and (micro_batch < 1 or prompts * group % micro_batch):
        raise ValueError(f"micro_batch must divide the {prompts * group} completions of a step, got {micro_batch}")
    if save_every % iterations:
        raise ValueError(
            f"save_every must be a multiple of the {iterations} iterations, got {save_every}: a batch of completions is not saved"
        )
    if beta and not lora_rank:
        raise ValueError(
            "beta needs adapters (lora_rank above 0): TRL opens the reference of a whole model anew, by name"
        )
    if len(problems) < prompts:
        raise ValueError(f"a step has {prompts} prompts, and there are {len(problems)} problems")
    if lm.context is not None:
        longest = max((len(lm.tokenizer(problem.prompt)["input_ids"]) for problem in problems), default=0)
        if longest + max_new_tokens > lm.context:
            raise ValueError(
                f"a prompt of {longest} tokens and {max_new_tokens} new ones do not fit the {lm.context} tokens of {lm.name}"
            )


def _begun_once(prompt: str, tokenizer: Any) -> str:
    """A prompt without the beginning-of-text token in front that its chat template wrote and the tokenizer will add."""
    ids, begin = tokenizer(prompt)["input_ids"][:2], tokenizer.bos_token_id
    return prompt.removeprefix(tokenizer.bos_token) if begin is not None and ids == [begin, begin] else prompt


def _trainable(lm: LanguageModel, lora_rank: int, seed: int) -> Any:
    """A model to be trained in place of `lm`'s: a copy in float32, or new adapters on weights that the two share."""
    import torch

    if not lora_rank:
        return copy.deepcopy(lm.model).float().requires_grad_(True)
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "peft":
            raise
        raise ImportError('adapters need PEFT: pip install "cameraready[posttraining]"', name="peft") from None
    shared = {id(p): torch.nn.Parameter(p.data, requires_grad=p.requires_grad) for p in lm.model.parameters()}
    model = copy.deepcopy(lm.model, shared)
    torch.manual_seed(seed)
    return get_peft_model(
        model, LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
    )


@contextlib.contextmanager
def _own_randomness() -> Iterator[None]:
    """transformers seeds the global generators when a trainer is made; what they held comes back."""
    import torch

    python, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)  # noqa: NPY002


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """transformers draws one for each file of a checkpoint."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _bar(steps: int, wanted: bool | None) -> Iterator[Callable[[], None]]:
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=steps)
        yield lambda: bar.advance(task)
