"""Rotary positions: which pairs of features a model turns together, by how much, and the turn itself."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from cameraready.models.structure.errors import UnknownArchitecture

RotaryKind = Literal["half", "interleaved"]
#: Cosines and sines, each of shape (B, T, R).
Angles = tuple[torch.Tensor, torch.Tensor]
#: How a model's own cosines become those of its turn: as they are, the first half with each entry twice, twice in a row.
Layout = Literal["same", "spread", "doubled"]


def rotate(x: torch.Tensor, kind: RotaryKind) -> torch.Tensor:
    """Each pair (a, b) of features turned by a right angle into (-b, a).

    Parameters
    ----------
    x : torch.Tensor, shape (..., D)
        Any features, D even.
    kind : {"half", "interleaved"}
        Whether feature i goes with feature i + D/2, or 2i with 2i + 1.
    """
    if kind == "half":
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)
    if kind == "interleaved":
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    raise ValueError(f"A rotary kind is 'half' or 'interleaved', not {kind!r}.")


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kind: RotaryKind | None) -> torch.Tensor:
    """Queries or keys at their positions (Su et al., 2021, arXiv:2104.09864, Eq. 34).

    Parameters
    ----------
    x : torch.Tensor, shape (B, heads, T, D)
        Queries or keys before positions.
    cos, sin : torch.Tensor, shape (B, T, R) with R <= D
        From `Anatomy.rotary`. Features from R on are left as they are (partial rotary positions).
    kind : {"half", "interleaved"} or None
        `Attention.rotary`. None (no rotary positions) gives `x` back.

    Returns
    -------
    torch.Tensor, shape (B, heads, T, D)
        In the dtype of `x`.

    Raises
    ------
    ValueError
        If the angles are of more features than `x` has, or the kind is unknown.
    """
    if kind is None:
        return x
    size = cos.shape[-1]
    if size > x.shape[-1]:
        raise ValueError(f"The angles are of {size} features, but the heads have only {x.shape[-1]}.")
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    # Some models keep their angles in float32 whatever their dtype (OLMo 2), and so turn with more digits.
    turned = (x[..., :size] * cos + rotate(x[..., :size], kind) * sin).to(x.dtype)
    return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), dim=-1)


def laid_out(angle: torch.Tensor, layout: Layout, kind: RotaryKind) -> torch.Tensor:
    """A model's own cosines or sines with one entry for each feature in the order of the pairs."""
    if layout == "spread":
        return angle[..., : angle.shape[-1] // 2].repeat_interleave(2, dim=-1)
    if layout == "doubled":
        return torch.cat((angle, angle), dim=-1) if kind == "half" else angle.repeat_interleave(2, dim=-1)
    return angle


class RotarySource:
    """The modules of a model that give the angles, called as this model's release of transformers calls them."""

    def __init__(self, decoder: nn.Module, layer_types: list[str] | None) -> None:
        self._layer_types = layer_types
        # With duplicates: other libraries hang a shared module into every layer (kvpress does, and leaves it there).
        every = decoder.named_modules(remove_duplicate=False)
        self._paths = {path: module for path, module in every if _gives_angles(module)}
        outside = {id(module) for path, module in self._paths.items() if not _in_numbered(path)}
        self._shared = {path: module for path, module in self._paths.items() if not _in_numbered(path)}
        self._own = {path: module for path, module in self._paths.items() if id(module) not in outside}

    def module_of(self, layer: int, path: str, window: int | None) -> nn.Module | None:
        """The module that layer `layer`, found at `path`, takes its angles from."""
        chosen = [module for name, module in self._own.items() if name.startswith(path + ".")]
        if not chosen:
            # Outside of all layers: one for all, or one for sliding windows and one for the rest (Gemma 3 before transformers 5).
            local = [module for name, module in self._shared.items() if "local" in name.rpartition(".")[2]]
            others = [module for name, module in self._shared.items() if "local" not in name.rpartition(".")[2]]
            chosen = local if window is not None and local else others
        return chosen[0] if chosen else None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Puts back what running the modules changes of them: frequencies that depend on the longest input (dynamic NTK)."""
        before = [(module, _state(module)) for module in dict.fromkeys(self._paths.values())]
        try:
            yield
        finally:
            for module, state in before:
                _put_back(module, state)

    def raw(
        self, module: nn.Module, positions: torch.Tensor, layer: int, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) exactly as the model's layers receive them."""
        names = inspect.signature(module.forward).parameters
        arguments: dict[str, Any] = {}
        if "layer_type" in names and self._layer_types is not None:
            arguments["layer_type"] = self._layer_types[layer]
        if "position_ids" not in names:
            raise UnknownArchitecture(
                f"{type(module).__name__} gives rotary angles, but takes no `position_ids`; it takes {', '.join(names)}."
            )
        try:
            with self.kept():
                angles = module(like, position_ids=self._in_sections(module, positions), **arguments)
        except (TypeError, KeyError, ValueError, AttributeError, RuntimeError) as error:
            raise UnknownArchitecture(
                f"{type(module).__name__} does not give the rotary angles of layer {layer} "
                f"({type(error).__name__}: {error})."
            ) from error
        if not (isinstance(angles, tuple) and len(angles) == 2):
            raise UnknownArchitecture(f"{type(module).__name__} gives rotary angles as something else than (cos, sin).")
        cos, sin = angles
        return (cos[0], sin[0]) if cos.ndim == 4 else (cos, sin)

    @staticmethod
    def _in_sections(module: nn.Module, positions: torch.Tensor) -> torch.Tensor:
        """Text positions for models that count time, height and width apart: the same in all three."""
        if getattr(module, "mrope_section", None) is not None:
            return positions[None].expand(3, *positions.shape)
        return positions


_State = tuple[dict[str, Any], dict[str, torch.Tensor | None], dict[str, torch.Tensor]]


def _state(module: nn.Module) -> _State:
    contents = {name: buffer.clone() for name, buffer in module._buffers.items() if buffer is not None}
    return vars(module).copy(), module._buffers.copy(), contents


def _put_back(module: nn.Module, state: _State) -> None:
    """Only what differs is touched: the module may be running elsewhere."""
    attributes, buffers, contents = state
    for now, then in ((vars(module), attributes), (module._buffers, buffers)):
        for name in set(now) - set(then):
            del now[name]
        now.update({name: value for name, value in then.items() if now.get(name) is not value})
    for name, content in contents.items():
        buffer = module._buffers[name]
        if buffer is not None and not buffer.is_meta and not torch.equal(buffer, content):
            buffer.copy_(content)


def _in_numbered(name: str) -> bool:
    return any(piece.isdigit() for piece in name.split("."))


def _gives_angles(module: nn.Module) -> bool:
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def declared_kind(attention: nn.Module, cos: torch.Tensor, sin: torch.Tensor) -> tuple[RotaryKind, Layout] | None:
    """How the code of an attention module applies rotary positions, found by applying it to features that tell.

    Its module's own function `apply_rotary_pos_emb` (or one alike) turns random features by the model's own angles; what
    comes out is compared with every way there is. None where there is no such function or no way fits.
    """
    functions = _rotary_functions(attention)
    cos, sin = cos.double(), sin.double()
    for function in functions:
        for size in (cos.shape[-1], 2 * cos.shape[-1]):
            generator = torch.Generator().manual_seed(0)
            features = torch.randn(1, 1, cos.shape[-2], size, generator=generator, dtype=torch.float64).to(cos.device)
            turned = _turned(function, features, cos, sin)
            if turned is None or turned.shape != features.shape:
                continue
            for kind, layout in ways(cos.shape[-1], size):
                ours = apply_rotary(features, laid_out(cos, layout, kind), laid_out(sin, layout, kind), kind)
                if torch.allclose(ours, turned.double(), rtol=1e-4, atol=1e-4):
                    return kind, layout
    return None


def spoken_kind(attention: nn.Module) -> RotaryKind | None:
    """The kind of turn by the function `rotate_half` beside an attention's class alone, for models without weights."""
    function = vars(sys.modules[type(attention).__module__]).get("rotate_half")
    if not callable(function):
        return None
    features = torch.arange(4.0)
    turned = function(features)
    kinds: tuple[RotaryKind, ...] = ("half", "interleaved")
    return next((kind for kind in kinds if torch.equal(rotate(features, kind), turned)), None)


def ways(angles: int, features: int) -> list[tuple[RotaryKind, Layout]]:
    """Ways of turning `features` features by as many angles or by half as many."""
    if angles == features:
        return [("half", "same"), ("interleaved", "same"), ("interleaved", "spread")]
    return [("half", "doubled"), ("interleaved", "doubled")] if 2 * angles == features else []


def _rotary_functions(attention: nn.Module) -> list[Callable[..., Any]]:
    namespace = vars(sys.modules[type(attention).__module__])
    prefixes = ("apply_rotary", "apply_multimodal_rotary", "_apply_rotary")
    return [value for name, value in namespace.items() if name.startswith(prefixes) and callable(value)]


def _turned(
    function: Callable[..., Any], features: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor | None:
    """What a function of somebody else makes of the features; None where it is called another way."""
    for arguments in ((features, features, cos, sin), (features, cos[:, None], sin[:, None])):
        try:
            result = function(*arguments)
        except (TypeError, RuntimeError, IndexError, ValueError, AttributeError):
            continue
        result = result[0] if isinstance(result, tuple) else result
        if isinstance(result, torch.Tensor) and not result.is_complex():
            return result
    return None
