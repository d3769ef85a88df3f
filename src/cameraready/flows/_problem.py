"""A flow to try a method on: data, and a velocity that is given, known exactly, or trained on the data when it is first asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cameraready.flows._paths import LINEAR, Path

if TYPE_CHECKING:
    from cameraready.flows._toy.mixtures import GaussianMixture

#: Data that are drawn where only a mixture is given.
DRAWN = 4096
#: Classes that a network is trained on at most.
MAX_CLASSES = 100
#: Part of the data that is kept for judging.
TEST_SHARE = 0.2
#: Steps, batch and learning rate with which a velocity is trained on the user's data.
VECTORS = {"steps": 4000, "batch": 256, "lr": 2e-3}
IMAGES = {"steps": 3000, "batch": 128, "lr": 1e-3}


class FlowProblem:
    """What a study of this room is tried on.

    Parameters
    ----------
    name : str
    data : (N, ...) tensor or array, optional
        Samples of what is to be generated, of floating point, at least 10; vectors (N, D) or images (N, C, H, W). May be left out where a mixture is given.
    labels : (N,) whole numbers from 0, optional
    velocity : callable ``v(x, t, y=None)``, optional
        A trained model in the room's convention (see `cameraready.flows.velocity_of`).
    mixture : cameraready.flows.GaussianMixture, optional
        The exact law of the data; gives the velocity too.
    path : Path
        Of the velocity.
    classifier : callable, optional
        From (B, ...) data to logits, for judging samples.

    Attributes
    ----------
    train, test : tensors
        The data, four fifths and one fifth, mixed by a fixed permutation; `train_labels` and `test_labels` go with them.
    shape : tuple of int
        Of one state.
    classes : int
        Number of labels, 0 without.
    is_exact : bool
        Whether the velocity is known without learning error: a mixture's.
    has_own_velocity : bool
        Whether the velocity is a model that was given.

    Raises
    ------
    ValueError
        Data that are missing, too few, not finite, or of another shape; labels that do not fit.

    Examples
    --------
    >>> import numpy as np
    >>> problem = FlowProblem("ring", np.random.default_rng(0).normal(size=(100, 2)))
    >>> problem.train.shape, problem.test.shape, problem.classes
    (torch.Size([80, 2]), torch.Size([20, 2]), 0)
    """

    def __init__(
        self,
        name: str,
        data: Any = None,
        labels: Any = None,
        velocity: Callable[..., Tensor] | None = None,
        mixture: GaussianMixture | None = None,
        path: Path = LINEAR,
        classifier: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if data is None:
            if mixture is None:
                raise ValueError(f"{name} needs data, or a mixture to draw them from")
            data = mixture.sample(DRAWN, torch.Generator().manual_seed(0))
            data = data.to(torch.float32)
        self.name, self.path, self.mixture, self.classifier = name, path, mixture, classifier
        self.data = _states(name, data)
        self.labels = None if labels is None else _labels(name, labels, len(self.data))
        if velocity is None and mixture is None and self.classes > MAX_CLASSES:
            raise ValueError(
                f"labels of {name} go up to {self.classes - 1}; at most {MAX_CLASSES} classes from 0 are trained on: number them without gaps"
            )
        self.has_own_velocity = velocity is not None
        self._velocity = velocity if velocity is not None or mixture is None else mixture.velocity(path)
        order = torch.from_numpy(np.random.default_rng(9).permutation(len(self.data)))
        held = max(1, round(TEST_SHARE * len(self.data)))
        self._rest, self._held = order[held:], order[:held]

    def __repr__(self) -> str:
        return f"FlowProblem({self.name!r}, {len(self.data)} of shape {self.shape})"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape[1:])

    @property
    def classes(self) -> int:
        return 0 if self.labels is None else int(self.labels.max()) + 1

    @property
    def is_exact(self) -> bool:
        return self.mixture is not None and not self.has_own_velocity

    @property
    def train(self) -> Tensor:
        return self.data[self._rest]

    @property
    def test(self) -> Tensor:
        return self.data[self._held]

    @property
    def train_labels(self) -> Tensor | None:
        return None if self.labels is None else self.labels[self._rest]

    @property
    def test_labels(self) -> Tensor | None:
        return None if self.labels is None else self.labels[self._held]

    @property
    def velocity(self) -> Callable[..., Tensor]:
        """The velocity ``v(x, t, y=None)``; without one a small network is trained on `train` now, and cached by the data's digest."""
        if self._velocity is None:
            self._velocity = self._trained()
        return self._velocity

    @property
    def needs_training(self) -> bool:
        """Whether asking for `velocity` would train a network (or load it, where this was done before)."""
        return self._velocity is None

    def noise(self, n: int, generator: torch.Generator) -> Tensor:
        """`n` states of pure noise, of the data's shape and dtype."""
        return torch.randn(n, *self.shape, generator=generator, dtype=self.data.dtype)

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """`n` fresh data: from the mixture where it is known, else drawn from `train` with replacement."""
        if self.mixture is not None:
            return self.mixture.sample(n, generator).to(self.data.dtype)
        train = self.train
        return train[torch.randint(len(train), (n,), generator=generator)]

    def _trained(self) -> Callable[..., Tensor]:
        from cameraready.flows._adapters import velocity_of
        from cameraready.flows._toy.cached import cached
        from cameraready.flows._toy.networks import MLPVelocity, UNet
        from cameraready.flows._toy.training import train_flow

        data, labels = self.train.to(torch.float32), self.train_labels
        images = len(self.shape) == 3
        if images and (self.shape[1] != self.shape[2] or self.shape[1] % 2):
            raise ValueError(
                f"{self.name} has images of {self.shape[1]} x {self.shape[2]}; a network is trained on square ones of an even side: crop them, or give "
                "(velocity, data) with a velocity of your own"
            )
        settings = IMAGES if images else VECTORS
        digest = hashlib.sha256(data.contiguous().numpy().tobytes())
        if labels is not None:
            digest.update(labels.numpy().tobytes())
        recipe = {
            "name": "flow-problem",
            "version": 1,
            "data": digest.hexdigest(),
            "shape": list(self.shape),
            **settings,
        }
        recipe["classes"] = self.classes
        recipe["path"] = [float(c(t)) for t in (0.25, 0.5, 0.75) for c in (self.path.alpha, self.path.sigma)]

        def build() -> torch.nn.Module:
            start = torch.Generator().manual_seed(0)
            if images:
                return UNet(self.shape[0], self.shape[1], classes=self.classes, generator=start)
            return MLPVelocity(data[0].numel(), classes=self.classes, generator=start)

        def train(net: torch.nn.Module, checkpoint: FilePath | None = None) -> torch.nn.Module:
            return train_flow(
                net,
                data,
                labels,
                path=self.path,
                generator=torch.Generator().manual_seed(1),
                checkpoint=checkpoint,
                progress=f"a flow of {self.name}",
                **settings,
            )

        net = cached(recipe, build, train)
        return net if self.data.dtype == torch.float32 else velocity_of(net, path=self.path)  # takes their dtype


