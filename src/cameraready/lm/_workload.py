"""What the room's studies are tried on: a language model of any source, the user's prompts, the user's tasks.

A study names `open_lm` as its ``open`` and accepts the kinds in `ACCEPTS`.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cameraready.lm import _tasks
from cameraready.lm._problems import Problem
from cameraready.lm._prompts import Prompt, read_prompts

if TYPE_CHECKING:
    from cameraready.evidence import Cost, Spec
    from cameraready.models import LanguageModel

#: Kinds of spec that `open_lm` takes beside shipped names.
ACCEPTS = ("hf", "checkpoint", "value")
#: Random models of two layers with a tokenizer of bytes, made in code; for smoke runs.
TINY = {f"tiny-{kind}": kind for kind in ("llama", "qwen3", "gemma3", "mistral")}
#: Tasks that ``--tasks`` may name, beside ``lm-eval:NAME`` and ``reasoning_gym:NAME``.
RETRIEVAL = ("passkey", "key_value", "multi_hop")
REASONING = ("arithmetic", "countdown", "subset_sum")
LM_EVAL, GYM = "lm-eval:", "reasoning_gym:"


def open_lm(spec: Spec) -> LMWorkload:
    """The workload that `spec` names. Prompts and tasks are checked here; the model is opened when it is first asked for.

    Raises
    ------
    SpecError
        An unknown name or task, or prompts that cannot be read.
    """
    return LMWorkload(spec)


class LMWorkload:
    """A language model to try a method on, with the user's prompts and tasks.

    Attributes
    ----------
    name : str
        Of the model, as a report shows it.
    is_tiny : bool
        Whether it is a random model of `TINY`, which a smoke run takes: its numbers mean nothing.
    prompts : list of (prompt, answer) or None
        The user's (``--data prompts.jsonl:prompt,answer``), None where none were given; an answer may be None.
    tasks : tuple of str
        What ``--tasks`` named, such as ``("lm-eval:arc_easy", "passkey")``; empty where nothing was named.
    """

    def __init__(self, spec: Spec) -> None:
        from cameraready.evidence import SpecError

        if spec.kind == "shipped" and spec.name not in shipped_names():
            near = difflib.get_close_matches(spec.name, shipped_names(), n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(shipped_names())}"
            raise SpecError(f"there is no language model {spec.name!r}; {hint}")
        if spec.kind not in ("shipped", *ACCEPTS):
            raise SpecError(f"{spec.text!r} is no language model but a workload of the kind {spec.kind!r}")
        if spec.kind == "value" and not (isinstance(spec.value, tuple) or hasattr(spec.value, "tokenizer")):
            raise SpecError(
                f"give a language model with its tokenizer, as (model, tokenizer), not {type(spec.value).__name__}"
            )
        self.spec = spec
        self.name = spec.name
        self.is_tiny = spec.kind == "shipped" and spec.name in TINY
        columns = [name for name in spec.options.get("data_columns", "").split(",") if name]
        self.prompts: list[Prompt] | None = None
        if "data" in spec.options:
            self.prompts = read_prompts(spec.options["data"], columns)
        self.tasks = tuple(name for name in spec.options.get("tasks", "").split(",") if name)
        for task in self.tasks:
            check_task(task)

    def __repr__(self) -> str:
        return f"LMWorkload({self.name!r})"

    @cached_property
    def reference(self) -> str:
        """What `cameraready.models.open_model` opens it by; empty for a tiny model and a value."""
        if self.is_tiny or self.spec.kind == "value":
            return ""
        if self.spec.kind == "hf":
            return f"hf:{self.spec.name}"
        return self.spec.path or self.spec.name

    def model(self, device: str = "cpu", dtype: str | None = None) -> LanguageModel:
        """The model with its tokenizer, opened once in a process and kept: callers share it and leave it as it was.

        Parameters
        ----------
        device, dtype : str
            As of `open_model`; an empty dtype means its default. A model given as a value stays where it is.

        Raises
        ------
        ModelError
            A sentence that says what to do: bytes that are not on this machine, a hub that cannot be reached, a broken file.
        """
        from cameraready.models import open_model, opened

        if self.is_tiny:
            return tiny(TINY[self.name], str(device), dtype or None)
        if self.spec.kind == "value":
            return open_model(self.spec.value, device=device, dtype=dtype or None)
        return opened(self.reference, str(device), dtype or None)

    def problems(self, task: str, lm: LanguageModel, *, n: int, seed: int = 0, length: int = 1024) -> list[Problem]:
        """`n` problems of a task that a program can check, for this model.

        Parameters
        ----------
        task : str
            One of ``passkey``, ``key_value``, ``multi_hop``, ``arithmetic``, ``countdown``, ``subset_sum``, ``reasoning_gym:NAME``; or
            ``own``, the first `n` of the user's prompts. ``lm-eval:NAME`` is run by `cameraready.models.evaluate` instead.
        lm : LanguageModel
            Its tokenizer counts; its chat template, where it has one, is put around each prompt.
        n, seed : int
        length : int
            Tokens of a prompt of the retrieval tasks.
        """
        check_task(task)
        if task in RETRIEVAL:
            make: Callable[..., list[Problem]] = getattr(_tasks, task)
            template = lm.prompt if lm.tokenizer.chat_template else None
            return make(lm.tokenizer, length=length, n=n, seed=seed, template=template)
        if task in REASONING:
            found = getattr(_tasks, task)(n=n, seed=seed)
        elif task.startswith(GYM):
            found = _tasks.reasoning_gym(task.removeprefix(GYM), n=n, seed=seed)
        elif task == "own":
            found = _tasks.own((self.prompts or [])[:n])
        else:
            raise ValueError(f"{task} is run by cameraready.models.evaluate; it has no problems to be listed")
        return [Problem(lm.prompt(p.prompt), p.answer, p.check, p.kind, p.extra) for p in found]


def cost(
    spec: Spec,
    *,
    prompt_tokens: int,
    new_tokens: int = 0,
    passes: int = 1,
    batch: int = 1,
    device: str = "cpu",
    dtype: str | None = None,
) -> Cost:
    """What trials on a model would take, told from its configuration alone: for a study's ``cost``, which ``--dry-run`` shows.

    Parameters
    ----------
    spec : Spec
        As for `open_lm`.
    prompt_tokens, new_tokens : int
        Tokens that a pass reads, and then writes one after the other.
    passes, batch : int
        Passes in all, and sequences in each.
    device, dtype : str
        As of `open_model`; hours are reckoned for ``"cpu"`` on this machine and for ``"cuda"`` on one A100, as the notes say.

    Raises
    ------
    ModelError
        The configuration cannot be had, or a number is out of range.
    """
    from cameraready.evidence import Cost
    from cameraready.models import cost_of

    workload = open_lm(spec)
    if workload.is_tiny:
        name: Any = tiny(TINY[workload.name]).model.config
    else:
        name = workload.reference or spec.value
    found = cost_of(
        name,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        batch=batch,
        passes=passes,
        device=device,
        dtype=dtype or None,
    )
    return Cost(found.hours, found.memory_gib, found.downloads, found.notes)


def shipped_names() -> tuple[str, ...]:
    """Names that open without ``hf:`` or a path: packaged models and tiny ones."""
    from cameraready.models.packaged import MODELS

    return (*MODELS, *TINY)


def check_task(task: str) -> None:
    """Raise a SpecError where there is no such task."""
    from cameraready.evidence import SpecError

    known = (*RETRIEVAL, *REASONING, "own")
    if task in known or any(task.startswith(prefix) and len(task) > len(prefix) for prefix in (LM_EVAL, GYM)):
        return
    near = difflib.get_close_matches(task, known, n=3)
    hint = (
        f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}, {LM_EVAL}NAME and {GYM}NAME"
    )
    raise SpecError(f"there is no task {task!r}; {hint}")


@functools.lru_cache(maxsize=8)
def tiny(kind: str, device: str = "cpu", dtype: str | None = None) -> LanguageModel:
    """A random model of two layers with a tokenizer of bytes, always the same one."""
    import torch

    from cameraready.models import LanguageModel, ModelError, tiny_model, tiny_tokenizer

    wanted = getattr(torch, dtype or "float32", None)
    if not isinstance(wanted, torch.dtype):
        raise ModelError(f"There is no dtype {dtype!r}; take float32, bfloat16 or float16.")
    model = tiny_model(kind, max_positions=4096, dtype=wanted).to(device)
    return LanguageModel(model, tiny_tokenizer(max_positions=4096), f"tiny-{kind}", "value")
