"""The trainer: rewards find their rows again, the loss is the formula's, the estimate follows, and prompts come as they were chosen."""

import math

import pytest

pytest.importorskip("trl")

import torch
from datasets import Dataset

from cameraready.models import tiny_model, tiny_tokenizer
from cameraready.posttraining.paced import PacedGRPOTrainer, PacedSettings, tb_loss
from tests.posttraining.paced_cases import paced
from tests.posttraining.training import config, dataset, letters, train

pytestmark = pytest.mark.torch


def watched(check, **settings):
    """A maker of trainers that call `check(trainer, model, inputs, loss)` after each loss."""

    class Watched(PacedGRPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            check(self, model, inputs, loss)
            return loss

    def make(model, tokenizer, args, data, reward_funcs):
        chosen = PacedSettings(hidden=8, **settings)
        return Watched(model, reward_funcs, args=args, train_dataset=data, processing_class=tokenizer, settings=chosen)

    return make


def test_rewards_and_prompts_are_those_behind_trls_advantages(tmp_path):
    """TRL shuffles rows and hands on advantages: our rewards, less their group's mean, must be these."""
    seen = []

    def check(trainer, model, inputs, loss):
        index, rewards = trainer._identified(inputs)
        seen.append((index, rewards, inputs["advantages"]))

    train(watched(check), config("grpo", tmp_path, 4, scale_rewards="none"))
    assert len(seen) == 8
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        index, rewards, advantages = (torch.cat(pair) for pair in zip(first, second, strict=True))
        assert len(set(index.tolist())) == 2
        for prompt in set(index.tolist()):
            mine = index == prompt
            assert int(mine.sum()) == 4
            torch.testing.assert_close(rewards[mine] - rewards[mine].mean(), advantages[mine])


def test_the_loss_is_trajectory_balance_of_the_sampled_completions(tmp_path):
    losses = []

    def check(trainer, model, inputs, loss):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(ids, attention_mask=attention, position_ids=positions).logits
        length = inputs["completion_ids"].shape[1]
        logp = torch.log_softmax(logits[:, -length - 1 : -1].float(), -1)
        logp = logp.gather(2, inputs["completion_ids"][..., None])[..., 0]
        index, rewards = trainer._identified(inputs)
        expected, _ = tb_loss(
            logp,
            inputs["old_per_token_logps"],
            rewards,
            trainer.head.log_z(index).detach(),
            0.05,
            inputs["completion_mask"],
        )
        losses.append((float(loss.detach()), float(expected) / 2))  # two micro-batches a step

    train(watched(check), config("grpo", tmp_path, 2))
    assert len(losses) == 4
    for found, expected in losses:
        assert found == pytest.approx(expected, rel=1e-4)


def test_prompts_come_in_the_samplers_order_and_the_estimate_follows_the_rewards(tmp_path):
    chosen = []

    def reward(completions, prompts, **columns):
        chosen.append([prompts[place] for place in range(0, len(prompts), 4)])
        assert prompts == [prompt for prompt in chosen[-1] for _ in range(4)]
        assert "paced_index" not in columns
        return [3.0] * len(completions)

    def make(model, tokenizer, args, data, _):
        return paced(head_learning_rate=1e-2)(model, tokenizer, args, data, [reward])

    found = train(make, config("grpo", tmp_path, 8))
    trainer = found.trainer
    expected = [[dataset()["prompt"][int(i)] for i in row] for row in trainer.pacer.state_dict()["history"]]
    assert len(chosen) == 4
    assert expected[:4] == chosen
    assert trainer.head.accuracy(clip=False).mean() > 0.55
    assert (trainer.head.accuracy() <= 1).all()
    logged = [entry for entry in found.log if "paced/estimate" in entry]
    assert logged[-1]["paced/estimate"] > logged[0]["paced/estimate"]
    assert logged[0]["paced/all_right"] == 1.0
    assert all("entropy" in entry for entry in logged)


@pytest.mark.parametrize(("iterations", "missed"), [(1, 1.0), (2, 0.0)])
def test_staleness_is_what_the_docstring_says(tmp_path, iterations, missed):
    found = train(paced(), config("grpo", tmp_path, 4, num_iterations=iterations))
    told = [entry["paced/staleness"] for entry in found.log if "paced/staleness" in entry]
    # The batch at hand was chosen before the rewards of `missed` batches before it were known; the first has none before it.
    assert told[1:] == [missed] * len(told[1:])


def test_completions_without_a_score_are_left_out(tmp_path):
    def some(completions, **_columns):
        return [None if len(text) % 2 else 1.0 for text in completions]

    def none(completions, **_columns):
        return [None] * len(completions)

    def make(function):
        return lambda model, tokenizer, args, data, _: paced()(model, tokenizer, args, data, [function])

    half = train(make(some), config("grpo", tmp_path / "half", 2))
    assert 0 < half.log[0]["paced/left_out"] < 1
    assert all(math.isfinite(loss) for loss in half.losses)
    with pytest.warns(UserWarning, match="no completion of this batch was scored"):
        whole = train(make(none), config("grpo", tmp_path / "whole", 2))
    assert whole.losses == [0.0, 0.0]
    assert int(whole.trainer.head.updates) == 0


def test_two_reward_functions_are_weighted_as_in_trl(tmp_path):
    def constant(completions, **_columns):
        return [1.0] * len(completions)

    async def later(completions, answer, **_columns):
        return letters(completions, answer)

    sums = []

    def check(trainer, model, inputs, loss):
        _, rewards = trainer._identified(inputs)
        sums.append(rewards)

    def make(model, tokenizer, args, data, _):
        return watched(check)(model, tokenizer, args, data, [constant, later])

    found = train(make, config("grpo", tmp_path, 1, reward_weights=[2.0, 0.5]))
    logged = next(entry["reward"] for entry in found.log if "reward" in entry)
    assert float(torch.cat(sums).mean()) == pytest.approx(logged, rel=1e-5)


def test_replay_mixes_older_rollouts_in(tmp_path):
    def good(completions, **_columns):
        return [1.0] * len(completions)

    def make(model, tokenizer, args, data, _):
        return paced(replay=2)(model, tokenizer, args, data, [good])

    found = train(make, config("grpo", tmp_path, 4))
    replayed = [entry["paced/replayed"] for entry in found.log if "paced/replayed" in entry]
    # Two steps on each batch: the first has nothing older than itself, the second replays the first.
    assert replayed == [0.0, 0.0, 2.0, 2.0]
    assert [entry["paced/replay_age"] for entry in found.log if "paced/replay_age" in entry] == [1.0, 1.0]
    contents = found.trainer.replay.contents()
    assert len(contents) == 16  # two batches of eight
    assert set(contents.steps.tolist()) == {1, 2}


@pytest.mark.parametrize(
    ("data", "functions", "message"),
    [
        (
            Dataset.from_dict({"prompt": ["a:", "b:", "a:", "c:"]}),
            [letters],
            "prompts 0 and 2 of the dataset are the same",
        ),
        (Dataset.from_dict({"question": ["a:"] * 4}), [letters], "no column 'prompt'"),
        (Dataset.from_dict({"prompt": ["a:", "b:"]}), [letters], "the dataset needs 4; it has 2"),
        (Dataset.from_dict({"prompt": list("abcd")}), [torch.nn.Linear(1, 1)], "reward functions must be functions"),
        (iter([]), [letters], "can be indexed"),
    ],
)
def test_misuse_is_explained(tmp_path, data, functions, message):
    with pytest.raises(ValueError, match=message):
        paced()(tiny_model("llama"), tiny_tokenizer(), config("grpo", tmp_path, 1), data, functions)


@pytest.mark.parametrize(
    ("rewards", "target", "told"),
    [
        ([0.0, 1.0], 0.5, ""),
        ([0.0, 0.0], 50.0, "near target=50"),
        ([-5.0, 5.0], 0.5, "between -5 and 5"),
        ([math.nan], 0.5, "no completion"),
    ],
)
def test_rewards_and_targets_that_do_not_fit_are_told(rewards, target, told):
    from cameraready.posttraining.paced.rewards import misfit

    found = misfit(torch.tensor([rewards]), target)
    assert (told in found) if told else found == ""


def test_settings_are_checked():
    for options, message in (
        ({"selection": "greedy"}, "selection must be"),
        ({"tb_beta": 0.0}, "must be positive"),
        ({"replay": 2, "loss": "trl"}, "replay needs loss='tb'"),
        ({"head_steps": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            PacedSettings(**options)
    with pytest.raises(TypeError, match="settings must be a PacedSettings, got dict"):
        PacedGRPOTrainer(None, [letters], settings={"target": 0.5})


@pytest.mark.parametrize("setting", [{"top_p": 0.5}, {"top_k": 5}, {"repetition_penalty": 1.2}, {"beta": 0.1}])
def test_what_trajectory_balance_cannot_honour_is_refused(tmp_path, setting):
    (name,) = setting
    with pytest.raises(ValueError, match=name):
        paced()(tiny_model("llama"), tiny_tokenizer(), config("grpo", tmp_path, 1, **setting), dataset(), [letters])
    if name != "beta":  # TRL would fetch a reference model by its name, which this one has not
        trainer = paced(loss="trl")(
            tiny_model("llama"), tiny_tokenizer(), config("grpo", tmp_path, 1, **setting), dataset(), [letters]
        )
        assert trainer.settings.loss == "trl"


def test_a_state_that_is_none_and_one_of_another_head_are_named(tmp_path):
    def trainer(**settings):
        return paced(**settings)(
            tiny_model("llama"), tiny_tokenizer(), config("grpo", tmp_path, 4), dataset(), [letters]
        )

    train(paced(), config("grpo", tmp_path, 2))
    state = tmp_path / "checkpoint-2" / "paced.pt"
    other = torch.load(state, weights_only=True)
    other["head"]["network.0.bias"] = torch.zeros(3)
    torch.save(other, state)
    with pytest.raises(ValueError, match=r"paced\.pt is of another head"):
        trainer().train(resume_from_checkpoint=str(state.parent))
    for broken in (b"", b"no state", b"\x80\x04."):
        state.write_bytes(broken)
        with pytest.raises(ValueError, match=r"paced\.pt is no state of PacedGRPOTrainer"):
            trainer().train(resume_from_checkpoint=str(state.parent))
    torch.save([1, 2], state)
    with pytest.raises(ValueError, match=r"paced\.pt is no state of PacedGRPOTrainer"):
        trainer().train(resume_from_checkpoint=str(state.parent))
    state.unlink()
    with pytest.warns(UserWarning, match="starts afresh"):
        trainer().train(resume_from_checkpoint=str(state.parent))
