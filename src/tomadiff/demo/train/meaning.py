"""Teach text encoders what captions look like, before a denoiser learns from them.

A denoiser that starts with random text encoders learns subjects very late: only at high noise does the
caption say more than the noisy picture, and then it has to say which colour belongs where. To learn that from
a caption alone, without any noise, is quick. So the encoders learn it first. A picture is cut into 4 x 4
parts, and the tokens of a caption, padding included, share them out: each tells what its parts look like. The
pooled state tells the principal components of the subject and the colours of the background.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..captions import Background, caption, pairs, subjects
from ..check import SIDE, references
from ..pictures import colour, render
from . import vocabulary
from .loop import ramp

COMPONENTS = 120
PART_COMPONENTS = 64
GRID = 4
STEPS = 1200
BATCH = 96


def principal(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and basis of the main components. rows: (N, D) -> (D,), (D, count)

    A row's components, (row - mean) @ basis, have a spread of at most 1. The basis lies half-way between
    whitened, which makes details as important as shapes, and not.
    """
    mean = rows.mean(0)
    _, strength, right = torch.linalg.svd(rows - mean, full_matrices=False)
    scale = math.sqrt(len(rows)) / (strength * strength[0]).sqrt()
    return mean, right[:count].T * scale[:count]


def parts(pictures: torch.Tensor) -> torch.Tensor:
    """(N, 3, 32, 32) -> (N, 16, 192), the cells of a grid of 4 x 4"""
    return F.unfold(pictures, SIDE // GRID, stride=SIDE // GRID).transpose(1, 2)


def scene(background: Background) -> torch.Tensor:
    """Both colours, and which kind of background it is. -> (8,)"""
    colours = [colour(name).flatten() for name in (background.first, background.second or background.first)]
    kind = torch.tensor([background.kind == "gradient", background.kind == "two-tone"]).float()
    return torch.cat([*colours, kind])


@dataclass(frozen=True)
class Lessons:
    """Captions that denoisers are trained on, and what there is to tell about them."""

    tokens: torch.Tensor
    subject: torch.Tensor
    background: torch.Tensor
    features: torch.Tensor
    scenes: torch.Tensor
    behind: torch.Tensor
    part_mean: torch.Tensor
    part_basis: torch.Tensor

    def draw(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """rows: (B,) -> tokens (B, 16), what they should tell (B, 16, 64), what their pooled state should
        (B, 128)"""
        subject, background = self.subject[rows], self.background[rows]
        glyph, alpha = (reference[subject] for reference in references())
        seen = parts(glyph + (1 - alpha) * self.behind[background])
        whole = torch.cat([self.features[subject], self.scenes[background]], dim=1)
        return self.tokens[rows], (seen - self.part_mean) @ self.part_basis, whole


def lessons() -> Lessons:
    """All captions that are not held out."""
    names = subjects()
    trained = pairs(held_out=False)
    number = {point: index for index, point in enumerate(names)}
    scenery = list(dict.fromkeys(background for _, background in trained))
    place = {background: index for index, background in enumerate(scenery)}
    pictures = torch.cat(references(), dim=1).flatten(1)
    mean, basis = principal(pictures, COMPONENTS)
    behind = torch.stack([render(background, SIDE) for background in scenery])
    generator = torch.Generator().manual_seed(0)
    some = torch.randint(0, len(scenery), (len(pictures),), generator=generator)
    glyph, alpha = references()
    seen = parts(glyph + (1 - alpha) * behind[some])
    return Lessons(
        tokens=vocabulary.encode([caption(names[point], background) for point, background in trained]),
        subject=torch.tensor([number[point] for point, _ in trained]),
        background=torch.tensor([place[background] for _, background in trained]),
        features=(pictures - mean) @ basis,
        scenes=torch.stack([scene(background) for background in scenery]),
        behind=behind,
        **dict(zip(("part_mean", "part_basis"), principal(seen.flatten(0, 1), PART_COMPONENTS), strict=True)),
    )


def teach(
    module: nn.Module,
    states: Callable[[torch.Tensor], list[torch.Tensor]],
    tellers: int = vocabulary.MAX_TOKENS,
    steps: int = STEPS,
    batch: int = BATCH,
) -> tuple[float, float]:
    """Train `module` so that its states tell the picture of a caption; returns the last two losses.

    states: tokens (B, 16) -> states of the tokens (B, 16, C), and their pooled state (B, C)
    tellers: how many of the last tokens share the parts out; where a token does not see those after it, the
        first ones do not know the caption yet
    """
    told = lessons()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        widths = [state.shape[-1] for state in states(told.tokens[:2])]
    sizes = (PART_COMPONENTS * GRID**2 // tellers, COMPONENTS + 8)
    readers = nn.ModuleList(nn.Linear(width, size) for width, size in zip(widths, sizes, strict=True))
    optimizer = torch.optim.AdamW([*module.parameters(), *readers.parameters()], lr=0.0, betas=(0.9, 0.99))
    values = (0.0, 0.0)
    for step in range(steps):
        tokens, seen, whole = told.draw(torch.randint(0, len(told.tokens), (batch,), generator=generator))
        words, pooled = states(tokens)
        losses = [
            F.mse_loss(readers[0](words[:, -tellers:]), seen.reshape(batch, tellers, -1)),
            F.mse_loss(readers[1](pooled), whole),
        ]
        for group in optimizer.param_groups:
            group["lr"] = ramp(step, steps, 2e-3, 1e-4, 20)
        torch.autograd.backward(losses)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        values = (losses[0].item(), losses[1].item())
        if step % 100 == 0 or step == steps - 1:
            print(f"text encoders: step {step}, parts {values[0]:.4f}, whole {values[1]:.4f}", flush=True)
    return values
