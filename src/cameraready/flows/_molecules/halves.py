"""Molecules as two halves: cut at a bond that chemistry can make, embedded through SELFIES, and joined again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cameraready.flows._molecules.drugs import quietly, tokens_of

#: What a half has in place of the other, in SMILES and (SELFIES knows no wild card; no drug has astatine) in SELFIES.
_OPEN, _MARK = "[*:1]", "[At]"
#: How much a half's descriptors weigh against the counts of its tokens.
_WEIGHT = 2.0


class Cut(NamedTuple):
    """A molecule in two halves, the one with more heavy atoms first: SMILES with an open end, and BRICS's kinds of their ends."""

    left: str
    right: str
    left_kind: str
    right_kind: str


def cuts(smiles: str, *, atoms: int = 5, most: int = 3) -> list[Cut]:
    """The most balanced ways to cut a molecule at one bond that BRICS (Degen et al., 2008) calls synthetically sensible.

    Parameters
    ----------
    smiles : str
    atoms : int
        Heavy atoms of either half, at least.
    most : int
        Cuts, at most.
    """
    from rdkit import Chem
    from rdkit.Chem import BRICS

    found: list[tuple[int, Cut]] = []
    with quietly():
        molecule = Chem.MolFromSmiles(smiles)
        for (begin, end), kinds in BRICS.FindBRICSBonds(molecule):
            bond = molecule.GetBondBetweenAtoms(begin, end).GetIdx()
            open_ended = Chem.FragmentOnBonds(molecule, [bond], dummyLabels=[(0, 0)])
            parts = Chem.GetMolFrags(open_ended)
            if len(parts) != 2 or min(map(len, parts)) <= atoms:
                continue
            for atom in open_ended.GetAtoms():
                if atom.GetAtomicNum() == 0:
                    atom.SetAtomMapNum(1)
            sides = []
            for part in parts:
                kind = kinds[0] if begin in part else kinds[1]
                sides.append((-len(part), Chem.MolFragmentToSmiles(open_ended, part), kind))
            (size, left, left_kind), (_, right, right_kind) = sorted(sides)
            found.append((-size, Cut(left, right, left_kind, right_kind)))
    return [cut for _, cut in sorted(found)][:most]


def join(left: str, right: str) -> str:
    """The molecule of two halves as canonical SMILES; "" should rdkit refuse it."""
    from rdkit import Chem

    with quietly():
        halves = Chem.MolFromSmiles(left), Chem.MolFromSmiles(right)
        if None in halves:
            return ""
        text = str(Chem.MolToSmiles(Chem.molzip(*halves)))
        return text if Chem.MolFromSmiles(text) is not None else ""


def words_of(half: str) -> list[str] | None:
    """SELFIES tokens of a half, written from its open end on; None where SELFIES cannot say it."""
    from rdkit import Chem

    with quietly():
        molecule = Chem.MolFromSmiles(half)
        opening = next(atom.GetIdx() for atom in molecule.GetAtoms() if atom.GetAtomicNum() == 0)
        return tokens_of(str(Chem.MolToSmiles(molecule, rootedAtAtom=opening)).replace(_OPEN, _MARK, 1))


def _descriptors(half: str) -> list[float]:
    """Heavy atoms, rings, aromatic rings, log P, polar surface, share of sp3 carbons, spiro and bridgehead atoms, ring atoms of rings over six."""
    from rdkit import Chem
    from rdkit.Chem import Crippen, rdMolDescriptors

    molecule = Chem.MolFromSmiles(half)
    rings = molecule.GetRingInfo().AtomRings()
    return [
        molecule.GetNumHeavyAtoms(),
        len(rings),
        rdMolDescriptors.CalcNumAromaticRings(molecule),
        Crippen.MolLogP(molecule),
        rdMolDescriptors.CalcTPSA(molecule),
        rdMolDescriptors.CalcFractionCSP3(molecule),
        rdMolDescriptors.CalcNumSpiroAtoms(molecule) + rdMolDescriptors.CalcNumBridgeheadAtoms(molecule),
        sum(len(ring) for ring in rings if len(ring) > 6),
    ]


class Embedding:
    """A fixed linear map of halves to R^d: the principal directions of counts of SELFIES tokens and of pairs of neighbours, with descriptors.

    Parameters
    ----------
    halves : sequence of str
        Those that decide the directions.
    size : int
        d.
    rare : int
        Tokens and pairs that fewer halves have are left out.

    Attributes
    ----------
    fitted : (N, d) float32
        Points of `halves`, NaN for one that SELFIES cannot say, which decides nothing.
    explained : float
        Share of the features' variance that the directions keep.
    """

    def __init__(self, halves: Sequence[str], size: int, *, rare: int = 10) -> None:
        words = [words_of(half) for half in halves]
        counts = Counter(gram for tokens in words if tokens for gram in set(_grams(tokens)))
        self.grams = {gram: at for at, gram in enumerate(sorted(gram for gram, n in counts.items() if n >= rare))}
        features = self._features(halves, words)
        sayable = features[~features.isnan().any(1)]
        if len(sayable) <= size or len(self.grams) < size:
            raise ValueError(
                f"{len(sayable)} halves with {len(self.grams)} common tokens cannot be embedded in {size} numbers"
            )
        self.centre = sayable.mean(0)
        scale = sayable.std(0).clamp_min(1e-6)
        scale[: len(self.grams)] *= len(self.grams) ** 0.5
        scale[len(self.grams) :] *= (sayable.shape[1] - len(self.grams)) ** 0.5 / _WEIGHT
        standard = (sayable - self.centre) / scale
        strength, directions = torch.linalg.eigh(standard.T @ standard)
        strength, directions = strength.flip(0).clamp_min(0), directions.T.flip(0)[:size]
        # The sign of a direction is arbitrary; fixed, the embedding is the same on every machine.
        largest = directions.abs().argmax(1, keepdim=True)
        directions = directions * directions.gather(1, largest).sign()
        self.explained = float(strength[:size].sum() / strength.sum())
        self.project = (directions / scale).T * ((len(sayable) - 1) / strength[:size]) ** 0.5
        self.fitted = self._points(features)

    def __call__(self, halves: Sequence[str]) -> Tensor:
        """Points (N, d) float32 of halves, NaN for one that SELFIES cannot say."""
        return self._points(self._features(halves, [words_of(half) for half in halves]))

    def _points(self, features: Tensor) -> Tensor:
        return ((features - self.centre) @ self.project).float()

    def _features(self, halves: Sequence[str], words: Sequence[list[str] | None]) -> Tensor:
        rows = np.zeros((len(halves), len(self.grams) + 8))
        for row, half, tokens in zip(rows, halves, words, strict=True):
            if tokens is None:
                row[:] = np.nan
                continue
            for gram, count in Counter(_grams(tokens)).items():
                if gram in self.grams:
                    row[self.grams[gram]] = count**0.5
            row[len(self.grams) :] = _descriptors(half)
        return torch.from_numpy(rows)


def _grams(tokens: Sequence[str]) -> list[str]:
    """Tokens and pairs of neighbours."""
    return [*tokens, *(left + right for left, right in pairwise(tokens))]
