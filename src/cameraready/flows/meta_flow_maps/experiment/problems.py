"""What the study is tried on: flows with their teacher, their trained map and a reward, known exactly where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cameraready.flows import LinearPath
from cameraready.flows._toy.boxes import Checkerboard
from cameraready.flows._toy.cached import cached
from cameraready.flows._toy.images import digits
from cameraready.flows._toy.mixtures import GaussianMixture, eight_gaussians, random_mixture
from cameraready.flows._toy.tilts import QuadraticReward
from cameraready.flows._toy.trained import trained
from cameraready.flows.meta_flow_maps import FlowBackbone, MapMLP, MetaFlowMap, MFMTrainer, PowerZero

EIGHT, SIXTEEN, BOARD, DIGITS, SMOKE = "eight-gaussians", "rare-mode", "checkerboard", "digits", "two-modes"
#: Share of the mode that the reward of `SIXTEEN` asks for.
RARE = 0.005
#: Ink that the reward of the digits asks for, in standard deviations above the mean; the most of any training digit is 3.46.
INK = 3.5
#: Training steps of a map of a user's own data.
OWN_STEPS = 3000


@dataclass(frozen=True)
class Problem:
    """A flow on the linear path, in float32.

    Attributes
    ----------
    name : str
    shape : tuple of int
        Of one state.
    teacher : callable ``v(x, t, y=None)``
        Its base flow's velocity; exact where `mixture` is given.
    draw : callable ``draw(n, generator)``
        Clean data, (n, *shape).
    mfm : MetaFlowMap
        Trained on the teacher.
    reward : callable
    scale : float
        Of the tilt.
    mixture : GaussianMixture or None
        The exact law.
    reference : tensor or None
        Held-out data to judge samples by, where the law is not known.
    costly : bool
        Whether calls of the teacher take so long that fewer draws are compared.
    """

    name: str
    shape: tuple[int, ...]
    teacher: Callable[..., Tensor]
    draw: Callable[..., Tensor]
    mfm: MetaFlowMap
    reward: Callable[[Tensor], Tensor]
    scale: float
    mixture: GaussianMixture | None = None
    reference: Tensor | None = None
    costly: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


#: Of the cached trainings; minutes on two quiet cores are 1 for each of the first three and 5 for the digits.
RECIPES: dict[str, dict[str, Any]] = {
    EIGHT: {
        "name": "mfm-eight-gaussians",
        "version": 2,
        "network": {"width": 128, "depth": 4, "data_std": 1.45},
        "training": {
            "distill": "psd",
            "steps": 5000,
            "batch": 512,
            "lr": 2e-3,
            "cooldown": 0.6,
            "ema": 0.998,
            "diagonal": 0.4,
        },
    },
    SIXTEEN: {
        "name": "mfm-rare-mode",
        "version": 1,
        "network": {"width": 192, "depth": 4, "data_std": 1.1},
        "training": {
            "distill": "psd",
            "steps": 5000,
            "batch": 512,
            "lr": 2e-3,
            "cooldown": 0.6,
            "ema": 0.998,
            "diagonal": 0.4,
        },
    },
    BOARD: {
        "name": "mfm-checkerboard",
        "version": 1,
        "network": {"width": 128, "depth": 4, "data_std": 1.15},
        "training": {
            "distill": "psd",
            "steps": 5000,
            "batch": 384,
            "lr": 2e-3,
            "cooldown": 0.6,
            "ema": 0.998,
            "diagonal": 0.4,
        },
    },
    DIGITS: {
        "name": "mfm-digits",
        "version": 1,
        "network": {"from": "digits-unet", "layers": ["first", "embed"], "width": 48},
        "training": {
            "distill": "psd",
            "steps": 1800,
            "batch": 96,
            "lr": 5e-4,
            "cooldown": 0.6,
            "ema": 0.995,
            "diagonal": 0.25,
        },
    },
}


def training_passes(name: str) -> float:
    """Passes through networks that the training of a shipped map took, a backward one counted as two; 0 for others."""
    if name not in RECIPES:
        return 0.0
    training = RECIPES[name]["training"]
    on = training["diagonal"]
    # The teacher for all; on the diagonal a forward and a backward pass, off it two forward passes more.
    return float(training["steps"] * training["batch"] * (1 + 3 * on + 5 * (1 - on)))


def two_modes() -> GaussianMixture:
    """The smoke tier's: an even pair on a line."""
    means = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    return GaussianMixture(torch.tensor([0.6, 0.4]), means, torch.tensor([0.1, 0.1]))


def rare_mode() -> GaussianMixture:
    """Six Gaussians in 16 dimensions, the last of which holds the share `RARE`."""
    base = random_mixture(16, 6, torch.Generator().manual_seed(11), spread=1.0, scale=0.5)
    weights = torch.cat(
        [(1 - RARE) * base.weights[:-1] / base.weights[:-1].sum(), torch.tensor([RARE], dtype=torch.float64)]
    )
    return GaussianMixture(weights, base.means, base.covariances)


