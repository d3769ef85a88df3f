"""What enters the buffer, what leaves it, and what comes back."""

import math

import pytest
import torch
from safetensors.torch import load, save

from cameraready.posttraining.paced import ErrorReplay, importance_weights, tb_loss

pytestmark = pytest.mark.torch


def group_of(prompt, rewards, length=3):
    """Tokens that say where they come from: prompt, place in the group, position."""
    tokens = torch.tensor([[100 * prompt + 10 * place + t for t in range(length)] for place in range(len(rewards))])
    return tokens, -tokens.float() / 100


def offer(replay, groups, estimates, step=0, **options):
    made = {prompt: group_of(prompt, rewards) for prompt, rewards in groups.items()}
    return replay.add(
        torch.tensor(list(groups)), torch.stack([t for t, _ in made.values()]), torch.stack([p for _, p in made.values()]),
        torch.tensor(list(groups.values())), torch.tensor(estimates), step=step, **options,
    )  # fmt: skip


def test_successes_of_the_most_misjudged_prompts_enter():
    replay = ErrorReplay(add=3)
    # Errors 0.0, 0.75 and 0.5.
    entered = offer(replay, {1: [1.0, 0, 1, 0], 2: [1, 1, 1, 0], 3: [1, 0, 0, 1]}, [0.5, 0.0, 1.0])
    assert entered == len(replay) == 3
    found = replay.contents()
    assert found.prompt_ids.tolist() == [2, 2, 2]
    assert found.rewards.tolist() == [1, 1, 1]
    assert found.group_means.tolist() == [0.75] * 3
    assert sorted(found.tokens[:, 0].tolist()) == [200, 210, 220]
    torch.testing.assert_close(found.old_logps, -found.tokens.float() / 100)


def test_all_rollouts_can_be_kept():
    replay = ErrorReplay(keep="all")
    assert offer(replay, {1: [1.0, 0, 0, 0]}, [0.0]) == 4
    assert sorted(replay.contents().rewards.tolist()) == [0, 0, 0, 1]


def test_the_oldest_leave_first_and_then_the_best_judged():
    replay = ErrorReplay(capacity=4, add=64)
    offer(replay, {1: [1.0, 1.0], 2: [1.0, 1.0]}, [0.9, 0.1], step=0)
    offer(replay, {3: [1.0, 1.0]}, [0.5], step=1)
    assert replay.contents().prompt_ids.tolist() == [2, 2, 3, 3]


def test_rollouts_are_dropped_when_they_are_too_old():
    replay = ErrorReplay(max_age=2)
    offer(replay, {1: [1.0]}, [0.0], step=5)
    replay.forget(7)
    assert len(replay) == 1
    offer(replay, {2: [0.0]}, [0.0], step=8)
    assert len(replay) == 0


def test_what_was_not_scored_and_empty_groups_are_left_out():
    replay = ErrorReplay()
    nan = math.nan
    assert offer(replay, {1: [nan, 1.0, 0.0], 2: [nan, nan, nan]}, [0.0, 0.0]) == 1
    assert replay.contents().group_means.tolist() == [0.5]
    assert replay.add(torch.tensor([4]), [[]], [[]], torch.empty(1, 0), torch.tensor([0.1]), step=1) == 0
    none = torch.empty(0, dtype=torch.int64)
    assert replay.add(none, [], [], torch.empty(0, 4), torch.empty(0), step=1) == 0


def test_an_empty_buffer_gives_an_empty_batch_that_a_loss_can_take():
    batch = ErrorReplay().sample(5)
    assert len(batch) == 0
    loss, _ = tb_loss(batch.old_logps, batch.old_logps, batch.rewards, torch.empty(0), 0.05, batch.mask)
    assert loss == 0


def test_rollouts_of_different_lengths_are_padded_and_masked():
    replay = ErrorReplay()
    tokens = [[torch.tensor([7, 8, 9]), torch.tensor([4])]]
    logps = [[torch.tensor([-0.1, -0.2, -0.3]), torch.tensor([-0.5])]]
    replay.add(torch.tensor([0]), tokens, logps, torch.ones(1, 2), torch.zeros(1), step=0)
    found = replay.contents()
    rows = {
        tuple(t[m].tolist()): p[m].tolist() for t, m, p in zip(found.tokens, found.mask, found.old_logps, strict=True)
    }
    assert rows == {(7, 8, 9): pytest.approx([-0.1, -0.2, -0.3]), (4,): pytest.approx([-0.5])}
    assert found.tokens[~found.mask].abs().sum() == 0


def test_tool_output_inside_stays_masked_and_padding_is_cut():
    replay = ErrorReplay()
    mask = torch.tensor([[[1, 0, 1, 0, 0]]])
    tokens, logps = torch.arange(5).reshape(1, 1, 5), torch.tensor([[[-1.0, -math.inf, -2.0, math.nan, math.nan]]])
    replay.add(torch.tensor([0]), tokens, logps, torch.ones(1, 1), torch.zeros(1), step=0, mask=mask)
    found = replay.contents()
    assert found.tokens.tolist() == [[0, 1, 2]]
    assert found.mask.tolist() == [[True, False, True]]
    assert found.old_logps.tolist() == [[-1.0, 0.0, -2.0]]


