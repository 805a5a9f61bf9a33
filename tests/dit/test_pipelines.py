"""Whole pipelines: text to image, img2img, inpainting, Fill, Control, ControlNet, Kontext, with and without
guidance, from one call to the next."""

import pytest
import torch
from diffusers import (
    FluxControlNetModel,
    FluxControlNetPipeline,
    FluxControlPipeline,
    FluxFillPipeline,
    FluxImg2ImgPipeline,
    FluxInpaintPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    SD3ControlNetModel,
    StableDiffusion3ControlNetPipeline,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusion3InpaintPipeline,
    StableDiffusion3PAGPipeline,
    StableDiffusion3Pipeline,
)
from small_dits import (
    CONFIG,
    EVERYONE,
    WIDTH,
    livened,
    make_flux_pipeline,
    make_sd3_pipeline,
    negative_prompt,
    picture,
    prompt,
)

import tomadiff
from tomadiff.patching.apply import session_of

SIZE = {"height": 32, "width": 48}
IMAGE = torch.rand(1, 3, 32, 48, generator=torch.Generator().manual_seed(6))
MASK = torch.zeros(1, 1, 32, 48).index_fill(3, torch.arange(24), 1.0)


def flux_controlnet():
    torch.manual_seed(0)
    net = FluxControlNetModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=[4, 4, 8],
    )
    return livened(net)


def sd3_controlnet():
    torch.manual_seed(0)
    net = SD3ControlNetModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=WIDTH,
        out_channels=4,
        pos_embed_max_size=48,
    )
    return livened(net)


