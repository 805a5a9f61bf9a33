"""Real diffusers pipelines with small random weights, without text encoders: prompts are embeddings."""

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    DDIMScheduler,
    EulerDiscreteScheduler,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLControlNetPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)

PIPELINES = {
    "sd": StableDiffusionPipeline,
    "sd-img2img": StableDiffusionImg2ImgPipeline,
    "sd-inpaint": StableDiffusionInpaintPipeline,
    "sd-controlnet": StableDiffusionControlNetPipeline,
    "sdxl": StableDiffusionXLPipeline,
    "sdxl-img2img": StableDiffusionXLImg2ImgPipeline,
    "sdxl-inpaint": StableDiffusionXLInpaintPipeline,
    "sdxl-controlnet": StableDiffusionXLControlNetPipeline,
}

UNETS = {
    "sd": {
        "block_out_channels": (16, 32, 32),
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "attention_head_dim": 2,
    },
    "sdxl": {
        "block_out_channels": (16, 32, 32),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 1, 2),
        "attention_head_dim": (2, 2, 4),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 16,
    },
}


def make_pipeline(name):
    torch.manual_seed(0)
    family, _, task = name.partition("-")
    unet = UNet2DConditionModel(
        **UNETS[family], layers_per_block=1, cross_attention_dim=24, norm_num_groups=8, sample_size=16
    )
    vae = AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        latent_channels=4,
        sample_size=32,
    )
    parts = {"vae": vae.eval(), "unet": unet.eval(), "scheduler": EulerDiscreteScheduler()}
    parts |= {"text_encoder": None, "tokenizer": None}
    if family == "sdxl":
        parts |= {"text_encoder_2": None, "tokenizer_2": None}
        parts["add_watermarker"] = False
    else:
        parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        parts["scheduler"] = DDIMScheduler(steps_offset=1, clip_sample=False)
    if task == "controlnet":
        parts["controlnet"] = ControlNetModel.from_unet(unet, conditioning_channels=3).eval()
        # Untrained ControlNets begin with zeros; these have an effect.
        for layer in (*parts["controlnet"].controlnet_down_blocks, parts["controlnet"].controlnet_mid_block):
            torch.nn.init.normal_(layer.weight, std=0.1)
        parts["controlnet"].controlnet_cond_embedding = torch.nn.Conv2d(3, 16, 3, stride=2, padding=1)
    pipe = PIPELINES[name](**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def arguments(name, size=(32, 32), batch=1, guidance=5.0, steps=3):
    """What a call needs. Latents are half the size of the picture, tokens of the first level the same."""
    family, _, task = name.partition("-")
    random = torch.Generator().manual_seed(5)
    height, width = size
    given = {"num_inference_steps": steps, "guidance_scale": guidance, "output_type": "pt"}
    embeddings = {"prompt_embeds": (7, 24)} | ({"pooled_prompt_embeds": (16,)} if family == "sdxl" else {})
    for name_, shape in embeddings.items():
        for sign in ("", "negative_") if guidance > 1 else ("",):
            given[sign + name_] = torch.randn(batch, *shape, generator=random)
    picture = torch.rand(1, 3, height, width, generator=random)
    if task == "img2img":
        given |= {"image": picture, "strength": 0.9}
    elif task == "inpaint":
        mask = torch.zeros(1, 1, height, width)
        mask[..., : width // 2] = 1
        given |= {"image": picture, "mask_image": mask, "height": height, "width": width}
    elif task == "controlnet":
        given |= {"image": picture, "height": height, "width": width}
    else:
        given |= {"height": height, "width": width}
    return given


@pytest.fixture
def pipeline():
    return make_pipeline


@pytest.fixture
def generate():
    def run(pipe, name, seed=1, callback_on_step_end=None, **changes):
        given = arguments(name, **changes) | {"callback_on_step_end": callback_on_step_end}
        return pipe(**given, generator=torch.Generator().manual_seed(seed)).images

    return run


@pytest.fixture(params=PIPELINES)
def name(request):
    return request.param
