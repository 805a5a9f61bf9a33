"""Do everything in order: data, autoencoder, then both denoisers in turn. Run it again to continue.

python -m tomadiff.demo.train.run --out runs
"""

from __future__ import annotations

import argparse
import fcntl
from pathlib import Path
from typing import TextIO

import torch

from . import autoencoder
from .data import load_glyphs
from .denoiser import Denoiser, add_bfloat16, prepare
from .loop import Training, stop_on_signal
from .stages import PLAN


def lock(out: Path) -> TextIO:
    """Claim `out` for as long as the file is open: two processes would overwrite each other's checkpoints."""
    out.mkdir(parents=True, exist_ok=True)
    claimed = (out / "lock").open("w")
    try:
        fcntl.flock(claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"another process is training in {out}: wait until it has stopped") from None
    return claimed


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs"))
    add_bfloat16(parser)
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    stop_on_signal()
    with lock(options.out):
        train(options.out, options.bfloat16)


def train(out: Path, bfloat16: bool = False) -> None:
    """Whatever of the plan is not done yet."""
    load_glyphs(out)
    autoencoder.train(out)
    trainings: dict[str, Training[Denoiser]] = {}
    for name, until in PLAN:
        if name not in trainings:
            trainings[name] = prepare(out, name, bfloat16)
        if trainings[name].step < until:
            print(f"{name}: step {trainings[name].step} to {until}", flush=True)
            trainings[name].run(until)


if __name__ == "__main__":
    main()
