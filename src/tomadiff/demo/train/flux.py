"""`emoji-flux`: a small Flux transformer with its text encoders, trained by flow matching."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from operator import itemgetter

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.models.embeddings import apply_rotary_emb
from torch import nn

from . import meaning, text, vocabulary
from .stages import HIGH_NOISE_SHARE
from .watch import HEAD, Find, Watch

FINAL_TOKENS_PER_SIDE = 32
# How far noise levels move up: a picture of 256 pixels takes more noise to hide.
SHIFT = 2.0
HIGH_NOISE = 0.75
# Of the query that finds places: how much of each wave, from the fastest (of 6 tokens' length) on, along rows
# and columns, and how much does not turn.
PART_WAVES, LINE_WAVES = (0.15, 0.4, 0.3, 0.15), (0.4, 0.3, 0.25, 0.05)
STILL = 0.2
# What the heads of the first block find. A part is 4 x 4 tokens; rows and columns tell where in it a token
# lies.
FINDERS: tuple[Find, ...] = ("part", "part", "row", "column")


def watched(transformer: FluxTransformer2DModel, side: int) -> Watch:
    """Watch where the first block's finders look in one call of the transformer, and what all blocks make of
    the image tokens, side x side."""
    seen = Watch(FINDERS)
    rotation = transformer.pos_embed(positions(side))

    def grid(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The image tokens, scaled as the last layer scales them: they grow from block to block."""
        image: torch.Tensor = F.layer_norm(output[1], output[1].shape[-1:])
        return image.view(len(image), side, side, -1).permute(0, 3, 1, 2)

    def turned(head: int, queries: torch.Tensor) -> torch.Tensor:
        one: torch.Tensor = apply_rotary_emb(queries[:, :, head : head + 1], rotation, sequence_dim=1)
        return one.squeeze(2)

    attention = transformer.transformer_blocks[0].attn
    for head in range(min(len(FINDERS), attention.heads)):
        # The caption's tokens are all at the place (0, 0, 0): nothing turns their keys.
        seen.record(attention.norm_added_k, seen.keys, itemgetter((..., head, slice(None))))
        seen.record(attention.norm_q, seen.queries, partial(turned, head))
    for block in (*transformer.transformer_blocks, *transformer.single_transformer_blocks):
        seen.record(block, seen.features, grid)
    return seen


