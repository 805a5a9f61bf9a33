"""Questions asked of a denoiser's blocks while it learns: where they look, and what they know.

What a caption's tokens tell part by part is of no use to a place that does not find the token of its part,
and what it read, it has to unpack from block to block. Learned from the finished picture alone, that takes
very long: a UNet's places know where they lie by the padding of convolutions alone, Flux's by the rotation
of queries and keys alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import repeat
from types import TracebackType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from . import meaning, vocabulary

HEAD = 64
# What not finding places, and not knowing the picture at each block, weigh in the loss.
PLACES = 0.03
PICTURE = 0.3
# Which of the 64 tokens that tell a picture's parts a head looks for.
Find = Literal["part", "row", "column"]


class Watch:
    """What one call of a denoiser shows; as a context it stops watching in the end.

    `queries` and `keys` are those of single heads that attend to the caption, places (B, N, HEAD) and tokens
    (B, T, HEAD); `features` are what blocks give out, (B, C, H, W). `finds`: what each of the heads looks
    for, in the order they are recorded; by default all look for the part they lie in.
    """

    def __init__(self, finds: Iterable[Find] = repeat("part")) -> None:
        self.finds = finds
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
        """How well the heads find the tokens that tell about their places, `tellers`: mean cross-entropy, a
        scalar; 4.4 is chance."""
        # A place that is larger than a part has no one part to look for.
        return torch.stack(
            [
                _places(queries, keys, tellers, find)
                for queries, keys, find in zip(self.queries, self.keys, self.finds, strict=False)
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


def wanted(find: Find, side: int) -> torch.Tensor:
    """Which of the 64 tokens each place of a grid should find. -> (side * side,)

    The part it lies in; or the one that stands for its row, or its column: they stand for 64 of them, so that
    eight in a row, of one part, also tell where in the part a place lies.

    >>> wanted("part", 16)[:4].tolist(), wanted("column", 16)[:4].tolist()
    ([0, 0, 1, 1], [1, 5, 9, 13])
    """
    place = torch.arange(side)
    fine = (2 * place + 1) * vocabulary.PARTS // (2 * side) - 1
    if find == "part":
        part = place * meaning.GRID // side
        return (meaning.GRID * part[:, None] + part).flatten()
    return fine.repeat_interleave(side) if find == "row" else fine.repeat(side)


def _places(queries: torch.Tensor, keys: torch.Tensor, tellers: slice, find: Find) -> torch.Tensor:
    """queries: (B, N, C) of a square grid, keys: (B, T, C)"""
    scores = queries @ keys.mT / HEAD**0.5
    token = torch.arange(keys.shape[1])[tellers][wanted(find, math.isqrt(queries.shape[1]))]
    return F.cross_entropy(scores.flatten(0, 1), token.repeat(len(queries)))
