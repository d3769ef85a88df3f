"""The study's own measurements: chances against frequencies, competitors against their definitions, and the user's model."""

import dataclasses
import importlib.resources
import itertools
import math

import polars as pl
import pytest
import torch
from torch.nn.functional import kl_div

pytestmark = pytest.mark.torch

transformers = pytest.importorskip("transformers")

from cameraready.evidence import SpecError  # noqa: E402
from cameraready.evidence.checking import check  # noqa: E402
from cameraready.evidence.specs import value_spec  # noqa: E402
from cameraready.lm._workload import LMWorkload  # noqa: E402
from cameraready.lm.led import (  # noqa: E402
    LEDConfig,
    chains,
    led_distribution,
    led_logprobs,
    plans,
    rivals,
    sharpening,
    trials,
    walking,
)
from cameraready.lm.led.rivals import Layers, Rule, law  # noqa: E402
from cameraready.models import tiny_model, tiny_tokenizer  # noqa: E402

SMALL = sharpening.Budget(imitate=25, reinforce=2, batch=64)
EVERY = {
    **{kind: Rule(kind, 0.8) for kind in (*rivals.PLAIN, "dola")},
    "led": Rule("led", 0.8, LEDConfig(depth=3, think_end=None)),
}


@pytest.fixture(scope="module")
def learner():
    return sharpening.taught(0, SMALL, unseen=20, seen=200)


def last_layers(model, ids):
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    return Layers(model, [states[:, -1] for states in hidden])


# --- the task --------------------------------------------------------------------------------------------------------


def test_all_right_answers_are_listed_and_nothing_else_is_right():
    walk = chains.draw(1, torch.Generator().manual_seed(3))[0]
    start, target, *allowed = walk.prompt[:-1].tolist()
    expected = set()
    for moves in itertools.product(allowed, repeat=chains.STEPS):
        at, row = start, []
        for move in moves:
            _, factor, summand = chains.MOVES[move - chains.VALUES]
            at = factor * at + summand
            row += [move, at]
        if at == target and all(0 <= value < chains.VALUES for value in row[1::2]):
            expected.add(tuple(row))
    assert {tuple(row) for row in walk.answers.tolist()} == expected
    assert len(expected) == len(walk.answers) >= chains.LEAST
    ids = torch.cat([walk.prompt.expand(len(walk.answers), -1), walk.answers], dim=1)
    assert chains.right(ids).all()
    for place in range(chains.PROMPT, ids.shape[1]):  # one token off, anywhere
        for shift in (1, 7):
            wrong = ids.clone()
            wrong[:, place] = (wrong[:, place] + shift) % chains.VOCABULARY
            listed = torch.tensor([tuple(row[chains.PROMPT :].tolist()) in expected for row in wrong])
            assert torch.equal(chains.right(wrong), listed)
    forbidden = next(m for m in range(len(chains.MOVES)) if chains.VALUES + m not in allowed)
    other = ids.clone()
    other[:, 2] = chains.VALUES + forbidden
    assert not chains.right(other)[(ids[:, chains.PROMPT :: 2] == ids[0, 2]).any(1)].any()


def test_unseen_problems_are_unseen_and_models_depend_on_their_seed_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    budget = sharpening.Budget(imitate=4, reinforce=2, batch=32, prompts=8)
    first, second, other = (sharpening.taught(seed, budget, unseen=5, seen=50) for seed in (1, 1, 2))
    for one in (first, second):
        sharpening.reinforce(one, 1, budget)
    assert torch.equal(torch.random.get_rng_state(), before)
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.model.lm_head.weight, other.model.lm_head.weight)
    seen = {tuple(w.prompt.tolist()) for w in chains.draw(50, torch.Generator().manual_seed(1))}
    assert not seen & {tuple(w.prompt.tolist()) for w in first.unseen}


def test_teaching_and_reinforcement_raise_the_chance_of_right_answers():
    budget = sharpening.Budget(imitate=60, reinforce=40, batch=64, prompts=6)
    learner = sharpening.taught(3, budget, unseen=1, seen=6)
    rule = Rule("temperature", 1.0)
    untaught = float(walking.chances(sharpening.new_model(3), learner.seen, rule).sum(1).mean())
    taught = float(walking.chances(learner.model, learner.seen, rule).sum(1).mean())
    assert taught > 0.05 > 1000 * untaught
    sharpening.reinforce(learner, 3, budget)
    assert float(walking.chances(learner.model, learner.seen, rule).sum(1).mean()) > taught + 0.05


# --- chances ---------------------------------------------------------------------------------------------------------


def test_chances_are_frequencies(learner):
    """Two problems, the likeliest found by chance, against 4,000 samples of the very loop that reinforcement uses."""
    chance = walking.chances(learner.model, learner.unseen, Rule("temperature", 1.0)).sum(1)
    n = 4000
    for i in chance.topk(2).indices.tolist():
        ids = learner.unseen[i].prompt.expand(n, -1)
        found = chains.right(sharpening.rollouts(learner.model, ids, torch.Generator().manual_seed(i))).double().mean()
        p = float(chance[i])
        assert abs(float(found) - p) < 4.5 * math.sqrt(p * (1 - p) / n)


