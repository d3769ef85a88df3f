"""The user's own problem, from a function or an object."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from cameraready.evidence import Spec, SpecError
from cameraready.evidence.specs import load_object
from cameraready.optim.sng.jacobian import CoupledSamplesError
from cameraready.optim.sng.optimizer import SNG
from cameraready.optim.sng.trials.problems import PROBLEMS, Problem

WANTED = (
    "expected a function make(seed) that returns (model, residuals, n_rows, error): residuals(model, rows) gives the residuals of the "
    "rows with these numbers, a tensor of shape (k,), and error(model) a number to make small"
)


def open_problem(spec: Spec) -> Problem | str:
    """A shipped problem, the name of a workload that is no problem, or the user's."""
    if spec.kind in ("object", "value"):
        return own_problem(spec.text, spec.value if spec.kind == "value" else load_object(spec.name))
    return PROBLEMS[spec.name]() if spec.name in PROBLEMS else spec.name


def own_problem(name: str, make: Any, batch: int = 128) -> Problem:
    """Batches of 128 rows, or of half of them where there are fewer than 256.

    Raises
    ------
    SpecError
        If what `make` gives cannot be trained.
    """
    if not callable(make):
        raise SpecError(f"{name} is {type(make).__name__}; {WANTED}")
    given = make(0)
    if not (isinstance(given, tuple) and len(given) == 4):
        raise SpecError(f"{name}(0) returned {type(given).__name__}; {WANTED}")
    model, residuals, n_rows, error = given
    if not (isinstance(model, nn.Module) and callable(residuals) and callable(error)):
        raise SpecError(f"{name}(0) does not hold a module and two functions; {WANTED}")
    if isinstance(n_rows, bool) or not isinstance(n_rows, Integral) or n_rows < 2:
        raise SpecError(f"n_rows must be a whole number of at least 2, got {n_rows!r}; {WANTED}")
    n_rows = int(n_rows)
    size = min(batch, max(1, n_rows // 2))
    found = residuals(model, torch.arange(size))
    if not (isinstance(found, Tensor) and found.shape == (size,) and found.requires_grad):
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise SpecError(f"residuals of {size} rows must have shape ({size},) and a graph, got {shape}; {WANTED}")
    try:
        SNG(model.parameters(), lr=0.0).step(lambda: residuals(model, torch.arange(size)))
    except (CoupledSamplesError, TypeError) as error:
        raise SpecError(f"{name} cannot be trained by this method: {error}") from error
    return Problem(name, lambda seed: make(seed)[0], residuals, lambda m: float(error(m)), n_rows, size, {})
