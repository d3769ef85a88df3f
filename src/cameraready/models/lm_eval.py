"""lm-eval's tasks for any model, modified or not: whatever is hooked, pruned or wrapped is what they judge."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

from cameraready.models import ModelError, _loading


def as_lm_eval(
    model: Any,
    tokenizer: Any = None,
    *,
    around: Callable[[], AbstractContextManager[Any]] | None = None,
    batch_size: int = 1,
    max_length: int | None = None,
) -> Any:
    """An lm-eval model (`lm_eval.models.huggingface.HFLM`) around a model that is already open.

    Parameters
    ----------
    model : LanguageModel or PreTrainedModel
        Taken as it is, with its hooks and changed weights; it is put into evaluation mode, not moved, and its weights are not
        tied again.
    tokenizer : PreTrainedTokenizerBase, optional
        Where `model` is no LanguageModel. A copy is used, since lm-eval sets a padding token and side.
    around : callable, optional
        ``around()`` gives a context manager that is entered anew around every call of the model: each forward pass that scores
        a batch, and each call of ``generate``. For what acts while it is entered, such as a press for the cache
        (``lambda: press(model)``) or `cameraready.models.intervene`. What acts on the cache alone does not show in tasks that
        are scored in one pass (multiple choice), only where text is generated.
    batch_size : int, optional
        Requests at a time.
    max_length : int, optional
        Longest input in tokens; by default what the model's configuration says.

    Returns
    -------
    lm_eval.api.model.LM
        For `evaluate`, or for ``lm_eval.simple_evaluate(model=...)``.

    Raises
    ------
    ModelError
        If lm-eval is not installed, there is no tokenizer, or it knows no token that begins or ends a text.
    """
    _needs_lm_eval()
    if tokenizer is None:
        if not (hasattr(model, "model") and hasattr(model, "tokenizer")):
            raise ModelError(
                "as_lm_eval needs a tokenizer too: as_lm_eval(model, tokenizer), or a LanguageModel of open_model."
            )
        model, tokenizer = model.model, model.tokenizer
    if not hasattr(model, "generate") or not hasattr(model, "config"):
        raise ModelError(f"as_lm_eval takes a model of transformers, not {type(model).__name__}.")
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise ModelError(
            "The tokenizer has no beginning-of-text and no end-of-text token, and lm-eval begins every text with one of them; set "
            "tokenizer.eos_token to the token that ends a text."
        )
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ModelError(f"batch_size={batch_size!r} must be a whole number of requests, at least 1.")
    with _undisturbed():
        return _wrapper()(model, tokenizer, around=around or nullcontext, batch_size=batch_size, max_length=max_length)


def evaluate(
    lm: Any,
    tasks: str | Path | Sequence[str | Path],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    include: str | Path | None = None,
    chat_template: bool = False,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Run lm-eval's tasks on a model of `as_lm_eval`.

    Parameters
    ----------
    lm : lm_eval.api.model.LM
    tasks : str, path, or several
        Names of lm-eval (tasks, groups, tags), a folder of task files (``*.yaml``), or one such file. Data files that a task
        of a folder names relatively are looked for beside its YAML. A task file may name Python functions, which are run:
        name files that you trust.
    limit : int, optional
        Documents of each task, from the first.
    num_fewshot : int, optional
        Examples in front of each question, instead of the task's own number.
    include : path, optional
        A folder whose tasks are known by name besides lm-eval's.
    chat_template : bool, optional
        Put questions through the tokenizer's chat template.
    seed : int, optional
        Of the choice of examples; nothing is seeded globally.

    Returns
    -------
    list of dict
        One row a task, metric and filter: ``task``, ``metric``, ``filter``, ``value``, ``stderr`` (None where lm-eval has none
        without a bootstrap), ``n`` (documents).

    Raises
    ------
    ModelError
        A sentence: an unknown task (with near misses), one whose data cannot be reached, a folder without tasks.
    """
    _needs_lm_eval()
    import lm_eval
    from lm_eval.api.model import LM

    if not isinstance(lm, LM):
        raise ModelError(
            f"evaluate takes a model of as_lm_eval, not {type(lm).__name__}: evaluate(as_lm_eval(model), ...)."
        )
    names = [tasks] if isinstance(tasks, str | Path) else list(tasks)
    if not names:
        raise ModelError("No task was named; give a name of lm-eval or a folder of task files.")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ModelError(f"limit={limit!r} must be a whole number of documents, at least 1.")
    paths = [Path(name).expanduser() for name in names]
    local = [path.exists() and (path.is_dir() or path.suffix in (".yaml", ".yml")) for path in paths]
    wanted: list[Any] = []
    with _undisturbed():
        manager = _manager(not all(local), None if include is None else str(Path(include).expanduser()))
        for name, path, here in zip(names, paths, local, strict=True):
            wanted.extend(_task_files(path) if here else [_known(str(name), manager)])
        loaded = [task for name in wanted for task in _loaded(name, manager)]
        found = lm_eval.simple_evaluate(
            model=lm,
            tasks=loaded,
            limit=limit,
            num_fewshot=num_fewshot,
            task_manager=manager,
            apply_chat_template=chat_template,
            bootstrap_iters=0,
            log_samples=False,
            random_seed=None,
            numpy_random_seed=None,
            torch_random_seed=None,
            fewshot_random_seed=seed,
        )
    return _rows(found)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Global random states as they were, also after an exception, and lm-eval's notes to its own developers unsaid."""
    import numpy as np
    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with _loading.quietly():
            yield
    finally:
        logger.setLevel(level)
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


