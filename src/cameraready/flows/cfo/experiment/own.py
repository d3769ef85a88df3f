"""Problems of the user's own: a flow, a reward and a constraint, or a table with a column for each."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from cameraready.flows._workload import FlowProblem, open_flow
from cameraready.flows.cfo.experiment.problems import Steering

if TYPE_CHECKING:
    from cameraready.evidence import Spec

WANTED = (
    "(flow, reward, constraint, bound) or (flow, reward, constraint, bound, kl), the flow being a cameraready.flows.FlowProblem, data (N, D), or (velocity, data); "
    "reward and constraint map samples (B, ...) to numbers (B,)"
)
#: KL strength where none is given: reward that is spread over the data by one standard deviation is worth so many nats' price.
DEFAULT_KL = 0.5


@dataclass(frozen=True, eq=False)
class OwnProblem:
    """A flow with a reward and a constraint."""

    flow: FlowProblem
    steering: Steering

    @property
    def network(self) -> nn.Module:
        """The velocity that is tuned; one without parameters gets a correction that is."""
        velocity = self.flow.velocity
        if isinstance(velocity, nn.Module) and tunable(velocity):
            return velocity.requires_grad_(True)
        return Corrected(velocity, self.flow.shape[0])


class Corrected(nn.Module):
    """A velocity that cannot be trained plus a small perceptron that can, and begins as zero."""

    def __init__(self, velocity: Callable[..., Tensor], dim: int, width: int = 64) -> None:
        super().__init__()
        self.given = velocity
        g = torch.Generator().manual_seed(0)
        self.first, self.last = nn.utils.skip_init(nn.Linear, dim + 1, width), nn.utils.skip_init(nn.Linear, width, dim)
        with torch.no_grad():
            self.first.weight.normal_(0, 1 / math.sqrt(dim + 1), generator=g)
            for each in (self.first.bias, self.last.weight, self.last.bias):
                each.zero_()

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:
        times = t.reshape(-1, 1).expand(len(x), 1).to(x.dtype)
        return self.given(x, t).to(x.dtype) + self.last(torch.tanh(self.first(torch.cat([x, times], -1))))


def open_own(spec: Spec) -> OwnProblem:
    """What the user gave, as a flow with a reward and a constraint.

    Raises
    ------
    SpecError
        It is nothing of the kind; the sentence says what is.
    """
    from cameraready.evidence import SpecError

    if spec.kind == "table":
        return _of_table(spec)
    if spec.kind == "object":
        from cameraready.evidence.specs import load_object

        value = load_object(spec.name)
        if inspect.isfunction(value):
            try:
                value = value()
            except Exception as error:  # the user's code, whatever it does
                raise SpecError(f"{spec.name}() raised {type(error).__name__}: {error}; give {WANTED}") from error
    else:
        value = spec.value
    if not isinstance(value, tuple):
        lacks = ", which has no reward, constraint and bound" if isinstance(value, FlowProblem) else ""
        raise SpecError(f"give {WANTED}, not a {type(value).__name__}{lacks}")
    if len(value) not in (4, 5):
        raise SpecError(f"give {WANTED}, not a tuple of {', '.join(type(part).__name__ for part in value)}")
    flow, reward, constraint, bound, *rest = value
    if not callable(reward) or not callable(constraint):
        raise SpecError(f"reward and constraint must be functions; give {WANTED}")
    try:
        limit, kl = float(bound), float(rest[0]) if rest else DEFAULT_KL
    except (TypeError, ValueError):
        raise SpecError(f"bound and kl must be numbers; give {WANTED}") from None
    if not (math.isfinite(limit) and limit != 0 and kl > 0):
        raise SpecError(
            f"the bound must be a finite number other than 0 (excess is told as a share of it) and kl above 0, got {limit} and {kl}"
        )
    problem = open_flow(replace(spec, kind="value").with_value(flow))
    if problem.labels is not None:
        raise SpecError(
            "a flow with labels is not taken: give a velocity that has its label fixed, and data without labels"
        )
    if len(problem.shape) != 1 and not problem.needs_training and not tunable(problem.velocity):
        raise SpecError(
            "the velocity has no parameters to tune, and a correction is made for vectors only: give a torch module"
        )
    return OwnProblem(problem, Steering(reward, constraint, limit, kl))


def settled(workload: OwnProblem, conditions: Sequence[Mapping[str, Any]]) -> str:
    """Nothing is known beforehand. With this function a user's workload is opened, and refused if it is none, before anything runs, on a dry run too."""
    return ""


def tunable(velocity: object) -> bool:
    """Whether it is a module with parameters."""
    return isinstance(velocity, nn.Module) and next(velocity.parameters(), None) is not None


def _of_table(spec: Spec) -> OwnProblem:
    """A flow over the other columns; reward and constraint are what a ridge on their squares and products says of the two columns named."""
    from cameraready.evidence import SpecError
    from cameraready.evidence.specs import read_columns

    try:
        features, roles = read_columns(spec, ["reward", "constraint"])
    except SpecError as error:
        raise SpecError(f"{error}. Or, from package.module:object, {WANTED}") from None
    strange = [str(name) for name in features.columns if features[name].dtype.kind not in "fiu"]
    if strange:
        raise SpecError(
            f"a flow needs columns of numbers, and {', '.join(strange[:5])} of {spec.name} are not; leave them out"
        )
    rows = features.to_numpy(np.float64)
    targets = np.stack([roles[name].to_numpy(np.float64) for name in ("reward", "constraint")], 1)
    kept = np.isfinite(rows).all(1) & np.isfinite(targets).all(1)
    rows, targets = rows[kept], targets[kept]
    if len(rows) < 30 or (rows.std(0) == 0).any() or (targets.std(0) == 0).any():
        raise SpecError(f"{spec.name} needs 30 complete rows or more, and columns that change")
    rows = (rows - rows.mean(0)) / rows.std(0)
    targets = (targets - targets.mean(0)) / targets.std(0)
    functions = [ridge(rows, target) for target in targets.T]
    data = torch.from_numpy(rows).float()
    with torch.no_grad():
        bound = float(functions[1](data).mean()) - 0.5 * float(functions[1](data).std())
    flow = open_flow(replace(spec, kind="value").with_value(data.numpy()))
    return OwnProblem(flow, Steering(functions[0], functions[1], bound, DEFAULT_KL))


def ridge(rows: np.ndarray, target: np.ndarray, penalty: float = 1.0) -> Callable[[Tensor], Tensor]:
    """A ridge regression on standardised columns, their squares and products, as a function of samples that has gradients; beyond 4 it is level."""
    design = _squares(torch.from_numpy(rows)).numpy()
    gram = design.T @ design + penalty * np.diag([0.0, *[1.0] * (design.shape[1] - 1)])
    weights = torch.from_numpy(np.linalg.solve(gram, design.T @ target))

    def predict(x: Tensor) -> Tensor:
        return _squares(4 * torch.tanh(x / 4)) @ weights.to(x)

    return predict


def _squares(x: Tensor) -> Tensor:
    """1, columns, and products of columns."""
    places = torch.triu_indices(x.shape[-1], x.shape[-1])
    return torch.cat([torch.ones_like(x[..., :1]), x, x[..., places[0]] * x[..., places[1]]], -1)
