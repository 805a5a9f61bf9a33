"""What only Stable Diffusion 3 has: processors without a mask, a second attention, a last block without
text."""

import pytest
import torch
from diffusers.models.controlnets.controlnet_sd3 import SD3ControlNetModel
from small_dits import CONFIG, EVERYONE, WIDTH, livened, make_sd3, run, sd3_inputs

import tomadiff
from tomadiff.core.merging import assignment
from tomadiff.patching.apply import session_of


def test_every_part_of_every_block_merges():
    model = tomadiff.apply(make_sd3("medium"), config=CONFIG)
    run(model, sd3_inputs())
    names = {place.site.name for place in session_of(model).places}
    assert "transformer_blocks.0.attn2" in names
    assert "transformer_blocks.2.attn2" not in names
    assert "transformer_blocks.2.attn" in names  # the last block, which hands no text on


@pytest.mark.parametrize("kind", ["medium", "large", "3.0"])
def test_sizes_reach_the_attention(kind):
    """The processors drop a mask; extra head dimensions get through, with and without norms."""
    model = tomadiff.apply(make_sd3(kind), config=CONFIG)
    with_sizes = run(model, sd3_inputs(batch=2))
    tomadiff.apply(model, config=CONFIG.replace(proportional=False))
    assert (run(model, sd3_inputs(batch=2)) - with_sizes).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["large", "3.0"])
def test_fused_projections_before_or_after(kind):
    model = make_sd3(kind)
    tomadiff.apply(model, config=EVERYONE)
    unfused = run(model, sd3_inputs())
    model.fuse_qkv_projections()
    after = run(model, sd3_inputs())
    tomadiff.apply(model, config=EVERYONE)
    before = run(model, sd3_inputs())
    tomadiff.remove(model)
    # Not the unfused model: diffusers' fused processor leaves out the norms that "large" has.
    expected = run(model, sd3_inputs())
    torch.testing.assert_close(after, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(before, expected, atol=1e-4, rtol=1e-4)
    model.unfuse_qkv_projections()
    torch.testing.assert_close(run(model, sd3_inputs()), unfused, atol=1e-4, rtol=1e-4)


def test_controlnet_residuals_reach_their_tokens():
    model = make_sd3()
    random = torch.Generator().manual_seed(11)
    more = {"block_controlnet_hidden_states": [torch.randn(1, 96, 32, generator=random) for _ in range(2)]}
    expected = run(model, sd3_inputs(), **more)
    tomadiff.apply(model, config=EVERYONE)
    torch.testing.assert_close(run(model, sd3_inputs(), **more), expected, atol=1e-4, rtol=1e-4)


def test_skipped_layers():
    """Skip-layer guidance leaves blocks out of one of its passes."""
    model = make_sd3()
    expected = run(model, sd3_inputs(), skip_layers=[0])
    tomadiff.apply(model, config=EVERYONE)
    torch.testing.assert_close(run(model, sd3_inputs(), skip_layers=[0]), expected, atol=1e-4, rtol=1e-4)


def test_forward_chunking_runs_the_feed_forward_unmerged():
    model = make_sd3("large")
    model.enable_forward_chunking(chunk_size=24, dim=1)
    expected = run(model, sd3_inputs(text=24))
    tomadiff.apply(model, config=CONFIG.replace(modules=("ff",)))
    torch.testing.assert_close(run(model, sd3_inputs(text=24)), expected, atol=1e-4, rtol=1e-4)


def test_09_a_controlnet_can_merge_too():
    torch.manual_seed(0)
    net = SD3ControlNetModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=WIDTH,
        out_channels=4,
        pos_embed_max_size=48,
    )
    livened(net)
    inputs = sd3_inputs() | {"controlnet_cond": torch.randn(1, 4, 16, 24)}

    def samples():
        with torch.no_grad():
            return net(**inputs).controlnet_block_samples

    expected = samples()
    tomadiff.apply(net, config=EVERYONE)
    for got, want in zip(samples(), expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    tomadiff.remove(net)
    assert all(torch.equal(got, want) for got, want in zip(samples(), expected, strict=True))


def test_parts_of_the_model_called_alone_are_untouched():
    """The pipeline of SD3.5's large ControlNets calls the transformer's patch embedding by itself."""
    model = make_sd3()
    latents = sd3_inputs()["hidden_states"]
    expected = model.pos_embed(latents)
    tomadiff.apply(model, config=CONFIG)
    run(model, sd3_inputs())
    assert torch.equal(model.pos_embed(latents), expected)


def test_sizes_add_up_to_the_tokens():
    model = tomadiff.apply(make_sd3(), config=CONFIG)
    inputs = sd3_inputs(batch=2)
    run(model, inputs)
    plan = session_of(model).clock.current.plans["joint"]
    torch.testing.assert_close(plan.sizes.sum(1), torch.full((2,), 96.0))
    assert assignment(torch.zeros(2, 3), 0.1).sum(0).tolist() == [1.0, 1.0, 1.0]
