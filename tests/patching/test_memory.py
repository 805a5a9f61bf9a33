"""Merging takes no memory worth speaking of, and saves some."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

import tomadiff
from tomadiff.bench.memory import peak_memory
from tomadiff.bench.shapes import sdxl_inputs, sdxl_unet, small_sdxl_pipeline
from tomadiff.patching.apply import session_of


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_plans_of_the_real_sdxl_unet_take_less_than_a_hundredth_of_its_weights(ratio):
    unet, call = sdxl_unet(), sdxl_inputs(1024, 1024, batch=2)
    tomadiff.apply(unet, ratio)
    unet(timestep=999, **call)
    plans = session_of(unet).clock.current.plans
    kept = [leaf for plan in plans.values() for leaf in tree_leaves(plan) if isinstance(leaf, torch.Tensor)]
    weights = sum(value.numel() * value.element_size() for value in unet.parameters())
    assert 0 < sum(value.numel() * value.element_size() for value in kept) < weights / 100


def test_the_peak_of_a_merged_call_is_not_above_the_unmerged_one():
    unet = small_sdxl_pipeline().unet
    call = {
        "sample": torch.randn(2, 4, 64, 64),
        "encoder_hidden_states": torch.randn(2, 77, 64),
        "added_cond_kwargs": {"text_embeds": torch.randn(2, 32), "time_ids": torch.ones(2, 6)},
    }

    @torch.no_grad()
    def peak(ratio):
        with tomadiff.merged(unet, ratio):
            unet(timestep=999, **call)  # plans
            return peak_memory(lambda: unet(timestep=998, **call), torch.device("cpu"))

    unmerged, *merged = (peak(ratio) for ratio in (0.0, 0.25, 0.5, 0.75))
    assert merged[0] <= unmerged
    assert max(merged[1:]) < unmerged
