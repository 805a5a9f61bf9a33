"""Small random models and pipelines of the transformer families."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
)

from tomadiff import MergeConfig

WIDTH = 32  # of text embeddings

# Everything merges, however small; tiles small enough for grids of a hundred tokens.
CONFIG = MergeConfig(
    ratio=0.5, min_tokens=0, select_size=4, merge_size=4, select_every=1, weights_every=1, tau=0.02
)
# Every token is its own destination, but through the real merge path: a ratio too small to merge anything.
EVERYONE = CONFIG.replace(ratio=1e-9, tau=1e-4)


def livened(model):
    """Diffusers starts some layers at zero; random ones let every mistake show."""
    random = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=random)
    return model.eval()


def make_flux(dual=2, single=2, in_channels=4, guidance=False, **changes):
    torch.manual_seed(0)
    settings = {"out_channels": 4, "pooled_projection_dim": WIDTH, "axes_dims_rope": (4, 4, 8)} | changes
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=in_channels,
        num_layers=dual,
        num_single_layers=single,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        guidance_embeds=guidance,
        **settings,
    )
    return livened(model)


def make_sd3(kind="medium", layers=3, **changes):
    """medium has a second attention in its first blocks, large has norms only, "3.0" neither."""
    torch.manual_seed(0)
    kinds = {
        "medium": {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)},
        "large": {"qk_norm": "rms_norm"},
        "3.0": {},
    }
    settings = {"in_channels": 4, "out_channels": 4} | kinds[kind] | changes
    model = SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        num_layers=layers,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=WIDTH,
        pos_embed_max_size=48,
        **settings,
    )
    return livened(model)


def grid_ids(height, width, picture=0.0, scale=1.0):
    rows, columns = torch.arange(height) * scale, torch.arange(width) * scale
    return torch.cartesian_prod(torch.tensor([float(picture)]), rows.float(), columns.float())


def flux_inputs(size=(8, 12), batch=1, text=7, timestep=0.5, channels=4, seed=1, guidance=None):
    random = torch.Generator().manual_seed(seed)
    inputs = {
        "hidden_states": torch.randn(batch, size[0] * size[1], channels, generator=random),
        "encoder_hidden_states": torch.randn(batch, text, WIDTH, generator=random),
        "pooled_projections": torch.randn(batch, WIDTH, generator=random),
        "timestep": torch.full((batch,), float(timestep)),
        "img_ids": grid_ids(*size),
        "txt_ids": torch.zeros(text, 3),
    }
    if guidance is not None:
        inputs["guidance"] = torch.full((batch,), guidance)
    return inputs


def sd3_inputs(size=(8, 12), batch=1, text=7, timestep=500.0, seed=1):
    random = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(batch, 4, 2 * size[0], 2 * size[1], generator=random),
        "encoder_hidden_states": torch.randn(batch, text, WIDTH, generator=random),
        "pooled_projections": torch.randn(batch, WIDTH, generator=random),
        "timestep": torch.full((batch,), float(timestep)),
    }


FAMILIES = {
    "flux": (make_flux, flux_inputs),
    "sd3.5 medium": (make_sd3, sd3_inputs),
    "sd3.5 large": (lambda: make_sd3("large"), sd3_inputs),
    "sd3.0": (lambda: make_sd3("3.0"), sd3_inputs),
}


@torch.no_grad()
def run(model, inputs, **more):
    return model(**inputs, **more, return_dict=False)[0]


def make_vae(latents=4):
    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(4, 4),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=latents,
        norm_num_groups=2,
        sample_size=32,
        shift_factor=0.0,
        scaling_factor=1.0,
    ).eval()


def make_flux_pipeline(cls, in_channels=16, out_channels=16, guidance=False, **more):
    """A pipeline without text encoders; its calls get embeddings. Two pixels make a latent, four a token."""
    model = make_flux(in_channels=in_channels, guidance=guidance, out_channels=out_channels)
    for name in ("image_encoder", "feature_extractor"):
        if name in cls._optional_components:
            more.setdefault(name, None)
    pipe = cls(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=make_vae(),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=model,
        **more,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def make_sd3_pipeline(cls, latents=4, **more):
    parts = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
    pipe = cls(
        transformer=make_sd3(in_channels=latents, out_channels=latents),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=make_vae(latents),
        **dict.fromkeys(parts),
        **more,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def prompt(batch=1, text=7):
    random = torch.Generator().manual_seed(3)
    return {
        "prompt_embeds": torch.randn(batch, text, WIDTH, generator=random),
        "pooled_prompt_embeds": torch.randn(batch, WIDTH, generator=random),
    }


def negative_prompt(batch=1, text=7):
    random = torch.Generator().manual_seed(4)
    return {
        "negative_prompt_embeds": torch.randn(batch, text, WIDTH, generator=random),
        "negative_pooled_prompt_embeds": torch.randn(batch, WIDTH, generator=random),
    }


def picture(pipe, **call):
    """(B, H, W, 3) of a run with a fixed seed."""
    torch.manual_seed(0)  # some pipelines encode pictures without the generator they are given
    settings = {"num_inference_steps": 3, "output_type": "np", "generator": torch.Generator().manual_seed(5)}
    return torch.from_numpy(pipe(**settings | call).images)
