"""What only Flux has: rotary ids that tell the grid, reference pictures, ControlNet residuals."""

import gc

import pytest
import torch
from diffusers import FluxControlNetModel
from small_dits import CONFIG, EVERYONE, WIDTH, flux_inputs, grid_ids, livened, make_flux, run

import tomadiff
from tomadiff.core.regions import make_layout
from tomadiff.patching.adapters import flux as adapter
from tomadiff.patching.apply import session_of


@pytest.mark.parametrize("scale", [1.0, 0.5, 4 / 3])
def test_the_grid_is_read_from_ids_in_any_unit(scale):
    assert adapter.read_grids(grid_ids(6, 9, scale=scale)) == ((6, 9),)
    assert adapter.read_grids(grid_ids(6, 9, scale=scale)[None]) == ((6, 9),)


def test_ids_that_are_no_grid_are_one_row():
    assert adapter.read_grids(torch.zeros(10, 3)) == ((1, 10),)
    assert adapter.read_grids(grid_ids(4, 4)[:-1]) == ((1, 15),)
    assert adapter.read_grids(torch.empty(16, 3, device="meta")) == ((4, 4),)
    assert adapter.read_grids(torch.empty(15, 3, device="meta")) == ((1, 15),)


def test_ids_are_read_once_and_forgotten_with_their_tensor(monkeypatch):
    reads = []
    real = adapter.read_grids
    monkeypatch.setattr(adapter, "read_grids", lambda ids: reads.append(1) or real(ids))
    known = len(adapter._KNOWN)
    ids = grid_ids(4, 4)
    assert adapter.grids_of(ids) is adapter.grids_of(ids)
    assert len(reads) == 1
    del ids
    gc.collect()
    assert len(adapter._KNOWN) == known


def kontext_inputs(size=(8, 8), reference=(4, 12), **more):
    """A picture and a reference picture behind it, as Kontext's pipeline packs them."""
    first, second = flux_inputs(size, **more), flux_inputs(reference, seed=9, **more)
    return first | {
        "hidden_states": torch.cat((first["hidden_states"], second["hidden_states"]), dim=1),
        "img_ids": torch.cat((first["img_ids"], grid_ids(*reference, picture=1.0))),
    }


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("merge_region", ["tile", "global"])
def test_kontext_reference_tokens_never_merge_with_the_picture(batch, merge_region):
    model = make_flux()
    inputs = kontext_inputs(batch=batch)
    expected = run(model, inputs)
    tomadiff.apply(model, config=EVERYONE.replace(merge_region=merge_region))
    torch.testing.assert_close(run(model, inputs), expected, atol=1e-4, rtol=1e-4)
    tomadiff.apply(model, config=CONFIG.replace(merge_region=merge_region))
    run(model, inputs)
    session = session_of(model)
    assert session.grids["dual"] == ((8, 8), (4, 12))
    plan = session.clock.current.plans["dual"]
    # What is merged from the picture alone cannot come from the reference, and the other way round.
    marks = torch.zeros(batch, 112, 1)
    marks[:, 64:] = 1
    merged = plan.merge(session.layouts["dual"].arrange(marks))
    assert set(merged.round(decimals=5).unique().tolist()) == {0.0, 1.0}
    assert torch.equal(session.layouts["dual"].restore(plan.unmerge(merged)).round(), marks)
    assert (merged == 0).sum() == 32 * batch


def test_positional_arguments_and_three_dimensional_ids():
    model = tomadiff.apply(make_flux(), config=CONFIG)
    inputs = flux_inputs()
    expected = run(model, inputs)
    order = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "img_ids", "txt_ids")
    with torch.no_grad():
        out = model(*(inputs[name] for name in order)).sample
    assert torch.equal(out, expected)
    deprecated = inputs | {"img_ids": inputs["img_ids"][None], "txt_ids": inputs["txt_ids"][None]}
    assert torch.equal(run(model, deprecated), expected)


def test_inputs_are_not_changed():
    model = tomadiff.apply(make_flux(), config=CONFIG)
    inputs = flux_inputs(batch=2)
    before = {name: value.clone() for name, value in inputs.items()}
    run(model, inputs)
    assert all(torch.equal(inputs[name], value) for name, value in before.items())


def residuals(count, tokens=96, batch=1):
    random = torch.Generator().manual_seed(11)
    return [0.1 * torch.randn(batch, tokens, 32, generator=random) for _ in range(count)]


