"""Counted work: just above what the merged tokens allow, and `summary` says both."""

import pytest
import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel, UNet2DConditionModel
from small_dits import CONFIG, EVERYONE, flux_inputs, make_flux, run
from torch import nn

import tomadiff
from tomadiff.flops import count_flops
from tomadiff.patching import ceiling


def flux_dev():
    """Flux.1-dev without values, and a call for 1024 x 1024 pixels."""
    with torch.device("meta"):
        model = FluxTransformer2DModel(guidance_embeds=True).eval()
        inputs = {
            "hidden_states": torch.empty(1, 4096, 64),
            "encoder_hidden_states": torch.empty(1, 512, 4096),
            "pooled_projections": torch.empty(1, 768),
            "timestep": torch.empty(1),
            "img_ids": torch.empty(4096, 3),
            "txt_ids": torch.empty(512, 3),
            "guidance": torch.empty(1),
        }
    return model, inputs


def test_flux_dev_is_within_two_percent_of_its_ceiling():
    model, inputs = flux_dev()
    plain = count_flops(lambda: model(**inputs))
    assert plain == pytest.approx(74.4e12, rel=0.002)
    tomadiff.apply(model, config=tomadiff.preset("flux", end=1.0))
    merged = count_flops(lambda: model(**inputs))
    flops = ceiling.count(model)
    assert (flops.unmerged, flops.merged) == (plain, merged)
    assert flops.ceiling < merged < 1.02 * flops.ceiling


@pytest.mark.parametrize(
    ("ratio", "gain"),
    [
        pytest.param(0.25, 1.35, marks=pytest.mark.slow),
        (0.5, 1.98),
        pytest.param(0.75, 3.46, marks=pytest.mark.slow),
    ],
)
def test_the_ceiling_of_all_blocks_is_the_known_one(ratio, gain):
    """Counted independently, by hand: two operations for each weight of a linear layer and token, and four
    for each pair of tokens and channel of an attention."""
    model, inputs = flux_dev()
    tomadiff.apply(model, config=tomadiff.preset("flux", ratio=ratio, skip_first=0, end=1.0))
    with torch.no_grad():
        model(**inputs)
    flops = ceiling.count(model)
    assert flops.unmerged / flops.ceiling == pytest.approx(gain, abs=0.01)
    assert flops.merged < 1.02 * flops.ceiling
    image, text, width = round(4096 * (1 - ratio)), 512, 3072
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    by_hand = len(blocks) * 4 * (image + text) ** 2 * width
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            weights = module.in_features * module.out_features
            if "blocks" not in name:
                tokens = {"x_embedder": 4096, "proj_out": 4096, "context_embedder": text}.get(name, 1)
            elif "norm" in name:
                tokens = 1
            elif name.startswith("single"):
                tokens = image + text
            else:
                tokens = text if "add" in name or "context" in name else image
            by_hand += 2 * weights * tokens
    assert flops.ceiling == pytest.approx(by_hand, rel=1e-3)


def test_sd3_large():
    """Extra head dimensions carry the cluster sizes, which costs a little more."""
    with torch.device("meta"):
        model = SD3Transformer2DModel(
            num_layers=38,
            num_attention_heads=38,
            caption_projection_dim=2432,
            pos_embed_max_size=192,
            qk_norm="rms_norm",
        ).eval()
        inputs = {
            "hidden_states": torch.empty(2, 16, 128, 128),
            "encoder_hidden_states": torch.empty(2, 333, 4096),
            "pooled_projections": torch.empty(2, 2048),
            "timestep": torch.empty(2),
        }
    tomadiff.apply(model, config=tomadiff.preset("sd3", end=1.0))
    with torch.no_grad():
        model(**inputs)
    flops = ceiling.count(model)
    assert flops.ceiling < flops.merged < 1.05 * flops.ceiling


def test_summary_prints_the_ceiling(capsys):
    model = tomadiff.apply(make_flux(), config=CONFIG)
    assert "flops" not in tomadiff.summary(model)
    run(model, flux_inputs((6, 10), batch=2))
    capsys.readouterr()
    result = tomadiff.summary(model)
    last = capsys.readouterr().out.splitlines()[-1]
    assert "if merging itself were free" in last
    flops = result["flops"]
    assert f"({flops['unmerged'] / flops['ceiling']:.2f}x)" in last
    assert flops["ceiling"] < flops["merged"] < flops["unmerged"]
    assert count_flops(lambda: run(model, flux_inputs((6, 10), batch=2))) == flops["merged"]


def test_counting_leaves_the_model_alone():
    model = tomadiff.apply(make_flux(), config=CONFIG)
    expected = run(model, flux_inputs())
    ceiling.count(model)
    assert torch.equal(run(model, flux_inputs()), expected)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def test_nothing_merged_saves_nothing():
    model = tomadiff.apply(make_flux(), config=EVERYONE)
    run(model, flux_inputs())
    flops = ceiling.count(model)
    assert flops.ceiling == flops.unmerged < flops.merged


def test_unets_have_a_ceiling_too():
    unet = UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=2,
        norm_num_groups=4,
    ).eval()
    tomadiff.apply(unet, 0.5)
    with torch.no_grad():
        unet(torch.randn(1, 4, 32, 32), 500, torch.randn(1, 7, 8))
    flops = ceiling.count(unet)
    assert flops.ceiling < flops.merged < flops.unmerged


def test_a_model_that_was_not_called_or_cannot_be_built_again_has_none():
    assert ceiling.count(tomadiff.apply(make_flux(), config=CONFIG)) is None
    assert ceiling.count(make_flux()) is None


@pytest.mark.parametrize("method", ["tome", "tofu", "todo", "free"])
def test_every_method_has_a_ceiling(method):
    config = tomadiff.preset(method, ratio=0.75, min_tokens=0)
    model = tomadiff.apply(make_flux(), config=config)
    run(model, flux_inputs((8, 8)))
    flops = ceiling.count(model)
    assert flops.ceiling <= flops.merged
    assert flops.ceiling < flops.unmerged
