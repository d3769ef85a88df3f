"""Training many seeds at once: each is what it would be alone, optimizers are torch's, the warm-up reaches its teacher."""

import itertools
import math

import pytest
import torch

from cameraready.posttraining._testbed import (
    AdamW,
    GRUs,
    Tabular,
    arms,
    clip_per_seed,
    exact,
    from_function,
    group_advantages,
    sample,
    seed_generators,
    train,
    warm_up,
)
from tests.posttraining.test_testbed_policies import ragged

pytestmark = pytest.mark.torch


def clipped(logps, batch, context):
    a = group_advantages(batch.rewards)[..., None]
    ratio = (logps - batch.old_logps).exp()
    per_token = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)) * batch.mask
    return per_token.sum((1, 2, 3)) / batch.mask.sum((1, 2, 3)), {"ratio": ratio.mean((1, 2, 3))}


def test_a_seeds_run_does_not_depend_on_the_seeds_beside_it():
    task = ragged(prompts=6)
    settings = {
        "loss": clipped,
        "steps": 12,
        "prompts_per_step": 4,
        "group": 5,
        "minibatches": 2,
        "lr": 1e-2,
        "every": 4,
        "ks": (2,),
    }

    def run(seeds):
        policy = GRUs(seeds, task.vocabulary, 4, width=12)
        return train(policy, task, seeds=seeds, **settings)

    together, alone = run([3, 1, 8]), run([8])
    mine = [row for row in together if row["run"] == 8]
    assert [row["step"] for row in mine] == [0, 4, 8, 12]
    assert mine[0]["accuracy"] != mine[-1]["accuracy"]
    for a, b in zip(mine, alone, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name] == pytest.approx(b[name], abs=2e-4, nan_ok=True), name


def test_learning_rates_side_by_side_are_the_runs_apart():
    task = arms(12, good=2, prompts=3)
    rates = torch.tensor([0.0, 0.01, 0.2])
    rows = train(
        Tabular(task, 3, start=task.start),
        task,
        loss=clipped,
        steps=10,
        prompts_per_step=2,
        group=8,
        lr=rates,
        seeds=[5, 5, 5],
    )
    for i, rate in enumerate(rates.tolist()):
        alone = train(
            Tabular(task, 1, start=task.start),
            task,
            loss=clipped,
            steps=10,
            prompts_per_step=2,
            group=8,
            lr=rate,
            seeds=[5],
        )
        assert alone[-1]["accuracy"] == pytest.approx(rows[-3 + i]["accuracy"], abs=1e-5)
    assert rows[-3]["kl_start"] == 0
    assert rows[-1]["kl_start"] > rows[-2]["kl_start"] > 0


def test_a_step_is_the_step_of_torch_on_each_seed():
    """Clipping to the seed's own norm and AdamW: against torch's functions, seed by seed."""
    g = torch.Generator().manual_seed(0)
    stacked = [torch.randn(3, 4, 2, generator=g), torch.randn(3, 5, generator=g)]
    rates = torch.tensor([1e-3, 1e-2, 1e-1])
    ours = [p.clone() for p in stacked]
    update = AdamW(ours, rates, weight_decay=0.1)
    apart = [[p[s].clone().requires_grad_() for p in stacked] for s in range(3)]
    theirs = [torch.optim.AdamW(ps, lr=float(rate), weight_decay=0.1) for ps, rate in zip(apart, rates, strict=True)]
    for size in (0.1, 3.0, 30.0, 0.0):
        gradients = [size * torch.randn(p.shape, generator=g) for p in stacked]
        norms = clip_per_seed(ours, gradients, 1.0)
        update.step()
        for s in range(3):
            for p, grad in zip(apart[s], gradients, strict=True):
                p.grad = grad[s].clone()
            norm = torch.nn.utils.clip_grad_norm_(apart[s], 1.0)
            assert float(norms[s]) == pytest.approx(float(norm), rel=1e-5)
            theirs[s].step()
    for p, parts in zip(ours, zip(*apart, strict=True), strict=True):
        torch.testing.assert_close(p, torch.stack(parts).detach(), rtol=1e-5, atol=1e-6)


def test_one_seeds_large_gradient_does_not_shrink_anothers():
    p = [torch.zeros(2, 3)]
    gradient = torch.tensor([[100.0, 0.0, 0.0], [0.3, 0.4, 0.0]])
    norms = clip_per_seed(p, [gradient], 1.0)
    torch.testing.assert_close(norms, torch.tensor([100.0, 0.5]))
    torch.testing.assert_close(p[0].grad, torch.tensor([[1.0, 0.0, 0.0], [0.3, 0.4, 0.0]]))
    clip_per_seed(p, [gradient], None)
    assert torch.equal(p[0].grad, gradient)
    with pytest.raises(ValueError, match="does not depend on the policy"):
        clip_per_seed(p, [None], 1.0)


