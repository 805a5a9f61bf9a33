"""The two ends to measure between."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from tomadiff import MergeConfig, apply, merged, preset, remove, summary
from tomadiff.methods.free import Free

CPU = torch.device("cpu")


@torch.no_grad()
def test_none_is_the_original_and_touches_no_block(unet, inputs):
    call = inputs(16, 16)
    base = unet(*call).sample
    for mode in ("each", "once"):
        apply(unet, config=MergeConfig(method="none", ratio=0.75, mode=mode, overrides={"mid_block.*": 0.5}))
        assert torch.equal(unet(*call).sample, base)
        assert not [name for name, module in unet.named_modules() if "_diffusers_hook" in vars(module)]
        assert all(row["note"] == "left alone" for row in summary(unet, show=False)["blocks"])
    assert torch.equal(remove(unet)(*call).sample, base)


def test_free_slices_and_pads():
    method = Free(preset("free"))
    x = torch.randn(2, 35, 4)
    layout = method.layout(((5, 7),), 0.4, CPU)
    plan = method.plan(x, layout)
    assert layout.kept == 21
    assert torch.equal(plan.merge(x), x[:, :21])
    assert plan.merge(x).data_ptr() == x.data_ptr(), "merging copies nothing"
    back = plan.unmerge(plan.merge(x))
    assert torch.equal(back[:, :21], x[:, :21])
    assert not back[:, 21:].any()
    assert torch.equal(plan.sizes, torch.ones(2, 21))
    assert torch.equal(plan.positions, torch.arange(21).expand(2, -1))


@torch.no_grad()
def test_free_does_no_arithmetic_beyond_the_model_on_fewer_tokens(unet, inputs):
    call = inputs(16, 16)

    def count(config: MergeConfig) -> int:
        with merged(unet, config=config), FlopCounterMode(display=False) as counter:
            unet(*call)
        return counter.get_total_flops()

    free, none = count(preset("free", ratio=0.75)), count(preset("none"))
    peers = {name: count(preset(name, ratio=0.75)) for name in ("tome", "tofu")}
    assert free < min(peers.values())
    assert free < none


@torch.no_grad()
def test_free_changes_the_picture(unet, inputs):
    call = inputs(16, 16)
    base = unet(*call).sample
    with merged(unet, config=preset("free")):
        assert not torch.allclose(unet(*call).sample, base, atol=1e-2)
