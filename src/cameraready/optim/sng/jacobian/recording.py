"""Watches a closure for the use of parameters in linear layers, and makes a Jacobian of what it saw."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cameraready.optim._per_sample import jacobian_of_graph
from cameraready.optim.sng.jacobian.layers import BiasPart, LayerJacobian, UnusedPart, WeightPart
from cameraready.optim.sng.jacobian.operators import DenseJacobian, Jacobian


class SlowJacobianWarning(UserWarning):
    """The Jacobian takes a backward pass for every output."""


class CoupledSamplesError(ValueError):
    """A sample's output depends on other samples of the batch, or on chance."""


#: Functions that draw random numbers in training, with the argument that says so and the one of the probability.
_RANDOM: dict[Callable[..., Any], tuple[str, str]] = {
    functional.dropout: ("training", "p"),
    functional.dropout1d: ("training", "p"),
    functional.dropout2d: ("training", "p"),
    functional.dropout3d: ("training", "p"),
    functional.alpha_dropout: ("training", "p"),
    functional.feature_alpha_dropout: ("training", "p"),
    functional.rrelu: ("training", ""),
}


#: Recurrent layers: the position of dropout's probability without and with packed sequences; whether it trains comes next.
_RECURRENT = {"lstm": (5, 6), "gru": (5, 6), "rnn_tanh": (5, 6), "rnn_relu": (5, 6)}


def refuse_coupling(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `CoupledSamplesError` for a call that normalises over the batch or draws dropout."""
    if function is functional.batch_norm:
        if _argument(function, args, kwargs, "training"):
            raise CoupledSamplesError(
                "the closure normalises over the batch (batch_norm in training mode), so samples have no derivatives of "
                "their own; use GroupNorm or LayerNorm, or put the module into evaluation mode"
            )
    elif function is functional.embedding:
        if _argument(function, args, kwargs, "sparse"):
            raise TypeError("sparse gradients are not supported; make the embedding with sparse=False")
    elif _draws(function, args, kwargs):
        raise CoupledSamplesError(
            f"the closure draws random numbers ({function.__name__} with dropout in training mode), so a sample's derivative "
            "differs from call to call; put the module into evaluation mode"
        )


def _draws(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if function in _RANDOM:
        training, probability = _RANDOM[function]
        chance = _argument(function, args, kwargs, probability) if probability else 1.0
        return bool(_argument(function, args, kwargs, training)) and chance != 0.0
    if function is functional.multi_head_attention_forward:
        return (
            bool(_argument(function, args, kwargs, "training"))
            and _argument(function, args, kwargs, "dropout_p") != 0.0
        )
    if function is functional.scaled_dot_product_attention:
        return bool(_argument(function, args, kwargs, "dropout_p", 4, 0.0))
    name = getattr(function, "__name__", "")
    if function is torch.dropout:
        return bool(_argument(function, args, kwargs, "train", 2)) and bool(_argument(function, args, kwargs, "p", 1))
    if name in _RECURRENT and len(args) > 8:
        at = _RECURRENT[name][0 if isinstance(args[3], bool) else 1]
        return bool(args[at + 1]) and args[at] != 0.0
    return False


def _argument(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    name: str,
    position: int | None = None,
    default: Any = None,
) -> Any:
    if name in kwargs:
        return kwargs[name]
    if position is None:
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments[name]
    return args[position] if len(args) > position else default


@dataclass(frozen=True)
class Use:
    """One call of a linear layer: numbers of its weight and bias among the parameters (None: not among them).

    `edge` is where its output enters the graph, `before` where all else comes from: the input, a weight that is no parameter itself.
    """

    weight: int | None
    bias: int | None
    inputs: Tensor
    edge: Any
    before: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Known:
    """What is known of a pattern of calls: whether samples were found independent, and how often it was seen."""

    independent: bool = True
    seen: int = 0

    def due(self) -> bool:
        """Whether to look again: at the first three calls and at every eighth."""
        return self.seen < 3 or self.seen % 8 == 0


class Recorder(TorchFunctionMode):
    """While active, notes each call of `torch.nn.functional.linear` with a weight or bias of `params`.

    Layers are met by what they do with a parameter, not by their class: any module, or a bare function, that passes the
    parameter itself to ``linear`` is seen.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        super().__init__()
        self.params = list(params)
        self._number = {id(p): i for i, p in enumerate(self.params)}
        self.uses: list[Use] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        refuse_coupling(func, args, kwargs)
        out = func(*args, **kwargs)
        if func is functional.linear and isinstance(out, Tensor) and out.requires_grad:
            given = dict(zip(("input", "weight", "bias"), args, strict=False), **kwargs)
            weight = self._number.get(id(given["weight"]))
            bias = self._number.get(id(given.get("bias")))
            if weight is not None or bias is not None:
                # Edges, not tensors: an activation may overwrite the output in place.
                sources = [given["input"]]
                sources += [given["weight"]] if weight is None else []
                sources += [given["bias"]] if bias is None and given.get("bias") is not None else []
                before = tuple(get_gradient_edge(t).node for t in sources if t.requires_grad)
                edge = get_gradient_edge(out)
                inputs = given["input"].detach()
                self.uses.append(Use(weight, bias, inputs, edge, before, tuple(out.shape), out.dtype))
        return out

    def jacobian(self, outputs: Tensor, known: dict[int, Known]) -> Jacobian:
        """Jacobian of `outputs`, shape (k, ...), whose first dimension counts samples, flattened, with respect to `params`.

        From the layers if the graph leads to the parameters through recorded calls alone, and samples are independent. The first is
        read off the graph at each call; the second is tried with random weights when a pattern is new, and now and then after, as
        `known` has it. Otherwise row by row, which is exact whatever the closure did.

        Raises
        ------
        ValueError
            If no parameter is reached.
        """
        walk = self._walk(outputs)
        if not walk.reached:
            raise ValueError(
                "what the closure returned does not depend on any of this optimizer's parameters; was it computed by another copy "
                "of the model?"
            )
        k = outputs.shape[0]
        fits = all(u.dtype == outputs.dtype and len(u.shape) >= 2 and u.shape[0] == k for u in walk.uses)
        if walk.direct or not fits:
            return self._rows(outputs)
        pattern = hash(
            (tuple(outputs.shape), walk.names, tuple((u.weight, u.bias, tuple(u.inputs.shape)) for u in walk.uses))
        )
        record = known.setdefault(pattern, Known())
        if record.independent:
            slopes = _slopes(outputs, walk.uses)
            if record.due():
                record.independent = _independent(outputs, walk.uses, slopes)
            found = self._layers(outputs, walk.uses, slopes)
            if record.independent and found is not None:
                record.seen += 1
                return found
        return self._rows(outputs)

    def _walk(self, outputs: Tensor) -> Walk:
        """Follow the graph from the outputs to the parameters, from each recorded call on to its input."""
        calls: dict[Any, list[Use]] = {}
        for use in self.uses:
            calls.setdefault(use.edge.node, []).append(use)
        uses: list[Use] = []
        names: list[str] = []
        reached, direct, seen = False, False, set()
        waiting = [get_gradient_edge(outputs).node]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            names.append(node.name())
            if node.name() == "CheckpointFunctionBackward":
                raise TypeError(
                    "reentrant checkpointing hides parameters; use torch.utils.checkpoint with use_reentrant=False"
                )
            if node in calls:
                reached = True
                uses.extend(calls[node])
                waiting.extend(before for use in calls[node] for before in use.before)
                continue
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) in self._number:
                reached = direct = True
            waiting.extend(following for following, _ in node.next_functions)
        order = {id(use): i for i, use in enumerate(self.uses)}
        return Walk(sorted(uses, key=lambda use: order[id(use)]), reached, direct, tuple(names))

    def _layers(self, outputs: Tensor, uses: Sequence[Use], slopes: Sequence[Sequence[Tensor]]) -> LayerJacobian | None:
        k = outputs.shape[0]
        pairs = []
        for use, columns in zip(uses, slopes, strict=True):
            stacked = torch.stack([s.reshape(k, -1, use.shape[-1]) for s in columns], dim=1).flatten(0, 1)
            inputs = use.inputs.reshape(k, -1, use.inputs.shape[-1])
            pairs.append((use, inputs.repeat_interleave(len(columns), dim=0) if len(columns) > 1 else inputs, stacked))
        parts: list[WeightPart | BiasPart | UnusedPart] = []
        for i, param in enumerate(self.params):
            weights = [(a, s) for use, a, s in pairs if use.weight == i]
            biases = [s.sum(dim=1) for use, _, s in pairs if use.bias == i]
            if weights and not biases:
                parts.append(WeightPart(*(torch.cat(pieces, dim=1) for pieces in zip(*weights, strict=True))))
            elif biases and not weights:
                parts.append(BiasPart(torch.stack(biases).sum(dim=0)))
            elif not weights:
                parts.append(UnusedPart(param.numel()))
            else:
                return None
        return LayerJacobian(parts, outputs.detach().reshape(-1))

    def _rows(self, outputs: Tensor) -> DenseJacobian:
        n = sum(p.numel() for p in self.params)
        if outputs.numel() * n > 2**21:
            warnings.warn(
                f"parameters are used other than through linear layers on {outputs.shape[0]} independent samples, so the Jacobian "
                f"takes {outputs.numel()} backward passes; return linearise(function, params, *batch) from the closure for the cost of one",
                SlowJacobianWarning,
                stacklevel=5,
            )
        return DenseJacobian(jacobian_of_graph(outputs.reshape(-1), self.params))