def test_training_follows_the_exact_gradient_when_groups_are_large():
    """One plain gradient step on a very large group moves the mean reward by rate times the squared norm of the exact gradient."""
    task = ragged(prompts=2)
    policy = GRUs(3, task.vocabulary, 4, width=6, dtype=torch.float64)
    squared = sum(g.flatten(1).square().sum(1) for g in exact.expected_gradient(policy, task))

    def reinforce(logps, batch, context):
        return -(group_advantages(batch.rewards, "none") * logps.sum(-1)).mean((1, 2)), {}

    rate = 1e-3
    rows = train(
        policy,
        task,
        loss=reinforce,
        steps=1,
        prompts_per_step=2,
        group=40_000,
        lr=rate,
        optimizer="sgd",
        clip_norm=None,
    )
    for s in range(3):
        gain = rows[3 + s]["reward"] - rows[s]["reward"]
        assert gain == pytest.approx(rate * float(squared[s]), rel=0.05)


def test_all_rewards_equal_leaves_the_policy_where_it_was():
    task = from_function("all right", [[0, 2], [1, 2]], lambda prompt, row: True, [0, 1])
    rows = train(Tabular(task, 2), task, loss=clipped, steps=3, prompts_per_step=2, group=4, lr=0.1, every=3)
    assert [row["accuracy"] for row in rows] == [1.0] * 4
    assert [row["kl_start"] for row in rows] == [0.0] * 4
    assert rows[-1]["kl_spent"] == 0.0
    assert rows[-1]["gradient_norm"] == 0.0


def test_divergence_spent_is_that_of_every_round():
    task = arms(8, good=3)
    policy = Tabular(task, 2)
    logs = []

    def remember(policy, step, log_p):
        logs.append(log_p)
        return {}

    rows = train(
        policy,
        task,
        loss=clipped,
        steps=6,
        prompts_per_step=1,
        group=16,
        minibatches=1,
        epochs=3,
        lr=0.05,
        every=1,
        kl_every=1,
        record=remember,
    )
    steps = torch.stack([exact.kl(a, b).mean(-1) for a, b in itertools.pairwise(logs)])
    assert float(steps.min()) > 0
    assert rows[-1]["kl_spent"] == pytest.approx(float(steps[:, 1].sum()), rel=1e-4)
    assert rows[5]["kl"] == pytest.approx(float(steps[1, 1]), rel=1e-4)


def test_hooks_see_every_round():
    task = arms(8, good=2, prompts=5)
    seen = []

    def choose(policy, step, generators):
        return torch.full((2, 4), step % 5)

    def collect(policy, step, generators):
        candidates = sample(policy, task, torch.arange(5), 6, generators)
        spread = candidates.rewards.std(-1)
        return candidates.rows(spread.topk(2, dim=-1).indices)

    common = {
        "loss": clipped,
        "steps": 3,
        "group": 6,
        "every": 2,
        "after": lambda policy, step, batch: seen.append(batch.prompts),
    }
    rows = train(Tabular(task, 2), task, choose=choose, **common)
    assert [int(p.unique()) for p in seen] == [0, 1, 2]
    assert [row["rollouts"] for row in rows if row["run"] == 1] == [0, 48, 72]
    seen.clear()
    train(
        Tabular(task, 2),
        task,
        collect=collect,
        record=lambda policy, step, log_p: {"steps": torch.tensor([step, -step])},
        **common,
    )
    assert all(p.shape == (2, 2) for p in seen)


def test_minibatches_show_every_group_once_an_epoch():
    task = arms(8, good=2, prompts=6)
    shown, rounds = [], []

    def loss(logps, batch, context):
        shown.append(batch.index)
        rounds.append(context.batch.index)
        assert context.minibatch == (len(shown) - 1) % 6
        return clipped(logps, batch, context)

    train(Tabular(task, 2), task, loss=loss, steps=2, prompts_per_step=6, group=5, minibatches=3, epochs=2, lr=0.1)
    for start in range(0, 12, 3):
        assert torch.equal(torch.cat(shown[start : start + 3], 1), rounds[start])
    assert not torch.equal(rounds[0], rounds[6])


def test_a_run_is_repeated_by_its_seeds():
    task = arms(8, good=2, prompts=4)
    runs = [
        train(
            Tabular(task, 2, start=task.start),
            task,
            loss=clipped,
            steps=5,
            prompts_per_step=4,
            group=6,
            lr=0.1,
            seeds=s,
        )
        for s in ([0, 1], [0, 1], [2, 1])
    ]
    assert str(runs[0]) == str(runs[1])
    assert str(runs[0][-2]) != str(runs[2][-2])


