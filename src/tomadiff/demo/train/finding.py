"""Tell the places of the UNet where they lie, and let them find what a caption tells about them.

A caption's tokens tell about parts of the picture, and a UNet's places know where they lie by the padding of
its convolutions alone. Learned by descent, to find one's part takes longer than all the rest; it can be
solved for instead:

- Coordinates. At the lowest level, of 4 x 4 places, the padding around a constant makes an exact ramp; on the
  way up the convolution behind each upsampling makes, from neighbours, which of two columns and rows a place
  lies in. They have channels of their own, which all other layers on the way up hand on.
- Queries and keys of cross-attention that compare the place's part with the token's.
- Values: what the part looks like, by least squares.

What belongs to a place among those of its part is left to learn, and to the convolutions: transformer blocks,
where tokens may merge, do not know which of two a place is.
"""

from __future__ import annotations

from itertools import product

import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn

from . import meaning
from .latents import Pool
from .meaning import Details, least_squares
from .xl import XLModel

HEAD = 64
# Where coordinates lie among the channels of the way up, each with its negative behind it, so that norms see
# no mean, and those along rows two further: which part a place lies in, from -1.75 to 1.75; a constant; and
# which of two it is at the levels of 16 and of 32 places. At that of 64 it stands where the part was.
PART, ONE, HALF_16, HALF_32, HALF_64 = 0, 4, 8, 12, 0
COORDINATES, HALVES = slice(0, 16), slice(HALF_64, HALF_64 + 4)
# Of these, what transformer blocks know.
KNOWN, UNKNOWN = slice(0, 6), slice(6, 16)
# Hidden channels that make the ramp: as many as a group of their norm.
RAMP = slice(0, 4)
# Parts lie this far apart.
APART = 0.5
# How sharply places look for their part; how far away tokens are that are of none, and how much it matters
# that they are just as far.
SHARP, AWAY, ASIDE = 36.0, -4.0, 0.02
# How strong the constant is inside blocks, whose norms it keeps steady.
STEADY = 4.0


@torch.no_grad()
def tell_parts(model: XLModel, pool: Pool, shown: Details) -> None:
    """Set what the way up begins with."""
    latents, tokens = pool.draw(200, torch.Generator().manual_seed(0), empty=0.0)
    states = model.text_states(tokens)[0]
    look = (meaning.parts(latents) - shown.mean) @ shown.basis
    lowest, *middle, highest = model.unet.up_blocks
    for block in (lowest, *middle):
        for resnet in block.resnets:
            _hand_on(resnet, COORDINATES)
    _ramp(lowest.resnets[0])
    _upsample(model.unet.up_blocks)
    for block in middle:
        for transformer in block.attentions:
            _find(transformer, states, look, model.tellers)
    _hand_on(highest.resnets[0], HALVES)


def hold_coordinates(model: XLModel) -> None:
    """From now on what makes and reads coordinates stays as it is: it has nothing to learn."""
    lowest, *middle, highest = model.unet.up_blocks
    held: list[tuple[nn.Module, slice]] = []
    for block in (lowest, *middle):
        for resnet in block.resnets:
            held += [(resnet.conv_shortcut, COORDINATES), (resnet.conv2, COORDINATES)]
        held.append((block.upsamplers[0].conv, COORDINATES))
    first = lowest.resnets[0]
    held += [(first.norm1, slice(-1, None))]
    held += [(layer, RAMP) for layer in (first.conv1, first.time_emb_proj, first.norm2)]
    held += [(layer, HALVES) for layer in (highest.resnets[0].conv_shortcut, highest.resnets[0].conv2)]
    for transformer in (transformer for block in middle for transformer in block.attentions):
        held += [(layer, COORDINATES) for layer in (transformer.norm, transformer.proj_out)]
        held.append((transformer.proj_in, KNOWN))
        unseen = torch.ones_like(transformer.proj_in.weight)
        unseen[:, UNKNOWN] = 0
        transformer.proj_in.weight.register_hook(unseen.mul)
        for block in transformer.transformer_blocks:
            held += [(layer, KNOWN) for layer in (block.norm2, *_writers(block))]
            held += [(layer, slice(None)) for layer in (block.attn2.to_q, block.attn2.to_k)]
    for layer, channels in held:
        for parameter in layer.parameters():
            moves = torch.ones(len(parameter), *(1,) * (parameter.ndim - 1))
            moves[channels] = 0
            parameter.register_hook(moves.mul)


def _writers(block: BasicTransformerBlock) -> list[nn.Linear]:
    """What writes into the stream inside a block."""
    return [block.attn1.to_out[0], block.attn2.to_out[0], block.ff.net[2]]


def _hand_on(resnet: ResnetBlock2D, channels: slice) -> None:
    """Let these channels through as they are."""
    shortcut = resnet.conv_shortcut
    for layer in (shortcut, resnet.conv2):
        nn.init.zeros_(layer.weight[channels])
        nn.init.zeros_(layer.bias[channels])
    for channel in range(channels.start, channels.stop):
        shortcut.weight[channel, channel] = 1.0


def _along(weight: torch.Tensor, axis: int) -> torch.Tensor:
    """The part of a convolution's weights, (O, I, 3, 3), that looks along rows or columns. -> (O, I, 3)"""
    return weight[:, :, 1] if axis == 0 else weight[..., 1]