@lru_cache(maxsize=8)
def problem(name: str) -> Problem:
    """A shipped problem; its map is trained at the first call on a machine (told on stderr)."""
    if name == DIGITS:
        return _digits()
    if name == BOARD:
        board = Checkerboard()
        recipe = RECIPES[BOARD]
        teacher = board.velocity(LinearPath())
        mfm = _map(recipe, 2, teacher, lambda n, g: board.sample(n, g).float())
        reward = QuadraticReward.closeness(torch.tensor([1.5, 1.5]), 1.0)
        return Problem(
            name,
            (2,),
            teacher,
            lambda n, g: board.sample(n, g).float(),
            mfm,
            reward,
            1.0,
            reference=board.sample(4000, torch.Generator().manual_seed(5)).float(),
        )
    mixture = {EIGHT: eight_gaussians, SIXTEEN: rare_mode, SMOKE: two_modes}[name]()
    single = mixture.to(torch.float32)
    teacher = single.velocity(LinearPath())
    if name == SMOKE:
        mfm = smoke_map(teacher, single.sample)
        return Problem(
            name, (1,), teacher, single.sample, mfm, QuadraticReward.closeness(mixture.means[1], 1.0), 1.0, mixture
        )
    mfm = _map(RECIPES[name], mixture.dim, teacher, single.sample)
    if name == EIGHT:
        return Problem(
            name, (2,), teacher, single.sample, mfm, QuadraticReward.closeness(mixture.means[0], 1.0), 2.0, mixture
        )
    reward = QuadraticReward.closeness(mixture.means[-1], 1.5)
    return Problem(name, (mixture.dim,), teacher, single.sample, mfm, reward, 2.0, mixture)


def smoke_map(teacher: Callable[..., Tensor], draw: Callable[..., Tensor]) -> MetaFlowMap:
    """A map of a second's training."""
    mfm = MetaFlowMap(MapMLP(1, width=24, depth=2))
    return MFMTrainer(mfm, teacher, distill="psd", batch=128, lr=5e-3, warmup=10, cooldown=0.5, ema=0.98).fit(
        draw, 150, progress=False
    )


def own_network(dim: int, data_std: float) -> MetaFlowMap:
    """An untrained map of vectors."""
    return MetaFlowMap(MapMLP(dim, width=128, depth=4, data_std=data_std))


def own_training(problem: Problem) -> MetaFlowMap:
    """The map of a user's flow, trained for about a minute."""
    trainer = MFMTrainer(
        problem.mfm,
        problem.teacher,
        distill="psd",
        batch=256,
        lr=2e-3,
        cooldown=0.6,
        ema=0.998,
        diagonal=0.4,
        data_std=problem.mfm.backbone.variance**0.5,  # type: ignore[union-attr, operator]
    )
    return trainer.fit(problem.draw, OWN_STEPS)


def _map(recipe: dict[str, Any], dim: int, teacher: Callable[..., Tensor], draw: Callable[..., Tensor]) -> MetaFlowMap:
    def build() -> MetaFlowMap:
        return MetaFlowMap(MapMLP(dim, **recipe["network"]))

    return cached(recipe, build, lambda mfm, checkpoint: _trained(mfm, teacher, draw, recipe, checkpoint))  # type: ignore[return-value]


def _trained(
    mfm: Any, teacher: Callable[..., Tensor], draw: Callable[..., Tensor], recipe: dict[str, Any], checkpoint: Any
) -> Any:
    settings = dict(recipe["training"])
    steps = settings.pop("steps")
    std = recipe["network"].get("data_std", 1.0)
    trainer = MFMTrainer(mfm, teacher, t_cond=PowerZero(0.1, 2.0), data_std=std, **settings)
    return trainer.fit(draw, steps, checkpoint=checkpoint, every=100)


def _digits() -> Problem:
    network = trained("digits-unet")
    images, _ = digits("train")
    held, _ = digits("test")
    recipe = RECIPES[DIGITS]

    def teacher(x: Tensor, t: Any, y: Any = None) -> Tensor:
        return network(x, t)

    def draw(n: int, generator: torch.Generator) -> Tensor:
        return images[torch.randint(len(images), (n,), generator=generator)]

    def build() -> MetaFlowMap:
        layers = recipe["network"]["layers"]
        copied = trained(recipe["network"]["from"]).requires_grad_(True)
        return MetaFlowMap(FlowBackbone(copied, (1, 8, 8), layers, width=recipe["network"]["width"]))

    mfm = cached(recipe, build, lambda net, checkpoint: _trained(net, teacher, draw, recipe, checkpoint))
    mean, spread = images.mean((1, 2, 3)).mean(), images.mean((1, 2, 3)).std()

    def ink(x: Tensor) -> Tensor:
        """Closeness to `INK`, which is bounded: more and more ink is no digit."""
        return -((x.clamp(-1.05, 1.05).mean((1, 2, 3)) - mean) / spread - INK).square() / 2

    return Problem(
        DIGITS, (1, 8, 8), teacher, draw, mfm, ink, 4.0, reference=held, costly=True, extra={"train": images}
    )  # type: ignore[arg-type]
