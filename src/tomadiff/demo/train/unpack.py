"""Teach the first blocks of the Flux transformer to unpack what a caption's tokens tell.

A token tells about a part of 4 x 4 places, and each place has to take something else from it. That needs
neither the other places nor the blocks behind. So the dual-stream blocks learn it first and alone, on some
places of many pictures, each of which costs far less than it costs the whole transformer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from torch import nn

from .flux import FluxModel, draw_times, pack, positions
from .latents import Pool
from .loop import optimizers, ramp, take_step
from .watch import Watch

STEPS = 1000
PICTURES_PER_STEP = 24
PLACES_PER_STEP = 192
HIGH_NOISE_SHARE = 0.5


@contextmanager
def dual_blocks_only(transformer: FluxTransformer2DModel) -> Iterator[Watch]:
    """The transformer without its single-stream blocks, and what the others make of the image tokens,
    (B, C, N, 1)."""
    single, transformer.single_transformer_blocks = transformer.single_transformer_blocks, nn.ModuleList()
    try:
        with Watch() as seen:
            for block in transformer.transformer_blocks:
                seen.record(block, seen.features, _image_tokens)
            yield seen
    finally:
        transformer.single_transformer_blocks = single


def _image_tokens(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    image = output[1]
    return F.layer_norm(image, image.shape[-1:]).mT.unsqueeze(-1)


def unpack_parts(model: FluxModel, pool: Pool, steps: int = STEPS) -> list[float]:
    """Train the dual-stream blocks so that a linear reading of each tells the latents without noise; returns
    the errors."""
    generator = torch.Generator().manual_seed(0)
    steppers = optimizers(model)
    errors: list[float] = []
    with dual_blocks_only(model.transformer) as seen:
        readers = model.readers[: len(model.transformer.transformer_blocks)]
        for step in range(steps):
            latents, tokens = pool.draw(PICTURES_PER_STEP, generator)
            some = torch.randperm(latents[0, 0].numel() // 4, generator=generator)[:PLACES_PER_STEP]
            image = pack(latents)[:, some]
            time = draw_times(len(image), HIGH_NOISE_SHARE, generator)
            noise = torch.randn(image.shape, generator=generator)
            with torch.no_grad():
                states = model.text_states(tokens)
            places = positions(latents.shape[-1] // 2)[some]
            model.velocity(torch.lerp(image, noise, time.view(-1, 1, 1)), time, states, places)
            error = seen.picture(image.mT.unsqueeze(-1), readers)
            seen.features.clear()
            torch.autograd.backward(error)
            take_step(steppers, ramp(step, steps, 1e-3, 2e-5, 20))
            errors.append(error.item())
            if step % 50 == 49:
                print(f"first blocks: step {step + 1}, error {sum(errors[-50:]) / 50:.4f}", flush=True)
    return errors
