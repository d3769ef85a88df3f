"""Names of every kind open, and what cannot be opened says what to do."""

import copy
import os
import subprocess
import sys

import pytest
import torch

from cameraready.models import LanguageModel, ModelError, open_model, opened, opener, tiny_model, tiny_tokenizer

IDS = torch.arange(3, 23)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    model = tiny_model("qwen2")
    model.generation_config.temperature = 0.625
    model.generation_config.do_sample = True
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def copied(folder, tmp_path):
    import shutil

    return shutil.copytree(folder, tmp_path / "tiny")


@pytest.fixture(autouse=True)
def nothing_kept():
    opener.forget()
    yield
    opener.forget()


def test_a_folder_opens_with_its_weights_settings_and_tokenizer(folder):
    lm = open_model(folder)
    assert (lm.source, lm.name, lm.folder) == ("folder", str(folder), folder.resolve())
    assert torch.equal(lm.model(IDS).logits, tiny_model("qwen2").eval()(IDS).logits)
    assert not lm.model.training
    assert lm.model.generation_config.temperature == 0.625
    assert lm.device.type == "cpu"
    assert lm.dtype == torch.float32
    assert lm.context == lm.model.config.max_position_embeddings
    assert lm.tokenizer.decode(lm.encode("héllo")[0], skip_special_tokens=True) == "héllo"


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "torch.bfloat16"])
def test_the_dtype_asked_for(folder, dtype):
    assert open_model(str(folder), dtype=dtype).dtype == torch.bfloat16


def test_a_checkpoint_in_half_precision_is_float32_on_a_cpu_by_default(tmp_path):
    tiny_model("llama", dtype=torch.float16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert open_model(tmp_path).dtype == torch.float32
    assert open_model(tmp_path, dtype="float16").dtype == torch.float16


@pytest.mark.parametrize("dtype", ["float31", "int8", torch.int64, 32, torch.float8_e4m3fn])
def test_a_dtype_that_cannot_be(folder, dtype):
    with pytest.raises(ModelError, match="cannot hold a model's weights"):
        open_model(folder, dtype=dtype)


def test_a_device_that_is_not_there(folder):
    with pytest.raises(ModelError, match="none that PyTorch knows"):
        open_model(folder, device="gpu7")
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="sees no CUDA device"):
            open_model(folder, device="cuda")


def test_a_pair_is_left_where_it_is_and_as_it_is():
    model, tokenizer = tiny_model("llama", dtype=torch.float64), tiny_tokenizer(pad=False)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    lm = open_model((model, tokenizer), device="cpu")
    assert lm.model is model
    assert lm.tokenizer is tokenizer
    assert lm.source == "value"
    assert tokenizer.pad_token is None
    assert lm.pad_id == tokenizer.eos_token_id
    assert lm.dtype == torch.float64
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    with pytest.raises(ModelError, match=r"in torch.float64 and torch.float32 was asked for"):
        open_model((model, tokenizer), dtype="float32")


def test_what_is_no_pair():
    with pytest.raises(ModelError, match="has 1 items"):
        open_model((tiny_model("llama"),))
    with pytest.raises(ModelError, match=r"holds str and str"):
        open_model(("a", "b"))


def test_a_name_that_is_nothing(tmp_path):
    with pytest.raises(ModelError, match=r"There is no model 'nothing'.*gemma-3-270m"):
        open_model("nothing")
    with pytest.raises(ModelError, match="empty"):
        open_model(" ")
    with pytest.raises(ModelError, match="no config"):
        open_model(tmp_path)
    with pytest.raises(ModelError, match="is no hub id"):
        open_model("hf:no such thing")
    with pytest.raises(TypeError, match="int is neither"):
        open_model(3)
    with pytest.raises(ModelError, match="give one"):
        open_model("hf:a/b@main", revision="v1")


def test_pickles_are_refused(copied):
    (copied / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        open_model(copied)
    torch.save({}, copied / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickles only \(pytorch_model.bin\).*save_pretrained"):
        open_model(copied)


def test_adapters_and_folders_of_ggufs_are_named(tmp_path):
    (tmp_path / "x.gguf").write_text("")
    with pytest.raises(ModelError, match=r"holds GGUF files, name one"):
        open_model(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds an adapter"):
        open_model(tmp_path)


def test_a_truncated_checkpoint(copied):
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-500])
    with pytest.raises(ModelError, match="truncated or damaged"):
        open_model(copied)


def test_missing_weights_are_not_filled_with_random_numbers(copied):
    from safetensors.torch import load_file, save_file

    weights = load_file(copied / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of the weights.*up_proj"):
        open_model(copied)


def changed_config(folder, **changes):
    import json

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_weights_that_the_configuration_has_no_place_for_are_refused(copied):
    changed_config(copied, num_hidden_layers=1, layer_types=["full_attention"])
    with pytest.raises(ModelError, match=r"holds \d+ weights that .* no place for, among them model\.layers\.1\."):
        open_model(copied)
    changed_config(copied, num_hidden_layers=2, layer_types=["full_attention"] * 2, model_type="llama")
    with pytest.raises(ModelError, match=r"holds 6 weights .* among them model\.layers\.0\.self_attn\.k_proj\.bias"):
        open_model(copied)


def test_weights_that_are_known_to_be_left_out_are_no_reason_to_refuse(copied):
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3NextForCausalLM

    from cameraready.models._loading import check_unused

    weights = load_file(copied / "model.safetensors")
    # Written by older releases; and the head of a model that ties it.
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"].clone())
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    open_model(copied)
    check_unused({"unexpected_keys": {"h.0.attn.bias", "h.1.attention.masked_bias"}}, "an old model")
    with pytest.raises(ModelError, match="holds 1 weights"):
        check_unused({"unexpected_keys": {"h.0.attn.q_proj.bias"}}, "a model")
    assert Qwen3NextForCausalLM._keys_to_ignore_on_load_unexpected  # heads for several tokens, by transformers itself


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path, number):
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = number
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"not finite numbers \(1 of its tensors, among them model\.layers\.1\.mlp\.up_proj"
    ):
        open_model(tmp_path)


