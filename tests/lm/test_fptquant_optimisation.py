"""Local and end-to-end optimisation: gradients, what enters the loss, what is recovered, resumption; and checkpoints."""

import pytest
import scipy.spatial.distance
import torch
from transformers import AutoModelForCausalLM

from cameraready.lm.fptquant import FPTConfig, FPTQuantizer, QuantConfig
from cameraready.lm.fptquant.host import TRANSFORMS
from cameraready.lm.fptquant.merging import Read
from cameraready.lm.fptquant.optimisation import divergence, p_norm, weight_norms
from tests.lm.fptquant_models import awkward, shaken, tokens

pytestmark = pytest.mark.torch


def only(*names):
    return FPTConfig(**{name: name in names for name in TRANSFORMS})


@pytest.fixture(scope="module")
def model():
    return awkward("qwen2", dtype=torch.float32)


def test_the_p_norm_is_the_power_mean():
    w = torch.tensor([[3.0, -4.0], [0.0, 1.0]], requires_grad=True)
    assert p_norm(w, 2).item() == pytest.approx((26 / 4) ** 0.5)
    assert p_norm(w * 1e10, 4).item() == pytest.approx(((81 + 256 + 1) / 4) ** 0.25 * 1e10)
    p_norm(w, 4).backward()
    expected = w.detach() ** 3 / 4 * ((81 + 256 + 1) / 4) ** (-3 / 4)
    torch.testing.assert_close(w.grad, expected)


def test_gradients_a_tensor_at_a_time_are_those_of_the_whole_loss(model):
    fpt = shaken(FPTQuantizer(model))
    fpt.transforms.zero_grad()
    read = Read(model, torch.float32)
    whole = sum(p_norm(v, 4) for n, v in fpt.transforms.merged(read) if v.ndim == 2)
    whole.backward()
    expected = {n: p.grad.clone() for n, p in fpt.transforms.named_parameters() if p.grad is not None}
    start = {n: p.detach().clone() for n, p in fpt.transforms.named_parameters()}
    fpt.optimize_local(steps=1, lr=0.0)
    assert fpt.local_losses == [pytest.approx(whole.item(), rel=1e-5)]
    found = {n: p.grad for n, p in fpt.transforms.named_parameters() if p.grad is not None}
    assert expected.keys() == found.keys() == start.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-6)


def test_every_layer_with_a_transform_enters_the_loss(model):
    """The published code drops layers that have several transforms."""
    layers = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    expected = {f"model.layers.{i}.{p}" for i in range(2) for p in [
        *(f"self_attn.{n}.weight" for n in layers[:4]), *(f"mlp.{n}.weight" for n in layers[4:])]}  # fmt: skip
    found = weight_norms(FPTQuantizer(model).transforms, model)
    assert set(found) == expected | {"model.embed_tokens.weight", "lm_head.weight"}
    found = weight_norms(FPTQuantizer(model, only("prerope", "updown")).transforms, model)
    assert {n.split(".")[-2] for n in found} == {"q_proj", "k_proj", "up_proj", "down_proj"}
    normed = awkward("qwen3", dtype=torch.float32)
    found = weight_norms(FPTQuantizer(normed, only("prerope")).transforms, normed)
    assert {n.split(".")[-2] for n in found} == {"q_norm", "k_norm"}


@pytest.mark.parametrize("name", ["prerope", "value", "updown"])
def test_a_disturbance_by_the_transform_itself_is_undone(model, name):
    """Whatever member of a family of equal models one starts from, the same least loss is reached."""
    fpt = shaken(FPTQuantizer(model, only(name)), size=1.0)
    disturbed = fpt.merge()
    reached = {}
    for who, start in (("plain", model), ("disturbed", disturbed)):
        fresh = FPTQuantizer(start, only(name)).optimize_local(steps=250, lr=4e-2)
        reached[who] = sum(weight_norms(fresh.transforms, start).values())
        reached[who + " before"] = fresh.local_losses[0]
    assert reached["disturbed before"] > 1.1 * reached["plain before"]
    assert reached["disturbed"] == pytest.approx(reached["plain"], rel=0.03)
    assert reached["plain"] < reached["plain before"]


