"""Derivatives of each sample by itself, in chunks, so that memory stays within a bound.

A Jacobian has a row a sample and a column a parameter. Two ways lead to it: `per_sample_gradients` differentiates a function of one
sample under `torch.func.vmap`, at about the cost of one ordinary backward pass over the batch; `jacobian_of_graph` takes outputs
that were already computed, whatever computed them, at the cost of a backward pass over the batch for each output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

#: Bytes that the rows of one chunk may take, unless the caller says otherwise.
CHUNK_BYTES = 256 * 2**20

#: Rows of a graph's Jacobian that go through it together.
_ROWS_AT_ONCE = 16

#: Layers in which one sample's output depends on the others while the module trains.
_COUPLING = (nn.modules.batchnorm._BatchNorm,)
#: Layers that draw fresh random numbers while the module trains.
_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def chunk_size_for(n_params: int, dtype: torch.dtype, max_bytes: int = CHUNK_BYTES) -> int:
    """How many rows of `n_params` numbers fit into `max_bytes`; at least one."""
    return max(1, max_bytes // max(1, n_params * dtype.itemsize))


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """One vector of all entries, in order."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of `vector`, shape (n,), with the shapes of `like`, whose entries number n."""
    sizes = [tensor.numel() for tensor in like]
    if vector.shape != (sum(sizes),):
        raise ValueError(f"expected a vector of {sum(sizes)} entries, got shape {tuple(vector.shape)}")
    return [part.view(tensor.shape) for part, tensor in zip(vector.split(sizes), like, strict=True)]


def per_sample_gradients(
    function: Callable[..., Tensor], params: Mapping[str, Tensor], *batch: Tensor, chunk_size: int | None = None
) -> dict[str, Tensor]:
    """Gradient of ``function(params, *sample)``, a scalar, for every sample of the batch.

    Parameters
    ----------
    function : callable
        ``function(params, *sample) -> scalar``; pure, such as a loss of `torch.func.functional_call`.
    params : mapping of str to Tensor
    *batch : Tensor
        Each of shape (k, ...); sample i is the i-th entry of all of them, without the leading dimension.
    chunk_size : int, optional
        Samples at a time; by default as many as `CHUNK_BYTES` hold.

    Returns
    -------
    dict of str to Tensor
        For each parameter a tensor of shape (k, *its shape), detached.
    """
    return per_sample_values_and_gradients(function, params, *batch, chunk_size=chunk_size)[1]


def per_sample_values_and_gradients(
    function: Callable[..., Tensor], params: Mapping[str, Tensor], *batch: Tensor, chunk_size: int | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """As `per_sample_gradients`, after the values of `function`, shape (k,), that come with them at no cost."""
    k = _batch_size(batch)
    detached = {name: value.detach() for name, value in params.items()}
    if not detached:
        raise ValueError("there are no parameters to differentiate with respect to")
    if chunk_size is None:
        first = next(iter(detached.values()))
        chunk_size = chunk_size_for(sum(p.numel() for p in detached.values()), first.dtype)
    each = torch.func.vmap(
        torch.func.grad_and_value(lambda p, sample: function(p, *sample)),
        in_dims=(None, 0),
        chunk_size=min(chunk_size, k),
        randomness="error",
    )
    found, values = each(detached, tuple(batch))
    return values.detach(), {name: value.detach() for name, value in found.items()}


def jacobian_of_graph(outputs: Tensor, params: Sequence[Tensor], *, chunk_size: int | None = None) -> Tensor:
    """Jacobian, shape (k, n), of `outputs`, shape (k,), with respect to `params`, through the graph that computed them.

    Parameters that the outputs do not depend on have zero columns. The graph is kept.

    Raises
    ------
    ValueError
        If `outputs` is not a vector or has no graph.
    """
    if outputs.ndim != 1:
        raise ValueError(f"outputs must be a vector with an entry a sample, got shape {tuple(outputs.shape)}")
    if not outputs.requires_grad:
        raise ValueError("outputs have no graph: compute them from the parameters with gradients enabled")
    k = outputs.shape[0]
    if chunk_size is None:
        # Each row of a chunk carries the whole batch's activations through the graph, so that few rows go at once.
        chunk_size = min(_ROWS_AT_ONCE, chunk_size_for(sum(p.numel() for p in params), outputs.dtype))
    rows = []
    for start in range(0, k, chunk_size):
        stop = min(start + chunk_size, k)
        picks = outputs.new_zeros(stop - start, k)
        picks[torch.arange(stop - start), torch.arange(start, stop)] = 1.0
        found = _rows_of_graph(outputs, params, picks)
        parts = [
            p.new_zeros(stop - start, p.numel()) if g is None else g.reshape(stop - start, -1)
            for g, p in zip(found, params, strict=True)
        ]
        rows.append(torch.cat(parts, dim=1))
    return torch.cat(rows).detach()


def _rows_of_graph(outputs: Tensor, params: Sequence[Tensor], picks: Tensor) -> list[Tensor | None]:
    """Products of the rows of `picks`, (m, k), with the Jacobian: for each parameter (m, *its shape), or None."""
    options: dict[str, bool] = {"retain_graph": True, "allow_unused": True}
    if len(picks) > 1:
        try:
            return list(torch.autograd.grad(outputs, params, picks, is_grads_batched=True, **options))
        except RuntimeError as error:
            # A backward of the user's own that looks at numbers cannot be batched.
            if "Batching rule" not in str(error) and "vmap" not in str(error):
                raise
    each = [torch.autograd.grad(outputs, params, pick, **options) for pick in picks]
    return [None if column[0] is None else torch.stack(column) for column in zip(*each, strict=True)]


def refuse_coupled_samples(module: nn.Module) -> None:
    """Raise ValueError if a sample's output depends on other samples or on chance, so that it has no derivative of its own."""
    for name, layer in module.named_modules():
        if isinstance(layer, _COUPLING) and (layer.training or layer.running_mean is None):
            raise ValueError(
                f"{name or type(layer).__name__} normalises over the batch, so samples have no derivatives of their own; "
                "use GroupNorm or LayerNorm, or put it into evaluation mode"
            )
        if isinstance(layer, _RANDOM) and layer.training and getattr(layer, "p", 1.0) != 0.0:
            raise ValueError(
                f"{name or type(layer).__name__} draws random numbers, so a sample's derivative differs from call to call; "
                "put it into evaluation mode"
            )


def _batch_size(batch: Sequence[Tensor]) -> int:
    if not batch:
        raise ValueError("a batch needs at least one tensor")
    sizes = {tensor.shape[0] if tensor.ndim else None for tensor in batch}
    if None in sizes or len(sizes) != 1:
        raise ValueError(
            f"tensors of a batch must share their first dimension, got shapes {[tuple(t.shape) for t in batch]}"
        )
    (k,) = sizes
    if k == 0:
        raise ValueError("the batch is empty")
    return int(k)