@dataclass(frozen=True)
class Walk:
    """What a graph leads to: recorded calls in order, whether any parameter, whether one other than by a call, names on the way."""

    uses: list[Use]
    reached: bool
    direct: bool
    names: tuple[str, ...]


def _slopes(outputs: Tensor, uses: Sequence[Use], weights: Tensor | None = None) -> list[list[Tensor]]:
    """For each call, and each output of a sample, derivatives of the sum over samples (with weights) at the call's output."""
    columns = outputs.reshape(outputs.shape[0], -1)
    if weights is not None:
        columns = columns * weights[:, None]
    each = [
        torch.autograd.grad(columns[:, j].sum(), [u.edge for u in uses], retain_graph=True, allow_unused=True)
        for j in range(columns.shape[1])
    ]
    return [
        [torch.zeros(use.shape, dtype=use.dtype, device=outputs.device) if s is None else s for s in found]
        for use, found in zip(uses, zip(*each, strict=True), strict=True)
    ]


def _independent(outputs: Tensor, uses: Sequence[Use], slopes: Sequence[Sequence[Tensor]]) -> bool:
    """Whether a sample's weight reaches that sample's rows alone; true where numbers are not finite, which tell nothing."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(outputs.shape[0], generator=generator, dtype=torch.float64).to(outputs)
    tolerance = 10 * torch.finfo(outputs.dtype).eps ** 0.75
    for use, plain, weighted in zip(uses, slopes, _slopes(outputs, uses, weights), strict=True):
        shape = [-1] + [1] * (len(use.shape) - 1)
        for one, other in zip(plain, weighted, strict=True):
            if not one.numel():
                continue
            gap = (one * weights.view(shape) - other).abs().max()
            if torch.isfinite(gap) and gap > tolerance * one.abs().max():
                return False
    return True
