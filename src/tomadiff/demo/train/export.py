"""Write a trained model as a diffusers pipeline in float16, load it back and draw a sheet with it.

python -m tomadiff.demo.train.export --model emoji-flux --runs runs --out emoji-flux
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, DiffusionPipeline
from PIL import Image

from . import autoencoder
from .denoiser import MODELS, Denoiser, held_out_captions
from .vocabulary import MAX_TOKENS
from .xl import GUIDANCE

LIMIT_MB = 40


def export(model: Denoiser, vae: AutoencoderKL, folder: Path) -> float:
    """Save the pipeline of `model` in float16; returns its size in MB."""
    pipeline = copy.deepcopy(model).pipeline(copy.deepcopy(vae)).to(torch.float16)
    pipeline.save_pretrained(folder, safe_serialization=True)
    # transformers loads in the precision the configuration names, diffusers in float32: name float32, or
    # a plain from_pretrained would mix the two.
    for path in folder.glob("text_encoder*/config.json"):
        config = json.loads(path.read_text())
        config["dtype"] = "float32"
        path.write_text(json.dumps(config, indent=2) + "\n")
    # transformers 5 writes a class name that earlier versions do not know; the old name works in both.
    for path in [folder / "model_index.json", *folder.glob("tokenizer*/tokenizer_config.json")]:
        path.write_text(path.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def call_options(name: str) -> dict[str, float | int]:
    """What each pipeline should be called with beside the prompt."""
    if name == "emoji-flux":
        return {"max_sequence_length": MAX_TOKENS}
    return {"guidance_scale": GUIDANCE}


def draw(folder: Path, captions: list[str], steps: int, size: int, **options: float | int) -> np.ndarray:
    """Load the folder as anyone would and draw the captions, eight in a row. -> (H, W, 3) uint8"""
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    pictures = []
    for seed, prompt in enumerate(captions):
        noise = torch.Generator().manual_seed(seed)
        result = pipeline(
            prompt, height=size, width=size, num_inference_steps=steps, generator=noise, **options
        )
        pictures.append(np.asarray(result.images[0]))
    rows = [np.concatenate(pictures[start : start + 8], axis=1) for start in range(0, len(pictures), 8)]
    return np.concatenate(rows, axis=0)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the training lies")
    parser.add_argument("--out", type=Path, required=True, help="folder of the pipeline")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--count", type=int, default=16, help="pictures on the sheet, a multiple of 8")
    options = parser.parse_args()
    state = torch.load(options.runs / options.model / "checkpoint.pt", weights_only=True, mmap=True)
    model = MODELS[options.model]()
    model.load_state_dict(state["ema"])
    size = export(model, autoencoder.load(options.runs), options.out)
    print(f"{options.model} after {state['step']} steps: {size:.1f} MB in {options.out}")
    if size > LIMIT_MB:
        raise SystemExit(f"{size:.1f} MB is more than the {LIMIT_MB} MB a pipeline may have")
    captions = held_out_captions(options.count)
    sheet = draw(options.out, captions, options.steps, options.size, **call_options(options.model))
    path = options.runs / options.model / f"exported-{state['step']:06d}.png"
    Image.fromarray(sheet).save(path)
    print(f"sheet: {path}")


if __name__ == "__main__":
    main()
