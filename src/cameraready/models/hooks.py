"""Reads and changes what flows through a language model, by PyTorch's own hooks, which are gone again afterwards.

`capture` keeps the tensors at a site of chosen layers, `intervene` replaces them. Both are context managers and clean up
however their block ends.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from cameraready.models.structure import Anatomy, Layer, anatomy
from cameraready.models.structure.probing import PROBING

#: Places that can be read and changed, each a tensor of shape (B, T, hidden_size).
SITES: Mapping[str, str] = {
    "layer_input": "what a decoder layer is given",
    "attention_input": "what its attention is given (behind the input norm)",
    "attention_output": "what its attention gives (before any norm behind it, and before it is added to the residual stream)",
    "mlp_input": "what its MLP is given",
    "mlp_output": "what its MLP gives (before any norm behind it)",
    "residual": "what the layer gives: the residual stream behind it",
    "final_hidden": "what the final norm is given; kept under the index of the last layer",
}

Intervention = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class _Tap:
    """One place of one layer: a module, and which end of it."""

    site: str
    layer: int
    module: nn.Module
    end: Literal["input", "output"]


#: What becomes of a tensor that passes a place: None leaves it as it is.
_Visit = Callable[[_Tap, torch.Tensor], torch.Tensor | None]


class _Hooked:
    """Registers hooks when entered and removes them when left; each entry has its own."""

    def __init__(self, taps: list[_Tap]) -> None:
        self._taps = taps
        self._entries: list[list[RemovableHandle]] = []

    def _enter(self, visit: _Visit) -> None:
        handles: list[RemovableHandle] = []
        try:
            for tap in self._taps:
                handles.append(_register(tap, visit))
        except BaseException:
            _remove(handles)
            raise
        self._entries.append(handles)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _remove(self._entries.pop())


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _register(tap: _Tap, visit: _Visit) -> RemovableHandle:
    if tap.end == "output":
        handle = tap.module.register_forward_hook(lambda _module, _args, output: _outgoing(tap, visit, output))
        # transformers leaves hooks behind once it was asked for hidden states. They go last, as on a model that was never asked:
        # `output_hidden_states` inside `intervene` then holds what the interventions made, whatever came before.
        for key, hook in list(tap.module._forward_hooks.items()):
            if str(getattr(hook, "__module__", "")).startswith("transformers."):
                tap.module._forward_hooks[key] = tap.module._forward_hooks.pop(key)
        return handle
    return tap.module.register_forward_pre_hook(
        lambda _module, args, kwargs: _incoming(tap, visit, args, kwargs), with_kwargs=True
    )


def _outgoing(tap: _Tap, visit: _Visit, output: Any) -> Any:
    if PROBING.get():
        return None
    packed = isinstance(output, tuple | list)
    tensor = output[0] if packed and output else output
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(_unreadable(tap, output))
    new = visit(tap, tensor)
    if new is None or not packed:
        return new
    return [new, *output[1:]] if isinstance(output, list) else (new, *output[1:])


def _incoming(tap: _Tap, visit: _Visit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if PROBING.get():
        return None
    name = None if args else next((n for n in ("hidden_states", "x", "input", "hidden") if n in kwargs), None)
    tensor = args[0] if args else kwargs.get(name) if name is not None else None
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(_unreadable(tap, args or kwargs))
    new = visit(tap, tensor)
    if new is None:
        return None
    return ((new, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: new})


class Captured(Mapping[str, Mapping[int, list[torch.Tensor]]]):
    """What was seen: ``seen[site][layer]`` is a list of tensors, one for each time the model was run, in that order."""

    def __init__(self, places: Mapping[str, Iterable[int]]) -> None:
        self._seen: dict[str, dict[int, list[torch.Tensor]]] = {
            site: {layer: [] for layer in layers} for site, layers in places.items()
        }

    def __getitem__(self, site: str) -> Mapping[int, list[torch.Tensor]]:
        if site not in self._seen:
            raise KeyError(f"{site!r} was not captured; captured were {', '.join(self._seen)}.")
        return self._seen[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._seen)

    def __len__(self) -> int:
        return len(self._seen)

    def last(self, site: str, layer: int) -> torch.Tensor:
        """The tensor of the latest run.

        Raises
        ------
        ValueError
            If the site or layer was not captured, or the model was not run.
        """
        if site not in self._seen:
            raise ValueError(f"{site!r} was not captured; captured were {', '.join(self._seen)}.")
        layers = self._seen[site]
        if layer < 0 and layers:
            layer = sorted(layers)[layer] if -layer <= len(layers) else layer
        if layer not in layers:
            raise ValueError(
                f"Layer {layer} was not captured at {site!r}; captured were {', '.join(map(str, layers))}."
            )
        if not layers[layer]:
            raise ValueError(f"Nothing passed {site!r} of layer {layer} yet: run the model inside the `with` block.")
        return layers[layer][-1]

    def clear(self) -> None:
        """Forgets what was seen so far."""
        for layers in self._seen.values():
            for tensors in layers.values():
                tensors.clear()

    def __repr__(self) -> str:
        counts = (f"{site}: {len(layers)} layers" for site, layers in self._seen.items())
        return f"Captured({'; '.join(counts)})"


class capture(_Hooked):
    """Keeps the tensors at one or more sites while the block runs.

    Parameters
    ----------
    model : nn.Module or Anatomy
        A causal language model. An `Anatomy` of it saves looking for its parts again.
    *sites : str
        Any of ``SITES``: ``layer_input``, ``attention_input``, ``attention_output``, ``mlp_input``, ``mlp_output``,
        ``residual`` and ``final_hidden``.
    layers : iterable of int, or int, optional
        Indices of layers, negative ones from the end; all that have the site by default.
    keep : {"all", "last"}
        Whether every run of the model is kept (``generate`` runs it once for each token) or only the latest.
    select : callable, optional
        What of a tensor is kept, for instance ``lambda hidden: hidden[:, -1]``.
    on : torch.device or str, optional
        Where the tensors are kept; where they are by default.
    detach : bool
        False keeps them in the graph, so that a loss can be computed from them.

    Yields
    ------
    Captured
        ``seen[site][layer]`` is a list of tensors of shape (B, T, hidden_size); ``seen.last(site, layer)`` the latest. They
        are copies, so that nobody changes them afterwards, and stay when the block has ended.

    Raises
    ------
    UnknownArchitecture
        If the parts of the model are not found.
    ValueError
        If there is no such site, or no such layer.

    Notes
    -----
    Inside an `intervene` block it sees what the interventions made; around one it sees what they were given, at the same
    site. It sees every run of the model, also those of other threads. Not for models under gradient checkpointing in training, whose layers run a second time in the backward pass and are
    then seen twice.
    """

    def __init__(
        self,
        model: nn.Module | Anatomy,
        *sites: str,
        layers: Iterable[int] | int | None = None,
        keep: Literal["all", "last"] = "all",
        select: Callable[[torch.Tensor], torch.Tensor] | None = None,
        on: torch.device | str | None = None,
        detach: bool = True,
    ) -> None:
        if keep not in ("all", "last"):
            raise ValueError(f"`keep` is 'all' or 'last', not {keep!r}.")
        super().__init__(_taps(model, sites, layers))
        self._keep, self._select, self._on, self._detach = keep, select, on, detach

    def __enter__(self) -> Captured:
        places: dict[str, list[int]] = {}
        for tap in self._taps:
            places.setdefault(tap.site, []).append(tap.layer)
        target = Captured(places)
        self._enter(lambda tap, tensor: self._keep_in(target._seen[tap.site][tap.layer], tensor))
        return target

    def _keep_in(self, seen: list[torch.Tensor], tensor: torch.Tensor) -> None:
        kept = tensor.detach() if self._detach else tensor
        kept = kept if self._select is None else self._select(kept)
        kept = kept.clone() if self._on is None else kept.to(self._on, copy=True)
        if self._keep == "last":
            seen.clear()
        seen.append(kept)


class intervene(_Hooked):
    """Replaces the tensors at one or more sites while the block runs.

    Parameters
    ----------
    model : nn.Module or Anatomy
        A causal language model. An `Anatomy` of it saves looking for its parts again.
    interventions : mapping of str to callable
        For each site (see `capture`) a function of a tensor of shape (B, T, hidden_size) and the index of the layer, which
        returns a tensor of the same shape. It may change the tensor that it is given, which is a copy, but must return it.
    layers : iterable of int, or int, optional
        Indices of layers, negative ones from the end; all that have the site by default.

    Raises
    ------
    UnknownArchitecture
        If the parts of the model are not found.
    ValueError
        If there is no such site or layer; while the model runs, if a function returns something else than a tensor of the
        same shape on the same device.

    Notes
    -----
    Gradients flow through what the functions return. The result takes the dtype of what it replaces. Weights stay as they
    are. Blocks nest: the outer intervention comes first. Under ``generate`` with a cache the functions see the whole prompt
    once and then one token at a time.
    """

    def __init__(
        self,
        model: nn.Module | Anatomy,
        interventions: Mapping[str, Intervention],
        *,
        layers: Iterable[int] | int | None = None,
    ) -> None:
        if not isinstance(interventions, Mapping):
            raise TypeError(
                "Interventions are a mapping of sites to functions, such as {'residual': lambda hidden, layer: 2 * hidden}, "
                f"not a {type(interventions).__name__}."
            )
        for site, function in interventions.items():
            if not callable(function):
                raise TypeError(f"The intervention at {site!r} is a {type(function).__name__}, not a function.")
        super().__init__(_taps(model, tuple(interventions), layers))
        self._interventions = dict(interventions)

    def __enter__(self) -> intervene:
        self._enter(self._replaced)
        return self

    def _replaced(self, tap: _Tap, tensor: torch.Tensor) -> torch.Tensor:
        new = self._interventions[tap.site](tensor.clone(), tap.layer)
        place = f"The intervention at {tap.site!r} of layer {tap.layer}"
        if not isinstance(new, torch.Tensor):
            raise ValueError(
                f"{place} returned {'None' if new is None else type(new).__name__}; return the new tensor."
            )
        if new.shape != tensor.shape:
            raise ValueError(f"{place} returned the shape {tuple(new.shape)}, but was given {tuple(tensor.shape)}.")
        if new.device != tensor.device:
            raise ValueError(f"{place} returned a tensor on {new.device}, but the model's is on {tensor.device}.")
        return new.to(tensor.dtype)


def hooks_of(model: nn.Module) -> int:
    """The number of hooks, of any kind, on a model's modules; for tests that none stays behind.

    Those that transformers leaves for good when it is first asked for hidden states or attention weights are not counted.
    """
    kinds = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    )
    hooks = (hook for module in model.modules() for kind in kinds for hook in getattr(module, kind, {}).values())
    return sum(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks)


def _taps(model: nn.Module | Anatomy, sites: tuple[str, ...], layers: Iterable[int] | int | None) -> list[_Tap]:
    for site in sites:
        if not isinstance(site, str) or site not in SITES:
            near = difflib.get_close_matches(str(site), SITES, n=2, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(SITES)}."
            raise ValueError(f"There is no site {site!r}; {hint}")
    if not sites:
        raise ValueError(f"Say at least one site; there are {', '.join(SITES)}.")
    parts = model if isinstance(model, Anatomy) else anatomy(model)
    chosen = _chosen(parts, layers)
    taps: list[_Tap] = []
    for site in dict.fromkeys(sites):
        if site == "final_hidden":
            taps.append(_Tap(site, parts.n_layers - 1, parts.final_norm, "input"))
            continue
        found = [(layer, _end(site, layer)) for layer in chosen]
        missing = [layer.index for layer, end in found if end is None]
        if missing and (layers is not None or len(missing) == len(found)):
            raise ValueError(f"Layer {missing[0]} has no {site!r}: {_why_none(site)}.")
        taps += [_Tap(site, layer.index, *end) for layer, end in found if end is not None]
    return taps


def _chosen(parts: Anatomy, layers: Iterable[int] | int | None) -> list[Layer]:
    if layers is None:
        return list(parts.layers)
    indices = [layers] if isinstance(layers, int) else list(layers)
    n = parts.n_layers
    if not indices:
        raise ValueError("Say at least one layer, or leave `layers` out for all of them.")
    for index in indices:
        if isinstance(index, bool) or not hasattr(index, "__index__"):
            raise TypeError(f"Layers are whole numbers, not {index!r}.")
        if not -n <= index < n:
            raise ValueError(f"There is no layer {index}; this model has the layers 0 to {n - 1}.")
    return [parts.layers[index] for index in sorted({int(index) % n for index in indices})]


def _end(site: str, layer: Layer) -> tuple[nn.Module, Literal["input", "output"]] | None:
    module: nn.Module | None = layer.module
    if site.startswith("attention"):
        module = None if layer.attention is None else layer.attention.module
    elif site.startswith("mlp"):
        module = None if layer.mlp is None else layer.mlp.module
    if module is None:
        return None
    return module, "input" if site.endswith("input") else "output"


def _why_none(site: str) -> str:
    return "it has no softmax attention" if site.startswith("attention") else "its MLP is no module of its own"


def _unreadable(tap: _Tap, value: Any) -> str:
    return (
        f"The {tap.end} of {type(tap.module).__name__} at {tap.site!r} of layer {tap.layer} is a {type(value).__name__} "
        "without a tensor in the first place."
    )
