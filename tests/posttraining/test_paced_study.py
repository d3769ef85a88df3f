"""The study's own machinery: stacked estimates, rollouts counted and censored, nothing seen of held-out prompts."""

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from cameraready import check
from cameraready.evidence import Claim, Context, Untested
from cameraready.evidence.subject import UsageError
from cameraready.models import tiny_model, tiny_tokenizer
from cameraready.posttraining._testbed import EnumerableTask, GRUs, from_function, many_answers
from cameraready.posttraining.paced import PartitionHead, RunningAccuracy, study
from cameraready.posttraining.paced.experiment import worlds
from cameraready.posttraining.paced.experiment.arms import ARMS, RATES, Arm
from cameraready.posttraining.paced.experiment.estimates import Counters, Heads
from cameraready.posttraining.paced.experiment.measures import at_rollouts, at_target, quality, rollouts_to
from cameraready.posttraining.paced.experiment.training import Run, Settings, World, trained
from cameraready.posttraining.paced.experiment.worlds import POOL, SMALL, place_of

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def world():
    return World(many_answers(40), 30, width=12, warm_steps=30)


@pytest.fixture(scope="module")
def policy(world):
    return world.policy([0, 1, 2])


def run_of(world, policy, arm, numbers=(0, 1, 2), **settings):
    chosen = Settings(**{"prompts": 4, "group": 4, "replayed": 4, **settings})
    return Run(world, policy, arm, numbers, chosen, world.task.features[: world.pool], 4e-3)


# --- estimates ------------------------------------------------------------------------------------------------------------


def test_stacked_heads_are_single_heads_side_by_side():
    embeddings = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    heads = Heads(embeddings, [3, 7], beta=0.05, hidden=8, lr=3e-3, steps=4)
    generator = torch.Generator().manual_seed(1)
    singles = [PartitionHead(embeddings, hidden=8, generator=torch.Generator().manual_seed(n)) for n in (3, 7)]
    optimizers = [torch.optim.AdamW(head.parameters(), lr=3e-3, weight_decay=0.0) for head in singles]
    for _ in range(5):
        prompts = torch.stack([torch.randperm(20, generator=generator)[:6] for _ in range(2)])
        rewards = (torch.rand(2, 6, 3, generator=generator) < 0.7).float()
        rewards[:, 0, 1] = math.nan
        heads.update(prompts, rewards)
        for head, optimizer, ids, row in zip(singles, optimizers, prompts, rewards, strict=True):
            head.update(optimizer, ids, row, steps=4)
    for row, head in zip(heads.accuracy(), singles, strict=True):
        torch.testing.assert_close(row, head.accuracy(clip=False), rtol=1e-4, atol=1e-5)


def test_counters_are_the_components():
    counters, single = Counters(5, 2, forgetting=0.8), RunningAccuracy(5, forgetting=0.8)
    prompts, rewards = (
        torch.tensor([[0, 1], [4, 2]]),
        torch.tensor([[[1.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, 0.0]]]),
    )
    counters.update(prompts, rewards)
    single.update(prompts[1], rewards[1])
    assert torch.equal(counters.accuracy()[1], single.accuracy())


def test_quality_is_that_of_scipy():
    generator = torch.Generator().manual_seed(0)
    estimate, truth = torch.rand(2, 50, generator=generator), torch.rand(2, 50, generator=generator).round(decimals=1)
    found = quality(estimate, truth)
    for row in range(2):
        assert float(found["spearman"][row]) == pytest.approx(spearmanr(estimate[row], truth[row]).statistic)
    torch.testing.assert_close(found["mae"], (estimate - truth).abs().double().mean(1), rtol=1e-6, atol=1e-8)


# --- rollouts -------------------------------------------------------------------------------------------------------------


def points(*rows):
    return [{"drawn": torch.tensor(drawn), "accuracy": torch.tensor(a), "x": torch.tensor(x)} for drawn, a, x in rows]


def test_the_time_to_an_accuracy_is_interpolated_and_censored():
    seen = points(
        ([0.0, 0.0, 0.0], [0.2, 0.9, 0.1], [1.0, 5.0, 0.0]),
        ([100.0, 100.0, 200.0], [0.6, 0.9, 0.2], [3.0, 5.0, 0.0]),
        ([200.0, 200.0, 400.0], [1.0, 0.9, 0.9], [5.0, 5.0, 0.0]),
    )
    rollouts, reached = rollouts_to(seen, limit=300.0, target=0.8)
    assert rollouts.tolist() == pytest.approx([150.0, 0.0, 300.0], rel=1e-6)
    assert reached.tolist() == [True, True, False]
    at = at_target(seen, "x", limit=300.0, target=0.8)
    assert at[:2].tolist() == pytest.approx([4.0, 5.0], rel=1e-6)
    assert at[2].isnan()
    assert at_rollouts(seen, "x", 50.0).tolist() == pytest.approx([2.0, 5.0, 0.0])


