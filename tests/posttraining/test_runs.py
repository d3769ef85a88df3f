"""Runs on a real model: rows say what happened, the given model is left alone, a broken-off run ends like an uninterrupted one."""

import inspect
import math
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

pytest.importorskip("trl")

import torch

from cameraready.lm import _tasks
from cameraready.lm._problems import Problem
from cameraready.models import LanguageModel, tiny_model, tiny_tokenizer
from cameraready.posttraining import _runs
from cameraready.posttraining._record import described
from cameraready.posttraining._runs import RECIPES, demonstration, grpo_run, recipe

pytestmark = pytest.mark.torch

SHORT = {
    "steps": 4,
    "prompts": 2,
    "group": 4,
    "max_new_tokens": 8,
    "iterations": 2,
    "micro_batch": 4,
    "learning_rate": 0.01,
}
#: What a clock and the process say, which no seed decides.
MEASURED = ("seconds", "peak_mb")


def letters(completions, **_columns):
    """1 where a third of the text is letters, which a random model writes about half of the time."""
    return [float(3 * sum(map(str.isalpha, text)) > len(text)) for text in completions]


@pytest.fixture
def lm():
    return LanguageModel(tiny_model("llama"), tiny_tokenizer(), "tiny", "value")


@pytest.fixture(scope="module")
def problems():
    return _tasks.arithmetic(n=12)


def decided(rows):
    return [{name: value for name, value in row.items() if name not in MEASURED} for row in rows]


# --- rows ------------------------------------------------------------------------------------------------------------


def test_rows_are_those_of_trls_own_trainer(lm, problems, tmp_path):
    """The run is no other than the one a user would write: same losses, entropies and clip fractions, step by step."""
    import trl
    from datasets import Dataset

    rows = grpo_run(lm, problems, reward_funcs=[letters], **SHORT)
    args = trl.GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        num_iterations=2,
        max_completion_length=8,
        temperature=1.0,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        max_steps=4,
        seed=0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    data = Dataset.from_dict({"prompt": [problem.prompt for problem in problems]})
    own = trl.GRPOTrainer(
        model=tiny_model("llama"),
        processing_class=tiny_tokenizer(),
        args=args,
        train_dataset=data,
        reward_funcs=letters,
    )
    own.train()
    logged = [entry for entry in own.state.log_history if "loss" in entry]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row, entry in zip(rows, logged, strict=True):
        assert row["loss"] == entry["loss"]
        assert row["grad_norm"] == entry["grad_norm"]
        assert row["entropy"] == entry["entropy"]
        assert (row["clip_low"], row["clip_high"]) == (entry["clip_ratio/low_mean"], entry["clip_ratio/high_mean"])
        if "reward" in entry:  # only on the steps that sampled
            assert row["reward"] == pytest.approx(entry["reward"])
            assert row["zero_spread"] == pytest.approx(entry["frac_reward_zero_std"])
            assert row["tokens"] == entry["completions/mean_length"]
    assert rows[0]["reward"] == rows[1]["reward"]
    assert max(row["clip_low"] + row["clip_high"] for row in rows) > 0.05


def test_divergence_and_entropy_against_the_exact_ones(lm):
    """One token a completion, where both are sums over the vocabulary; the estimate of the first within four standard errors."""
    problems = [Problem(prompt, "", bool, "own") for prompt in ("one", "three")]
    trained = {}

    def keep(after):
        trained["model"] = after.model
        return {"kept": 1}

    rows = grpo_run(
        lm,
        problems,
        steps=1,
        prompts=2,
        group=128,
        max_new_tokens=1,
        learning_rate=3e-4,
        reward_funcs=[letters],
        after=keep,
    )
    divergences, variances, entropies = [], [], []
    for problem in problems:
        ids = lm.encode(problem.prompt)
        with torch.no_grad():
            old, new = (model(ids).logits[0, -1].double().log_softmax(-1) for model in (lm.model, trained["model"]))
        change = new - old
        samples = change.expm1() - change
        divergences.append(float((old.exp() * samples).sum()))
        variances.append(float((old.exp() * samples**2).sum()) - divergences[-1] ** 2)
        entropies.append(float(-(old.exp() * old).sum()))
        assert divergences[-1] == pytest.approx(float((old.exp() * (old - new)).sum()), abs=1e-9)
    error = math.sqrt(np.mean(variances) / 256)
    assert np.mean(divergences) > 4 * error, "the test could not tell the divergence from nothing"
    assert rows[0]["kl"] == pytest.approx(np.mean(divergences), abs=4 * error)
    # TRL takes the entropy of the policy at each sampled place; here places of one prompt are the same one.
    assert rows[0]["entropy"] == pytest.approx(np.mean(entropies), abs=1e-4)
    assert rows[0]["kept"] == 1


