"""What every trainer of the room keeps to in TRL, at its oldest and its newest supported version; a new method's cases are picked up by themselves.

The file is run a second time, in a process of its own, under the oldest TRL (`old_trl`).
"""

import ast
import importlib
import inspect
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("trl")

import torch
from safetensors.torch import load_file

from cameraready.catalog import catalog
from cameraready.models import tiny_model, tiny_tokenizer
from cameraready.posttraining import _trl
from tests.posttraining import old_trl
from tests.posttraining.training import config, dataset, furthest, letters, train, trls_own

pytestmark = pytest.mark.torch

TOLERANCE = 1e-6
HERE = Path(__file__).parent
MODULES = {
    path.stem.removesuffix("_cases"): importlib.import_module(f"tests.posttraining.{path.stem}")
    for path in sorted(HERE.glob("*_cases.py"))
    if path.stem != "trainer_cases"
}
CASES = [(folder, case) for folder, module in MODULES.items() for case in module.CASES]
every_case = pytest.mark.parametrize(
    ("folder", "case"),
    [
        pytest.param(folder, case, id=f"{folder}-{case.name}", marks=pytest.mark.xdist_group(f"trl-{folder}"))
        for folder, case in CASES
    ],
)
METHODS = {card.module.rsplit(".", 1)[1]: card.module for card in catalog() if card.room == "posttraining"}


def test_every_method_has_cases():
    assert {*METHODS} <= {*MODULES}


@every_case
def test_off_is_trls_own(folder, case):
    """Losses and weights after three steps, two of them on one batch of completions."""
    own, off = _own(case), _off(folder, case)
    assert len(own.losses) == 3
    assert off.losses == pytest.approx(own.losses, abs=TOLERANCE)
    assert furthest(off.weights, own.weights) <= TOLERANCE


@every_case
def test_on_trains(folder, case, tmp_path):
    """Three finite losses; and what `off` leaves out makes a difference."""
    on = train(case.make, _args(case, tmp_path, 3), case.host)
    assert len(on.losses) == 3
    assert all(torch.isfinite(weight).all() for weight in on.weights.values())
    assert torch.isfinite(torch.tensor(on.losses)).all()
    assert (furthest(on.weights, _off(folder, case).weights) > TOLERANCE) == case.differs


@every_case
def test_a_resumed_run_ends_like_an_uninterrupted_one(folder, case, tmp_path):
    """Broken off after the second of four steps: weights, losses and what the method remembers."""
    whole = train(case.make, _args(case, tmp_path, 4), case.host)
    resumed = train(case.make, _args(case, tmp_path, 4), case.host, resume=str(tmp_path / "checkpoint-2"))
    assert resumed.losses == pytest.approx(whole.losses, abs=TOLERANCE)
    assert furthest(resumed.weights, whole.weights) <= TOLERANCE
    half = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    moved = max(
        float((weight - whole.weights[name]).abs().max()) for name, weight in half.items() if name in whole.weights
    )
    assert moved > TOLERANCE, "the last two steps changed nothing"
    if case.state is not None:
        same_state(case.state(resumed.trainer), case.state(whole.trainer))


@every_case
def test_only_public_hooks_are_overridden(folder, case, tmp_path):
    trainer = case.make(*_arguments(case, tmp_path))
    private = private_names(trls_own(*_arguments(case, tmp_path)))
    assert overridden(type(trainer), private) == []
    assert {*vars(trainer)} & {name for name in private if callable(getattr(type(trainer), name, None))} == set()


@pytest.mark.parametrize("folder", MODULES)
def test_no_private_name_of_trl_is_used(folder, tmp_path):
    private = set()
    for case in MODULES[folder].CASES:
        private |= private_names(trls_own(*_arguments(case, tmp_path)))
    package = importlib.import_module(f"cameraready.posttraining.{folder}")
    sources = sorted(Path(package.__file__).parent.rglob("*.py"))
    assert sources
    found = [use for path in sources for use in private_uses(path.read_text(encoding="utf-8"), private)]
    assert found == []


def test_the_checks_find_what_they_look_for(tmp_path):
    """A trainer that overrides and a source that calls what is private are caught, each way of it."""
    import trl

    class Sly(trl.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs)

        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

        def _own(self):
            return None

    private = {"_compute_loss", "_metrics"}
    assert overridden(Sly, private) == ["Sly._compute_loss"]
    assert overridden(trl.GRPOTrainer, private) == []
    source = (
        "def f(t, x):\n    t._metrics['a'] = 1\n    getattr(t, '_compute_loss')(x)\n    t._mine = t.compute_loss(x)\n"
    )
    assert private_uses(source, private) == ["line 2: _metrics", "line 3: _compute_loss"]
    assert private_uses("from trl.trainer import _base\nimport trl.x._y\n", private) == [
        "line 1: trl.trainer._base",
        "line 2: trl.x._y",
    ]
    assert private_uses("class A:\n    def _compute_loss(self): ...\n", private) == ["line 2: _compute_loss"]


# --- the door to TRL -------------------------------------------------------------------------------------------------


