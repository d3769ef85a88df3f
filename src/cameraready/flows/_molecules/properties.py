"""What a molecule is worth: properties by rdkit, the synthetic-accessibility score among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from cameraready.flows._molecules.drugs import needs_extra, quietly

#: Columns of `properties`, in order: quantitative estimate of drug-likeness (0 to 1), synthetic accessibility (1 easy to 10 hard),
#: octanol-water partition (log P), polar surface (square angstrom), weight (dalton), share of carbons that are sp3.
NAMES = ("qed", "sa", "logp", "tpsa", "weight", "fsp3")


def synthetic_accessibility() -> Callable[[Any], float]:
    """rdkit's own SA score (Ertl and Schuffenhauer, 2009), which its wheel carries in ``rdkit/Contrib/SA_Score``.

    Raises
    ------
    ImportError
        If this rdkit has no Contrib folder (some distributions leave it out).
    """
    needs_extra()
    try:
        from rdkit.Contrib.SA_Score import sascorer
    except ImportError:
        raise ImportError(
            "this rdkit has no Contrib/SA_Score, which scores synthetic accessibility; rdkit's wheel has it: "
            'pip install "cameraready[flows-molecules]"',
            name="rdkit",
        ) from None
    return sascorer.calculateScore  # type: ignore[no-any-return]


def properties(smiles: Iterable[str]) -> Tensor:
    """(N, 6) float64, the columns of `NAMES`; NaN in the row of a text that is no molecule, or an empty one."""
    needs_extra()
    from rdkit import Chem
    from rdkit.Chem import QED, Crippen, Descriptors, rdMolDescriptors

    accessibility = synthetic_accessibility()
    measures = (
        QED.qed,
        accessibility,
        Crippen.MolLogP,
        rdMolDescriptors.CalcTPSA,
        Descriptors.MolWt,
        rdMolDescriptors.CalcFractionCSP3,
    )
    known: dict[str, list[float]] = {}
    rows = []
    with quietly():
        for text in smiles:
            if text not in known:
                molecule = Chem.MolFromSmiles(text) if text else None
                empty = molecule is None or molecule.GetNumAtoms() == 0
                known[text] = [math.nan] * len(NAMES) if empty else [float(measure(molecule)) for measure in measures]
            rows.append(known[text])
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, len(NAMES))