def test_warm_up_reaches_its_teacher():
    task = ragged(prompts=3)
    weights = torch.rand(3, 8, generator=torch.Generator().manual_seed(0)) + 0.1
    weights[:, 4] = 0.02
    policy = warm_up(GRUs(2, task.vocabulary, 4, width=24), task, weights, 300, prompts_per_step=3)
    teacher = (weights / weights.sum(-1, keepdim=True)).log()
    assert float(exact.kl(teacher, policy.all_log_probs(task).detach()).max()) < 0.01
    assert float(exact.kl(teacher, Tabular(task, 1).all_log_probs(task).detach()).max()) > 0.1


def test_a_seeds_warm_up_does_not_depend_on_the_seeds_beside_it():
    task = ragged(prompts=3)
    weights = torch.rand(3, 8, generator=torch.Generator().manual_seed(0)) + 0.1

    def taught(seeds):
        policy = GRUs(seeds, task.vocabulary, 4, width=8)
        return warm_up(policy, task, weights, 15, lr=0.02, clip_norm=0.3, seeds=seeds).all_log_probs(task).detach()

    torch.testing.assert_close(taught([3, 1, 8])[2], taught([8])[0], rtol=0, atol=1e-4)


def test_what_is_visited_in_the_warm_up_does_not_change_what_is_taught():
    task = ragged(prompts=2)
    weights = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 93.0]]).expand(2, 8)
    flat = torch.ones(2, 8)
    policies = [warm_up(Tabular(task, 1), task, weights, 400, visit=v, lr=0.1) for v in (weights, flat)]
    for policy in policies:
        p = policy.all_log_probs(task).detach().exp()[0]
        torch.testing.assert_close(p, (weights / 100).contiguous(), rtol=0.25, atol=1e-3)


def test_a_loss_that_is_no_number_is_reported_with_its_seed():
    task = arms(4, good=1, prompts=2)

    def broken(logps, batch, context):
        losses = logps.sum((1, 2, 3))
        return torch.where(torch.arange(3) == 1, math.nan, losses) if context.step == 2 else losses, {}

    with pytest.raises(ValueError, match="is nan for seed 21 in round 2"):
        train(Tabular(task, 3), task, loss=broken, steps=5, prompts_per_step=2, group=2, seeds=[20, 21, 22])
    with pytest.raises(ValueError, match="one number for each of the 3 seeds"):
        train(
            Tabular(task, 3),
            task,
            loss=lambda logps, batch, context: (logps.sum(), {}),
            steps=1,
            prompts_per_step=2,
            group=2,
        )


def test_a_loss_without_the_policy_is_refused():
    task = arms(4, good=1, prompts=2)

    def constant(logps, batch, context):
        return logps.detach().sum((1, 2, 3)), {}

    with pytest.raises(ValueError, match="does not depend on the policy"):
        train(Tabular(task, 2), task, loss=constant, steps=1, prompts_per_step=2, group=2)


def test_nan_rewards_stop_the_run():
    task = arms(4, good=1, prompts=2)

    def collect(policy, step, generators):
        batch = sample(policy, task, torch.arange(2), 4, generators)
        return batch.with_rewards(torch.full_like(batch.rewards, math.nan))

    with pytest.raises(ValueError, match="NaN or infinite"):
        train(Tabular(task, 2), task, loss=clipped, steps=1, collect=collect)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts_per_step": 3}, "has 2 prompts, fewer than 3"),
        ({"prompts_per_step": 2, "minibatches": 3}, "2 prompts cannot be cut into 3"),
        ({"seeds": [1]}, "the policy has 2 seeds, got 1"),
        ({"optimizer": "adamax"}, "optimizer must be 'adamw', 'sgd' or a callable"),
        ({"lr": -1.0}, "must not be negative"),
        ({"lr": torch.ones(3)}, "one for each of the 2 seeds"),
        ({"every": 0}, "must be at least 1"),
    ],
)
def test_mistakes_are_named(settings, message):
    task = arms(4, good=1, prompts=2)
    with pytest.raises(ValueError, match=message):
        train(Tabular(task, 2), task, loss=clipped, steps=1, group=2, **{"prompts_per_step": 2, **settings})


def test_warm_up_needs_a_distribution():
    task = ragged()
    with pytest.raises(ValueError, match="no start distribution"):
        warm_up(Tabular(task, 1), task)
    with pytest.raises(ValueError, match="weights must have shape"):
        warm_up(Tabular(task, 1), task, -torch.ones(3, 8))
    assert seed_generators(1)
