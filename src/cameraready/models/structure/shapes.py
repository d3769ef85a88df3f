"""What a module is, judged by its weights rather than by its class: linear maps, norms, modules with a name like these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

#: Names of projections in the models at large, each by its part.
QUERY = ("q_proj", "query_proj", "query", "wq", "q_lin", "q")
KEY = ("k_proj", "key_proj", "key", "wk", "k_lin", "k")
VALUE = ("v_proj", "value_proj", "value", "wv", "v_lin", "v")
OUTPUT = ("o_proj", "out_proj", "c_proj", "dense", "wo", "resid_proj", "out_lin", "proj", "o")
FUSED = ("qkv_proj", "query_key_value", "c_attn", "wqkv", "qkv", "w_pack", "att_proj", "in_proj_qkv")
QUERY_NORM = ("q_norm", "q_layernorm", "query_norm", "norm_q", "q_ln")
KEY_NORM = ("k_norm", "k_layernorm", "key_norm", "norm_k", "k_ln")
VALUE_NORM = ("v_norm",)
GATE = ("gate_proj", "w1", "wi_0", "gate")
UP = ("up_proj", "w3", "wi_1", "c_fc", "dense_h_to_4h", "fc1", "fc_in", "linear_in")
DOWN = ("down_proj", "w2", "wo", "c_proj", "dense_4h_to_h", "fc2", "fc_out", "linear_out")
GATE_UP = ("gate_up_proj",)


def linear_size(module: nn.Module | None) -> tuple[int, int] | None:
    """(inputs, outputs) of a linear map, also when it is quantised, adapted or GPT-2's transposed one; None for others."""
    if module is None:
        return None
    inputs, outputs = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if isinstance(inputs, int) and isinstance(outputs, int):
        return inputs, outputs
    weight, outputs = getattr(module, "weight", None), getattr(module, "nf", None)
    if isinstance(outputs, int) and weight is not None and weight.ndim == 2:
        return int(weight.shape[0]), outputs
    return None


def is_norm(module: nn.Module, size: int | None = None) -> bool:
    """Whether a module normalises features: a vector as its weight (of `size` entries, where given) or none, and the name."""
    if linear_size(module) is not None or any(True for _ in module.children()):
        return False
    weight = getattr(module, "weight", None)
    if weight is not None and (weight.ndim != 1 or (size is not None and weight.shape[0] != size)):
        return False
    return "norm" in type(module).__name__.lower()


def child(module: nn.Module, names: Iterable[str]) -> nn.Module | None:
    """The direct child with the first of the names, in small letters, that there is."""
    children = {name.lower(): part for name, part in module.named_children()}
    return next((children[name] for name in names if name in children), None)


def linear_child(module: nn.Module, names: Iterable[str]) -> nn.Module | None:
    """The same among linear maps."""
    children = {name.lower(): part for name, part in module.named_children() if linear_size(part) is not None}
    return next((children[name] for name in names if name in children), None)


def path_of(model: nn.Module, part: nn.Module) -> str | None:
    """The dotted name of a part of a model."""
    return next((name for name, module in model.named_modules() if module is part), None)


def unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """A model and what its wrappers (torch.compile, data parallelism) hold, the outermost first."""
    seen: set[int] = set()
    while isinstance(model, nn.Module) and id(model) not in seen:
        seen.add(id(model))
        yield model
        inner = model._modules.get("_orig_mod") or model._modules.get("module")
        if inner is None:
            return
        model = inner
