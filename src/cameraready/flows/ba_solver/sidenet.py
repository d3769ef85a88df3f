"""The small network beside the backbone that predicts how the velocity changes along a step.

References
----------
Chen, Li, Wang and Chen, 2026, arXiv:2601.21542. Channel-wise modulation: Perez et al., 2018, arXiv:1709.07871.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WEIGHTS, CONFIG = "sidenet.safetensors", "sidenet.json"


class _Side(nn.Module):
    """What both SideNets share: their configuration as JSON values, saving and loading."""

    kinds: ClassVar[dict[str, type[_Side]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.kinds[cls.__name__] = cls

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._settings = settings

    def _initialise(self, generator: torch.Generator | None) -> None:
        """Weights as torch's layers draw them, from `generator`; the head zero, so that no change is predicted before training."""
        draw = torch.Generator().manual_seed(0) if generator is None else generator
        self.to_empty(device="cpu")
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                bound = math.prod(module.weight.shape[1:]) ** -0.5
                nn.init.uniform_(module.weight, -bound, bound, generator=draw)
                nn.init.uniform_(module.bias, -bound, bound, generator=draw)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02, generator=draw)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, _ChannelNorm):
                nn.init.ones_(module.scale)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that make this network anew, with its class under ``"kind"``."""
        return {"kind": type(self).__name__, **self._settings}

    @property
    def n_parameters(self) -> int:
        """How many numbers are trained."""
        return sum(parameter.numel() for parameter in self.parameters())

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``sidenet.json`` and ``sidenet.safetensors`` into `folder`, which is made where it does not exist."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in self.state_dict().items()}, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(self.settings, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Any:
        """The network that `save_pretrained` wrote.

        Raises
        ------
        FileNotFoundError
            There is none in `folder`.
        TypeError
            It is of another class than the one that was asked.
        ValueError
            One of the files is damaged, or they do not belong together.
        """
        folder = Path(folder)
        if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
            raise FileNotFoundError(f"there is no SideNet in {folder}; save_pretrained writes {CONFIG} and {WEIGHTS}")
        try:
            settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{folder / CONFIG} is no JSON: {error}") from error
        side = from_settings(settings)
        if not isinstance(side, cls):
            raise TypeError(f"{folder} holds a {type(side).__name__}, not a {cls.__name__}")
        return side.load_weights(folder)

    def load_weights(self, folder: str | Path) -> Any:
        """The weights that lie in `folder`; returns the network itself, set to evaluation.

        Raises
        ------
        ValueError
            The file is damaged or of a network of another size.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        file = Path(folder) / WEIGHTS
        try:
            self.load_state_dict(load_file(file))
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged: {error}") from error
        except RuntimeError as error:
            raise ValueError(f"{file} is not of a {type(self).__name__} with {self._settings}") from error
        return self.eval()


def from_settings(settings: Any) -> _Side:
    """An untrained network of these settings (see `SideNet.settings`).

    Raises
    ------
    ValueError
        An unknown kind, or settings that it does not take.
    """
    kind = settings.get("kind") if isinstance(settings, dict) else None
    if not isinstance(kind, str) or kind not in _Side.kinds:
        raise ValueError(f"settings of a SideNet have a kind, one of {', '.join(_Side.kinds)}; got {settings!r}")
    try:
        return _Side.kinds[kind](**{name: value for name, value in settings.items() if name != "kind"})
    except TypeError as error:
        raise ValueError(f"a {kind} cannot be made of {settings!r}: {error}") from error