def test_leds_chances_are_those_of_the_component(learner):
    walk = learner.unseen[0]
    ids = torch.cat([walk.prompt.expand(len(walk.answers), -1), walk.answers], dim=1)
    led = LEDConfig(depth=4, think_end=None)
    with torch.no_grad():
        expected = led_logprobs(learner.model, ids, chains.PROMPT, led=led, temperature=0.9).double().sum(1)
    ours = walking.answer_log_probs(learner.model, ids, Rule("led", 0.9, led), rows_at_once=3)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_tries_slopes_and_different_answers_in_closed_form():
    chance = torch.tensor([[0.5, 0.0], [0.1, 0.1]], dtype=torch.float64)
    found = walking.passes(chance.sum(1))
    assert found["pass_1"] == pytest.approx(0.35)
    assert found["pass_4"] == pytest.approx((1 - 0.5**4 + 1 - 0.8**4) / 2)
    assert found["unsolved"] == pytest.approx(1 - found["pass_16"])
    assert walking.expected_answers(chance, 2).tolist() == pytest.approx([0.75, 2 * 0.19])
    by_temperature = {
        t: torch.tensor([[1 - (1 - (0.2 + 0.7 * t)) ** (1 / 16)]], dtype=torch.float64) for t in (0.1, 0.3, 0.6)
    }
    assert walking.slope_of(by_temperature) == pytest.approx(0.7)


# --- the competitors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(EVERY))
def test_laws_sum_to_one_and_are_what_generate_samples_from(name):
    """4,000 first tokens from transformers' `generate` (or ours) against the law."""
    model, n = tiny_model("qwen2", n_layers=4), 4000
    ids = torch.tensor([[5, 80, 7, 111]])
    rule = EVERY[name]
    log_p = law(rule, last_layers(model, ids))[0].double()
    assert float(log_p.exp().sum()) == pytest.approx(1.0, abs=1e-5)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    out = rivals.generate(
        rule, model, ids.expand(n, -1), cache=trials._read(model, ids[:, :-1], n), new_tokens=1, seed=3, pad=256
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    counts = torch.bincount(out[:, -1], minlength=len(log_p)).double()
    assert (counts[log_p == -math.inf] == 0).all()
    p = log_p.exp()
    assert ((counts / n - p).abs() < 5 * (p * (1 - p) / n).sqrt() + 1e-3).all()


def test_generation_from_a_read_prompt_is_that_from_the_prompt():
    model = tiny_model("gemma3", n_layers=4)
    ids = torch.tensor([[5, 80, 7, 111, 9, 14, 3, 90, 17, 33]])
    for rule in EVERY.values():
        outs = [
            rivals.generate(rule, model, ids.expand(6, -1), cache=cache, new_tokens=5, seed=3, pad=256)
            for cache in (trials._read(model, ids[:, :-1], 6), None)
        ]
        assert torch.equal(*outs)


def test_dola_contrasts_as_its_definition_says():
    generator = torch.Generator().manual_seed(0)
    final, early = torch.randn(3, 50, generator=generator) * 3, torch.randn(4, 3, 50, generator=generator) * 3
    got = rivals.dola_contrast(final, early)
    for row in range(3):
        p, q = final[row].softmax(-1), early[:, row].softmax(-1)
        mean = (p + q) / 2
        divergence = 0.5 * (
            kl_div(p.log().expand(4, -1), mean, reduction="none").mean(-1)
            + kl_div(q.log(), mean, reduction="none").mean(-1)
        )
        expected = p.log() - q[divergence.argmax()].log()
        expected[p < 0.1 * p.max()] = -math.inf
        torch.testing.assert_close(got[row], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        rivals.dola_contrast(final, final[None])[got.isfinite()], torch.zeros(int(got.isfinite().sum()))
    )


def test_dola_takes_every_second_layer_of_the_lower_half():
    assert rivals.dola_layers(24, tied=True) == [2, 4, 6, 8, 10]
    assert rivals.dola_layers(32, tied=False) == list(range(0, 16, 2))
    assert rivals.dola_layers(2, tied=True) == [1]


# --- on a language model ---------------------------------------------------------------------------------------------


def own(tmp_path=None, lines=(), columns="prompt,answer", tasks=""):
    model = tiny_model("llama", n_layers=5, max_positions=2048)
    value = (model, tiny_tokenizer(max_positions=2048))
    options = {"tasks": tasks} if tasks else {}
    if lines:
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(lines))
        options |= {"data": str(path), "data_columns": columns}
    return LMWorkload(dataclasses.replace(value_spec(value), options=options).with_value(value))