def test_shards_without_the_list_that_joins_them(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="50KB")
    tiny_tokenizer().save_pretrained(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{")
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json is damaged"):
        open_model(tmp_path)
    index.unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json, which joins them, is missing"):
        open_model(tmp_path)


@pytest.mark.parametrize("device", ["meta", "xpu", "hpu"])
def test_devices_that_cannot_hold_a_model(folder, device):
    with pytest.raises(ModelError, match="use cpu"):
        open_model(folder, device=device)


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 5000 + ".gguf", "a\0b"])
def test_names_that_no_file_can_have(name):
    with pytest.raises(ModelError, match="There is no model") as caught:
        open_model(name)
    assert len(str(caught.value)) < 600


def test_half_a_surrogate_pair_is_no_text(folder):
    with pytest.raises(ModelError, match="surrogate"):
        open_model(folder).encode("a\ud800")


def test_a_vocabulary_smaller_than_its_padding_token(copied):
    changed_config(copied, vocab_size=10, pad_token_id=20)
    with pytest.raises(ModelError, match=r"padding token beyond its vocab_size|of other shapes"):
        open_model(copied)


def test_a_hub_id_is_known_by_its_commit_and_never_by_its_branch(folder, tmp_path):
    """In a cache of the hub's client, without a network: two branches of one commit, then one that moves."""
    code = (
        "import shutil, sys\nfrom pathlib import Path\nfrom cameraready.models import open_model\n"
        "folder, cache = Path(sys.argv[1]), Path(sys.argv[2]) / 'hub' / 'models--org--tiny'\n"
        "def commit(digit, *branches):\n"
        "    shutil.copytree(folder, cache / 'snapshots' / (digit * 40), dirs_exist_ok=True)\n"
        "    (cache / 'refs').mkdir(exist_ok=True)\n"
        "    for branch in branches:\n        (cache / 'refs' / branch).write_text(digit * 40)\n"
        "commit('a', 'main', 'v1')\n"
        "first = [open_model(name) for name in ('hf:org/tiny', 'hf:org/tiny@main', 'org/tiny@v1')]\n"
        "commit('b', 'main')\n"
        "for lm in (*first, open_model('hf:org/tiny@main'), open_model('hf:org/tiny', revision='a' * 40)):\n"
        "    print(lm.revision, lm.digest)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-c", code, str(folder), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    found = [line.split() for line in done.stdout.splitlines()]
    assert [revision for revision, _ in found] == ["a" * 40, "a" * 40, "a" * 40, "b" * 40, "a" * 40], done.stderr
    assert len({digest for _, digest in found}) == 2
    assert found[0][1] == found[4][1] != found[3][1]


def test_parts_that_do_not_belong_together(copied, tmp_path):
    import json

    sharded = tmp_path / "sharded"
    tiny_model("llama").save_pretrained(sharded, max_shard_size="50KB")
    with pytest.raises(ModelError, match="the tokenizer of"):
        open_model(sharded)
    tiny_tokenizer().save_pretrained(sharded)
    open_model(sharded)
    sorted(sharded.glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(ModelError, match="lacks a part of its weights"):
        open_model(sharded)
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "intermediate_size": 32}))
    with pytest.raises(ModelError, match="of other shapes than its configuration says"):
        open_model(copied)
    (copied / "config.json").write_text(json.dumps({**config, "num_attention_heads": 3}))
    with pytest.raises(ModelError, match=r"of other shapes|could not be opened"):
        open_model(copied)


def test_configurations_that_cannot_be_used(copied):
    for content, match in (
        ("{", "cannot be read"),
        ("{}", "does not say its model_type"),
        ('{"model_type": "a-model-of-2031"}', "does not know"),
        ('{"model_type": "vit"}', "no causal language model"),
    ):
        (copied / "config.json").write_text(content)
        with pytest.raises(ModelError, match=match) as caught:
            open_model(copied)
        assert "\n" not in str(caught.value)


