"""`emoji-flux`: a small Flux transformer with its text encoders, trained by flow matching."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from torch import nn

from . import text, vocabulary

FINAL_TOKENS_PER_SIDE = 32
# How far noise levels move up: a picture of 256 pixels takes more noise to hide.
SHIFT = 2.0
# A share of the noise levels is so high that only the caption says what to draw.
HIGH_NOISE, HIGH_NOISE_SHARE = 0.75, 0.5


class FluxModel(nn.Module):
    """Everything of the pipeline that is trained."""

    # T5 knows no places, only distances: a token of its own for each part stands before the caption.
    tellers = slice(0, vocabulary.PARTS)

    def __init__(
        self,
        heads: int = 4,
        dual_blocks: int = 2,
        single_blocks: int = 5,
        text_layers: int = 2,
        text_width: int = 192,
    ) -> None:
        super().__init__()
        self.transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=32,
            num_layers=dual_blocks,
            num_single_layers=single_blocks,
            attention_head_dim=64,
            num_attention_heads=heads,
            joint_attention_dim=text_width,
            pooled_projection_dim=text.CLIP_WIDTH,
            guidance_embeds=False,
            axes_dims_rope=(16, 24, 24),
        )
        self.text_encoder = text.clip(text_layers)
        self.text_encoder_2 = text.t5(text_width, text_layers)

    @property
    def table(self) -> nn.Embedding:
        """Where the words for parts are."""
        words: nn.Embedding = self.text_encoder_2.get_input_embeddings()
        return words

    def text_states(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """What the transformer gets of a caption. tokens: (B, T) -> (B, T, C), (B, C)"""
        words = self.text_encoder_2(vocabulary.with_parts(tokens))[0]
        return [words, self.text_encoder(tokens[:, : vocabulary.MAX_TOKENS]).pooler_output]

    def loss(
        self,
        latents: torch.Tensor,
        tokens: torch.Tensor,
        step: int,
        generator: torch.Generator,
        window: int | None = None,
    ) -> torch.Tensor:
        """Mean squared error of the velocity; of a window of window x window places, if one is given.

        latents: (B, 8, H, W); tokens: (B, T)
        """
        side = latents.shape[-1] // 2
        seen = some_window(side, window or side, generator)
        image = pack(latents)[:, seen]
        noise = torch.randn(image.shape, generator=generator)
        time = draw_times(len(image), HIGH_NOISE_SHARE, generator)
        mixed = torch.lerp(image, noise, time.view(-1, 1, 1))
        # The pipeline pads prompts to 512 tokens unless told otherwise: show more padding now and then than
        # a caption needs, as much as the number of image tokens makes affordable.
        padding = image.shape[1] // 2 if step % 16 == 0 else 0
        # The text encoders have learned before, and stay as they are.
        with torch.no_grad():
            states = self.text_states(F.pad(tokens, (0, padding), value=vocabulary.PAD))
        return F.mse_loss(self.velocity(mixed, time, states, positions(side)[seen]).float(), noise - image)

    def forward(self, image: torch.Tensor, time: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Velocity of a whole picture. image: (B, N, 32); time: (B,), 0 picture, 1 noise; tokens: (B, T)
        -> (B, N, 32)"""
        return self.velocity(image, time, self.text_states(tokens), positions(math.isqrt(image.shape[1])))

    def velocity(
        self, image: torch.Tensor, time: torch.Tensor, states: list[torch.Tensor], places: torch.Tensor
    ) -> torch.Tensor:
        """image: (B, N, 32); time: (B,); states: of a caption, as `text_states` gives them; places: (N, 3)
        -> (B, N, 32)"""
        words, pooled = states
        velocity: torch.Tensor = self.transformer(
            hidden_states=image,
            encoder_hidden_states=words,
            pooled_projections=pooled,
            timestep=time,
            img_ids=places,
            txt_ids=torch.zeros(words.shape[1], 3),
            return_dict=False,
        )[0]
        return velocity

    @torch.no_grad()
    def sample(self, captions: list[str], side: int, steps: int, generator: torch.Generator) -> torch.Tensor:
        """Euler's method from noise. -> latents (B, 8, side, side)"""
        tokens = vocabulary.encode(captions)
        image = torch.randn(len(captions), (side // 2) ** 2, 32, generator=generator)
        times = torch.linspace(1, 0, steps + 1)
        times = SHIFT * times / (1 + (SHIFT - 1) * times)
        for now, following in pairwise(times):
            image = image + (following - now) * self(image, now.expand(len(image)), tokens)
        return unpack(image, side)

    def pipeline(self, vae: AutoencoderKL) -> FluxPipeline:
        """The real pipeline around these modules."""
        return FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
            vae=vae,
            text_encoder=self.text_encoder,
            tokenizer=vocabulary.build(),
            text_encoder_2=self.text_encoder_2,
            tokenizer_2=vocabulary.build_with_parts(),
            transformer=self.transformer,
        )


def draw_times(count: int, share: float, generator: torch.Generator) -> torch.Tensor:
    """Noise levels, logit-normal, but a share of them so high that only the caption says what to draw.

    -> (count,) in (0, 1)
    """
    usual = torch.sigmoid(torch.randn(count, generator=generator) + math.log(SHIFT))
    high = HIGH_NOISE + (1 - HIGH_NOISE) * torch.rand(count, generator=generator)
    return torch.where(torch.rand(count, generator=generator) < share, high, usual)


def some_window(side: int, window: int, generator: torch.Generator) -> torch.Tensor:
    """Which of side x side places lie in a square somewhere among them. -> (window * window,)"""
    row, column = torch.randint(0, side - window + 1, (2, 1), generator=generator)
    inside = torch.arange(window)
    places: torch.Tensor = (row + inside)[:, None] * side + column + inside
    return places.flatten()


def positions(side: int) -> torch.Tensor:
    """Rotary positions of side x side tokens, over the range of the final resolution. -> (side * side, 3)"""
    scale = FINAL_TOKENS_PER_SIDE / side
    place = (torch.arange(side) + 0.5) * scale - 0.5
    rows, columns = torch.meshgrid(place, place, indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).view(-1, 3)


def pack(latents: torch.Tensor) -> torch.Tensor:
    """(B, C, H, W) -> (B, H/2 * W/2, 4 C), in the pipeline's order"""
    return F.pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2).contiguous()


def unpack(image: torch.Tensor, side: int) -> torch.Tensor:
    """(B, N, 4 C) -> (B, C, side, side)"""
    return F.pixel_shuffle(image.transpose(1, 2).reshape(len(image), -1, side // 2, side // 2), 2)
