"""What the room's studies are tried on: shipped flows, tables, arrays, trained models with their data, or a sentence that says what is wrong."""

import doctest
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from cameraready.evidence import Spec, SpecError
from cameraready.evidence.specs import parse
from cameraready.flows import CosinePath, FlowProblem, _problem
from cameraready.flows._samplers import sample
from cameraready.flows._workload import ACCEPTS, open_flow
from tests.flows.flow_cases import DIM, exact, mixture

pytestmark = pytest.mark.torch


def given(value):
    return open_flow(Spec("mine", "value", "own").with_value(value))


def rows(n=60, seed=0):
    return np.random.default_rng(seed).normal(size=(n, 2)) * [3.0, 0.1] + [5.0, -1.0]


@pytest.fixture
def quickly(monkeypatch, tmp_path):
    """Trainings of seconds, kept in a folder of the test's."""
    monkeypatch.setenv("CAMERAREADY_MODELS", str(tmp_path))
    monkeypatch.setattr(_problem, "VECTORS", {"steps": 300, "batch": 128, "lr": 5e-3})
    monkeypatch.setattr(_problem, "IMAGES", {"steps": 2, "batch": 4, "lr": 1e-3})
    return tmp_path


# --- what opens ------------------------------------------------------------------------------------------------------


def test_shipped_names_open_as_themselves_or_as_what_they_stand_for():
    problem = FlowProblem("gauss", mixture=mixture())
    assert open_flow(Spec("gauss", "shipped", "gauss"), ("gauss", "digits")) == "gauss"
    assert open_flow(Spec("gauss", "shipped", "gauss"), {"gauss": lambda: problem}) is problem
    with pytest.raises(SpecError, match=r"no workload 'gaus'; did you mean gauss\?"):
        open_flow(Spec("gaus", "shipped", "gaus"), ("gauss", "digits"))


def test_a_problem_is_taken_as_it_is_and_a_model_with_its_data_is_checked():
    problem = FlowProblem("gauss", mixture=mixture())
    assert given(problem) is problem
    data = mixture().sample(300, torch.Generator().manual_seed(0))
    opened = given((exact(), data))
    x = torch.randn(2, DIM, dtype=torch.float64)
    torch.testing.assert_close(opened.velocity(x, 0.3), exact()(x, 0.3))
    torch.testing.assert_close(opened.data, data)  # as it was given: the model knows these units
    labels = torch.arange(300) % 2
    asked = []

    def conditioned(x, t, y):
        asked.append(y)
        return exact()(x, t)

    assert given((conditioned, data, labels)).classes == 2
    assert asked[0].shape == (240,)
    with pytest.raises(SpecError, match="direction='data_to_noise'"):
        given((lambda x, s: -exact()(x, 1 - s), data))
    with pytest.raises(SpecError, match=r"cannot be asked as v\(x, t\) with x of shape \(240, 3\) .* RuntimeError"):
        given((lambda x, t: x @ torch.ones(7, 7, dtype=x.dtype), data))
    with pytest.raises(SpecError, match=r"cannot be asked as v\(x, t, y\)"):
        given((lambda x, t: x, data, labels))


def test_a_problem_with_a_velocity_of_its_own_is_checked_too_on_its_own_path():
    data = mixture().sample(300, torch.Generator().manual_seed(0))
    backwards = lambda x, s: -exact()(x, 1 - s)  # noqa: E731
    with pytest.raises(SpecError, match="direction='data_to_noise'"):
        given(FlowProblem("mine", data, velocity=backwards))
    with pytest.raises(SpecError, match="direction='data_to_noise'"):
        given(FlowProblem("mine", mixture=mixture(), velocity=backwards))
    with pytest.raises(SpecError, match=r"mine cannot be asked .* IndexError"):  # a label that the model does not know
        given(FlowProblem("mine", data, torch.arange(300) % 7, lambda x, t, y: torch.zeros(3, 3).double()[y]))
    with pytest.raises(SpecError, match="mine: the velocity is not finite in"):
        given(FlowProblem("mine", data, velocity=lambda x, t: x * np.nan))
    with pytest.raises(SpecError, match=r"mine: the velocity has shape \(240,\) for data of shape \(240, 3\)"):
        given(FlowProblem("mine", data, velocity=lambda x, t: x[:, 0]))
    cosine = FlowProblem("mine", data, velocity=mixture().velocity(CosinePath()), path=CosinePath())
    assert given(cosine) is cosine
    asked = []
    untrained = FlowProblem("mine", data)
    untrained._trained = lambda: asked.append(1)
    assert given(untrained) is untrained
    assert not asked  # opening trains nothing


