"""How the networks of the molecules come to be: sizes, data and trainings, each kept under the digest of all that decides it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cameraready.flows._molecules.autoencoder import SequenceAutoencoder
from cameraready.flows._molecules.drugs import PAD, Library, crossovers
from cameraready.flows._molecules.properties import NAMES, properties
from cameraready.flows._molecules.surrogates import Surrogates, train_surrogates
from cameraready.flows._toy.cached import cached
from cameraready.flows._toy.networks import MLPVelocity
from cameraready.flows._toy.training import fit, train_flow

#: Raised when code below changes what is trained.
VERSION = 1


@dataclass(frozen=True)
class Settings:
    """Sizes of networks and trainings.

    Attributes
    ----------
    library : dict
        Options of `drug_library`.
    drugs : int or None
        How many of the shipped SMILES are looked at; None for all.
    crossed : int
        Crossovers that the autoencoder learns from beside the drugs; half of each batch are drugs.
    latent, hidden, embedding, kl, hide, steps, batch, lr
        Of the autoencoder.
    flow_width, flow_depth, flow_steps, flow_batch, flow_lr
        Of the velocity.
    labelled, width, members, surrogate_steps
        Decoded molecules that the surrogates learn from, units, perceptrons, steps.
    """

    library: dict[str, Any] = field(default_factory=dict)
    drugs: int | None = None
    crossed: int = 18_000
    latent: int = 32
    hidden: int = 192
    embedding: int = 64
    kl: float = 0.1
    hide: float = 0.1
    steps: int = 5000
    batch: int = 32
    lr: float = 6e-3
    flow_width: int = 256
    flow_depth: int = 4
    flow_steps: int = 4000
    flow_batch: int = 256
    flow_lr: float = 1e-3
    labelled: int = 16_000
    width: int = 256
    members: int = 4
    surrogate_steps: int = 3000

    def recipe(self, name: str, library: Library, seed: int, *names: str) -> dict[str, Any]:
        """Of the settings of these names and what the library holds."""
        return {
            "name": f"molecules-{name}",
            "version": VERSION,
            "library": library.digest,
            "seed": seed,
            **{key: value for key, value in asdict(self).items() if key in names},
        }


#: For trying things out: a hundred drugs, trained in a second or two, and good for nothing.
SMALL = Settings(
    library={"rare": 4, "merges": 40},
    drugs=200,
    crossed=60,
    latent=8,
    hidden=48,
    embedding=16,
    steps=100,
    batch=32,
    flow_width=48,
    flow_depth=2,
    flow_steps=200,
    flow_batch=64,
    labelled=300,
    width=32,
    members=2,
    surrogate_steps=200,
)

_AUTOENCODER = ("crossed", "latent", "hidden", "embedding", "kl", "hide", "steps", "batch", "lr")
_FLOW = (*_AUTOENCODER, "flow_width", "flow_depth", "flow_steps", "flow_batch", "flow_lr")
_SURROGATES = (*_FLOW, "labelled", "width", "members", "surrogate_steps")


Net = TypeVar("Net", bound=nn.Module)


def _made(
    recipe: dict[str, Any], build: Callable[[], Net], train: Callable[..., Net], *, keep: bool, quiet: bool
) -> Net:
    """The network of a recipe: kept on this machine, or trained here and now and left in memory."""
    if keep:
        return cached(recipe, build, train, quiet=quiet)  # type: ignore[return-value]
    return train(build()).eval().requires_grad_(False)


def autoencoder_of(library: Library, settings: Settings, *, keep: bool, quiet: bool) -> SequenceAutoencoder:
    """The trained autoencoder of a library's molecules."""
    recipe = settings.recipe("autoencoder", library, 1, *_AUTOENCODER)

    def build() -> SequenceAutoencoder:
        return SequenceAutoencoder(
            len(library.vocabulary),
            library.length,
            latent=settings.latent,
            hidden=settings.hidden,
            embedding=settings.embedding,
            properties=len(NAMES),
            generator=torch.Generator().manual_seed(1),
        )

    def train(net: SequenceAutoencoder, checkpoint: Path | None = None) -> SequenceAutoencoder:
        generator = torch.Generator().manual_seed(1001)
        draw, drugs = _batches(library, settings, generator)

        def loss(net: Any, g: torch.Generator) -> Tensor:
            codes, values = draw(g)
            return net.loss(codes, values, kl=settings.kl, hide=settings.hide, generator=g)

        fit(
            net,
            loss,
            steps=settings.steps,
            lr=settings.lr,
            generator=generator,
            ema=0.995,
            checkpoint=checkpoint,
            progress=None if quiet else "molecules' autoencoder",
        )
        net.standardise(drugs)
        return net

    return _made(recipe, build, train, keep=keep, quiet=quiet)


