"""The catalogue: which cards are found, what a name stands for, what a search brings up, how a bad card is refused."""

import ast
import subprocess
import sys

import pytest

import cameraready
from cameraready.catalog import CardError, UnknownMethod, catalog, find, read_card, resolve, rooms, select

CARD = """
slug = "{slug}"
title = "{title}"
authors = ["Ada Lovelace", "Emmy Noether"]
arxiv = "{arxiv}"
openreview = "{openreview}"
purpose = "{purpose}"
use_when = "{use_when}"
avoid_when = ["Something simpler is exact."]
instead_of = {instead_of}
exports = ["{export}"]
kind = "{kind}"
basis = "paper"
claims = 3
"""
SHAPLEY = {
    "slug": "odd-values",
    "title": "Odd Values",
    "arxiv": "2602.01399",
    "openreview": "aBc-12_x",
    "purpose": "Explain single predictions of a black-box model by Shapley values.",
    "use_when": "Features interact.",
    "instead_of": '["shap.KernelExplainer", "shapiq.KernelSHAP"]',
    "export": "OddValues",
    "kind": "explainer",
}
FOREST = {
    "slug": "forest-effects",
    "title": "Forest Effects",
    "arxiv": "2601.00001",
    "openreview": "",
    "purpose": "Rank customers by the effect of a treatment.",
    "use_when": "You explain to a colleague who should be treated.",
    "instead_of": '["econml.CausalForestDML", "kernels.shap"]',
    "export": "ForestEffects",
    "kind": "estimator",
}


def write_card(root, room, folder, **fields):
    path = root / room / folder / "card.toml"
    path.parent.mkdir(parents=True)
    path.write_text(CARD.format(**fields))
    (path.parent / "__init__.py").write_text("raise RuntimeError('the catalogue must not import methods')\n")
    return path


@pytest.fixture
def root(tmp_path):
    write_card(tmp_path, "attribution", "odd_values", **SHAPLEY)
    write_card(tmp_path, "causal", "forest", **FOREST)
    write_card(tmp_path, "causal", "_shared", **{**FOREST, "slug": "hidden"})
    (tmp_path / "evidence" / "report").mkdir(parents=True)
    return tmp_path


def slugs(cards):
    return [card.slug for card in cards]


def test_every_folder_with_a_card_is_a_method_and_none_is_imported(root):
    assert slugs(catalog(root)) == ["odd-values", "forest-effects"]
    assert rooms(root) == ["attribution", "causal"]
    card = resolve("forest-effects", root)
    assert (card.module, card.room, card.folder) == ("cameraready.causal.forest", "causal", root / "causal" / "forest")


def test_one_sentence_stands_for_a_list_of_one(root):
    assert resolve("odd-values", root).use_when == ("Features interact.",)


@pytest.mark.parametrize(
    "name",
    [
        "odd-values",
        "odd_values",
        "OddValues",
        "cameraready.attribution.odd_values",
        "attribution.odd_values",
        "attribution.odd-values",
        "2602.01399",
        "arXiv:2602.01399v2",
        "https://arxiv.org/abs/2602.01399",
        "http://arxiv.org/abs/2602.01399v3",
        "https://arxiv.org/pdf/2602.01399v1.pdf",
        "https://arxiv.org/html/2602.01399v1#S3",
        "https://openreview.net/forum?id=aBc-12_x",
        "https://openreview.net/forum?noteId=q&id=aBc-12_x",
        "aBc-12_x",
    ],
)
def test_a_method_is_known_by_all_its_names(root, name):
    assert resolve(name, root).slug == "odd-values"


@pytest.mark.parametrize(
    ("name", "hint"), [("odd-valuse", "odd-values"), ("forest-effect", "forest-effects"), ("causl", "causal")]
)
def test_an_unknown_name_brings_near_misses(root, name, hint):
    with pytest.raises(UnknownMethod, match=hint):
        resolve(name, root)


def test_a_room_is_not_sent_back_to_itself(root):
    with pytest.raises(UnknownMethod, match="'causal' is a room; its methods: forest-effects"):
        resolve("causal", root)