def _both(weight: torch.Tensor, channel: int, kernel: torch.Tensor) -> None:
    """Set what makes a coordinate, and its negative, along columns and along rows.

    kernel: of the column (I, 3)
    """
    for axis in range(2):
        turned = kernel.clone()
        for first in (PART, HALF_16, HALF_32):
            turned[first : first + 4] = kernel[first : first + 4].roll(2 * axis, 0)
        for sign in (1, -1):
            row = channel + 2 * axis + (sign < 0)
            weight[row] = 0
            _along(weight, axis)[row] = sign * turned


def _ramp(resnet: ResnetBlock2D) -> None:
    """Make coordinates of 4 x 4 places out of the padding around a constant."""
    # A constant: what the norm makes of one of the channels on the way.
    nn.init.zeros_(resnet.norm1.weight[-1:])
    resnet.norm1.bias[-1] = 1.2785  # silu of it is 1
    # -1 at the one edge, 1 at the other and 0 between them; the norm makes sqrt(2) of it. And its negative.
    for part in (resnet.conv1, resnet.time_emb_proj):
        nn.init.zeros_(part.weight[RAMP])
        nn.init.zeros_(part.bias[RAMP])
    edge = torch.tensor([1.0, 0.0, -1.0])
    for axis, (sign, back) in product(range(2), ((1, 0), (-1, 1))):
        _along(resnet.conv1.weight, axis)[2 * axis + back, -1] = sign * edge
    # From that -1.5, -0.5, 0.5, 1.5; what is left of a pair behind silu is x - (-x).
    ramp = APART * torch.tensor([1.0, 3.0, 1.0]) / 2**0.5
    nn.init.zeros_(resnet.conv_shortcut.weight[COORDINATES])
    for axis, (sign, back) in product(range(2), ((1, 0), (-1, 1))):
        row = _along(resnet.conv2.weight, axis)[PART + 2 * axis + back]
        row[2 * axis], row[2 * axis + 1] = sign * ramp, -sign * ramp
    resnet.conv2.bias[ONE], resnet.conv2.bias[ONE + 1] = 1.0, -1.0


def _upsample(blocks: nn.ModuleList) -> None:
    """Hand coordinates on to the next level, and make those it needs besides."""
    same, finer = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.25, 0.5, 0.25])
    # The coordinate of a place along a column is the sum of these; the outermost place's; how far they lie
    # apart.
    column, edge, apart = {PART: 1.0}, 3 * APART, 2 * APART
    for block, made in zip(blocks, (PART, HALF_16, HALF_32, HALF_64), strict=False):
        convolution = block.get_submodule("upsamplers.0.conv")
        assert isinstance(convolution, nn.Conv2d)
        assert convolution.bias is not None
        weight, bias = convolution.weight, convolution.bias
        here, there = (torch.zeros(weight.shape[1], 3) for _ in range(2))
        for channel, share in column.items():
            here[channel], there[channel] = share * same, share * finer
        # Nothing lies behind the edge, and the constant tells where that is.
        there[ONE] = (edge + apart) / 4 * torch.tensor([1.0, 0.0, -1.0])
        nn.init.zeros_(weight[COORDINATES])
        nn.init.zeros_(bias[COORDINATES])
        for channel in range(COORDINATES.stop):
            weight[channel, channel, 1, 1] = 1.0
        if block is blocks[0]:
            _both(weight, made, there)
        else:
            _both(weight, made, (there - here) * 4 / apart)
            column[made] = apart / 4
        edge, apart = edge + apart / 4, apart / 2


def _find(transformer: Transformer2DModel, states: torch.Tensor, look: torch.Tensor, tellers: slice) -> None:
    """Let all heads find the token of a place's part, and take from it what the part looks like.

    states: of captions (B, T, C); look: components of their parts (B, 64, D)
    """
    _keep(transformer.proj_out, COORDINATES)
    _keep(transformer.proj_in, KNOWN)
    nn.init.zeros_(transformer.proj_in.weight[:, UNKNOWN])
    transformer.proj_in.weight[KNOWN, KNOWN] = torch.tensor([1.0] * ONE + [STEADY] * 2).diag()
    # Of the squared distance between places, what depends on the token.
    keys = torch.zeros(states.shape[1], HEAD)
    keys[:, 2] = AWAY
    keys[tellers, :3] = meaning.where() * torch.tensor([1.0, 1.0, -1.0])
    weight = torch.full((states.shape[1], 1), ASIDE)
    weight[tellers] = 1.0
    queries = torch.zeros(HEAD, transformer.proj_in.out_features)
    for index, (channel, strength) in enumerate([(PART, 1.0), (PART + 2, 1.0), (ONE, STEADY)]):
        queries[index, channel], queries[index, channel + 1] = 0.5 / strength, -0.5 / strength
    for block in transformer.transformer_blocks:
        for layer in _writers(block):
            _keep(layer, KNOWN)
        attention = block.attn2
        for head in range(attention.heads):
            rows = slice(head * HEAD, (head + 1) * HEAD)
            attention.to_q.weight[rows] = SHARP * queries
            wanted = (SHARP * keys).expand(len(states), -1, -1)
            least_squares(attention.to_k, rows, weight * states, weight * wanted, ridge=1e-8)
            least_squares(attention.to_v, rows, states[:, tellers], look[..., rows], ridge=1e-6)
        into = attention.to_out[0]
        nn.init.zeros_(into.weight)
        free = slice(KNOWN.stop, into.out_features)
        into.weight[free, : free.stop - free.start] = torch.eye(free.stop - free.start)


def _keep(layer: nn.Linear, channels: slice) -> None:
    """Write nothing into these channels."""
    nn.init.zeros_(layer.weight[channels])
    nn.init.zeros_(layer.bias[channels])
