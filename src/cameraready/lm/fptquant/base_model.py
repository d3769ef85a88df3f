"""A small Llama in floating point, trained here, and outliers put into it that do not change what it computes.

Weights of models that are packaged for a CPU are four-bit already inside; claims about weights need some that are not.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cameraready.lm.fptquant.host import read_host
from cameraready.lm.fptquant.merging import FPTConfig, Read, Transforms

#: What stands in front of a line's end: the token whose embedding is made massive.
MASSIVE = ord("\n")


def architecture(tokenizer: Any, *, layers: int = 4, hidden: int = 128) -> Any:
    """An untrained Llama: byte vocabulary, heads of 32, half as many KV heads, random by a generator of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def train(
    model: nn.Module, tokens: Tensor, *, steps: int, batch: int = 16, length: int = 128, massive: float = 10_000.0
) -> nn.Module:
    """Next-token training on `tokens` (N,), AdamW with warm-up and cosine; the end of a line starts with an embedding `massive` times larger.

    So the model learns with massive tokens in its residual stream, as large models have them, instead of being given them afterwards.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.get_input_embeddings().weight[MASSIVE] *= massive
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01, betas=(0.9, 0.95))
    model.train()
    for step in range(steps):
        rate = min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimiser.param_groups:
            group["lr"] = 3e-3 * rate
        starts = torch.randint(0, len(tokens) - length, (batch,), generator=generator)
        ids = torch.stack([tokens[start : start + length] for start in starts.tolist()])
        optimiser.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    return model.eval()


@torch.no_grad()
def ill_conditioned(model: Any, seed: int, *, strength: float = 1.0, ids: Tensor | None = None) -> Any:
    """A copy of `model` that computes the same and is hard to quantise, by transforms drawn with `seed`.

    Keys and queries, values and outputs, up and down projections are multiplied by scales that are log-uniform over a factor of exp(2 x
    `strength`) either way, keys and values also rotated; the residual stream is turned onto the principal axes of its
    activations on `ids`, so that a few channels are large, as in trained large models.
    """
    import copy

    host = read_host(model)
    generator = torch.Generator().manual_seed(seed)

    def spread(*shape: int) -> Tensor:
        return (2 * torch.rand(*shape, generator=generator, dtype=torch.float64) - 1) * 2 * strength

    out = copy.deepcopy(model)
    transforms = Transforms(host, FPTConfig(residual_scale=False, down_hadamard=False, rotate=ids is not None))
    for own in transforms.layers:
        own.prerope.log_scale.copy_(spread(*own.prerope.log_scale.shape))
        own.prerope.angle.copy_(spread(*own.prerope.angle.shape) * math.pi / max(2 * strength, 1e-9))
        own.value.log_scale.copy_(spread(*own.value.log_scale.shape))
        for side in (own.value.left, own.value.right):
            side.weight = torch.linalg.qr(torch.randn(*side.weight.shape, generator=generator, dtype=torch.float64))[0]
        own.updown.log_scale.copy_(spread(*own.updown.log_scale.shape))
    if ids is not None:
        seen = torch.cat([h.flatten(0, 1) for h in model(ids, output_hidden_states=True).hidden_states[1:-1]]).double()
        seen = seen / seen.pow(2).mean(-1, keepdim=True).sqrt()
        transforms.rotation.rotation.weight = torch.linalg.eigh(seen.mT @ seen)[1]
    target = dict(out.named_parameters())
    for name, value in transforms.merged(Read(model, torch.float64)):
        target[name].copy_(value)
    return out.eval()


def in_float64(model: Any) -> Any:
    """A copy in float64 with RMSNorms of torch: transformers' own compute in float32 whatever the model is in."""
    import copy

    host = read_host(model)
    out = copy.deepcopy(model).double()
    norms = [host.final_norm, *(n for layer in host.layers for n in (layer.attention_norm, layer.mlp_norm))]
    for norm in norms:
        made = nn.RMSNorm(host.hidden, eps=norm.eps, dtype=torch.float64)
        made.weight.data = out.get_submodule(norm.name).weight.data + norm.offset
        out.set_submodule(norm.name, made)
    return out


def arrays(model: nn.Module) -> dict[str, np.ndarray]:
    """The state of a model as arrays, for a study's cache."""
    return {name: value.numpy() for name, value in model.state_dict().items()}
