"""Put emoji on backgrounds."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .captions import COLOURS, Background


def colour(name: str) -> torch.Tensor:
    """-> (3, 1, 1) in [0, 1]"""
    return torch.tensor(COLOURS[name], dtype=torch.float32).view(3, 1, 1) / 255


def render(background: Background, size: int) -> torch.Tensor:
    """-> (3, size, size) in [0, 1]"""
    first = colour(background.first)
    if background.second is None:
        return first.expand(3, size, size)
    # Pixel centres, so that a picture at a lower resolution is the same picture.
    position = (torch.arange(size) + 0.5) / size
    if background.kind == "gradient":
        return blend(first, colour(background.second), position.view(1, size, 1)).expand(3, size, size)
    return blend(first, colour(background.second), (position > 0.5).float().view(1, 1, size)).expand(
        3, size, size
    )


def blend(first: torch.Tensor, second: torch.Tensor, amount: torch.Tensor) -> torch.Tensor:
    """All of `first` where amount is 0, all of `second` where it is 1."""
    return first + (second - first) * amount


def shrink(glyphs: torch.Tensor, size: int) -> torch.Tensor:
    """(N, 4, S, S) uint8 with multiplied alpha -> (N, 4, size, size) float in [0, 1]"""
    pictures = glyphs.float() / 255
    return pictures if pictures.shape[-1] == size else F.avg_pool2d(pictures, pictures.shape[-1] // size)


def over(glyphs: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
    """glyphs (N, 4, S, S) with multiplied alpha over behind (N, 3, S, S), all in [0, 1] -> (N, 3, S, S)"""
    return glyphs[:, :3] + behind * (1 - glyphs[:, 3:])


def composite(glyphs: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
    """The same -> (N, 3, S, S) in [-1, 1]"""
    return over(glyphs, behind) * 2 - 1


def random_background(size: int, generator: torch.Generator) -> torch.Tensor:
    """Any two colours, in any direction, flat, blended or with an edge. -> (3, size, size) in [0, 1]"""
    first, second = torch.rand(2, 3, 1, 1, generator=generator).unbind()
    kind, angle, offset = torch.rand(3, generator=generator).tolist()
    if kind < 0.4:
        return first.expand(3, size, size)
    direction = torch.tensor(angle * 2 * torch.pi)
    axis = torch.linspace(-1, 1, size)
    ramp = axis.view(1, 1, size) * direction.cos() + axis.view(1, size, 1) * direction.sin() + (offset - 0.5)
    # An edge is a steep ramp: about one pixel wide, which is what a resized picture has.
    return blend(first, second, (ramp * (0.5 if kind < 0.7 else size / 2) + 0.5).clamp(0, 1))


def random_crop(glyph: torch.Tensor, size: int, factor: int, generator: torch.Generator) -> torch.Tensor:
    """A random square at 1/factor of the resolution. (4, S, S) uint8 -> (4, size, size) in [0, 1]"""
    span = size * factor
    room = glyph.shape[-1] - span
    top, left = torch.randint(0, room + 1, (2,), generator=generator).tolist()
    return shrink(glyph[None, :, top : top + span, left : left + span], size)[0]


def to_bytes(pictures: torch.Tensor) -> torch.Tensor:
    """(N, 3, H, W) in [-1, 1] -> (N, H, W, 3) uint8"""
    return ((pictures.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1)


def grid(pictures: torch.Tensor, columns: int) -> torch.Tensor:
    """(N, 3, H, W) in [-1, 1] -> (rows * H, columns * W, 3) uint8; N must be a multiple of `columns`."""
    tiles = to_bytes(pictures)
    count, height, width, _ = tiles.shape
    return (
        tiles.view(count // columns, columns, height, width, 3)
        .transpose(1, 2)
        .reshape(-1, columns * width, 3)
    )
