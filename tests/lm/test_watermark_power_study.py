"""The study's own machinery: simulated texts, measured generation, the null, and the authors' rule."""

import json
import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from scipy import stats
from transformers import WatermarkingConfig

from cameraready import check
from cameraready.evidence import Claim, Context, Untested
from cameraready.evidence.peers.environments import open_peer
from cameraready.lm._workload import tiny
from cameraready.lm.watermark_power import WatermarkCalibrator, exact_detect, study
from cameraready.lm.watermark_power.experiment import generation, human, synthetic, trials
from cameraready.lm.watermark_power.experiment.generation import MeasuringConfig
from cameraready.lm.watermark_power.sampling import own_randomness, sampling_options

pytestmark = pytest.mark.torch

# --- simulated texts ----------------------------------------------------------------------------------------------------


def test_list_masses_are_those_of_lists_of_the_stated_size():
    uniform = np.full((3, 40), 1 / 40)
    found = synthetic.list_masses(uniform, (0.1, 0.26, 0.5), 5, seed=0)
    np.testing.assert_allclose(found, np.array([4, 10, 20])[:, None, None] / 40 * np.ones(found.shape), atol=1e-6)
    certain = np.zeros((400, 40))
    certain[:, 7] = 1.0
    share = synthetic.list_masses(certain, (0.25,), 50, seed=1)[0]
    assert set(np.unique(share)) == {0.0, 1.0}
    assert abs(share.mean() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / share.size)


def small_family():
    p = np.full((synthetic.TEXTS * synthetic.POSITIONS, 1), 1.0)
    masses = np.full((len(synthetic.GAMMAS), len(p), synthetic.LISTS), 0.5, dtype=np.float32)
    return synthetic.Family("half", p, masses)


def test_simulated_counts_follow_the_bias():
    greens, kl = synthetic.simulate(small_family(), np.arange(4), 0.5, 1.0, length=50, n=2_000, seed=0)
    rate = math.e / (1 + math.e)
    assert abs(greens.mean() / 50 - rate) < 4 * math.sqrt(rate * (1 - rate) / 100_000)
    np.testing.assert_allclose(kl, rate - math.log((1 + math.e) / 2))


def test_replaced_tokens_are_green_by_chance():
    greens, _ = synthetic.simulate(small_family(), np.arange(4), 0.5, 30.0, length=100, n=2_000, seed=0, kept=0.6)
    assert abs(greens.mean() / 100 - (0.6 + 0.4 * 0.5)) < 0.01


def test_domination_needs_both():
    one = {"power": 0.8, "power_error": 0.01, "kl": 0.1, "kl_error": 0.001}
    assert trials.dominates({**one, "power": 0.9, "kl": 0.09}, one, 3.0)
    assert not trials.dominates({**one, "power": 0.9}, one, 3.0)
    assert not trials.dominates({**one, "power": 0.82, "kl": 0.09}, one, 3.0)
    assert not trials.dominates(one, one, 3.0)


def test_excess_is_the_divergence_over_the_least_of_the_curves():
    # On the line log kl = a + b z(power), b the same for both gammas, the first with half the divergence of the second.
    points = [
        {"gamma": gamma, "power": float(stats.norm.cdf(z)), "kl": scale * math.exp(0.5 * z)}
        for gamma, scale in ((0.25, 0.1), (0.5, 0.2))
        for z in (-2.0, 0.0, 2.0)
    ]
    one = {"power": float(stats.norm.cdf(1.0)), "kl": 0.15 * math.exp(0.5)}
    assert trials.excess(one, points) == pytest.approx(1.5)
    assert trials.excess({"power": 1.0, "kl": 0.1}, points) is None


def test_null_p_values_of_real_lists_keep_their_level():
    plan = WatermarkCalibrator.high_entropy(synthetic.VOCAB).predict(0.25, 2.0, alpha=1e-3, length=60)
    values = np.concatenate(
        [synthetic.null(plan.to_transformers(hashing_key=key), length=60, n=300, seed=key) for key in range(1, 7)]
    )
    assert (values <= 0.05).mean() <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / len(values))
    assert (values <= 0.5).mean() > 0.3


def test_a_watermark_that_beats_the_chosen_one_is_counted():
    def rows(arm, power, kl):
        noise = np.array([-0.01, 0.0, 0.01, 0.0])
        return pl.DataFrame({"arm": [arm] * 4, "power_stated": power + noise, "kl": kl + 0.1 * noise})

    frame = pl.concat(
        [rows("calibrated", 0.8, 0.2), rows("better", 0.9, 0.1), rows("dearer", 0.9, 0.3), rows("weaker", 0.7, 0.1)]
    )
    counted = frame.filter(study.BEATS_THE_CHOSEN)["arm"].to_list()
    assert set(counted) == {"better"}


def test_published_rule_is_the_authors_table():
    # First row of optimal_power_results_combined.csv: alpha = 0.05, 50 tokens.
    gamma, delta = trials.published(0.05, 50, None)
    assert gamma == pytest.approx(0.9462668142137298, abs=1e-9)
    # Their search also tries divergences a little above, and takes one of them.
    assert 3 < delta <= 12
    wide = WatermarkCalibrator.high_entropy().predict(gamma, 9.830725909368594, alpha=0.05, length=50, test="normal")
    assert wide.power > 0.95
    assert wide.kl == pytest.approx(-math.log(gamma), rel=0.02)


# --- generated texts -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lm():
    return tiny("llama")