def test_nothing_is_spent_by_steps_of_no_length(lm, problems):
    rows = grpo_run(lm, problems, reward_funcs=[letters], **{**SHORT, "learning_rate": 0.0})
    assert [row["kl"] for row in rows] == pytest.approx([0.0] * 4, abs=1e-9)
    assert [row["clip_low"] + row["clip_high"] for row in rows] == [0.0] * 4
    assert max(row["grad_norm"] for row in rows) > 0


@pytest.mark.parametrize(("value", "all_right", "all_wrong"), [(1.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.5, 0.0, 0.0)])
def test_equal_rewards_teach_nothing(lm, problems, value, all_right, all_wrong):
    rows = grpo_run(lm, problems, reward_funcs=[lambda completions, **_: [value] * len(completions)], **SHORT)
    for row in rows:
        assert (row["reward"], row["reward_std"], row["grad_norm"], row["kl"]) == (value, 0.0, 0.0, 0.0)
        assert (row["all_right"], row["all_wrong"], row["zero_spread"]) == (all_right, all_wrong, 1.0)


def test_groups_are_told_apart_by_their_prompts(lm):
    """One prompt is always right, the other never: half of the groups each."""
    problems = [Problem("easy", "", lambda text: True, "own"), Problem("hard", "", lambda text: False, "own")]
    rows = grpo_run(lm, problems, **{**SHORT, "steps": 2})
    assert rows[0]["reward"] == 0.5
    assert (rows[0]["all_right"], rows[0]["all_wrong"], rows[0]["zero_spread"]) == (0.5, 0.5, 1.0)
    assert rows[0]["reward_std"] == 0.5


def test_rewards_add_up_by_their_weights_and_missing_ones_count_nothing(lm, problems):
    def first(completions, **_columns):
        return [1.0, None] * (len(completions) // 2)

    def second(completions, **_columns):
        return [2.0] * len(completions)

    rows = grpo_run(
        lm,
        problems,
        reward_funcs=[first, second],
        settings={"reward_weights": [1.0, 0.5]},
        **{**SHORT, "steps": 1, "iterations": 1},
    )
    assert rows[0]["reward"] == 1.5
    assert rows[0]["reward_std"] == 0.5


def test_the_problems_own_checks_are_the_default_reward(lm):
    problems = [Problem(prompt, "", lambda text: len(text) % 2 == 0, "own") for prompt in "abcd"]
    ours = grpo_run(lm, problems, **SHORT)
    same = grpo_run(
        lm, problems, reward_funcs=[lambda completions, **_: [float(len(t) % 2 == 0) for t in completions]], **SHORT
    )
    assert decided(ours) == decided(same)
    assert 0 < ours[0]["reward"] < 1


# --- what is left as it was, and what can be changed -----------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 4])
def test_the_given_model_and_the_random_states_are_left_alone(lm, problems, rank):
    before = {name: tensor.clone() for name, tensor in lm.model.state_dict().items()}
    tokenizer = lm.tokenizer.pad_token
    torch.manual_seed(5), random.seed(5), np.random.seed(5)  # noqa: NPY002
    expected = torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
    torch.manual_seed(5), random.seed(5), np.random.seed(5)  # noqa: NPY002
    grpo_run(lm, problems, reward_funcs=[letters], lora_rank=rank, **{**SHORT, "steps": 2})
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]  # noqa: NPY002
    assert all(torch.equal(tensor, before[name]) for name, tensor in lm.model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in lm.model.parameters())
    assert not lm.model.training
    assert lm.tokenizer.pad_token == tokenizer


