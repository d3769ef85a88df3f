"""Sampling has the law of the enumeration; group advantages average to the exact gradient."""

import itertools

import pytest
import torch
from scipy import stats

from cameraready.posttraining._testbed import (
    Batch,
    GRUs,
    Tabular,
    exact,
    from_function,
    group_advantages,
    sample,
    seed_generators,
)
from tests.posttraining.test_testbed_policies import policies, ragged

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("kind", ["gru", "tabular"])
def test_a_samples_log_probability_is_the_enumerations(kind):
    task = ragged()
    policy = policies(task)[kind]
    batch = sample(policy, task, torch.tensor([[0, 2], [2, 1]]), 50, seed_generators(2))
    every = policy.all_log_probs(task)
    expected = every[torch.arange(2)[:, None, None], batch.prompts[..., None], batch.index]
    torch.testing.assert_close(batch.old_logps.sum(-1), expected, rtol=0, atol=1e-12)
    again = policy.sample_log_probs(task, batch.prompts, batch.index)
    torch.testing.assert_close(batch.old_logps, again.detach(), rtol=0, atol=1e-12)
    assert torch.equal(batch.tokens, task.tokens[batch.index])
    assert torch.equal(batch.mask, task.mask[batch.index])
    assert torch.equal(batch.rewards, task.reward[batch.prompts[..., None], batch.index])


@pytest.mark.parametrize("kind", ["gru", "tabular"])
def test_frequencies_are_the_enumerations_probabilities(kind):
    task = ragged()
    policy = policies(task)[kind]
    prompts = torch.tensor([[0, 2], [1, 1]])
    batch = sample(policy, task, prompts, 20_000, seed_generators([11, 12]))
    p = policy.all_log_probs(task, prompts).detach().exp()
    for s, b in itertools.product(range(2), range(2)):
        counts = torch.bincount(batch.index[s, b], minlength=task.completions)
        test = stats.chisquare(counts.numpy(), (p[s, b] / p[s, b].sum() * counts.sum()).numpy())
        assert test.pvalue > 1e-4


def test_a_seeds_draws_are_its_generators_alone():
    task = ragged()
    policy = GRUs([1, 2, 3], task.vocabulary, 4, width=16)
    together = sample(policy, task, torch.tensor([0, 1, 2]), 40, seed_generators([7, 8, 9]))
    alone = sample(policy.select([1]), task, torch.tensor([0, 1, 2]), 40, seed_generators([8]))
    assert torch.equal(together.index[1], alone.index[0])
    torch.testing.assert_close(together.old_logps[1], alone.old_logps[0], rtol=0, atol=1e-6)


def test_a_prompt_without_a_right_answer_is_sampled_like_any_other():
    task = from_function("none right", [[0, 2], [1, 2]], lambda prompt, row: prompt == 1 and row[0] == 1, [0, 1])
    batch = sample(Tabular(task, 3), task, torch.tensor([0, 1]), 64, seed_generators(3))
    assert bool((batch.rewards[:, 0] == 0).all())
    assert 0 < float(batch.rewards[:, 1].mean()) < 1
    assert torch.equal(group_advantages(batch.rewards)[:, 0], torch.zeros(3, 64))


def test_impossible_tokens_are_never_drawn():
    task = from_function("three", [[0], [1], [2]], lambda prompt, row: True, [0])
    policy = Tabular(task, 1)
    with torch.no_grad():
        policy.parameters()[0][..., 1] = -torch.inf
        policy.parameters()[0][..., 2] = -torch.inf
    assert bool((sample(policy, task, torch.tensor([0]), 10_000, seed_generators(1)).index == 0).all())


