"""The latent of molecules: two points, one for each half; a latent decodes to the nearest halves that can be joined."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cameraready.flows._molecules.drugs import cleaned, is_held_out
from cameraready.flows._molecules.halves import Cut, Embedding, cuts, join


@dataclass(frozen=True, eq=False)
class Side:
    """The halves that a side can have: SMILES, their ends' kinds as numbers (n,), points (n, d), and the points' mean and spread (d,) before standardising."""

    smiles: list[str]
    kinds: Tensor
    points: Tensor
    centre: Tensor
    spread: Tensor


class Codebook:
    """Real molecules as latents (B, D) of two halves, D / 2 numbers each, and the way back.

    A latent's first half picks the nearest left half of a drug, its second the nearest right half whose open end is of a kind that was joined to that of the left
    one in some drug. All pairs are millions of molecules, each with ordinary valences, so every latent is a molecule. Over the drugs each coordinate has mean 0 and
    variance 1 / (1 + blur^2): with the blur of `draw` it has variance 1.

    Parameters
    ----------
    smiles : sequence of str
        Cleaned by `cleaned`. Those that have no bond to cut, or that SELFIES cannot say, are left out.
    latent : int
        D, even.
    blur : float
        Standard deviation of the noise that makes a density of points, in units of the points' own.
    most : int
        Cuts of a drug.
    rare : int
        See `Embedding`.

    Attributes
    ----------
    train, test : list of str
        Drugs whose halves can be picked, and those held out.
    left, right : Side
    pairs : (P, 2) int64
        Left and right half of each cut of a drug to train on.
    weights : (P,) float64
        1 over the number of the drug's cuts.
    explained : float
        Share of variance that the embedding keeps.
    """

    def __init__(
        self, smiles: Sequence[str], *, latent: int = 24, blur: float = 0.4, most: int = 2, rare: int = 10
    ) -> None:
        if latent < 2 or latent % 2:
            raise ValueError(f"latent must be even, D / 2 numbers for each half, got {latent}")
        self.latent, self.blur, self.most = latent, blur, most
        known = {text: found for text in cleaned(smiles) if (found := cuts(text, most=most))}
        self.train = [text for text in known if not is_held_out(text)]
        self.test = [text for text in known if is_held_out(text)]
        shown = [cut for text in self.train for cut in known[text]]
        if len(shown) < 2:
            raise ValueError(
                f"{len(smiles)} molecules have {len(shown)} bonds to cut, too few for a space of molecules; give more"
            )
        halves = sorted({half for cut in shown for half in (cut.left, cut.right)})
        self._embedding = Embedding(halves, latent // 2, rare=rare)
        self.explained = self._embedding.explained
        points = dict(zip(halves, self._embedding.fitted, strict=True))
        shown = [cut for cut in shown if not bool((points[cut.left] + points[cut.right]).isnan().any())]
        self._kinds = {kind: at for at, kind in enumerate(sorted({kind for cut in shown for kind in cut[2:]}))}
        self.left, self._lefts = self._side([(cut.left, cut.left_kind) for cut in shown], points)
        self.right, self._rights = self._side([(cut.right, cut.right_kind) for cut in shown], points)
        self.joints = torch.zeros(len(self._kinds), len(self._kinds), dtype=torch.bool)
        for cut in shown:
            self.joints[self._kinds[cut.left_kind], self._kinds[cut.right_kind]] = True
        self.pairs = torch.tensor(
            [[self._lefts[cut.left, cut.left_kind], self._rights[cut.right, cut.right_kind]] for cut in shown]
        )
        number = {cut: len(found) for found in known.values() for cut in found}
        self.weights = torch.tensor([1 / number[cut] for cut in shown], dtype=torch.float64)

    @property
    def digest(self) -> str:
        """Of the drugs and the space: what a cached network depends on."""
        text = "\n".join([*self.train, *self.left.smiles, *self.right.smiles, str(self.latent), str(self.blur)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _side(
        self, halves: Sequence[tuple[str, str]], points: dict[str, Tensor]
    ) -> tuple[Side, dict[tuple[str, str], int]]:
        index = {half: at for at, half in enumerate(dict.fromkeys(halves))}
        used = torch.stack([points[half] for half, _ in halves])
        # Of the cuts, not of the distinct halves: what the drugs have often counts often.
        centre, spread = used.mean(0), used.std(0).clamp_min(1e-6) * (1 + self.blur**2) ** 0.5
        own = (torch.stack([points[half] for half, _ in index]) - centre) / spread
        kinds = torch.tensor([self._kinds[kind] for _, kind in index])
        return Side([half for half, _ in index], kinds, own, centre, spread), index

    @property
    def noise(self) -> float:
        """Standard deviation of the blur in standardised latents."""
        return float(self.blur / (1 + self.blur**2) ** 0.5)

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Latents (n, D) float32 of drugs drawn from those to train on, blurred."""
        chosen = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        pairs = self.pairs[chosen]
        points = torch.cat([self.left.points[pairs[:, 0]], self.right.points[pairs[:, 1]]], 1)
        return points + self.noise * torch.randn(points.shape, generator=generator)

    def decode(self, latents: Tensor) -> list[str]:
        """Canonical SMILES of latents (B, D)."""
        texts: list[str] = []
        for part in latents.detach().to(torch.float32).split(1024):
            first, second = part.split(self.latent // 2, 1)
            lefts = _distances(first, self.left.points).argmin(1)
            fitting = self.joints[self.left.kinds[lefts]][:, self.right.kinds]
            rights = _distances(second, self.right.points).masked_fill(~fitting, torch.inf).argmin(1)
            texts.extend(
                join(self.left.smiles[i], self.right.smiles[j])
                for i, j in zip(lefts.tolist(), rights.tolist(), strict=True)
            )
        return texts

    def encode(self, smiles: Sequence[str]) -> Tensor:
        """Latents (N, D) float32 of molecules by their most balanced cut, without blur.

        Raises
        ------
        ValueError
            If some molecule cannot be cut or said in SELFIES: it names the first.
        """
        best: list[Cut | None] = [next(iter(cuts(text, most=1)), None) for text in smiles]
        left = self._embedding([cut.left if cut else _NONE for cut in best])
        right = self._embedding([cut.right if cut else _NONE for cut in best])
        latents = torch.cat(
            [(left - self.left.centre) / self.left.spread, (right - self.right.centre) / self.right.spread], 1
        )
        lost = latents.isnan().any(1) | torch.tensor([cut is None for cut in best], dtype=torch.bool)
        if bool(lost.any()):
            first = smiles[int(lost.nonzero()[0])]
            raise ValueError(
                f"{int(lost.sum())} of {len(smiles)} molecules have no bond at which they can be cut into two halves of five atoms or more, or no word in "
                f"SELFIES, first {first!r}"
            )
        return latents


def _distances(points: Tensor, others: Tensor) -> Tensor:
    """Without the shortcut through a matrix product, whose rounding depends on the rest of the batch."""
    return torch.cdist(points, others, compute_mode="donot_use_mm_for_euclid_dist")


#: Stands in for a half that is not there, so that shapes stay; its latent is not given out.
_NONE = "C[*:1]"
