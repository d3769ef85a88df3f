"""How the parts of a model are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from cameraready.models.structure import shapes
from cameraready.models.structure.attention import find_attention
from cameraready.models.structure.errors import UnknownArchitecture
from cameraready.models.structure.examination import examined
from cameraready.models.structure.parts import Anatomy
from cameraready.models.structure.reading import read_layers
from cameraready.models.structure.rotary import RotarySource


def anatomy(model: nn.Module) -> Anatomy:
    """The parts of a decoder-only language model, found by structure.

    The decoder is the list of modules that each hold an attention (query, key and value projections, separate or fused) and
    that stands nearest to the token embedding; so wrappers (PEFT, torch.compile, a model for images and text) do not hide
    it. What the parts say is then checked against one run of the model on seven tokens: the attention of every layer put
    together from its queries, keys and values, and the logits, must come out as the model gives them. What does not is refused
    when it is asked for, rather than described wrongly. Nothing of the model changes, no hook stays, and the outcome is
    remembered for as long as the model keeps its modules.

    Parameters
    ----------
    model : nn.Module
        A causal language model of transformers, with its head, wrapped or not, on any device and of any dtype.

    Returns
    -------
    Anatomy

    Raises
    ------
    UnknownArchitecture
        If it is no decoder-only language model with attention. The message says what is missing.
    TypeError
        If it is no model at all.

    Notes
    -----
    Not for encoders, encoder-decoders and models without attention (Mamba, RWKV). After modules were replaced or wrapped (by
    PEFT, say) ask for a new anatomy.

    Examples
    --------
    >>> from cameraready.models import anatomy, tiny_model
    >>> parts = anatomy(tiny_model("qwen3"))
    >>> parts.n_layers, parts.layers[0].attention.n_kv_heads, parts.layers[0].attention.rotary
    (2, 2, 'half')
    """
    if not isinstance(model, nn.Module):
        raise TypeError(_no_model(model))
    name = type(model).__name__
    configured = next((part for part in shapes.unwrapped(model) if hasattr(part, "config")), None)
    if configured is None:
        raise UnknownArchitecture(f"{name} has no `config`, so it is no language model of transformers.")
    _refuse_other_kinds(configured, name)
    embedding, head = _ends(configured, name)
    path, stack = _stack(configured, embedding, name)
    decoder = configured.get_submodule(path.rpartition(".")[0])
    config = _text_config(decoder if hasattr(decoder, "config") else configured)
    size = shapes.linear_size(head)
    assert size is not None
    source = RotarySource(decoder, getattr(config, "layer_types", None))
    layers = read_layers(stack, config, size[0])
    scale, softcap, finish = _finish(config)
    found = Anatomy(
        model=model,
        decoder=decoder,
        layers=layers,
        embedding=embedding,
        final_norm=_final_norm(decoder, stack, size[0], name),
        head=head,
        tied=getattr(head, "weight", None) is getattr(embedding, "weight", head),
        hidden_size=size[0],
        vocab_size=size[1],
        finish=finish,
        logit_scale=scale,
        final_softcap=softcap,
        rotary_source=source,
        rotary_modules=tuple(
            source.module_of(
                layer.index,
                f"{path.rpartition('.')[2]}.{layer.index}",
                None if layer.attention is None else layer.attention.sliding_window,
            )
            for layer in layers
        ),
    )
    return examined(found, _around(configured, stack, embedding, head), config)


def _no_model(value: Any) -> str:
    if hasattr(value, "model") and hasattr(value, "tokenizer"):
        return f"A model was expected, not a {type(value).__name__}; pass its `.model`."
    return f"A model (a torch.nn.Module) was expected, but this is a {type(value).__name__}."


def _refuse_other_kinds(model: nn.Module, name: str) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnknownArchitecture(f"{name} is an encoder-decoder; this needs a model with a decoder alone.")
    generates = getattr(model, "can_generate", None)
    if callable(generates) and not generates():
        raise UnknownArchitecture(
            f"{name} does not generate text; this needs a causal language model with its head, as AutoModelForCausalLM "
            "opens it."
        )


def _ends(model: nn.Module, name: str) -> tuple[nn.Module, nn.Module]:
    """Token embedding and head, as the model itself declares them."""
    ends = []
    for asked, what in (("get_input_embeddings", "token embedding"), ("get_output_embeddings", "language-model head")):
        method = getattr(model, asked, None)
        try:
            part = method() if callable(method) else None
        except (NotImplementedError, AttributeError):
            part = None
        if not isinstance(part, nn.Module):
            raise UnknownArchitecture(
                f"{name} has no {what} (its `{asked}()` gives none); this needs a causal language model with its head, "
                "as AutoModelForCausalLM opens it."
            )
        ends.append(part)
    if shapes.linear_size(ends[1]) is None:
        raise UnknownArchitecture(f"The head of {name} is a {type(ends[1]).__name__}, not one linear map.")
    return ends[0], ends[1]


def _stack(model: nn.Module, embedding: nn.Module, name: str) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers: it holds attention, and no list nearer to the token embedding does."""
    inside = {path for path, module in model.named_modules(remove_duplicate=False) if module is embedding}
    found = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and any(find_attention(member) is not None for member in module):
            steps = min(_steps_apart(path, other) for other in inside)
            found.append((steps, -len(module), path, module))
    if not found:
        raise UnknownArchitecture(
            f"{name} has no list of layers with attention (query, key and value projections, separate or fused); "
            "models of other kinds, such as state-space models, are not supported."
        )
    _, _, path, stack = min(found, key=lambda entry: entry[:2])
    return path, stack


