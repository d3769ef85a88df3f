"""What the room's studies are tried on: shipped flows, a table or an array of one's own, or a trained model with its data.

A study names `open_flow` as its ``open`` (with its own shipped names bound) and accepts the kinds in `ACCEPTS`.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cameraready.flows._problem import MAX_CLASSES, FlowProblem

if TYPE_CHECKING:
    from cameraready.evidence import Spec

#: Kinds of spec that `open_flow` takes beside shipped names.
ACCEPTS = ("table", "object", "value")
_WANTED = "an array of data ((N, D) or (N, C, H, W)), (velocity, data), (velocity, data, labels) or a cameraready.flows.FlowProblem"
#: Data on which the direction of a user's velocity is checked.
CHECKED = 256

__all__ = ["ACCEPTS", "FlowProblem", "open_flow"]


def open_flow(spec: Spec, shipped: Sequence[str] | Mapping[str, Callable[[], Any]] = ()) -> Any:
    """The workload that `spec` names.

    Parameters
    ----------
    spec : Spec
        A shipped name; a table of numbers (``data.csv``, each row a vector; a column that is named becomes the labels); ``package.module:object``; or
        from Python the objects themselves.
    shipped : sequence of str, or mapping of str to callable
        Names of the study's own workloads. With a mapping a name opens as what its callable returns, else as itself.

    Returns
    -------
    str, FlowProblem or what a shipped name stands for
        Tables and arrays without a velocity are standardised, and a velocity is trained when it is first asked for.

    Raises
    ------
    SpecError
        An unknown name, a table that holds no numbers, an object that is none of those, a velocity that does not take the data or whose time runs the wrong
        way (whether it comes with data or within a FlowProblem).
    """
    from cameraready.evidence import SpecError

    if spec.kind == "shipped":
        if spec.name in shipped:
            return shipped[spec.name]() if isinstance(shipped, Mapping) else spec.name
        near = difflib.get_close_matches(spec.name, shipped, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(shipped)}"
        raise SpecError(f"there is no workload {spec.name!r}; {hint}")
    if spec.kind == "table":
        return _of_table(spec)
    if spec.kind == "object":
        return _of_value(spec.name, _imported(spec.name))
    if spec.kind == "value":
        return _of_value(spec.name, spec.value)
    raise SpecError(f"{spec.text!r} is no flow; give {_WANTED}, or a table of numbers")


def _of_value(name: str, value: Any) -> FlowProblem:
    from cameraready.evidence import SpecError

    if isinstance(value, FlowProblem):
        if value.has_own_velocity:
            _checked(value)
        return value
    velocity, data, labels = None, value, None
    if isinstance(value, tuple):
        if len(value) not in (2, 3) or not callable(value[0]) or callable(value[1]):
            raise SpecError(f"give {_WANTED}, not a tuple of {', '.join(type(part).__name__ for part in value)}")
        velocity, data = value[:2]
        labels = value[2] if len(value) == 3 else None
    elif callable(value) or not hasattr(value, "shape"):
        raise SpecError(f"give {_WANTED}, not {type(value).__name__}")
    try:
        problem = FlowProblem(name, data, labels, velocity)
        if velocity is None:
            return _standardised(problem)
    except ValueError as error:
        raise SpecError(str(error)) from error
    _checked(problem)
    return problem


def _checked(problem: FlowProblem) -> None:
    """Raise a SpecError for a velocity that does not take these data, gives no velocities, or whose time runs the wrong way."""
    import torch

    from cameraready.evidence import SpecError
    from cameraready.flows._adapters import check_direction

    labels = None if problem.train_labels is None else problem.train_labels[:CHECKED]
    try:
        check_direction(
            problem.velocity,
            problem.train[:CHECKED],
            y=labels,
            path=problem.path,
            generator=torch.Generator().manual_seed(0),
            draws=2,
        )
        if not _answers_alone(problem.velocity, problem.train[:CHECKED], labels):
            warnings.warn(
                f"the velocity of {problem.name} gives other answers for the same states in another batch, as dropout and batch normalisation do in "
                "training: call eval() on the network",
                stacklevel=2,
            )
    except (ValueError, FloatingPointError) as error:
        raise SpecError(f"{problem.name}: {error}") from error
    except (
        Exception
    ) as error:  # the user's model, whatever it does with states of another shape or labels it does not know
        raise SpecError(
            f"the velocity of {problem.name} cannot be asked as v(x, t{'' if labels is None else ', y'}) with x of shape "
            f"{tuple(problem.train[:CHECKED].shape)} and t of shape ({min(CHECKED, len(problem.train))},): {type(error).__name__}: {error}"
        ) from error


def _answers_alone(velocity: Callable[..., Any], x: Any, y: Any) -> bool:
    """Whether half of the states get the same velocities when the other half is exchanged."""
    import torch

    from cameraready.flows._adapters import Velocity

    counted = isinstance(velocity, Velocity)
    calls = velocity.calls if counted else 0
    t = (
        torch.tensor(0.5, dtype=x.dtype)
        if counted and not velocity.takes_times
        else torch.full((len(x),), 0.5, dtype=x.dtype)
    )
    half, labels = len(x) // 2, () if y is None else (y,)
    buffers = list(velocity.buffers()) if isinstance(velocity, torch.nn.Module) else []
    kept = [buffer.clone() for buffer in buffers]
    with torch.no_grad(), torch.random.fork_rng([]):
        one = velocity(x, t, *labels)[:half]
        other = velocity(torch.cat([x[:half], 0.5 * x[half:]]), t, *labels)[:half]
        for buffer, before in zip(buffers, kept, strict=True):
            buffer.copy_(before)  # running means, which a look must not move
    if counted:
        velocity.calls = calls
    return torch.allclose(one, other, rtol=0.05, atol=0.05 * float(one.std()))


def _of_table(spec: Spec) -> FlowProblem:
    import numpy as np

    from cameraready.evidence import SpecError
    from cameraready.evidence.specs import read_columns

    features, roles = read_columns(spec, [], ["target"])
    strange = [str(name) for name in features.columns if features[name].dtype.kind not in "fiu"]
    if strange:
        raise SpecError(
            f"a flow needs columns of numbers, and {', '.join(strange[:5])} of {spec.name} are not; leave them out"
        )
    if not len(features.columns):
        raise SpecError(f"{spec.name} has no column of numbers")
    rows = features.to_numpy(np.float32)
    kept = np.isfinite(rows).all(axis=1)
    if "target" in roles:
        kept &= roles["target"].notna().to_numpy()
    if not kept.all():
        warnings.warn(
            f"{int((~kept).sum())} of {len(rows)} rows of {spec.name} have missing values and are left out",
            stacklevel=2,
        )
    labels = None
    if "target" in roles:
        labels = np.unique(roles["target"][kept].astype(str).to_numpy(), return_inverse=True)[1]
        if labels.max(initial=0) >= MAX_CLASSES:
            raise SpecError(f"{spec.target} has more than {MAX_CLASSES} different values; labels of a flow are classes")
    constant = rows[kept].std(axis=0) == 0 if kept.any() else np.zeros(rows.shape[1], bool)
    if constant.any():
        names = [str(name) for name, same in zip(features.columns, constant, strict=True) if same]
        raise SpecError(f"{', '.join(names[:5])} of {spec.name} never changes; leave such columns out")
    try:
        return _standardised(FlowProblem(spec.name, rows[kept], labels))
    except ValueError as error:
        raise SpecError(str(error)) from error


def _standardised(problem: FlowProblem) -> FlowProblem:
    """The same data with mean 0 and variance 1, each column of vectors by itself and images as a whole."""
    data = problem.data
    axes = (0,) if data.dim() == 2 else (0, 1, 2, 3)
    spread = data.std(dim=axes, keepdim=True)
    if not bool((spread > 0).all()):
        raise ValueError(f"the data of {problem.name} have entries that never change; leave them out")
    return FlowProblem(problem.name, (data - data.mean(dim=axes, keepdim=True)) / spread, problem.labels)


def _imported(name: str) -> Any:
    """The object that ``package.module:object`` names; a function without arguments is called, a velocity alone is not."""
    import inspect

    from cameraready.evidence import SpecError
    from cameraready.evidence.specs import load_object

    found = load_object(name)
    if not inspect.isfunction(found):
        return found
    if any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in inspect.signature(found).parameters.values()
    ):
        raise SpecError(
            f"{name} is a function with arguments; name {_WANTED}, or a function without arguments that returns one"
        )
    try:
        return found()
    except Exception as error:  # the user's code, whatever it does
        raise SpecError(f"{name}() raised {type(error).__name__}: {error}") from error