def test_the_coins_draws_are_told_from_a_law_that_is_not_theirs():
    """The census sees what it is for: p-values of the true law are no alarm, those of other temperatures and depths are."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * (torch.randn(1, 1, 300, generator=generator) + torch.randn(8, 1, 300, generator=generator))
    right = led_distribution(logits, LEDConfig())
    wrong = (
        led_distribution(logits, LEDConfig(), temperature=0.65),
        led_distribution(logits, LEDConfig(exploit="never")),
        led_distribution(logits[:1], LEDConfig(depth=1)),
    )
    assert trials._frequencies(logits[:, 0], right, 20_000, generator) > 1e-3
    for step in wrong:
        assert trials._frequencies(logits[:, 0], step, 20_000, generator) < 1e-4


def test_a_comparison_at_one_temperature_leaves_out_every_other():
    names = {*walking.rules(), "before-sharpening", "final-norm"}
    kinds = {*plans.RIVALS, "led"}
    assert names - set(plans.all_but("0.6")) == kinds
    assert names - set(plans.all_but("1.0")) == {f"{kind}@1.0" for kind in kinds}
    assert set(trials.rules(LEDConfig())) <= names


def test_looks_at_layers_in_closed_form():
    p = torch.tensor([[0.5, 0.25, 0.25, 1e-30]]).log()
    look = rivals.looks(p, torch.tensor([[0, 1]]))
    assert look["entropy"] == pytest.approx(1.5 * math.log(2), rel=1e-5)
    assert look["candidate_entropy"] == pytest.approx(-(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3)), rel=1e-5)
    assert look["coverage"] == 1.0
    assert rivals.looks(p.flip(1), torch.tensor([[0, 1]]))["coverage"] == 0.0


def test_the_final_layer_is_compared_with_those_below_it():
    curves = [
        {"entropy": e, "candidate_entropy": c, "coverage": v} for e, c, v in ((1, 0.5, 1), (2, 0.4, 0.9), (6, 0.9, 0.1))
    ]
    found = rivals.asymmetry(curves)
    assert found == pytest.approx({"entropy_ratio": 1 / 4, "candidate_gain": 0.4})
    longer = rivals.asymmetry([*curves, *curves[1:]])
    assert longer == pytest.approx({"entropy_ratio": 1 / 4, "candidate_gain": 0.4, "coverage_near": 0.5})


def test_thinking_ends_with_the_token_where_there_is_one():
    tokenizer = tiny_tokenizer()
    lm = type("LM", (), {"model": tiny_model("llama", n_layers=3), "tokenizer": tokenizer})
    assert trials.config_for(lm, 3) == LEDConfig(depth=3, think_end=None)
    for depth in (0, 4):
        with pytest.raises(SpecError, match="this model has 3 layers"):
            trials.config_for(lm, depth)
    tokenizer.add_tokens(["</think>"])
    assert trials.config_for(lm, 2) == LEDConfig(depth=2, think_end=(262,))


def test_prompts_without_answers_and_tasks_that_are_not_sampled_are_refused(tmp_path):
    with pytest.raises(SpecError, match="name their column"):
        trials.with_answers(own(tmp_path, ['{"prompt": "a"}'], "prompt"))
    with pytest.raises(SpecError, match="is not sampled here"):
        trials.with_answers(own(tasks="lm-eval:arc_easy"))


def test_problems_come_from_what_the_user_named(tmp_path):
    workload = own(tmp_path, ['{"prompt": "one", "answer": 1}', '{"prompt": "two", "answer": 2}'])
    lm = workload.model()
    assert [trials.problem_of(workload, lm, i, 5).answer for i in range(2)] == ["1", "2"]
    assert trials.problem_of(workload, lm, 2, 5) is None
    workload = own(tasks="countdown,arithmetic")
    lm = workload.model()
    assert [trials.problem_of(workload, lm, i, 4).kind for i in range(4)] == ["countdown", "arithmetic"] * 2
    assert trials.problem_of(workload, lm, 4, 4) is None


def test_a_run_on_a_users_model_with_a_rule_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path))

    def constant(model, tokenizer, ids, n, new_tokens, seed):
        return torch.cat([ids, torch.tensor([tokenizer("7", add_special_tokens=False)["input_ids"]])], dim=1).expand(
            n, -1
        )

    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a number", "answer": 7}\n{"prompt": "another", "answer": 8}')
    value = (tiny_model("llama", n_layers=5, max_positions=2048), tiny_tokenizer(max_positions=2048))
    found = check(
        "led-decoding", on=value, data=f"{path}:prompt,answer", with_={"mine": constant}, tier="smoke", quiet=True
    )
    assert found.failures == []
    solved = found.rows.filter(pl.col("decoding") == "mine").sort("block")
    assert solved["pass_1"].to_list() == [1.0, 0.0]
    assert set(trials.rules(LEDConfig())) <= set(found.rows["decoding"])
    ids = torch.tensor([[1, 2, 3]])
    assert found.component(ids, max_new_tokens=2).shape == (1, 5)


def test_the_law_rows_that_ship_come_out_again():
    path = importlib.resources.files("cameraready.lm.led") / "results.parquet"
    rows = pl.read_parquet(path).filter((pl.col("part") == "law") & (pl.col("block") == 0))
    again = trials.laws(0)[0]
    for name in ("frequencies_p", "from_top_k_when_sure", "entropy_lost"):
        assert rows[name].item() == pytest.approx(again[name], abs=1e-4)
