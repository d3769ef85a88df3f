"""The band inside TRL: the loss it gives on one batch, what it logs, what it refuses, and that TRL's own epsilons come back."""

import subprocess
import sys
import warnings

import pytest

pytest.importorskip("trl")

import torch

from cameraready.models import tiny_model, tiny_tokenizer
from cameraready.posttraining._logprobs import completion_logprobs
from cameraready.posttraining.bandpo import BandGRPOTrainer, band_bounds, band_policy_loss
from tests.posttraining.training import config, dataset, letters, train

pytestmark = pytest.mark.torch


def made(tmp_path, *, settings=None, **options):
    return BandGRPOTrainer(
        model=tiny_model("llama"),
        processing_class=tiny_tokenizer(),
        args=config("grpo", tmp_path, 1, **(settings or {})),
        train_dataset=dataset(),
        reward_funcs=[letters],
        **options,
    )


def batch_of(trainer):
    """One micro-batch as TRL hands it to the loss, the old policy some way from the model; and the model's log-probabilities."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(97, 117, (4, 16), generator=g)
    mask = torch.ones(4, 10, dtype=torch.long)
    mask[0, 6:] = mask[2, 3:] = 0
    attention = torch.cat([torch.ones(4, 6, dtype=torch.long), mask], 1)
    logps = completion_logprobs(trainer.model, ids, attention, 10).logps
    inputs = {
        "prompt_ids": ids[:, :6],
        "prompt_mask": attention[:, :6],
        "completion_ids": ids[:, 6:],
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -1.0, 0.5, -2.0]),
        "old_per_token_logps": (logps + torch.randn(4, 10, generator=g)).detach().clamp(max=-0.05),
    }
    return inputs, logps


@pytest.mark.parametrize("divergence", ["kl", "tv", lambda u: (u.sqrt() - 1) ** 2, None])
def test_the_loss_of_a_batch_is_the_bands_loss(tmp_path, divergence):
    trainer = made(
        tmp_path,
        settings={"loss_type": "bnpo", "epsilon_high": 0.28},
        divergence=divergence,
        delta=1e-4,
        solver="newton",
    )
    trainer.model.eval()  # one forward, no accumulation
    inputs, logps = batch_of(trainer)
    old, mask = inputs["old_per_token_logps"], inputs["completion_mask"]
    loss = trainer.compute_loss(trainer.model, inputs)
    lo, hi = (0.8, 1.28) if divergence is None else band_bounds(old, divergence=divergence, delta=1e-4)
    expected, stats = band_policy_loss(logps, old, inputs["advantages"], mask, lo, hi)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    gradients = [
        torch.autograd.grad(each, list(trainer.model.parameters()), allow_unused=True) for each in (loss, expected)
    ]
    for one, other in zip(*gradients, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
    # What it logs are the statistics of the same batch, and TRL's own count of clips agrees.
    logged = {}
    trainer.add_callback(_listener(logged))
    trainer.log({})
    for name in ("clip_up", "clip_down", "kl"):
        assert logged[f"eval_band/{name}"] == pytest.approx(stats[name].item(), abs=1e-6)
    assert stats["clip_up"] > 0
    assert stats["clip_down"] > 0
    assert logged["eval_clip_ratio/high_mean"] == pytest.approx(logged["eval_band/clip_up"], abs=1e-6)
    assert logged["eval_clip_ratio/low_mean"] == pytest.approx(logged["eval_band/clip_down"], abs=1e-6)
    seen = stats["tokens_by_p"] > 0
    assert [name for name in logged if "clip_up/" in name] == [
        f"eval_band/clip_up/p<={edge}" for edge, any_ in zip((0.01, 0.1, 0.5, 0.9, 1), seen, strict=True) if any_
    ]


def _listener(into):
    import transformers

    class Listener(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            into.update(logs)

    return Listener()


def test_trls_epsilons_come_back_also_after_an_error(tmp_path):
    trainer = made(tmp_path, settings={"epsilon_high": 0.3, "loss_type": "bnpo"})
    trainer.model.eval()
    inputs, _ = batch_of(trainer)
    trainer.compute_loss(trainer.model, inputs)
    assert (trainer.epsilon_low, trainer.epsilon_high) == (0.2, 0.3)
    with pytest.raises(RuntimeError, match=r"shape|size|match"):
        trainer.compute_loss(trainer.model, {**inputs, "advantages": torch.ones(3)})
    assert (trainer.epsilon_low, trainer.epsilon_high) == (0.2, 0.3)


def test_tool_tokens_and_padding_count_nowhere(tmp_path):
    trainer = made(tmp_path, settings={"loss_type": "bnpo"})
    trainer.model.eval()
    inputs, _ = batch_of(trainer)
    tool = torch.ones_like(inputs["completion_mask"])
    tool[:, 2:4] = 0
    inputs["tool_mask"] = tool
    loss = trainer.compute_loss(trainer.model, inputs)
    hole = (inputs["completion_mask"] * tool) == 0
    hidden = {**inputs, "old_per_token_logps": inputs["old_per_token_logps"].masked_fill(hole, -3.0)}
    assert trainer.compute_loss(trainer.model, hidden).item() == loss.item()


def test_a_trl_that_does_not_clip_at_epsilon_is_noticed(tmp_path, monkeypatch):
    import trl

    trainer = made(tmp_path, settings={"loss_type": "bnpo"})
    inputs, _ = batch_of(trainer)
    monkeypatch.setattr(trl.GRPOTrainer, "compute_loss", lambda self, *args, **kwargs: torch.zeros(()))
    with pytest.raises(RuntimeError, match="band had no effect"):
        trainer.compute_loss(trainer.model, inputs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "cispo"}, "does not clip each token's ratio"),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, "does not clip each token's ratio"),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, "one ratio a sequence"),
        ({"use_liger_kernel": True}, "Liger"),
        ({"delta": 1.5}, "two-sided clip"),
    ],
)
def test_losses_without_a_clip_of_token_ratios_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        made(tmp_path, settings=settings)


@pytest.mark.parametrize("options", [{"delta": -1}, {"divergence": "reverse"}, {"max_ratio": 0.2}, {"solver": "tabel"}])
def test_bands_that_are_none_are_refused_before_a_model_is_loaded(options):
    with pytest.raises(ValueError, match=r"delta|divergence|max_ratio|solver"):
        BandGRPOTrainer("no/such-model", letters, **options)


def test_rollouts_used_once_are_warned_of_and_clip_nothing(tmp_path):
    def make(model, tokenizer, args, data, reward_funcs):
        with pytest.warns(UserWarning, match="used for one optimizer step only"):
            return BandGRPOTrainer(model, reward_funcs, args, data, processing_class=tokenizer, delta=1e-9)

    trained = train(make, config("grpo", tmp_path, 1, num_iterations=1))
    logged = next(entry for entry in trained.log if "band/clip_up" in entry)
    assert logged["band/clip_up"] == logged["band/clip_down"] == logged["band/kl"] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        made(tmp_path)  # two iterations on each batch: no warning


def test_epsilons_that_the_band_replaces_are_named(tmp_path):
    with pytest.warns(UserWarning, match=r"epsilon=0.2 and epsilon_high=0.28, which the band replaces"):
        made(tmp_path, settings={"epsilon_high": 0.28})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        kept = made(tmp_path, settings={"epsilon_high": 0.28}, divergence=None)
    assert (kept.epsilon_low, kept.epsilon_high) == (0.2, 0.28), "without the band the config's clip is what acts"


def test_the_component_needs_no_trl_until_a_trainer_is_asked_for():
    code = (
        "import sys; sys.modules['trl'] = None\n"
        "import torch\nfrom cameraready.posttraining import bandpo\n"
        "bandpo.band_bounds(torch.tensor([-1.0]))\n"
        "try:\n    bandpo.BandGRPOTrainer\nexcept ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert 'pip install "cameraready[posttraining]"' in done.stdout
