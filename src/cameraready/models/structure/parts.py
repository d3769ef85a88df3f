"""The parts of a decoder-only language model, found by structure: layers, attention, projections, norms and head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from cameraready.models.structure.attention import Attention
from cameraready.models.structure.errors import UnknownArchitecture
from cameraready.models.structure.probing import quietly
from cameraready.models.structure.rotary import RotarySource, laid_out


@dataclass(frozen=True, eq=False)
class Mlp:
    """The feed-forward part of a layer.

    Attributes
    ----------
    module : nn.Module
        What the layer calls.
    gate_proj, up_proj, down_proj : nn.Module or None
        Linear maps of ``down(act(gate(x)) * up(x))``, or of ``down(act(up(x)))`` where `gate_proj` is None. All None in a
        mixture of experts.
    fused_gate_up : nn.Module or None
        One linear map that gives gate and up side by side.
    """

    module: nn.Module
    gate_proj: nn.Module | None = None
    up_proj: nn.Module | None = None
    down_proj: nn.Module | None = None
    fused_gate_up: nn.Module | None = None


@dataclass(frozen=True, eq=False)
class Layer:
    """One decoder layer.

    Attributes
    ----------
    index : int
        Place in the stack, from 0.
    module : nn.Module
        The layer itself; its output is the residual stream.
    attention : Attention or None
        None where the layer mixes tokens by other means (linear attention, a state-space model).
    mlp : Mlp or None
        None where it is no module of its own.
    input_norm : nn.Module or None
        Norm whose output the attention is given.
    mlp_norm : nn.Module or None
        Norm whose output the MLP is given; the same as `input_norm` where both run side by side on one.
    attention_post_norm, mlp_post_norm : nn.Module or None
        Norms of what attention and MLP give, before it is added to the residual stream.
    """

    index: int
    module: nn.Module
    attention: Attention | None
    mlp: Mlp | None
    input_norm: nn.Module | None
    mlp_norm: nn.Module | None
    attention_post_norm: nn.Module | None
    mlp_post_norm: nn.Module | None

    @property
    def post_attention_norms(self) -> tuple[nn.Module, ...]:
        """Norms between attention and MLP, in the order in which they run."""
        between = (self.attention_post_norm, None if self.mlp_norm is self.input_norm else self.mlp_norm)
        return tuple(norm for norm in between if norm is not None)

    @property
    def post_attention_norm(self) -> nn.Module | None:
        """The last norm between attention and MLP: what feeds the MLP in Llama, Qwen and Gemma."""
        norms = self.post_attention_norms
        return norms[-1] if norms else None


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The parts of a decoder-only language model; made by `anatomy`.

    Attributes
    ----------
    model : nn.Module
        What was asked about.
    decoder : nn.Module
        The module that runs the layers and the final norm.
    layers : tuple of Layer
    embedding, final_norm, head : nn.Module
        Token embedding, norm behind the last layer, and linear map to the vocabulary.
    tied : bool
        Whether head and embedding share one weight.
    hidden_size, vocab_size, n_layers : int
        Features of the residual stream, logits, layers.
    logit_scale : float
        Factor of the logits (Cohere, Granite), 1 elsewhere.
    final_softcap : float or None
        c, where logits are ``c * tanh(logits / c)`` (Gemma 2).
    finish : tuple of callables
        What happens to the logits behind the head, in order: scale, soft-cap.
    logits_refusal : str or None
        Why `logits` raises, where the model makes its logits in another way.
    unverified : str or None
        Why the parts could not be checked against a run of the model (its weights are not loaded, say); None if they were.
    """

    model: nn.Module
    decoder: nn.Module
    layers: tuple[Layer, ...]
    embedding: nn.Module
    final_norm: nn.Module
    head: nn.Module
    tied: bool
    hidden_size: int
    vocab_size: int
    finish: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = field(repr=False)
    logit_scale: float = 1.0
    final_softcap: float | None = None
    logits_refusal: str | None = None
    unverified: str | None = None
    rotary_source: RotarySource | None = field(default=None, repr=False)
    rotary_modules: tuple[nn.Module | None, ...] = field(default=(), repr=False)

    @property
    def n_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    def logits(self, hidden: torch.Tensor, *, normed: bool = False) -> torch.Tensor:
        """Logits of hidden states, exactly as the model makes them.

        Parameters
        ----------
        hidden : torch.Tensor, shape (..., hidden_size)
            The residual stream behind any layer (an early one gives a logit lens), or with `normed` what the final norm gave.
        normed : bool
            Whether the final norm was applied already (``last_hidden_state``, the last of ``output_hidden_states``).

        Returns
        -------
        torch.Tensor, shape (..., vocab_size)

        Raises
        ------
        ValueError
            If the last axis is not the model's hidden size.
        UnknownArchitecture
            If the model makes its logits in another way (see `logits_refusal`).
        """
        if self.logits_refusal is not None:
            raise UnknownArchitecture(self.logits_refusal)
        if hidden.shape[-1] != self.hidden_size:
            raise ValueError(f"Hidden states have {hidden.shape[-1]} features, but this model has {self.hidden_size}.")
        logits = self.head(hidden if normed else self.final_norm(hidden))
        for step in self.finish:
            logits = step(logits)
        return logits

    def rotary(self, positions: torch.Tensor, *, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the rotary angles of one layer, for `apply_rotary` with the layer's `rotary` kind.

        Parameters
        ----------
        positions : torch.Tensor of integers, shape (B, T) or (T,)
            Positions of the tokens.
        layer : int
            Layers may differ in their angles (Gemma 3).

        Returns
        -------
        cos, sin : torch.Tensor, shape (B, T, R)
            In the dtype in which the model makes them, mostly its own; R is at most `head_dim`, and only the first R features of a head are turned.

        Raises
        ------
        ValueError
            If the layer has no rotary positions or there is no such layer.
        UnknownArchitecture
            If its attention is of a make that is not known, or none.

        Notes
        -----
        Where the angles depend on the length of the input (dynamic NTK, LongRoPE) they are those of an input as long as the
        largest position; the model's own state stays.
        """
        attention = self._attention(layer)
        if attention.refusal is not None:
            raise UnknownArchitecture(attention.refusal)
        module = self.rotary_modules[layer] if self.rotary_modules else None
        if attention.rotary is None or module is None or self.rotary_source is None:
            raise ValueError(f"Layer {layer} has no rotary positions (its `attention.rotary` is None); ask that first.")
        if positions.ndim == 1:
            positions = positions[None]
        like = next(p for p in attention.module.parameters() if p.is_floating_point())
        with quietly(module):
            cos, sin = self.rotary_source.raw(module, positions.to(like.device), layer, like.new_empty(1))
        kind, layout = attention.rotary, attention.rotary_layout
        batch = positions.shape[0]
        return tuple(laid_out(x, layout, kind).expand(batch, -1, -1) for x in (cos, sin))  # type: ignore[return-value]

    def _attention(self, layer: int) -> Attention:
        if not -self.n_layers <= layer < self.n_layers:
            raise ValueError(f"There is no layer {layer}; this model has the layers 0 to {self.n_layers - 1}.")
        attention = self.layers[layer].attention
        if attention is None:
            raise UnknownArchitecture(f"Layer {layer} of {type(self.model).__name__} has no softmax attention.")
        return attention
