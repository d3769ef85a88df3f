"""Drugs as two halves: cleaned, cut where chemistry cuts, embedded by a fixed map, and joined again without loss."""

import importlib.util

import pytest
import torch

pytestmark = pytest.mark.torch

for package in ("rdkit", "selfies", "datamol"):
    pytest.importorskip(package)

from cameraready.flows._molecules import drugs  # noqa: E402
from cameraready.flows._molecules.codebook import Codebook  # noqa: E402
from cameraready.flows._molecules.halves import Embedding, cuts, join, words_of  # noqa: E402


@pytest.fixture(scope="module")
def codebook():
    return Codebook(drugs.shipped_smiles()[:150], latent=8, rare=3)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_missing_packages_are_one_line_with_the_command(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in {"rdkit", "selfies"} else find(name, *a)
    )
    with pytest.raises(ImportError) as error:
        drugs.shipped_smiles()
    assert str(error.value) == 'molecules need rdkit and selfies: pip install "cameraready[flows-molecules]"'


def test_cleaning_keeps_the_largest_part_neutral_and_without_stereo():
    assert drugs.clean("[Na+].CC(=O)[O-]") == "CC(=O)O"
    assert drugs.clean("C[C@H](N)C(=O)O.Cl") == "CC(N)C(=O)O"
    for refused in ("C(", "", "[13CH4]", "C[Si](C)(C)C", "C" * 41):
        assert drugs.clean(refused) is None
    assert drugs.cleaned(["CCO", "OCC", "C(", "CC"]) == ["CCO", "CC"]


def test_joining_a_cut_gives_the_molecule_back(codebook):
    for smiles in codebook.train[:30]:
        found = cuts(smiles, most=9)
        assert found
        for cut in found:
            assert join(cut.left, cut.right) == smiles
            assert join(cut.right, cut.left) == smiles


def test_cuts_are_balanced_and_of_bonds_that_brics_names():
    """An amide and an ether: BRICS cuts C-N, both sides of the O and the bond to the ring, not the C-C bonds of chains or rings."""
    (cut,) = cuts("O=C(NC1CCCCC1)c1ccccc1", most=1)
    assert {cut.left, cut.right} in (
        {"O=C(c1ccccc1)[*:1]", "C1CCC(N[*:1])CC1"},
        {"O=C(N[*:1])c1ccccc1", "C1CCC([*:1])CC1"},
    )
    assert cuts("CCCCCCCCCCCC") == []
    assert cuts("c1ccc2ccccc2c1") == []
    assert cuts("CNC(=O)c1ccccc1") == []  # the smaller half has fewer than five atoms
    assert len(cuts("CNC(=O)c1ccccc1", atoms=1)) > 0
    sizes = []
    for one in cuts("CCCCCOC(=O)c1ccc(NC(=O)CCCCC)cc1", most=9):
        left, right = (len(words_of(half)) for half in (one.left, one.right))
        sizes.append(abs(left - right))
    assert len(sizes) > 2
    assert sizes[0] == min(sizes)


def test_halves_are_said_in_selfies_from_their_open_end():
    import selfies

    words = words_of("O=C(c1ccccc1)[*:1]")
    assert words[0] == "[At]"
    assert selfies.decoder("".join(words)).startswith("[At]C")
    assert words == words_of("c1ccccc1C([*:1])=O")