def _states(name: str, data: Any) -> Tensor:
    if not isinstance(data, Tensor):
        try:
            data = torch.from_numpy(np.require(data, requirements=("C", "W")))
        except TypeError:
            raise ValueError(f"the data of {name} are not numbers; give an array or tensor of floating point") from None
    if data.dim() not in (2, 4):
        raise ValueError(
            f"the data of {name} must be vectors (N, D) or images (N, C, H, W), got shape {tuple(data.shape)}"
        )
    if not data.is_floating_point():
        raise ValueError(
            f"the data of {name} are of {data.dtype}; flows are of continuous states: give floating point, scaled to about one"
        )
    if len(data) < 10:
        raise ValueError(f"{name} has {len(data)} data; at least 10 are needed to train on some and judge by others")
    if not bool(torch.isfinite(data).all()):
        bad = int((~torch.isfinite(data)).flatten(1).any(1).sum())
        raise ValueError(
            f"{bad} of {len(data)} data of {name} have NaN or infinite entries; leave them out or fill them in"
        )
    return data.detach().to("cpu", torch.promote_types(data.dtype, torch.float32), copy=True).contiguous()


def _labels(name: str, labels: Any, count: int) -> Tensor:
    values = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if values.shape != (count,) or values.dtype.kind not in "iub" or (values < 0).any():
        raise ValueError(
            f"labels of {name} must be {count} whole numbers from 0, got {values.dtype} of shape {values.shape}"
        )
    return torch.from_numpy(values.astype(np.int64))
