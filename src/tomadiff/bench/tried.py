"""Other ways to do the parts of merging, timed in turns with the way they are done: what did not help, or
helps less than it would cost to read.

python -m tomadiff.bench.tried
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from tomadiff.bench.stopwatch import timed
from tomadiff.core.selection import facility_location

Run = Callable[[], object]
CPU = torch.device("cpu")
# A block of SDXL at 64 x 64 tokens, batch 2.
SIDE, WIDTH, HEADS, BATCH = 64, 640, 10, 2
TOKENS = SIDE * SIDE


def attention(kept: int) -> dict[str, Run]:
    """Attention among merged tokens, whose keys carry the logarithm of their cluster size."""
    query, key, value = (torch.randn(BATCH, HEADS, kept, WIDTH // HEADS) for _ in range(3))
    bias = torch.rand(BATCH, 1, 1, kept)
    size = WIDTH // HEADS

    def wider(x: torch.Tensor, column: torch.Tensor | float) -> torch.Tensor:
        more = x.new_zeros(*x.shape[:-1], 8)
        more[..., 0] = column
        return torch.cat([x, more], dim=-1)

    def dimension() -> torch.Tensor:
        keys = wider(key, bias.squeeze(2) * size**0.5)
        return F.scaled_dot_product_attention(wider(query, 1.0), keys, wider(value, 0.0), scale=size**-0.5)

    return {
        "sizes as a mask": lambda: F.scaled_dot_product_attention(query, key, value, attn_mask=bias),
        "without sizes": lambda: F.scaled_dot_product_attention(query, key, value),
        "sizes as one more head dimension (padded to 72)": dimension,
    }


def merging(ratio: float, tile: int = 4) -> dict[str, Run]:
    """Tokens into merged tokens, in tiles."""
    length = tile * tile
    regions, keep = BATCH * TOKENS // length, round((1 - ratio) * length)
    x = torch.randn(regions, length, WIDTH)
    weights = torch.rand(regions, keep, length)
    nearest = torch.randint(keep, (regions, length)) + keep * torch.arange(regions)[:, None]
    larger = torch.rand(regions // 4, 4 * keep, 4 * length)
    return {
        f"product in tiles of {tile}": lambda: weights @ x,
        f"product in tiles of {2 * tile}": lambda: larger @ x.view(regions // 4, 4 * length, WIDTH),
        "scattered sums of a hard assignment": lambda: x.new_zeros(regions * keep, WIDTH).index_add_(
            0, nearest.flatten(), x.view(-1, WIDTH)
        ),
    }


def unmerging(ratio: float, tile: int = 4) -> dict[str, Run]:
    """Merged tokens back, and onto the residual."""
    length = tile * tile
    regions, keep = BATCH * TOKENS // length, round((1 - ratio) * length)
    y = torch.randn(regions, keep, WIDTH)
    weights = torch.rand(regions, length, keep)
    x = torch.randn(regions, length, WIDTH)
    nearest = (torch.randint(keep, (regions, length)) + keep * torch.arange(regions)[:, None]).flatten()
    return {
        "product, then sum in place": lambda: (weights @ y).add_(x),
        "product, then sum": lambda: x + weights @ y,
        "both in one call": lambda: torch.baddbmm(x, weights, y),
        "gathered copies of a hard assignment, then sum": lambda: (
            x + y.view(-1, WIDTH).index_select(0, nearest).view_as(x)
        ),
    }


def ordering(tile: int = 4) -> dict[str, Run]:
    """Tokens into the order of tiles."""
    x = torch.randn(BATCH, TOKENS, WIDTH)
    cells = SIDE // tile
    order = torch.arange(TOKENS).view(cells, tile, cells, tile).transpose(1, 2).flatten()
    return {
        "by index": lambda: x.index_select(1, order),
        "by a transposed copy (tiles that fit only)": lambda: (
            x.view(BATCH, cells, tile, cells, tile, WIDTH).transpose(2, 3).reshape(x.shape)
        ),
    }


def choosing(tile: int) -> dict[str, Run]:
    """Half of the tokens of every tile as destinations."""
    length = tile * tile
    x = F.normalize(torch.randn(BATCH * TOKENS // length, length, WIDTH), dim=-1)
    similarity = x @ x.mT
    return {
        "similarities, then greedy": lambda: facility_location(x @ x.mT, length // 2),
        "greedy alone": lambda: facility_location(similarity, length // 2),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.manual_seed(0)
    table = Table(title=f"64 x 64 tokens of width {WIDTH}, batch {BATCH}, {options.rounds} rounds in turns")
    for name in ("part", "way", "ms", "of the first"):
        table.add_column(name, justify="left" if name in ("part", "way") else "right")
    parts = {
        "attention at 0.5": attention(TOKENS // 2),
        "merge at 0.5": merging(0.5),
        "unmerge at 0.5": unmerging(0.5),
        "order": ordering(),
        "choose, tiles of 4": choosing(4),
        "choose, tiles of 8": choosing(8),
        "choose, tiles of 16": choosing(16),
    }
    for part, ways in parts.items():
        taken = in_turns(ways, options.rounds)
        first = next(iter(taken.values()))
        for way, seconds in taken.items():
            share = statistics.median(a / b for a, b in zip(seconds, first, strict=True))
            table.add_row(part, way, f"{1000 * statistics.median(seconds):.1f}", f"{share:.2f}")
            part = ""
        table.add_section()
    Console().print(table)


@torch.no_grad()
def in_turns(ways: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of every way in every round, after one to warm up."""
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, run in ways.items():
            seconds = timed(run, CPU)[1]
            if number:
                taken[way].append(seconds)
    return taken


if __name__ == "__main__":
    main()