def test_the_room_is_imported_without_trl():
    """Every method's component, in an interpreter in which TRL, PEFT and datasets cannot be imported."""
    code = (
        "import importlib, sys\n"
        "for name in ('trl', 'peft', 'datasets'): sys.modules[name] = None\n"
        f"for module in {sorted(METHODS.values())!r}: importlib.import_module(module)\n"
        "from cameraready.posttraining import _runs, _workload\n"
        "try: _runs.recipe('3B', '.')\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == 'Training needs TRL: pip install "cameraready[posttraining]"'


def test_what_trl_needs_itself_is_named(monkeypatch):
    def lacking(name):
        raise ModuleNotFoundError("No module named 'accelerate'", name="accelerate.utils")

    monkeypatch.setattr(_trl, "import_module", lacking)
    with pytest.raises(ImportError, match=r"TRL needs accelerate.utils, which is not installed: pip install"):
        _trl.import_trl()


@pytest.mark.parametrize("version", ["0.29.1", "0.9", "0.99.9.dev0"])
def test_an_old_trl_is_refused(version):
    with pytest.raises(
        ImportError, match=rf'TRL {version} is installed.*need 1\.0\.0 or newer.*pip install -U "trl>=1\.0\.0"'
    ):
        _trl.check_version(version)


@pytest.mark.parametrize("version", ["1.0.0", "1.0", "1.16.0", "1.17.0.dev0", "2.0", "10.1.2+local"])
def test_later_ones_pass(version):
    assert _trl.check_version(version) is None


# --- what the trainers rely on in TRL --------------------------------------------------------------------------------


def test_trl_is_the_version_that_is_meant():
    trl = _trl.import_trl()
    wanted = os.environ.get(old_trl.MARK)
    if wanted:
        assert trl.__version__ == wanted == _trl.OLDEST
        assert Path(trl.__file__).is_relative_to(os.environ["PYTHONPATH"].split(os.pathsep)[0])
    else:
        assert _trl.check_version(trl.__version__) is None


def test_the_clip_range_may_be_tensors(tmp_path):
    """Public `compute_loss` with tensors in `epsilon_low` and `epsilon_high`: constant ones are TRL's own clip, others clip each token by itself."""
    import trl

    class Tensors(trl.GRPOTrainer):
        width = 1.0

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            kept = self.epsilon_low, self.epsilon_high
            shape = inputs["completion_ids"].shape
            self.epsilon_low, self.epsilon_high = (torch.full(shape, self.width * each) for each in kept)
            try:
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            finally:
                self.epsilon_low, self.epsilon_high = kept

    class Wide(Tensors):
        width = 3.0

    own = train(trls_own, config("grpo", tmp_path, 3))
    same, wide = (train(_made(each), config("grpo", tmp_path, 3)) for each in (Tensors, Wide))
    assert max(entry.get("clip_ratio/region_mean", 0.0) for entry in own.log) > 0.05, "nothing was clipped"
    assert furthest(own.weights, same.weights) == 0.0
    assert furthest(own.weights, wide.weights) > 1e-4


def test_advantages_may_be_per_token(tmp_path):
    """`inputs["advantages"]` of shape (B, T): those that repeat a completion's are TRL's own."""
    import trl

    class PerToken(trl.GRPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            advantages = inputs["advantages"]
            assert advantages.ndim == 1
            spread = advantages[:, None].expand(inputs["completion_ids"].shape)
            return super().compute_loss(model, {**inputs, "advantages": spread}, return_outputs, num_items_in_batch)

    own, spread = (train(_made(each), config("grpo", tmp_path, 3)) for each in (trl.GRPOTrainer, PerToken))
    assert spread.losses == own.losses
    assert furthest(own.weights, spread.weights) == 0.0


def test_inputs_of_a_loss_are_what_the_trainers_read(tmp_path):
    """Names and shapes of what `compute_loss` is given, old log-probabilities on the second step of a batch among them."""
    import trl

    seen = []

    class Looking(trl.GRPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            seen.append({name: tuple(value.shape) for name, value in inputs.items() if torch.is_tensor(value)})
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    train(_made(Looking), config("grpo", tmp_path, 2))
    assert len(seen) == 4  # two steps of two micro-batches
    for shapes in seen:
        rows, length = shapes["completion_ids"]
        assert rows == 4
        assert shapes["completion_mask"] == shapes["old_per_token_logps"] == (rows, length)
        assert shapes["prompt_ids"] == shapes["prompt_mask"]
        assert shapes["advantages"] == (rows,)


def test_trls_own_resumes_exactly(tmp_path):
    """What the test of resumed runs rests on, for both trainers."""
    for host in ("grpo", "sft"):
        folder = tmp_path / host
        whole = train(trls_own, config(host, folder, 4), host)
        resumed = train(trls_own, config(host, folder, 4), host, resume=str(folder / "checkpoint-2"))
        assert furthest(whole.weights, resumed.weights) == 0.0
        assert whole.losses == resumed.losses


def test_a_loss_function_of_ones_own_is_asked_by_the_sft_trainer(tmp_path):
    """`compute_loss_func(outputs, labels, num_items_in_batch)`: the negative log-likelihood written out is TRL's ``nll``."""
    import trl

    counts = []

    def nll(outputs, labels, num_items_in_batch=None):
        counts.append(num_items_in_batch)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
        return total / num_items_in_batch

    def with_function(model, tokenizer, args, data, _):
        return trl.SFTTrainer(
            model=model, processing_class=tokenizer, args=args, train_dataset=data, compute_loss_func=nll
        )

    own = train(trls_own, config("sft", tmp_path, 3, loss_type="nll"), "sft")
    written = train(with_function, config("sft", tmp_path, 3), "sft")
    assert len(counts) == 5  # twelve rows are three micro-batches: two steps of two, and between them one of one
    assert all(count is not None for count in counts)
    assert written.losses == pytest.approx(own.losses, abs=TOLERANCE)
    assert furthest(own.weights, written.weights) <= TOLERANCE


@pytest.mark.skipif(bool(os.environ.get(old_trl.MARK)), reason="this is the run under the oldest TRL")
def test_all_of_this_holds_under_the_oldest_trl(oldest_trl):
    outcome = old_trl.run_under(oldest_trl, Path(__file__))
    assert outcome.failures == []
    assert outcome.passed >= 8 + 4 * len(CASES)


@pytest.fixture(scope="session")
def oldest_trl(request, tmp_path_factory):
    """A folder with TRL's oldest supported release, from the package registry; kept between runs."""
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir("trl") if cache is not None else tmp_path_factory.getbasetemp().parent / "trl"
    return old_trl.folder_or_skip(Path(folder), _trl.OLDEST)


# --- how it is looked for --------------------------------------------------------------------------------------------


def private_names(trainer) -> set[str]:
    """Names with one underscore that TRL's and transformers' trainer classes define or set on their instances."""
    found = {*vars(trainer)}
    for cls in type(trainer).__mro__:
        if cls.__module__.partition(".")[0] in ("trl", "transformers"):
            found |= {*vars(cls)}
            source = ast.parse(inspect.getsource(inspect.getmodule(cls)))
            found |= {
                node.attr
                for node in ast.walk(source)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
            }
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def overridden(cls, private) -> list[str]:
    """Private names that `cls` and its bases outside of TRL and transformers define anew."""
    ours = [
        base for base in cls.__mro__ if base.__module__.partition(".")[0] not in ("trl", "transformers", "builtins")
    ]
    return [f"{base.__name__}.{name}" for base in ours for name in vars(base) if name in private]


def private_uses(source: str, private: set[str]) -> list[str]:
    """Where a source reads, sets, calls, names or imports something private of TRL."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        hits = [name for name in names if name in private]
        if isinstance(node, ast.Import | ast.ImportFrom):
            stem = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            paths = [stem + alias.name for alias in node.names]
            hits = [path for path in paths if path.partition(".")[0] == "trl" and "._" in path]
        found += [(node.lineno, hit) for hit in hits]
    return [f"line {line}: {name}" for line, name in sorted(found)]


def same_state(first, second, name="state"):
    """Two states are equal, tensors to 1e-6, whatever they are nested in."""
    assert type(first) is type(second), name
    if isinstance(first, dict):
        assert first.keys() == second.keys(), name
        for key in first:
            same_state(first[key], second[key], f"{name}[{key!r}]")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), name
        for place, (a, b) in enumerate(zip(first, second, strict=True)):
            same_state(a, b, f"{name}[{place}]")
    elif torch.is_tensor(first):
        assert first.shape == second.shape, name
        assert torch.allclose(first.double(), second.double(), atol=TOLERANCE, rtol=0, equal_nan=True), name
    elif isinstance(first, float):
        assert first == pytest.approx(second, abs=TOLERANCE, nan_ok=True), name
    else:
        assert first == second, name


_trained = {}  # what several tests of a case compare with


def _own(case):
    """Three steps of TRL's own with the case's settings; cases with the same ones share it."""
    key = (case.host, repr(sorted(case.settings.items())), case.reference)
    if key not in _trained:
        with tempfile.TemporaryDirectory() as folder:
            args = config(case.host, folder, 3, **case.settings)
            _trained[key] = train(case.reference or trls_own, args, case.host)
    return _trained[key]


def _off(folder, case):
    """Three steps with the method off."""
    key = (folder, case.name)
    if key not in _trained:
        with tempfile.TemporaryDirectory() as where:
            _trained[key] = train(case.off, _args(case, where, 3), case.host)
    return _trained[key]


def _args(case, folder, steps):
    return config(case.host, folder, steps, made_by=case.config, **case.settings)


def _arguments(case, folder):
    rewards = [letters] if case.host == "grpo" else None
    return tiny_model("llama"), tiny_tokenizer(), _args(case, folder, 1), dataset(case.host), rewards


def _made(cls):
    def make(model, tokenizer, args, data, reward_funcs):
        return cls(model=model, processing_class=tokenizer, args=args, train_dataset=data, reward_funcs=reward_funcs)

    return make
