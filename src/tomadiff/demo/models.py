"""The embedded models: loading them, and calling them as they were trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

WEIGHTS = Path(__file__).parent / "weights"

# What each pipeline is called with beside the prompt.
CALL: dict[str, dict[str, Any]] = {
    "emoji-flux": {"height": 256, "width": 256, "num_inference_steps": 25, "max_sequence_length": 80},
    "emoji-xl": {"height": 256, "width": 256, "num_inference_steps": 25, "guidance_scale": 1.0},
}


def available() -> tuple[str, ...]:
    """Names of the models whose weights are in this installation."""
    return tuple(name for name in CALL if (WEIGHTS / name / "model_index.json").is_file())


def load(name: str, folder: Path | None = None) -> DiffusionPipeline:
    """An embedded model as an ordinary diffusers pipeline in float32, without a progress bar.

    folder: weights to load in place of those of this installation, as training exports them

    >>> pipe = load("emoji-flux")
    >>> options = CALL["emoji-flux"] | {"num_inference_steps": 1}
    >>> pipe("tiger on a blue background", **options).images[0].size
    (256, 256)
    """
    if name not in CALL:
        raise ValueError(f"unknown model {name!r}; there are {', '.join(CALL)}")
    folder = WEIGHTS / name if folder is None else folder
    if not (folder / "model_index.json").is_file():
        raise FileNotFoundError(f"there are no weights of {name} in {folder}")
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(
    pipe: DiffusionPipeline, prompts: Sequence[str], seeds: Sequence[int], batch: int = 4, **options: Any
) -> Iterator[torch.Tensor]:
    """Pictures in [0, 1], `batch` at a time; the noise of each depends on its own seed alone.

    -> tensors (at most batch, 3, H, W)
    """
    for start in range(0, len(prompts), batch):
        part = slice(start, start + batch)
        noise = [torch.Generator().manual_seed(seed) for seed in seeds[part]]
        pictures: torch.Tensor = pipe(
            list(prompts[part]), generator=noise, output_type="pt", **options
        ).images
        yield pictures
