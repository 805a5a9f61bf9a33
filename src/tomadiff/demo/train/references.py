"""Write the small pictures of all subjects that `tomadiff.demo.check` compares with.

python -m tomadiff.demo.train.references --runs runs
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..captions import subjects
from ..check import REFERENCES, SIDE
from ..pictures import shrink
from .data import load_glyphs


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the data lies")
    parser.add_argument("--out", type=Path, default=REFERENCES)
    options = parser.parse_args()
    glyphs = load_glyphs(options.runs)
    small = shrink(glyphs.pictures[glyphs.rows(list(subjects()))], SIDE)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    save_file({"glyphs": (small * 255).round().to(torch.uint8)}, options.out)
    print(f"{len(small)} subjects: {options.out.stat().st_size / 1e6:.1f} MB in {options.out}")


if __name__ == "__main__":
    main()
