import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tomadiff.flops import count_flops


@pytest.mark.parametrize("masked", [False, True])
def test_attention_counts_the_same_on_a_cpu_as_on_the_meta_device(masked):
    def attention(device):
        q, k, v = (torch.empty(2, 4, length, 16, device=device) for length in (128, 96, 96))
        mask = torch.zeros(2, 1, 1, 96, device=device) if masked else None
        return lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask)

    expected = 2 * (2 * 2 * 4 * 128 * 96 * 16)  # two products of (S, D) and (D, T) for every head and picture
    assert count_flops(attention("cpu")) == count_flops(attention("meta")) == expected


def test_a_whole_unet_counts_the_same_on_both():
    from diffusers import UNet2DConditionModel

    counts = {}
    for device in ("cpu", "meta"):
        with torch.device(device):
            unet = UNet2DConditionModel(
                block_out_channels=(16, 32),
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
                cross_attention_dim=32,
                norm_num_groups=8,
            )
            x, text = torch.empty(1, 4, 32, 32), torch.empty(1, 7, 32)
        counts[device] = count_flops(lambda unet=unet, x=x, text=text: unet(x, 1, text))
    assert counts["cpu"] == counts["meta"]
