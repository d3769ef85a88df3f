"""BAScheduler inside diffusers pipelines: it is `ba_sample`, with the pipeline's guidance, grids, images and files."""

import copy

import pytest
import torch

pytestmark = pytest.mark.torch
diffusers = pytest.importorskip("diffusers")

from cameraready.flows._samplers import sample  # noqa: E402
from cameraready.flows._toy.networks import UNet  # noqa: E402
from cameraready.flows.ba_solver import BAConfig, BAScheduler, MLPSideNet, SideNet, ba_sample  # noqa: E402
from tests.flows.ba_pipelines import (  # noqa: E402
    IMG2IMG,
    LabelledPipeline,
    filled,
    flux,
    seeded,
    stable_diffusion,
    stable_prompts,
)

SIDE = {
    "image": lambda: filled(SideNet(4, width=8, depth=2, heads=2), 50),
    "tokens": lambda: filled(MLPSideNet(4, width=8, depth=1), 60),
}
SMALL = {"output_type": "latent", "height": 8, "width": 8, "num_inference_steps": 4}


def stable_velocity(pipe, prompts):
    """The pipeline's network as a flow of this package; label 0 is the prompt, 1 the negative one, of the sample's place in the batch."""

    def velocity(x, t, y=None):
        level = torch.tensor(1.0 - t, dtype=torch.float64).float() * 1000
        place = torch.arange(len(x)) % len(prompts["prompt_embeds"])
        words, pooled = prompts["prompt_embeds"][place], prompts["pooled_prompt_embeds"][place]
        if y is not None:
            free = y == 1
            words = torch.where(free[:, None, None], prompts["negative_prompt_embeds"][place], words)
            pooled = torch.where(free[:, None], prompts["negative_pooled_prompt_embeds"][place], pooled)
        return -pipe.transformer(
            hidden_states=x,
            timestep=level.expand(len(x)),
            encoder_hidden_states=words,
            pooled_projections=pooled,
            return_dict=False,
        )[0]

    return velocity


def times_of(scheduler, begin=0):
    return 1.0 - scheduler.sigmas[begin:].double()


class Calls:
    """How often a network is asked."""

    def __init__(self, network):
        self.count = 0
        network.register_forward_hook(lambda *a: setattr(self, "count", self.count + 1))


# --- pipelines -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stable():
    return stable_diffusion()


def test_stable_diffusion_without_guidance_is_ba_sample_bit_for_bit(stable):
    side, prompts = SIDE["image"](), stable_prompts(2, negative=False)
    scheduler = BAScheduler.attach(stable, side)
    calls = Calls(stable.transformer)
    found = stable(**SMALL, **prompts, guidance_scale=1.0, generator=seeded(0)).images
    assert calls.count == 4
    noise = torch.randn(found.shape, generator=seeded(0))
    with torch.no_grad():
        expected = ba_sample(stable_velocity(stable, prompts), side, noise, times=times_of(scheduler)).x
        euler = sample(stable_velocity(stable, prompts), noise, times=times_of(scheduler)).x
    assert torch.equal(found, expected)
    assert (found - euler).abs().max() > 1e-2, "the SideNet acts"


def test_stable_diffusion_with_guidance_is_guided_after_the_sidenet(stable):
    side, prompts = SIDE["image"](), stable_prompts(2)
    scheduler = BAScheduler.attach(stable, side)
    found = stable(**SMALL, **prompts, guidance_scale=4.0, generator=seeded(0)).images
    noise, config = torch.randn(found.shape, generator=seeded(0)), BAConfig(guidance=4.0, null_label=1)
    with torch.no_grad():
        expected = ba_sample(
            stable_velocity(stable, prompts),
            side,
            noise,
            times=times_of(scheduler),
            y=torch.zeros(2, dtype=torch.long),
            config=config,
        ).x
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    # A SideNet that were shown the guided velocity would say something else.
    scheduler.unwatch()
    pipe_scheduler = BAScheduler.from_config(scheduler.config, side=side, unguided=True)
    stable.scheduler = pipe_scheduler
    wrong = stable(**SMALL, **prompts, guidance_scale=4.0, generator=seeded(0)).images
    assert (wrong - expected).abs().max() > 1e-2


