"""`emoji-xl`: a small UNet of SDXL's shape with its two text encoders, trained to predict v."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from torch import nn

from . import text, vocabulary

PIXELS_PER_LATENT = 4
# A share of the noise levels is so high that only the caption says what to draw; in the first steps all are.
HIGH_NOISE, HIGH_NOISE_SHARE, ONLY_HIGH = 750, 0.35, 100
# What not knowing the picture at each level on the way up weighs in the loss.
PICTURE = 0.5


def scheduler() -> DDIMScheduler:
    """Noise that ends at no signal at all; otherwise flat backgrounds keep the mean of the noise."""
    return DDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
    )


def draw_times(count: int, share: float, generator: torch.Generator) -> torch.Tensor:
    """Timesteps, all alike, but a share of them so high that only the caption says what to draw.

    -> (count,) int64 in [0, 1000)
    """
    usual = torch.randint(0, 1000, (count,), generator=generator)
    high = torch.randint(HIGH_NOISE, 1000, (count,), generator=generator)
    return torch.where(torch.rand(count, generator=generator) < share, high, usual)


@contextmanager
def features(unet: UNet2DConditionModel) -> Iterator[list[torch.Tensor]]:
    """What each level on the way up but the lowest, which knows nothing in detail, gives out in one call."""
    given: list[torch.Tensor] = []
    lasts = [(getattr(block, "attentions", None) or block.resnets)[-1] for block in unet.up_blocks[1:]]
    # A transformer gives a tuple.
    handles = [
        last.register_forward_hook(
            lambda *call: given.append(call[-1] if torch.is_tensor(call[-1]) else call[-1][0])
        )
        for last in lasts
    ]
    try:
        yield given
    finally:
        for handle in handles:
            handle.remove()


class XLModel(nn.Module):
    """Everything of the pipeline that is trained."""

    # The words of the first CLIP for the parts of the subject, behind those for the background.
    tellers = slice(vocabulary.SCENE, vocabulary.SCENE + vocabulary.PARTS)

    def __init__(
        self,
        channels: tuple[int, ...] = (48, 128, 192, 128, 64),
        heads: tuple[int, ...] = (1, 2, 3, 2, 1),
        transformer_layers: tuple[int, ...] = (1, 2, 1, 1, 1),
        text_layers: int = 3,
        text_width: int = 192,
    ) -> None:
        super().__init__()
        time_width = 32
        self.unet = UNet2DConditionModel(
            sample_size=64,
            in_channels=8,
            out_channels=8,
            # Two levels more than SDXL's three, so that every place of the lowest, 4 x 4, is near an edge: a
            # UNet knows places by the padding of its convolutions alone.
            down_block_types=("DownBlock2D", *3 * ("CrossAttnDownBlock2D",), "DownBlock2D"),
            up_block_types=("UpBlock2D", *3 * ("CrossAttnUpBlock2D",), "UpBlock2D"),
            block_out_channels=channels,
            layers_per_block=1,
            transformer_layers_per_block=transformer_layers,
            # diffusers reads this as the number of heads, as SDXL's own configuration does.
            attention_head_dim=heads,
            cross_attention_dim=text_width + text.CLIP_WIDTH,
            addition_embed_type="text_time",
            addition_time_embed_dim=time_width,
            projection_class_embeddings_input_dim=6 * time_width + text.CLIP_WIDTH,
            use_linear_projection=True,
            norm_num_groups=16,
        ).to(memory_format=torch.channels_last)
        self.text_encoder = text.clip(text_layers, text_width, spelled=True)
        self.text_encoder_2 = text.clip_with_projection(text_layers)
        self.scheduler = scheduler()
        # From the features of a level to the latents below each of its places; for training only.
        widths = list(reversed(channels[:-1]))
        scales = [2 ** (len(widths) - 1 - index) for index in range(len(widths))]
        self.pictures = nn.ModuleList(
            nn.Conv2d(width, 8 * scale**2, 1) for scale, width in zip(scales, widths, strict=True)
        )

    @property
    def table(self) -> nn.Embedding:
        """Where the words for parts are."""
        words: nn.Embedding = self.text_encoder.get_input_embeddings()
        return words

    def text_states(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """What the UNet gets of a caption. tokens: (B, T) -> (B, T, C), (B, C)"""
        spelled = vocabulary.with_parts(tokens, scene_first=True)
        first = self.text_encoder(spelled, output_hidden_states=True)
        second = self.text_encoder_2(tokens, output_hidden_states=True)
        words = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
        return [words, second.text_embeds]

    def loss(
        self,
        latents: torch.Tensor,
        tokens: torch.Tensor,
        step: int,
        generator: torch.Generator,
        window: int | None = None,
    ) -> torch.Tensor:
        """Mean squared error of v, and of the latents without noise that linear readings of each level on the
        way up tell. latents: (B, 8, H, W); tokens: (B, T)"""
        if window is not None:
            raise ValueError("a UNet knows places by the edges of the picture: it has to see all of it")
        noise = torch.randn(latents.shape, generator=generator)
        time = draw_times(len(latents), HIGH_NOISE_SHARE if step >= ONLY_HIGH else 1.0, generator)
        mixed = self.scheduler.add_noise(latents, noise, time).to(memory_format=torch.channels_last)
        with features(self.unet) as levels:
            v = self(mixed, time, tokens)
        error = F.mse_loss(v, self.scheduler.get_velocity(latents, noise, time))
        known = [
            F.mse_loss(reader(level), F.pixel_unshuffle(latents, latents.shape[-1] // level.shape[-1]))
            for reader, level in zip(self.pictures, levels, strict=True)
        ]
        return error + PICTURE * torch.stack(known).mean()

    def forward(self, mixed: torch.Tensor, time: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """v, conditioned as the pipeline's. mixed: (B, 8, H, W); time: (B,); tokens: (B, T) -> like mixed"""
        # The text encoders have learned before, by themselves, and stay as they are.
        with torch.no_grad():
            words, pooled = self.text_states(tokens)
        side = float(mixed.shape[-1] * PIXELS_PER_LATENT)
        sizes = torch.tensor([side, side, 0, 0, side, side]).expand(len(mixed), 6)
        condition = {"text_embeds": pooled, "time_ids": sizes}
        v: torch.Tensor = self.unet(mixed, time, words, added_cond_kwargs=condition, return_dict=False)[0]
        return v

    @torch.no_grad()
    def sample(self, captions: list[str], side: int, steps: int, generator: torch.Generator) -> torch.Tensor:
        """DDIM from noise, without guidance. -> latents (B, 8, side, side)"""
        sampler = scheduler()
        sampler.set_timesteps(steps)
        tokens = vocabulary.encode(captions)
        latents = torch.randn(len(captions), 8, side, side, generator=generator)
        for time in sampler.timesteps:
            v = self(latents, time.expand(len(tokens)), tokens)
            latents = sampler.step(v, time, latents).prev_sample
        return latents

    def pipeline(self, vae: AutoencoderKL) -> StableDiffusionXLPipeline:
        """The real pipeline around these modules."""
        return StableDiffusionXLPipeline(
            vae=vae,
            text_encoder=self.text_encoder,
            text_encoder_2=self.text_encoder_2,
            tokenizer=vocabulary.build_with_parts(scene_first=True),
            tokenizer_2=vocabulary.build(),
            unet=self.unet,
            scheduler=scheduler(),
            # The models learn the empty caption itself, not zeros in its place.
            force_zeros_for_empty_prompt=False,
            add_watermarker=False,
        )