@lru_cache(maxsize=1)
def _wrapper() -> type:
    from lm_eval.models.huggingface import HFLM

    class OpenModel(HFLM):
        """lm-eval's model for one that is already open."""

        def __init__(
            self,
            model: Any,
            tokenizer: Any,
            *,
            around: Callable[[], AbstractContextManager[Any]],
            batch_size: int,
            max_length: int | None,
        ) -> None:
            self._around = around
            # HFLM ties weights when it starts, which would undo a changed head.
            model.__dict__["tie_weights"] = lambda *_, **__: None
            try:
                super().__init__(
                    pretrained=model,
                    tokenizer=copy.deepcopy(tokenizer),
                    backend="causal",
                    batch_size=batch_size,
                    max_length=max_length or _loading.context_of(model.config),
                )
            finally:
                del model.__dict__["tie_weights"]

        def _model_call(self, *arguments: Any, **options: Any) -> Any:
            with self._around():
                return super()._model_call(*arguments, **options)

        def _model_generate(self, *arguments: Any, **options: Any) -> Any:
            with self._around():
                return super()._model_generate(*arguments, **options)

    return OpenModel


@lru_cache(maxsize=4)
def _manager(with_defaults: bool, include: str | None) -> Any:
    """lm-eval's index of tasks; reading it takes seconds, so it is kept."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include, include_defaults=with_defaults)


def _known(name: str, manager: Any) -> str:
    if name not in manager.all_tasks:
        import difflib

        near = difflib.get_close_matches(name, manager.all_tasks, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; `lm-eval ls tasks` lists what there is."
        raise ModelError(f"lm-eval has no task {name!r}, and there is no task file or folder of that name{hint}")
    return name


def _task_files(path: Path) -> list[dict[str, Any]]:
    """Configurations of the task files of a folder, data files made absolute."""
    from lm_eval.tasks._yaml_loader import load_yaml

    files = [path] if path.is_file() else sorted((*path.glob("*.yaml"), *path.glob("*.yml")))
    found = []
    for file in files:
        try:
            config = load_yaml(file)
        except Exception as error:
            raise ModelError(
                f"The task file {file} cannot be read: {type(error).__name__}: {str(error).splitlines()[0]}"
            ) from error
        if isinstance(config.get("task"), str):
            found.append(_beside(config, file.resolve().parent))
    if not found:
        raise ModelError(f"{path} holds no task file of lm-eval: a .yaml with the key `task`.")
    return found


def _beside(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    options = dict(config.get("dataset_kwargs") or {})
    if "data_files" not in options:
        return config

    def absolute(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: absolute(item) for key, item in value.items()}
        if isinstance(value, list):
            return [absolute(item) for item in value]
        beside = folder / str(value)
        return str(beside) if beside.exists() else value

    return {**config, "dataset_kwargs": {**options, "data_files": absolute(options["data_files"])}}


def _loaded(name: Any, manager: Any) -> list[Any]:
    """The tasks of a name or configuration, with their data; a failure to get them as a sentence."""
    label = name if isinstance(name, str) else name["task"]
    try:
        return list(manager.load([name])["tasks"].values())
    except Exception as error:
        chain: list[BaseException] = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
            chain.append(cause)
        kinds = {kind.__name__ for link in chain for kind in type(link).__mro__}
        first = str(error).strip().splitlines()[0][:300] if str(error).strip() else ""
        if not isinstance(name, str) and "FileNotFoundError" in kinds:
            raise ModelError(
                f"The data of the task {label!r} cannot be reached: {first}. Paths in `data_files` are taken from beside the task file."
            ) from error
        if kinds & {
            "ConnectionError",
            "ConnectError",
            "OfflineModeIsEnabled",
            "DatasetNotFoundError",
            "FileNotFoundError",
            "LocalEntryNotFoundError",
        }:
            raise ModelError(
                f"The data of the task {label!r} cannot be reached ({type(error).__name__}: {first}). It is downloaded from the "
                "Hugging Face hub when the task is first used; name a folder of task files with their data for work without a network."
            ) from error
        raise ModelError(f"The task {label!r} could not be loaded: {type(error).__name__}: {first}") from error


def _rows(found: Any) -> list[dict[str, Any]]:
    rows = []
    for task, results in found["results"].items():
        counts = found.get("n-samples", {}).get(task, {})
        for key, value in results.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr") or isinstance(value, str):
                continue
            stderr = results.get(f"{metric}_stderr,{chosen}")
            rows.append(
                {
                    "task": task,
                    "metric": metric,
                    "filter": chosen,
                    "value": float(value),
                    "stderr": float(stderr) if isinstance(stderr, int | float) else None,
                    "n": counts.get("effective"),
                }
            )
    return rows


def _needs_lm_eval() -> None:
    from importlib.util import find_spec

    if find_spec("lm_eval") is None:
        raise ModelError('lm-eval\'s tasks need lm-eval: pip install "cameraready[lm-tasks]"')