class SideNet(_Side):
    """Predicts the change of an image's velocity along a step, to be trained once beside a frozen network.

    Depthwise-separable residual blocks with the time, the step and the class acting on channels, one block of self-attention in the
    middle, the last convolution zero at the start (Chen et al., 2026, arXiv:2601.21542). The output is multiplied by the step, so that
    it is exactly zero for a step of zero, and before training for every step: the solver is then two-step Adams-Bashforth.

    Parameters
    ----------
    in_channels : int
        Of the state; 4 for the latents of the paper, 1 for grey images.
    width : int
        Channels inside, a multiple of `heads`. The paper's networks have 256; a small backbone wants a small one, because its time
        counts (`cameraready run ba-solver` measures it).
    depth : int
        Blocks; the paper takes 4 for 256 x 256 images and 8 for 512 x 512.
    classes : int
        Classes of the backbone; label `classes` stands for no condition. 0: unconditional, or conditioned through the velocity alone, as
        under text.
    heads : int
        Of the attention; 0 leaves it out, and its block is one like the others.
    generator : torch.Generator, optional
        Of the weights; None: always the same ones.

    Raises
    ------
    ValueError
        A width that the heads do not divide, or a size below 1.
    """

    def __init__(
        self,
        in_channels: int,
        *,
        width: int = 256,
        depth: int = 4,
        classes: int = 0,
        heads: int = 4,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(in_channels=in_channels, width=width, depth=depth, classes=classes, heads=heads)
        _check_sizes(in_channels=in_channels, width=width, depth=depth)
        if width % 2 or (heads and width % heads):
            raise ValueError(f"width={width} must be even and a multiple of heads={heads}")
        attends = heads > 0 and depth > 1  # attention alone would not see the time
        with torch.device("meta"):  # filled by `_initialise`, so that no global generator is drawn from
            self.condition = _Condition(width, classes)
            self.stem = nn.Conv2d(2 * in_channels, width, 3, padding=1)
            self.blocks = nn.ModuleList(
                _Attention(width, heads) if attends and place == depth // 2 else _Separable(width)
                for place in range(depth)
            )
            self.norm = _ChannelNorm(width)
            self.head = nn.Conv2d(width, in_channels, 3, padding=1)
        self._initialise(generator)

    def forward(self, x: Tensor, v: Tensor, t: Tensor, h: Tensor, y: Tensor | None = None) -> Tensor:
        """The change of velocity from time `t` to `t + h` along the flow.

        Parameters
        ----------
        x, v : (B, C, H, W) tensor
            State, and the backbone's velocity there: never one that is guided already.
        t, h : (B,) tensor
            Time of the state (0 noise, 1 data) and signed step: positive towards data.
        y : (B,) tensor of int64, optional
            Labels; None stands for no condition.

        Returns
        -------
        (B, C, H, W) tensor

        Raises
        ------
        ValueError
            States of another shape.
        """
        channels = self._settings["in_channels"]
        if x.dim() != 4 or x.shape[1] != channels:
            raise ValueError(
                f"this SideNet is for images (B, {channels}, H, W), got {tuple(x.shape)}; for vectors and packed latents there is MLPSideNet"
            )
        condition = self.condition(t, h, y)
        hidden = self.stem(torch.cat([x, v], dim=1))
        for block in self.blocks:
            hidden = block(hidden, condition)
        return h.view(-1, 1, 1, 1) * self.head(F.silu(self.norm(hidden)))


class MLPSideNet(_Side):
    """The same for vectors: acts on the last dimension of states (B, D), or of each token of states (B, L, D).

    Packed latents, such as Flux's, are tokens. What other tokens do reaches it through the velocity alone.

    Parameters
    ----------
    dim : int
        Size D of the last dimension.
    width, depth : int
        Of the residual blocks.
    classes, generator
        As of `SideNet`.

    Raises
    ------
    ValueError
        A size below 1.
    """

    def __init__(
        self,
        dim: int,
        *,
        width: int = 128,
        depth: int = 3,
        classes: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(dim=dim, width=width, depth=depth, classes=classes)
        _check_sizes(dim=dim, width=width, depth=depth)
        if width % 2:
            raise ValueError(f"width={width} must be even")
        with torch.device("meta"):
            self.condition = _Condition(width, classes)
            self.stem = nn.Linear(2 * dim, width)
            self.blocks = nn.ModuleList(_Dense(width) for _ in range(depth))
            self.norm = nn.RMSNorm(width, eps=1e-6)
            self.head = nn.Linear(width, dim)
        self._initialise(generator)

    def forward(self, x: Tensor, v: Tensor, t: Tensor, h: Tensor, y: Tensor | None = None) -> Tensor:
        """As of `SideNet.forward`, with `x` and `v` (B, D) or (B, L, D)."""
        if x.dim() < 2 or x.shape[-1] != self._settings["dim"]:
            raise ValueError(f"this SideNet is for states (B, ..., {self._settings['dim']}), got {tuple(x.shape)}")
        shape = (-1, *[1] * (x.dim() - 1))
        condition = self.condition(t, h, y)
        condition = condition.view(x.shape[0], *[1] * (x.dim() - 2), -1)
        hidden = self.stem(torch.cat([x, v], dim=-1))
        for block in self.blocks:
            hidden = block(hidden, condition)
        return h.view(shape) * self.head(F.silu(self.norm(hidden)))


class _Condition(nn.Module):
    """Time, step and class as one vector (B, width)."""

    #: Highest frequencies, in radians per unit: steps seen in training are mostly short, and what is learnt there must carry on smoothly.
    TIME, STEP = 100.0, 10.0

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.step = nn.Sequential(nn.Linear(width + 1, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(classes + 1, width) if classes else None
        self.fused = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU())

    def forward(self, t: Tensor, h: Tensor, y: Tensor | None) -> Tensor:
        step = torch.cat([_sinusoids(h, self.width, self.STEP), h[:, None]], dim=1)
        both = self.time(_sinusoids(t, self.width, self.TIME)) + self.step(step)
        if self.label is not None:
            none = self.label.num_embeddings - 1
            both = both + self.label(torch.full(t.shape, none, device=t.device) if y is None else y)
        return self.fused(both)


def _sinusoids(values: Tensor, width: int, highest: float) -> Tensor:
    """Sines and cosines (B, width) of `values` (B,), frequencies spaced evenly in the logarithm from 1 to `highest`."""
    exponents = torch.linspace(0.0, math.log(highest), width // 2, dtype=values.dtype, device=values.device)
    angles = values[:, None] * exponents.exp()
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class _ChannelNorm(nn.Module):
    """Root mean square over channels of (B, C, H, W), at each place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + 1e-6) * self.scale


class _Separable(nn.Module):
    """Two depthwise-separable convolutions, channels scaled and shifted by the condition between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = _ChannelNorm(width)
        self.first = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, groups=width), nn.Conv2d(width, width, 1))
        self.film = nn.Linear(width, 2 * width)
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, groups=width), nn.Conv2d(width, width, 1))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.film(condition)[:, :, None, None].chunk(2, dim=1)
        hidden = self.first(self.norm(x)) * (1 + scale) + shift
        return x + self.second(F.silu(hidden))


class _Attention(nn.Module):
    """Self-attention over places."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = _ChannelNorm(width)
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        batch, width, height, breadth = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, 3, self.heads, width // self.heads, height * breadth)
        q, k, v = qkv.transpose(-1, -2).unbind(1)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(batch, width, height, breadth)
        return x + self.out(mixed)


class _Dense(nn.Module):
    """Two linear layers, the condition scaling and shifting between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.first = nn.Linear(width, width)
        self.film = nn.Linear(width, 2 * width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.film(condition).chunk(2, dim=-1)
        return x + self.second(F.silu(self.first(self.norm(x)) * (1 + scale) + shift))


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}={size!r} must be a whole number, at least 1")
