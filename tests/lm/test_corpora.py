"""Corpora: the same in every process, without repeats; windows are exact, do not overlap and hold no special token."""

import itertools
import os
import random
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch

from cameraready.lm import _corpora
from cameraready.lm._corpora import KINDS, digest, distinct, documents, own, prose, text, windows

pytestmark = pytest.mark.torch


def in_a_process(code, folder, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def numbered():
    """Ten documents of numbers of eight digits, each of which stands once."""
    counter = itertools.count(10_000_000)
    return [
        " ".join(str(next(counter)) for _ in range(size)) for size in (40, 80, 120, 160, 200, 40, 80, 120, 160, 200)
    ]


def whole_numbers(tokenizer, window):
    return set(re.findall(r"\b\d{8}\b", tokenizer.decode(window)))


# --- text ------------------------------------------------------------------------------------------------------------


def test_another_process_in_another_folder_finds_the_same(tmp_path):
    # A folder to start in that itself holds a distribution, and another seed of Python's hashes.
    info = tmp_path / "stray-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: stray\nVersion: 1.0\n\n" + "A sentence of this package. " * 40
    )
    code = "from cameraready.lm._corpora import digest; print(digest('prose'), digest('licences'))"
    assert in_a_process(code, tmp_path, PYTHONHASHSEED="77").split() == [digest("prose"), digest("licences")]


def test_docstrings_are_read_without_importing_the_modules(tmp_path):
    code = (
        "import sys; from cameraready.lm._corpora import text; found = text('documentation');"
        "print('Return a fast iterable' in found or 'JSON' in found, 'antigravity' in sys.modules, 'json.tool' in sys.modules)"
    )
    assert in_a_process(code, tmp_path) == "True False False"


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_text_and_no_long_passage_stands_twice(kind):
    passages = re.split(r"\n(?:[^\S\n]*\n)+", text(kind))
    letters = [re.sub(r"[\W\d_]+", "", passage.casefold()) for passage in passages]
    repeated = [found for found, count in Counter(letters).items() if count > 1 and len(found) >= _corpora.SHORT]
    assert repeated == []
    assert len(text(kind)) > 20_000


def test_broken_distributions_are_passed_over(tmp_path, monkeypatch):
    packages = tmp_path / "fake-packages"
    (packages / "left_behind-1.0.dist-info").mkdir(parents=True)
    for name, content in (
        ("latin", "Name: latin\nSummary: caf\xe9\n".encode("latin-1")),
        (
            "whole",
            b"Metadata-Version: 2.1\nName: Whole_Name\nVersion: 1.0\n\n" + b"A sentence of this very package. " * 20,
        ),
    ):
        folder = packages / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_bytes(content)
    monkeypatch.setattr(sys, "path", [str(packages)])
    assert list(_corpora._distributions()) == ["whole-name"]


def test_code_keeps_its_indentation():
    assert "\n    def __init__(self" in text("code")


def test_licences_of_one_kind_are_kept_once():
    assert text("licences").casefold().count("permission is hereby granted, free of charge") <= 3


def test_distinct_drops_what_differs_in_case_digits_or_a_few_words():
    fox = "The quick brown fox jumps over the lazy dog and runs away into the dark forest of 2018 before the hunters come."
    near = fox.replace("hunters", "farmers")
    whale = "A whale of great age swam past the harbour in the evening, and all the children of the town stood on the quay to see it, until the sun went down behind the lighthouse."
    ship = "Every ship that leaves for the north in winter carries salt and rope and letters, and comes back with fish and furs only."
    both = [
        f"{fox}\n\n{whale}\n\n{whale.upper()}",
        f"{fox.replace('2018', '2019')}\n\n{near}\n\n{ship}\n\n{ship} {ship[::-1]} Etc.",
    ]
    rest = f"{ship}\n\n{ship} {ship[::-1]} Etc."
    # The last passage repeats the one before it in less than half of its runs of words.
    assert distinct(iter(both)) == [f"{fox}\n\n{whale}", rest]
    # Without runs of words only letters count, and one other word makes another passage.
    assert distinct(iter(both), shingles=False) == [f"{fox}\n\n{whale}", f"{near}\n\n{rest}"]


def test_distinct_keeps_short_headings_and_leaves_out_what_is_only_those():
    body = (
        "A body of text that is long enough to count as a document of its own, with words that nobody else has written. "
        * 3
    )
    other = body[::-1]
    assert distinct(iter([f"Returns\n\n{body}", f"Returns\n\n{other}", "Returns\n\nRaises"])) == [
        f"Returns\n\n{body}".strip("\n"),
        f"Returns\n\n{other}".strip("\n"),
    ]


def test_prose_keeps_sentences_and_drops_the_rest():
    sentence = "A sentence of many words that says what the package does, and for whom it is, at some length."
    linked = sentence.replace("the package", "[the package](https://example.org/a/b)")
    page = f"""# Title

[![badge](https://img.example/x.svg)](https://ci.example)

{linked}

```python
import package; package.run_it_for_a_long_time_and_print_all_of_the_results(everything)
```

    an indented example of code that goes on and on until it is long enough to count

| a table | of columns |
|---|---|

Anna Alpha, Berta Beta, Carl Gamma, Dora Delta, Emil Epsilon, Fritz Zeta, Gerda Eta, Hans Theta
"""
    assert prose(page) == sentence


def test_an_unknown_corpus_is_named_with_those_that_are_there():
    with pytest.raises(ValueError, match="no corpus 'novels'; there are documentation, licences, code, prose"):
        documents("novels")


