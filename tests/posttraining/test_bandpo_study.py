"""The study of the band: its losses are TRL's own, its matching finds equal KL, its bandit and its census are what they say."""

import inspect
import math

import mpmath
import numpy as np
import pytest
import torch

from cameraready.posttraining import _runs, _testbed
from cameraready.posttraining.bandpo import band_policy_loss
from cameraready.posttraining.bandpo.experiment import exactness, training
from cameraready.posttraining.bandpo.experiment.arms import ARMS, Own, per_seed, terms
from cameraready.posttraining.bandpo.experiment.bandit import play
from cameraready.posttraining.bandpo.experiment.matching import matched
from cameraready.posttraining.bandpo.experiment.trials import SHIPPED

pytestmark = pytest.mark.torch

#: TRL's settings of each arm that TRL has, and the arm's own.
IN_TRL = {
    "clip": ({"loss_type": "grpo", "epsilon": 0.2}, 0.2),
    "clip-higher": ({"loss_type": "grpo", "epsilon": 0.2, "epsilon_high": 0.28}, 0.2),
    "dapo": ({"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}, 0.2),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04},
        0.03,
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.5}, 1.5),
}


@pytest.mark.parametrize("name", IN_TRL)
def test_losses_and_gradients_are_trls_own(name, tmp_path):
    pytest.importorskip("trl")
    import trl

    from cameraready.models import tiny_model, tiny_tokenizer
    from cameraready.posttraining._logprobs import completion_logprobs
    from tests.posttraining.training import config, dataset, letters

    settings, setting = IN_TRL[name]
    trainer = trl.GRPOTrainer(
        model=tiny_model("llama"),
        processing_class=tiny_tokenizer(),
        args=config("grpo", tmp_path, 1, **settings),
        train_dataset=dataset(),
        reward_funcs=[letters],
    )
    trainer.model.eval()  # no accumulation to be divided by
    g = torch.Generator().manual_seed(1)
    ids, mask = torch.randint(97, 117, (4, 16), generator=g), torch.ones(4, 10, dtype=torch.long)
    mask[0, 6:] = mask[2, 3:] = 0
    attention = torch.cat([torch.ones(4, 6, dtype=torch.long), mask], 1)
    logps = completion_logprobs(trainer.model, ids, attention, 10).logps
    old = (logps + 0.4 * torch.randn(4, 10, generator=g)).detach().clamp(max=-0.05)
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0])
    inputs = {
        "prompt_ids": ids[:, :6],
        "prompt_mask": attention[:, :6],
        "completion_ids": ids[:, 6:],
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }
    expected = trainer.compute_loss(trainer.model, inputs)
    losses, counts = ARMS[name](
        logps[None, None], old[None, None], advantages[None, None], mask.bool()[None, None], torch.tensor([setting])
    )
    assert losses.item() == pytest.approx(expected.item(), abs=1e-6)
    weights = list(trainer.model.parameters())
    for one, other in zip(*(torch.autograd.grad(each.sum(), weights) for each in (losses, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
    assert 0 < counts["clip_up"].item() < 1


def test_the_bands_arm_is_the_components_loss():
    g = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(2, 3, 4, 5, generator=g)
    logps, advantages = old + 0.5 * torch.randn(2, 3, 4, 5, generator=g), torch.randn(2, 3, 4, generator=g)
    mask = torch.rand(2, 3, 4, 5, generator=g) < 0.8
    setting = torch.tensor([0.05, 0.01])
    losses, counts = ARMS["band-kl"](logps, old, advantages, mask, setting)
    lower, upper = per_seed(ARMS["band-kl"].bounds, old, setting)
    for s in range(2):
        flat = [x[s].flatten(0, 1) for x in (logps, old, advantages, mask, lower, upper)]
        loss, stats = band_policy_loss(*flat, agg="seq-mean-token-mean")
        assert losses[s].item() == pytest.approx(loss.item(), rel=1e-5)
        assert counts["clip_up"][s].item() == pytest.approx(stats["clip_up"].item())
        assert counts["clip_down"][s].item() == pytest.approx(stats["clip_down"].item())
        by_p = torch.stack([counts[f"up_{k}"][s] / counts[f"tokens_{k}"][s] for k in range(5)])
        torch.testing.assert_close(by_p.double(), stats["clip_up_by_p"], equal_nan=True)


def test_dcpos_bounds_by_hand():
    """r (r - 1) = eps / p above, r (1 - r) = eps / p below."""
    p = torch.tensor([0.05, 0.5, 0.95])
    lower, upper = ARMS["dcpo"].bounds(p.log(), 0.2)
    assert (upper * (upper - 1) * p).tolist() == pytest.approx([0.2] * 3, rel=1e-5)
    held = lower > 0.5
    assert (lower * (1 - lower) * p)[held].tolist() == pytest.approx([0.16] * int(held.sum()), rel=1e-5)
    assert lower[0] == 0.5


def test_matching_interpolates_on_logarithms_and_takes_the_nearest_where_nothing_fits():
    def kl(m):
        return 0.02 * m**1.5

    tries = (0.1, 0.3, 1.0, 3.0)
    assert matched(tries, [kl(m) for m in tries], 0.01) == pytest.approx(0.5 ** (2 / 3))
    assert matched(tries, [kl(m) for m in tries], 5.0) == pytest.approx(3.0)
    assert any(matched(tries, [0.02] * 4, 0.02) == pytest.approx(each) for each in tries)
    # Crossings at 0.17, 0.47 and 2: the one nearest to the usual setting, on logarithms.
    assert matched(tries, [0.01, 0.03, 0.01, 0.03], 0.02) == pytest.approx(2.0)


def test_the_bandit_without_a_clip_climbs_its_exact_gradient_and_a_clip_holds_it_back():
    wide = play(ARMS["clip"], range(2), torch.tensor([1e6, 1e6]), 4)
    tight = play(ARMS["clip"], range(2), torch.tensor([0.05, 0.05]), 4)
    assert (np.diff(wide["rare"], axis=0) > 0).all()
    assert (tight["rare"][-1] < wide["rare"][-1]).all()
    assert (tight["spent"][-1] < wide["spent"][-1]).all()
    assert wide["clip_up"].sum() == 0 < tight["clip_up"].sum()
    assert wide["rare"][0] == pytest.approx(0.02)
    again = play(ARMS["clip"], range(1, 2), torch.tensor([1e6]), 4)
    assert again["rare"][:, 0] == pytest.approx(wide["rare"][:, 1])


def test_the_bandits_first_step_is_the_gradient_of_the_mean_reward():
    task = _testbed.arms(100, seed=3)
    policy = _testbed.Tabular(task, 1, start=task.start, dtype=torch.float64)
    (expected,) = _testbed.exact.expected_gradient(policy, task)
    logits = task.start[0].log().clone().requires_grad_()
    old, reward = torch.log_softmax(logits.detach(), -1), task.reward[0].double()
    mean = (old.exp() * reward).sum()
    shape = (1, 1, 100, 1)
    each, *_ = terms(
        ARMS["clip"],
        torch.log_softmax(logits, -1).view(shape),
        old.view(shape),
        (reward - mean).view(shape),
        torch.ones(shape, dtype=torch.bool),
        torch.tensor([0.2]),
    )
    (gradient,) = torch.autograd.grad(-(old.exp() * each.flatten()).sum(), [logits])
    torch.testing.assert_close(gradient, expected[0].flatten(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("divergence", ["kl", "tv", "chi2"])
def test_the_censuss_own_roots_solve_the_equation(divergence):
    f = {
        "kl": lambda u: -mpmath.log(u) + u - 1,
        "tv": lambda u: abs(u - 1) / 2,
        "chi2": lambda u: (u - 1) ** 2,
    }[divergence]
    with mpmath.workdps(40):
        for p in (1e-3, 0.3, 0.9):
            q = 1 - mpmath.mpf(p)
            for ratio in exactness.exact_bounds(divergence, math.log(p), 0.05):
                if 0 < ratio < 0.9999 / p:
                    spent = p * f(ratio) + q * f((1 - ratio * p) / q)
                    assert float(spent) == pytest.approx(0.05, rel=1e-9)


def test_the_census_covers_both_ends():
    first, last = exactness.probabilities(0, 4), exactness.probabilities(exactness.BLOCKS - 1, 4)
    assert first[0] == pytest.approx(math.log(1e-12))
    assert -math.expm1(last[-1]) == pytest.approx(1e-12, rel=1e-6)


def test_arms_start_from_the_same_policies_and_what_is_tuned_is_not_what_is_judged():
    field = SHIPPED["two-strategies-small"]()
    given = training.prepared(field)
    assert not {*training.TUNING} & {*range(field.seeds)}
    one, other = (training.trained(field, ARMS[name], given, 1.0) for name in ("clip", "band-kl"))
    begins = [[row for row in rows if row["kind"] == "curve" and row["round"] == 0] for rows in (one, other)]
    assert len(begins[0]) == field.seeds
    for first, second in zip(*begins, strict=True):
        assert first["accuracy_now"] == second["accuracy_now"]
    ends = [row for row in one if row["kind"] == "end"]
    assert [row["run"] for row in ends] == [0, 1]
    assert all(row["reached"] or row["rounds_to_goal"] == field.rounds for row in ends)
    # The target is clip's own KL at its usual setting, of the tuning's seeds.
    assert float(given["target"]) > 0


def test_a_loss_of_the_users_joins_in():
    field = SHIPPED["two-strategies-small"]()
    given = training.prepared(field)

    def reinforce(logps, old_logps, advantages, mask, setting):
        return -(advantages[..., None] * logps * mask).sum((1, 2, 3)) / mask.sum((1, 2, 3))

    rows = training.trained(field, Own(reinforce), given, 1.0)
    assert {row["kind"] for row in rows} == {"end", "curve"}
    with pytest.raises(ValueError, match="one number for each of the 2 seeds"):
        training.trained(field, Own(lambda *each: reinforce(*each).sum()), given, 1.0)


def test_a_loss_of_the_users_that_is_clip_is_clip_also_in_the_bandit():
    def clip(logps, old_logps, advantages, mask, setting):
        ratio, a = (logps - old_logps).exp(), advantages[..., None]
        each = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
        return (each * mask).sum((1, 2, 3)) / mask.sum((1, 2, 3))

    one, other = (play(arm, range(2), torch.ones(2), 5) for arm in (Own(clip), ARMS["clip"]))
    for name in ("rare", "entropy", "spent"):
        assert one[name] == pytest.approx(other[name], rel=1e-6)


def test_a_task_on_which_nothing_moves_is_told():
    field = SHIPPED["two-strategies-small"]()
    field.task.correct[:], field.task.reward[:] = False, 0.0
    with pytest.raises(ValueError, match="nothing to be clipped"):
        training.prepared(field)


def test_the_full_configuration_builds_and_costs_count_what_trains_a_model(tmp_path):
    from cameraready.evidence import Spec
    from cameraready.posttraining.bandpo import study
    from cameraready.posttraining.bandpo.experiment import trials

    opened = study.open_workload(Spec(trials.LARGE, "shipped", trials.LARGE))
    assert opened.name == trials.LARGE
    assert [each["arm"] for each in study.plan("full", trials.LARGE)] == ["band-kl", "clip"]
    asked = inspect.signature(_runs.grpo_run).parameters
    assert {*trials.FULL_RUN, *trials.OWN_RUN} - {"new_tokens"} <= {*asked}
    pytest.importorskip("trl")
    args = _runs.recipe("3B", tmp_path, use_cpu=True, bf16=False, num_iterations=trials.FULL_RUN["iterations"])
    assert args.num_generations == trials.FULL_RUN["group"]
