"""The two ends to measure between: `none` merges nothing, `free` at no cost, with garbage for pictures.

`free` keeps the first D tokens and pads with zeros on the way back. No method can be faster at the same
ratio, so the distance to it is what a method's bookkeeping costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tomadiff.core.regions import Cells, Grid, Layout, Regions
from tomadiff.methods.interface import Method
from tomadiff.methods.tome import check_unmerge

if TYPE_CHECKING:
    from tomadiff.config import MergeConfig


class FreePlan(NamedTuple):
    """sizes and positions: (B, D)"""

    layout: Layout
    sizes: torch.Tensor
    positions: torch.Tensor

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, N, C) -> (B, D, C), the first D tokens."""
        return x[:, : self.layout.kept]

    def unmerge(self, y: torch.Tensor) -> torch.Tensor:
        """y: (B, D, C) -> (B, N, C), zeros for all other tokens."""
        return torch.nn.functional.pad(y, (0, 0, 0, self.layout.tokens - self.layout.kept))

    def refresh(self, x: torch.Tensor) -> FreePlan:
        return self


def free_plan(x: torch.Tensor, layout: Layout) -> FreePlan:
    """x: (B, N, C) -> a plan that keeps as many tokens as the layout says."""
    shape = (x.shape[0], layout.kept)
    positions = torch.arange(layout.kept, device=x.device).expand(shape)
    return FreePlan(layout, x.new_ones(shape), positions)


class Free(Method):
    def __init__(self, config: MergeConfig) -> None:
        check_unmerge(config)

    def layout(
        self, grids: tuple[Grid, ...], ratio: float, device: torch.device, step: int = 0, variant: str = ""
    ) -> Layout:
        tokens = sum(height * width for height, width in grids)
        kept = max(1, round((1 - ratio) * tokens))
        return Layout(grids, (Regions(1, (Cells(1, tokens, kept),)),), None, None)

    @torch.no_grad()
    def plan(self, x: torch.Tensor, layout: Layout) -> FreePlan:
        """x: (B, N, C) -> the same plan for every element of the batch, whatever x holds."""
        return free_plan(x, layout)


class NoMerging(Free):
    """Keeps every token. `apply` puts no hook into a model for it."""

    def layout(
        self, grids: tuple[Grid, ...], ratio: float, device: torch.device, step: int = 0, variant: str = ""
    ) -> Layout:
        return super().layout(grids, 0.0, device)
