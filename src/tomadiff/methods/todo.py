"""ToDo (Token Downsampling): full queries, keys and values from a nearest-neighbour downsampled grid."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from tomadiff.core.regions import Cells, Grid, Layout, Regions
from tomadiff.methods.interface import Method
from tomadiff.methods.tome import check_unmerge

if TYPE_CHECKING:
    from tomadiff.config import MergeConfig


@dataclass(frozen=True, eq=False)
class KeyLayout(Layout):
    """Tokens in row-major order.

    keys: (D,) the tokens that give keys and values; sizes: (D,) how many tokens each stands for
    """

    keys: torch.Tensor
    sizes: torch.Tensor


class ToDoPlan(NamedTuple):
    """sizes and positions: (B, D)"""

    layout: KeyLayout
    sizes: torch.Tensor
    positions: torch.Tensor

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, N, C) -> (B, D, C), the tokens that give keys and values."""
        return x.index_select(1, self.layout.keys)

    def unmerge(self, y: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("ToDo keeps all queries, so there is nothing to unmerge")

    def refresh(self, x: torch.Tensor) -> ToDoPlan:
        return self


class ToDo(Method):
    keys_only = True

    def __init__(self, config: MergeConfig) -> None:
        for ratio in (*config.ratios, *config.overrides.values()):
            factor(ratio)
        if config.modules != ("self",) or config.mode != "each":
            raise ValueError(
                "method 'todo' reduces the keys and values of self-attention and nothing else: use "
                f"modules=('self',) and mode='each'; got modules={config.modules} and mode={config.mode!r}"
            )
        check_unmerge(config)

    def layout(
        self, grids: tuple[Grid, ...], ratio: float, device: torch.device, step: int = 0, variant: str = ""
    ) -> KeyLayout:
        return key_layout(grids, factor(ratio), device)

    @torch.no_grad()
    def plan(self, x: torch.Tensor, layout: Layout) -> ToDoPlan:
        """x: (B, N, C) -> the same plan for every element of the batch, whatever x holds."""
        assert isinstance(layout, KeyLayout)
        batch = x.shape[0]
        sizes = layout.sizes.to(x.dtype).expand(batch, -1)
        return ToDoPlan(layout, sizes, layout.keys.expand(batch, -1))


def factor(ratio: float) -> int:
    """By how much height and width are divided to merge away this share of the keys.

    >>> factor(0.75), factor(0.9375), factor(0)
    (2, 4, 1)
    >>> factor(0.5)
    Traceback (most recent call last):
    ...
    ValueError: method 'todo' keeps one key of 2 x 2 (ratio 0.75), 3 x 3 (0.889), 4 x 4 (0.9375); got 0.5
    """
    side = round(math.sqrt(1 / (1 - ratio)))
    if abs(1 - 1 / side**2 - ratio) > 1e-3:
        raise ValueError(
            f"method 'todo' keeps one key of 2 x 2 (ratio 0.75), 3 x 3 (0.889), 4 x 4 (0.9375); got {ratio}"
        )
    return side


@functools.lru_cache(maxsize=256)
def key_layout(grids: tuple[Grid, ...], side: int, device: torch.device | str = "cpu") -> KeyLayout:
    """The top left token of every side x side cell, those at the edge of a grid included even if they are
    not whole.

    >>> layout = key_layout(((3, 4),), 2)
    >>> layout.keys.tolist(), layout.sizes.tolist()
    ([0, 2, 8, 10], [4.0, 4.0, 2.0, 2.0])
    """
    # Not born inside `torch.inference_mode`, as a layout is kept and may be used for training later.
    with torch.inference_mode(False):
        keys, sizes, offset = [], [], 0
        for height, width in grids:
            index = torch.arange(offset, offset + height * width, device="cpu").view(height, width)
            keys.append(index[::side, ::side].flatten())
            sizes.append(torch.outer(_lengths(height, side), _lengths(width, side)).flatten())
            offset += height * width
        kept, count = torch.cat(keys), torch.cat(sizes)
        groups = (Regions(1, (Cells(1, offset, len(kept)),)),)
        return KeyLayout(grids, groups, None, None, kept.to(device), count.to(device))


def _lengths(length: int, side: int) -> torch.Tensor:
    """(ceil(length / side),) the lengths of the pieces of an axis; the last may be shorter."""
    starts = torch.arange(0, length, side, device="cpu", dtype=torch.float32)
    return (length - starts).clamp_max(side)
