"""Teach text encoders what captions look like, before a denoiser learns from them.

A denoiser that starts with random text encoders learns subjects very late: only at high noise does the
caption say more than the noisy picture, and then it has to say which colour belongs where. To learn that from
a caption alone, without any noise, is quick. So the encoders learn it first, and then stay as they are. A
picture is cut into 8 x 8 parts, one for each of 64 tokens beside the caption, which tells what that part
looks like and where it lies: of every caption as 64 x 64 pixels show it, and of some of them in the detail
that 256 x 256 pixels, encoded, have. The pooled state tells the principal components of the subject and the
colours of the background.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..captions import Background, caption, pairs, subjects
from ..pictures import colour, over, render
from . import vocabulary
from .latents import Pool
from .loop import optimizers, ramp, take_step

COMPONENTS = 120
PART_COMPONENTS = 64
DETAIL_COMPONENTS = 256
# What the words for parts begin with: so many components of what a part looks like, and how strongly which
# one it is. What is left of a word's numbers tells what shows through.
SPELLED = 96
WHICH = 2.0
# Of the pictures in pixels, and of pictures four times as large in latents.
SIDE = 64
GRID = 8
# Where parts lie counts for much: places find their part by it.
WHERE = 10.0
STEPS = 1000
CAPTIONS_PER_STEP = 16
PICTURES_PER_STEP = 24
READ_WELL = 200


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
    """(N, C, 64, 64) -> (N, 64, C * 64), the cells of a grid of 8 x 8"""
    return F.unfold(pictures, SIDE // GRID, stride=SIDE // GRID).transpose(1, 2)


def part_of(side: int) -> torch.Tensor:
    """Which of the 64 parts each place of a grid lies in. -> (side * side,)

    >>> part_of(16)[:4].tolist()
    [0, 0, 1, 1]
    """
    part = torch.arange(side) * GRID // side
    return (GRID * part[:, None] + part).flatten()


def where() -> torch.Tensor:
    """Where each part lies: its column and its row, from -1.75 to 1.75, and half the sum of their squares,
    by which linear layers tell which part is nearest. -> (64, 3)
    """
    line = (torch.arange(GRID) - (GRID - 1) / 2) / 2
    row, column = (side.flatten() for side in torch.meshgrid(line, line, indexing="ij"))
    return torch.stack([column, row, (column**2 + row**2) / 2], dim=1)


def scene(background: Background) -> torch.Tensor:
    """Both colours, and which kind of background it is. -> (8,)"""
    colours = [colour(name).flatten() for name in (background.first, background.second or background.first)]
    kind = torch.tensor([background.kind == "gradient", background.kind == "two-tone"]).float()
    return torch.cat([*colours, kind])


@dataclass(frozen=True)
class Lessons:
    """Captions that denoisers are trained on, and what there is to tell about them."""

    glyphs: torch.Tensor
    tokens: torch.Tensor
    subject: torch.Tensor
    background: torch.Tensor
    features: torch.Tensor
    scenes: torch.Tensor
    behind: torch.Tensor
    part_mean: torch.Tensor
    part_basis: torch.Tensor

    def draw(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """rows: (B,) -> tokens (B, 80), what 64 of them should tell (B, 64, 128), what their pooled state
        should (B, 128)"""
        subject, background = self.subject[rows], self.background[rows]
        seen = parts(over(self.glyphs[subject], self.behind[background]))
        look = (seen - self.part_mean) @ self.part_basis
        which = torch.eye(vocabulary.PARTS)
        whole = torch.cat([self.features[subject], self.scenes[background]], dim=1)
        return self.tokens[rows], torch.cat([look, which.expand(len(rows), -1, -1)], dim=-1), whole


def lessons(glyphs: torch.Tensor) -> Lessons:
    """All captions that are not held out. glyphs: (subjects, 4, 64, 64) in [0, 1]"""
    names = subjects()
    trained = pairs(held_out=False)
    number = {point: index for index, point in enumerate(names)}
    scenery = list(dict.fromkeys(background for _, background in trained))
    place = {background: index for index, background in enumerate(scenery)}
    small = F.avg_pool2d(glyphs, 2).flatten(1)
    mean, basis = principal(small, COMPONENTS)
    behind = torch.stack([render(background, SIDE) for background in scenery])
    generator = torch.Generator().manual_seed(0)
    some = torch.randint(0, len(scenery), (len(glyphs),), generator=generator)
    seen = parts(over(glyphs, behind[some]))
    return Lessons(
        glyphs=glyphs,
        tokens=vocabulary.encode([caption(names[point], background) for point, background in trained]),
        subject=torch.tensor([number[point] for point, _ in trained]),
        background=torch.tensor([place[background] for _, background in trained]),
        features=(small - mean) @ basis,
        scenes=torch.stack([scene(background) for background in scenery]),
        behind=behind,
        **dict(zip(("part_mean", "part_basis"), principal(seen.flatten(0, 1), PART_COMPONENTS), strict=True)),
    )


@dataclass(frozen=True)
class Details:
    """Encoded pictures, and the principal components of their parts."""

    pool: Pool
    mean: torch.Tensor
    basis: torch.Tensor

    def draw(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """-> tokens (count, 80), what 64 of them should tell (count, 64, 256)"""
        latents, tokens = self.pool.draw(count, generator)
        return tokens, (parts(latents) - self.mean) @ self.basis


def details(pool: Pool) -> Details:
    """pool: of pictures of 256 pixels"""
    some = pool.latents[:: max(1, len(pool.latents) // 600)].float()
    return Details(pool, *principal(parts(some).flatten(0, 1), DETAIL_COMPONENTS))


@torch.no_grad()
def spell(words: nn.Embedding, shown: Details, glyphs: torch.Tensor) -> None:
    """Begin with words for parts that tell what the part looks like: the main components of a subject's part
    on plain backgrounds, on average, those of what shows through, and which of the 64 it is.

    words: T5's; glyphs: (subjects, 4, 64, 64) in [0, 1]
    """
    plain = slice(shown.pool.plain)
    first = vocabulary.with_parts(shown.pool.tokens[plain])[:, 0]
    subject = (first - vocabulary.size()) // vocabulary.PARTS - 1
    seen = (parts(shown.pool.latents[plain].float()) - shown.mean) @ shown.basis[:, :SPELLED]
    shows = F.one_hot(subject, len(glyphs)).float()
    look = torch.einsum("ns,npc->spc", shows / shows.sum(0).clamp(min=1), seen)
    clear = parts(1 - glyphs[:, 3:])
    mean, basis = principal(clear.flatten(0, 1), words.embedding_dim - SPELLED - vocabulary.PARTS)
    which = WHICH * torch.eye(vocabulary.PARTS).expand(len(glyphs), -1, -1)
    told = torch.cat([look, (clear - mean) @ basis, which], dim=-1)
    every = torch.cat([told.mean(0, keepdim=True), told]).flatten(0, 1)
    words.weight[vocabulary.size() : vocabulary.size() + len(every)] = every


@torch.no_grad()
def least_squares(
    layer: nn.Linear, rows: slice, inputs: torch.Tensor, wanted: torch.Tensor, ridge: float = 1e-6
) -> None:
    """Set rows of a layer to what makes the wanted of its inputs, by least squares.

    inputs: (..., C), wanted: (..., D)
    """
    given = (inputs if layer.bias is None else F.pad(inputs, (0, 1), value=1.0)).flatten(0, -2).double()
    square = given.T @ given
    square += ridge * square.diagonal().mean() * torch.eye(len(square))
    found = torch.linalg.solve(square, given.T @ wanted.flatten(0, -2).double()).float()
    layer.weight[rows] = found[: inputs.shape[-1]].T
    if layer.bias is not None:
        layer.bias[rows] = found[-1]


def teach(
    module: nn.Module,
    states: Callable[[torch.Tensor], list[torch.Tensor]],
    tellers: slice,
    told: Lessons,
    shown: Details,
    steps: int = STEPS,
) -> dict[str, float]:
    """Train `module` so that its states tell the picture of a caption; returns the last losses.

    The words for parts tell something from the start, and are read from the start as well as can be, or they
    would lose it to readers that know nothing yet.

    states: tokens (B, 80) -> states of the tokens (B, 80, C), and their pooled state (B, C)
    tellers: the 64 tokens that tell the parts of the picture
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        tokens_wide, pooled_wide = (state.shape[-1] for state in states(told.tokens[:2]))
    readers = nn.ModuleDict(
        {
            "look": nn.Linear(tokens_wide, PART_COMPONENTS + vocabulary.PARTS),
            "whole": nn.Linear(pooled_wide, COMPONENTS + 8),
            "detail": nn.Linear(tokens_wide, shown.basis.shape[1]),
            "where": nn.Linear(tokens_wide, 3),
        }
    )
    _read_well(readers, lambda tokens: states(tokens)[0][:, tellers], told, shown)
    # Components of the detail count for themselves, and as much as they weigh in the latents.
    weights = shown.basis.norm(dim=0) ** -2
    weights = 1 + weights / weights.mean()
    steppers = optimizers(nn.ModuleList([module, readers]))
    losses: dict[str, torch.Tensor] = {}
    for step in range(steps):
        rows = torch.randint(0, len(told.tokens), (CAPTIONS_PER_STEP,), generator=generator)
        captions, look, whole = told.draw(rows)
        others, detail = shown.draw(PICTURES_PER_STEP, generator)
        words, pooled = states(torch.cat([captions, others]))
        parts_of_all = words[:, tellers]
        few, many = parts_of_all.split([len(captions), len(others)])
        found = {
            "look": readers["look"](few),
            "whole": readers["whole"](pooled[: len(captions)]),
            "detail": readers["detail"](many),
            "where": readers["where"](parts_of_all),
        }
        wanted = {"look": look, "whole": whole, "detail": detail, "where": where()}
        errors = {name: (found[name] - wanted[name]).square() for name in found}
        losses = {name: error.mean() for name, error in errors.items()}
        torch.autograd.backward(
            losses["look"] + losses["whole"] + (errors["detail"] * weights).mean() + WHERE * losses["where"]
        )
        take_step(steppers, ramp(step, steps, 1e-3, 5e-5, 20))
        if step % 100 == 0 or step == steps - 1:
            shares = ", ".join(f"{name} {loss.item():.4f}" for name, loss in losses.items())
            print(f"text encoders: step {step}, {shares}", flush=True)
    return {name: loss.item() for name, loss in losses.items()}


@torch.no_grad()
def _read_well(
    readers: nn.ModuleDict, words: Callable[[torch.Tensor], torch.Tensor], told: Lessons, shown: Details
) -> None:
    """Set the readers of parts by least squares. words: tokens (B, 80) -> states (B, 64, C)"""
    generator = torch.Generator().manual_seed(1)
    captions, look, _ = told.draw(torch.randint(0, len(told.tokens), (READ_WELL,), generator=generator))
    pictures, detail = shown.draw(READ_WELL, generator)
    place = where().expand(READ_WELL, -1, -1)
    for name, tokens, wanted in (
        ("look", captions, look),
        ("detail", pictures, detail),
        ("where", pictures, place),
    ):
        reader = readers[name]
        assert isinstance(reader, nn.Linear)
        least_squares(reader, slice(None), words(tokens), wanted)
