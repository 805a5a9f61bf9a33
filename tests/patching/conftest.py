"""Small UNets of the real class."""

import pytest
import torch
from diffusers import UNet2DConditionModel


@pytest.fixture
def make_unet():
    def make(**changes):
        torch.manual_seed(0)
        settings = {
            "block_out_channels": (32, 64),
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 32,
            "attention_head_dim": 4,
            "norm_num_groups": 8,
        }
        return UNet2DConditionModel(**settings | changes).eval().requires_grad_(False)

    return make


@pytest.fixture
def unet(make_unet):
    return make_unet()


@pytest.fixture
def text():
    return torch.randn(2, 7, 32)
