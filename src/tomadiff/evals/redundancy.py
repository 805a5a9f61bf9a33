"""How alike the tokens of an embedded model are, block by block, beside white noise.

python -m tomadiff.evals.redundancy --model emoji-flux --json redundancy.json
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from torch import nn

from tomadiff.core.merging import cosine_similarity
from tomadiff.core.regions import make_layout
from tomadiff.core.selection import coverage, facility_location
from tomadiff.demo import models
from tomadiff.demo.captions import caption, held_out_sample, subjects

BLOCKS = (BasicTransformerBlock, FluxTransformerBlock, FluxSingleTransformerBlock)
TILE = 8


def neighbours(tokens: torch.Tensor) -> float:
    """Mean cosine of tokens beside and below each other. tokens: (B, N, C) of a square grid

    >>> neighbours(torch.ones(1, 16, 3))
    1.0
    """
    side = math.isqrt(tokens.shape[1])
    grid = F.normalize(tokens.float(), dim=-1).view(len(tokens), side, side, -1)
    beside = (grid[:, :, 1:] * grid[:, :, :-1]).sum(-1).mean()
    below = (grid[:, 1:] * grid[:, :-1]).sum(-1).mean()
    return round(((beside + below) / 2).item(), 4)


def covered(tokens: torch.Tensor, ratio: float = 0.5) -> float:
    """Mean cosine of a token to the nearest destination, chosen by facility location in tiles of 8 x 8.

    >>> covered(torch.ones(1, 64, 3))
    1.0
    """
    side = math.isqrt(tokens.shape[1])
    layout = make_layout(((side, side),), ratio, ("tile", TILE), ("tile", TILE))
    (group,) = layout.groups
    regions = layout.arrange(tokens).reshape(-1, group.size, tokens.shape[-1])
    similarity = cosine_similarity(regions, regions)
    picks = facility_location(similarity, group.keep)
    return round((coverage(similarity, picks).mean() / group.size).item(), 4)


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Collect the image tokens that enter every transformer block. -> block name: tensors (B, N, C)"""
    seen: dict[str, list[torch.Tensor]] = defaultdict(list)
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, BLOCKS):

            def keep(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
                seen[name].append((args[0] if args else kwargs["hidden_states"]).detach())

            handles.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def measure(model: str, prompts: int = 4, steps: int = 5) -> list[dict[str, Any]]:
    """One row for each block, averaged over prompts and steps, and white noise of the same shape."""
    pipe, names = models.load(model), subjects()
    denoiser = getattr(pipe, "transformer", None) or pipe.unet
    texts = [caption(names[point], background) for point, background in held_out_sample(prompts)]
    options = models.CALL[model] | {"num_inference_steps": steps}
    with recorded(denoiser) as seen:
        for _ in models.draw(pipe, texts, range(prompts), **options):
            pass
    rows = []
    for name, calls in seen.items():
        tokens = torch.cat(calls)
        noise = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(0))
        rows.append(
            {
                "block": name,
                "tokens": tokens.shape[1],
                "width": tokens.shape[2],
                "neighbours": neighbours(tokens),
                "covered": covered(tokens),
                "noise_neighbours": neighbours(noise),
                "noise_covered": covered(noise),
            }
        )
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(models.CALL), required=True)
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args()
    rows = measure(options.model)
    print(f"{'block':56} tokens  neighbours (noise)  covered at 0.5 (noise)")
    for row in rows:
        print(
            f"{row['block']:56} {row['tokens']:6}  {row['neighbours']:10.3f} ({row['noise_neighbours']:.3f})"
            f"  {row['covered']:14.3f} ({row['noise_covered']:.3f})"
        )
    if options.json:
        options.json.write_text(json.dumps({"model": options.model, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