@pytest.mark.parametrize(
    "layer", [torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(DIM, affine=False)], ids=["dropout", "batch"]
)
def test_networks_that_are_still_in_training_are_warned_of_and_left_as_they_are(layer):
    data = mixture().sample(300, torch.Generator().manual_seed(0))

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, t):
            return exact()(self.layer.double()(x), t)

    velocity, before = Net(), torch.get_rng_state()
    layer.train()
    with pytest.warns(UserWarning, match=r"velocity of mine gives other answers .* call eval\(\) on the network"):
        given(FlowProblem("mine", data, velocity=velocity))
    assert layer.training
    assert torch.equal(torch.get_rng_state(), before)
    if isinstance(layer, torch.nn.BatchNorm1d):
        assert torch.equal(layer.running_mean, torch.zeros(DIM).double())
    layer.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given(FlowProblem("mine", data, velocity=velocity))


def test_arrays_of_doubles_get_a_velocity_that_takes_them(quickly, monkeypatch):
    monkeypatch.setattr(_problem, "VECTORS", {"steps": 2, "batch": 4, "lr": 1e-3})
    opened = given(rows())
    x = opened.noise(4, torch.Generator().manual_seed(0))
    assert x.dtype == torch.float64
    assert sample(opened.velocity, x, steps=2).x.dtype == torch.float64
    torch.testing.assert_close(
        opened.velocity(x, 0.5).float(), FlowProblem("mine", opened.data.float()).velocity(x.float(), 0.5)
    )


def test_arrays_are_standardised():
    opened = given(rows())
    assert opened.data.dtype == torch.float64
    torch.testing.assert_close(opened.data.mean(0), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(opened.data.std(0), torch.ones(2, dtype=torch.float64))
    images = given(torch.rand(12, 1, 4, 4) * 255)
    assert images.shape == (1, 4, 4)
    assert float(images.data.std()) == pytest.approx(1, abs=1e-5)


def test_tables_of_numbers_open_with_classes_where_a_column_is_named(tmp_path):
    import pandas as pd

    frame = pd.DataFrame(rows(), columns=["a", "b"]).assign(kind=["u", "v", "w"] * 20)
    path = tmp_path / "mine.csv"
    frame.to_csv(path, index=False)

    def opened(text):
        return open_flow(parse(text, shipped=(), accepts=ACCEPTS))

    problem = opened(f"{path}:kind")
    assert (problem.shape, problem.classes, len(problem.data)) == ((2,), 3, 60)
    with pytest.raises(SpecError, match=r"columns of numbers, and kind of mine\.csv are not"):
        opened(str(path))
    frame[["a"]].assign(b=1.0).to_csv(path, index=False)
    with pytest.raises(SpecError, match=r"b of mine\.csv never changes"):
        opened(str(path))
    frame[["a", "b"]].assign(a=[np.nan, *frame["a"][1:]]).to_csv(path, index=False)
    with pytest.warns(UserWarning, match=r"1 of 60 rows of mine\.csv have missing values"):
        assert len(opened(str(path)).data) == 59
    frame.assign(kind=[None, *frame["kind"][1:]]).to_csv(path, index=False)
    with pytest.warns(UserWarning, match=r"1 of 60 rows of mine\.csv have missing values"):
        problem = opened(f"{path}:kind")
    assert (problem.classes, len(problem.data)) == (3, 59)  # a missing label is no class
    frame[["a", "b"]].head(5).to_csv(path, index=False)
    with pytest.raises(SpecError, match="5 data; at least 10"):
        opened(str(path))


def test_an_object_is_imported_and_a_function_is_called(tmp_path, monkeypatch):
    (tmp_path / "my_flows.py").write_text(
        "import numpy as np\nfrom cameraready.flows import FlowProblem\n"
        "array = np.random.default_rng(0).normal(size=(30, 2))\n"
        "def made(): return FlowProblem('mine', array)\ndef broken(): raise KeyError('gone')\ndef velocity(x, t): return x\n"
        "pair = (velocity, array)\nnumber = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def opened(name):
        return open_flow(parse(f"my_flows:{name}", shipped=(), accepts=ACCEPTS))

    assert opened("made").name == "mine"
    assert opened("array").shape == (2,)
    assert opened("pair").velocity(torch.ones(2), 0.5).sum() == 2
    for name, words in (
        ("broken", r"my_flows:broken\(\) raised KeyError: 'gone'"),
        ("velocity", "is a function with arguments; name an array of data"),
        ("number", "not int"),
    ):
        with pytest.raises(SpecError, match=words):
            opened(name)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (exact(), r"give an array of data .* not function"),
        ((1, 2, 3, 4), "not a tuple of int, int, int, int"),
        (np.arange(40).reshape(20, 2), "int64; flows are of continuous states"),
        (np.zeros((20, 2)), "never change"),
        (np.full((20, 2), np.nan), "20 of 20 data of own have NaN"),
        (np.ones(20), r"vectors \(N, D\) or images \(N, C, H, W\), got shape \(20,\)"),
        (np.array([["a", "b"]] * 20), "are not numbers"),
        ((exact(), rows(), [0.5] * 60), "labels of own must be 60 whole numbers"),
        ((exact(), rows(), ["a"] * 60), "labels of own must be 60 whole numbers from 0, got"),
        ((exact(), rows(), [-1] * 60), "labels of own must be 60 whole numbers"),
    ],
    ids=range(10),
)
def test_what_is_wrong_is_said(value, words):
    with pytest.raises(SpecError, match=words):
        given(value)