class FluxModel(nn.Module):
    """Everything of the pipeline that is trained."""

    # T5 knows no places, only distances: a token of its own for each part stands before the caption.
    tellers = slice(0, vocabulary.PARTS)

    def __init__(
        self, heads: int = 4, dual_blocks: int = 2, single_blocks: int = 5, text_layers: int = 2
    ) -> None:
        super().__init__()
        width = heads * 64
        self.transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=32,
            num_layers=dual_blocks,
            num_single_layers=single_blocks,
            attention_head_dim=64,
            num_attention_heads=heads,
            joint_attention_dim=width,
            pooled_projection_dim=text.CLIP_WIDTH,
            guidance_embeds=False,
            axes_dims_rope=(16, 24, 24),
        )
        self.text_encoder = text.clip(text_layers)
        self.text_encoder_2 = text.t5(width, 2 * text_layers)
        # From the image tokens of a block to the latents without noise; for training only.
        self.readers = nn.ModuleList(nn.Conv2d(width, 32, 1) for _ in range(dual_blocks + single_blocks))

    def text_states(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """What the transformer gets of a caption. tokens: (B, T) -> (B, T, C), (B, C)"""
        words = self.text_encoder_2(vocabulary.with_parts(tokens))[0]
        return [words, self.text_encoder(tokens[:, : vocabulary.MAX_TOKENS]).pooler_output]

    def loss(
        self, latents: torch.Tensor, tokens: torch.Tensor, step: int, generator: torch.Generator
    ) -> torch.Tensor:
        """Mean squared error of the velocity, and what is asked of the blocks.

        latents: (B, 8, H, W); tokens: (B, T)
        """
        image = pack(latents)
        noise = torch.randn(image.shape, generator=generator)
        time = draw_times(len(image), HIGH_NOISE_SHARE["emoji-flux"][latents.shape[-1]], generator)
        mixed = torch.lerp(image, noise, time.view(-1, 1, 1))
        # The pipeline pads prompts to 512 tokens unless told otherwise: show more padding now and then than
        # a caption needs, as much as the number of image tokens makes affordable.
        padding = image.shape[1] // 2 if step % 16 == 0 else 0
        with watched(self.transformer, latents.shape[-1] // 2) as seen:
            predicted = self(mixed, time, F.pad(tokens, (0, padding), value=vocabulary.PAD))
        error = F.mse_loss(predicted, noise - image)
        return error + seen.loss(latents, self.tellers, self.readers)

    def forward(self, image: torch.Tensor, time: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Velocity of a whole picture. image: (B, N, 32); time: (B,), 0 picture, 1 noise; tokens: (B, T)
        -> (B, N, 32)"""
        # The text encoders have learned before, and stay as they are.
        with torch.no_grad():
            states = self.text_states(tokens)
        return self.velocity(image, time, states, positions(math.isqrt(image.shape[1])))

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
            tokenizer_2=vocabulary.build(parts=True),
            transformer=self.transformer,
        )


@torch.no_grad()
def point_to_places(model: FluxModel, tokens: torch.Tensor) -> None:
    """Set the heads of the first block to read, at each place, the token that tells about its part, and those
    that stand for its row and its column.

    Queries are alike for all image tokens, so that only the rotation by their places tells them apart; the
    key of a part's token is turned as the middle of the part would be, or the row or column it stands for;
    all other keys point away. Of rows and columns the values tell which, and nothing else. Which
    weights make such keys and values of a caption's tokens: least squares over these captions. Learned by
    descent it takes very long, because queries and keys have a fixed length. tokens: (B, T)
    """
    attention = model.transformer.transformer_blocks[0].attn
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(
        len(tokens), meaning.GRID**2, model.transformer.config.in_channels, generator=generator
    )
    given: list[torch.Tensor] = []
    handle = attention.add_k_proj.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    model(image, torch.rand(len(tokens), generator=generator), tokens)
    handle.remove()
    states = F.pad(given[0], (0, 1), value=1.0).flatten(0, 1).double()

    def fit(layer: nn.Linear, rows: slice, wanted: torch.Tensor) -> None:
        """wanted: (T, HEAD)"""
        found = torch.linalg.lstsq(states, wanted.repeat(len(tokens), 1).double()).solution.float()
        layer.weight[rows], layer.bias[rows] = found[:-1].T, found[-1]

    for head, find in zip(range(attention.heads), FINDERS, strict=False):
        rows = slice(head * HEAD, (head + 1) * HEAD)
        query, turned, away = _compass(model.transformer, find)
        keys = away.repeat(tokens.shape[1], 1)
        keys[model.tellers] = turned
        fit(attention.add_k_proj, rows, keys)
        attention.to_k.weight[rows], attention.to_k.bias[rows] = 0, away
        attention.to_q.weight[rows], attention.to_q.bias[rows] = 0, query
        if find != "part":
            values = torch.zeros(tokens.shape[1], HEAD)
            values[model.tellers] = meaning.places().repeat(1, HEAD // (2 * meaning.GRID))
            fit(attention.add_v_proj, rows, values)


def _compass(
    transformer: FluxTransformer2DModel, find: Find
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A query that shows by its rotation where it is: slow and fast waves along the axes that matter, and a
    part that never turns, to know keys that point away by. All as long as normalised ones.

    -> the query (HEAD,), as it is turned at the places of the 64 tokens (64, HEAD), a key that points away
    (HEAD,)
    """
    embed = transformer.pos_embed
    still, *moving = embed.axes_dim
    waves, axes = (
        (PART_WAVES, (0.5, 0.5)) if find == "part" else (LINE_WAVES, (find == "row", find == "column"))
    )
    turning = []
    for size, share in zip(moving, axes, strict=True):
        axis = torch.zeros(size)
        axis[0 : 2 * len(waves) : 2] = ((1 - STILL) * share * torch.tensor(waves)).sqrt()
        turning.append(axis)
    query = math.sqrt(HEAD) * torch.cat([torch.full((still,), (STILL / still) ** 0.5), *turning])
    count = meaning.GRID**2
    line = torch.arange(count)[:, None] / (count / FINAL_TOKENS_PER_SIDE) * torch.tensor([0, 1, 1])
    rotation = embed(positions(meaning.GRID) if find == "part" else line)
    turned = apply_rotary_emb(query.expand(1, count, 1, -1), rotation, sequence_dim=1)[0, :, 0]
    away = F.pad(torch.full((still,), -math.sqrt(HEAD / still)), (0, HEAD - still))
    return query, turned, away


def draw_times(count: int, share: float, generator: torch.Generator) -> torch.Tensor:
    """Noise levels, logit-normal, but a share of them so high that only the caption says what to draw.

    -> (count,) in (0, 1)
    """
    usual = torch.sigmoid(torch.randn(count, generator=generator) + math.log(SHIFT))
    high = HIGH_NOISE + (1 - HIGH_NOISE) * torch.rand(count, generator=generator)
    return torch.where(torch.rand(count, generator=generator) < share, high, usual)


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