def test_flux_asks_its_network_twice_a_step_and_packs_its_latents():
    pipe, side = flux(), SIDE["tokens"]()
    scheduler = BAScheduler.attach(pipe, side)
    calls = Calls(pipe.transformer)
    words, pooled = ([torch.randn(1, *shape, generator=seeded(seed)) for seed in (1, 2)] for shape in ((5, 16), (8,)))
    given = {"prompt_embeds": words[0], "pooled_prompt_embeds": pooled[0]}
    given |= {"negative_prompt_embeds": words[1], "negative_pooled_prompt_embeds": pooled[1]}
    noise = torch.randn(1, 16, 4, generator=seeded(0))
    found = pipe(**SMALL, **given, true_cfg_scale=3.0, latents=noise).images
    assert calls.count == 8
    assert scheduler.config.use_dynamic_shifting
    ids = pipe._prepare_latent_image_ids(1, 4, 4, "cpu", torch.float32)

    def velocity(x, t, y):
        level = (torch.tensor(1.0 - t, dtype=torch.float64).float() * 1000).expand(1) / 1000
        halves = [
            pipe.transformer(
                hidden_states=x[i : i + 1],
                timestep=level,
                pooled_projections=pooled[int(label)],
                encoder_hidden_states=words[int(label)],
                txt_ids=torch.zeros(5, 3),
                img_ids=ids,
                return_dict=False,
            )[0]
            for i, label in enumerate(y)
        ]
        return -torch.cat(halves)

    with torch.no_grad():
        expected = ba_sample(
            velocity,
            side,
            noise,
            times=times_of(scheduler),
            y=torch.zeros(1, dtype=torch.long),
            config=BAConfig(guidance=3.0, null_label=1),
        ).x
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_a_labelled_network_of_this_package_in_a_pipeline(scale):
    unet = filled(UNet(channels=1, size=8, width=8, classes=3), scale=0.1)
    side = filled(SideNet(1, width=8, depth=1), 70)
    pipe = LabelledPipeline(
        unet, diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1024)
    )  # times are exact
    BAScheduler.attach(pipe, side)
    noise, labels = torch.randn(3, 1, 8, 8, generator=seeded(0)), torch.tensor([0, 2, 1])
    found = pipe(noise, labels, null=3, num_inference_steps=5, guidance_scale=scale)
    config = BAConfig(guidance=scale, null_label=3)
    with torch.no_grad():
        expected = ba_sample(unet, side, noise, times=times_of(pipe.scheduler), y=labels, config=config).x
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_sidenet_with_classes_gets_the_labels_that_the_network_got():
    unet = filled(UNet(channels=1, size=8, width=8, classes=3), scale=0.1)
    side = filled(SideNet(1, width=8, depth=1, classes=3), 70)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1024)
    pipe = LabelledPipeline(unet, scheduler)
    with pytest.raises(ValueError, match="name the argument"):
        BAScheduler.attach(pipe, side)
    BAScheduler.attach(pipe, side, labels=2)
    noise, labels = torch.randn(3, 1, 8, 8, generator=seeded(0)), torch.tensor([0, 2, 1])
    found = pipe(noise, labels, null=3, num_inference_steps=4, guidance_scale=2.5)
    with torch.no_grad():
        config = BAConfig(guidance=2.5, null_label=3)
        expected = ba_sample(unet, side, noise, times=times_of(pipe.scheduler), y=labels, config=config).x
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    BAScheduler.attach(pipe, side, labels="class_labels")
    with pytest.raises(ValueError, match="without labels in the argument 'class_labels'"):
        pipe(noise, labels, null=3, num_inference_steps=4)
    blind = BAScheduler(side=side, unguided=True)
    blind.set_timesteps(3)
    with pytest.raises(ValueError, match="trained with classes"):
        blind.step(noise, blind.timesteps[0], noise)


