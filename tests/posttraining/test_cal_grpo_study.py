"""The study's own machinery: games, exact chances, gradients in training, and the user's model."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch

from cameraready.evidence import Claim, Context, Untested
from cameraready.posttraining.cal_grpo import study
from cameraready.posttraining.cal_grpo.attempts import later_failures
from cameraready.posttraining.cal_grpo.experiment import games, training, trials
from cameraready.posttraining.cal_grpo.experiment.dialogue import attempt_log_probs, converse, enumerated, sampled

pytestmark = pytest.mark.torch

SMALL = {
    "key": games.key(prompts=3, words=4, attempts=3),
    "hidden": games.hidden(kinds=2, attempts=3),
    "number": games.number(attempts=3, size=5),
    "ask": games.ask(keys=3),
}


def seeded(n):
    return [torch.Generator().manual_seed(s) for s in range(n)]


# --- games ---------------------------------------------------------------------------------------------------------------


def test_the_listed_ways_are_all_that_lead_through_a_maze():
    game = games.mazes(prompts=3)
    every = torch.tensor(list(itertools.product(range(4), repeat=8)))
    for prompt in range(3):
        right, _ = game.judge(torch.full((len(every),), prompt), every)
        found = {tuple(way) for way in every[right].tolist()}
        assert found == {tuple(way) for way in game.extra["ways"][prompt].tolist()}
        assert found


def test_feedback_tells_what_it_should():
    number, ask = SMALL["number"], SMALL["ask"]
    right, said = number.judge(torch.tensor([2, 2, 2]), torch.tensor([[1], [2], [3]]))
    assert right.tolist() == [False, True, False]
    assert (said[0], said[2]) == (number.words + 1, number.words + 2)
    right, said = ask.judge(torch.tensor([0, 1, 2]), torch.full((3, 1), 3))
    assert not right.any()
    assert len(set(said.tolist())) == 3
    assert max(said.tolist()) == ask.vocabulary - 1


# --- chances -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_enumerated_chances_of_a_policy_without_opinions(name):
    game = SMALL[name]
    policy = training.policies(game, [0])
    policy.load({key: torch.zeros_like(value) for key, value in policy.state().items()})
    found = enumerated(policy, game)
    expected = 1 - (1 - 1 / game.words) ** np.arange(1, game.attempts + 1)
    np.testing.assert_allclose(found.verified[0], expected, atol=1e-7)
    np.testing.assert_allclose(found.rates[0], 1 / game.words, atol=1e-7)


@pytest.mark.parametrize("name", SMALL)
def test_enumerated_chances_are_those_of_sampling(name):
    game = SMALL[name]
    policy = training.policies(game, [3, 4])
    exact, drawn = enumerated(policy, game), sampled(policy, game, 2_000, seed=1)
    n = 2_000 * game.prompts
    bound = 4.5 * (exact.verified * (1 - exact.verified) / n).sqrt()
    assert ((exact.verified - drawn.verified).abs() < bound).all()
    assert ((exact.repeats - drawn.repeats).abs() < 4.5 * (0.25 / n) ** 0.5 + 0.01).all()


@pytest.mark.parametrize("name", [*SMALL, "maze"])
def test_scored_attempts_are_the_sampled_ones(name):
    """Log-probabilities under teacher forcing, against the policy asked word by word."""
    game = SMALL.get(name) or games.mazes(prompts=2, attempts=2)
    policy = training.policies(game, [0, 1])
    prompts = torch.arange(game.prompts).repeat(4).expand(2, -1)
    talk = converse(policy, game, prompts, seeded(2))
    found = attempt_log_probs(policy, game, talk)
    expected = torch.zeros_like(found)
    state, last = policy.begin(prompts.shape[1], game.features[prompts]), None
    for k in range(game.attempts):
        if not game.sees:
            state, last = policy.begin(prompts.shape[1], game.features[prompts]), None
        for place in range(game.length):
            state, logits = policy.advance(state, last)
            last = talk.words[:, :, k, place]
            expected[:, :, k] += logits[..., : game.words].log_softmax(-1).gather(-1, last[..., None])[..., 0]
        if game.sees:
            state, _ = policy.advance(state, last)
            last = talk.said[:, :, k]
    expected = torch.where(talk.reached, expected, 0.0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def slope(game, options, direction, rows=24_000):
    """Mean of the estimated gradient along a direction of the parameters, its error, and the exact slope of V@K."""
    policy = training.policies(game, [0])
    width = 1e-3
    values = []
    for sign in (1, -1):
        moved = policy.state()
        values.append(
            enumerated(
                policy.copy().load({k: v + sign * width * direction[k] for k, v in moved.items()}), game
            ).verified[0, -1]
        )
    exact = float(values[0] - values[1]) / (2 * width)
    each = rows // (game.prompts * training.GROUP)
    estimates = []
    for batch in range(20):
        generators = [torch.Generator().manual_seed(batch)]
        prompts = torch.arange(game.prompts).repeat(each // 20).repeat_interleave(training.GROUP)[None]
        talk = converse(policy, game, prompts, generators)
        loss = training.objective(policy, game, talk, training.Credit(options, game, 1).of(talk)).sum()
        found = torch.autograd.grad(-loss, policy.parameters())
        estimates.append(sum(float((g * d).sum()) for g, d in zip(found, direction.values(), strict=True)))
    return np.mean(estimates), np.std(estimates, ddof=1) / np.sqrt(20), exact


def test_training_climbs_verification_by_outcomes_always_and_calibrated_where_failures_say_nothing():
    def direction(game):
        generator = torch.Generator().manual_seed(5)
        shapes = training.policies(game, [0]).state()
        return {k: torch.randn(v.shape, generator=generator) for k, v in shapes.items()}

    for name, options in (
        ("ask", {"method": "trajectory"}),
        ("ask", {"lam": 1.0}),
        ("hidden", {}),
        ("hidden", {"method": "trajectory"}),
    ):
        mean, error, exact = slope(SMALL[name], options, direction(SMALL[name]))
        assert abs(mean - exact) < 4 * error, (name, options)
        assert abs(exact) > 4 * error
    # Naive weighting climbs sum_k P(reach k) p_k instead: with one p for all attempts, (1 - (1 - p)^K) / p grad p.
    game = SMALL["hidden"]
    mean, error, exact = slope(game, {"method": "naive"}, direction(game))
    policy, rates = training.policies(game, [0]), []
    for sign in (1, -1):
        moved = {k: v + sign * 1e-3 * direction(game)[k] for k, v in policy.state().items()}
        rates.append(enumerated(policy.copy().load(moved), game).success[0, :, 0])
    p = (rates[0] + rates[1]) / 2
    predicted = float(((1 - (1 - p) ** 3) / p * (rates[0] - rates[1]) / 2e-3).mean())
    assert abs(mean - predicted) < 4 * error
    assert abs(predicted - exact) > 3 * error


# --- training ------------------------------------------------------------------------------------------------------------


def test_a_seed_is_the_same_whichever_others_run_beside_it():
    game = SMALL["key"]
    for arm in ("cal", "cal-ema"):
        ends = []
        for seeds in ([7], [5, 7]):
            policy = training.policies(game, seeds)
            training.train(policy, game, training.ARMS[arm], torch.full((len(seeds),), 1e-2), 6, seeds)
            ends.append(policy.state()["head.weight"][-1])
        torch.testing.assert_close(*ends, atol=1e-6, rtol=0)


def test_an_arm_of_ones_own_takes_part():
    def mine(rewards, group_ids):
        assert rewards.shape == (len(group_ids), 3)
        return np.where(np.isnan(rewards), 0.0, rewards - 0.5)

    ctx = Context(seed=0, own={"mine": mine}, without=frozenset({"half"}))
    rows = study.trial(
        study.GRADIENTS, Context(seed=0, own={"mine": lambda r, g: r - 0.5}), part="gradient", draws=1, most=2
    )
    assert "mine" in {row["arm"] for row in rows}
    games_before = dict(games.GAMES)
    try:
        games.GAMES["key"] = lambda: SMALL["key"]
        trained = study.trial("key", ctx, part="train", arm="mine", steps=2, tuning=0, seeds=2)
        varied = study.trial("key", ctx, part="variance", seeds=1, repeats=3, warm=0)
    finally:
        games.GAMES.update(games_before)
    assert {row["run"] for row in trained} == {0, 1}
    assert {row["arm"] for row in varied} == {"trajectory", "naive", "cal", "whole", "known", "mine"}


def test_an_arm_of_ones_own_that_is_none_is_named():
    def lazy(rewards, group_ids):
        return rewards * np.nan

    def short(rewards, group_ids):
        return rewards[:, :1]

    for arm, words in ((lazy, "lazy returned NaN"), (short, "short must return an advantage for each attempt")):
        with pytest.raises(ValueError, match=words):
            study.trial(study.GRADIENTS, Context(seed=0, own={"mine": arm}), part="gradient", draws=1, most=2)


def test_a_task_with_one_attempt_is_refused():
    from cameraready.evidence import SpecError
    from cameraready.evidence.specs import value_spec
    from cameraready.posttraining._testbed.families import arms

    task = arms(20)
    with pytest.raises(SpecError, match="one attempt only"):
        study.open_workload(dataclasses.replace(value_spec(task), value=task))


def test_running_rates_are_kept_between_steps():
    game = SMALL["key"]
    credit = training.Credit(training.ARMS["cal-ema"], game, 2)
    policy = training.policies(game, [0, 1])
    generators = seeded(2)
    for _ in range(3):
        credit.of(converse(policy, game, training.drawn_prompts(game, generators), generators))
    exact = enumerated(policy, game)
    for run, rates in enumerate(credit.rates):
        np.testing.assert_allclose(rates.rates([None])[0], exact.rates[run], atol=0.2)


def test_asking_is_learnt_by_outcome_and_never_calibrated():
    game, seeds = games.ask(keys=3), [0, 1, 2]
    warm = training.imitate(training.policies(game, seeds), game, seeds)
    asked = {}
    for arm in ("cal", "whole"):
        policy = training.train(warm.copy(), game, training.ARMS[arm], torch.full((3,), 3e-2), 30, seeds)
        asked[arm] = enumerated(policy, game).verified[:, -1]
    assert (asked["whole"] > 0.95).all()
    assert (asked["cal"] < 0.75).all()  # two of three keys are tried


def test_known_weights_are_those_of_the_prompts():
    game = SMALL["hidden"]
    found = trials.known_rates(enumerated(training.policies(game, [0]), game))
    np.testing.assert_allclose(found["weights"], later_failures(found["baseline"]))
    # The same in all attempts, for the policy does not see what it tried.
    np.testing.assert_allclose(found["baseline"], found["baseline"][:, :1].repeat(3, axis=1), atol=1e-6)


# --- a language model ------------------------------------------------------------------------------------------------------


def test_scores_are_the_slopes_of_log_probabilities():
    from cameraready.lm._tasks import Problem
    from cameraready.lm._workload import tiny
    from cameraready.models import anatomy
    from cameraready.posttraining._rollouts import sample_attempts
    from cameraready.posttraining.cal_grpo.experiment.own import attempt_scores

    lm = tiny("llama")
    problem = Problem("a:", "", lambda text: False, "own")
    ((dialogue, *_),) = sample_attempts(
        lm.model, lm.tokenizer, [problem], n=2, attempts=2, max_new_tokens=3, progress=False
    )
    before = {name: p.requires_grad for name, p in lm.model.named_parameters()}
    found = attempt_scores(lm, [dialogue], 2, 4)
    assert before == {name: p.requires_grad for name, p in lm.model.named_parameters()}
    assert not anatomy(lm.model).final_norm._forward_hooks
    # By hand: for each token of an attempt, the head's row of the token less the mean row.
    head = anatomy(lm.model).head.weight.detach()
    with torch.no_grad():
        shares = lm.model(dialogue.ids[None]).logits[0].softmax(-1)
    expected = torch.zeros(2, head.shape[1])
    for place, attempt in enumerate(dialogue.attempt_ids.tolist()):
        if attempt >= 0:
            expected[attempt] += head[dialogue.ids[place]] - shares[place - 1] @ head
    np.testing.assert_allclose(found[0], expected, atol=1e-4)


def test_a_model_of_ones_own_is_measured(tmp_path, monkeypatch):
    from cameraready import check
    from cameraready.models import tiny_model, tiny_tokenizer

    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path))
    data = tmp_path / "prompts.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"number {i}:", "answer": "e"}) for i in range(5)))
    found = check("cal-grpo", on=(tiny_model("llama"), tiny_tokenizer()), data=f"{data}:prompt,answer", tier="smoke")
    assert found.rows["status"].unique().to_list() == ["done"]
    assert set(found.rows["arm"]) == {"trajectory", "naive", "cal", "half", "whole"}
    assert found.rows["run"].n_unique() == 4
    assert found.rows["weight"][0].startswith("w_1 = ")


def test_a_model_that_solves_nothing_gets_a_sentence_and_no_number(tmp_path, monkeypatch):
    from cameraready import check
    from cameraready.models import tiny_model, tiny_tokenizer

    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path))
    data = tmp_path / "prompts.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"number {i}:", "answer": f"{1234567 + i}"}) for i in range(5)))
    found = check("cal-grpo", on=(tiny_model("llama"), tiny_tokenizer()), data=f"{data}:prompt,answer", tier="smoke")
    assert found.rows["status"].unique().to_list() == ["done"]
    assert found.rows["variance"].max() == 0
    (claim,) = (each for each in found.claims if each.label == "2e")
    assert claim.verdict == "untested"
    assert "the model solves none of these problems" in claim.reason


# --- the study -------------------------------------------------------------------------------------------------------------


def test_every_claim_of_the_paper_is_there():
    claims = study.STUDY.claims
    assert {c.number for c in claims if isinstance(c, Untested) or c.scope != "ours"} == {1, 2, 3, 4}
    assert min(c.number for c in claims if isinstance(c, Claim) and c.scope == "ours") == 5


def test_conditions_are_json_and_sweeps_are_equal():
    for name in study.STUDY.workloads["desk"]:
        conditions = list(study.plan("desk", name))
        assert json.loads(json.dumps(conditions)) == conditions
        trained = [c for c in conditions if c["part"] == "train"]
        assert len({json.dumps({k: v for k, v in c.items() if k != "arm"}) for c in trained}) == (
            name != study.GRADIENTS
        )
    assert not {*trials.TUNING} & {*trials.SEEDS}
    assert len(trials.SEEDS) >= 10


def test_exact_gradients_come_by_draw():
    rows = study.trial(study.GRADIENTS, Context(seed=0), part="gradient", draws=2, most=2)
    assert {row["run"] for row in rows} == {0, 1}
    known = [row for row in rows if row["arm"] == "known-w"]
    assert max(row["bias"] for row in known) < 1e-12
    assert all(row["variance_ratio"] == pytest.approx(1) for row in rows if row["tries"] == 1 and row["arm"] == "cal")
