"""What the room's studies are tried on: testbeds, models with checkable problems, or a sentence that says what is wrong; and what it would cost."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from cameraready.evidence import Spec, SpecError
from cameraready.evidence.specs import parse, with_own
from cameraready.lm._workload import shipped_names
from cameraready.models import ModelError
from cameraready.posttraining._workload import (
    ACCEPTS,
    PosttrainingWorkload,
    check_trainable,
    cost,
    is_enumerable,
    linear_shapes,
    open_posttraining,
)

pytestmark = pytest.mark.torch


def shipped(name, **options):
    return Spec(name, "shipped", name, options=options)


def prompts_file(folder, *rows):
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def gym_or_skip():
    pytest.importorskip("reasoning_gym")


@pytest.fixture(scope="module")
def world():
    from cameraready.posttraining import _testbed

    return _testbed.arms(5, good=1)


# --- what opens ------------------------------------------------------------------------------------------------------


def test_shipped_names_open_as_themselves_or_as_what_they_stand_for(world):
    assert open_posttraining(shipped("arms"), ("arms", "formats")) == "arms"
    assert open_posttraining(shipped("arms"), {"arms": lambda: world}) is world
    for name in ("tiny-llama", "gemma-3-270m"):
        workload = open_posttraining(shipped(name), ("arms",))
        assert isinstance(workload, PosttrainingWorkload)
        assert workload.name == name


def test_a_world_of_ones_own_is_taken_as_it_is(world):
    assert is_enumerable(world)
    assert open_posttraining(Spec("mine", "value", "own").with_value(world)) is world
    assert not is_enumerable(SimpleNamespace(tokens=0, correct=1))


def test_an_object_is_imported_and_a_function_is_called(world, monkeypatch, tmp_path):
    (tmp_path / "my_worlds.py").write_text(
        "from cameraready.posttraining import _testbed\nworld = _testbed.arms(4, good=1)\n"
        "def made(): return _testbed.arms(3, good=1)\ndef pair(): return ('model', 'tokenizer')\n"
        "def broken(): raise KeyError('gone')\nnumber = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def opened(name):
        return open_posttraining(parse(f"my_worlds:{name}", shipped=shipped_names(), accepts=ACCEPTS))

    assert opened("world") is opened("world")
    assert opened("made").tokens.shape[0] == 3
    assert opened("pair").spec.value == ("model", "tokenizer")
    with pytest.raises(SpecError, match=r"my_worlds:broken\(\) raised KeyError: 'gone'"):
        opened("broken")
    with pytest.raises(SpecError, match="my_worlds:number is int; expected an EnumerableTask"):
        opened("number")


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        (shipped("tiny-lama"), "no workload 'tiny-lama'; did you mean tiny-llama"),
        (shipped("armz"), "no workload 'armz'; did you mean arms"),
        (shipped("zzz"), "no workload 'zzz'; there are arms, gemma-3-270m"),
        (Spec("rows.csv:y", "table", "rows.csv", "/rows.csv", "y"), "'rows.csv:y' is no language model but .* 'table'"),
        (Spec("x", "value", "own").with_value(3), r"give an EnumerableTask .* \(model, tokenizer\), not int"),
        (shipped("tiny-llama", tasks="arithmetics"), "no task 'arithmetics'; did you mean arithmetic"),
        (shipped("tiny-llama", tasks="lm-eval:arc_easy"), "lm-eval:arc_easy is an evaluation; to train on there are"),
        (shipped("tiny-llama", tasks="passkey"), "passkey needs prompts of a fixed length; to train on there are"),
        (shipped("tiny-llama", tasks="own"), "'own' is your prompts; give them with --data"),
    ],
)
def test_what_cannot_be_opened_is_told_at_once(spec, complaint):
    with pytest.raises(SpecError, match=complaint):
        open_posttraining(spec, ("arms",))


def test_prompts_without_answers_are_refused(tmp_path):
    path = prompts_file(tmp_path, {"prompt": "1 + 1", "answer": "2"}, {"prompt": "1 + 2", "answer": "3"})
    with pytest.raises(SpecError, match="prompt 1 has no answer, and a reward is a check of the answer"):
        open_posttraining(with_own(shipped("tiny-llama"), data=f"{path}:prompt"))
    workload = open_posttraining(with_own(shipped("tiny-llama"), data=f"{path}:prompt,answer"))
    assert workload.prompts == [("1 + 1", "2"), ("1 + 2", "3")]
    assert workload.tasks == ("own",)


def test_a_world_takes_no_prompts_and_no_tasks(world):
    for option in ("data", "tasks"):
        spec = Spec("mine", "value", "own", options={option: "x"}).with_value(world)
        with pytest.raises(SpecError, match=f"--{option} goes with a language model"):
            open_posttraining(spec)


def test_sets_of_reasoning_gym_are_looked_up_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(SpecError, match=r'pip install "cameraready\[lm-tasks\]"'):
        check_trainable("reasoning_gym:chain_sum")


def test_an_unknown_set_of_reasoning_gym_is_named():
    gym_or_skip()
    check_trainable("reasoning_gym:chain_sum")
    with pytest.raises(SpecError, match="no data set 'chain_sums'; did you mean chain_sum"):
        check_trainable("reasoning_gym:chain_sums")


def test_nothing_heavy_is_imported_to_open_a_workload():
    code = (
        "import sys; from cameraready.evidence.specs.spec import Spec\n"
        "from cameraready.posttraining._workload import open_posttraining\n"
        "import cameraready.posttraining._runs\n"
        "open_posttraining(Spec('tiny-llama', 'shipped', 'tiny-llama', options={'tasks': 'countdown'}))\n"
        "print([m for m in ('torch', 'transformers', 'trl', 'peft', 'datasets', 'reasoning_gym') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- problems --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lm():
    return open_posttraining(shipped("tiny-llama")).model()


@pytest.mark.parametrize(
    "tasks", [("arithmetic",), ("countdown", "subset_sum"), ("arithmetic", "countdown", "subset_sum")]
)
def test_problems_are_split_without_overlap_in_equal_shares(lm, tasks):
    workload = open_posttraining(with_own(shipped("tiny-llama"), tasks=tasks))
    train, test = workload.split(lm, train=7, test=5, seed=3)
    assert (len(train), len(test)) == (7, 5)
    assert {problem.prompt for problem in train}.isdisjoint(problem.prompt for problem in test)
    for part in (train, test):
        counts = [sum(problem.kind == task for problem in part) for task in tasks]
        assert max(counts) - min(counts) <= 1
        assert all(problem.check(problem.answer) for problem in part)
        assert [problem.kind for problem in part[: len(tasks)]] == list(tasks)  # mixed, not one after the other
    again = workload.split(lm, train=7, test=5, seed=3)
    assert [problem.prompt for problem in again[0]] == [problem.prompt for problem in train]
    other = workload.split(lm, train=7, test=5, seed=4)
    assert [problem.prompt for problem in other[0]] != [problem.prompt for problem in train]


def test_what_is_judged_by_does_not_depend_on_how_much_is_trained_on(lm):
    workload = open_posttraining(shipped("tiny-llama"))
    first, second = (workload.split(lm, train=n, test=4)[1] for n in (1, 30))
    assert [problem.prompt for problem in first] == [problem.prompt for problem in second]


def test_own_prompts_are_divided_by_the_seed(lm, tmp_path):
    rows = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(6)]
    path = prompts_file(tmp_path, *rows, rows[0])  # one stands there twice
    workload = open_posttraining(with_own(shipped("tiny-llama"), data=f"{path}:prompt,answer"))
    train, test = workload.split(lm, train=4, test=2, seed=0)
    assert {problem.prompt for problem in (*train, *test)} == {lm.prompt(row["prompt"]) for row in rows}
    divided = {tuple(problem.prompt for problem in workload.split(lm, train=4, test=2, seed=s)[1]) for s in range(8)}
    assert len(divided) > 2
    with pytest.raises(ValueError, match=r"own has 6 different problems, and 5 \+ 2 were asked for"):
        workload.split(lm, train=5, test=2)
    with pytest.raises(ValueError, match="train must be at least 1"):
        workload.split(lm, train=0, test=2)


def test_a_prompt_with_two_answers_is_refused(lm, tmp_path):
    path = prompts_file(tmp_path, {"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1=", "answer": "3"})
    workload = open_posttraining(with_own(shipped("tiny-llama"), data=f"{path}:prompt,answer"))
    with pytest.raises(ValueError, match="'1\\+1=' stands in the data with two answers, '2' and '3'"):
        workload.split(lm, train=1, test=0)


def test_a_task_of_ones_own_is_made_of_a_function():
    from cameraready.posttraining import EnumerableTask, enumerable_task

    task = enumerable_task("parity", [(1, 0), (2, 0)], lambda prompt, answer: answer[0] == 1 + prompt % 2, [0, 1, 2])
    assert isinstance(task, EnumerableTask)
    assert task.correct.tolist() == [[True, False], [False, True], [True, False]]
    assert open_posttraining(Spec("parity", "value", "parity", value=task)) is task


def test_small_worlds_are_drawn_from_until_there_are_enough(lm):
    """A world of 30 different problems gives all of them; asked for more, it says how many there are."""
    from cameraready.lm._problems import Problem

    workload = open_posttraining(shipped("tiny-llama"))

    def few(task, lm, *, n, seed=0, length=0):
        return [Problem(f"What is {i * i % 59}?", str(i), bool, task) for i in range(n)]

    workload.problems = few
    train, test = workload.split(lm, train=20, test=10)
    assert len({problem.prompt for problem in (*train, *test)}) == 30
    with pytest.raises(ValueError, match="arithmetic has 30 different problems"):
        workload.split(lm, train=25, test=10)


def test_problems_of_reasoning_gym(lm):
    gym_or_skip()
    workload = open_posttraining(with_own(shipped("tiny-llama"), tasks=["reasoning_gym:chain_sum"]))
    train, test = workload.split(lm, train=3, test=2)
    assert all(problem.check(problem.answer) and not problem.check("-1.5") for problem in (*train, *test))


# --- cost ------------------------------------------------------------------------------------------------------------

RUN = {"steps": 10, "prompts": 2, "group": 4, "prompt_tokens": 20, "new_tokens": 10}


def test_adapters_are_counted_as_peft_makes_them():
    peft = pytest.importorskip("peft")
    from cameraready.models import tiny_model

    for kind in ("llama", "gpt2", "gemma3", "phi3"):
        model = tiny_model(kind)
        expected = 5 * sum(a + b for a, b in linear_shapes(model.config))
        wrapped = peft.get_peft_model(
            model,
            peft.LoraConfig(r=5, target_modules="all-linear", task_type="CAUSAL_LM", fan_in_fan_out=kind == "gpt2"),
        )
        assert wrapped.get_nb_trainable_parameters()[0] == expected, kind


def test_optimizer_states_are_those_of_adamw():
    """Weights, gradients and moments of the whole model against those that PyTorch makes; what is left is one copy and activations."""
    import torch

    from cameraready.models import tiny_model

    model = tiny_model("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    held = sum(p.nbytes + p.grad.nbytes for p in model.parameters())
    held += sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.ndim)
    weights = sum(p.nbytes for p in model.parameters())
    full = cost(shipped("tiny-llama"), **RUN).memory_gib
    adapters = cost(shipped("tiny-llama"), **RUN, lora_rank=1).memory_gib
    rank_one = 16 * sum(a + b for a, b in linear_shapes(tiny_model("llama", max_positions=4096).config))
    assert (full - adapters) * 2**30 == pytest.approx(held - rank_one, rel=1e-6)
    assert held == 4 * weights


def test_activations_are_of_the_size_that_autograd_keeps():
    """The estimate against the bytes that a forward pass really saves for the backward pass: within a factor of two."""
    import torch

    from cameraready.models import tiny_model

    model = tiny_model("llama", max_positions=4096, n_layers=2)
    ids = torch.arange(8 * 30).reshape(8, 30) % 250
    seen, weights = {}, {p.data_ptr() for p in model.parameters()}

    def keep(tensor):
        if tensor.data_ptr() not in weights:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(ids, logits_to_keep=10).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -10:].flatten())
    saved = sum(seen.values())
    whole, none = (cost(shipped("tiny-llama"), **{**RUN, "micro_batch": m}).memory_gib * 2**30 for m in (8, 4))
    told = 2 * (whole - none)  # activations grow with the micro-batch, and nothing else does
    assert 0.5 < told / saved < 2.0


def test_hours_add_up():
    def hours(**changes):
        return cost(shipped("tiny-qwen3"), **{**RUN, **changes}).hours

    base = hours()
    assert hours(steps=20) == pytest.approx(2 * base)
    assert hours(runs=3) == pytest.approx(3 * base)
    assert hours(lora_rank=4) < base < hours(checkpointing=True)
    assert hours(reference=True) > base
    # Two steps on each batch: half of the sampling, all of the training, and a pass for the old log-probabilities.
    sampled_twice, sampled_once = hours(), hours(iterations=2)
    assert sampled_once < sampled_twice + 0.5 * base
    assert hours(group=8) == pytest.approx(2 * base, rel=0.35)


def test_memory_falls_with_the_micro_batch_and_checkpointing():
    def memory(**changes):
        return cost(shipped("tiny-llama"), **{**RUN, **changes}).memory_gib

    assert memory(micro_batch=1) < memory(micro_batch=4) < memory() == memory(micro_batch=8)
    assert memory(checkpointing=True) < memory()
    assert memory(lora_rank=2) < memory()


def test_what_was_assumed_is_told():
    told = " ".join(cost(shipped("tiny-llama"), **RUN, lora_rank=2, runs=3).notes)
    for part in (
        "adapters of rank 2",
        "10 steps of 2 prompts with 4 completions of 10 tokens",
        "3 runs",
        "this machine",
    ):
        assert part in told


def test_the_cost_of_a_world_is_not_told_in_hours(world):
    found = cost(Spec("mine", "value", "own").with_value(world), steps=5)
    assert found.hours is None
    assert "not known before it is opened" in found.notes[0]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [({"steps": 0}, "steps=0"), ({"group": 1.5}, r"group=1\.5"), ({"lora_rank": -1}, "lora_rank=-1")],
)
def test_numbers_out_of_range_are_named(changes, complaint):
    with pytest.raises(ModelError, match=f"{complaint} must be a whole number"):
        cost(shipped("tiny-llama"), **{**RUN, **changes})


def test_a_folder_is_reckoned_by_its_configuration_alone(tmp_path):
    from cameraready.models import tiny_model

    tiny_model("qwen3", seed=3).config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    spec = Spec(str(tmp_path), "checkpoint", tmp_path.name, str(tmp_path))
    found = cost(spec, **RUN)
    assert found.hours == pytest.approx(
        cost(Spec("x", "value", "own").with_value((tiny_model("qwen3"), None)), **RUN).hours
    )