def test_measuring_does_not_change_what_is_written(lm):
    config = WatermarkingConfig(greenlist_ratio=0.4, bias=3.0)
    texts = []
    for watermark in (config, MeasuringConfig(config)):
        options = sampling_options(lm.model, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=12)
        options.watermarking_config = watermark
        ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
        with own_randomness(lm.model, 3), torch.no_grad():
            texts.append(lm.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options))
    assert torch.equal(*texts)


def test_measured_divergence_is_that_of_the_biased_distribution():
    scores = torch.log_softmax(torch.randn(2, 50, generator=torch.Generator().manual_seed(0)), dim=-1)
    green = torch.arange(50) < 20

    measured = generation.Measured(lambda _, s: torch.where(green, s + 1.5, s))
    measured(torch.zeros(2, 1, dtype=torch.long), scores)
    g = scores.exp()[:, green].sum(-1)
    z = 1 + g * math.expm1(1.5)
    torch.testing.assert_close(measured.kl[0], 1.5 * g * math.exp(1.5) / z - z.log(), rtol=1e-4, atol=1e-6)


def test_prompts_are_parted_without_overlap(lm):
    setting = generation.Setting(4, 2, 1, 8)
    found = generation.prompts_of(lm, None, setting, keys=3)
    assert (len(found.calibration), len(found.seen), len(found.other)) == (4, 6, 3)
    assert len({tuple(row) for row in found.calibration + found.seen + found.other}) == 13
    own = generation.prompts_of(lm, [(f"prompt number {i}", None) for i in range(6)], setting, keys=3)
    assert len(own.calibration) == 3
    assert not {tuple(row) for row in own.calibration} & {tuple(row) for row in own.seen}
    with pytest.raises(ValueError, match="at least 4 prompts"):
        generation.prompts_of(lm, [("one", None)], setting, keys=3)


def test_calibration_survives_its_arrays(lm):
    setting = generation.Setting(4, 2, 1, 8)
    arrays = generation.calibrate(lm, generation.prompts_of(lm, None, setting, keys=1).calibration, 8)
    again = generation.calibrator_of(arrays)
    direct = WatermarkCalibrator.from_model(
        lm.model, None, generation.prompts_of(lm, None, setting, keys=1).calibration, max_new_tokens=8, batch_size=24
    )
    options = {"gamma": 0.3, "delta": 2.0, "alpha": 0.01, "length": 8}
    assert again.predict(**options) == direct.predict(**options)


# --- human text -----------------------------------------------------------------------------------------------------------


def test_alarms_are_those_of_exact_detection():
    windows = torch.randint(0, 60, (300, 30), generator=torch.Generator().manual_seed(0))
    rows = {(r["arm"], r["gamma"], r["level"]): r for r in human.false_alarms(windows, 200, key=7_919)}
    for gamma in human.GAMMAS:
        config = WatermarkingConfig(greenlist_ratio=gamma, bias=1.0, hashing_key=7_919)
        for arm, repeats in (("exact", False), ("repeats", True)):
            found = exact_detect(windows, config, 200, count_repeats=repeats)
            for level in human.ALPHAS:
                assert rows[arm, gamma, level]["alarms"] == found.is_watermarked(level).mean()
                assert rows[arm, gamma, level]["expected"] <= level


# --- the study -------------------------------------------------------------------------------------------------------------


def test_every_claim_of_the_paper_is_there():
    claims = study.STUDY.claims
    assert {c.number for c in claims if isinstance(c, Untested) or c.scope != "ours"} == {1, 2, 3, 4}
    assert min(c.number for c in claims if isinstance(c, Claim) and c.scope == "ours") == 5


def test_conditions_are_json_and_ten_blocks_stand_behind_each_workload():
    for name in study.STUDY.workloads["desk"]:
        conditions = list(study.plan("desk", name))
        assert json.loads(json.dumps(conditions)) == conditions
        keys = ("split", "key_number", "texts_number")
        blocks = {c[key] for c in conditions for key in keys if key in c}
        assert name == study.FORMULAS or len(blocks) >= 10


def test_formulas_give_twelve_blocks_and_exact_sizes_keep_alpha():
    rows = study.trial(study.FORMULAS, Context(seed=0), part="formulas")
    assert len({row["block"] for row in rows}) == 12
    assert all(row["size_per_alpha"] <= 1 for row in rows if row["arm"] == "calibrated")


def test_a_model_of_ones_own_is_calibrated(lm, tmp_path, monkeypatch):
    """From Python: six watermarks under a key, and a component that is ready to use."""
    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path))
    monkeypatch.setattr(trials, "CALIBRATION", 6)
    found = check("watermark-power", on=(lm.model, lm.tokenizer), tier="smoke")
    rows = found.rows
    assert rows["status"].to_list() == ["done"] * 6
    assert set(rows["arm"]) == {"calibrated", "closed-form", "markllm", "lm-watermarking", "equal-kl", "equal-power"}
    assert rows["setting"][0].startswith("gamma ")
    assert isinstance(found.component, WatermarkCalibrator)
    plan = found.component.minimise_distortion(alpha=0.01, power=0.9, length=48)
    assert plan.vocab_size == lm.model.config.vocab_size


@pytest.mark.peers
def test_markllm_counts_the_same_green_tokens():
    """In an environment of its own, which takes torch and transformers from here."""
    with open_peer(study.MARKLLM, Path(study.__file__).parent) as remote:
        for condition in study.plan("desk", study.JSON):
            rows = study.trial(study.JSON, Context(seed=1, open_peer=lambda name: remote), **condition)
            assert [row["differ"] for row in rows] == [0], rows