def test_adapters_share_the_frozen_weights(lm, problems):
    places = {parameter.data_ptr() for parameter in lm.model.parameters()}
    seen = {}

    def look(after):
        seen.update({name: (p.data_ptr(), p.requires_grad) for name, p in after.model.named_parameters()})
        return {}

    rows = grpo_run(lm, problems, reward_funcs=[letters], lora_rank=4, beta=0.1, after=look, **SHORT)
    trained = {name for name, (_, trains) in seen.items() if trains}
    assert trained
    assert all("lora_" in name for name in trained)
    assert {place for name, (place, _) in seen.items() if "lora_" not in name} == places
    assert rows[0]["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert rows[1]["kl_reference"] > 1e-4


def test_a_trainer_of_ones_own_is_what_trains(lm, problems):
    import trl

    asked = []

    class Silent(trl.GRPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return 0.0 * super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def make(model, tokenizer, args, dataset, reward_funcs):
        asked.append((type(args).__name__, dataset.column_names, len(reward_funcs)))
        return Silent(
            model=model, processing_class=tokenizer, args=args, train_dataset=dataset, reward_funcs=reward_funcs
        )

    rows = grpo_run(lm, problems, trainer=make, reward_funcs=[letters], **SHORT)
    assert asked == [("GRPOConfig", ["prompt", "problem"], 1)]
    assert [row["grad_norm"] for row in rows] == [0.0] * 4
    assert rows[0]["reward_std"] > 0


def test_a_trainer_with_rollouts_of_its_own_is_told_by_its_log(lm, problems):
    """Attempts are judged one by one, so that groups and sampled tokens are not seen; what TRL logs is."""
    from cameraready.posttraining.cal_grpo import MultiAttemptGRPOTrainer

    seen = []

    def make(model, tokenizer, args, dataset, reward_funcs):
        made = MultiAttemptGRPOTrainer(
            model, reward_funcs[0], args, dataset, processing_class=tokenizer, attempts=2, max_attempt_length=4
        )
        seen.append(made)
        return made

    rows = grpo_run(lm, problems, trainer=make, reward_funcs=[letters], **SHORT)
    entries = [entry for entry in seen[0].state.log_history if "loss" in entry]
    assert [row["loss"] for row in rows] == [entry["loss"] for entry in entries]
    for row, sampled in zip(rows, (0, 0, 2, 2), strict=True):
        assert row["reward"] == entries[sampled]["reward"]
        assert row["zero_spread"] == entries[sampled]["frac_reward_zero_std"]
        assert row["kl"] is row["all_right"] is row["all_wrong"] is None


def test_equal_seeds_make_equal_runs_and_others_do_not(lm, problems):
    first, second, third = (
        decided(grpo_run(lm, problems, reward_funcs=[letters], seed=seed, **SHORT)) for seed in (1, 1, 2)
    )
    assert first == second
    assert first != third


# --- broken off and taken up -----------------------------------------------------------------------------------------


class Stopped(Exception):
    pass


@pytest.mark.parametrize(("rank", "last"), [(0, 1), (0, 3), (0, 4), (4, 3)])
def test_a_run_that_was_broken_off_ends_like_one_that_was_not(lm, problems, tmp_path, rank, last):
    """Stopped after the first step, between checkpoints, and after the last step before the end was written down."""
    options = {"reward_funcs": [letters], "lora_rank": rank, **SHORT}
    whole = grpo_run(lm, problems, **options)

    def stop(row):
        if row["step"] == last:
            raise Stopped

    with pytest.raises(Stopped):
        grpo_run(lm, problems, folder=tmp_path, save_every=2, each=stop, **options)
    came = []
    again = grpo_run(lm, problems, folder=tmp_path, save_every=2, each=lambda row: came.append(row["step"]), **options)
    assert decided(again) == decided(whole)
    assert came == ([1, 2, 3, 4] if last == 1 else [3, 4])
    assert grpo_run(lm, problems, folder=tmp_path, save_every=2, each=came.append, **options) == again
    assert len(came) in (2, 4), "a complete run is read, not run again"


def test_a_folder_of_another_run_is_refused(lm, problems, tmp_path):
    options = {"reward_funcs": [letters], **SHORT, "steps": 2}
    grpo_run(lm, problems, folder=tmp_path, **options)
    with pytest.raises(ValueError, match="holds a run with other settings"):
        grpo_run(lm, problems, folder=tmp_path, seed=9, **options)
    with pytest.raises(ValueError, match="holds a run with other settings"):
        grpo_run(lm, problems[1:], folder=tmp_path, **options)


def closed_over(share):
    def trainer(*arguments):
        return share, arguments

    return trainer


def test_what_makes_another_run_is_answers_checks_rewards_trainers_and_weights(lm, problems, tmp_path):
    options = {**SHORT, "steps": 2}
    grpo_run(lm, problems, folder=tmp_path / "a", **options)
    other = LanguageModel(tiny_model("llama", seed=7), lm.tokenizer, lm.name, "value")
    for model, changed, more in [
        (lm, [replace(problem, answer="x") for problem in problems], {}),
        (lm, [replace(problem, check=lambda text: True) for problem in problems], {}),
        (lm, problems, {"reward_funcs": [letters]}),
        (lm, problems, {"trainer": closed_over(0.1)}),
        (lm, problems, {"after": lambda trained: {}}),
        (other, problems, {}),
    ]:
        with pytest.raises(ValueError, match="holds a run with other settings"):
            grpo_run(model, changed, folder=tmp_path / "a", **options, **more)
    assert described(closed_over(0.1)) != described(closed_over(0.2))
    assert described(partial(closed_over, 1)) != described(partial(closed_over, 2))
    assert described(closed_over(0.1)) == described(closed_over(0.1))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file; a run needs a folder"):
        grpo_run(lm, problems, folder=tmp_path / "file", **options)


# --- misuse ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"steps": 0}, "steps must be a whole number, at least 1, got 0"),
        ({"group": 1}, "at least 2, got 1; one completion has none to be compared with"),
        ({"prompts": 2.0}, "prompts must be a whole number"),
        ({"prompts": 13}, "a step has 13 prompts, and there are 12 problems"),
        ({"micro_batch": 3}, "micro_batch must divide the 8 completions of a step, got 3"),
        ({"save_every": 3}, "multiple of the 2 iterations, got 3"),
        ({"beta": 0.1}, "beta needs adapters"),
        ({"max_new_tokens": 5000}, "do not fit the 1024 tokens of tiny"),
    ],
)
def test_misuse_is_explained_before_any_work(lm, problems, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        grpo_run(lm, problems, reward_funcs=[letters], **{**SHORT, **options})


def test_asynchronous_rewards_are_refused(lm, problems):
    async def later(completions, **_columns):
        return [0.0] * len(completions)

    assert inspect.iscoroutinefunction(later)
    with pytest.raises(TypeError, match="must be plain functions"):
        grpo_run(lm, problems, reward_funcs=[later], **SHORT)


def test_the_beginning_is_written_once(lm):
    """A template that writes the begin token itself, under a tokenizer that adds one."""
    assert _runs._begun_once("<|bos|>abc", lm.tokenizer) == "abc"
    assert _runs._begun_once("abc", lm.tokenizer) == "abc"
    assert (
        lm.tokenizer(_runs._begun_once("<|bos|>abc", lm.tokenizer))["input_ids"] == lm.encode("<|bos|>abc")[0].tolist()
    )
    without = tiny_tokenizer(bos=False)
    assert _runs._begun_once("<|bos|>abc", without) == "<|bos|>abc"


# --- recipes and the demonstration -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", RECIPES)
def test_a_recipe_is_a_config_of_one_batch_in_four_steps(size, tmp_path):
    args = recipe(size, tmp_path, use_cpu=True, bf16=False)
    assert args.num_generations == 16
    assert args.generation_batch_size == 256
    assert args.steps_per_generation == 4 * args.gradient_accumulation_steps
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 64
    assert recipe(size, tmp_path, use_cpu=True, bf16=False, max_steps=7).max_steps == 7


def test_an_unknown_recipe_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no recipe for '70B'; there are 1\.5B, 3B"):
        recipe("70B", tmp_path)


def test_the_demonstration_is_five_steps_of_any_model(lm):
    rows = demonstration(lm)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(0 <= row["reward"] <= 1 and row["tokens"] <= 16 and math.isfinite(row["kl"]) for row in rows)
    assert decided(demonstration(lm, steps=2)) == decided(rows)[:2]