def test_rows_and_join_keep_groups_together():
    task = ragged()
    policy = policies(task)["gru"]
    generators = seed_generators(2)
    a, b = (sample(policy, task, torch.arange(3), 4, generators) for _ in range(2))
    both = Batch.join([a, b])
    assert torch.equal(both.rows(slice(3, 6)).index, b.index)
    assert torch.equal(both.rows(torch.tensor([1, 4])).index, torch.stack([a.index[:, 1], b.index[:, 1]], 1))
    own = both.rows(torch.tensor([[0, 5], [3, 1]]))
    assert torch.equal(own.index[0], torch.stack([a.index[0, 0], b.index[0, 2]]))
    assert torch.equal(own.old_logps[1], torch.stack([b.old_logps[1, 0], a.old_logps[1, 1]]))
    assert torch.equal(a.with_rewards(a.rewards + 1).rewards, a.rewards + 1)


@pytest.mark.parametrize("n", [2, 3])
def test_the_policy_gradient_averaged_over_all_groups_is_the_exact_gradient(n):
    """The mean as baseline contains the sample itself, which shrinks the gradient by (n - 1) / n and by nothing else."""
    task = from_function(
        "small",
        [[0, 3], [1, 3], [2, 0, 3], [2, 1, 3]],
        lambda prompt, row: [0.2, 0.9, 0.4, 0.0][prompt + row[0]],
        [0, 1],
    )
    policy = GRUs(2, 4, 2, width=5, dtype=torch.float64)
    groups = torch.tensor(list(itertools.product(range(4), repeat=n)))
    index = groups.flatten().expand(2, 2, -1)
    prompts = torch.arange(2)
    logps = policy.sample_log_probs(task, prompts, index).sum(-1).view(2, 2, len(groups), n)
    rewards = task.reward.double()[prompts[:, None], groups.flatten()].view(2, len(groups), n)
    weight = logps.detach().sum(-1).exp()  # probability of the group
    objective = (weight[..., None] * group_advantages(rewards, "none") * logps / n).sum((1, 2, 3)) / 2
    found = torch.autograd.grad(objective.sum(), policy.parameters())
    for a, b in zip(found, exact.expected_gradient(policy, task), strict=True):
        torch.testing.assert_close(a, b * (n - 1) / n, rtol=1e-6, atol=1e-9)


def test_group_advantages():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.3, 0.3, 0.3, 0.3]])
    a = group_advantages(rewards)
    torch.testing.assert_close(a[0], (rewards[0] - 0.5) / (rewards[0].std() + 1e-4))
    assert bool((a[1:] == 0).all())
    torch.testing.assert_close(group_advantages(rewards, "none")[0], rewards[0] - 0.5)
    assert bool((group_advantages(torch.tensor([[0.7]])) == 0).all())
    for kind in (torch.bool, torch.int64):
        assert torch.equal(group_advantages(rewards[:2].to(kind)), a[:2])
    third = torch.full((5, 7), 0.1)  # whose mean rounds
    assert bool((group_advantages(third) == 0).all())
    g = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(group_advantages(g), group_advantages(g + 5.0), rtol=0, atol=1e-10)


def test_rewards_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="1 rewards are NaN or infinite"):
        group_advantages(torch.tensor([[1.0, float("nan")]]))
    with pytest.raises(ValueError, match="NaN or infinite"):
        group_advantages(torch.tensor([[1.0, float("inf")]]))
    with pytest.raises(ValueError, match="groups are empty"):
        group_advantages(torch.zeros(3, 0))
    with pytest.raises(ValueError, match="scale must be"):
        group_advantages(torch.zeros(3, 2), "std")


def test_mistakes_are_named():
    task = ragged()
    policy = policies(task)["tabular"]
    with pytest.raises(ValueError, match="at least one prompt and one completion"):
        sample(policy, task, torch.arange(3), 0, seed_generators(2))
    with pytest.raises(ValueError, match="at least one prompt and one completion"):
        sample(policy, task, torch.zeros(2, 0, dtype=torch.int64), 4, seed_generators(2))
    with pytest.raises(ValueError, match="2 seeds need 2 generators, got 3"):
        sample(policy, task, torch.arange(3), 4, seed_generators(3))
    batch = sample(policy, task, torch.arange(3), 4, seed_generators(2))
    with pytest.raises(ValueError, match="rewards must have shape"):
        batch.with_rewards(torch.zeros(2, 3))