@pytest.mark.parametrize("repeat", [True, False])
def test_controlnet_residuals_reach_their_tokens(repeat):
    model = make_flux()
    more = {
        "controlnet_block_samples": residuals(2),
        "controlnet_single_block_samples": residuals(1),
        "controlnet_blocks_repeat": repeat,
    }
    expected = run(model, flux_inputs(), **more)
    assert not torch.allclose(expected, run(model, flux_inputs()), atol=1e-2)
    tomadiff.apply(model, config=EVERYONE)
    torch.testing.assert_close(run(model, flux_inputs(), **more), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("hint", [False, True])
def test_09_a_controlnet_can_merge_too(hint):
    """With a condition in tokens, or as a picture that it embeds by itself."""
    torch.manual_seed(0)
    net = FluxControlNetModel(
        patch_size=1 if not hint else 2,
        in_channels=4 if not hint else 16 * 4,
        num_layers=2,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=[4, 4, 8],
        conditioning_embedding_channels=16 if hint else None,
    )
    livened(net)
    inputs = flux_inputs((8, 12), channels=64 if hint else 4)
    inputs["controlnet_cond"] = torch.randn(1, 3, 8 * 16, 12 * 16) if hint else torch.randn(1, 96, 4)

    def samples():
        with torch.no_grad():
            out = net(**inputs)
        return [*out.controlnet_block_samples, *out.controlnet_single_block_samples]

    expected = samples()
    tomadiff.apply(net, config=EVERYONE)
    for got, want in zip(samples(), expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    tomadiff.apply(net, config=CONFIG)
    assert any(
        not torch.allclose(got, want, atol=1e-3) for got, want in zip(samples(), expected, strict=True)
    )
    tomadiff.remove(net)
    assert all(torch.equal(got, want) for got, want in zip(samples(), expected, strict=True))


@pytest.mark.parametrize("mode", ["each", "once"])
@pytest.mark.parametrize("batch", [1, 2])
def test_ip_adapter(mode, batch):
    """An IP-Adapter looks at unrotated queries of all image tokens, so its attentions run unmerged; the rest
    of the model merges."""
    from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
    from diffusers.models.transformers.transformer_flux import (
        FluxAttnProcessor,
        FluxIPAdapterAttnProcessor,
    )

    model = make_flux()
    torch.manual_seed(0)
    model.set_attn_processor(
        {
            name: FluxAttnProcessor()
            if name.startswith("single")
            else livened(FluxIPAdapterAttnProcessor(32, 32, num_tokens=(4,), scale=[1.0]))
            for name in model.attn_processors
        }
    )
    projection = ImageProjection(image_embed_dim=8, cross_attention_dim=32, num_image_text_embeds=4)
    model.encoder_hid_proj = MultiIPAdapterImageProjection([livened(projection)])
    model.config.encoder_hid_dim_type = "ip_image_proj"
    embeds = torch.randn(batch, 1, 8)

    def call():
        return run(
            model,
            flux_inputs(batch=batch),
            joint_attention_kwargs={"ip_adapter_image_embeds": [embeds]},
        )

    expected = call()
    tomadiff.apply(model, config=EVERYONE.replace(mode=mode))
    torch.testing.assert_close(call(), expected, atol=1e-4, rtol=1e-4)
    tomadiff.apply(model, config=CONFIG.replace(mode=mode))
    out = call()
    assert torch.isfinite(out).all()
    assert not torch.allclose(out, expected, atol=1e-3)


def test_a_given_mask_leaves_the_call_alone():
    """A mask belongs to tokens in their original order."""
    model = make_flux()
    mask = torch.zeros(1, 1, 103, 103)
    mask[..., 50:] = -1.0
    more = {"joint_attention_kwargs": {"attention_mask": mask}}
    expected = run(model, flux_inputs(), **more)
    tomadiff.apply(model, config=CONFIG)
    assert torch.equal(run(model, flux_inputs(), **more), expected)
    assert not torch.allclose(run(model, flux_inputs()), expected, atol=1e-3)


def test_the_order_of_tokens_does_not_depend_on_the_ratio():
    """Caches keep hidden states from step to step, also where the ratio changes in between."""
    layouts = [make_layout(((7, 13), (5, 5)), r, ("tile", 4), ("tile", 4)) for r in (0.1, 0.5, 0.9)]
    assert all(torch.equal(layout.order, layouts[0].order) for layout in layouts)


def test_the_guidance_embedding_of_dev():
    model = make_flux(guidance=True)
    expected = run(model, flux_inputs(guidance=3.5))
    tomadiff.apply(model, config=EVERYONE)
    torch.testing.assert_close(run(model, flux_inputs(guidance=3.5)), expected, atol=1e-4, rtol=1e-4)


def test_single_blocks_merge_only_with_both_parts():
    """Attention and MLP of a single-stream block cannot merge one without the other."""
    model = tomadiff.apply(make_flux(), config=CONFIG.replace(modules=("self",)))
    run(model, flux_inputs())
    assert {row["block"] for row in tomadiff.summary(model, show=False)["blocks"]} == {
        "transformer_blocks.0",
        "transformer_blocks.1",
    }
    with pytest.raises(ValueError, match="would merge nothing"):
        tomadiff.apply(make_flux(dual=0), config=CONFIG.replace(modules=("ff",)))


def test_whole_stacks_of_blocks_are_for_unets():
    """Text tokens and a ControlNet's residuals come between the blocks of Flux."""
    with pytest.raises(ValueError, match=r"mode='once'"):
        tomadiff.apply(make_flux(), config=CONFIG.replace(mode="stack"))