def test_uniform_replay_does_not_look_at_errors():
    counts = {1: 0, 2: 0}
    for seed in range(400):
        replay = ErrorReplay(add=1, priority="uniform", seed=seed)
        offer(replay, {1: [1.0], 2: [1.0]}, [0.0, 0.9])
        counts[int(replay.contents().prompt_ids)] += 1
    assert abs(counts[1] - 200) < 5 * 10


def test_samples_are_without_replacement_and_even():
    replay = ErrorReplay(keep="all")
    offer(replay, {1: [1.0] * 8}, [0.0])
    counts = torch.zeros(8)
    for _ in range(1000):
        places = (replay.sample(3).tokens[:, 0] - 100) // 10
        assert len(set(places.tolist())) == 3
        counts[places] += 1
    assert ((counts - 375).abs() < 5 * math.sqrt(375)).all()
    assert len(replay.sample(100)) == 8


def test_state_goes_through_safetensors_and_the_next_sample_is_the_same():
    replay = ErrorReplay(seed=1)
    offer(replay, {1: [1.0, 0.0, 1.0], 2: [1.0, 1.0, 0.0]}, [0.2, 0.9], step=3)
    replay.sample(1)
    again = ErrorReplay(seed=2)
    again.load_state_dict(load(save(replay.state_dict())))
    ours, theirs = replay.sample(2), again.sample(2)
    for name in ("prompt_ids", "tokens", "mask", "old_logps", "rewards", "group_means", "steps"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    empty = ErrorReplay()
    empty.load_state_dict(load(save(ErrorReplay(seed=5).state_dict())))
    assert len(empty) == 0


def test_importance_weights_turn_the_old_policy_into_the_new_one():
    logits = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    old, new = torch.log_softmax(logits, -1)
    reward = torch.arange(6.0, dtype=torch.float64)
    weights = importance_weights(new[:, None], old[:, None], cap=None)
    torch.testing.assert_close((old.exp() * weights * reward).sum(), (new.exp() * reward).sum())
    capped = importance_weights(new[:, None], old[:, None], cap=0.5)
    torch.testing.assert_close(capped, weights.clamp(max=0.5))
    masked = importance_weights(new[None], old[None], torch.tensor([[1, 0, 1, 0, 0, 0]]), cap=None)
    torch.testing.assert_close(masked, ((new - old)[[0, 2]].sum()).exp()[None])


def test_misuse_is_explained():
    with pytest.raises(ValueError, match="capacity and add"):
        ErrorReplay(0)
    with pytest.raises(ValueError, match="keep must be"):
        ErrorReplay(keep="wrong")
    replay = ErrorReplay()
    with pytest.raises(ValueError, match="as many groups"):
        replay.add(torch.tensor([0]), [], [], torch.ones(1, 1), torch.zeros(1), step=0)
    with pytest.raises(ValueError, match="not finite; it can't be replayed"):
        replay.add(
            torch.tensor([0]),
            torch.zeros(1, 1, 2).long(),
            torch.full((1, 1, 2), -math.inf),
            torch.ones(1, 1),
            torch.zeros(1),
            step=0,
        )
    with pytest.raises(ValueError, match="one log-probability for each token"):
        replay.add(
            torch.tensor([0]),
            torch.zeros(1, 1, 2).long(),
            torch.zeros(1, 1, 3),
            torch.ones(1, 1),
            torch.zeros(1),
            step=0,
        )


def test_a_step_under_way_can_be_held_back():
    replay = ErrorReplay(keep="all")
    offer(replay, {1: [1.0, 0.0]}, [0.5], step=3)
    offer(replay, {2: [1.0, 0.0]}, [0.5], step=4)
    assert set(replay.sample(4, before=4).prompt_ids.tolist()) == {1}
    assert len(replay.sample(4, before=3)) == 0
    assert len(replay.sample(4)) == 4


def test_an_offer_that_is_refused_leaves_everything_as_it_was():
    replay = ErrorReplay(max_age=0)
    offer(replay, {1: [1.0]}, [0.0], step=0)
    good, bad = torch.zeros(1, 2), torch.tensor([[-1.0, -math.inf]])
    tokens, logps = torch.zeros(2, 1, 2).long(), torch.stack([good, bad])
    with pytest.raises(ValueError, match="not finite"):
        replay.add(torch.tensor([0, 1]), tokens, logps, torch.ones(2, 1), torch.tensor([0.0, 0.5]), step=5)
    assert replay.contents().prompt_ids.tolist() == [1]
    with pytest.raises(ValueError, match="estimate is not finite"):
        offer(replay, {1: [1.0]}, [math.nan])
    with pytest.raises(ValueError, match="reward at place 2"):
        replay.add(
            torch.tensor([0]), [[torch.tensor([1])]], [[torch.zeros(1)]], torch.ones(1, 3), torch.zeros(1), step=0
        )
    with pytest.raises(ValueError, match="no finite log-probability"):
        importance_weights(torch.zeros(1, 2), torch.tensor([[0.0, -math.inf]]))
    assert importance_weights(torch.tensor([[-math.inf]]), torch.zeros(1, 1)).item() == 0.0