@pytest.mark.parametrize("name", ["uniform", "selection", "dynamic", "lilo"])
def test_every_rollout_that_was_sampled_is_paid_for(world, policy, name, monkeypatch):
    from cameraready.posttraining.paced.experiment import training

    run, sampled = run_of(world, policy, ARMS[name]), []
    real = training.sample

    def counted(*arguments):
        batch = real(*arguments)
        sampled.append(batch)
        return batch

    monkeypatch.setattr(training, "sample", counted)
    for _ in range(3):
        before, first = run.drawn.clone(), len(sampled)
        run.advance()
        paid = (run.drawn - before).tolist()
        waves = [batch.rewards[0].numel() for batch in sampled[first:]]
        # Each run pays for the waves up to the one that gave it enough, the slowest for all.
        assert max(paid) == sum(waves)
        assert set(paid) <= {sum(waves[:n]) for n in range(1, len(waves) + 1)}
        assert name == "dynamic" or set(paid) == {sum(waves)}
    assert run.kept.tolist() == [3 * 4 * 4] * 3


def test_dynamic_sampling_keeps_groups_with_right_and_wrong_answers(world, policy):
    run = run_of(world, policy, ARMS["dynamic"], group=8)
    batch = run._until_informative()
    mixed = batch.rewards.amax(-1) > batch.rewards.amin(-1)
    enough = run.drawn < 7 * 4 * 8  # a run that used up its seven waves takes what is left
    assert bool(mixed[enough].all())
    for row in batch.prompts:
        assert len(set(row.tolist())) == 4


