"""Tiny models for FPTQuant's tests: with norms that compute in float64, awkward gains and biases, and parameters away from their start."""

import torch
from torch import nn

from cameraready.lm.fptquant.host import read_host
from cameraready.models import tiny_model


def awkward(kind, *, dtype=torch.float64, seed=0, **options):
    """A tiny model with random gains and biases; in float64 its norms are torch.nn.RMSNorm, since transformers' compute in float32."""
    model = tiny_model(kind, dtype=dtype, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype))
    return exact(model) if dtype == torch.float64 else model


def exact(model):
    """`model` with RMSNorms of torch, which compute in the dtype of the input."""
    host = read_host(model)
    for layer in host.layers:
        for norm in (
            layer.attention_norm,
            layer.mlp_norm,
            layer.post_attention_norm,
            layer.post_mlp_norm,
            layer.q_norm,
            layer.k_norm,
        ):
            if norm is not None:
                _replace(model, norm)
    _replace(model, host.final_norm)
    return model


def _replace(model, norm):
    gain = model.get_submodule(norm.name).weight.detach() + norm.offset
    made = nn.RMSNorm(len(gain), eps=norm.eps, dtype=gain.dtype)
    made.weight.data = gain
    model.set_submodule(norm.name, made)


def shaken(fpt, seed=0, size=0.4):
    """The quantizer with every parameter of its transforms moved at random, so that nothing is the identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in fpt.transforms.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return fpt.refresh()


def tokens(seed=0, shape=(2, 24)):
    return torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(seed))
