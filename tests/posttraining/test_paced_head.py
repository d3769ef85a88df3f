"""The estimate: where it starts, what it converges to, and what draws it away from the accuracy."""

import math

import pytest
import torch
from safetensors.torch import load, save

from cameraready.models import tiny_model
from cameraready.posttraining.paced import AccuracyEstimate, PartitionHead, RunningAccuracy, prompt_embeddings

pytestmark = pytest.mark.torch


@pytest.fixture
def pool():
    """Prompts whose accuracy is a smooth function of their embeddings."""
    embeddings = torch.randn(80, 5, generator=torch.Generator().manual_seed(0))
    return embeddings, torch.sigmoid(2 * embeddings[:, 0] - embeddings[:, 1])


def groups(accuracy, ids, size, seed):
    return (torch.rand(len(ids), size, generator=torch.Generator().manual_seed(seed)) < accuracy[ids][:, None]).float()


def trained(head, accuracy, steps=300, lr=3e-3, keep=lambda rewards: rewards):
    optimizer = torch.optim.Adam(head.parameters(), lr=lr)
    for step in range(steps):
        ids = torch.randperm(len(accuracy), generator=torch.Generator().manual_seed(step))[:16]
        head.update(optimizer, ids, keep(groups(accuracy, ids, 8, seed=1000 + step)))
    return head


def test_every_prompt_starts_at_start_and_log_z_is_the_estimate_over_beta(pool):
    head = PartitionHead(pool[0], beta=0.1, start=0.3)
    torch.testing.assert_close(head.accuracy(), torch.full((80,), 0.3))
    torch.testing.assert_close(head.log_z(torch.tensor([[3, 4], [5, 6]])), torch.full((2, 2), 3.0))


def test_it_learns_accuracies_and_generalises_to_prompts_that_were_never_visited(pool):
    embeddings, accuracy = pool
    head = PartitionHead(embeddings, hidden=16)
    seen = torch.arange(60)
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for step in range(200):
        ids = seen[torch.randperm(60, generator=torch.Generator().manual_seed(step))[:16]]
        head.update(optimizer, ids, groups(accuracy, ids, 8, seed=step))
    unseen = torch.arange(60, 80)
    error = (head.accuracy(unseen) - accuracy[unseen]).abs().mean()
    spread = (accuracy[unseen] - accuracy[:60].mean()).abs().mean()
    assert error < 0.5 * spread
    assert int(head.updates) == 200


def test_replayed_successes_draw_it_to_one(pool):
    embeddings, accuracy = pool
    successes = trained(PartitionHead(embeddings, hidden=16), accuracy, keep=lambda r: torch.where(r > 0, r, math.nan))
    assert successes.accuracy(clip=False).mean() > 0.95
    everything = trained(PartitionHead(embeddings, hidden=16), accuracy)
    assert abs(everything.accuracy().mean() - accuracy.mean()) < 0.06


def test_the_papers_form_estimates_accuracy_plus_beta_times_divergence():
    # One prompt, two texts, by enumeration: weights are the sampling probabilities.
    head = PartitionHead(torch.zeros(1, 1, dtype=torch.float64), hidden=2, beta=0.2)
    old, new = torch.tensor([[0.3, 0.7]]).double(), torch.tensor([[0.6, 0.4]]).double()
    options = {"log_ratio": (new / old).log(), "weights": 2 * old}
    rewards = torch.tensor([[1.0, 0.0]])
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=200, tolerance_grad=1e-14, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = head.loss(torch.tensor([0]), rewards, **options)
        loss.backward()
        return loss

    optimizer.step(closure)
    divergence = (old * (old / new).log()).sum()
    torch.testing.assert_close(head.accuracy(clip=False)[0], 0.3 + 0.2 * divergence, rtol=0, atol=1e-7)


def test_clipping_is_for_reports_alone(pool):
    head = PartitionHead(pool[0], start=1.7)
    assert (head.accuracy() == 1).all()
    assert (head.accuracy(clip=False) > 1.5).all()
    loss = head.loss(torch.tensor([0]), torch.tensor([1.0]))
    assert loss.item() == pytest.approx(0.49, rel=1e-5)


def test_rewards_without_a_score_are_left_out(pool):
    head = PartitionHead(pool[0])
    ids = torch.tensor([1, 2])
    rewards = torch.tensor([[1.0, math.nan], [math.nan, math.nan]])
    torch.testing.assert_close(head.loss(ids, rewards), head.loss(ids[:1], torch.tensor([[1.0]])))
    for nothing in (head.loss(ids, torch.full((2, 3), math.nan)), head.loss(ids[:0], torch.ones(0, 4))):
        assert nothing == 0
        nothing.backward()
    assert all(torch.isfinite(p.grad).all() for p in head.parameters())


def test_state_goes_through_safetensors_without_the_embeddings(pool):
    head = trained(PartitionHead(pool[0], hidden=8), pool[1], steps=5)
    state = load(save(head.state_dict()))
    again = PartitionHead(pool[0], hidden=8, generator=torch.Generator().manual_seed(9))
    again.load_state_dict(state)
    assert torch.equal(again.accuracy(clip=False), head.accuracy(clip=False))
    assert int(again.updates) == 5
    assert "embeddings" not in state


