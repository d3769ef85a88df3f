"""GGUF files become safetensors folders that compute the same, once, and only whole ones are used."""

import json
import multiprocessing
import os

import numpy as np
import pytest
import torch

from cameraready.models import ModelError, _cache, gguf, open_model
from cameraready.models.gguf import rope
from tests.models import gguf_files

IDS = torch.arange(3, 43)[None]
OWN_MODELS = os.environ.get("CAMERAREADY_MODELS")  # before the fixture below


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    monkeypatch.setenv("CAMERAREADY_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("tie", [False, True])
def test_the_converted_model_computes_what_the_original_does(tmp_path, kind, tie):
    original = gguf_files.tiny(kind, tie=tie)
    opened = open_model(gguf_files.write(tmp_path / "a.gguf", original))
    assert opened.source == "gguf"
    assert torch.equal(logits(opened.model), logits(original))


def test_quantised_weights_are_those_that_gguf_itself_dequantises(tmp_path):
    import gguf as gguf_package

    original = gguf_files.tiny("qwen2")
    path = gguf_files.write(tmp_path / "q.gguf", original, quantize=gguf_package.GGMLQuantizationType.Q8_0)
    opened = open_model(path)
    weight = original.model.layers[0].mlp.gate_proj.weight.detach().numpy()
    packed = gguf_package.quantize(weight, gguf_package.GGMLQuantizationType.Q8_0)
    expected = gguf_package.dequantize(packed, gguf_package.GGMLQuantizationType.Q8_0)
    assert np.array_equal(opened.model.model.layers[0].mlp.gate_proj.weight.detach().numpy(), expected)
    assert not np.array_equal(weight, expected)


def test_logits_are_those_of_transformers_own_loader(tmp_path):
    from transformers import AutoModelForCausalLM

    path = gguf_files.write(tmp_path / "a.gguf", gguf_files.tiny("llama"))
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    assert torch.equal(logits(open_model(path).model), logits(theirs))


def test_generation_settings_template_and_special_tokens_are_kept(tmp_path):
    opened = open_model(gguf_files.write(tmp_path / "a.gguf", gguf_files.tiny("qwen2")))
    tokens = gguf_files.vocabulary()
    assert opened.model.generation_config.eos_token_id == tokens.index("<|im_end|>")
    assert opened.tokenizer.eos_token == "<|im_end|>"
    assert opened.prompt("in") == "<|im_start|>in<|im_end|>"
    assert opened.encode("the<|im_end|>").tolist() == [[tokens.index("the"), tokens.index("<|im_end|>")]]
    assert not hasattr(opened.model.config, "quantization_config")


def test_the_begin_token_is_added_where_the_file_says_so(tmp_path):
    path = gguf_files.write(tmp_path / "a.gguf", gguf_files.tiny("llama"), begins=True)
    begin = gguf_files.vocabulary().index("<|endoftext|>")
    assert open_model(path).encode("the").tolist()[0][0] == begin


def test_one_conversion_for_a_content_whatever_it_is_called(tmp_path, models):
    path = gguf_files.write(tmp_path / "a.gguf", gguf_files.tiny("llama"))
    first, digest = gguf.converted(path)
    before = (first / "model.safetensors").stat().st_mtime_ns
    path.rename(tmp_path / "b.gguf")
    again, same = gguf.converted(tmp_path / "b.gguf")
    assert (again, same) == (first, digest)
    assert (first / "model.safetensors").stat().st_mtime_ns == before
    assert [entry.name for entry in (models / "converted").iterdir() if entry.is_dir()] == [first.name]
    assert open_model(tmp_path / "b.gguf").digest == digest == _cache.sha256_of(tmp_path / "b.gguf")


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_a_damaged_entry_is_made_again(tmp_path, damage):
    original = gguf_files.tiny("llama")
    path = gguf_files.write(tmp_path / "a.gguf", original)
    folder, _ = gguf.converted(path)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    if damage == "flip":  # same size, same time of change as far as that can be set
        times = weights.stat()
        content[-7] ^= 0x40
        weights.write_bytes(content)
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    elif damage == "cut":
        weights.write_bytes(content[:-100])
    elif damage == "remove":
        weights.unlink()
    else:
        (folder / "manifest.json").write_text("{}")
    assert torch.equal(logits(open_model(path).model), logits(original))
    manifest = json.loads((folder / "manifest.json").read_text())
    assert _cache.sha256_of(weights) == manifest["files"]["model.safetensors"]["sha256"]


def test_a_build_that_breaks_leaves_nothing(tmp_path):
    def build(folder):
        (folder / "half").write_text("half")
        raise RuntimeError("broke off")

    with pytest.raises(RuntimeError, match="broke off"):
        _cache.entry(tmp_path / "entry", source="s", build=build)
    assert [path.name for path in tmp_path.iterdir()] == ["entry.lock"]


def test_a_half_written_entry_of_a_killed_process_is_not_used(tmp_path):
    (tmp_path / ".entry.x.part").mkdir(parents=True)
    (tmp_path / "entry").mkdir()
    (tmp_path / "entry" / "model").write_text("half")

    def build(folder):
        (folder / "model").write_text("whole")
        return {}

    assert (_cache.entry(tmp_path / "entry", source="s", build=build) / "model").read_text() == "whole"
    assert not list(tmp_path.glob("*.part"))


def _build_slowly(folder, log):
    def build(made):
        import time

        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(0.5)
        (made / "model").write_text("whole")
        return {}

    _cache.entry(folder, source="s", build=build)


def test_two_processes_build_once(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_build_slowly, args=(tmp_path / "entry", tmp_path / "log")) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_folder_that_cannot_be_written_to_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CAMERAREADY_MODELS", str(tmp_path / "file" / "models"))
    path = gguf_files.write(tmp_path / "a.gguf", gguf_files.tiny("llama"))
    with pytest.raises(ModelError, match=r"cannot be written to.*CAMERAREADY_MODELS"):
        open_model(path)


def test_missing_weights_are_not_filled_with_random_numbers(tmp_path):
    path = gguf_files.write(tmp_path / "a.gguf", gguf_files.tiny("llama"), leave_out={"blk.1.ffn_up.weight"})
    with pytest.raises(ModelError, match=r"lacks 1 of the weights.*layers\.1\.mlp\.up_proj"):
        open_model(path)


def test_blocks_beyond_those_that_the_file_declares_are_refused(tmp_path):
    model = gguf_files.tiny("llama")
    model.config.num_hidden_layers = 1
    with pytest.raises(ModelError, match=r"1 blocks and holds weights of more \(blk\.1\."):
        open_model(gguf_files.write(tmp_path / "a.gguf", model))


def test_an_entry_with_a_file_of_somebody_else_is_made_again(tmp_path):
    folder, digest = gguf.converted(gguf_files.write(tmp_path / "a.gguf", gguf_files.tiny("llama")))
    assert _cache.holds(folder, digest)
    (folder / "adapter_config.json").write_text("{}")
    assert not _cache.holds(folder, digest)
    assert gguf.converted(tmp_path / "a.gguf")[0] == folder
    assert not (folder / "adapter_config.json").exists()


def test_a_file_where_a_folder_belongs_is_named(tmp_path):
    (tmp_path / "entry").write_text("")
    with pytest.raises(ModelError, match=r"entry is a file where a model's folder belongs"):
        _cache.entry(tmp_path / "entry", source="s", build=lambda folder: {})


def test_weights_that_are_not_finite_are_refused(tmp_path, models):
    broken = gguf_files.tiny("llama")
    with torch.no_grad():
        broken.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    path = gguf_files.write(tmp_path / "a.gguf", broken)
    with pytest.raises(ModelError, match="not finite"):
        open_model(path)
    assert not [entry for entry in (models / "converted").iterdir() if entry.is_dir()]


def test_linear_and_yarn_scaling_reach_the_configuration(tmp_path):
    tiny = gguf_files.tiny("llama")
    linear = open_model(gguf_files.write(tmp_path / "l.gguf", tiny, scaling={"type": "linear", "factor": 4.0}))
    assert linear.model.config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}
    # Positions divided by 4: place 4k of the scaled model is place k of the plain one.
    plain = tiny.model.rotary_emb(torch.zeros(1), torch.arange(8)[None])
    scaled = linear.model.model.rotary_emb(torch.zeros(1), 4 * torch.arange(8)[None])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain, scaled, strict=True))
    yarn = {"type": "yarn", "factor": 2.0, "original_context_length": 512}
    found = open_model(gguf_files.write(tmp_path / "y.gguf", tiny, scaling=yarn)).model.config.rope_parameters
    assert (found["rope_type"], found["factor"], found["original_max_position_embeddings"]) == ("yarn", 2.0, 512)


