"""What training looks for: every loss vanishes at the true flow map and nowhere near it, and resumed training is training."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cameraready.flows import LinearPath
from cameraready.flows._toy.mixtures import GaussianMixture
from cameraready.flows.meta_flow_maps import FlowBackbone, MapMLP, MetaFlowMap, MFMTrainer, PowerZero, losses
from tests.flows.mfm_exact import F64, GaussianBackbone, generator, noise

pytestmark = pytest.mark.torch
DATA = GaussianMixture(torch.ones(1), torch.full((1, 2), 0.7, dtype=F64), torch.tensor([0.5]))


def errors(name, amiss=0.0, derivative="forward"):
    """Of the exact backbone, on random times and states, (B,)."""
    backbone = GaussianBackbone(amiss=amiss)
    n = 64
    t, first, second, share = torch.rand(4, n, generator=generator(1), dtype=F64)
    s, u = torch.minimum(first, second) * 0.98, torch.maximum(first, second)
    x, y = noise(n, 2, seed=2), noise(n, 2, seed=3)
    velocity = GaussianBackbone()(s, s, y, t, x)

    def average(start, end, state):
        return backbone(start, end, state, t, x)

    if name == "diagonal":
        return losses.diagonal(average, s, y, velocity)
    if name == "eulerian":
        return losses.eulerian(average, s, u, y, velocity, derivative=derivative)
    if name == "lagrangian":
        return losses.lagrangian(average, s, u, y, derivative=derivative)
    return losses.progressive(average, s, u, y, share)


@pytest.mark.parametrize("name", ["diagonal", "eulerian", "lagrangian", "progressive"])
def test_the_loss_is_zero_at_the_exact_map_and_positive_beside_it(name):
    assert errors(name).max().item() < 1e-16
    assert errors(name, amiss=0.1).mean().item() > 1e-6


@pytest.mark.parametrize("name", ["eulerian", "lagrangian"])
def test_both_derivatives_agree_also_in_the_gradient(name):
    forward, twice = errors(name, 0.1), errors(name, 0.1, "double-backward")
    torch.testing.assert_close(forward, twice)


@pytest.mark.parametrize("distill", ["esd", "mf", "lsd", "psd"])
def test_at_the_exact_map_the_mean_gradient_vanishes_and_beside_it_points_back(distill):
    """With the noise of the state used again for the inner state, targets would be another law's and this mean another one."""

    def slope(amiss):
        mfm = MetaFlowMap(GaussianBackbone(amiss=amiss))
        teacher = None if distill == "mf" else DATA.velocity()
        trainer = MFMTrainer(mfm, teacher, distill=distill, batch=64, adaptive=(0.0, 0.0), data_std=None, seed=4)
        found = []
        for _ in range(30):
            loss = trainer.loss(DATA.sample(64, trainer.generator))
            found.append(torch.autograd.grad(loss, mfm.backbone.amiss)[0])
        found = torch.stack(found)
        return float(found.mean()), float(found.std() / 30**0.5)

    mean, error = slope(0.0)
    assert abs(mean) <= 4 * error + 1e-9
    mean, error = slope(0.3)
    assert mean > 4 * error + 1e-3


def test_what_is_taught_is_the_teachers_flow_also_where_the_data_have_another():
    far = noise(64, 2, seed=6) * 3 - 2
    for distill, taught in (("esd", True), ("lsd", True), ("psd", True), ("mf", False)):
        trainer = MFMTrainer(
            MetaFlowMap(GaussianBackbone()),
            DATA.velocity(),
            distill=distill,
            batch=64,
            adaptive=(0.0, 0.0),
            data_std=None,
        )
        assert (trainer.loss(far).item() < 1e-12) is taught, distill


def test_without_a_teacher_weights_that_depend_on_the_error_are_off():
    mfm = MetaFlowMap(MapMLP(2, width=8, depth=1))
    assert MFMTrainer(mfm, DATA.velocity()).adaptive == (0.5, 0.5)
    assert MFMTrainer(mfm, distill="mf").adaptive == (0.0, 0.0)
    values = torch.tensor([1.0, 9.0], requires_grad=True)
    losses.adaptive(values, 1.0).backward()
    torch.testing.assert_close(values.grad, 0.5 / (values.detach() + 0.01))


