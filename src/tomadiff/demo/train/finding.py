"""Begin the cross-attention of the UNet with what a caption's tokens tell, part by part.

Keys say which row and column of parts a token is of, each with a number of its own, so that a place needs to
know its row and its column, and not which of 64 parts it lies in. Values say what the part looks like. Both
are solved for by least squares; to ask for its part is left to each place, see `watch.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import meaning, vocabulary
from .latents import Pool
from .meaning import Details, least_squares
from .watch import HEAD
from .xl import XLModel

STRENGTH = 8.0


@torch.no_grad()
def tell_parts(model: XLModel, pool: Pool, shown: Details) -> None:
    """Set keys and values of all cross-attention, in each of its heads."""
    latents, tokens = pool.draw(200, torch.Generator().manual_seed(0), empty=0.0)
    states = model.text_states(tokens)[0]
    look = (meaning.parts(latents) - shown.mean) @ shown.basis
    part = torch.arange(vocabulary.PARTS)
    lines = torch.cat(
        [F.one_hot(line, meaning.GRID) for line in (part // meaning.GRID, part % meaning.GRID)], 1
    )
    # Tokens that are of no part are of no row and no column, and easily left aside.
    keys = torch.zeros(states.shape[1], HEAD)
    keys[:, : lines.shape[1]] = -STRENGTH / 2
    keys[model.tellers, : lines.shape[1]] = STRENGTH * lines
    for name, attention in model.unet.named_modules():
        if not name.endswith("attn2"):
            continue
        for head in range(attention.heads):
            rows = slice(head * HEAD, (head + 1) * HEAD)
            values = torch.zeros(*states.shape[:2], HEAD)
            values[:, model.tellers] = look[..., rows]
            least_squares(attention.to_k, rows, states, keys.expand(len(states), -1, -1), ridge=1e-4)
            least_squares(attention.to_v, rows, states, values, ridge=1e-4)