def test_code_that_comes_with_a_checkpoint_is_never_run(copied):
    (copied / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}'
    )
    (copied / "own.py").write_text(f"open({str(copied / 'ran')!r}, 'w').close()")
    with pytest.raises(ModelError):
        open_model(copied)
    assert not (copied / "ran").exists()


def test_a_tokenizer_larger_than_the_embedding(tmp_path):
    tiny_model("llama", vocab=200).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"tokens up to 255.*embeddings for 200.*resize_token_embeddings"):
        open_model(tmp_path)


def test_special_tokens_beyond_the_embedding_are_refused_when_they_are_used():
    lm = open_model((tiny_model("llama"), tiny_tokenizer()))
    lm.tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    lm = open_model((lm.model, lm.tokenizer))
    assert lm.encode("text").shape[0] == 1
    with pytest.raises(ModelError, match="'<image>' as token"):
        lm.encode("an <image>")


def test_missing_special_tokens_have_rules(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer(pad=False).save_pretrained(tmp_path)
    lm = open_model(tmp_path)
    assert lm.tokenizer.pad_token == lm.tokenizer.eos_token
    bare = open_model((tiny_model("llama"), tiny_tokenizer(pad=False, bos=False, eos=False)))
    assert bare.pad_id == 0
    assert bare.encode("ab").tolist() == [[97, 98]]
    with pytest.raises(ModelError, match="An empty text has no tokens"):
        bare.encode("")
    with pytest.raises(TypeError, match="A text was expected"):
        bare.encode(None)
    written = bare.model.generate(bare.encode("a"), max_new_tokens=4, do_sample=False, pad_token_id=bare.pad_id)
    assert written.shape == (1, 5)


def test_the_begin_token_comes_once():
    lm = open_model((tiny_model("llama"), tiny_tokenizer()))
    begin = lm.tokenizer.bos_token_id
    assert lm.encode("").tolist() == [[begin]]
    assert lm.encode(lm.tokenizer.bos_token + "a").tolist() == lm.encode("a").tolist() == [[begin, 97]]


def test_prompts_go_through_the_template_where_there_is_one():
    with_template = open_model((tiny_model("llama"), tiny_tokenizer()))
    assert with_template.prompt("hi") == "<|user|>hi\n<|assistant|>"
    without = open_model((tiny_model("llama"), tiny_tokenizer(chat_template=False)))
    assert without.prompt("hi") == "hi"
    with_template.tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(ModelError, match="chat template"):
        with_template.prompt("hi")


def test_digests_tell_weights_apart(folder, copied):
    assert open_model(folder).digest == open_model(copied).digest
    (copied / "config.json").write_text((copied / "config.json").read_text() + "\n")
    assert open_model(folder).digest != open_model(copied).digest
    model = tiny_model("llama")
    first = open_model((model, tiny_tokenizer())).digest
    assert first == open_model((copy.deepcopy(model), tiny_tokenizer())).digest
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert open_model((model, tiny_tokenizer())).digest != first


def test_opened_keeps_a_few_for_the_process(folder, monkeypatch):
    first = opened(str(folder))
    assert opened(str(folder)) is first
    assert opened(str(folder), dtype="bfloat16") is not first
    for dtype in ("float16", "float64"):
        opened(str(folder), dtype=dtype)
    assert len(opener._KEPT) == 3
    assert opened(str(folder)) is not first  # it was the longest unused
    monkeypatch.setattr(opener, "_KEPT_SHARE", 1e-12)
    last = opened(str(folder), dtype="bfloat16")  # larger than what may be kept: alone
    assert list(opener._KEPT.values()) == [last]


def test_no_hub_is_a_sentence(monkeypatch, tmp_path):
    code = (
        "from cameraready.models import open_model, ModelError\n"
        "for name in ('hf:camera-ready/no-such-model', 'camera-ready/no-such-model'):\n"
        "    try:\n        open_model(name)\n"
        "    except ModelError as error:\n        print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 2, done.stderr
    assert all("hub cannot be reached" in line and "hf download camera-ready/no-such-model" in line for line in lines)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("GatedRepoError", "is gated: accept its terms"),
        ("RepositoryNotFoundError", "The hub has no model"),
        ("RevisionNotFoundError", "no such revision"),
        ("LocalEntryNotFoundError", "hub cannot be reached"),
    ],
)
def test_what_the_hub_answers_becomes_a_sentence(kind, match):
    from huggingface_hub import errors

    from cameraready.models._loading import explained

    reason = getattr(errors, kind)
    inner = reason.__new__(reason)
    Exception.__init__(inner, "long text\nof several lines")
    outer = OSError("transformers' own text")
    outer.__cause__ = inner
    said = str(explained(outer, "hf:a/b"))
    assert match in said
    assert "\n" not in said


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, cameraready.models as m; dir(m); print([n for n in ('torch', 'transformers', 'numpy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_exported_name_is_there():
    import cameraready.models as models

    assert all(getattr(models, name) is not None for name in models.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = models.nothing
    assert LanguageModel.__name__ == "LanguageModel"