class _Fused(nn.Module):
    """Attention by torch's fused kernel, which has no forward-mode derivative."""

    def __init__(self):
        super().__init__()
        self.mix = nn.utils.skip_init(nn.Linear, 2, 2)
        nn.init.eye_(self.mix.weight)
        nn.init.zeros_(self.mix.bias)

    def forward(self, s, u, y, t, x, label=None):
        q = self.mix(torch.stack([y, x, y + s[:, None]], 1))[:, None]
        return F.scaled_dot_product_attention(q, q, q)[:, 0, 0] * (1 + u[:, None])


def test_attention_without_forward_derivative_gives_a_sentence_and_a_way_out():
    teacher = DATA.to(torch.float32).velocity()
    x1 = DATA.sample(16, generator()).float()
    mfm = MetaFlowMap(_Fused())
    with pytest.raises(NotImplementedError, match=r"sdpa_kernel.*double-backward.*psd"):
        MFMTrainer(mfm, teacher, batch=16).loss(x1)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain = MFMTrainer(mfm, teacher, batch=16).loss(x1)
        twice = MFMTrainer(mfm, teacher, batch=16, derivative="double-backward").loss(x1)
    torch.testing.assert_close(plain, twice)


def test_condition_times():
    times = PowerZero(0.25, 2.0)(20_000, generator())
    assert abs(float((times == 0).double().mean()) - 0.25) < 0.02
    assert abs(float(times[times > 0].double().sqrt().mean()) - 0.5) < 0.02
    with pytest.raises(ValueError, match="probability"):
        PowerZero(1.5)


def trained(folder, stops, data=None):
    """A small map trained in as many sittings as there are stops."""
    for steps in stops:
        trainer = MFMTrainer(
            MetaFlowMap(MapMLP(2, width=8, depth=1)), DATA.to(torch.float32).velocity(), batch=16, lr=1e-2, cooldown=0.5
        )
        averaged = trainer.fit(
            DATA.to(torch.float32).sample if data is None else data, steps, checkpoint=folder / "x.pt"
        )
    return trainer, averaged


def test_an_interrupted_training_ends_in_the_same_weights_and_draws_from_no_other_generator(tmp_path):
    before = torch.get_rng_state()
    sample, calls = DATA.to(torch.float32).sample, []

    def breaking(n, g):
        drawn = sample(n, g)
        calls.append(n)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return drawn

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole, averaged = trained(tmp_path / "a", [8])
    trainer = MFMTrainer(
        MetaFlowMap(MapMLP(2, width=8, depth=1)), DATA.to(torch.float32).velocity(), batch=16, lr=1e-2, cooldown=0.5
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(breaking, 8, checkpoint=tmp_path / "b" / "x.pt")
    again, resumed = trained(tmp_path / "b", [8])
    assert again.history == whole.history
    assert len(again.history) == 8
    for one, two in zip(averaged.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two)
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_come_from_tensors_pairs_and_loaders(tmp_path):
    x = DATA.sample(40, generator()).float()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=8)
    for number, data in enumerate((x, loader)):
        (tmp_path / str(number)).mkdir()
        assert len(trained(tmp_path / str(number), [6], data)[0].history) == 6
    mfm = MetaFlowMap(MapMLP(2, width=8, depth=1))
    with pytest.raises(ValueError, match="no batch"):
        MFMTrainer(mfm, distill="psd", batch=8).fit(iter([]), 3)
    with pytest.raises(ValueError, match="one for each datum"):
        MFMTrainer(mfm, distill="psd", batch=8).step(x[:8], torch.zeros(7, dtype=torch.long))