# --- windows ---------------------------------------------------------------------------------------------------------


def test_windows_are_exact_and_do_not_overlap(tokenizer, numbered):
    found = windows(tokenizer, numbered, length=90, n=80, seed=3)
    assert found.shape == (80, 90)
    assert found.dtype == torch.long
    numbers = [whole_numbers(tokenizer, window) for window in found]
    assert sum(map(len, numbers)) == len(set().union(*numbers)) > 0
    joined = "\n\n".join(numbered)
    for window in found[:20]:
        # Each part of the window that no joint of documents interrupts stands in the text as it is.
        assert all(part in joined for part in tokenizer.decode(window).split("\n\n"))


def test_the_first_windows_come_from_different_documents(tokenizer, numbered):
    found = windows(tokenizer, numbered, length=90, n=10, seed=1)
    homes = [next(i for i, content in enumerate(numbered) if tokenizer.decode(w[:60]) in content) for w in found]
    assert sorted(homes) == list(range(10))


def test_fewer_windows_are_the_first_of_more_and_the_seed_decides(tokenizer, numbered):
    ten = windows(tokenizer, numbered, length=50, n=10, seed=5)
    assert torch.equal(windows(tokenizer, numbered, length=50, n=4, seed=5), ten[:4])
    assert torch.equal(windows(tokenizer, numbered, length=50, n=10, seed=5), ten)
    assert not torch.equal(windows(tokenizer, numbered, length=50, n=10, seed=6), ten)


def test_nearly_all_of_a_corpus_is_used(tokenizer, numbered):
    tokens = sum(map(len, numbered))
    with pytest.raises(ValueError, match=r"has \d+ windows of 30 tokens") as caught:
        windows(tokenizer, numbered, length=30, n=10_000)
    there_are = int(re.search(r"has (\d+) windows", str(caught.value)).group(1))
    assert 0.9 * tokens / 30 <= there_are <= tokens / 30 + 1
    assert windows(tokenizer, numbered, length=30, n=there_are).shape == (there_are, 30)


def test_short_documents_are_joined(tokenizer):
    found = tokenizer.decode(windows(tokenizer, ["abcd"] * 10, length=14, n=2)[0])
    assert found == "abcd\n\nabcd\n\nab"


def test_no_special_token_is_in_a_window_also_where_the_text_spells_one(tokenizer):
    spelled = "before <|eos|> and <|user|> between <|bos|> after " * 30
    found = windows(tokenizer, [spelled], length=64, n=10)
    special = {*tokenizer.all_special_ids, tokenizer.convert_tokens_to_ids("<|user|>")}
    assert special.isdisjoint(found.unique().tolist())
    assert "before  and  between" in tokenizer.decode(found.flatten())


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_windows_of_real_text(bpe_tokenizer, kind):
    found = windows(bpe_tokenizer, kind, length=100, n=20)
    assert found.shape == (20, 100)
    for window in found:
        letters = sum(c.isalpha() or c.isspace() for c in bpe_tokenizer.decode(window))
        assert letters > 0.4 * len(bpe_tokenizer.decode(window))


def test_several_kinds_together_repeat_nothing(bpe_tokenizer):
    kinds = ("documentation", "code")
    parts = _corpora.texts_of(kinds)
    letters = [re.sub(r"[\W\d_]+", "", p.casefold()) for t in parts for p in re.split(r"\n(?:[^\S\n]*\n)+", t)]
    assert [found for found, count in Counter(letters).items() if count > 1 and len(found) >= _corpora.SHORT] == []
    assert sum(map(len, parts)) > 1.02 * len(text("code"))
    found = windows(bpe_tokenizer, kinds, length=60, n=400)
    assert found.shape == (400, 60)
    assert len(found.unique(dim=0)) == 400


def test_too_short_a_corpus_says_what_it_has(tokenizer):
    with pytest.raises(
        ValueError, match=r"the corpus 'licences' .* has \d+ windows of 500000 tokens .* 9 were asked for"
    ):
        windows(tokenizer, "licences", length=500_000, n=9)
    with pytest.raises(ValueError, match="the text has 0 windows of 10 tokens"):
        windows(tokenizer, ["abc"], length=10, n=1)
    with pytest.raises(ValueError, match="at least 1"):
        windows(tokenizer, ["abc"], length=0, n=1)
    with pytest.raises(TypeError, match="strings"):
        windows(tokenizer, [b"abc"], length=1, n=1)


def test_no_global_random_state_is_touched(tokenizer, numbered):
    def states():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

    before = states()
    windows(tokenizer, numbered, length=10, n=10)
    assert states() == before


# --- the user's own --------------------------------------------------------------------------------------------------


def test_own_texts_of_a_file_or_a_folder_in_order(tmp_path):
    (tmp_path / "b.txt").write_text("second", encoding="utf-8")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "first.md").write_bytes(b"\xef\xbb\xbffirst\r\nline")
    (tmp_path / "c.txt").write_text("  \n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert own(tmp_path) == ("first\nline", "second")
    assert own(str(tmp_path / "b.txt")) == ("second",)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("latin.txt", "café".encode("latin-1"), "not UTF-8 text \\(byte 3\\)"),
        ("binary.txt", b"a\0b", "binary"),
        ("empty.txt", b" \n", "holds no text"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=complaint):
        own(tmp_path / name)


def test_a_missing_path_and_a_folder_without_text_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no file or folder"):
        own(tmp_path / "gone.txt")
    with pytest.raises(ValueError, match=r"has no text file; looked for are \.txt"):
        own(tmp_path)
