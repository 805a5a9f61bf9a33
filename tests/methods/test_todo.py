"""ToDo: every query, and the keys and values of a downsampled grid."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import interpolate, scaled_dot_product_attention

from tomadiff import MergeConfig, apply, merged, preset, summary
from tomadiff.methods.todo import ToDo, key_layout

CPU = torch.device("cpu")


def downsampled(x: torch.Tensor, size: tuple[int, int], factor: int) -> torch.Tensor:
    """x: (B, N, C) -> the tokens of the grid that nearest-neighbour downsampling gives."""
    grid = x.mT.unflatten(2, size)
    return interpolate(grid, scale_factor=1 / factor, mode="nearest").flatten(2).mT


def written_out(attention, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    q, k, v = (
        layer(x).unflatten(-1, (attention.heads, -1)).transpose(1, 2)
        for layer, x in ((attention.to_q, queries), (attention.to_k, keys), (attention.to_v, keys))
    )
    return attention.to_out[0](scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("factor", [2, 4])
@pytest.mark.parametrize("size", [(16, 16), (8, 24)])
@torch.no_grad()
def test_attention_equals_downsampled_keys_and_values_written_out(unet, size, factor, inputs):
    seen = []
    block = unet.down_blocks[0].attentions[0].transformer_blocks[0]
    block.norm1.register_forward_hook(lambda module, args, output: seen.append(output))
    apply(unet, config=preset("todo", ratio=1 - 1 / factor**2))
    block.attn1.register_forward_hook(lambda module, args, output: seen.append(output))
    unet(*inputs(*size))
    x, got = seen
    want = written_out(block.attn1, x, downsampled(x, size, factor))
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(got, written_out(block.attn1, x, x), atol=1e-3)


@torch.no_grad()
def test_whole_model_equals_one_whose_self_attention_is_written_out(unet, inputs, small_unet):
    def attention(module):
        def forward(hidden_states, encoder_hidden_states=None, attention_mask=None):
            side = int(hidden_states.shape[1] ** 0.5)
            return written_out(module, hidden_states, downsampled(hidden_states, (side, side), 2))

        return forward

    other = small_unet()
    for name, module in other.named_modules():
        if name.endswith("attn1"):
            module.forward = attention(module)
    call = inputs(16, 16)
    apply(unet, config=preset("todo"))
    torch.testing.assert_close(unet(*call).sample, other(*call).sample, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_factor_for_each_level(unet, inputs):
    config = preset("todo", overrides={"down_blocks.0.*": 0.9375, "up_blocks.3.*": 0.9375, "mid_block.*": 0})
    apply(unet, config=config)
    unet(*inputs(16, 16))
    rows = {row["block"].split(".attentions")[0]: row for row in summary(unet, show=False)["blocks"]}
    kept = {name: (row["tokens"], row["merged"]) for name, row in rows.items()}
    assert kept["down_blocks.0"] == (256, 16)
    assert kept["down_blocks.1"] == (64, 16)
    assert kept["mid_block"] == (4, 4)


def test_partial_cells_at_the_edge_keep_a_key():
    layout = key_layout(((5, 3), (2, 2)), 2)
    assert layout.keys.tolist() == [0, 2, 6, 8, 12, 14, 15]
    assert layout.sizes.tolist() == [4, 2, 4, 2, 2, 1, 4]
    assert layout.sizes.sum() == layout.tokens == 19


@torch.no_grad()
def test_weighing_keys_alike_changes_nothing_and_partial_cells_weigh_less(unet, inputs):
    even, odd = inputs(16, 16), inputs(15, 15)
    for call, same in ((even, True), (odd, False)):
        results = []
        for proportional in (False, True):
            with merged(unet, config=preset("todo", proportional=proportional)):
                results.append(unet(*call).sample)
        assert torch.allclose(*results, atol=1e-5) == same


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ({"ratio": 0.5}, r"one key of 2 x 2 \(ratio 0.75\)"),
        ({"overrides": {"*": 0.25}}, r"one key of 2 x 2 \(ratio 0.75\)"),
        ({"modules": ("self", "ff")}, r"modules=\('self',\)"),
        ({"mode": "once"}, "mode='each'"),
        ({"unmerge": "ridge"}, "leave unmerge at 'transpose'"),
    ],
)
def test_what_it_cannot_do_is_refused(asked, answer):
    with pytest.raises(ValueError, match=answer):
        preset("todo", **asked)


def test_there_is_no_unmerge():
    method = ToDo(preset("todo"))
    x = torch.randn(1, 16, 4)
    plan = method.plan(x, method.layout(((4, 4),), 0.75, CPU))
    assert plan.merge(x).shape == (1, 4, 4)
    with pytest.raises(NotImplementedError, match="nothing to unmerge"):
        plan.unmerge(plan.merge(x))


def test_fused_projections_are_refused_in_words(unet, inputs):
    unet.fuse_qkv_projections()
    apply(unet, config=preset("todo"))
    with pytest.raises(ValueError, match="unfuse_qkv_projections"):
        unet(*inputs(16, 16))
    unet.unfuse_qkv_projections()
    assert unet(*inputs(16, 16)).sample.isfinite().all()


def test_default_configuration_names_the_method_only():
    assert MergeConfig(method="todo", ratio=0.75, modules=("self",)).method == "todo"