def test_guidance_is_taught_to_labels_and_not_to_the_null_label():
    classes = GaussianMixture(
        torch.tensor([0.5, 0.5]), torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.tensor([0.1, 0.1])
    )
    v = classes.velocity()
    trainer = MFMTrainer(MetaFlowMap(GaussianBackbone()), v, guidance=3.0, null_label=2)
    x, t, labels = noise(3, 2), torch.full((3,), 0.5, dtype=F64), torch.tensor([0, 1, 2])
    found = trainer._guided(x, t, labels)
    null = v(x, t, torch.tensor([2, 2, 2]))
    torch.testing.assert_close(found[2], null[2])
    torch.testing.assert_close(found[:2], (null + 3 * (v(x, t, labels) - null))[:2])
    trainer = MFMTrainer(MetaFlowMap(GaussianBackbone()), v, label_dropout=0.3, null_label=2)
    dropped = trainer._dropped(torch.zeros(5000, dtype=torch.long), 5000)
    assert set(dropped.tolist()) == {0, 2}
    assert abs(float((dropped == 2).double().mean()) - 0.3) < 0.04


def test_settings_that_cannot_be_are_refused():
    mfm = MetaFlowMap(GaussianBackbone(path=LinearPath()))
    with pytest.raises(ValueError, match="needs teacher="):
        MFMTrainer(mfm)
    with pytest.raises(ValueError, match="distill must be one of"):
        MFMTrainer(mfm, DATA.velocity(), distill="adversarial")
    with pytest.raises(ValueError, match="null_label"):
        MFMTrainer(mfm, DATA.velocity(), guidance=2.0)
    with pytest.raises(ValueError, match="share"):
        MFMTrainer(mfm, DATA.velocity(), diagonal=2.0)
    with pytest.raises(FloatingPointError, match="loss is nan"):
        MFMTrainer(mfm, lambda x, t, y=None: x * float("nan")).step(noise(256, 2))


class Strange(nn.Module):
    """A teacher that changes itself and draws random numbers while it is in train mode."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.utils.skip_init(nn.Linear, 2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
        nn.init.eye_(self.layers[0].weight)
        nn.init.zeros_(self.layers[0].bias)

    def forward(self, x, t, y=None):
        return self.layers(x)


def test_a_teacher_is_asked_frozen_and_in_eval_mode_also_where_it_is_the_map_itself():
    x1, before = DATA.sample(8, generator()).float(), torch.get_rng_state()
    teacher = Strange().train()
    mfm = MetaFlowMap(FlowBackbone(teacher, (2,), ["layers.0"]))
    trainer = MFMTrainer(mfm, teacher, batch=8, lr=0.1, warmup=1, distill="psd")
    x, t = noise(8, 2, dtype=torch.float32), torch.full((8,), 0.3)
    first = trainer._guided(x, t)
    mfm.eval()
    for _ in range(2):
        trainer.step(x1)
    assert not torch.equal(teacher.layers[0].weight, torch.eye(2))  # it is the map, and was trained
    assert torch.equal(trainer._guided(x, t), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_checkpoints_of_other_trainings_and_damaged_ones_are_told(tmp_path):
    file = tmp_path / "x.pt"
    trained(tmp_path, [2])
    x = DATA.sample(64, generator()).float()

    def other(width=8, **settings):
        settings = {"batch": 16, "lr": 1e-2, "cooldown": 0.5, **settings}
        return MFMTrainer(MetaFlowMap(MapMLP(2, width=width, depth=1)), DATA.to(torch.float32).velocity(), **settings)

    with pytest.raises(ValueError, match=r"other settings: lr 0.01 \(now 0.1\).*x.pt|x.pt.*other settings: lr 0.01"):
        other(lr=0.1).fit(x, 3, checkpoint=file)
    with pytest.raises(ValueError, match=r"x.pt is of another network"):
        other(width=12).fit(x, 3, checkpoint=file)
    whole = file.read_bytes()
    for content in (b"", whole[: len(whole) // 2]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged.*remove it"):
            other().fit(x, 3, checkpoint=file)
        assert file.read_bytes() == content