# --- the problem itself ----------------------------------------------------------------------------------------------


def test_train_and_test_share_nothing_and_labels_stay_with_their_data():
    data = torch.arange(200.0).reshape(100, 2)
    problem = FlowProblem("numbers", data, labels=(data[:, 0] / 2).long() % 5)
    assert (len(problem.train), len(problem.test), problem.classes) == (80, 20, 5)
    both = torch.cat([problem.train, problem.test])
    torch.testing.assert_close(both[both[:, 0].argsort()], data)
    assert torch.equal(problem.train_labels, (problem.train[:, 0] / 2).long() % 5)
    assert torch.equal(problem.test_labels, (problem.test[:, 0] / 2).long() % 5)
    assert torch.equal(FlowProblem("numbers", data).test, problem.test)
    for labels in (np.arange(100, dtype=np.uint64), np.arange(100)[::-1], list(range(100))):
        assert FlowProblem("numbers", data, labels).labels.tolist() == [int(label) for label in labels]
    generator = torch.Generator().manual_seed(0)
    assert set(problem.draw(50, generator)[:, 0].tolist()) <= set(problem.train[:, 0].tolist())
    assert problem.noise(7, generator).shape == (7, 2)


def test_data_are_the_problems_own_and_labels_are_classes():
    array = rows()
    problem = FlowProblem("mine", array)
    array[:] = 0
    assert float(problem.data.std()) > 1
    many = np.arange(60) * 10
    with pytest.raises(ValueError, match="labels of mine go up to 590; at most 100 classes"):
        FlowProblem("mine", rows(), many)
    assert FlowProblem("mine", rows(), many, exact()).classes == 591  # a model of the user's may know as many


def test_a_mixture_gives_data_and_the_exact_velocity():
    problem = FlowProblem("gauss", mixture=mixture())
    assert problem.is_exact
    assert not problem.needs_training
    x = torch.randn(4, DIM, dtype=torch.float64)
    torch.testing.assert_close(problem.velocity(x, 0.4), exact()(x, 0.4))
    torch.testing.assert_close(problem.data.double().mean(0), mixture().mean(), rtol=0, atol=0.1)
    assert problem.draw(5, torch.Generator().manual_seed(0)).dtype == problem.data.dtype
    given_too = FlowProblem("gauss", mixture=mixture(), velocity=lambda x, t: x)
    assert not given_too.is_exact
    with pytest.raises(ValueError, match="needs data, or a mixture"):
        FlowProblem("nothing")


def test_a_velocity_is_trained_on_the_data_once_and_generates_them(quickly, capsys):
    data = torch.from_numpy(np.random.default_rng(0).normal(size=(500, 2)) * 0.3 + [1.0, -1.0]).float()
    problem = FlowProblem("blob", data)
    assert problem.needs_training
    x = problem.noise(1000, torch.Generator().manual_seed(1))
    made = sample(problem.velocity, x, steps=20).x
    torch.testing.assert_close(made.mean(0), data.mean(0), rtol=0, atol=0.1)
    torch.testing.assert_close(made.std(0), data.std(0), rtol=0, atol=0.1)
    assert "training a small network once" in capsys.readouterr().err
    again = FlowProblem("blob", data)
    torch.testing.assert_close(sample(again.velocity, x, steps=20).x, made)
    assert "training" not in capsys.readouterr().err


def test_images_with_labels_are_trained_on_too_and_odd_ones_refused(quickly):
    images = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    problem = FlowProblem("noise", images, labels=torch.arange(12) % 3)
    assert problem.velocity(images[:2], 0.5, torch.tensor([0, 1])).shape == (2, 1, 8, 8)
    with pytest.raises(ValueError, match="images of 8 x 7; a network is trained on square ones"):
        _ = FlowProblem("odd", images[..., :7]).velocity


def test_importing_the_room_is_cheap():
    code = "import sys, cameraready.flows; assert not {'torch', 'diffusers', 'polars'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_example_of_a_problem_is_true():
    found = doctest.testmod(_problem)
    assert found.attempted > 0
    assert found.failed == 0


def test_everything_a_user_needs_is_there():
    import cameraready.flows as room

    for name in room.__all__:
        assert getattr(room, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'Flow'"):
        _ = room.Flow
