"""Do everything in order: data, autoencoder, then both denoisers in turn. Run it again to continue.

python -m tomadiff.demo.train.run --out runs
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from . import autoencoder
from .data import load_glyphs
from .denoiser import Denoiser, prepare
from .loop import Training, stop_on_signal
from .stages import PLAN


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--compile", action="store_true", help="use torch.compile where it helps")
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    stop_on_signal()
    load_glyphs(options.out)
    autoencoder.train(options.out)
    trainings: dict[str, Training[Denoiser]] = {}
    for name, until in PLAN:
        if name not in trainings:
            trainings[name] = prepare(options.out, name, options.compile)
        if trainings[name].step < until:
            print(f"{name}: step {trainings[name].step} to {until}", flush=True)
            trainings[name].run(until)


if __name__ == "__main__":
    main()
