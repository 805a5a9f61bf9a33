"""Train one of the two denoisers on encoded pictures.

python -m tomadiff.demo.train.denoiser --model emoji-flux --out runs
"""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path

import torch
from PIL import Image

from ..captions import caption, held_out_sample, subjects
from ..pictures import grid, shrink
from . import autoencoder, latents, meaning
from .data import load_glyphs
from .finding import hold_coordinates, tell_parts
from .flux import FluxModel
from .loop import Recipe, Training, stop_on_signal
from .stages import STAGES, Stage, learning_rate, locate
from .unpack import finders, unpack_parts
from .xl import XLModel

Denoiser = FluxModel | XLModel
MODELS: dict[str, type[Denoiser]] = {"emoji-flux": FluxModel, "emoji-xl": XLModel}
SAMPLE_STEPS = 20


def draw_sheet(module: Denoiser, out: Path, path: Path, count: int = 16) -> None:
    """Write a sheet of held-out captions drawn by `module`."""
    noise = torch.Generator().manual_seed(0)
    names = subjects()
    prompts = [caption(names[point], background) for point, background in held_out_sample(count)]
    drawn = module.sample(prompts, latents.SIDE, SAMPLE_STEPS, noise)
    with torch.no_grad():
        pictures = torch.cat([autoencoder.load(out).decode(part).sample for part in torch.split(drawn, 4)])
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(grid(pictures, 8).numpy()).save(path)


def recipe(out: Path, name: str, stages: tuple[Stage, ...], bfloat16: bool = False) -> Recipe[Denoiser]:
    """How a denoiser is trained."""

    @cache
    def pool() -> latents.Pool:
        return latents.load(out)

    def loss_at(module: Denoiser, step: int, generator: torch.Generator) -> torch.Tensor:
        stage, inside = locate(stages, step)
        pictures, tokens = pool().draw(stage.batch, generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            return module.loss(pictures, tokens, inside, generator, stage.window)

    def report(module: Denoiser, step: int) -> dict[str, float]:
        draw_sheet(module, out, out / name / "samples" / f"{step:06d}.png")
        print(f"{name} step {step}", flush=True)
        return {}

    return Recipe(
        loss_at, lambda step: learning_rate(stages, step), report, ema_decay=0.995, weight_decay=0.0
    )


def prepare(out: Path, name: str, bfloat16: bool = False) -> Training[Denoiser]:
    """The training of a model as its checkpoint left it, or from the start."""
    torch.manual_seed(0)
    module: Denoiser = MODELS[name]()
    if not (out / name / "checkpoint.pt").exists():
        glyphs = load_glyphs(out)
        small = shrink(glyphs.pictures[glyphs.rows(list(subjects()))], meaning.SIDE)
        pool = latents.load(out)
        shown = meaning.details(pool)
        meaning.spell(module.table, shown, small)
        meaning.teach(module, module.text_states, module.tellers, meaning.lessons(small), shown)
        if isinstance(module, FluxModel):
            unpack_parts(module, pool, shown)
        else:
            tell_parts(module, pool, shown)
    if isinstance(module, FluxModel):
        for part in finders(module.transformer):
            part.requires_grad_(False)
    else:
        hold_coordinates(module)
    return Training(module, recipe(out, name, STAGES[name], bfloat16), out / name)


def add_bfloat16(parser: argparse.ArgumentParser) -> None:
    """The option that both command lines of the training have."""
    parser.add_argument(
        "--bfloat16", action="store_true", help="compute the denoisers in it: twice as fast where the CPU can"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    add_bfloat16(parser)
    parser.add_argument("--until", type=int, help="last step; default: the end of the last stage")
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    stop_on_signal()
    until = options.until or sum(stage.steps for stage in STAGES[options.model])
    prepare(options.out, options.model, options.bfloat16).run(until)


if __name__ == "__main__":
    main()