def test_scales_alone_reach_the_closed_form():
    """T_u on one row and one column: a u + b / u is least at u = sqrt(b / a), where it is 2 sqrt(a b)."""
    model = awkward("llama", dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.fill_(0.09)
            layer.mlp.down_proj.weight.fill_(0.01)
    fpt = FPTQuantizer(model, only("updown")).optimize_local(steps=400, lr=3e-2)
    scale = fpt.transforms.layers[0].updown.log_scale.exp()
    torch.testing.assert_close(scale, torch.full_like(scale, 1 / 3), rtol=1e-3, atol=0)
    assert fpt.local_losses[-1] == pytest.approx(2 * 2 * 0.03, rel=1e-5)


def test_sampled_rows_give_the_whole_loss_when_there_are_enough_and_learn_when_there_are_few(model):
    whole = FPTQuantizer(model).optimize_local(steps=3)
    sampled = FPTQuantizer(model).optimize_local(steps=3, rows=10_000)
    assert sampled.local_losses == pytest.approx(whole.local_losses, rel=1e-5)
    few = FPTQuantizer(model).optimize_local(steps=60, rows=16)
    exact = sum(weight_norms(FPTQuantizer(model).transforms, model).values())
    assert sum(weight_norms(few.transforms, model).values()) < 0.98 * exact


def test_local_optimisation_goes_on_where_it_was_interrupted(model, monkeypatch):
    whole = FPTQuantizer(model).optimize_local(steps=6, rows=8)
    part = FPTQuantizer(model)
    steps = []
    monkeypatch.setattr(
        torch.optim.AdamW,
        "step",
        lambda self, inner=torch.optim.AdamW.step: interrupt() if len(steps) == 3 else (steps.append(1), inner(self)),
    )

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        part.optimize_local(steps=6, rows=8)
    monkeypatch.undo()
    assert len(part.local_losses) == 3
    other = FPTQuantizer(model).load_state_dict(part.state_dict())
    for each in (part, other):
        each.optimize_local(steps=6, rows=8)
        assert each.local_losses == whole.local_losses
        for a, b in zip(each.transforms.parameters(), whole.transforms.parameters(), strict=True):
            assert torch.equal(a, b)


def test_end_to_end_training_brings_the_predictions_nearer(model):
    def made():
        return FPTQuantizer(model, FPTConfig(rotation_initial="identity")).calibrate([tokens()])

    batches = [tokens(seed) for seed in range(3)]
    whole = made().train_end_to_end(batches, steps=60, lr=1e-2, range_lr=1e-2)
    assert sum(whole.trained_losses[-3:]) < 0.85 * sum(whole.trained_losses[:3])
    other = FPTQuantizer(model, FPTConfig(rotation_initial="identity")).load_state_dict(whole.state_dict())
    with torch.no_grad():
        assert torch.equal(other.model(tokens()).logits, whole.model(tokens()).logits)
    assert whole.difference(tokens()) < 1e-3  # trained transforms still preserve the function


def test_a_saved_state_is_tensors_and_numbers(model, tmp_path):
    fpt = FPTQuantizer(model).optimize_local(steps=2).calibrate([tokens()]).train_end_to_end([tokens()], steps=2)
    torch.save(fpt.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    other = FPTQuantizer(model).load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(other.model(tokens()).logits, fpt.model(tokens()).logits)
    with pytest.raises(ValueError, match="the state is of"):
        FPTQuantizer(model, FPTConfig.mergeable()).load_state_dict(state)


def test_a_projection_of_zeros_has_no_gradient_and_spoils_nothing():
    model = awkward("llama", dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.zero_()
    fpt = FPTQuantizer(model).optimize_local(steps=5)
    assert fpt.local_losses[-1] < fpt.local_losses[0]
    assert fpt.calibrate([tokens()]).difference(tokens()) < 1e-3
    zeros = torch.zeros(3, 3, requires_grad=True)
    p_norm(zeros, 4).backward()
    assert torch.equal(zeros.grad, torch.zeros(3, 3))


def test_a_loss_that_is_not_finite_stops_before_the_transforms_are_spoilt():
    model = awkward("llama", dtype=torch.float32)
    fpt = FPTQuantizer(model).optimize_local(steps=2)
    before = fpt.state_dict()["transforms"]
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="the loss is nan at step 2"):
        fpt.optimize_local(steps=5)
    assert all(torch.equal(before[name], value) for name, value in fpt.state_dict()["transforms"].items())


def test_a_calibration_that_fails_leaves_what_was_there(model, monkeypatch):
    fpt = FPTQuantizer(model)
    with pytest.raises(ValueError, match=r"from 0 to 261.*got 100"):
        fpt.calibrate([tokens() + 100_000])
    assert fpt.quantisation is None
    fpt.calibrate([tokens()], QuantConfig(kv=8))
    with torch.no_grad():
        before = fpt.model(tokens()).logits
    monkeypatch.setattr(type(fpt), "_search_weights", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        fpt.calibrate([tokens(1)], QuantConfig(weights=8, residual=8))
    monkeypatch.undo()
    assert fpt.quantisation == QuantConfig(kv=8)
    with torch.no_grad():
        assert torch.equal(fpt.model(tokens()).logits, before)


def test_after_an_interruption_the_model_is_that_of_the_last_finished_step(model, monkeypatch):
    fpt = FPTQuantizer(model).calibrate([tokens()])
    step, done = torch.optim.AdamW.step, []

    def interrupted(self):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(1)
        step(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fpt.train_end_to_end([tokens()], steps=9, lr=1e-2)
    monkeypatch.undo()
    with torch.no_grad():
        left = fpt.model(tokens()).logits
        assert torch.equal(fpt.refresh().model(tokens()).logits, left)
    assert len(fpt.trained_losses) == 3
    fpt.train_end_to_end([tokens()], steps=9, lr=1e-2)
    whole = FPTQuantizer(model).calibrate([tokens()]).train_end_to_end([tokens()], steps=9, lr=1e-2)
    assert fpt.trained_losses == whole.trained_losses
    with torch.no_grad():
        assert torch.equal(fpt.model(tokens()).logits, whole.model(tokens()).logits)


def test_weights_of_the_simulation_are_frozen(model):
    fpt = FPTQuantizer(model).calibrate([tokens()])
    assert not any(p.requires_grad for p in fpt.model.parameters())
    assert not fpt.model(tokens()).logits.requires_grad
    fpt.train_end_to_end([tokens()], steps=1)
    weights = [p for n, p in fpt.model.named_parameters() if n.endswith(("weight", "bias"))]
    assert all(p.grad is None for p in weights)
    assert not any(p.requires_grad for p in fpt.model.parameters())


def test_divergences_are_scipys_and_torchs():
    a, b = (torch.randn(4, 7, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    p, q = a.softmax(-1), b.softmax(-1)
    expected = scipy.spatial.distance.jensenshannon(p.numpy(), q.numpy(), axis=1) ** 2
    assert divergence(a, b, "jsd").item() == pytest.approx(expected.mean(), rel=1e-4)
    kl = torch.nn.functional.kl_div(a.log_softmax(-1), b.log_softmax(-1), log_target=True, reduction="batchmean")
    assert divergence(a, b, "kl").item() == pytest.approx(kl.item(), rel=1e-5)
    assert divergence(a, a, "jsd").item() == pytest.approx(0, abs=1e-6)


def test_what_comes_too_early_or_makes_no_sense_is_refused(model, tmp_path):
    fpt = FPTQuantizer(model, FPTConfig.mergeable())
    with pytest.raises(RuntimeError, match="calibrate"):
        fpt.train_end_to_end([tokens()], steps=1)
    with pytest.raises(RuntimeError, match="calibrate"):
        fpt.export(tmp_path, format="compressed-tensors")
    with pytest.raises(ValueError, match="p must be at least 1"):
        fpt.optimize_local(p=0.5)
    with pytest.raises(ValueError, match="rows must be positive"):
        fpt.optimize_local(rows=0)
    with pytest.raises(ValueError, match="value_form must be one of full, rotation"):
        FPTConfig(value_form="square")
    for bad in ({"rotate": False}, "all"):
        with pytest.raises(TypeError, match="must be an FPTConfig"):
            FPTQuantizer(model, bad)
    with pytest.raises(TypeError, match="prerope must be True or False"):
        FPTConfig(prerope="no")
    with pytest.raises(TypeError, match="must be a QuantConfig"):
        fpt.calibrate([tokens()], {"kv": 8})
    with pytest.raises(RuntimeError, match="optimize_local comes before calibrate"):
        FPTQuantizer(model).calibrate([tokens()]).optimize_local()
    with pytest.raises(ValueError, match="nothing to train"):
        FPTQuantizer(model, only()).calibrate([tokens()], QuantConfig(None, None, None)).train_end_to_end([tokens()])
    with pytest.raises(ValueError, match="'jsd', 'kl' or 'text'"):
        fpt.calibrate([tokens()]).train_end_to_end([tokens()], steps=1, loss="mse")


# --- checkpoints --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["residual_scale", "down_hadamard"])
def test_what_a_plain_checkpoint_cannot_express_is_refused_by_name(model, name, tmp_path):
    fpt = FPTQuantizer(model, FPTConfig.mergeable(**{name: True}))
    with pytest.raises(ValueError, match=f"{name} cannot be merged into a plain transformers model"):
        fpt.merge()
    with pytest.raises(ValueError, match=f"{name} cannot be written to a checkpoint"):
        fpt.export(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3"])
def test_a_plain_checkpoint_is_read_by_transformers_with_the_same_logits(kind, tmp_path):
    model = awkward(kind, dtype=torch.float32)
    fpt = shaken(FPTQuantizer(model, FPTConfig.mergeable(unsupported="skip")), size=0.2)
    folder = fpt.export(tmp_path / "new")
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert type(again) is type(model)
    torch.testing.assert_close(again(tokens()).logits, model(tokens()).logits, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "config",
    [
        QuantConfig(4, None, None),
        QuantConfig(4, 4, None),
        QuantConfig(4, 4, None, symmetric=True),
        QuantConfig(4, 8, None, symmetric=True, dynamic=True),
    ],
    ids=QuantConfig.describe,
)
@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
def test_an_integer_checkpoint_computes_what_the_simulation_computes(kind, config, tmp_path):
    pytest.importorskip("compressed_tensors")
    model = awkward(kind, dtype=torch.float32)
    fpt = FPTQuantizer(model, FPTConfig.mergeable(unsupported="skip")).optimize_local(steps=5)
    fpt.calibrate([tokens()], config).train_end_to_end([tokens()], steps=3, lr=1e-2)
    again = AutoModelForCausalLM.from_pretrained(fpt.export(tmp_path, format="compressed-tensors"))
    with torch.no_grad():
        found, simulated = again(tokens(1)).logits, fpt.model(tokens(1)).logits
    off = (found - simulated).norm() / simulated.norm()
    assert off < 1e-3, off  # a value at the edge of two levels may fall either way
    assert (simulated - model(tokens(1)).logits).norm() / simulated.norm() > 0.01


def test_ranges_without_a_place_in_the_format_are_refused_or_left_out_on_demand(model, tmp_path):
    fpt = FPTQuantizer(model, FPTConfig.mergeable()).calibrate([tokens()], QuantConfig(residual=8))
    with pytest.raises(ValueError, match="no place for ranges of the cache"):
        fpt.export(tmp_path, format="compressed-tensors")
    with pytest.raises(ValueError, match="no place for ranges of the residual"):
        fpt.export(tmp_path, format="compressed-tensors", without=("kv",))
    with pytest.raises(ValueError, match="at most 8 bits"):
        fpt.calibrate([tokens()], QuantConfig(weights=None, kv=None)).export(tmp_path, format="compressed-tensors")
    with pytest.raises(ValueError, match="'plain' or 'compressed-tensors'"):
        fpt.export(tmp_path, format="gguf")
    assert not list(tmp_path.iterdir())