@pytest.mark.parametrize("name", ["paced", "dynamic", "running-average", "oracle"])
def test_a_run_does_not_depend_on_the_runs_beside_it(world, policy, name):
    together, alone = run_of(world, policy, ARMS[name]), run_of(world, policy.select([1]), ARMS[name], numbers=(1,))
    for _ in range(6):
        together.advance()
        alone.advance()
    assert int(together.drawn[1]) == int(alone.drawn[0])
    for ours, theirs in zip(together.policy.parameters(), alone.policy.parameters(), strict=True):
        torch.testing.assert_close(ours[1], theirs[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", list(ARMS))
def test_held_out_prompts_are_never_seen(world, policy, name):
    """With their verdicts turned round, training is the same to the last bit."""
    task = world.task
    correct = task.correct.clone()
    correct[world.pool :] = ~correct[world.pool :]
    other = World(
        EnumerableTask(task.name, task.tokens, task.lengths, correct, task.features, start=task.start, vocabulary=task.vocabulary),
        world.pool, width=world.width,
    )  # fmt: skip
    runs = [run_of(each, policy, ARMS[name]) for each in (world, other)]
    for _ in range(3):
        for run in runs:
            run.advance()
    assert all(torch.equal(a, b) for a, b in zip(*(run.policy.parameters() for run in runs), strict=True))
    assert runs[0].held_out()["accuracy"].tolist() != runs[1].held_out()["accuracy"].tolist()


def test_learning_from_replayed_successes_is_what_the_arms_say(world, policy):
    """Fed on successes alone: taught as they are, they draw the estimate to 1; by their groups' means, to these."""
    ends = {}
    for learns in ("fresh", "naive", "weighted"):
        run = run_of(world, policy, Arm(selection="uniform", replay="error", learns=learns))
        run.advance()
        replayed = run._replayed()
        replayed.rewards[:], replayed.group_means[:] = 1.0, 0.25
        replayed.prompts[:] = torch.arange(4)
        replayed.mask[:] = True
        batch = run._collect()
        for _ in range(150):
            run._learn_difficulty(batch.with_rewards(torch.full_like(batch.rewards, math.nan)), replayed)
        ends[learns] = float(run.heads.accuracy()[:, :4].mean())
    assert ends["naive"] > 0.95
    assert ends["weighted"] == pytest.approx(0.25, abs=0.05)
    assert abs(ends["fresh"] - 0.5) < 0.2


def test_the_exact_choice_is_by_exact_accuracies(world, policy):
    run = run_of(world, policy, ARMS["oracle"])
    for sampler in run.samplers:
        sampler.explore = 0.0
    chosen, truth = run._selected(), run.pool_accuracy()
    distance = (truth - 0.5).abs()
    for row, ids in zip(distance, chosen, strict=True):
        assert row[ids].max() <= row.sort().values[3] + 1e-6


def test_a_run_stops_when_its_budget_is_drawn(world, policy):
    settings = Settings(budget=200, prompts=4, group=4, every=64)
    drawn = [point["drawn"] for _, point in trained(world, policy, ARMS["lilo"], (0, 1, 2), settings)]
    assert drawn[0].tolist() == [0.0] * 3
    assert drawn[-1].tolist() == [224.0] * 3  # 32 a step


# --- the study -------------------------------------------------------------------------------------------------------------


def test_every_claim_of_the_paper_is_there():
    claims = study.STUDY.claims
    assert {c.number for c in claims if isinstance(c, Untested) or c.scope != "ours"} == set(range(1, 7))
    assert min(c.number for c in claims if isinstance(c, Claim) and c.scope == "ours") == 7


def test_learning_rates_are_of_the_common_grid_and_conditions_are_json():
    assert {arm.lr for arm in ARMS.values()} <= set(RATES)
    conditions = list(study.plan("desk", POOL))
    assert json.loads(json.dumps(conditions)) == conditions
    assert {c["arm"] for c in conditions if "arm" in c} == set(ARMS)
    assert len(place_of(POOL).numbers) >= 10


def test_the_proposition_holds_on_trained_policies():
    place = place_of(SMALL)
    rows = study.trial(SMALL, Context(seed=0, prepared=place.prepared()), part="proposition")
    assert len(rows) == 2
    assert all(row["deviation"] < 1e-10 and row["divergence"] > 1e-4 for row in rows)


def test_parts_of_a_place_hold_its_runs_and_their_policies():
    place = place_of(SMALL)
    prepared = place.prepared()
    part = place.part(1, of=2)
    assert part.numbers == (1,)
    whole = GRUs([0, 1], place.world.task.vocabulary, 16, width=16, layers=1).load(
        {k: torch.as_tensor(v) for k, v in prepared.items()}
    )
    assert torch.equal(part.policy(prepared).parameters()[0][0], whole.parameters()[0][1])


class Mine:
    """An estimate of one's own: the last group's mean of each prompt."""

    def __init__(self, embeddings, seed):
        self.values = torch.full((len(embeddings),), 0.5)

    def update(self, prompt_ids, rewards):
        self.values[prompt_ids] = rewards.mean(1)

    def accuracy(self):
        return self.values


def test_an_estimate_of_ones_own_is_what_is_selected_by(world, policy):
    class Fixed(Mine):
        def accuracy(self):
            return torch.linspace(0, 1, 30)

    run = Run(
        world,
        policy,
        Arm(selection="own"),
        (0, 1, 2),
        Settings(prompts=4, group=4, explore=0.0),
        world.task.features[:30],
        4e-3,
        Fixed,
    )
    chosen = run._selected()
    assert (chosen.sort(1).values == torch.tensor([13, 14, 15, 16])).all()
    batch = run._collect()
    run.owns.update(batch.prompts, batch.rewards)
    for row, estimate in enumerate(run.owns.estimates):
        assert torch.equal(estimate.values[batch.prompts[row]], batch.rewards[row].mean(1))

    class Short(Mine):
        def accuracy(self):
            return self.values[:3]

    run = Run(
        world,
        policy,
        Arm(selection="own"),
        (0, 1, 2),
        Settings(prompts=4, group=4),
        world.task.features[:30],
        4e-3,
        Short,
    )
    with pytest.raises(ValueError, match="one a prompt"):
        run.advance()


def test_a_task_of_ones_own_is_trained_on(tmp_path, monkeypatch):
    """From Python, as a function: even numbers are right for even prompts; the policy knows nothing at first."""
    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path))
    monkeypatch.setattr(worlds, "Settings", partial(Settings, budget=512, every=128))
    task = from_function(
        "parity", [(a, b, 9) for a in range(4) for b in range(4)], lambda p, c: (c[0] + c[1]) % 2 == p % 2, range(24)
    )
    found = check("paced-rl", on=task, with_={"mine": Mine}, tier="smoke", quiet=True)
    assert [(f.arm, f.error) for f in found.failures] == []
    rows = found.rows.filter(found.rows["kind"] == "summary")
    assert set(rows["arm"]) == {"paced", "selection", "uniform", "mine"}
    assert rows["rollouts"].is_finite().all()
    assert np.isfinite(rows["accuracy"].to_numpy()).all()


def test_a_pool_that_is_too_small_is_refused():
    task = from_function("tiny", [(0,), (1,)], lambda p, c: True, range(3))
    with pytest.raises(ValueError, match="at least 4 prompts"):
        place_of(task)


def test_prompts_are_held_out_where_something_can_carry_over_to_them():
    def task(features):
        return from_function("any", [(0,), (1,)], lambda p, c: c[0] == p % 2, range(40), features=features)

    assert place_of(task(torch.randn(40, 3))).world.pool == 30
    for alone in (None, torch.eye(40), torch.zeros(40, 0)):
        world = place_of(task(alone)).world
        assert world.pool == 40
        assert world.held_out.tolist() == list(range(40))
        assert world.task.features.shape == (40, 40)


def test_too_few_prompts_of_ones_own_are_refused_before_a_model_is_opened(tmp_path, monkeypatch):
    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path))
    rows = "\n".join(json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) for i in range(6))
    (tmp_path / "few.jsonl").write_text(rows)
    with pytest.raises(UsageError, match="6 different prompts are too few"):
        check(
            "paced-rl",
            on=(tiny_model("llama"), tiny_tokenizer()),
            data=f"{tmp_path}/few.jsonl:prompt,answer",
            tier="smoke",
            quiet=True,
        )
