"""Questions asked of a UNet's blocks while it learns: where they look, and what they know.

What a caption's tokens tell part by part is of no use to a place that does not find the token of its part,
and what it read, it has to unpack from block to block. Learned from the finished picture alone, that takes
very long: a UNet's places know where they lie by the padding of convolutions alone.
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
# What not finding places, and not knowing the picture at each block, weigh in the loss.
PLACES = 0.03
PICTURE = 0.3


class Watch:
    """What one call of a denoiser shows; as a context it stops watching in the end.

    `queries` and `keys` are those of single heads that attend to the caption, places (B, N, HEAD) and tokens
    (B, T, HEAD); `features` are what blocks give out, (B, C, H, W).
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

    def loss(self, latents: torch.Tensor, tellers: slice, readers: nn.ModuleList) -> torch.Tensor:
        """Both questions, weighed: a scalar. latents: (B, 8, H, W)"""
        return PLACES * self.places(tellers) + PICTURE * self.picture(latents, readers)

    def places(self, tellers: slice) -> torch.Tensor:
        """How well the heads find the tokens that tell about their parts, `tellers`: mean cross-entropy, a
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


def part_of(side: int) -> torch.Tensor:
    """Which of the 64 parts each place of a grid lies in. -> (side * side,)

    >>> part_of(16)[:4].tolist()
    [0, 0, 1, 1]
    """
    part = torch.arange(side) * meaning.GRID // side
    return (meaning.GRID * part[:, None] + part).flatten()


def _places(queries: torch.Tensor, keys: torch.Tensor, tellers: slice) -> torch.Tensor:
    """queries: (B, N, C) of a square grid, keys: (B, T, C)"""
    scores = queries @ keys.mT / HEAD**0.5
    token = torch.arange(keys.shape[1])[tellers][part_of(math.isqrt(queries.shape[1]))]
    return F.cross_entropy(scores.flatten(0, 1), token.repeat(len(queries)))
