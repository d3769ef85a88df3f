"""Properties against published values and closed forms, and drawings that are small, whole and told in words."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

pytestmark = pytest.mark.torch

rdkit = pytest.importorskip("rdkit")
pytest.importorskip("selfies")
pytest.importorskip("datamol")

from cameraready.flows._molecules.drawing import described, draw  # noqa: E402
from cameraready.flows._molecules.properties import NAMES, properties, synthetic_accessibility  # noqa: E402
from cameraready.flows._molecules.workload import reward_of  # noqa: E402

ASPIRIN = "CC(=O)Oc1ccccc1C(=O)O"


def test_known_values_of_aspirin_and_rings():
    row = dict(zip(NAMES, properties([ASPIRIN])[0].tolist(), strict=True))
    assert row["weight"] == pytest.approx(180.16, abs=0.01)
    assert row["tpsa"] == pytest.approx(63.6, abs=0.05)  # Ertl et al., 2000
    assert row["qed"] == pytest.approx(0.55, abs=0.01)
    assert row["logp"] == pytest.approx(1.31, abs=0.01)  # Wildman and Crippen, 1999
    assert row["fsp3"] == pytest.approx(1 / 9)
    assert properties(["C1CCCCC1", "c1ccccc1"])[:, NAMES.index("fsp3")].tolist() == [1.0, 0.0]


def test_accessibility_is_that_of_rdkits_own_table():
    """The wheel carries a hundred molecules with the scores that its authors checked."""
    from rdkit import Chem, RDConfig

    lines = (Path(RDConfig.RDContribDir) / "SA_Score/data/zim.100.txt").read_text().splitlines()[1:13]
    score = synthetic_accessibility()
    for line in lines:
        smiles, _, expected = line.split()
        assert score(Chem.MolFromSmiles(smiles)) == pytest.approx(float(expected), abs=5e-3)


def test_properties_belong_to_the_molecule_not_to_its_writing():
    same = properties([ASPIRIN, "O=C(C)Oc1ccccc1C(=O)O", "OC(=O)c1ccccc1OC(C)=O"])
    torch.testing.assert_close(same[1:], same[:1].expand(2, -1))


def test_what_is_no_molecule_is_nan():
    values = properties(["", "C(", "CCO"])
    assert values.isnan().all(1).tolist() == [True, True, False]
    assert values.shape == (3, len(NAMES))
    assert properties([]).shape == (0, len(NAMES))


def test_the_window_is_highest_at_its_middle_and_alike_to_either_side():
    values = {"logp": torch.tensor([2.5, 1.5, 3.5, 12.5]), "qed": torch.tensor([0.1, 0.2, 0.3, 0.4])}
    torch.testing.assert_close(reward_of(values, "logp-window"), torch.tensor([1.0, 0.5, 0.5, 1 / 101]))
    assert reward_of(values, "qed") is values["qed"]


def test_drawings_are_small_one_colour_and_whole():
    smiles = "CC(=O)Nc1ccc(S(=O)(=O)NC2CCN(C)CC2)cc1Cl"
    text = draw(smiles)
    root = ElementTree.fromstring(text)
    assert len(text.encode()) < 4000
    lettered = re.sub(r"[^A-Z]", "", "".join(root.itertext()).upper())
    assert sorted(lettered) == sorted("NHOSOONHNCL")
    colours = {value for element in root.iter() for key, value in element.attrib.items() if key in ("stroke", "fill")}
    assert colours == {"black", "none"}
    numbers = [float(n) for n in re.findall(r"[\d.]+", root.find("{*}path").attrib["d"])]
    assert min(numbers) >= 0
    assert max(numbers[::2]) <= 200
    assert max(numbers[1::2]) <= 150
    assert root.attrib["aria-label"] == described(smiles)
    assert {e.attrib.get("stroke") for e in ElementTree.fromstring(draw(smiles, colour="currentColor")).iter()} >= {
        "currentColor"
    }


def test_a_longer_molecule_has_more_bonds_drawn():
    def bonds(smiles):
        return ElementTree.fromstring(draw(smiles)).find("{*}path").attrib["d"].count("M")

    assert bonds("CCCCCCCC") - bonds("CCCCCC") == 4  # two bonds, and two corners that rdkit mends
    assert ElementTree.fromstring(draw("")).find("{*}path") is None


def test_a_drawing_in_words():
    words = described(ASPIRIN)
    assert "C9H8O4" in words
    assert "1 ring:" in words
    assert ASPIRIN in words
    assert "QED) 0.55" in words
    assert described("") == "No molecule."
    with pytest.raises(ValueError, match="rdkit reads no molecule in 'C\\('"):
        draw("C(")
