"""Set the first block of the Flux transformer to unpack what a caption's tokens tell.

A token tells about a part of 4 x 4 places, and each place has to find that token and to take something else
from it. Learned by descent this takes longer than all the rest; most of it can be solved for instead:

- Heads that find the token of a place: queries are alike for all places, so that only the rotation by their
  position tells them apart; keys are turned as the middle of the part is, or the row or column a token stands
  for. Least squares, then a few seconds of descent on how often they are right.
- Values that tell the components of the part, and where in its part a place lies: least squares.
- A feed-forward with 64 hidden units for each of the 16 places of a part, open for that place only, that hand
  on a component each; and behind them the latents: least squares.

The other blocks begin nearly shut, and the last layer with the velocity that this guess implies.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from diffusers.models.embeddings import apply_rotary_emb
from torch import nn

from . import meaning, vocabulary
from .flux import FINAL_TOKENS_PER_SIDE, FluxModel, draw_times, pack, positions
from .latents import Pool
from .loop import ramp, take_step
from .meaning import Details, least_squares, part_of

HEAD = 64
# What the heads of the first block find. A part is 4 x 4 tokens; rows and columns tell where in it a token
# lies.
Find = Literal["part", "row", "column"]
FINDERS: tuple[Find, ...] = ("part", "part", "row", "column")
IN_PART = 4
# Of the query that finds places: how much of each wave, from the fastest (of 6 tokens' length) on, along rows
# and columns, and how much does not turn.
PART_WAVES, LINE_WAVES = (0.15, 0.4, 0.3, 0.15), (0.4, 0.3, 0.25, 0.05)
STILL = 0.2
# Length of the finders' normalised queries and keys, so that a place at the edge of a part finds it as well.
SHARP = 2.5
# Where in the residual stream what lies: components of the part (most, and some more), row and column (four
# numbers for the place in the part, eight for the part), the noisy latents, the guess, and a constant that
# keeps the norm steady.
LOOK, MORE, ROW, COLUMN = slice(0, 64), slice(64, 96), slice(128, 140), slice(140, 152)
NOISY, GUESS, CONSTANT = slice(160, 192), slice(192, 224), 255
LINE_STRENGTH, CONSTANT_STRENGTH = 3.0, 8.0
# How far hidden units of other places are pushed down, and how far open the other blocks begin.
OPEN, AJAR = 14.0, 0.1
POINTING_STEPS, TUNING_STEPS = 250, 110


@torch.no_grad()
def unpack_parts(model: FluxModel, pool: Pool, shown: Details, tuning_steps: int = TUNING_STEPS) -> float:
    """Set all weights of the transformer but those of its time embedding and inside its other blocks; those
    that find places stay as they are from then on. Returns the mean squared error of the guess."""
    generator = torch.Generator().manual_seed(0)
    transformer = model.transformer
    _begin(transformer)
    latents, tokens = pool.draw(200, generator, empty=0.0)
    words = transformer.context_embedder(model.text_states(tokens)[0])
    states = F.layer_norm(words, words.shape[-1:])
    _point(transformer, states, generator)
    _read(transformer, states, (meaning.parts(latents) - shown.mean) @ shown.basis)
    _select(model, pool, generator)
    error = _tune(model, pool, tuning_steps, generator)
    inputs, _, velocity, _ = _collect(model, transformer.proj_out, pool, 256, 0.85, generator)
    least_squares(transformer.proj_out, slice(None), inputs, velocity)
    return error


def finders(transformer: FluxTransformer2DModel) -> list[nn.Module]:
    """What finds places, and has nothing to learn any more."""
    attention = transformer.transformer_blocks[0].attn
    queries_and_keys = [attention.to_q, attention.to_k, attention.add_k_proj]
    norms = [attention.norm_q, attention.norm_k, attention.norm_added_k]
    return [*queries_and_keys, *norms, transformer.context_embedder]


def _begin(transformer: FluxTransformer2DModel) -> None:
    """The first block open, the others ajar, and nothing else in the way."""
    width = transformer.inner_dim
    first = transformer.transformer_blocks[0]
    for block in (*transformer.transformer_blocks, *transformer.single_transformer_blocks):
        dual = block in transformer.transformer_blocks
        for norm in (block.norm1, block.norm1_context) if dual else (block.norm,):
            # Shift, scale, gate, and in dual-stream blocks the same again for the feed-forward.
            gates = norm.linear.bias.view(-1, 3, width)[:, 2]
            nn.init.zeros_(norm.linear.weight)
            nn.init.zeros_(norm.linear.bias)
            gates.fill_(AJAR if block is not first else float(norm is first.norm1))
    for layer in (transformer.norm_out.linear, transformer.x_embedder, first.attn.to_out[0]):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    transformer.x_embedder.weight[NOISY] = torch.eye(32)
    transformer.x_embedder.bias[CONSTANT] = CONSTANT_STRENGTH
    out = first.attn.to_out[0].weight
    for head, (rows, strength) in enumerate(
        [(LOOK, 1), (MORE, 1), (ROW, LINE_STRENGTH), (COLUMN, LINE_STRENGTH)]
    ):
        count = rows.stop - rows.start
        out[rows, head * HEAD : head * HEAD + count] = strength * torch.eye(count)
    for part in finders(transformer):
        part.requires_grad_(False)
    for norm in (first.attn.norm_q, first.attn.norm_k, first.attn.norm_added_k):
        norm.weight.fill_(SHARP)


def _point(transformer: FluxTransformer2DModel, states: torch.Tensor, generator: torch.Generator) -> None:
    """Set queries and keys to find places. states: of captions, in front of the keys (B, T, C)"""
    attention = transformer.transformer_blocks[0].attn
    for head, find in enumerate(FINDERS):
        rows = slice(head * HEAD, (head + 1) * HEAD)
        query, turned, away = _bearings(transformer, find)
        keys = away.repeat(states.shape[1], 1)
        keys[FluxModel.tellers] = turned
        least_squares(attention.add_k_proj, rows, states, keys.expand(len(states), -1, -1))
        attention.to_k.weight[rows], attention.to_k.bias[rows] = 0, away
        attention.to_q.weight[rows], attention.to_q.bias[rows] = 0, query
    rotation = transformer.pos_embed(positions(FINAL_TOKENS_PER_SIDE))
    wanted = torch.stack([token_at(find) for find in FINDERS])
    learning = [*attention.add_k_proj.parameters(), attention.to_q.bias]
    stepper = torch.optim.Adam([value.requires_grad_(True) for value in learning])
    for step in range(POINTING_STEPS):
        some = states[torch.randint(0, len(states), (8,), generator=generator)]
        places = torch.randperm(FINAL_TOKENS_PER_SIDE**2, generator=generator)[:256]
        with torch.enable_grad():
            query = attention.norm_q(attention.to_q.bias.view(1, 1, -1, HEAD)).expand(1, len(places), -1, -1)
            there = [table[places] for table in rotation]
            queries = apply_rotary_emb(query, there, sequence_dim=1)[0]
            keys = attention.norm_added_k(attention.add_k_proj(some).unflatten(-1, (-1, HEAD)))
            scores = torch.einsum("nhc,bthc->bhnt", queries, keys) / HEAD**0.5
            token = wanted[:, places].expand(len(some), -1, -1)
            torch.autograd.backward(F.cross_entropy(scores.flatten(0, 2), token.flatten()))
        stepper.param_groups[0]["lr"] = 2e-3 * (1 - step / POINTING_STEPS)
        stepper.step()
        stepper.zero_grad()
    for value in learning:
        value.requires_grad_(False)


def token_at(find: Find) -> torch.Tensor:
    """Which of the 64 tokens each place should find: that of its part, or the one that stands for its row or
    its column. They stand for 64 of them, two for each, so that eight in a row, of one part, also tell where
    in the part a place lies. -> (1024,)
    """
    side = FINAL_TOKENS_PER_SIDE
    line = torch.arange(side) * 2
    if find == "part":
        return part_of(side)
    return line.repeat_interleave(side) if find == "row" else line.repeat(side)


def _bearings(
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


def _read(transformer: FluxTransformer2DModel, states: torch.Tensor, components: torch.Tensor) -> None:
    """Set the values: what the part looks like, and for rows and columns which. components: (B, 64, D)"""
    token = torch.arange(vocabulary.PARTS)
    # Tokens stand for 64 rows, two for each row of places: one on it, one between it and the next.
    on, between = (F.one_hot(row // 2 % IN_PART, IN_PART).float() for row in (token, token + 1))
    line = torch.cat([(on + between) / 2, F.one_hot(token // meaning.GRID, meaning.GRID)], dim=1)
    told = [components[..., LOOK], components[..., MORE], *2 * [line.expand(len(states), -1, -1)]]
    for head, values in enumerate(told):
        after = states.shape[1] - vocabulary.PARTS
        wide = F.pad(values, (0, HEAD - values.shape[-1], 0, after))
        rows = slice(head * HEAD, (head + 1) * HEAD)
        least_squares(transformer.transformer_blocks[0].attn.add_v_proj, rows, states, wide)


def _select(model: FluxModel, pool: Pool, generator: torch.Generator) -> None:
    """Set the feed-forward: from the components of a part to the latents of a place in it."""
    into, _, back = (feed := model.transformer.transformer_blocks[0].ff).net
    inputs, latents, _, places = _collect(model, feed, pool, 640, 0.3, generator)
    row, column = (nn.Linear(inputs.shape[-1], IN_PART) for _ in range(2))
    side = FINAL_TOKENS_PER_SIDE
    for layer, line in ((row, places // side), (column, places % side)):
        least_squares(layer, slice(None), inputs, F.one_hot(line % IN_PART, IN_PART).float())
    look = inputs[:, LOOK]
    components = torch.zeros(look.shape[1], inputs.shape[1])
    components[:, LOOK] = torch.diag(1 / look.std(0))
    opening = OPEN * (row.weight[:, None, None] + column.weight[None, :, None])
    into.proj.weight.copy_((opening + components).flatten(0, 2))
    opening = OPEN * (row.bias[:, None, None] + column.bias[None, :, None] - 1.5)
    into.proj.bias.copy_((opening - look.mean(0) / look.std(0)).flatten())
    nn.init.zeros_(back.weight)
    nn.init.zeros_(back.bias)
    least_squares(back, GUESS, into(inputs), latents, ridge=1e-4)


def _collect(
    model: FluxModel, layer: nn.Module, pool: Pool, count: int, lowest: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a layer gets at some places of pictures under noise of at least `lowest`.

    -> inputs (N, C), latents without noise (N, 32), velocities (N, 32), places (N,)
    """
    given: list[torch.Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, args: given.append(args[0].flatten(0, 1)))
    others = []
    for _ in range(count // 32):
        latents, tokens = pool.draw(32, generator, empty=0.0)
        places = torch.randperm(latents[0, 0].numel() // 4, generator=generator)[:128]
        image = pack(latents)[:, places]
        noise = torch.randn(image.shape, generator=generator)
        time = lowest + (1 - lowest) * torch.rand(len(image), generator=generator)
        mixed = torch.lerp(image, noise, time.view(-1, 1, 1))
        model.velocity(mixed, time, model.text_states(tokens), positions(latents.shape[-1] // 2)[places])
        others.append((image.flatten(0, 1), (noise - image).flatten(0, 1), places.repeat(len(image))))
    handle.remove()
    image, velocity, place = (torch.cat(parts) for parts in zip(*others, strict=True))
    return torch.cat(given), image, velocity, place


def _tune(model: FluxModel, pool: Pool, steps: int, generator: torch.Generator) -> float:
    """Let the first block learn alone what least squares left over; returns the last error of its guess."""
    transformer = model.transformer
    first = transformer.transformer_blocks[0]
    given: list[torch.Tensor] = []
    handle = first.register_forward_hook(lambda *call: given.append(call[-1][1]))
    whole = transformer.transformer_blocks, transformer.single_transformer_blocks
    transformer.transformer_blocks, transformer.single_transformer_blocks = (
        nn.ModuleList([first]),
        nn.ModuleList(),
    )
    group = {"params": [value for value in first.parameters() if value.requires_grad], "scale": 1.0}
    steppers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([group], lr=0.0, betas=(0.9, 0.99), weight_decay=0.0)
    ]
    error = torch.zeros(())
    try:
        for step in range(steps):
            latents, tokens = pool.draw(32, generator, empty=0.0)
            places = torch.randperm(latents[0, 0].numel() // 4, generator=generator)[:160]
            image, time = pack(latents)[:, places], draw_times(len(latents), 0.6, generator)
            mixed = torch.lerp(image, torch.randn(image.shape, generator=generator), time.view(-1, 1, 1))
            states = model.text_states(tokens)
            with torch.enable_grad():
                model.velocity(mixed, time, states, positions(latents.shape[-1] // 2)[places])
                error = F.mse_loss(given.pop()[..., GUESS], image)
                torch.autograd.backward(error)
            take_step(steppers, ramp(step, steps, 2e-4, 7e-6, 10))
            if step % 10 == 9:
                print(f"first block: step {step + 1}, error of its guess {error.item():.4f}", flush=True)
    finally:
        handle.remove()
        transformer.transformer_blocks, transformer.single_transformer_blocks = whole
    return error.item()
