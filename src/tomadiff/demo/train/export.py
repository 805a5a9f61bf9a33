"""Write a trained model as a diffusers pipeline in float16.

python -m tomadiff.demo.train.export --model emoji-flux --runs runs --out emoji-flux
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL

from . import autoencoder
from .denoiser import MODELS, Denoiser

LIMIT_MB = 40


def export(model: Denoiser, vae: AutoencoderKL, folder: Path) -> float:
    """Save the pipeline of `model` in float16; returns its size in MB."""
    pipeline = copy.deepcopy(model).pipeline(copy.deepcopy(vae)).to(torch.float16)
    pipeline.save_pretrained(folder, safe_serialization=True)
    # transformers loads in the precision the configuration names, diffusers in float32: name float32, or
    # a plain from_pretrained would mix the two.
    for path in folder.glob("*/config.json"):
        config = json.loads(path.read_text())
        config.pop("_name_or_path", None)  # a folder of the machine it was trained on
        if path.parent.name.startswith("text_encoder"):
            config["dtype"] = "float32"
        path.write_text(json.dumps(config, indent=2) + "\n")
    # transformers 5 writes a class name that earlier versions do not know; the old name works in both.
    for path in [folder / "model_index.json", *folder.glob("tokenizer*/tokenizer_config.json")]:
        path.write_text(path.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the training lies")
    parser.add_argument("--out", type=Path, required=True, help="folder of the pipeline")
    options = parser.parse_args()
    state = torch.load(options.runs / options.model / "checkpoint.pt", weights_only=True, mmap=True)
    model = MODELS[options.model]()
    model.load_state_dict(state["ema"])
    size = export(model, autoencoder.load(options.runs), options.out)
    print(f"{options.model} after {state['step']} steps: {size:.1f} MB in {options.out}")
    if size > LIMIT_MB:
        raise SystemExit(f"{size:.1f} MB is more than the {LIMIT_MB} MB a pipeline may have")


if __name__ == "__main__":
    main()