def test_a_configuration_does_not_lose_its_sidenet_without_a_word():
    side = SIDE["image"]()
    scheduler = BAScheduler(side=side)
    with pytest.raises(ValueError, match=r"give side=scheduler\.side"):
        BAScheduler.from_config(scheduler.config)
    assert BAScheduler.from_config(scheduler.config, side=side).side is side
    without = BAScheduler.from_config(scheduler.config, side=None)
    assert without.side is None
    assert without.config.sidenet is None


def test_starting_from_an_image_begins_inside_the_grid():
    pipe, side = stable_diffusion(IMG2IMG), SIDE["image"]()
    scheduler = BAScheduler.attach(pipe, side)
    prompts, image = stable_prompts(1, negative=False), torch.randn(1, 4, 8, 8, generator=seeded(8))
    settings = {**SMALL, "num_inference_steps": 5, "strength": 0.6}
    found = pipe(**settings, **prompts, image=image, guidance_scale=1.0, generator=seeded(0)).images
    times = times_of(scheduler, begin=2)
    noise = torch.randn(image.shape, generator=seeded(0))
    start = float(times[0]) * image + (1 - float(times[0])) * noise
    with torch.no_grad():
        expected = ba_sample(stable_velocity(pipe, prompts), side, start, times=times).x
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_latents_changed_between_steps_start_the_solver_anew(stable):
    """Without a SideNet each step is then the first, and the first is Euler's; so it is with diffusers' own scheduler."""

    def nudged(pipe, step, timestep, given):
        return {"latents": given["latents"] + 0.1}

    found = {}
    for kind in ("euler", "ba"):
        if kind == "ba":
            BAScheduler.attach(stable, None)
        else:
            stable.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
        found[kind] = stable(
            **SMALL, **stable_prompts(), guidance_scale=4.0, generator=seeded(0), callback_on_step_end=nudged
        ).images
    torch.testing.assert_close(found["ba"], found["euler"], rtol=1e-5, atol=1e-5)


def test_custom_sigmas_go_through_the_shift_as_with_diffusers_own(stable):
    before = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler = BAScheduler.from_config(before.config)
    for settings in (
        {"sigmas": [1.0, 0.6, 0.25, 0.1]},
        {"num_inference_steps": 7},
        {"timesteps": [900.0, 300.0], "sigmas": [0.9, 0.3]},
    ):
        for each in (before, scheduler):
            each.set_timesteps(**settings)
        assert torch.equal(scheduler.sigmas, before.sigmas)
        assert torch.equal(scheduler.timesteps, before.timesteps)
    stable.scheduler = scheduler
    found = stable(
        **{**SMALL, "num_inference_steps": 3},
        **stable_prompts(1, negative=False),
        guidance_scale=1.0,
        sigmas=[1.0, 0.5, 0.2],
    ).images
    assert found.isfinite().all()
    assert scheduler.step_index is None, "the run is over"


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_pipeline_is_saved_with_its_sidenet_and_loaded_with_it(tmp_path):
    pipe, side = stable_diffusion(), SIDE["image"]()
    BAScheduler.attach(pipe, side, nodes="simpson38")
    prompts = {**SMALL, **stable_prompts(1), "guidance_scale": 3.0}
    expected = pipe(**prompts, generator=seeded(0)).images
    pipe.save_pretrained(tmp_path)
    absent = {name: None for name in pipe.config if "encoder" in name or "tokenizer" in name}
    loaded = type(pipe).from_pretrained(tmp_path, feature_extractor=None, **absent)
    saved = loaded.scheduler
    assert isinstance(saved, BAScheduler)
    assert saved.config.shift == 3.0
    assert saved.config.nodes == "simpson38"
    for name, value in side.state_dict().items():
        assert torch.equal(saved.side.state_dict()[name], value)
    loaded.set_progress_bar_config(disable=True)
    saved.watch(loaded.transformer)
    assert torch.equal(loaded(**prompts, generator=seeded(0)).images, expected)
    (tmp_path / "scheduler" / "sidenet.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no sidenet\.safetensors"):
        BAScheduler.from_pretrained(tmp_path, subfolder="scheduler")


