"""How the flow and the surrogates of the molecules come to be: sizes and trainings, each kept under the digest of all that decides it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cameraready.flows._molecules.codebook import Codebook
from cameraready.flows._molecules.properties import NAMES, properties
from cameraready.flows._molecules.surrogates import Surrogates, train_surrogates
from cameraready.flows._toy.cached import cached
from cameraready.flows._toy.networks import MLPVelocity
from cameraready.flows._toy.training import train_flow

#: Raised when code below or the codebook changes what is trained.
VERSION = 1


@dataclass(frozen=True)
class Settings:
    """Sizes of space, networks and trainings.

    Attributes
    ----------
    drugs : int or None
        How many of the shipped SMILES are looked at; None for all.
    latent, blur, most, rare
        Of the `Codebook`.
    flow_width, flow_depth, flow_steps, flow_batch, flow_lr
        Of the velocity.
    labelled, width, members, surrogate_steps
        Decoded molecules that the surrogates learn from, units, perceptrons, steps.
    """

    drugs: int | None = None
    latent: int = 24
    blur: float = 0.4
    most: int = 2
    rare: int = 10
    flow_width: int = 256
    flow_depth: int = 4
    flow_steps: int = 3000
    flow_batch: int = 256
    flow_lr: float = 1e-3
    labelled: int = 8_000
    width: int = 192
    members: int = 3
    surrogate_steps: int = 1500

    def recipe(self, name: str, codebook: Codebook, *prefixes: str) -> dict[str, Any]:
        """Of the settings whose names begin so, and of what the codebook holds."""
        mine = {key: value for key, value in asdict(self).items() if key.startswith(prefixes)}
        return {"name": f"molecules-{name}", "version": VERSION, "codebook": codebook.digest, **mine}


#: For trying things out: a hundred drugs, trained in a second or two.
SMALL = Settings(
    drugs=180,
    latent=8,
    rare=4,
    flow_width=48,
    flow_depth=2,
    flow_steps=250,
    flow_batch=64,
    labelled=300,
    width=32,
    members=2,
    surrogate_steps=200,
)

Net = TypeVar("Net", bound=nn.Module)


def _made(
    recipe: dict[str, Any], build: Callable[[], Net], train: Callable[..., Net], *, keep: bool, quiet: bool
) -> Net:
    """The network of a recipe: kept on this machine, or trained here and now and left in memory."""
    if keep:
        return cached(recipe, build, train, quiet=quiet)  # type: ignore[return-value]
    return train(build()).eval().requires_grad_(False)


def flow_of(codebook: Codebook, settings: Settings, *, keep: bool, quiet: bool) -> MLPVelocity:
    """The velocity trained on the drugs' blurred latents."""

    def build() -> MLPVelocity:
        generator = torch.Generator().manual_seed(2)
        return MLPVelocity(codebook.latent, settings.flow_width, settings.flow_depth, generator=generator)

    def train(net: MLPVelocity, checkpoint: Path | None = None) -> MLPVelocity:
        train_flow(
            net,
            codebook.draw,
            steps=settings.flow_steps,
            batch=settings.flow_batch,
            lr=settings.flow_lr,
            generator=torch.Generator().manual_seed(1002),
            checkpoint=checkpoint,
            progress=None if quiet else "molecules' flow",
        )
        return net

    return _made(settings.recipe("flow", codebook, "flow"), build, train, keep=keep, quiet=quiet)


def surrogates_of(
    codebook: Codebook, velocity: nn.Module, settings: Settings, *, keep: bool, quiet: bool
) -> Surrogates:
    """Surrogates of what the flow's latents decode to, a third of them moved outwards: a fine-tuned flow goes where the pretrained one seldom is."""

    def build() -> Surrogates:
        return Surrogates(
            codebook.latent,
            len(NAMES),
            width=settings.width,
            members=settings.members,
            generator=torch.Generator().manual_seed(3),
        )

    def train(net: Surrogates) -> Surrogates:
        generator = torch.Generator().manual_seed(1003)
        latents = drawn(velocity, settings.labelled, codebook.latent, generator)
        third = settings.labelled // 3
        latents[:third] *= 1 + 0.4 * torch.rand(third, 1, generator=generator)
        return train_surrogates(
            net,
            latents,
            properties(codebook.decode(latents)),
            steps=settings.surrogate_steps,
            batch=256,
            lr=2e-3,
            generator=generator,
            progress=None if quiet else "molecules' surrogates",
        )

    recipe = settings.recipe("surrogates", codebook, "flow", "labelled", "width", "members", "surrogate")
    return _made(recipe, build, train, keep=keep, quiet=quiet)


@torch.no_grad()
def drawn(velocity: Any, n: int, dim: int, generator: torch.Generator, *, steps: int = 40) -> Tensor:
    """Latents (n, D) float32 at t = 1 of a velocity from noise, by the midpoint rule in `steps` steps of two evaluations."""
    x, step = torch.randn(n, dim, generator=generator), 1 / steps
    for number in range(steps):
        t = number * step
        x = x + step * velocity(x + step / 2 * velocity(x, t), t + step / 2)
    return x
