"""Does a picture show what was asked for? Nearest neighbour among all subjects on all backgrounds.

python -m tomadiff.demo.check --model emoji-flux --count 200 --json check.json --sheet sheet.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from . import models
from .captions import Background, backgrounds, caption, held_out_sample, subjects
from .pictures import render
from .sheets import sheet

REFERENCES = models.WEIGHTS / "glyphs.safetensors"
SIDE = 32
# Largest mean distance of a background's pixels from the colours asked for; black to white is 1.
COLOUR_TOLERANCE = 0.08
SHEET = 64


@dataclass(frozen=True)
class Seen:
    """What one picture shows. `colour_error`: mean distance from the background asked for, 0 to 1."""

    subject: int
    background: Background
    colour_error: float


@dataclass(frozen=True)
class Score:
    """Shares of pictures that show the subject, and have the background, that were asked for."""

    count: int
    subject: float
    background: float
    mean_colour_error: float


@cache
def references() -> tuple[torch.Tensor, torch.Tensor]:
    """All subjects, small: colour times alpha (237, 3, 32, 32), and alpha (237, 1, 32, 32), in [0, 1]"""
    glyphs = load_file(REFERENCES)["glyphs"].float() / 255
    return glyphs[:, :3], glyphs[:, 3:]


@cache
def _scenery() -> torch.Tensor:
    """All backgrounds, small. -> (190, 3, 32, 32)"""
    return torch.stack([render(background, SIDE) for background in backgrounds()])


def distances(pictures: torch.Tensor) -> torch.Tensor:
    """Squared distance to every subject on every background.

    pictures: (N, 3, H, W) in [0, 1], H and W multiples of 32 -> (N, subjects, backgrounds)
    """
    small = F.adaptive_avg_pool2d(pictures.float(), SIDE).flatten(1)
    colour, alpha = references()
    clear = (1 - alpha).expand_as(colour).flatten(1)
    colour, scenery = colour.flatten(1), _scenery().flatten(1)
    # |picture - (colour + clear * scenery)|^2, multiplied out so that it is a few matrix products.
    pure = (colour**2).sum(1)[:, None] + 2 * (colour * clear) @ scenery.T + clear**2 @ (scenery**2).T
    by_subject = small @ colour.T
    by_both = torch.einsum("nd,gd,bd->ngb", small, clear, scenery)
    return (small**2).sum(1)[:, None, None] + pure - 2 * by_subject[:, :, None] - 2 * by_both


def look(pictures: torch.Tensor, asked: Sequence[tuple[int, Background]]) -> list[Seen]:
    """What each picture (N, 3, H, W) in [0, 1] shows, when `asked` was asked for."""
    names, scenes = list(subjects()), backgrounds()
    best = distances(pictures).flatten(1).argmin(1).tolist()
    small = F.adaptive_avg_pool2d(pictures.float(), SIDE)
    seen = []
    for picture, (point, background), index in zip(small, asked, best, strict=True):
        outside = references()[1][names.index(point)] < 0.02
        error = (picture - render(background, SIDE)).abs().mean(0, keepdim=True)
        seen.append(
            Seen(names[index // len(scenes)], scenes[index % len(scenes)], error[outside].mean().item())
        )
    return seen


def score(seen: Sequence[Seen], asked: Sequence[tuple[int, Background]]) -> Score:
    """How often a picture shows what was asked for."""
    both = list(zip(seen, asked, strict=True))
    return Score(
        len(both),
        sum(found.subject == point for found, (point, _) in both) / len(both),
        sum(found.colour_error <= COLOUR_TOLERANCE for found, _ in both) / len(both),
        sum(found.colour_error for found, _ in both) / len(both),
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(models.CALL), required=True)
    parser.add_argument("--folder", type=Path, help="weights of your own training, as it exports them")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--json", type=Path, help="write the score and every mistake to this file")
    parser.add_argument("--sheet", type=Path, help="draw the first 64 pictures into this file")
    options = parser.parse_args()
    asked, names = held_out_sample(options.count), subjects()
    prompts = [caption(names[point], background) for point, background in asked]
    call = models.CALL[options.model] | {"num_inference_steps": options.steps}
    seen: list[Seen] = []
    shown: list[torch.Tensor] = []
    pipe = models.load(options.model, options.folder)
    for pictures in models.draw(pipe, prompts, range(options.count), **call):
        seen += look(pictures, asked[len(seen) : len(seen) + len(pictures)])
        shown += pictures[: SHEET - len(shown)]
        print(f"\r{len(seen)} of {options.count}", end="", flush=True)
        if options.sheet and (len(seen) == options.count or len(shown) == SHEET):
            title = f"{options.model}: pairs of subject and background it never saw"
            sheet(torch.stack(shown), prompts[: len(shown)], 8, title, tile=160).save(options.sheet)
            options.sheet = None
    result = score(seen, asked)
    print(f"\nsubject right {result.subject:.1%}, background right {result.background:.1%}")
    if options.json:
        wrong = [
            {"prompt": prompt, "seen": names[found.subject], "colour_error": round(found.colour_error, 4)}
            for prompt, found, (point, _) in zip(prompts, seen, asked, strict=True)
            if found.subject != point or found.colour_error > COLOUR_TOLERANCE
        ]
        report = {"model": options.model, "steps": options.steps, **asdict(result), "wrong": wrong}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
