"""Truncated, tampered and foreign files give a sentence: quickly, and without taking memory."""

import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cameraready.models import ModelError, gguf, open_model
from tests.models import gguf_files


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return gguf_files.write(tmp_path_factory.mktemp("gguf") / "a.gguf", gguf_files.tiny("llama"))


def header(*, magic=b"GGUF", version=3, tensors=0, pairs=0, rest=b""):
    return struct.pack("<4sIQQ", magic, version, tensors, pairs) + rest + bytes(64)


def text(value):
    return struct.pack("<Q", len(value)) + value


def refused(tmp_path, content, match):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    begun = time.perf_counter()
    with pytest.raises(ModelError, match=match) as caught:
        gguf.read_header(path)
    assert time.perf_counter() - begun < 2
    assert "\n" not in str(caught.value)


def test_a_header_tells_architecture_shapes_and_sizes(whole):
    found = gguf.read_header(whole)
    model = gguf_files.tiny("llama")
    assert found.architecture == "llama"
    assert found.n_parameters == sum(weight.numel() for weight in model.parameters())
    assert found.tensors["blk.0.attn_k.weight"].shape == tuple(model.model.layers[0].self_attn.k_proj.weight.shape)
    assert found.metadata["tokenizer.ggml.tokens"] == {"length": len(gguf_files.vocabulary())}
    assert found.weight_bytes == 4 * found.n_parameters


def test_no_such_file_and_no_gguf(tmp_path):
    with pytest.raises(ModelError, match="There is no GGUF file"):
        open_model(tmp_path / "none.gguf")
    refused(tmp_path, b"GGUF", "has 4 bytes")
    refused(tmp_path, b"", "has 0 bytes")
    refused(tmp_path, header(magic=b"PK\x03\x04"), "begins with")
    refused(tmp_path, header(version=9), "version 9")
    refused(tmp_path, header(version=1), "version 1")
    refused(tmp_path, header(version=3 << 24), "big-endian")


def test_counts_that_a_file_cannot_hold(tmp_path):
    refused(tmp_path, header(tensors=1 << 40), "tensors do not fit")
    refused(tmp_path, header(pairs=(1 << 64) - 1), "key-value pairs do not fit")
    refused(tmp_path, header(tensors=(1 << 64) - 1, pairs=1), "do not fit")


def test_values_that_a_file_cannot_hold(tmp_path):
    refused(tmp_path, header(pairs=1, rest=struct.pack("<Q", 1 << 60)), "bytes long")
    refused(tmp_path, header(pairs=1, rest=text(b"k") + struct.pack("<I", 77)), "of type 77")
    refused(tmp_path, header(pairs=1, rest=text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 50)), "do not fit")
    refused(tmp_path, header(pairs=1, rest=text(b"k") + struct.pack("<IIQ", 9, 9, 1)), "an array of type 9")
    refused(tmp_path, header(pairs=1, rest=text(b"k") + struct.pack("<IIQQ", 9, 8, 1, 1 << 40)), "truncated or damaged")
    refused(tmp_path, header(pairs=2, rest=2 * (text(b"k") + struct.pack("<IB", 0, 1))), "comes twice")
    refused(tmp_path, header(pairs=1, rest=text(b"\xff\xfe") + bytes(8)), "not UTF-8")


def test_tensors_that_cannot_be(tmp_path):
    def tensor(n_dimensions=1, shape=(32,), kind=0, offset=0):
        return text(b"w") + struct.pack(f"<I{len(shape)}QIQ", n_dimensions, *shape, kind, offset)

    refused(tmp_path, header(tensors=1, rest=tensor(n_dimensions=99)), "99 dimensions")
    refused(tmp_path, header(tensors=1, rest=tensor(kind=250)), "type 250")
    refused(tmp_path, header(tensors=1, rest=tensor(shape=(0,))), "cannot be stored")
    refused(tmp_path, header(tensors=1, rest=tensor(shape=(33,), kind=2)), "blocks of 32")
    refused(tmp_path, header(tensors=1, rest=tensor(shape=(1 << 62,))), "too few")
    refused(tmp_path, header(tensors=2, rest=2 * tensor()), "comes twice")
    refused(tmp_path, header(tensors=0), "holds no weights")
    overlapping = tensor() + text(b"v") + struct.pack("<IQIQ", 1, 32, 0, 32)
    refused(tmp_path, header(tensors=2, rest=overlapping + bytes(400)), "overlaps")


def test_a_truncated_file_says_by_how_much(tmp_path, whole):
    content = whole.read_bytes()
    refused(tmp_path, content[:-1000], "1,000 too few")
    refused(tmp_path, content[: len(content) // 2], "too few")
    for cut in range(24, 9000, 611):
        refused(tmp_path, content[:cut], "truncated or damaged|do not fit")


@settings(max_examples=150, deadline=2000)
@given(at=st.integers(0, 12000), value=st.binary(min_size=1, max_size=8))
def test_any_change_of_the_header_is_read_or_refused_in_a_sentence(whole, tmp_path_factory, at, value):
    content = bytearray(whole.read_bytes())
    content[at : at + len(value)] = value
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(content)
    try:
        found = gguf.read_header(path)
    except ModelError:
        return
    assert found.weight_bytes <= len(content)


def test_an_unsupported_architecture_lists_those_that_are(tmp_path, whole):
    content = whole.read_bytes().replace(b"llama", b"lemur")
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"'lemur'.*gemma3.*llama.*qwen2"):
        open_model(path)


def test_adapters_and_parts_are_named_for_what_they_are(whole):
    from dataclasses import replace

    found = gguf.read_header(whole)
    with pytest.raises(ModelError, match="'adapter'"):
        gguf.check_supported(replace(found, metadata={**found.metadata, "general.type": "adapter"}))
    with pytest.raises(ModelError, match="one of 3 parts"):
        gguf.check_supported(replace(found, metadata={**found.metadata, "split.count": 3}))
    with pytest.raises(ModelError, match="does not say its architecture"):
        gguf.check_supported(replace(found, metadata={}))


def test_a_missing_extra_is_one_line(monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else real(name, *rest))
    with pytest.raises(ModelError, match=r'^GGUF files need gguf: pip install "cameraready\[lm\]"$'):
        gguf.needs_extra()
