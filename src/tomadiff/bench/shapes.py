"""Models with the shapes of the real ones, built from their configurations, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)

# The UNet of stable-diffusion-xl-base-1.0.
SDXL: dict[str, Any] = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


def sdxl_unet(device: str = "meta") -> UNet2DConditionModel:
    """The real SDXL UNet, 2.57 billion parameters, without values on the meta device."""
    with torch.device(device):
        return UNet2DConditionModel(**SDXL).eval()


def sdxl_inputs(height: int, width: int, batch: int = 1, device: str = "meta") -> dict[str, Any]:
    """Arguments of one call of the SDXL UNet for a picture of this size in pixels."""
    with torch.device(device):
        return {
            "sample": torch.empty(batch, 4, height // 8, width // 8),
            "encoder_hidden_states": torch.empty(batch, 77, 2048),
            "added_cond_kwargs": {"text_embeds": torch.empty(batch, 1280), "time_ids": torch.empty(batch, 6)},
        }


def small_sdxl_pipeline(width: int = 64, layers: tuple[int, ...] = (1, 2, 4)) -> StableDiffusionXLPipeline:
    """The real SDXL pipeline around a small UNet of the same shape; its random weights are always the same.

    It has no text encoders: give it the embeddings of `small_sdxl_prompt`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        unet = UNet2DConditionModel(
            **SDXL
            | {
                "sample_size": 64,
                "block_out_channels": (width, 2 * width, 4 * width),
                "transformer_layers_per_block": layers,
                "attention_head_dim": tuple(max(1, width * factor // 64) for factor in (1, 2, 4)),
                "cross_attention_dim": 64,
                "addition_time_embed_dim": 8,
                "projection_class_embeddings_input_dim": 6 * 8 + 32,
                "norm_num_groups": 8,
            }
        )
        vae = AutoencoderKL(
            block_out_channels=(16, 16, 16, 16),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            norm_num_groups=8,
            latent_channels=4,
        )
    pipe = StableDiffusionXLPipeline(
        vae=vae.eval(),
        unet=unet.eval(),
        scheduler=EulerDiscreteScheduler(timestep_spacing="leading", steps_offset=1),
        text_encoder=None,
        text_encoder_2=None,
        tokenizer=None,
        tokenizer_2=None,
        add_watermarker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def small_sdxl_prompt(batch: int = 1) -> dict[str, torch.Tensor]:
    """Random text embeddings for `small_sdxl_pipeline`, always the same."""
    random = torch.Generator().manual_seed(0)
    return {
        f"{sign}{name}": torch.randn(batch, *shape, generator=random)
        for sign in ("", "negative_")
        for name, shape in (("prompt_embeds", (77, 64)), ("pooled_prompt_embeds", (32,)))
    }
