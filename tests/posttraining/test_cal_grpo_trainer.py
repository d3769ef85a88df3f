"""The trainer of several attempts: which token gets which advantage, whatever TRL shuffles and splits, and what it refuses."""

import warnings
from functools import partial

import numpy as np
import pytest

pytest.importorskip("trl")

import torch
from datasets import Dataset

from cameraready.models import tiny_model, tiny_tokenizer
from cameraready.posttraining.cal_grpo import MultiAttemptGRPOTrainer
from cameraready.posttraining.cal_grpo.rollouts import AttemptRollouts, TokenAdvantages, env_mask, outcome
from tests.posttraining.cal_grpo_cases import PLAIN, make, right
from tests.posttraining.training import config, dataset, furthest, train

pytestmark = pytest.mark.torch


class Watched(MultiAttemptGRPOTrainer):
    """Keeps what rollouts gave, and what the loss got."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        kept = self._kept["train"]
        rows = {name: value.clone() for name, value in inputs.items() if torch.is_tensor(value)}
        rows["token_advantages"] = kept.of(inputs)
        self.seen.append((int(self.state.global_step), rows))
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def watched(model, tokenizer, args, data, _, **options):
    inner = AttemptRollouts(right, [data], attempts=3, max_attempt_length=4)
    made = []

    def rollouts(prompts, trainer):
        output = inner(prompts, trainer)
        made.append((int(trainer.state.global_step), prompts, output))
        return output

    trainer = Watched(
        model, right, args, data, processing_class=tokenizer, attempts=3, rollout_func=rollouts, **options
    )
    trainer.seen, trainer.made = [], made
    return trainer


def by_hand(rewards):
    """CAL advantages of one group, written out: (n, K) with NaN where not reached."""
    n, attempts = rewards.shape
    found = np.full(rewards.shape, np.nan)
    for i in range(n):
        for k in range(attempts):
            if np.isnan(rewards[i, k]):
                continue
            others = [rewards[j, k] for j in range(n) if j != i and not np.isnan(rewards[j, k])]
            weight = 1.0
            for later in range(k + 1, attempts):
                column = rewards[~np.isnan(rewards[:, later]), later]
                if not len(column):
                    return None  # the corner, which other groups decide
                weight *= 1 - column.mean()
            found[i, k] = weight * (rewards[i, k] - (np.mean(others) if others else 0.0))
    return found


@pytest.mark.parametrize(
    "settings", [{}, {"steps_per_generation": 4, "per_device_train_batch_size": 2, "num_iterations": 1}]
)
def test_each_token_gets_its_attempts_advantage_through_shuffling_and_splitting(tmp_path, settings):
    """Several prompts, two steps on each batch, micro-batches: rows are traced by their content."""
    args = config(
        "grpo",
        tmp_path,
        4,
        **{**PLAIN, "loss_type": "dr_grpo", "scale_rewards": "none", "num_generations": 4, **settings},
    )
    trainer = train(watched, args).trainer
    expected, checked, attempts_seen = {}, 0, set()
    for _, _, output in trainer.made:
        rewards = np.array(output["attempt_rewards"])
        for start in range(0, len(rewards), 4):
            group = by_hand(rewards[start : start + 4])
            for i in range(4):
                ids = np.array(output["attempt_ids"][start + i])
                key = tuple(output["prompt_ids"][start + i]), tuple(output["completion_ids"][start + i])
                values = None if group is None else np.where(ids >= 0, group[i, np.maximum(ids, 0)], 0.0)
                expected.setdefault(key, []).append(values)
                attempts_seen |= {*ids.tolist()}
    assert attempts_seen == {-2, 0, 1, 2}
    for _, rows in trainer.seen:
        for prompt, mask, tokens, there, own, values in zip(
            *(
                rows[k]
                for k in (
                    "prompt_ids",
                    "prompt_mask",
                    "completion_ids",
                    "completion_mask",
                    "tool_mask",
                    "token_advantages",
                )
            ),
            strict=True,
        ):
            length = int(there.sum())
            key = tuple(prompt[mask.bool()].tolist()), tuple(tokens[:length].tolist())
            assert key in expected
            assert not values[length:].any()
            assert not values[:length][own[:length] == 0].any()
            candidates = [e for e in expected[key] if e is not None]
            if candidates:
                checked += 1
                assert any(np.allclose(values[:length], e, atol=1e-6) for e in candidates)
    assert checked >= 8
    assert any(rows["token_advantages"].any() for _, rows in trainer.seen)


def test_the_loss_is_the_policy_gradient_of_the_attempts(tmp_path):
    """On-policy "dr_grpo": TRL's gradient is that of -1/(B C) sum A log pi over the model's own tokens, worked out anew."""
    args = config(
        "grpo",
        tmp_path,
        1,
        **{**PLAIN, "loss_type": "dr_grpo", "scale_rewards": "none", "num_iterations": 1, "max_grad_norm": 0.0},
    )
    before = {name: p.detach().clone() for name, p in tiny_model("llama").named_parameters()}
    trained = train(watched, args)
    model = tiny_model("llama").train()
    (_, _, output), length = trained.trainer.made[0], args.max_completion_length
    rewards = np.array(output["attempt_rewards"])
    assert len(rewards) == 8
    from cameraready.posttraining.cal_grpo import attempt_advantages

    advantages = np.nan_to_num(attempt_advantages(rewards, group_ids=np.arange(8) // 4))
    loss = 0.0
    for i in range(8):
        ids = torch.tensor(output["prompt_ids"][i] + output["completion_ids"][i])[None]
        logps = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        for place, attempt in enumerate(output["attempt_ids"][i]):
            if attempt >= 0:
                loss = loss - advantages[i, attempt] * logps[len(output["prompt_ids"][i]) - 1 + place] / (8 * length)
    loss.backward()
    stepped = {name: before[name] - 0.1 * p.grad for name, p in model.named_parameters()}
    assert furthest(before, trained.weights) > 1e-4
    assert furthest(stepped, trained.weights) < 1e-6


def test_evaluation_between_steps_leaves_training_as_it_is(tmp_path):
    settings = {**PLAIN, "loss_type": "dr_grpo"}
    plain = train(make, config("grpo", tmp_path / "a", 4, **settings))

    def evaluating(model, tokenizer, args, data, rewards):
        return make(model, tokenizer, args, data, rewards, eval_dataset=data.select(range(4)))

    args = config(
        "grpo", tmp_path / "b", 4, **settings, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8
    )
    evaluated = train(evaluating, args)
    assert furthest(plain.weights, evaluated.weights) < 1e-6  # rows may be shuffled otherwise
    logged = [entry for entry in evaluated.log if "eval_verification@3" in entry]
    assert len(logged) == 4
    assert all(e["eval_verification@1"] <= e["eval_verification@2"] <= e["eval_verification@3"] for e in logged)


def test_a_chat_is_tried_again_as_a_turn_of_the_user(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"say {c}"}], "answer": c} for c in "abcdefgh"]
    tokenizer, seen = tiny_tokenizer(), []

    def verifier(completions, answer, **_):
        seen.append(completions[0])
        return [0.0]

    args = config("grpo", tmp_path, 1, **{**PLAIN, "loss_type": "dr_grpo"})
    trainer = MultiAttemptGRPOTrainer(
        tiny_model("llama"),
        verifier,
        args,
        Dataset.from_list(rows),
        processing_class=tokenizer,
        attempts=2,
        max_attempt_length=3,
    )
    output = trainer.rollout_func([rows[0]["prompt"]] * 4, trainer)
    assert seen[0][0]["role"] == "assistant"
    for prompt, completion, ids in zip(
        output["prompt_ids"], output["completion_ids"], output["attempt_ids"], strict=True
    ):
        text = tokenizer.apply_chat_template(rows[0]["prompt"], tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(prompt).endswith(text)
        said = tokenizer.decode([t for t, a in zip(completion, ids, strict=True) if a == -2])
        assert "That is wrong. Try again." in said
    assert output["env_mask"] == env_mask(output["attempt_ids"])
    assert outcome(attempt_rewards=output["attempt_rewards"]) == [0.0] * 4


def test_prompts_of_a_chat_are_written_as_trl_writes_them(tmp_path):
    """The config's ``chat_template_kwargs`` reach the template, and the tokens are those of TRL's own rollouts."""
    tokenizer = tiny_tokenizer(bos=False)
    template = tokenizer.chat_template
    tokenizer.chat_template = "{{ 'quiet ' if quiet else 'loud ' }}" + template
    rows = [{"prompt": [{"role": "user", "content": f"say {c}"}], "answer": c} for c in "abcdefgh"]
    args = config("grpo", tmp_path, 1, **{**PLAIN, "loss_type": "dr_grpo", "chat_template_kwargs": {"quiet": True}})
    trainer = MultiAttemptGRPOTrainer(
        tiny_model("llama"), right, args, Dataset.from_list(rows), processing_class=tokenizer, attempts=2
    )
    output = trainer.rollout_func([rows[0]["prompt"]], trainer)
    expected = tokenizer.apply_chat_template(rows[0]["prompt"], add_generation_prompt=True, quiet=True)["input_ids"]
    assert tokenizer.decode(output["prompt_ids"][0]).startswith("quiet ")
    assert output["prompt_ids"][0] == expected


# --- rows by content ----------------------------------------------------------------------------------------------------


def inputs_of(prompts, completions, masks, width=6):
    def padded(rows, left, fill=0):
        size = max(map(len, rows)) if left else width
        return torch.tensor([[fill] * (size - len(r)) + r if left else r + [fill] * (size - len(r)) for r in rows])

    return {
        "prompt_ids": padded(prompts, True, 256),
        "prompt_mask": padded([[1] * len(p) for p in prompts], True),
        "completion_ids": padded(completions, False, 256),
        "completion_mask": padded([[1] * len(c) for c in completions], False),
        "tool_mask": padded(masks, False, 1),
    }


def test_rows_are_found_in_any_order_and_padding():
    kept = TokenAdvantages()
    prompts, completions = [[1, 2], [3], [3]], [[7, 8, 9], [7, 8, 9], [7, 8]]
    masks, values = [[1, 0, 1]] * 2 + [[1, 1]], [[0.5, 0, -1], [0.25, 0, 2], [0.125, 0.125]]
    kept.keep(prompts, completions, masks, values)
    order = [2, 0, 1]
    found = kept.of(inputs_of(*([each[i] for i in order] for each in (prompts, completions, masks))))
    assert found.tolist() == [values[i] + [0] * (6 - len(values[i])) for i in order]
    assert found.dtype == torch.float32
    hidden = inputs_of(prompts[:1], completions[:1], masks[:1])
    hidden["completion_mask"] *= 0  # a truncated completion that TRL masks whole
    assert not kept.of(hidden).any()
    with pytest.raises(RuntimeError, match="not sampled by this trainer"):
        kept.of(inputs_of([[9]], [[7]], [[1]]))
    # The same tokens with another boundary between attempts are another dialogue.
    with pytest.raises(RuntimeError):
        kept.of(inputs_of(prompts[:1], completions[:1], [[1, 1, 1]]))


def test_equal_dialogues_of_a_group_have_equal_advantages_and_others_the_mean():
    kept = TokenAdvantages()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept.keep([[1], [1]], [[7]] * 2, [[1]] * 2, [[0.5], [0.5]])
    with pytest.warns(UserWarning, match="1 dialogues occur several times with different advantages"):
        kept.keep([[1], [1]], [[7]] * 2, [[1]] * 2, [[0.5], [-1.0]])
    assert kept.of(inputs_of([[1], [1]], [[7]] * 2, [[1]] * 2))[:, 0].tolist() == [-0.25, -0.25]


# --- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ({"loss_type": "grpo"}, {}, "weighs an attempt by the sequence"),
        ({"loss_type": "sapo"}, {"method": "naive"}, "weighs an attempt by the sequence"),
        ({"importance_sampling_level": "sequence"}, {}, "one ratio for all attempts"),
        ({"off_policy_mask_threshold": 0.1}, {}, "drops whole sequences"),
        ({}, {"lam": 1.5}, "lam must be from 0"),
        ({}, {"method": "best"}, "method must be one of"),
        ({}, {"attempts": 0}, "attempts must be a whole number and at least 1"),
        (
            {"max_completion_length": 8},
            {"attempts": 9, "max_attempt_length": None},
            "max_completion_length=8 of the config is shared by 9 attempts",
        ),
        ({}, {"max_attempt_length": 0}, "max_attempt_length must be a whole number and at least 1"),
    ],
)
def test_configs_that_would_undo_the_calibration_are_refused(tmp_path, settings, options, words):
    args = config("grpo", tmp_path, 1, **{**PLAIN, **settings})
    with pytest.raises(ValueError, match=words):
        make(None, None, args, dataset(), None, **options)


def test_verdicts_and_data_that_leave_doubt_are_refused(tmp_path):
    args = config("grpo", tmp_path, 1, **PLAIN)
    one = partial(
        MultiAttemptGRPOTrainer,
        tiny_model("llama"),
        args=args,
        train_dataset=dataset(),
        processing_class=tiny_tokenizer(),
    )
    with pytest.raises(ValueError, match="pass one verifier"):
        one([right, right])

    async def later(completions, **_):
        return [1.0]

    with pytest.raises(ValueError, match="pass one verifier"):
        one(later)
    with pytest.raises(ValueError, match="tools lets TRL write"):
        one(right, tools=[len])
    with pytest.raises(ValueError, match="streamed data set"):
        one(right, train_dataset=dataset().to_iterable_dataset())
    with pytest.raises(ValueError, match=r"^the verifier gave 0\.7 for "):  # and not that it raised something
        one(lambda completions, **_: [0.7]).train()

    def broken(completions, **_):
        raise KeyError("sum")

    with pytest.raises(ValueError, match="raised KeyError"):
        one(broken).train()
    twice = Dataset.from_list([{"prompt": "p", "answer": "a"}, {"prompt": "p", "answer": "b"}])
    with pytest.raises(ValueError, match="stands in two rows with different columns"):
        MultiAttemptGRPOTrainer(tiny_model("llama"), right, args, twice, processing_class=tiny_tokenizer())
    with pytest.raises(ValueError, match="must also return attempt_ids, attempt_rewards"):
        one(
            right, rollout_func=lambda prompts, trainer: {"prompt_ids": [], "completion_ids": [], "logprobs": None}
        ).train()
    for settings, words in (
        ({"top_p": 0.9}, "leave top_p"),
        ({"repetition_penalty": 1.5}, "leave repetition_penalty"),
        ({"generation_kwargs": {"top_k": 5}}, "leave generation_kwargs"),
    ):
        other = config("grpo", tmp_path, 1, **{**PLAIN, **settings})
        with pytest.raises(ValueError, match=words):
            one(right, args=other).train()


def test_past_the_first_epoch_a_resumed_run_sees_prompts_in_another_order(tmp_path):
    """As the docstring warns; in the first epoch the order is kept, which the conformance test holds to."""
    rows = Dataset.from_list(
        [{"prompt": f"say {c}", "answer": c} for c in "abcd"]
    )  # an epoch is two steps of two prompts

    def prompts_seen(resume=None):
        seen = []

        def verifier(prompts, completions, **_):
            seen.append(prompts[0])
            return [0.0]

        settings = {**PLAIN, "loss_type": "dr_grpo", "num_iterations": 1, "gradient_accumulation_steps": 1}
        args = config("grpo", tmp_path, 4, **settings, num_generations=4, per_device_train_batch_size=8)
        args.save_steps = 2
        trainer = MultiAttemptGRPOTrainer(
            tiny_model("llama"), verifier, args, rows, processing_class=tiny_tokenizer(), attempts=2
        )
        trainer.train(resume_from_checkpoint=resume)
        return list(dict.fromkeys(seen[: len(seen) // 2])), list(dict.fromkeys(seen[len(seen) // 2 :]))

    first, second = prompts_seen()
    assert sorted(first) == sorted(second) == sorted(rows["prompt"])
    assert first != second
    again = prompts_seen(str(tmp_path / "checkpoint-2"))
    assert [*again[0], *again[1]] == first


# --- the card -----------------------------------------------------------------------------------------------------------


def test_the_cards_example_trains(tmp_path, monkeypatch, capsys):
    from cameraready.catalog import resolve

    monkeypatch.chdir(tmp_path)
    exec(compile(resolve("cal-grpo").example, "card", "exec"), {})
    out = capsys.readouterr().out
    assert "verification@3" in out  # TRL's log
    assert "VerificationRate(k=2, value=0.66" in out


@pytest.mark.parametrize("words", ["retry", "failing test", "my agent may retry after a failing test"])
def test_the_card_is_found_by_what_a_user_says(words):
    import cameraready

    assert cameraready.find(words)[0].slug == "cal-grpo"