def test_constant_and_half_precision_embeddings_are_taken():
    embeddings = torch.cat([torch.randn(6, 2), torch.full((6, 1), 3.0)], 1).bfloat16()
    head = PartitionHead(embeddings, hidden=4)
    assert head.accuracy().dtype == torch.float32
    assert torch.isfinite(head.embeddings).all()


def test_misuse_is_explained(pool):
    head = PartitionHead(pool[0])
    with pytest.raises(ValueError, match=r"0\.\.79"):
        head.accuracy(torch.tensor([80]))
    with pytest.raises(TypeError, match="positions in the pool"):
        head.accuracy(torch.tensor([0.5]))
    with pytest.raises(ValueError, match="prompt 1 has values"):
        PartitionHead(torch.tensor([[0.0], [math.inf]]))
    with pytest.raises(ValueError, match="a row for each"):
        head.loss(torch.tensor([0, 1]), torch.ones(3, 4))
    with pytest.raises(ValueError, match="float matrix"):
        PartitionHead(torch.zeros(3, 2, dtype=torch.int64))


# --- the running average -------------------------------------------------------------------------------------------------


def test_a_counter_that_never_forgets_is_the_posterior_mean():
    counter = RunningAccuracy(3, forgetting=1.0, prior=2.0)
    counter.update(torch.tensor([0, 2]), torch.tensor([[1.0, 1.0, 0.0], [0.0, math.nan, 0.0]]))
    counter.update(torch.tensor([0]), torch.tensor([[1.0, 0.0, 0.0]]))
    torch.testing.assert_close(counter.accuracy(), torch.tensor([4 / 8, 0.5, 1 / 4]).double())
    assert isinstance(counter, AccuracyEstimate)


def test_a_forgetful_counter_weighs_old_visits_less():
    counter = RunningAccuracy(1, forgetting=0.5, prior=1e-12)
    for rewards in ([[0.0, 0.0]], [[1.0, 1.0]]):
        counter.update(torch.tensor([0]), torch.tensor(rewards))
    assert counter.accuracy()[0] == pytest.approx(2 / 3)
    before = counter.accuracy().clone()
    counter.update(torch.tensor([0]), torch.full((1, 2), math.nan))  # not scored: no visit
    assert torch.equal(counter.accuracy(), before)


def test_counter_state_and_errors():
    counter = RunningAccuracy(4)
    counter.update(torch.tensor([1]), torch.ones(1, 8))
    again = RunningAccuracy(4)
    again.load_state_dict(counter.state_dict())
    assert torch.equal(again.accuracy(), counter.accuracy())
    with pytest.raises(ValueError, match="twice"):
        counter.update(torch.tensor([1, 1]), torch.ones(2, 8))
    with pytest.raises(ValueError, match="of 4 prompts"):
        RunningAccuracy(5).load_state_dict(counter.state_dict())


# --- embeddings ------------------------------------------------------------------------------------------------------------


def test_embeddings_are_means_of_the_last_hidden_states_whatever_the_batch():
    model = tiny_model("llama").train()
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    found = prompt_embeddings(model, prompts, batch_size=2)
    assert model.training
    model.eval()
    for row, ids in zip(found, prompts, strict=True):
        with torch.no_grad():
            hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(row, hidden[0].mean(0), rtol=1e-5, atol=1e-6)
    assert not found.requires_grad
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        prompt_embeddings(model, [[1], []])


def test_global_randomness_is_neither_used_nor_moved(pool):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = PartitionHead(pool[0], hidden=4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    again = PartitionHead(pool[0], hidden=4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))


def test_shapes_that_would_broadcast_are_refused_and_unscored_weights_do_not_count(pool):
    head, ids, rewards = (
        PartitionHead(pool[0], hidden=4),
        torch.tensor([0, 1]),
        torch.tensor([[1.0, math.nan], [0.0, 1.0]]),
    )
    for name in ("weights", "log_ratio"):
        with pytest.raises(ValueError, match=f"{name} must have the rewards' shape"):
            head.loss(ids, rewards, **{name: torch.ones(2)})
    weights = torch.ones(2, 2)
    weights[0, 1] = math.nan
    torch.testing.assert_close(head.loss(ids, rewards, weights=weights), head.loss(ids, rewards))
    with pytest.raises(ValueError, match=r"0\.\.2"):
        RunningAccuracy(3).update(torch.tensor([-1]), torch.ones(1, 2))


def test_an_update_without_a_score_changes_nothing(pool):
    head = trained(PartitionHead(pool[0], hidden=4), pool[1], steps=2)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.1)
    head.update(optimizer, torch.tensor([0]), torch.ones(1, 2))
    before = head.accuracy(clip=False)
    head.update(optimizer, torch.tensor([0]), torch.full((1, 2), math.nan))
    assert torch.equal(head.accuracy(clip=False), before)
    assert int(head.updates) == 3
