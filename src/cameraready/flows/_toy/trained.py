"""The networks that studies of this room share, by name; each is trained when it is first asked for."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cameraready.flows._toy.cached import cached, folder_of
from cameraready.flows._toy.classifier import ImageClassifier, train_classifier
from cameraready.flows._toy.images import digits, patches
from cameraready.flows._toy.mixtures import eight_gaussians
from cameraready.flows._toy.networks import MLPVelocity, TinyDiT, UNet
from cameraready.flows._toy.training import train_flow

_NETWORKS: dict[str, type[nn.Module]] = {
    "mlp": MLPVelocity,
    "unet": UNet,
    "dit": TinyDiT,
    "classifier": ImageClassifier,
}

#: Each trains in under three minutes on one core of an AMD EPYC. Samples of the class-conditional ones, 32 evaluations, are recognised as their class
#: in 99 of 100 cases (digits-unet 0.993, digits-dit 0.990; real held-out digits 0.989), and are no farther in Frechet distance from the
#: held-out digits (1.2 and 1.3) than the training digits are (1.6).
RECIPES: dict[str, dict[str, Any]] = {
    recipe["name"]: recipe
    for recipe in (
        {
            "name": "digits-unet",
            "version": 1,
            "network": {"kind": "unet", "width": 48, "classes": 10},
            "data": "digits",
            "training": {"steps": 2500, "batch": 64, "lr": 2e-3, "ema": 0.995, "label_dropout": 0.1},
            "seed": 1,
        },
        {
            "name": "digits-dit",
            "version": 1,
            "network": {"kind": "dit", "width": 96, "depth": 6, "classes": 10},
            "data": "digits",
            "training": {"steps": 2500, "batch": 64, "lr": 2e-3, "ema": 0.995, "label_dropout": 0.1},
            "seed": 2,
        },
        {
            "name": "digits-unconditional",
            "version": 1,
            "network": {"kind": "unet", "width": 40, "classes": 0},
            "data": "digits",
            "training": {"steps": 2000, "batch": 64, "lr": 2e-3, "ema": 0.995},
            "seed": 3,
        },
        {
            "name": "digits-classifier",
            "version": 1,
            "network": {"kind": "classifier", "width": 32, "classes": 10},
            "data": "digits",
            "training": {"steps": 800, "batch": 64, "lr": 2e-3, "ema": 0.99},
            "seed": 4,
        },
        {
            "name": "eight-gaussians-mlp",
            "version": 1,
            "network": {"kind": "mlp", "dim": 2, "width": 128, "depth": 4},
            "data": "eight-gaussians",
            "training": {"steps": 8000, "batch": 512, "lr": 2e-3, "ema": 0.999},
            "seed": 5,
        },
        {
            "name": "patches-mlp",
            "version": 1,
            "network": {"kind": "mlp", "dim": 64, "width": 512, "depth": 4},
            "data": "patches",
            "training": {"steps": 5000, "batch": 256, "lr": 1e-3, "ema": 0.998},
            "seed": 6,
        },
    )
}


def trained(name: str, *, quiet: bool = False) -> nn.Module:
    """A shared network by name, trained at the first call on a machine (minutes, told on stderr) and read from disk after that.

    Parameters
    ----------
    name : str
        ``digits-unet`` and ``digits-dit`` (class-conditional velocities of images (B, 1, 8, 8) in [-1, 1]; label 10 or None is unconditional),
        ``digits-unconditional`` (without labels), ``digits-classifier`` (logits, ``features``), ``eight-gaussians-mlp`` (of `eight_gaussians()`),
        ``patches-mlp`` (of `patches`; vectors (B, 64) or images). Velocities are on the linear path and called as ``net(x, t, y)``.
    quiet : bool

    Returns
    -------
    nn.Module
        In evaluation mode, without gradients; a new object at each call. Those on digits and patches saw the train split alone.
    """
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no trained network {name!r}; known are {', '.join(RECIPES)}.{hint}")
    recipe = RECIPES[name]
    return cached(
        recipe, lambda: build(recipe), lambda net, checkpoint: train(recipe, net, checkpoint, quiet=quiet), quiet=quiet
    )


def is_trained(name: str) -> bool:
    """Whether the network lies on this machine already."""
    return folder_of(RECIPES[name]).is_dir()


def build(recipe: dict[str, Any]) -> nn.Module:
    """The network of a recipe with its initial weights."""
    network = dict(recipe["network"])
    kind = network.pop("kind")
    return _NETWORKS[kind](**network, generator=torch.Generator().manual_seed(recipe["seed"]))


def train(recipe: dict[str, Any], net: nn.Module, checkpoint: Path | None = None, *, quiet: bool = False) -> nn.Module:
    """Train the network of a recipe."""
    generator = torch.Generator().manual_seed(1000 + recipe["seed"])
    settings = {**recipe["training"], "generator": generator, "checkpoint": checkpoint}
    settings["progress"] = None if quiet else recipe["name"]
    if recipe["data"] == "eight-gaussians":
        return train_flow(net, eight_gaussians().to(torch.float32).sample, **settings)
    if recipe["data"] == "patches":
        return train_flow(net, patches(50_000, split="train").flatten(1), **settings)
    images, labels = digits("train")
    if isinstance(net, ImageClassifier):
        return train_classifier(net, images, labels, **settings)
    return train_flow(net, images, labels if net.classes else None, **settings)
