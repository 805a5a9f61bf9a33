"""Encode captioned pictures once, so that training the denoisers never runs the autoencoder.

python -m tomadiff.demo.train.latents --out runs
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL

from ..captions import Background, caption, pairs, subjects
from ..pictures import composite, render, shrink
from . import autoencoder, vocabulary
from .data import Glyphs, load_glyphs

RESOLUTION = 256
SIDE = RESOLUTION // 4
# How many pictures with gradients and two tones; all plain ones are always there.
TWO_COLOURED = 2_000
EMPTY_CAPTION_SHARE = 0.1


@dataclass(frozen=True)
class Pool:
    """latents: (N, 8, S, S) float16; tokens: (N, 80) int64; the first `plain` rows have plain backgrounds."""

    latents: torch.Tensor
    tokens: torch.Tensor
    plain: int

    def draw(
        self, count: int, generator: torch.Generator, empty: float = EMPTY_CAPTION_SHARE
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch, half of it plain; a share of the captions is empty.

        -> (count, 8, S, S) float32, (count, 80)
        """
        half = count // 2
        plain = torch.randint(0, self.plain, (half,), generator=generator)
        others = torch.randint(self.plain, len(self.latents), (count - half,), generator=generator)
        rows = torch.cat([plain, others])
        blank = torch.rand(count, 1, generator=generator) < empty
        tokens = torch.where(blank, vocabulary.encode([""]), self.tokens[rows])
        return self.latents[rows].float(), tokens


def chosen_pairs() -> tuple[list[tuple[int, Background]], int]:
    """The pairs to encode, plain ones first, and how many of them are plain. None of them is held out."""
    plain = pairs(held_out=False, kind="plain")
    others = pairs(held_out=False, kind="gradient") + pairs(held_out=False, kind="two-tone")
    order = torch.randperm(len(others), generator=torch.Generator().manual_seed(RESOLUTION))
    return plain + [others[index] for index in order[:TWO_COLOURED].tolist()], len(plain)


@torch.no_grad()
def encode(vae: AutoencoderKL, glyphs: Glyphs, chosen: list[tuple[int, Background]]) -> torch.Tensor:
    """-> (len(chosen), 8, 64, 64) float16"""
    points = sorted({point for point, _ in chosen})
    small = shrink(glyphs.pictures[glyphs.rows(points)], RESOLUTION)
    row_of = {point: row for row, point in enumerate(points)}
    behind = {background: render(background, RESOLUTION) for _, background in chosen}
    latents = torch.empty(len(chosen), 8, SIDE, SIDE, dtype=torch.float16)
    for index, (point, background) in enumerate(chosen):
        picture = composite(small[row_of[point]][None], behind[background][None])
        latents[index] = vae.encode(picture).latent_dist.mode()[0].half()
    return latents


def load(out: Path) -> Pool:
    """The pool, encoded the first time and memory-mapped afterwards."""
    path = out / "latents" / "256.pt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        chosen, plain = chosen_pairs()
        names = subjects()
        tokens = vocabulary.encode([caption(names[point], background) for point, background in chosen])
        latents = encode(autoencoder.load(out), load_glyphs(out), chosen)
        partial = path.with_suffix(".partial")
        torch.save({"latents": latents, "tokens": tokens, "plain": plain}, partial)
        os.replace(partial, path)
    return Pool(**torch.load(path, mmap=True, weights_only=True))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs"))
    options = parser.parse_args()
    pool = load(options.out)
    latents = pool.latents[:: max(1, len(pool.latents) // 1000)].float()
    print(
        f"{len(pool.latents)} pictures, {pool.plain} of them plain; "
        f"mean {latents.mean():.3f}, std {latents.std():.3f}"
    )


if __name__ == "__main__":
    main()
