from __future__ import annotations

import pytest
import torch
from diffusers import UNet2DConditionModel
from small_unet import small_unet

torch.set_num_threads(1)


@pytest.fixture
def unet() -> UNet2DConditionModel:
    return small_unet()
