"""Models of torchcfm, flow_matching and diffusers: what their own samplers give, the room's give as well."""

import copy
import pickle

import pytest
import torch
from torch import nn

from cameraready.flows import from_diffusers, from_flow_matching, from_torchcfm
from cameraready.flows._paths import DiscretePath
from cameraready.flows._samplers import adaptive, grid, sample, scheduler_sample

pytestmark = pytest.mark.torch


def draws(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


# --- torchcfm --------------------------------------------------------------------------------------------------------


class TorchdynWrapper(nn.Module):
    """What ``torchcfm.utils.torch_wrapper`` does, which cannot be imported without torchdyn."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, t, x, *args, **kwargs):
        return self.model(torch.cat([x, t.repeat(x.shape[0])[:, None]], 1))


@pytest.mark.xdist_group("torchcfm")
def test_a_torchcfm_network_gives_what_its_own_wrapper_gives(torchcfm):
    torchdiffeq = pytest.importorskip("torchdiffeq")
    from torchcfm.models.models import MLP

    net, x = MLP(dim=2, w=16, time_varying=True), draws(5, 2)
    theirs = torchdiffeq.odeint(TorchdynWrapper(net), x, torch.linspace(0, 1, 11), method="euler")[-1]
    for model in (net, TorchdynWrapper(net)):
        v = from_torchcfm(model)
        torch.testing.assert_close(sample(v, x, steps=10).x, theirs)
        assert v(x, torch.rand(5)).shape == (5, 2)  # the wrapper alone takes no batch of times
    with pytest.raises(ValueError, match="takes no labels"):
        from_torchcfm(net)(x, 0.5, torch.zeros(5))


def test_a_network_with_a_model_inside_is_not_taken_for_a_wrapper():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Linear(3, 2))

        def forward(self, t, x):
            return 10 * self.model(torch.cat([x, t[:, None]], 1))

    net, x = Scaled(), draws(4, 2)
    torch.testing.assert_close(from_torchcfm(net)(x, 0.5), net(torch.full((4,), 0.5), x))


@pytest.mark.xdist_group("torchcfm")
def test_a_torchcfm_unet_gives_what_it_gives_with_its_own_order_of_arguments(torchcfm):
    from torchcfm.models.unet.unet import UNetModelWrapper

    net = UNetModelWrapper(
        dim=(1, 8, 8),
        num_channels=32,
        num_res_blocks=1,
        channel_mult=(1,),
        attention_resolutions="4",
        num_classes=3,
        class_cond=True,
    )
    for p in net.parameters():  # its last layer is zero to begin with
        nn.init.normal_(p, std=0.05)
    net.eval()
    x, y = draws(2, 1, 8, 8), torch.tensor([0, 2])
    found = from_torchcfm(net)(x, 0.3, y)
    torch.testing.assert_close(found, net(torch.tensor(0.3), x, y))
    assert float(found.detach().abs().max()) > 0


@pytest.mark.xdist_group("torchcfm")
def test_torchcfms_path_is_the_rooms(torchcfm):
    from torchcfm.conditional_flow_matching import ConditionalFlowMatcher, VariancePreservingConditionalFlowMatcher

    from cameraready.flows import CosinePath, LinearPath

    x0, x1 = draws(6, 2), draws(6, 2, seed=1)
    for matcher, path in (
        (ConditionalFlowMatcher, LinearPath()),
        (VariancePreservingConditionalFlowMatcher, CosinePath()),
    ):
        t, state, target = matcher(sigma=0.0).sample_location_and_conditional_flow(x0, x1)
        torch.testing.assert_close(path.interpolate(x1, x0, t), state)
        torch.testing.assert_close(path.target(x1, x0, t), target)


# --- flow_matching ---------------------------------------------------------------------------------------------------


def test_a_flow_matching_wrapper_gives_what_its_own_solver_gives():
    pytest.importorskip("flow_matching")
    from flow_matching.solver import ODESolver
    from flow_matching.utils import ModelWrapper

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))

        def forward(self, x, t, label=None):
            moved = self.inside(torch.cat([x, t.reshape(-1, 1).expand(len(x), 1)], 1))
            return moved if label is None else moved * label[:, None]

    wrapper, x, label = ModelWrapper(Net()), draws(5, 2), torch.tensor([1.0, 2.0, -1.0, 0.5, 0.0])
    v = from_flow_matching(wrapper, label="label")
    solver = ODESolver(velocity_model=wrapper)
    for method in ("euler", "midpoint"):
        theirs = solver.sample(x_init=x, step_size=0.1, method=method, label=label)
        torch.testing.assert_close(sample(v, x, steps=10, method=method, y=label).x, theirs)
    theirs = solver.sample(x_init=x, step_size=None, method="dopri5", atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(adaptive(v, x, atol=1e-6, rtol=1e-6).x, theirs, rtol=0, atol=1e-4)


def test_flow_matchings_path_is_the_rooms():
    pytest.importorskip("flow_matching")
    from flow_matching.path.scheduler import CondOTScheduler, CosineScheduler

    from cameraready.flows import CosinePath, LinearPath

    t = torch.linspace(0.05, 0.95, 10)
    for theirs, path in ((CondOTScheduler(), LinearPath()), (CosineScheduler(), CosinePath())):
        out = theirs(t)
        for ours, name in (
            (path.alpha, "alpha_t"),
            (path.sigma, "sigma_t"),
            (path.d_alpha, "d_alpha_t"),
            (path.d_sigma, "d_sigma_t"),
        ):
            torch.testing.assert_close(ours(t), getattr(out, name).expand_as(t))


# --- diffusers -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def diffusers():
    return pytest.importorskip("diffusers")


@pytest.fixture
def unet(diffusers):
    return diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        num_class_embeds=4,
    ).eval()


def test_a_unet_with_a_flow_scheduler_gives_what_its_pipeline_loop_gives(diffusers, unet):
    scheduler, x, y = diffusers.FlowMatchEulerDiscreteScheduler(shift=2.0), draws(2, 1, 8, 8), torch.tensor([0, 3])
    v = from_diffusers(unet, scheduler)
    scheduler.set_timesteps(5)
    state = x
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            state = scheduler.step(unet(state, timestep, y).sample, timestep, state).prev_sample
    times = 1 - scheduler.sigmas.double()
    torch.testing.assert_close(sample(v, x, times=times, y=y).x, state, rtol=0, atol=1e-5)
    torch.testing.assert_close(scheduler_sample(v, x, scheduler, times=times, y=y).x, state, rtol=0, atol=1e-5)
    assert v.calls == 10


@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
def test_a_discrete_diffusion_is_sampled_by_euler_as_by_ddim(diffusers, unet, prediction):
    scheduler = diffusers.DDIMScheduler(prediction_type=prediction, clip_sample=False, timestep_spacing="trailing")
    x, y = draws(2, 1, 8, 8, dtype=torch.float64), torch.tensor([0, 3])
    unet = unet.double()
    v = from_diffusers(unet, scheduler)
    scheduler.set_timesteps(8)
    kept = scheduler.alphas_cumprod.double()
    state = x
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            state = scheduler.step(unet(state, timestep, y).sample, timestep, state).prev_sample
    # The same levels as times of the linear path, and the state on it: x / (alpha + sigma).
    alpha, sigma = kept[scheduler.timesteps].sqrt(), (1 - kept[scheduler.timesteps]).sqrt()
    times = torch.cat([alpha / (alpha + sigma), torch.ones(1, dtype=torch.float64)])
    found = sample(v, x / (alpha[0] + sigma[0]), times=times, y=y).x
    torch.testing.assert_close(found, state, rtol=1e-3, atol=1e-3)
    assert isinstance(v.reading.model_path, DiscretePath)


def test_adapted_models_can_be_pickled(diffusers, unet):
    x, y = draws(2, 1, 8, 8), torch.tensor([0, 3])
    for scheduler in (diffusers.FlowMatchEulerDiscreteScheduler(), diffusers.DDIMScheduler()):
        v = from_diffusers(unet, scheduler)
        torch.testing.assert_close(pickle.loads(pickle.dumps(v))(x, 0.5, y), v(x, 0.5, y))
    v = from_flow_matching(Keyworded())
    torch.testing.assert_close(pickle.loads(pickle.dumps(v))(x, 0.5, y), v(x, 0.5, y))


class Keyworded(nn.Module):
    def forward(self, x, t, y):
        return x * (t + y)[:, None, None, None]


def test_a_learnt_variance_is_left_aside(diffusers):
    dit = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=1,
        out_channels=2,
        num_layers=1,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=4,
        norm_num_groups=1,
    ).eval()
    scheduler = diffusers.DDPMScheduler(variance_type="learned_range")
    x, y = draws(2, 1, 8, 8), torch.tensor([0, 3])
    v = from_diffusers(dit, scheduler)
    plain = from_diffusers(dit, diffusers.DDPMScheduler())
    assert v(x, 0.5, y).shape == x.shape
    with pytest.raises(ValueError, match=r"returned shape \(2, 2, 8, 8\)"):
        plain(x, 0.5, y)


def test_a_transformer_like_sd3_gives_what_its_pipeline_loop_gives(diffusers):
    net = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        caption_projection_dim=16,
        pooled_projection_dim=10,
        out_channels=4,
        pos_embed_max_size=8,
    ).eval()
    x, words, pooled = draws(2, 4, 8, 8), draws(2, 3, 12, seed=1), draws(2, 10, seed=2)
    conditions = {"encoder_hidden_states": words, "pooled_projections": pooled}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(4)
    state = x
    with torch.no_grad():
        for t in scheduler.timesteps:  # as StableDiffusion3Pipeline calls it
            out = net(hidden_states=state, timestep=t.expand(2), return_dict=False, **conditions)[0]
            state = scheduler.step(out, t, state, return_dict=False)[0]
    v = from_diffusers(net, scheduler, **conditions)
    torch.testing.assert_close(sample(v, x, times=1 - scheduler.sigmas.double()).x, state, rtol=0, atol=1e-5)
    low = from_diffusers(
        copy.deepcopy(net).to(torch.bfloat16), scheduler, **{k: c.to(torch.bfloat16) for k, c in conditions.items()}
    )
    torch.testing.assert_close(low(x, 0.3), v(x, 0.3), rtol=0.1, atol=0.1)
    assert low(x, 0.3).dtype == torch.float32
    with pytest.raises(ValueError, match="takes no class_labels"):
        low(x, 0.3, torch.zeros(2, dtype=torch.long))


def test_a_transformer_like_flux_gives_what_its_pipeline_loop_gives(diffusers):
    net = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=10,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    ).eval()
    x = draws(2, 16, 4)
    conditions = {
        "encoder_hidden_states": draws(2, 3, 12, seed=1),
        "pooled_projections": draws(2, 10, seed=2),
        "txt_ids": torch.zeros(3, 3),
        "img_ids": torch.stack(
            torch.meshgrid(torch.zeros(1), torch.arange(4.0), torch.arange(4.0), indexing="ij"), -1
        ).reshape(16, 3),
        "guidance": torch.full((2,), 3.5),
    }
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25], mu=0.7)
    scheduler.set_begin_index(0)
    state = x
    with torch.no_grad():
        for t in scheduler.timesteps:  # as FluxPipeline calls it
            out = net(hidden_states=state, timestep=t.expand(2) / 1000, return_dict=False, **conditions)[0]
            state = scheduler.step(out, t, state, return_dict=False)[0]
    v = from_diffusers(net, scheduler, **conditions)
    torch.testing.assert_close(sample(v, x, times=1 - scheduler.sigmas.double()).x, state, rtol=0, atol=1e-5)
    assert v(x, torch.rand(2)).shape == x.shape


def test_schedulers_whose_path_is_not_known_are_refused(diffusers, unet):
    for scheduler, words in (
        (diffusers.EDMEulerScheduler(), "EDMEulerScheduler with prediction_type='epsilon' is not known"),
        (diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True), "invert_sigmas"),
        (object(), "one of diffusers' schedulers, got object"),
    ):
        with pytest.raises(ValueError, match=words):
            from_diffusers(unet, scheduler)
    for scheduler in (
        diffusers.UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction"),
        diffusers.FlowMatchHeunDiscreteScheduler(),
    ):
        v = from_diffusers(unet, scheduler)
        y = torch.tensor([0, 1])
        torch.testing.assert_close(
            v(draws(2, 1, 8, 8), 0.4, y), -unet(draws(2, 1, 8, 8), torch.tensor(600.0), y).sample
        )


def test_half_precision_pipelines_keep_their_times_in_float32(diffusers, unet):
    asked = []
    unet.register_forward_pre_hook(lambda module, args, kwargs: asked.append(kwargs["timestep"]), with_kwargs=True)
    v = from_diffusers(unet.to(torch.bfloat16), diffusers.FlowMatchEulerDiscreteScheduler())
    found = v(draws(2, 1, 8, 8, dtype=torch.bfloat16), 0.3333, torch.tensor([0, 1]))
    assert found.dtype == torch.bfloat16
    assert asked[0].dtype == torch.float32
    assert float(asked[0][0]) == pytest.approx(666.7, abs=1e-3)
    assert (
        sample(v, draws(2, 1, 8, 8, dtype=torch.bfloat16), times=grid(2), y=torch.tensor([0, 1])).x.dtype
        == torch.bfloat16
    )
