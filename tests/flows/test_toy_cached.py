"""Networks trained once: by digest of the recipe, one at a time, whole or not at all, on from where they were interrupted."""

import json
import math
import multiprocessing
import os
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from cameraready.flows._toy import checkpoints, trained
from cameraready.flows._toy.cached import cached, folder_of
from cameraready.flows._toy.networks import MLPVelocity
from cameraready.flows._toy.training import train_flow

pytestmark = pytest.mark.torch
RECIPE = {"name": "tiny-mlp", "version": 1, "steps": 20, "list": [1, 2.5, None, True]}
DATA = torch.randn(30, 2, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    monkeypatch.setenv("CAMERAREADY_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


class Work:
    """Builds and trains a network, and counts how often."""

    def __init__(self, width=8):
        self.width, self.trainings, self.batches, self.die_at = width, 0, 0, None

    def build(self):
        return MLPVelocity(2, self.width, 1, generator=torch.Generator().manual_seed(2))

    def train(self, net, checkpoint):
        self.trainings += 1

        def draw(n, generator):
            self.batches += 1
            if self.batches == self.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return DATA[torch.randint(30, (n,), generator=generator)]

        g = torch.Generator().manual_seed(3)
        return train_flow(net, draw, steps=20, batch=4, lr=1e-2, generator=g, checkpoint=checkpoint)

    def get(self, recipe=RECIPE, **settings):
        return cached(recipe, self.build, self.train, **settings)


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def content():
    return (folder_of(RECIPE) / "network.safetensors").read_bytes()


def test_it_is_trained_once_and_read_after_that(capsys):
    work = Work()
    first, second = work.get(), work.get()
    assert work.trainings == 1
    assert same(first, second)
    assert not same(first, work.build())
    assert not first.training
    assert not any(p.requires_grad for p in first.parameters())
    said = capsys.readouterr()
    assert said.err.count("training a small network once") == 1
    assert said.out == ""
    assert json.loads((folder_of(RECIPE) / "manifest.json").read_text())["recipe"] == RECIPE


def test_same_recipe_same_bytes_in_another_place(tmp_path, monkeypatch):
    Work().get()
    here = content()
    monkeypatch.setenv("CAMERAREADY_MODELS", str(tmp_path / "elsewhere"))
    Work().get(dict(reversed(RECIPE.items())), quiet=True)  # order of keys does not count
    assert content() == here


def test_another_recipe_is_another_file(models):
    work = Work()
    for change in ({}, {"version": 2}, {"steps": 21}, {"name": "other-mlp"}, {"list": [1]}):
        work.get({**RECIPE, **change}, quiet=True)
    assert work.trainings == 5
    kept = [p.name for p in (models / "flows").iterdir() if p.is_dir()]
    assert len(kept) == 5
    assert sum(name.startswith("tiny-mlp-") for name in kept) == 4


@pytest.mark.parametrize("damage", ["cut", "bit", "gone", "swapped"])
def test_a_damaged_file_is_told_and_made_again(capsys, damage):
    work = Work()
    work.get(quiet=True)
    place, whole = folder_of(RECIPE) / "network.safetensors", content()
    if damage == "cut":
        place.write_bytes(whole[:-7])
    elif damage == "bit":
        place.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "gone":
        place.unlink()
    else:
        save_file({name: -tensor for name, tensor in load_file(place).items()}, place)
    work.get()
    assert "is damaged; it is trained again" in capsys.readouterr().err
    assert work.trainings == 2
    assert content() == whole


def _in_a_process(number, barrier, log):
    torch.set_num_threads(1)
    work = Work()
    inner = work.train

    def train(net):
        with open(log, "a") as file:
            file.write(f"{number}\n")
        barrier.wait(20)  # until the other one is about to ask
        return inner(net, checkpoint=None)

    if number:
        barrier.wait(20)
    net = cached(RECIPE, work.build, train, quiet=True)
    save_file(net.state_dict(), f"{log}.{number}")


def test_two_processes_at_once_train_once(tmp_path):
    """The second asks while the first, which holds the lock, trains."""
    context = multiprocessing.get_context("fork")
    barrier, log = context.Barrier(2), tmp_path / "log"
    both = [context.Process(target=_in_a_process, args=(number, barrier, log)) for number in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(40)
        assert process.exitcode == 0
    assert log.read_text() == "0\n"
    a, b = (load_file(f"{log}.{number}") for number in range(2))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_an_interrupted_training_resumes_and_ends_the_same(models, monkeypatch):
    monkeypatch.setattr(checkpoints, "EVERY", 0.0)
    child = os.fork()
    if child == 0:
        try:
            work = Work()
            work.die_at = 13
            work.get(quiet=True)
        finally:  # whatever happens, the child does not go on with the tests
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert not folder_of(RECIPE).exists()
    work = Work()
    resumed = work.get(quiet=True)
    assert work.batches == 20 - 12
    left = sorted(p.name for p in (models / "flows").iterdir())
    assert left == [folder_of(RECIPE).name, folder_of(RECIPE).name + ".lock"]
    assert same(resumed, Work().get({**RECIPE, "version": 2}, quiet=True))


def test_a_training_that_fails_leaves_nothing(models):
    def fail(net):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cached(RECIPE, Work().build, fail, quiet=True)
    assert not folder_of(RECIPE).exists()
    assert not list((models / "flows").glob(".*"))


def test_a_network_that_is_not_finite_is_not_kept(models):
    def broken(net):
        with torch.no_grad():
            next(net.parameters()).fill_(math.nan)
        return net

    with pytest.raises(FloatingPointError, match=r"'tiny-mlp' .* not finite .* nothing is kept"):
        cached(RECIPE, Work().build, broken, quiet=True)
    assert not folder_of(RECIPE).exists()


def test_a_network_that_changed_without_its_version_is_told():
    Work().get(quiet=True)
    with pytest.raises(ValueError, match=r"'tiny-mlp' does not fit the weights kept in .* raise the recipe's version"):
        Work(width=9).get(quiet=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "Not Good"}, "needs a 'name'"),
        ({"version": "1"}, "needs a 'version'"),
        ({"extra": (1, 2)}, "JSON values only"),
        ({"extra": {1, 2}}, "JSON values only"),
        ({"extra": float("nan")}, "JSON values only"),
    ],
)
def test_what_is_no_recipe_is_told(change, message):
    with pytest.raises(ValueError, match=message):
        Work().get({**RECIPE, **change})


def test_shared_networks_are_built_from_their_recipes_and_misspelt_ones_named():
    for name, recipe in trained.RECIPES.items():
        assert recipe["name"] == name
        net = trained.build(recipe)
        assert same(net, trained.build(recipe))
        assert not trained.is_trained(name)
    with pytest.raises(ValueError, match=r"no trained network 'digits-unett'.*Did you mean 'digits-unet'"):
        trained.trained("digits-unett")


def test_a_shared_network_is_trained_by_its_recipe(monkeypatch, capsys):
    recipe = trained.RECIPES["digits-classifier"]
    short = {**recipe, "network": {**recipe["network"], "width": 8}, "training": {**recipe["training"], "steps": 3}}
    monkeypatch.setitem(trained.RECIPES, "digits-classifier", short)
    net = trained.trained("digits-classifier")
    assert trained.is_trained("digits-classifier")
    assert "digits-classifier: step 3 of 3" in capsys.readouterr().err
    again = trained.train(short, trained.build(short), quiet=True)
    assert same(net, again)
