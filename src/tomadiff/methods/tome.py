"""ToMe for Stable Diffusion: one destination per 2 x 2 cell, bipartite soft matching, copies back."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from tomadiff.core.matching import match, mean_by_rows, rows_of, take_rows
from tomadiff.core.regions import Cells, Grid, Layout, Regions
from tomadiff.methods.interface import Method

if TYPE_CHECKING:
    from tomadiff.config import MergeConfig

CELL = 2
MAX_RATIO = 1 - 1 / CELL**2


@dataclass(frozen=True, eq=False)
class CellLayout(Layout):
    """Tokens in row-major order, matched over the whole picture.

    destinations: (M,) one token of each cell; sources: (N - M,) all others
    """

    destinations: torch.Tensor
    sources: torch.Tensor
    variant: str


class ToMePlan(NamedTuple):
    """Which token is part of which merged token.

    rows: (B * N,) where each token's merged token is among those of all elements
    sizes: (B, D) in the dtype of the hidden states; positions: (B, D)
    """

    method: ToMe
    layout: CellLayout
    rows: torch.Tensor
    sizes: torch.Tensor
    positions: torch.Tensor

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, N, C) -> (B, D, C), the mean of each cluster."""
        return mean_by_rows(x, self.rows, self.sizes)

    def unmerge(self, y: torch.Tensor) -> torch.Tensor:
        """y: (B, D, C) -> (B, N, C), every token a copy of its cluster."""
        return take_rows(y, self.rows)

    def refresh(self, x: torch.Tensor) -> ToMePlan:
        return self.method.plan(x, self.layout)


class ToMe(Method):
    def __init__(self, config: MergeConfig) -> None:
        for ratio in (*config.ratios, *config.overrides.values()):
            if ratio > MAX_RATIO:
                raise ValueError(
                    f"method {config.method!r} keeps one token of every {CELL} x {CELL} cell, so ratios are "
                    f"at most {MAX_RATIO}; got {ratio}. Use method 'toma' for more"
                )
        check_unmerge(config)
        self.seed = config.seed

    def layout(
        self, grids: tuple[Grid, ...], ratio: float, device: torch.device, step: int = 0, variant: str = ""
    ) -> CellLayout:
        seed = None if self.seed is None else (self.seed, step)
        return cell_layout(grids, ratio, seed, device, variant)

    @torch.no_grad()
    def plan(self, x: torch.Tensor, layout: Layout) -> ToMePlan:
        """x: (B, N, C) -> a plan for every element of the batch."""
        assert isinstance(layout, CellLayout)
        parents, kept = match(x, layout.destinations, layout.sources, layout.tokens - layout.kept)
        rows = rows_of(parents, layout.kept)
        # Counted in float32: bfloat16 stops counting at 256.
        counts = torch.zeros(kept.numel(), device=x.device)
        sizes = counts.index_add(0, rows, counts.new_ones(rows.shape)).view(kept.shape)
        return self.plans(layout.variant)(self, layout, rows, sizes.to(x.dtype), kept)

    def plans(self, variant: str) -> type[ToMePlan]:
        return ToMePlan


def check_unmerge(config: MergeConfig) -> None:
    if config.unmerge != "transpose":
        raise ValueError(
            f"unmerge={config.unmerge!r} needs soft weights, which only method 'toma' has; method "
            f"{config.method!r} copies merged tokens back: leave unmerge at 'transpose'"
        )


@functools.lru_cache(maxsize=256)
def cell_layout(
    grids: tuple[Grid, ...],
    ratio: float,
    seed: tuple[int, int] | None,
    device: torch.device | str = "cpu",
    variant: str = "",
) -> CellLayout:
    """One destination in every whole cell of every grid: the top left token, or with a seed (and the step it
    is drawn for) a random one. int(ratio * N) tokens are merged.

    >>> layout = cell_layout(((4, 5),), 0.5, None)
    >>> layout.kept, layout.destinations.tolist()
    (10, [0, 2, 10, 12])
    """
    # Not born inside `torch.inference_mode`, as a layout is kept and may be used for training later.
    with torch.inference_mode(False):
        generator = None
        if seed is not None:
            generator = torch.Generator().manual_seed((seed[0] * 1_000_003 + seed[1]) % 2**63)
        picks, offset = [], 0
        for grid in grids:
            picks.append(offset + _one_per_cell(grid, generator))
            offset += grid[0] * grid[1]
        destinations = torch.cat(picks)
        is_source = torch.ones(offset, dtype=torch.bool, device="cpu").index_fill(0, destinations, False)
        sources = is_source.nonzero().flatten()
    merged = int(offset * ratio)
    if merged > len(sources):
        raise ValueError(
            f"a grid of {' and '.join(f'{h} x {w}' for h, w in grids)} tokens has {len(sources)} that can be "
            f"merged away, {merged} are asked for: use a smaller ratio, or raise min_tokens to leave it alone"
        )
    groups = (Regions(1, (Cells(1, offset, offset - merged),)),)
    return CellLayout(grids, groups, None, None, destinations.to(device), sources.to(device), variant)


def _one_per_cell(grid: Grid, generator: torch.Generator | None) -> torch.Tensor:
    """(cells,) row-major token indices, in the order of the cells. A last odd row or column has no cell."""
    height, width = grid
    down, across = min(CELL, height), min(CELL, width)
    rows, columns = height // down, width // across
    row = down * torch.arange(rows, device="cpu")[:, None]
    column = across * torch.arange(columns, device="cpu")
    if generator is not None:
        row = row + torch.randint(down, (rows, columns), generator=generator, device="cpu")
        column = column + torch.randint(across, (rows, columns), generator=generator, device="cpu")
    return (row * width + column).flatten()
