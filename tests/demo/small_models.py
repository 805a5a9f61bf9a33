"""Models like the embedded ones, but tiny, and pictures to teach them with."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tomadiff.demo.captions import caption, pairs, subjects
from tomadiff.demo.check import references
from tomadiff.demo.pictures import over, render
from tomadiff.demo.train import meaning, vocabulary
from tomadiff.demo.train.flux import FluxModel
from tomadiff.demo.train.latents import Pool
from tomadiff.demo.train.xl import XLModel


def tiny(name: str) -> FluxModel | XLModel:
    torch.manual_seed(0)
    if name == "emoji-flux":
        return FluxModel(heads=1, dual_blocks=1, single_blocks=1, text_layers=1)
    return tiny_xl()


def tiny_xl() -> XLModel:
    torch.manual_seed(0)
    return XLModel(
        channels=(48, 128, 128, 128, 64), heads=(1, 2, 2, 2, 1), transformer_layers=(1,) * 5, text_layers=2
    )


def glyphs() -> torch.Tensor:
    """The shipped small pictures of all subjects in the size of the training's. -> (237, 4, 64, 64)"""
    return F.interpolate(torch.cat(references(), dim=1), meaning.SIDE)


def encoded(count: int = 24) -> Pool:
    """Subjects on plain backgrounds, in place of latents of such."""
    chosen = pairs(held_out=False, kind="plain")[:count]
    names = subjects()
    row = {point: index for index, point in enumerate(names)}
    drawn = glyphs()[[row[point] for point, _ in chosen]]
    pictures = over(drawn, torch.stack([render(behind, meaning.SIDE) for _, behind in chosen]))
    tokens = vocabulary.encode([caption(names[point], behind) for point, behind in chosen])
    return Pool(pictures.repeat(1, 3, 1, 1)[:, :8].half(), tokens, count // 2)
