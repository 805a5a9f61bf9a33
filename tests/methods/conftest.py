"""A small UNet of the shape of Stable Diffusion 1.5, and inputs for it."""

from __future__ import annotations

import pytest
import torch
from diffusers import UNet2DConditionModel

CROSS_DOWN, CROSS_UP = "CrossAttnDownBlock2D", "CrossAttnUpBlock2D"


def build(**changes) -> UNet2DConditionModel:
    shape = {
        "block_out_channels": (16, 32, 32, 32),
        "down_block_types": (CROSS_DOWN, CROSS_DOWN, CROSS_DOWN, "DownBlock2D"),
        "up_block_types": ("UpBlock2D", CROSS_UP, CROSS_UP, CROSS_UP),
        "layers_per_block": 1,
        "attention_head_dim": 2,
        "cross_attention_dim": 16,
        "norm_num_groups": 8,
    }
    # The weights are fixed, and the random numbers of whoever calls stay as they are.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return UNet2DConditionModel(**{**shape, **changes}).eval()


def make_inputs(
    height: int, width: int, batch: int = 2, seed: int = 1
) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Latents, timestep and text of one call; neighbouring tokens are alike, as in a picture."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(batch, 4, height // 4 + 1, width // 4 + 1, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
    latents = smooth + 0.3 * torch.randn(smooth.shape, generator=generator)
    return latents, 500, torch.randn(batch, 7, 16, generator=generator)


@pytest.fixture
def small_unet():
    return build


@pytest.fixture
def unet() -> UNet2DConditionModel:
    return build()


@pytest.fixture
def inputs():
    return make_inputs
