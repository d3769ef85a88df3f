"""A model is asked what it does: it is run once on a few tokens, and what passes is compared with what its parts say."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from cameraready.models.structure.attending import attend
from cameraready.models.structure.attention import Attention, FusedLayout
from cameraready.models.structure.rotary import Angles, Layout, RotaryKind, laid_out, ways

#: True while a model runs only to be asked; captures and interventions look away then.
PROBING: ContextVar[bool] = ContextVar("probing", default=False)

#: Tokens of the run that asks: more than one, to see positions and masks.
LENGTH = 7


@dataclass
class Flow:
    """What one module was given and what it gave; the last time if it ran more than once."""

    given: torch.Tensor | None = None
    gave: torch.Tensor | None = None
    angles: Angles | None = None

    def follows(self, other: Flow | None) -> bool:
        """Whether it was given what the other gave."""
        return other is not None and _same_memory(self.given, other.gave)


@dataclass
class Observation:
    """What passed while a model ran; `failure` says why it could not be run."""

    flows: dict[nn.Module, Flow]
    logits: torch.Tensor | None = None
    failure: str | None = None


def observe(model: nn.Module, modules: Iterable[nn.Module], vocab_size: int) -> Observation:
    """Runs a language model once on `LENGTH` tokens and notes what passes some of its modules."""
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    if weight is None or any(p.is_meta for p in model.parameters()):
        return Observation({}, failure="its weights are not loaded")
    flows = {module: Flow() for module in modules}
    ids = ((vocab_size // 3 + torch.arange(LENGTH)) % vocab_size)[None]
    with contextlib.ExitStack() as hooks:
        for module, flow in flows.items():
            hooks.callback(module.register_forward_pre_hook(_incoming(flow), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(_outgoing(flow), prepend=True).remove)
        hooks.enter_context(quietly(model))
        try:
            output = model(input_ids=ids.to(_entrance(model, weight)), use_cache=False)
        except (
            TypeError,
            RuntimeError,
            ValueError,
            AttributeError,
            IndexError,
            KeyError,
            NotImplementedError,
        ) as error:
            reason = str(error).strip().partition("\n")[0]
            return Observation({}, failure=f"it does not run on tokens alone ({type(error).__name__}: {reason})")
    logits = getattr(output, "logits", output[0] if isinstance(output, tuple) else None)
    return Observation(flows, logits)


def _entrance(model: nn.Module, weight: torch.Tensor) -> torch.device:
    """Where tokens go in; a model may lie on several devices."""
    asked = getattr(model, "get_input_embeddings", None)
    embedding = asked() if callable(asked) else None
    device = getattr(getattr(embedding, "weight", weight), "device", weight.device)
    return device if isinstance(device, torch.device) else weight.device


def _incoming(flow: Flow) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
        flow.given = given if isinstance(given, torch.Tensor) else None
        angles = kwargs.get("position_embeddings")
        if isinstance(angles, tuple) and len(angles) == 2 and all(isinstance(x, torch.Tensor) for x in angles):
            cos, sin = angles
            flow.angles = (cos[0], sin[0]) if cos.ndim == 4 else (cos, sin)

    return hook


def _outgoing(flow: Flow) -> Any:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        gave = output[0] if isinstance(output, tuple | list) and output else output
        flow.gave = gave if isinstance(gave, torch.Tensor) else None

    return hook


def _same_memory(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or one.numel() != other.numel():
        return False
    return one is other or (one.data_ptr() == other.data_ptr() and one.data_ptr() != 0)


def settle(
    declared: Attention, flow: Flow, angles: Angles | None, windows: Iterable[int | None], *, like_another: bool
) -> Attention | None:
    """The attention with the rotary kind, fused layout and window with which its pieces give what its module gave.

    As declared, if that fits about as well as any other way; None where no way fits. What was found of another layer
    (`like_another`) is taken without looking at other ways if it fits.
    """
    if flow.given is None or flow.gave is None or flow.given.shape != flow.gave.shape:
        return None
    first = _error(declared, flow, angles)
    tolerance = tolerance_of(flow.gave.dtype)
    # Within rounding: nothing else could fit better by more than it.
    if first < tolerance / (3 if like_another else 20):
        return replace(declared, verified=True)
    errors = [(_error(way, flow, angles), way) for way in _candidates(declared, angles, windows)]
    least, best = min(errors, key=lambda pair: pair[0], default=(first, declared))
    if first <= 2 * least:
        least, best = first, declared
    return replace(best, verified=True) if least < tolerance else None


def tolerance_of(dtype: torch.dtype) -> float:
    """Relative error that counts as the same.

    Rounding makes 3e-7 in float32 and 3e-3 in bfloat16 on trained models; the least wrong of other rotary kinds is off by 4e-2.
    """
    return 1e-3 if dtype in (torch.float32, torch.float64) else 1.5e-2


def _candidates(declared: Attention, angles: Angles | None, windows: Iterable[int | None]) -> list[Attention]:
    """Every way of turning, or none; both orders of a fused projection; every window."""
    turns: list[tuple[RotaryKind | None, Layout]] = [(None, "same")]
    if angles is not None:
        size = angles[0].shape[-1]
        turns += [*ways(size, size), *ways(size, 2 * size)]
    layouts: tuple[FusedLayout | None, ...] = (None,) if declared.fused_layout is None else ("parts", "groups")
    return [
        replace(declared, rotary=kind, rotary_layout=layout, fused_layout=fused, sliding_window=window)
        for kind, layout in turns
        for fused in layouts
        for window in dict.fromkeys((declared.sliding_window, *windows))
    ]


def _error(way: Attention, flow: Flow, angles: Angles | None) -> float:
    """Relative error of the attention put together."""
    assert flow.given is not None
    assert flow.gave is not None
    turned = None
    if way.rotary is not None:
        if angles is None:
            return float("inf")
        cos, sin = (laid_out(angle, way.rotary_layout, way.rotary) for angle in angles)
        if cos.shape[-1] > way.head_dim:
            return float("inf")
        turned = (cos, sin)
    try:
        with torch.no_grad():
            return relative_error(attend(way, flow.given, turned), flow.gave)
    except (RuntimeError, ValueError, IndexError):  # shapes that do not go together: not this way
        return float("inf")


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """||ours - theirs|| / ||theirs||, infinite where either is not a number."""
    ours, theirs = ours.double(), theirs.to(ours.device).double()
    error = float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30))
    return error if error == error else float("inf")


@contextlib.contextmanager
def quietly(module: nn.Module) -> Iterator[None]:
    """Runs modules unseen: without gradients, dropout, captures and interventions."""
    training = [part for part in module.modules() if part.training]
    token = PROBING.set(True)
    try:
        for part in training:
            part.training = False
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True
        PROBING.reset(token)