def test_the_embedding_is_white_and_keeps_to_its_halves(codebook):
    halves = sorted({*codebook.left.smiles, *codebook.right.smiles})[:120]
    embedding = Embedding(halves, 5, rare=4)
    points = embedding(halves).double()
    torch.testing.assert_close(points.mean(0), torch.zeros(5).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cov(points.T), torch.eye(5).double(), atol=1e-4, rtol=0)
    assert 0.3 < embedding.explained < 1
    torch.testing.assert_close(embedding(halves[7:9]), points[7:9].float())
    assert Embedding(halves, 9, rare=4).explained > embedding.explained
    # The first direction is the same whether five or nine are kept: they are the principal ones, their signs are fixed.
    torch.testing.assert_close(Embedding(halves, 9, rare=4)(halves)[:, :5], points.float(), atol=1e-3, rtol=0)
    unsayable = Embedding([*halves, "O=I(=O)CCCC[*:1]"], 5, rare=4)  # SELFIES allows iodine one bond
    assert unsayable.fitted.isnan().any(1).nonzero().flatten().tolist() == [len(halves)]
    torch.testing.assert_close(unsayable.fitted[:-1], embedding.fitted)
    torch.testing.assert_close(embedding.fitted, points.float())
    with pytest.raises(ValueError, match="cannot be embedded in 12 numbers"):
        Embedding(halves[:10], 12, rare=4)


def test_drugs_come_back_from_their_latents(codebook):
    latents = codebook.encode(codebook.train)
    back = codebook.decode(latents)
    assert sum(a == b for a, b in zip(back, codebook.train, strict=True)) >= 0.95 * len(back)
    assert codebook.decode(latents.double()) == back


def test_every_latent_is_a_molecule_of_two_halves_that_fit(codebook):
    """Also far away from the drugs; kinds of ends are joined as in some drug."""
    from rdkit import Chem

    latents = 4 * torch.randn(200, 8, generator=generator())
    smiles = codebook.decode(latents)
    for text in smiles:
        assert text
        assert Chem.MolToSmiles(Chem.MolFromSmiles(text)) == text
    one_by_one = [codebook.decode(row[None])[0] for row in latents[:20]]
    assert one_by_one == smiles[:20]
    assert len(set(smiles)) > 20
    joined = codebook.joints[codebook.left.kinds[codebook.pairs[:, 0]], codebook.right.kinds[codebook.pairs[:, 1]]]
    assert joined.all()
    assert not codebook.joints.all()


def test_a_small_step_keeps_the_molecule(codebook):
    latents = codebook.encode(codebook.train[:50])
    moved = latents + 1e-4 * torch.randn(latents.shape, generator=generator())
    assert codebook.decode(moved) == codebook.decode(latents)


def test_draws_are_standardised_blurred_drugs(codebook):
    draws = codebook.draw(40_000, generator())
    torch.testing.assert_close(draws.mean(0), torch.zeros(8), atol=0.15, rtol=0)  # drugs of one cut weigh twice
    torch.testing.assert_close(draws.std(0), torch.ones(8), atol=0.15, rtol=0)
    assert torch.equal(draws, codebook.draw(40_000, generator()))
    sharp = Codebook(codebook.train[:80], latent=4, blur=0.0, rare=2)
    assert set(sharp.decode(sharp.draw(300, generator()))) <= set(sharp.train)
    wide = Codebook(codebook.train[:80], latent=4, blur=1.0, rare=2)
    assert not set(wide.decode(wide.draw(300, generator()))) <= set(wide.train)


def test_halves_of_held_out_drugs_are_not_picked(codebook):
    from collections import Counter

    assert codebook.test
    assert not set(codebook.test) & set(codebook.train)
    shown = Counter(half for text in codebook.train for cut in cuts(text, most=2) for half in (cut.left, cut.right))
    assert {*codebook.left.smiles, *codebook.right.smiles} <= set(shown)
    fewer = Codebook(codebook.train[::2] + codebook.test, latent=4, rare=2)
    assert fewer.test == codebook.test  # a molecule stays on its side, whoever else is there


def test_mistakes_are_sentences(codebook):
    with pytest.raises(ValueError, match=r"2 of 3 molecules have no bond at which they can be cut .* first 'CCO'"):
        codebook.encode([codebook.train[0], "CCO", "c1ccccc1"])
    with pytest.raises(ValueError, match="latent must be even"):
        Codebook(codebook.train, latent=5)
    with pytest.raises(ValueError, match="2 molecules have 0 bonds to cut, too few"):
        Codebook(["CCO", "c1ccccc1"])
