"""Tiny random diffusers pipelines with a flow-matching scheduler, prompts given as embeddings."""

import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusion3InpaintPipeline,
    StableDiffusion3Pipeline,
)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def filled(network, seed=0, scale=0.2):
    """The same weights every time, large enough that every part of the network matters."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, scale, generator=seeded(seed))
            seed += 1
    return network.eval()


def autoencoder(channels):
    with torch.random.fork_rng(devices=[]):
        return AutoencoderKL(
            in_channels=3,
            out_channels=3,
            latent_channels=channels,
            block_out_channels=(4,),
            layers_per_block=1,
            norm_num_groups=1,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.06,
            scaling_factor=1.5,
        ).eval()


def stable_diffusion(kind=StableDiffusion3Pipeline, **scheduler):
    with torch.random.fork_rng(devices=[]):
        transformer = SD3Transformer2DModel(
            sample_size=8,
            patch_size=1,
            in_channels=4,
            num_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=16,
            caption_projection_dim=16,
            pooled_projection_dim=8,
            out_channels=4,
        )
    parts = dict.fromkeys(
        ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")
    )
    pipe = kind(
        transformer=filled(transformer),
        vae=autoencoder(4),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, **scheduler),
        **parts,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def stable_prompts(batch=1, *, negative=True):
    """Embeddings for `stable_diffusion`."""
    given = {
        "prompt_embeds": torch.randn(batch, 5, 16, generator=seeded(1)),
        "pooled_prompt_embeds": torch.randn(batch, 8, generator=seeded(2)),
    }
    if negative:
        given["negative_prompt_embeds"] = torch.randn(batch, 5, 16, generator=seeded(3))
        given["negative_pooled_prompt_embeds"] = torch.randn(batch, 8, generator=seeded(4))
    return given


def flux():
    """Dynamic shifting, packed latents, and under `true_cfg_scale` two calls of the network a step, the conditional one first."""
    with torch.random.fork_rng(devices=[]):
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            pooled_projection_dim=8,
            axes_dims_rope=[4, 4, 8],
        )
    parts = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    pipe = FluxPipeline(transformer=filled(transformer), vae=autoencoder(1), scheduler=scheduler, **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


class LabelledPipeline(DiffusionPipeline):
    """A class-conditional network ``unet(x, t, y)``, 0 noise and 1 data, as a diffusers pipeline with classifier-free guidance."""

    def __init__(self, unet, scheduler):
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)

    @torch.no_grad()
    def __call__(self, noise, labels, *, null, num_inference_steps=7, guidance_scale=1.0):
        self.scheduler.set_timesteps(num_inference_steps)
        latents, both = noise, torch.cat([torch.full_like(labels, null), labels])
        for timestep in self.scheduler.timesteps:
            t = 1.0 - float(timestep) / self.scheduler.config.num_train_timesteps
            if guidance_scale == 1.0:
                velocity = -self.unet(latents, t, labels)
            else:
                free, given = (-self.unet(torch.cat([latents, latents]), t, both)).chunk(2)
                velocity = free + guidance_scale * (given - free)
            latents = self.scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        return latents


IMG2IMG, INPAINT = StableDiffusion3Img2ImgPipeline, StableDiffusion3InpaintPipeline
