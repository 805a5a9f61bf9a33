"""A token grid cut into regions, and the token order in which every region is one contiguous run.

A grid is cut twice: into *merge regions*, inside which tokens are averaged, and each of those into
*selection regions*, inside which destinations are chosen. Cutting the second time inside the first means the
two always nest, so tile selection with a global merge, tiles with tiles, or small tiles in stripes are the
same code.

No grid is padded. An axis of length n is cut into ceil(n / size) pieces whose lengths differ by at most one,
so there are at most four shapes of region, whatever the grid; regions of one shape sit side by side and are
handled in one batch.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch

Grid = tuple[int, int]

KINDS = ("tile", "stripe", "global")

# Regions that are a share of the grid have as many tokens a side, at least and at most: planning takes time
# that grows with the square of a region's tokens.
SMALL = (2, 4)


@dataclass(frozen=True)
class Cells:
    """`count` selection regions of `size` tokens each, of which `keep` become destinations."""

    count: int
    size: int
    keep: int


@dataclass(frozen=True)
class Regions:
    """`count` merge regions of one shape, each made of the same cells in the same order."""

    count: int
    cells: tuple[Cells, ...]

    @property
    def size(self) -> int:
        return sum(cell.count * cell.size for cell in self.cells)

    @property
    def keep(self) -> int:
        return sum(cell.count * cell.keep for cell in self.cells)


@dataclass(frozen=True, eq=False)
class Layout:
    """How the tokens of one or more grids are grouped.

    order: (N,) the row-major index of the token at each place of the layout; None when that is the identity
    """

    grids: tuple[Grid, ...]
    groups: tuple[Regions, ...]
    order: torch.Tensor | None
    inverse: torch.Tensor | None

    @property
    def tokens(self) -> int:
        return sum(group.count * group.size for group in self.groups)

    @property
    def kept(self) -> int:
        return sum(group.count * group.keep for group in self.groups)

    @property
    def merge_regions(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def selection_regions(self) -> int:
        return sum(group.count * cell.count for group in self.groups for cell in group.cells)

    def arrange(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, N, C) in row-major order -> (B, N, C) in layout order."""
        return x if self.order is None else x.index_select(1, self.order)

    def restore(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, N, C) in layout order -> (B, N, C) in row-major order."""
        return x if self.inverse is None else x.index_select(1, self.inverse)


def size_on(size: float, grid: Grid) -> int:
    """How many tokens a side a region of this size has: a size below 1 is a share of the shorter side, within
    `SMALL`.

    >>> size_on(8, (64, 64)), size_on(0.125, (64, 64)), size_on(0.125, (24, 32)), size_on(0.125, (8, 8))
    (8, 4, 3, 2)
    """
    return int(size) if size >= 1 else min(max(SMALL[0], math.ceil(size * min(grid))), SMALL[1])


def region_shape(kind: str, size: int, grid: Grid) -> Grid:
    """The largest region that `kind` and `size` allow on this grid.

    >>> region_shape("tile", 8, (64, 5)), region_shape("stripe", 2, (64, 48))
    ((8, 5), (2, 48))
    """
    height, width = grid
    if kind == "tile":
        return min(size, height), min(size, width)
    if kind == "stripe":
        return min(size, height), width
    if kind == "global":
        return height, width
    raise ValueError(f"unknown kind of region {kind!r}; use one of {', '.join(KINDS)}")


@functools.lru_cache(maxsize=256)
def make_layout(
    grids: tuple[Grid, ...],
    ratio: float,
    select: tuple[str, float],
    merge: tuple[str, float],
    device: torch.device | str = "cpu",
) -> Layout:
    """Cut `grids` (one image, or an image and its reference picture, ...) into regions; no region spans two
    grids.

    `select` and `merge` are (kind, size), the size in tokens or as a share of the grid. The number of
    destinations is round((1 - ratio) * N), or the nearest number that equal regions can add up to; every
    region keeps at least one.

    >>> layout = make_layout(((64, 64),), 0.5, ("tile", 8), ("tile", 8))
    >>> layout.tokens, layout.kept, layout.merge_regions
    (4096, 2048, 64)
    >>> make_layout(((7, 13),), 0.5, ("tile", 4), ("global", 0)).kept
    46
    """
    for grid in grids:
        if len(grid) != 2 or min(grid) < 1:
            raise ValueError(f"a token grid has a positive height and width, got {grid}")
    # A layout is kept and may be used for training later, so it must not be born inside
    # `torch.inference_mode`.
    with torch.inference_mode(False):
        return _lay_out(grids, ratio, select, merge, device)


def _lay_out(
    grids: tuple[Grid, ...],
    ratio: float,
    select: tuple[str, float],
    merge: tuple[str, float],
    device: torch.device | str,
) -> Layout:
    shapes: list[tuple[int, tuple[tuple[int, int], ...]]] = []  # (merge regions, ((cells, cell size), ...))
    order: list[torch.Tensor] = []
    offset = 0
    for grid in grids:
        height, width = grid
        index = torch.arange(offset, offset + height * width, device="cpu").reshape(grid)
        offset += height * width
        merge_size, select_size = (size_on(size, grid) if size else 0 for _, size in (merge, select))
        for regions in _cut(index, region_shape(merge[0], merge_size, grid)):
            inner = [_cut(region, region_shape(select[0], select_size, _shape(region))) for region in regions]
            cells = tuple((len(same), same[0].numel()) for same in inner[0])
            shapes.append((len(regions), cells))
            order += [cell.flatten() for region in inner for same in region for cell in same]
    keeps = iter(_share_out([(count * n, size) for count, cells in shapes for n, size in cells], ratio))
    groups = tuple(
        Regions(count, tuple(Cells(n, size, next(keeps)) for n, size in cells)) for count, cells in shapes
    )
    permutation = torch.cat(order)
    if torch.equal(permutation, torch.arange(offset)):
        return Layout(grids, groups, None, None)
    return Layout(grids, groups, permutation.to(device), permutation.argsort().to(device))


def _shape(index: torch.Tensor) -> Grid:
    return index.shape[0], index.shape[1]


def _cut(index: torch.Tensor, shape: Grid) -> list[list[torch.Tensor]]:
    """index: (H, W) -> the regions of it, grouped by shape, each group in row-major order."""
    by_shape: dict[Grid, list[torch.Tensor]] = {}
    for rows in _pieces(index, shape[0], 0):
        for region in _pieces(rows, shape[1], 1):
            by_shape.setdefault(_shape(region), []).append(region)
    return list(by_shape.values())


def _pieces(index: torch.Tensor, size: int, dim: int) -> tuple[torch.Tensor, ...]:
    # `tensor_split` gives the first pieces one more where the length does not divide.
    return index.tensor_split(-(-index.shape[dim] // size), dim)


def _share_out(cells: list[tuple[int, int]], ratio: float) -> list[int]:
    """cells: (count, size) of each shape -> destinations per cell, with a total as near to (1 - ratio) * N
    as can be."""
    target = round((1 - ratio) * sum(count * size for count, size in cells))
    choices = []
    for _, size in cells:
        wanted = (1 - ratio) * size
        near = {min(max(int(wanted) + up, 1), size) for up in (0, 1)}
        choices.append(sorted(near, key=lambda keep: abs(keep - wanted)))
    # Each choice is the nearest or second nearest number for its shape, nearest first: `min` takes the first
    # best.
    return list(
        min(
            itertools.product(*choices),
            key=lambda keeps: abs(sum(c * k for (c, _), k in zip(cells, keeps, strict=True)) - target),
        )
    )