@pytest.mark.parametrize("name", ["2602.01398", "https://openreview.net/forum?id=zzz", "12602.01399"])
def test_another_papers_id_is_not_taken_for_one_of_ours(root, name):
    with pytest.raises(UnknownMethod):
        resolve(name, root)


def test_select_takes_rooms_and_all(root):
    assert slugs(select("causal", root)) == ["forest-effects"]
    assert slugs(select("all", root)) == ["odd-values", "forest-effects"]
    assert slugs(select("2601.00001", root)) == ["forest-effects"]


# --- search ---------------------------------------------------------------------------------------------------------


def test_the_method_with_more_of_the_words_comes_first(root):
    assert slugs(find("explain predictions", root=root)) == ["odd-values", "forest-effects"]
    assert slugs(find("explain a treatment", root=root)) == ["forest-effects", "odd-values"]


def test_a_word_in_the_purpose_outweighs_one_in_use_when(root):
    assert slugs(find("explain", root=root))[0] == "odd-values"


@pytest.mark.parametrize(
    "words", ["explanation", "explaining", "predictons", "black box", "How do I explain the model?"]
)
def test_endings_typing_errors_and_small_words_are_forgiven(root, words):
    assert slugs(find(words, root=root))[0] == "odd-values"


@pytest.mark.parametrize(
    ("sentence", "first", "most"),
    [
        ("explain single predictions of my model", "oddshap", 3),
        ("compress the KV cache of a language model", "capkv", 3),
        ("train my model with differential privacy without losing accuracy", "dp-c4", 4),
    ],
)
def test_a_sentence_does_not_bring_up_every_card_with_one_of_its_words(sentence, first, most):
    found = slugs(find(sentence))
    assert found[0] == first
    assert len(found) <= most
    assert len(find("model")) > 10  # by itself the word is a question


def test_what_no_card_mentions_is_not_found(root):
    assert find("quantum chromodynamics", root=root) == []


def test_instead_of_ranks_the_full_name_before_the_last_part_before_the_library(root):
    assert slugs(find(instead_of="shap.KernelExplainer", root=root)) == ["odd-values"]
    assert slugs(find(instead_of="kernelexplainer", root=root)) == ["odd-values"]
    # "kernels.shap" ends in shap; "shap.KernelExplainer" is only of the library shap.
    assert slugs(find(instead_of="shap", root=root)) == ["forest-effects", "odd-values"]
    assert find(instead_of="lime", root=root) == []


def test_instead_of_finds_a_method_by_the_beginning_of_what_it_replaces():
    assert slugs(find(instead_of="opacus.PrivacyEngine")) == ["dp-c4"]


def test_instead_of_a_trainer_finds_those_that_replace_a_part_of_it(tmp_path):
    """ "trl.GRPOTrainer" itself, then what stands for it with an option, then what names its library and class apart."""
    names = ["trl GRPOTrainer epsilon", "trl.GRPOTrainer with an outcome reward", "trl.GRPOTrainer", "trl.SFTTrainer"]
    for place, name in enumerate(names):
        write_card(tmp_path, "room", f"m{place}", **{**FOREST, "slug": f"m{place}", "instead_of": f'["{name}"]'})
    assert slugs(find(instead_of="trl.GRPOTrainer", root=tmp_path)) == ["m2", "m1", "m0"]
    assert find(instead_of="other.GRPO", root=tmp_path) == []


def test_a_room_narrows_the_search(root):
    assert slugs(find("explain", room="causal", root=root)) == ["forest-effects"]
    assert slugs(find(room="attribution", root=root)) == ["odd-values"]
    with pytest.raises(ValueError, match="attribution, causal"):
        find("explain", room="nowhere", root=root)


@pytest.mark.parametrize("words", [None, "to the of"])
def test_a_search_for_nothing_is_refused(root, words):
    with pytest.raises(ValueError, match="look for"):
        find(words, root=root)


# --- bad cards ------------------------------------------------------------------------------------------------------

