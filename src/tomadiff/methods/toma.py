"""ToMA: destinations by facility location, merge and unmerge as attention-like matrix products."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tomadiff.core.merging import (
    assignment,
    cluster_sizes,
    cosine_similarity,
    cosines,
    merge_map,
    unmerge_map,
)
from tomadiff.core.regions import Cells, Grid, Layout, Regions, make_layout
from tomadiff.core.selection import facility_location, one_hot
from tomadiff.methods.interface import Method

if TYPE_CHECKING:
    from tomadiff.config import MergeConfig


class RegionMaps(NamedTuple):
    """The maps of all merge regions of one shape; R regions of L tokens with K destinations each.

    destinations: (B * R, K) indices into L
    merge: (B * R, K, L), unmerge: (B * R, L, K)
    sizes: (B, R * K)
    """

    destinations: torch.Tensor
    merge: torch.Tensor
    unmerge: torch.Tensor
    sizes: torch.Tensor


class ToMAPlan(NamedTuple):
    method: ToMA
    layout: Layout
    groups: tuple[RegionMaps, ...]

    @property
    def sizes(self) -> torch.Tensor:
        return torch.cat([maps.sizes for maps in self.groups], dim=1)

    @property
    def positions(self) -> torch.Tensor:
        """(B, D) row-major token indices of the destinations."""
        places, start = [], 0
        for group, maps in zip(self.layout.groups, self.groups, strict=True):
            batch = maps.sizes.shape[0]
            first = start + group.size * torch.arange(group.count, device=maps.destinations.device)
            places.append((maps.destinations.view(batch, group.count, -1) + first[:, None]).flatten(1))
            start += group.count * group.size
        place = torch.cat(places, dim=1)
        if self.layout.order is None:
            return place
        return self.layout.order.index_select(0, place.flatten()).view_as(place)

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, N, C) in layout order -> (B, D, C)"""
        parts = _parts(x, self.layout)
        return _join([maps.merge @ part for maps, part in zip(self.groups, parts, strict=True)], x)

    def unmerge(self, y: torch.Tensor) -> torch.Tensor:
        """y: (B, D, C) -> (B, N, C) in layout order"""
        parts = _split(y, [(group.count, group.keep) for group in self.layout.groups])
        return _join([maps.unmerge @ part for maps, part in zip(self.groups, parts, strict=True)], y)

    def refresh(self, x: torch.Tensor) -> ToMAPlan:
        return self.method.weigh(x, self.layout, tuple(maps.destinations for maps in self.groups))


class ToMA(Method):
    def __init__(self, config: MergeConfig) -> None:
        self.config = config

    def layout(
        self, grids: tuple[Grid, ...], ratio: float, device: torch.device, step: int = 0, variant: str = ""
    ) -> Layout:
        config = self.config
        return make_layout(
            grids,
            ratio,
            (config.select_region, config.select_size),
            (config.merge_region, config.merge_size),
            device,
        )

    @torch.no_grad()
    def plan(self, x: torch.Tensor, layout: Layout) -> ToMAPlan:
        """x: (B, N, C) in layout order -> a plan for every element of the batch."""
        maps = []
        for tokens, group in zip(_parts(x, layout), layout.groups, strict=True):
            among = _cosines_in_cells(tokens, group)
            picks = _select(tokens, group) if among is None else facility_location(among, group.keep)
            maps.append(self._maps(tokens, picks, among, x))
        return ToMAPlan(self, layout, tuple(maps))

    @torch.no_grad()
    def weigh(self, x: torch.Tensor, layout: Layout, destinations: tuple[torch.Tensor, ...]) -> ToMAPlan:
        """x: (B, N, C) in layout order, the destinations of each group of regions -> the plan with weights
        for x."""
        maps = tuple(
            self._maps(tokens, picks, _cosines_in_cells(tokens, group), x)
            for tokens, picks, group in zip(_parts(x, layout), destinations, layout.groups, strict=True)
        )
        return ToMAPlan(self, layout, maps)

    def _maps(
        self, tokens: torch.Tensor, picks: torch.Tensor, among: torch.Tensor | None, x: torch.Tensor
    ) -> RegionMaps:
        """tokens: (B * R, L, C), picks: (B * R, K), among: (B * R, L, L) if it is known"""
        config = self.config
        chosen = one_hot(picks, tokens.shape[1], tokens.dtype if among is None else among.dtype)
        similarity = cosine_similarity(chosen @ tokens, tokens) if among is None else chosen @ among
        weights = assignment(similarity, config.tau)
        merge = merge_map(similarity, weights, config.tau, config.normalise)
        unmerge = unmerge_map(weights, merge, config.unmerge, config.ridge, tokens)
        sizes = cluster_sizes(weights).view(x.shape[0], -1)
        return RegionMaps(picks, merge.to(x.dtype), unmerge.to(x.dtype).contiguous(), sizes.to(x.dtype))


def _select(tokens: torch.Tensor, group: Regions) -> torch.Tensor:
    """tokens: (B * R, L, C) of the merge regions -> (B * R, K), chosen inside each of their cells."""
    picks, start = [], 0
    for cell in group.cells:
        inside = tokens[:, start : start + cell.count * cell.size].reshape(-1, cell.size, tokens.shape[-1])
        chosen = facility_location(cosines(inside), cell.keep).view(-1, cell.count, cell.keep)
        first = start + cell.size * torch.arange(cell.count, device=tokens.device)
        picks.append((chosen + first[:, None]).flatten(1))
        start += cell.count * cell.size
    return torch.cat(picks, dim=1)


def _cosines_in_cells(tokens: torch.Tensor, group: Regions) -> torch.Tensor | None:
    """tokens: (B * R, L, C) -> (B * R, L, L) where destinations are chosen in the regions in which tokens
    merge, so that the same similarities serve both; None where those are larger."""
    return cosines(tokens) if group.cells == (Cells(1, group.size, group.keep),) else None


def _parts(x: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """x: (B, N, C) -> (B * R, L, C) of each group of regions"""
    return _split(x, [(group.count, group.size) for group in layout.groups])


def _split(x: torch.Tensor, shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    """x: (B, T, C), shapes: (R, L) of consecutive groups -> (B * R, L, C) of each; a view where one group is
    all."""
    parts, start = [], 0
    for count, size in shapes:
        part = x if count * size == x.shape[1] else x[:, start : start + count * size]
        parts.append(part.reshape(x.shape[0] * count, size, x.shape[2]))
        start += count * size
    return parts


def _join(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """parts: (B * R, K, C) -> (B, sum of R * K, C)"""
    flat = [part.reshape(like.shape[0], -1, like.shape[2]) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)