def _batches(
    library: Library, settings: Settings, generator: torch.Generator
) -> tuple[Callable[[torch.Generator], tuple[Tensor, Tensor]], Tensor]:
    """Draws of codes and standardised properties, of rows of like length, half of them drugs; and the drugs' codes."""
    drugs, _ = library.split()
    crossed = crossovers(drugs, settings.crossed, generator=generator)
    codes, _ = library.encode(drugs)
    more, fits = library.encode(crossed)
    values = properties(drugs)
    extra = properties([text for text, fit in zip(crossed, fits.tolist(), strict=True) if fit])
    centre, spread = values.mean(0), values.std(0)
    sources = []
    for rows, known in ((codes, values), (more, extra)):
        if not len(rows):
            continue
        standard = ((known - centre) / spread).clamp(-4, 4).float()
        order = (rows != PAD).sum(1).argsort(stable=True)
        sources.append((rows, standard, order.tensor_split(max(1, min(8, len(rows) // 64)))))

    def draw(g: torch.Generator) -> tuple[Tensor, Tensor]:
        place = float(torch.rand(1, generator=g))
        share = settings.batch // len(sources)
        parts = []
        for rows, standard, buckets in sources:
            bucket = buckets[int(place * len(buckets))]
            chosen = bucket[torch.randint(len(bucket), (share,), generator=g)]
            parts.append((rows[chosen], standard[chosen]))
        batch = torch.cat([rows for rows, _ in parts])
        return batch[:, : int((batch != PAD).sum(1).max())], torch.cat([known for _, known in parts])

    return draw, codes


def flow_of(
    library: Library, codes: SequenceAutoencoder, settings: Settings, *, keep: bool, quiet: bool
) -> MLPVelocity:
    """The velocity trained on the drugs' latents: draws of the autoencoder's posterior of each."""
    recipe = settings.recipe("flow", library, 2, *_FLOW)

    def build() -> MLPVelocity:
        generator = torch.Generator().manual_seed(2)
        return MLPVelocity(settings.latent, settings.flow_width, settings.flow_depth, generator=generator)

    def train(net: MLPVelocity, checkpoint: Path | None = None) -> MLPVelocity:
        rows, _ = library.encode(library.split()[0])
        mean, deviation = ((part / codes.spread) for part in codes.posterior(rows))
        mean = mean - codes.centre / codes.spread

        def draw(n: int, g: torch.Generator) -> Tensor:
            chosen = torch.randint(len(mean), (n,), generator=g)
            return mean[chosen] + deviation[chosen] * torch.randn(n, mean.shape[1], generator=g)

        train_flow(
            net,
            draw,
            steps=settings.flow_steps,
            batch=settings.flow_batch,
            lr=settings.flow_lr,
            generator=torch.Generator().manual_seed(1002),
            checkpoint=checkpoint,
            progress=None if quiet else "molecules' flow",
        )
        return net

    return _made(recipe, build, train, keep=keep, quiet=quiet)


def surrogates_of(
    library: Library, codes: SequenceAutoencoder, velocity: nn.Module, settings: Settings, *, keep: bool, quiet: bool
) -> Surrogates:
    """Surrogates trained on what the flow's latents decode to, a third of them moved outwards: a fine-tuned flow goes where the pretrained one seldom is."""
    recipe = settings.recipe("surrogates", library, 3, *_SURROGATES)

    def build() -> Surrogates:
        return Surrogates(
            settings.latent,
            len(NAMES),
            width=settings.width,
            members=settings.members,
            generator=torch.Generator().manual_seed(3),
        )

    def train(net: Surrogates) -> Surrogates:
        generator = torch.Generator().manual_seed(1003)
        latents = drawn(velocity, settings.labelled, settings.latent, generator)
        third = settings.labelled // 3
        latents[:third] *= 1 + 0.4 * torch.rand(third, 1, generator=generator)
        smiles = decoded(library, codes, latents)
        return train_surrogates(
            net,
            latents,
            properties(smiles),
            steps=settings.surrogate_steps,
            batch=256,
            lr=2e-3,
            generator=generator,
            progress=None if quiet else "molecules' surrogates",
        )

    return _made(recipe, build, train, keep=keep, quiet=quiet)


@torch.no_grad()
def drawn(velocity: Any, n: int, dim: int, generator: torch.Generator, *, steps: int = 40) -> Tensor:
    """Latents (n, D) float32 at t = 1 of a velocity from noise, by the midpoint rule in `steps` steps of two evaluations."""
    x, step = torch.randn(n, dim, generator=generator), 1 / steps
    for number in range(steps):
        t = number * step
        x = x + step * velocity(x + step / 2 * velocity(x, t), t + step / 2)
    return x


@torch.no_grad()
def decoded(library: Library, codes: SequenceAutoencoder, latents: Tensor) -> list[str]:
    """Canonical SMILES of standardised latents (B, D)."""
    smiles: list[str] = []
    for part in latents.to(torch.float32).split(1024):
        smiles.extend(library.decode(codes.write(part)))
    return smiles