BAD = {
    "not TOML": ("slug = ", "slug = = ", "not valid TOML"),
    "a key is missing": ('kind = "explainer"', "", "'kind' is missing"),
    "a misspelt key": ("use_when", "use_wen", "did you mean 'use_when'"),
    "a number for text": ('title = "Odd Values"', "title = 3", "title must be text"),
    "a number in a list": ('exports = ["OddValues"]', "exports = [3]", "exports must be"),
    "no Python name": ('exports = ["OddValues"]', 'exports = ["Odd Values"]', "exports must be Python names"),
    "an upper-case slug": ('slug = "odd-values"', 'slug = "OddValues"', "slug must be"),
    "a versioned arXiv id": ("2602.01399", "2602.01399v2", "arxiv must be a bare id"),
    "an unknown basis": ('basis = "paper"', 'basis = "rumour"', "basis must be one of"),
    "no claims": ("claims = 3", "claims = 0", "claims must be"),
    "claims as truth": ("claims = 3", "claims = true", "claims must be"),
    "an empty purpose": (SHAPLEY["purpose"], " ", "purpose must not be empty"),
    "upstream as text": ("claims = 3", 'claims = 3\nupstream = "shapiq"', "upstream must be"),
    "upstream without a name": ("claims = 3", 'claims = 3\n[[upstream]]\nurl = "x"', "upstream tables have"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_card_is_refused_with_file_and_key(tmp_path, case):
    old, new, expected = BAD[case]
    path = write_card(tmp_path, "attribution", "odd_values", **SHAPLEY)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(CardError) as caught:
        read_card(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_two_cards_may_not_share_a_slug(tmp_path):
    write_card(tmp_path, "attribution", "odd_values", **SHAPLEY)
    write_card(tmp_path, "causal", "forest", **{**FOREST, "slug": "odd-values"})
    with pytest.raises(CardError, match="odd-values"):
        catalog(tmp_path)


# --- the package ----------------------------------------------------------------------------------------------------


def test_the_catalogue_is_both_a_function_and_a_module():
    import cameraready.catalog as module

    assert cameraready.catalog() == module.catalog() == catalog()
    assert cameraready.catalog.resolve is resolve
    assert cameraready.find is find


@pytest.mark.parametrize("card", catalog(), ids=lambda card: card.slug)
def test_a_shipped_cards_example_is_ten_lines_that_use_an_export(card):
    tree = ast.parse(card.example)
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == card.module
        for alias in node.names
    }
    assert imported
    assert imported <= set(card.exports)
    assert len(card.example.splitlines()) <= 14


def loaded_after(code):
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys\n{code}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(ran.stdout.splitlines()[-1].split())


HEAVY = {
    "numpy",
    "scipy",
    "sklearn",
    "polars",
    "pandas",
    "pebble",
    "jinja2",
    "altair",
    "vl_convert",
    "platformdirs",
    "execnet",
}


def test_importing_the_package_loads_nothing_heavy():
    loaded = loaded_after("import cameraready\ncameraready.catalog()\ncameraready.find('explain')")
    assert not loaded & (HEAVY | {"typer", "rich"})


def test_listing_methods_loads_nothing_heavy():
    lines = [
        "sys.argv = ['cameraready', 'show', 'oddshap']",
        "from cameraready.cli import main",
        "try:",
        "    main()",
        "except SystemExit:",
        "    pass",
    ]
    assert not loaded_after("\n".join(lines)) & HEAVY


def test_the_python_door_names_what_it_does_not_have():
    assert callable(cameraready.check)
    with pytest.raises(AttributeError, match="chek"):
        cameraready.chek  # noqa: B018
    assert {"check", "find", "catalog"} <= set(dir(cameraready))


def test_without_the_extra_the_python_door_says_how_to_get_it():
    code = (
        "import sys; sys.modules['polars'] = None\nimport cameraready\n"
        "try:\n    cameraready.check\nexcept ModuleNotFoundError as error:\n    print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'pip install "cameraready[study]"' in ran.stdout