def test_configurations_go_there_and_back(tmp_path):
    scheduler = BAScheduler(shift=2.0, use_dynamic_shifting=False, anchors="single", gauss_nodes=3, unguided=True)
    again = BAScheduler.from_config(scheduler.config)
    plain = {k: v for k, v in scheduler.config.items() if not k.startswith("_")}
    assert {k: v for k, v in again.config.items() if not k.startswith("_")} == plain
    assert diffusers.FlowMatchEulerDiscreteScheduler.from_config(scheduler.config).config.shift == 2.0
    flow = diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    assert BAScheduler.from_config(flow.config).config.shift == 3.0
    assert copy.deepcopy(scheduler).config == scheduler.config
    function = BAScheduler(side=lambda x, v, t, h, y: x)
    with pytest.raises(ValueError, match="cannot be saved"):
        function.save_pretrained(tmp_path)


def test_wrong_pipelines_and_steps_are_refused_with_a_sentence():
    with pytest.raises(ValueError, match="'epsilon'"):
        BAScheduler.from_config(diffusers.DDIMScheduler().config)
    with pytest.raises(ValueError, match="draws noise"):
        BAScheduler(stochastic_sampling=True)
    with pytest.raises(ValueError, match="strictly between"):
        BAScheduler(nodes=0.7)
    with pytest.raises(ValueError, match="neither transformer nor unet"):
        BAScheduler.attach(object(), None)
    scheduler, x = BAScheduler(), torch.zeros(1, 3)
    scheduler.set_timesteps(2)
    with pytest.raises(ValueError, match="not its index"):
        scheduler.step(x, 0, x)
    fresh = BAScheduler()
    fresh.set_timesteps(4)
    fresh.step(x, fresh.timesteps[0], x)
    with pytest.raises(ValueError, match="steps go in order"):
        fresh.step(x, fresh.timesteps[3], x)
    with pytest.raises(FloatingPointError, match="not finite"):
        scheduler.step(x * float("nan"), scheduler.timesteps[0], x)


def test_bfloat16_latents_keep_a_state_in_float32_as_ba_sample_does():
    weight = torch.randn(6, 6, generator=seeded(0)) / 2

    def velocity(x, t, y=None):
        return (x.float() @ weight).to(x.dtype)

    noise = torch.randn(3, 6, generator=seeded(1)).bfloat16()
    scheduler = BAScheduler(side=filled(MLPSideNet(6, width=8, depth=1), 9), unguided=True)
    scheduler.set_timesteps(6)
    latents = noise
    for timestep in scheduler.timesteps:
        latents = scheduler.step(-velocity(latents, 0), timestep, latents, return_dict=False)[0]
    with torch.no_grad():
        assert torch.equal(latents, ba_sample(velocity, scheduler.side, noise, times=times_of(scheduler)).x)


def test_inverted_sigmas_run_from_noise_to_data_as_the_network_does():
    """Mochi's scheduler counts up and its network points to the data: nothing is turned round then."""
    weight = torch.randn(6, 6, generator=seeded(0)) / 2
    noise, side = torch.randn(3, 6, generator=seeded(1)), filled(MLPSideNet(6, width=8, depth=1), 9)
    scheduler = BAScheduler(side=side, unguided=True, invert_sigmas=True)
    scheduler.set_timesteps(5)
    latents = noise
    for timestep in scheduler.timesteps:
        latents = scheduler.step(latents @ weight, timestep, latents, return_dict=False)[0]
    with torch.no_grad():
        expected = ba_sample(lambda x, t, y=None: x @ weight, side, noise, times=scheduler.sigmas.double()).x
    assert torch.equal(latents, expected)
