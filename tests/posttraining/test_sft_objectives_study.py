"""The study's own machinery: the synthetic source, vectorised training, adapters on cached states, and the plan of claims."""

import json
import math

import polars as pl
import pytest
import torch

from cameraready import check
from cameraready.evidence import Claim, Context, Untested
from cameraready.evidence.subject import UsageError
from cameraready.lm._workload import tiny
from cameraready.posttraining.sft_objectives import ProbabilityObjective, prior_strength, study
from cameraready.posttraining.sft_objectives.experiment import adapters, arms, continuum, synthetic

pytestmark = pytest.mark.torch

# --- the source ------------------------------------------------------------------------------------------------------------


def generators(seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def test_answers_follow_the_keys_permutation():
    source = continuum.Source.drawn([3, 4])
    written = source.draw(50, 0.0, generators([0, 1]))
    for run in range(2):
        for row in written[run].tolist():
            key, last = row[0] - continuum.LETTERS, row[continuum.PROMPT]
            for letter in row[1 + continuum.PROMPT :]:
                last = int(source.tables[run, key, last])
                assert letter == last


def test_judged_prompts_are_never_demonstrated():
    source = continuum.Source.drawn([0])
    demonstrated = source.draw(4000, 0.0, generators([0]))[0]
    judged = source.judged()[0]

    def sums(written):
        return written[:, 1 : 1 + continuum.PROMPT].sum(-1) % continuum.EVERY

    assert (sums(judged) == 0).all()
    assert (sums(demonstrated) != 0).all()
    assert int(demonstrated[:, 1:].max()) < continuum.LETTERS
    assert int(demonstrated[:, 1:].min()) >= 0


def test_noise_replaces_its_share_of_answers_tokens():
    source = continuum.Source.drawn([0])
    clean, noisy = (source.draw(3000, noise, generators([5]))[0] for noise in (0.0, 0.3))
    assert torch.equal(clean[:, : 1 + continuum.PROMPT], noisy[:, : 1 + continuum.PROMPT])
    changed = (clean != noisy)[:, 1 + continuum.PROMPT :].double().mean()
    expected = 0.3 * (1 - 1 / continuum.LETTERS)
    assert abs(float(changed) - expected) < 4 * (expected * (1 - expected) / 18_000) ** 0.5


def test_network_is_torchs_gated_recurrent_unit():
    weights = continuum.initial([7])
    unit = torch.nn.GRU(continuum.LETTERS + continuum.KEYS, continuum.WIDTH, batch_first=True)
    order = torch.cat([torch.arange(continuum.WIDTH, 2 * continuum.WIDTH), torch.arange(continuum.WIDTH)])
    order = torch.cat([order, torch.arange(2 * continuum.WIDTH, 3 * continuum.WIDTH)])  # torch has reset before update
    with torch.no_grad():
        unit.weight_ih_l0.copy_(weights["into"][0].T[order])
        unit.weight_hh_l0.copy_(weights["again"][0].T[order])
        unit.bias_ih_l0.zero_()
        unit.bias_hh_l0.zero_()
        written = continuum.Source.drawn([7]).draw(5, 0.0, generators([1]))
        hot = torch.nn.functional.one_hot(written[0, :, :-1], continuum.LETTERS + continuum.KEYS).float()
        states = unit(hot)[0][:, continuum.PROMPT :]
        expected = states @ weights["out"][0]
    torch.testing.assert_close(continuum.answer_logits(weights, written)[0], expected, rtol=1e-4, atol=1e-5)


def test_a_run_does_not_depend_on_the_others():
    seeds = [1, 2, 3]
    found = {}
    for chosen in (seeds, [2]):
        weights = continuum.initial(chosen)
        trained, norms = continuum.train(
            weights, continuum.Source.drawn(chosen), ProbabilityObjective(alpha=0.5), rates=torch.full((len(chosen),), 0.01),
            noise=0.1, steps=5, batch=8, seeds=chosen,
        )  # fmt: skip
        place = chosen.index(2)
        found[len(chosen)] = {name: value[place] for name, value in trained.items()}, norms[place]
    torch.testing.assert_close(found[3], found[1], rtol=1e-4, atol=1e-6)


def test_steps_are_those_of_torchs_adamw_with_clipping():
    seeds = [4]
    source = continuum.Source.drawn(seeds)
    written = source.draw(8, 0.0, generators(seeds))
    ours = {name: value.clone().requires_grad_() for name, value in continuum.initial(seeds).items()}
    theirs = {name: value.clone().requires_grad_() for name, value in continuum.initial(seeds).items()}
    mine = continuum.AdamW(ours)
    other = torch.optim.AdamW(list(theirs.values()), lr=0.01, betas=(0.9, 0.95), weight_decay=0.01)
    objective = ProbabilityObjective("nll")
    for _ in range(4):
        loss = 20 * continuum.losses(objective, ours, written).sum()
        gradients = dict(zip(ours, torch.autograd.grad(loss, list(ours.values())), strict=True))
        mine.step(gradients, torch.tensor([0.01]))
        (20 * continuum.losses(objective, theirs, written).sum()).backward()
        torch.nn.utils.clip_grad_norm_(list(theirs.values()), 1.0)
        other.step()
        other.zero_grad()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_uniform_model_is_judged_by_chance():
    source = continuum.Source.drawn([0])
    flat = {name: torch.zeros_like(value) for name, value in continuum.initial([0]).items()}
    found = continuum.judge(flat, source)
    assert float(found["accuracy"]) == pytest.approx(continuum.LETTERS**-continuum.ANSWER, rel=1e-3)
    assert float(found["kl"]) == pytest.approx(math.log(continuum.LETTERS), rel=1e-5)


def test_a_threshold_that_masks_divides_each_runs_loss_by_what_it_keeps():
    weights, source = continuum.initial([1, 2]), continuum.Source.drawn([1, 2])
    written = source.draw(16, 0.0, generators([1, 2]))
    logps = continuum.demonstrated_logps(weights, written).flatten(1)
    objective = ProbabilityObjective("nll", threshold=0.04, normalize="kept")
    keep = logps.exp() >= 0.04
    torch.testing.assert_close(continuum.losses(objective, weights, written), (-logps * keep).sum(-1) / keep.sum(-1))


def test_learning_rates_are_chosen_by_accuracy_then_by_divergence():
    assert arms.best_rate({1e-3: (0.5, 1.0), 1e-2: (0.6, 2.0)}) == 1e-2
    assert arms.best_rate({1e-3: (0.5001, 2.0), 1e-2: (0.5, 1.0)}) == 1e-2


def test_the_thresholded_tenth_is_the_priors():
    from cameraready.posttraining.sft_objectives import PriorStrength

    prior = PriorStrength.of_logprobs(torch.linspace(0.01, 0.99, 99).log())
    assert arms.objectives(prior)["top-tenth"].threshold == pytest.approx(0.892, abs=2e-3)


# --- adapters --------------------------------------------------------------------------------------------------------------

ROWS = [(f"what follows {i}", f" {i + 1}") for i in range(24)]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_cached_states_give_the_models_own_numbers(kind, monkeypatch):
    """One of two layers is tuned; scores through the cached states are those of the whole model, and the model is left as it was."""
    monkeypatch.setattr(adapters, "LAYERS", 1)
    lm = tiny(kind)
    before = {name: value.clone() for name, value in lm.model.state_dict().items()}
    modules = [name for name, _ in lm.model.named_modules()]
    tuned = adapters.Tuned(lm, ROWS)
    with tuned.opened():
        assert tuned.first == 1
        found = tuned.prior(range(8))
        tuned.train(ProbabilityObjective("nll"), list(range(8)), rate=1e-2, seed=0)
        cached = tuned.judge(range(8, 12))
        whole = prior_strength(tuned.adapted, lm.tokenizer, ROWS[8:12])
        kept = tuned._label_logps(range(8, 12))[0].detach()
    assert whole.mean == pytest.approx(float(kept.exp().mean()), rel=1e-4)
    assert cached["nll_held_out"] == pytest.approx(-float(kept.mean()), rel=1e-4)
    assert found.mean == pytest.approx(prior_strength(lm.model, lm.tokenizer, ROWS[:8]).mean, rel=1e-4)
    after = lm.model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [name for name, _ in lm.model.named_modules()] == modules
    assert not any("forward" in vars(module) for module in lm.model.modules())
    assert all(p.requires_grad for p in lm.model.parameters())


def test_smoothed_labels_are_trained_on_too():
    lm = tiny("llama")
    tuned = adapters.Tuned(lm, ROWS)
    with tuned.opened():
        tuned.reset(0)
        logps, means = tuned._label_logps(range(4), True)
        tuned.reset(0)
        ids, labels = tuned.pairs[0]
        whole = lm.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        place = next(i for i, label in enumerate(labels) if label != -100) - 1
        assert float(means[0, 0].detach()) == pytest.approx(float(whole[place].detach().mean()), rel=1e-4)
        assert float(logps[0].detach()) == pytest.approx(float(whole[place, labels[place + 1]].detach()), rel=1e-4)
        tuned.train(ProbabilityObjective("label_smoothing"), range(8), rate=1e-2, seed=0)


def test_own_arms_must_be_objectives():
    with pytest.raises(TypeError, match="mine must be a ProbabilityObjective, got int"):
        arms.checked({"mine": 1})


def test_only_adapters_learn_and_learning_helps():
    lm = tiny("llama")
    tuned = adapters.Tuned(lm, ROWS)
    with tuned.opened():
        tuned.reset(0)
        start = tuned.judge(range(8))["nll_held_out"]
        tuned.train(ProbabilityObjective("nll"), list(range(8)) * 4, rate=1e-2, seed=0)
        assert tuned.judge(range(8))["nll_held_out"] < start - 0.5
        tuned.reset(0)
        assert tuned.judge(range(8))["nll_held_out"] == pytest.approx(start, rel=1e-6)


# --- the study ---------------------------------------------------------------------------------------------------------------


def test_every_claim_of_the_paper_is_there():
    claims = study.STUDY.claims
    assert {c.number for c in claims if isinstance(c, Untested) or c.scope != "ours"} == set(range(1, 9))
    assert min(c.number for c in claims if isinstance(c, Claim) and c.scope == "ours") == 9


def test_conditions_are_json_and_ten_splits_stand_behind_a_model():
    for name in (*study.STUDY.workloads["desk"], "own"):
        conditions = list(study.plan("desk", name))
        assert json.loads(json.dumps(conditions)) == conditions
    assert len({c["split"] for c in study.plan("desk", "own")}) == 10


def test_advice_and_family_repeat_rows_of_the_arms():
    prepared = synthetic.prepare((20, 21), {"none": 0})
    rows = list(
        synthetic.trial(prepared, dict, "none", 0.1, steps=3, rates=(1e-2,), judged=(20, 21), only=("nll", "alpha=1"))
    )
    frame = pl.DataFrame(rows, infer_schema_length=None)
    pick = ["run", "accuracy", "kl", "norm"]
    assert frame.filter(arm="recommended").select(pick).equals(frame.filter(arm="nll").select(pick))
    assert frame.filter(arm="family").select(pick).equals(frame.filter(arm="alpha=1").select(pick))
    assert frame.filter(arm="nll")["gain"].to_list() == [0.0, 0.0]
    assert set(frame["arm"]) == {"nll", "alpha=1", "untrained", "recommended", "family"}


def test_a_model_of_ones_own_with_demonstrations(tmp_path, monkeypatch):
    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path / "home"))
    path = tmp_path / "demos.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": a.strip()}) + "\n" for p, a in ROWS))
    lm = tiny("llama")
    found = check(
        "beyond-log-likelihood", on=(lm.model, lm.tokenizer), data=f"{path}:prompt,answer", tier="smoke", quiet=True
    )
    assert [f.error for f in found.failures] == []
    rows = found.rows
    assert set(rows["arm"]) == {"untrained", "nll", "alpha=0.5", "alpha=1", "top", "recommended", "alternative"}
    assert rows["setting"].unique().to_list() == ["nll rather than alpha=1 on your demonstrations"]
    pick = ["run", "accuracy", "nll_held_out", "rate"]
    assert rows.filter(arm="recommended").select(pick).equals(rows.filter(arm="nll").select(pick))
    assert rows.filter(arm="alternative").select(pick).equals(rows.filter(arm="alpha=1").select(pick))
    assert isinstance(found.component, ProbabilityObjective)


def test_too_few_demonstrations_are_refused(tmp_path):
    path = tmp_path / "demos.jsonl"
    path.write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    lm = tiny("llama")
    with pytest.raises(UsageError, match="takes 20 or more"):
        check(
            "beyond-log-likelihood", on=(lm.model, lm.tokenizer), data=f"{path}:prompt,answer", tier="smoke", quiet=True
        )


def test_an_arm_of_ones_own_joins(tmp_path):
    prepared = synthetic.prepare((20,), {"none": 0})
    mine = {"mine": ProbabilityObjective(alpha=2.0)}
    ctx = Context(seed=0, prepared=prepared, own=mine, without=frozenset({"nll"}))
    rows = list(
        synthetic.trial(
            prepared, ctx.select, "none", 0.1, steps=2, rates=(1e-2,), judged=(20,), only=("nll", "alpha=1")
        )
    )
    assert {row["arm"] for row in rows} == {"mine", "alpha=1", "family", "untrained"}