def _steps_apart(path: str, other: str) -> int:
    """Levels one has to go up from a path until the other lies below."""
    above, steps = path, 0
    while above and not other.startswith(above + "."):
        above, steps = above.rpartition(".")[0], steps + 1
    return steps


def _around(model: nn.Module, *parts: nn.Module) -> nn.Module:
    """The innermost module that holds all the parts: the language model itself within its wrappers."""
    wanted = {id(part) for part in parts}
    around = model
    for module in model.modules():
        if wanted <= {id(part) for part in module.modules()}:
            around = module
    return around


def _text_config(module: nn.Module) -> Any:
    """The configuration of the part that makes text."""
    config: Any = module.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _final_norm(decoder: nn.Module, stack: nn.ModuleList, hidden_size: int, name: str) -> nn.Module:
    """The last norm beside the layers, registered behind them or called final."""
    children = list(decoder.named_children())
    place = next(i for i, (_, part) in enumerate(children) if part is stack)
    norms = [
        part
        for i, (child, part) in enumerate(children)
        if shapes.is_norm(part, hidden_size) and (i > place or "final" in child)
    ]
    if not norms:
        raise UnknownArchitecture(f"{name} has no norm behind its last layer.")
    return norms[-1]


def _finish(config: Any) -> tuple[float, float | None, tuple[Callable[[torch.Tensor], torch.Tensor], ...]]:
    """What the model does to the logits behind its head, step by step as it does it, so that no bit differs."""
    steps: list[Callable[[torch.Tensor], torch.Tensor]] = []
    scale = 1.0
    multiplied = _number(config, "logit_scale", "lm_head_multiplier")
    if multiplied is not None:
        scale *= multiplied
        steps.append(lambda logits: logits * multiplied)
    divided = _number(config, "logits_scaling")
    if divided is not None:
        scale /= divided
        steps.append(lambda logits: logits / divided)
    softcap = _number(config, "final_logit_softcapping", "logits_soft_cap")
    if softcap is not None:
        steps.append(lambda logits: torch.tanh(logits / softcap) * softcap)
    return scale, softcap, tuple(steps)


def _number(config: Any, *names: str) -> float | None:
    values: Iterator[Any] = (getattr(config, name, None) for name in names)
    return next((float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool) and v), None)
