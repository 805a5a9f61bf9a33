"""Labelled sheets of pictures."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw, ImageFont

GAP = 8
LINE = 18


def sheet(
    pictures: torch.Tensor, labels: Sequence[str], columns: int, title: str = "", tile: int | None = None
) -> Image.Image:
    """Pictures (N, 3, H, W) in [0, 1], row by row, each with its label below; `tile`: width in pixels."""
    width = tile or pictures.shape[-1]
    height = width * pictures.shape[-2] // pictures.shape[-1]
    font = ImageFont.load_default(14)
    folded = [fold(label, font, width) for label in labels]
    text = LINE * max(label.count("\n") + 1 for label in folded)
    head = 2 * LINE if title else 0
    rows = -(-len(pictures) // columns)
    size = (GAP + columns * (width + GAP), head + GAP + rows * (height + text + GAP))
    page = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(page)
    if title:
        pen.text((GAP, GAP), title, fill="black", font=ImageFont.load_default(18))
    bytes_ = (pictures.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
    for index, (picture, label) in enumerate(zip(bytes_, folded, strict=True)):
        left = GAP + index % columns * (width + GAP)
        top = head + GAP + index // columns * (height + text + GAP)
        image = Image.fromarray(picture.numpy())
        page.paste(image if image.width == width else image.resize((width, height)), (left, top))
        pen.multiline_text((left, top + height + 2), label, fill="black", font=font, spacing=2)
    return page


def fold(label: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """Break the lines of a label so that they are about `width` pixels wide at most."""
    characters = max(8, int(width / font.getlength("n")))
    return "\n".join(piece for line in label.split("\n") for piece in textwrap.wrap(line, characters) or [""])
