"""Questions asked of a UNet's blocks while it learns: where they look, and what they know.

What a caption's tokens tell part by part is of no use to a place that does not find the token of its part,
and what it read, it has to unpack from block to block: each place of a block becomes four of the next, which
have to know which of the four they are. Learned from the finished picture alone, that takes very long: a
UNet's places know where they lie by the padding of convolutions alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from . import meaning, vocabulary

HEAD = 64
# What not finding places, not knowing which of four a place is, and not knowing the picture at each block,
# weigh in the loss.
PLACES = 0.3
HALVES = 0.3
PICTURE = 0.5


class Watch:
    """What one call of a denoiser shows; as a context it stops watching in the end.

    `queries` and `keys` are those of attention to the caption, all heads side by side, of places (B, N, C)
    and tokens (B, T, C); `features` are what blocks give out, (B, C, H, W).
    """

    def __init__(self) -> None:
        self.queries: list[torch.Tensor] = []
        self.keys: list[torch.Tensor] = []
        self.features: list[torch.Tensor] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def record(
        self, module: nn.Module, into: list[torch.Tensor], take: Callable[[Any], torch.Tensor]
    ) -> None:
        """Keep `take(output)` at each call of `module`."""
        self._handles.append(module.register_forward_hook(lambda *call: into.append(take(call[-1]))))

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def loss(
        self, latents: torch.Tensor, tellers: slice, pictures: nn.ModuleList, halves: nn.ModuleList
    ) -> torch.Tensor:
        """All questions, weighed: a scalar. latents: (B, 8, H, W); `pictures` and `halves` read features"""
        return (
            PLACES * self.places(tellers)
            + PICTURE * self.picture(latents, pictures)
            + HALVES * self.half(halves)
        )

    def places(self, tellers: slice) -> torch.Tensor:
        """How well all heads find the tokens that tell about their parts, `tellers`: mean cross-entropy, a
        scalar; 4.4 is chance."""
        # A place that is larger than a part has no one part to look for.
        return torch.stack(
            [
                _places(queries, keys, tellers)
                for queries, keys in zip(self.queries, self.keys, strict=True)
                if queries.shape[1] >= vocabulary.PARTS
            ]
        ).mean()

    def picture(self, latents: torch.Tensor, readers: nn.ModuleList) -> torch.Tensor:
        """How well a linear reading of each block tells the latents without noise: mean squared error, a
        scalar. latents: (B, 8, H, W)"""
        return torch.stack(
            [
                F.mse_loss(
                    reader(features),
                    F.pixel_unshuffle(latents, latents.shape[-1] // features.shape[-1]),
                )
                for reader, features in zip(readers, self.features, strict=True)
            ]
        ).mean()

    def half(self, readers: nn.ModuleList) -> torch.Tensor:
        """How well a linear reading of each block tells upper places from lower ones, and left from right, of
        each two: mean squared error, a scalar; 1 is chance."""
        return torch.stack(
            [
                F.mse_loss(read := reader(features), halves_of(features.shape[-1]).expand_as(read))
                for reader, features in zip(readers, self.features, strict=True)
            ]
        ).mean()


def halves_of(side: int) -> torch.Tensor:
    """Whether a place is the upper or the lower, and the left or the right, of two.

    -> (2, side, side), -1 or 1

    >>> halves_of(4)[1, 0].tolist()
    [-1.0, 1.0, -1.0, 1.0]
    """
    half = torch.arange(side) % 2 * 2.0 - 1
    return torch.stack(torch.meshgrid(half, half, indexing="ij"))


def part_of(side: int) -> torch.Tensor:
    """Which of the 64 parts each place of a grid lies in. -> (side * side,)

    >>> part_of(16)[:4].tolist()
    [0, 0, 1, 1]
    """
    part = torch.arange(side) * meaning.GRID // side
    return (meaning.GRID * part[:, None] + part).flatten()


def _places(queries: torch.Tensor, keys: torch.Tensor, tellers: slice) -> torch.Tensor:
    """queries: (B, N, C) of a square grid, keys: (B, T, C)"""
    places, tokens = (side.unflatten(-1, (-1, HEAD)).transpose(1, 2) for side in (queries, keys))
    scores = places @ tokens.mT / HEAD**0.5
    token = torch.arange(keys.shape[1])[tellers][part_of(math.isqrt(queries.shape[1]))]
    return F.cross_entropy(scores.flatten(0, 2), token.repeat(scores.shape[0] * scores.shape[1]))