PIPELINES = {
    "schnell": lambda: (make_flux_pipeline(FluxPipeline), prompt()),
    "dev": lambda: (make_flux_pipeline(FluxPipeline, guidance=True), prompt(2) | {"guidance_scale": 3.5}),
    "dev with true guidance": lambda: (
        make_flux_pipeline(FluxPipeline, guidance=True),
        prompt() | negative_prompt() | {"true_cfg_scale": 2.0},
    ),
    "flux two pictures": lambda: (make_flux_pipeline(FluxPipeline), prompt() | {"num_images_per_prompt": 2}),
    "flux img2img": lambda: (
        make_flux_pipeline(FluxImg2ImgPipeline),
        prompt() | {"image": IMAGE, "strength": 0.7},
    ),
    "flux inpaint": lambda: (
        make_flux_pipeline(FluxInpaintPipeline),
        prompt() | {"image": IMAGE, "mask_image": MASK, "strength": 0.7},
    ),
    "fill": lambda: (
        make_flux_pipeline(FluxFillPipeline, in_channels=48, guidance=True),
        prompt() | {"image": IMAGE, "mask_image": MASK},
    ),
    "flux control": lambda: (
        make_flux_pipeline(FluxControlPipeline, in_channels=32, guidance=True),
        prompt() | {"control_image": IMAGE},
    ),
    "flux controlnet": lambda: (
        make_flux_pipeline(FluxControlNetPipeline, controlnet=flux_controlnet()),
        prompt() | {"control_image": IMAGE, "controlnet_conditioning_scale": 0.8},
    ),
    "kontext": lambda: (
        make_flux_pipeline(FluxKontextPipeline, guidance=True),
        prompt() | {"image": IMAGE, "max_area": 32 * 48, "_auto_resize": False},
    ),
    "sd3": lambda: (make_sd3_pipeline(StableDiffusion3Pipeline), prompt() | {"guidance_scale": 1.0}),
    "sd3 with guidance": lambda: (
        make_sd3_pipeline(StableDiffusion3Pipeline),
        prompt(2) | negative_prompt(2) | {"guidance_scale": 4.0},
    ),
    "sd3 skip-layer guidance": lambda: (
        make_sd3_pipeline(StableDiffusion3Pipeline),
        prompt()
        | negative_prompt()
        | {"skip_guidance_layers": [1], "skip_layer_guidance_stop": 0.9, "skip_layer_guidance_start": 0.0},
    ),
    "sd3 perturbed guidance": lambda: (
        make_sd3_pipeline(StableDiffusion3PAGPipeline, pag_applied_layers="blocks.2"),
        prompt() | negative_prompt() | {"pag_scale": 2.0},
    ),
    "sd3 img2img": lambda: (
        make_sd3_pipeline(StableDiffusion3Img2ImgPipeline),
        prompt() | negative_prompt() | {"image": IMAGE, "strength": 0.7},
    ),
    "sd3 inpaint": lambda: (
        make_sd3_pipeline(StableDiffusion3InpaintPipeline, latents=16),
        prompt() | negative_prompt() | {"image": IMAGE, "mask_image": MASK, "strength": 0.7},
    ),
    "sd3 controlnet": lambda: (
        make_sd3_pipeline(StableDiffusion3ControlNetPipeline, controlnet=sd3_controlnet()),
        prompt() | negative_prompt() | {"control_image": IMAGE},
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_merges_and_is_itself_again(name):
    pipe, call = PIPELINES[name]()
    call |= SIZE
    plain = picture(pipe, **call)
    tomadiff.apply(pipe, config=EVERYONE)
    torch.testing.assert_close(picture(pipe, **call), plain, atol=2e-3, rtol=0)
    tomadiff.apply(pipe, config=CONFIG)
    merged = picture(pipe, **call)
    assert torch.isfinite(merged).all()
    assert not torch.equal(merged, plain)
    assert torch.equal(picture(pipe, **call), merged), "a second run must not see the first"
    blocks = tomadiff.summary(pipe, show=False)["blocks"]
    assert all(row["merged"] == row["tokens"] / 2 for row in blocks)
    assert torch.equal(picture(tomadiff.remove(pipe), **call), plain)


@pytest.mark.parametrize(
    "name", ["dev", "flux controlnet", "kontext", "sd3 with guidance", "sd3 perturbed guidance"]
)
def test_merged_once_per_block(name):
    pipe, call = PIPELINES[name]()
    call |= SIZE
    plain = picture(pipe, **call)
    tomadiff.apply(pipe, config=EVERYONE.replace(mode="once"))
    torch.testing.assert_close(picture(pipe, **call), plain, atol=2e-3, rtol=0)
    tomadiff.apply(pipe, config=CONFIG.replace(mode="once"))
    merged = picture(pipe, **call)
    assert torch.isfinite(merged).all()
    assert not torch.equal(merged, plain)
    assert torch.equal(picture(tomadiff.remove(pipe), **call), plain)


@pytest.mark.parametrize("name", ["flux controlnet", "sd3 controlnet"])
def test_09_the_controlnet_of_a_pipeline_merges_along(name):
    pipe, call = PIPELINES[name]()
    call |= SIZE
    plain = picture(pipe, **call)
    tomadiff.apply(pipe, config=EVERYONE)
    tomadiff.apply(pipe.controlnet, config=EVERYONE)
    torch.testing.assert_close(picture(pipe, **call), plain, atol=2e-3, rtol=0)
    tomadiff.remove(pipe.controlnet)
    tomadiff.remove(pipe)
    assert torch.equal(picture(pipe, **call), plain)


def test_the_reference_picture_of_kontext_is_a_grid_of_its_own():
    pipe, call = PIPELINES["kontext"]()
    tomadiff.apply(pipe, config=CONFIG)
    picture(pipe, **call | {"height": 32, "width": 32, "max_area": 32 * 32})
    assert session_of(pipe).grids["single"] == ((8, 8), (8, 12))


def test_separate_passes_of_true_guidance_keep_their_own_plans():
    pipe, call = PIPELINES["dev with true guidance"]()
    tomadiff.apply(pipe, config=CONFIG.replace(select_every=10, weights_every=10))
    picture(pipe, **call | SIZE)
    assert all(count.selected == 2 for count in session_of(pipe).counts.values())


def test_sizes_in_turn():
    pipe, call = PIPELINES["schnell"]()
    tomadiff.apply(pipe, config=CONFIG)
    first = picture(pipe, **call | SIZE)
    for height, width in ((48, 32), (44, 60), (16, 80)):
        assert picture(pipe, **call, height=height, width=width).shape[1:3] == (height, width)
    assert torch.equal(picture(pipe, **call | SIZE), first)


def test_real_text_encoders_and_a_saved_pipeline(tmp_path):
    """From a folder, with a prompt in words, as a user would."""
    from small_dits import make_vae

    from tomadiff.demo.train.flux import FluxModel

    torch.manual_seed(0)
    parts = FluxModel(heads=1, dual_blocks=1, single_blocks=1, text_layers=1)
    livened(parts)
    vae = make_vae()
    pipe = parts.pipeline(vae)
    # The demo's latents have eight channels; these four.
    parts.transformer.x_embedder = torch.nn.Linear(16, parts.transformer.inner_dim)
    parts.transformer.proj_out = torch.nn.Linear(parts.transformer.inner_dim, 16)
    parts.transformer.register_to_config(in_channels=16, out_channels=16)
    pipe.save_pretrained(tmp_path)
    loaded = FluxPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    call = {"prompt": "a red apple", "max_sequence_length": 16, **SIZE}
    plain = picture(loaded, **call)
    tomadiff.apply(loaded, config=EVERYONE)
    torch.testing.assert_close(picture(loaded, **call), plain, atol=2e-3, rtol=0)
    assert torch.equal(picture(tomadiff.remove(loaded), **call), plain)


@pytest.mark.parametrize("name", ["schnell", "sd3 with guidance"])
def test_07_random_numbers_are_left_alone(name):
    pipe, call = PIPELINES[name]()
    picture(pipe, **call | SIZE)
    state = torch.random.get_rng_state()
    tomadiff.apply(pipe, config=CONFIG)
    picture(pipe, **call | SIZE)
    assert torch.equal(torch.random.get_rng_state(), state)
