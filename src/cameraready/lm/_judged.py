"""Tasks of lm-eval that a user names with ``--tasks lm-eval:NAME``, on a model as a study changed it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from cameraready.lm._workload import LM_EVAL, LMWorkload


def lm_eval_tasks(workload: LMWorkload) -> list[str]:
    """Names (or folders) of the lm-eval tasks that the user wants, without the ``lm-eval:`` before them."""
    return [task.removeprefix(LM_EVAL) for task in workload.tasks if task.startswith(LM_EVAL)]


def lm_eval_rows(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    limit: int,
    around: Callable[[], AbstractContextManager[Any]] | None = None,
) -> list[dict[str, Any]]:
    """Scores of a model on tasks of lm-eval, a row a task and metric.

    Parameters
    ----------
    model, tokenizer
        As `cameraready.models.as_lm_eval` takes them; the model may be quantised, hooked or wrapped.
    tasks : sequence of str
        Names of lm-eval, or folders of task files.
    limit : int
        Documents of each task, from the first.
    around : callable, optional
        Makes a context manager that is entered around each request.

    Returns
    -------
    list of dict
        ``task``, ``metric``, ``score``, ``score_error`` (standard error; None where lm-eval has none), ``documents``.

    Raises
    ------
    ModelError
        An unknown task, or one whose data cannot be reached; lm-eval is not installed.
    """
    from cameraready.models import as_lm_eval, evaluate

    found = evaluate(as_lm_eval(model, tokenizer, around=around), list(tasks), limit=limit)
    return [
        {
            "task": row["task"],
            "metric": row["metric"] if row["filter"] in ("none", "", None) else f"{row['metric']},{row['filter']}",
            "score": row["value"],
            "score_error": row["stderr"],
            "documents": row["n"],
        }
        for row in found
    ]