def test_llama_3_scaling_is_found_again_from_its_tensor(tmp_path):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 10000.0}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    path = gguf_files.write(tmp_path / "a.gguf", gguf_files.tiny("llama"), factors=(plain / scaled).numpy())
    opened = open_model(path)
    assert opened.model.config.rope_parameters == scaling
    assert torch.allclose(opened.model.model.rotary_emb.inv_freq, scaled, rtol=1e-5)


def test_scaling_that_cannot_be_kept_is_refused(tmp_path):
    tiny = gguf_files.tiny("llama")
    odd = gguf_files.write(tmp_path / "a.gguf", tiny, factors=[1, 2, 3, 4, 5, 6, 7, 8])
    with pytest.raises(ModelError, match="scales its positions"):
        open_model(odd)
    other = gguf_files.write(tmp_path / "b.gguf", tiny, scaling={"type": "longrope", "factor": 4.0})
    with pytest.raises(ModelError, match="'longrope'"):
        open_model(other)
    header = gguf.read_header(gguf_files.write(tmp_path / "c.gguf", tiny, factors=[1.0] * 8))
    assert rope.parameters(header, tiny.config) is None


@pytest.mark.models
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma-3-270m", "qwen2.5-coder-0.5b-instruct"])
def test_a_real_file_computes_what_transformers_own_loader_does(name, monkeypatch):
    from transformers import AutoModelForCausalLM

    from cameraready.models import packaged

    monkeypatch.delenv("CAMERAREADY_MODELS")
    if OWN_MODELS:
        monkeypatch.setenv("CAMERAREADY_MODELS", OWN_MODELS)
    path = _cache.models_folder() / f"{name}.gguf"
    if reason := packaged.missing(name) or (None if path.is_file() else f"{path} is not there"):
        pytest.skip(reason)
    opened = open_model(name)
    ids = opened.encode(opened.prompt("The capital of France is"))
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(opened.model(ids).logits, theirs(ids).logits)
