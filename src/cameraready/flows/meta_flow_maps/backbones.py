"""Backbones of a meta flow map: a trained flow network with more inputs, and a perceptron for vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cameraready.flows._paths import LinearPath, Path, time_like
from cameraready.flows._toy.networks import MLPVelocity, convolution, linear, seeded
from cameraready.flows.meta_flow_maps.inner import ask, inner_flow

#: Weights that a conditioner for outputs other than feature maps may have before one of the user's own is asked for.
LARGEST = 16_000_000


class FlowBackbone(nn.Module):
    """A trained flow network as the backbone of a `MetaFlowMap`, which at first gives the network's own inner velocity everywhere.

    The network is asked at the merged state ``x*`` and time ``t*`` of `inner_flow`, so that at the start its answer is exactly the inner velocity
    of the flow that it was trained for, at every ``s``, ``t`` and ``x``; what it has to learn is how the average over ``[s, u]`` differs from that. The inner
    state, the condition and the times ``s, u, t`` enter where `layers` say, through conditioners whose last layer is zero.

    Parameters
    ----------
    network : nn.Module ``network(x, t, y=None)``
        A velocity on `path`. It is used, not copied: pass ``copy.deepcopy(network)`` to keep the original.
    shape : tuple of int
        Of one state, without the batch: ``(1, 8, 8)``.
    layers : sequence of str
        Names of submodules to whose output a term is added (``network.named_modules()``): the layer that reads the state, and one that
        embeds time, say. Their outputs are (B, C, height, width), or (B, ...) of moderate size.
    path : Path
    width : int
        Channels of the conditioners' hidden layer.

    Raises
    ------
    ValueError
        A name that is no submodule (near misses are told), or a layer whose output is too large for a dense conditioner.
    """

    def __init__(
        self,
        network: nn.Module,
        shape: Sequence[int],
        layers: Sequence[str],
        path: Path = LinearPath(),  # noqa: B008 (frozen)
        *,
        width: int = 64,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        known = dict(network.named_modules())
        for name in layers:
            if not name or name not in known:
                import difflib

                near = difflib.get_close_matches(name, known, n=3) or list(known)[1:9]
                raise ValueError(f"the network has no submodule {name!r}; there are {', '.join(near)} ...")
        self.network, self.path, self.layers = network, path, tuple(layers)
        outputs = _output_shapes(network, {name: known[name] for name in layers}, tuple(shape))
        self.conditioners = nn.ModuleList(
            _conditioner(tuple(shape), outputs[name], width, name, generator) for name in self.layers
        )

    def forward(self, s: Tensor, u: Tensor, y: Tensor, t: Tensor, x: Tensor, label: Tensor | None = None) -> Tensor:
        flow = inner_flow(time_like(s, y), time_like(t, y), self.path)
        share = time_like(t, y)
        share = self.path.alpha(share) / (self.path.alpha(share) + self.path.sigma(share))
        seen = torch.cat([y, (share * x).to(y.dtype)], 1)  # at t = 0 the condition is not seen at all
        features = _features(s, u, t).to(y.dtype)
        modules = dict(self.network.named_modules())
        handles = []
        try:
            for name, conditioner in zip(self.layers, self.conditioners, strict=True):
                term = conditioner(seen, features)
                handles.append(modules[name].register_forward_hook(_adding(term)))
            b = ask(self.network, flow.merged(x, y).to(y.dtype), flow.time.reshape(-1).to(y.dtype), label)
        finally:
            for handle in handles:
                handle.remove()
        return flow.velocity(x, y, b)


class MapMLP(nn.Module):
    """A perceptron of vectors as the backbone of a `MetaFlowMap`.

    It begins as the exact map of Gaussian data of mean zero and standard deviation `data_std` and learns what is left: inputs and outputs are of order one at every
    ``s`` and ``t``, the spread of posterior draws vanishes with the noise of the state, and at ``t = 0`` the condition is not seen.

    Parameters
    ----------
    dim : int
        Numbers of a state, (B, dim).
    width, depth : int
        Of the hidden layers, and how many.
    classes : int
        Number of labels, 0 for none; label `classes` is the null label.
    data_std : float
        Root mean square of the data's numbers; only sets the scale of what is learned.
    path : Path
    fourier : int
        Frequencies of each time's features.
    generator : torch.Generator, optional
        For the weights; by default that of seed 0.
    """

    def __init__(
        self,
        dim: int,
        width: int = 256,
        depth: int = 4,
        *,
        classes: int = 0,
        data_std: float = 1.0,
        path: Path = LinearPath(),  # noqa: B008 (frozen)
        fourier: int = 8,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not (math.isfinite(data_std) and data_std > 0):
            raise ValueError(f"data_std must be a positive number, got {data_std}")
        self.path, self.variance = path, float(data_std) ** 2
        self.network = MLPVelocity(
            dim, width, depth, classes=classes, fourier=fourier, extra=dim, times=3, generator=generator
        )
        nn.init.zeros_(self.network.last.weight)

    def forward(self, s: Tensor, u: Tensor, y: Tensor, t: Tensor, x: Tensor, label: Tensor | None = None) -> Tensor:
        path = self.path
        start, end, outer = s[:, None], u[:, None], t[:, None]
        alpha, sigma = path.alpha(outer), path.sigma(outer)
        total = sigma**2 + self.variance * alpha**2
        mean, variance = self.variance * alpha * x / total, self.variance * sigma**2 / total
        a, b = path.alpha(start), path.sigma(start)
        rise, fall = _quotient(path.alpha, path.d_alpha, start, end), _quotient(path.sigma, path.d_sigma, start, end)
        before = (a**2 * variance + b**2).clamp(min=1e-12).sqrt()
        after = (path.alpha(end) ** 2 * variance + path.sigma(end) ** 2).clamp(min=1e-12).sqrt()
        growth = (rise * (a + path.alpha(end)) * variance + fall * (b + path.sigma(end))) / (before * (before + after))
        centred = y - a * mean
        gaussian = rise * mean + growth * centred
        scale = (path.d_alpha(start) * b - path.d_sigma(start) * a) * variance.sqrt() / before
        learned = self.network(
            (centred / before).to(y.dtype), (s, u, t), label, context=(alpha / (alpha + sigma) * x).to(y.dtype)
        )
        return (gaussian + scale * learned).to(y.dtype)


def _quotient(function: Callable[..., Tensor], derivative: Callable[..., Tensor], start: Tensor, end: Tensor) -> Tensor:
    """``(f(end) - f(start)) / (end - start)``, and where that is lost to rounding the derivative in the middle, equal to second order."""
    near = (end - start).abs() < 1e-3
    apart = (function(end) - function(start)) / torch.where(near, 1.0, end - start)
    return torch.where(near, derivative((start + end) / 2), apart)


class _Conditioner(nn.Module):
    """Inner state and condition (B, 2 C, ...) and features of the times to a term of a layer's output; zero at first."""

    def __init__(self, first: nn.Module, film: nn.Linear, last: nn.Module, output: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.film, self.last, self.output = first, film, last, output

    def forward(self, seen: Tensor, features: Tensor) -> Tensor:
        maps = isinstance(self.first, nn.Conv2d)
        scale, shift = self.film(features).chunk(2, -1)
        if maps:
            scale, shift = scale[..., None, None], shift[..., None, None]
        hidden = F.silu(self.first(seen if maps else seen.flatten(1)) * (1 + scale) + shift)
        return self.last(hidden).reshape(len(seen), *self.output)


def _conditioner(
    shape: tuple[int, ...], output: tuple[int, ...], width: int, name: str, generator: torch.Generator | None
) -> _Conditioner:
    g = seeded(generator)
    film = linear(24, 2 * width, g)
    first: nn.Module
    last: nn.Module
    if len(shape) == len(output) == 3 and shape[1:] == output[1:]:
        first, last = convolution(2 * shape[0], width, g), convolution(width, output[0], g, gain=0.0)
    else:
        entering, leaving = 2 * math.prod(shape), math.prod(output)
        if width * (entering + leaving) > LARGEST:
            raise ValueError(
                f"the output of {name!r} has {leaving} numbers and a state {math.prod(shape)}, too many for a dense conditioner; name a layer whose "
                "output is a feature map of the state's height and width, or a smaller vector"
            )
        first, last = linear(entering, width, g), linear(width, leaving, g, gain=0.0)
    return _Conditioner(first, film, last, output)


def _output_shapes(
    network: nn.Module, modules: dict[str, nn.Module], shape: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """Shapes of the named modules' outputs for one state, found by asking the network once."""
    found: dict[str, tuple[int, ...]] = {}
    parameter = next(network.parameters(), torch.zeros(()))
    state = torch.zeros(2, *shape, dtype=parameter.dtype, device=parameter.device)
    handles = [
        module.register_forward_hook(lambda _m, _i, out, name=name: found.__setitem__(name, tuple(out.shape[1:])))
        for name, module in modules.items()
    ]
    modes = [(module, module.training) for module in network.modules()]
    network.eval()  # nothing is drawn, and no statistics move
    try:
        with torch.no_grad():
            network(state, torch.full((2,), 0.5, dtype=parameter.dtype, device=parameter.device))
    finally:
        for module, mode in modes:
            module.training = mode
        for handle in handles:
            handle.remove()
    for name in modules:
        if name not in found:
            raise ValueError(f"the submodule {name!r} is not called when the network is; name another")
    return found


def _adding(term: Tensor):  # type: ignore[no-untyped-def]
    def hook(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return output + term

    return hook


def _features(*clocks: Tensor) -> Tensor:
    """Cosines and sines of four frequencies of each time, (B, 8 per time)."""
    rates = math.pi * 2.0 ** torch.arange(4, device=clocks[0].device, dtype=clocks[0].dtype) / 2
    angle = torch.cat([clock[:, None] * rates for clock in clocks], 1)
    return torch.cat([angle.cos(), angle.sin()], 1)
