"""What the way up of `emoji-xl` begins with."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from small_models import encoded, glyphs, tiny_xl

from tomadiff.demo.train import finding, meaning
from tomadiff.demo.train.latents import Pool
from tomadiff.demo.train.loop import optimizers, take_step
from tomadiff.demo.train.xl import XLModel

Begun = tuple[XLModel, Pool]


@pytest.fixture(scope="module")
def begun() -> Begun:
    model, pool = tiny_xl(), encoded()
    shown = meaning.details(pool)
    meaning.spell(model.table, shown, glyphs())
    finding.tell_parts(model, pool, shown)
    return model, pool


@torch.no_grad()
def outputs(begun: Begun) -> list[torch.Tensor]:
    """What each level of the way up gives out at pure noise, upsampled but for the last."""
    model, pool = begun
    given: list[torch.Tensor] = []
    blocks = model.unet.up_blocks
    handles = [block.register_forward_hook(lambda *call: given.append(call[-1])) for block in blocks]
    model(torch.randn(2, 8, 64, 64), torch.full((2,), 999), pool.tokens[:2])
    for handle in handles:
        handle.remove()
    return given


def test_places_know_exactly_where_they_lie(begun: Begun):
    given = outputs(begun)
    for level, (side, part) in enumerate([(8, 1), (16, 2), (32, 4)]):
        line = ((torch.arange(side) // part) - 3.5) / 2
        column, row = given[level][0, finding.PART], given[level][0, finding.PART + 2]
        torch.testing.assert_close(column, line.expand(side, side), atol=1e-3, rtol=0)
        torch.testing.assert_close(row, line[:, None].expand(side, side), atol=1e-3, rtol=0)
    for level, channel in ((1, finding.HALF_16), (2, finding.HALF_32), (3, finding.HALF_64)):
        side = given[level].shape[-1]
        half = torch.arange(side) % 2 * 2.0 - 1
        torch.testing.assert_close(given[level][0, channel], half.expand(side, side), atol=1e-3, rtol=0)
        torch.testing.assert_close(
            given[level][1, channel + 2], half[:, None].expand(side, side), atol=1e-3, rtol=0
        )
        torch.testing.assert_close(given[level][1, channel], -given[level][1, channel + 1])


def test_places_find_their_parts_and_unpack_them(begun: Begun):
    model, pool = begun
    latents, tokens = pool.draw(8, torch.Generator().manual_seed(1), empty=0.0)
    guesses: list[torch.Tensor] = []
    looked: list[torch.Tensor] = []
    blocks = model.unet.up_blocks
    handles = [
        blocks[3]
        .attentions[-1]
        .register_forward_hook(lambda *call: guesses.append(call[-1][0][:, finding.GUESS]))
    ]
    crossing = [module for name, module in blocks.named_modules() if name.endswith("attn2")]
    for module in crossing:
        for layer in (module.to_q, module.to_k):
            handles.append(layer.register_forward_hook(lambda *call: looked.append(call[-1])))
    with torch.no_grad():
        model(torch.randn(latents.shape), torch.full((8,), 999), tokens)
    for handle in handles:
        handle.remove()
    assert len(crossing) == 6
    for queries, keys in zip(looked[::2], looked[1::2], strict=True):
        found = (queries[..., : finding.HEAD] @ keys[..., : finding.HEAD].mT).argmax(-1)
        part = meaning.part_of(math.isqrt(queries.shape[1]))
        token = torch.arange(keys.shape[1])[model.tellers][part]
        assert (found == token).float().mean() > 0.99
    wanted = F.pixel_unshuffle(latents, 2)
    assert F.mse_loss(guesses[0], wanted) < 0.5 * F.mse_loss(guesses[0], wanted.flip(0))
    # They know what is where in a part, not only what there is on average.
    inside = [
        (picture - F.interpolate(F.avg_pool2d(picture, 4), scale_factor=4.0)).flatten()
        for picture in (guesses[0], wanted)
    ]
    assert torch.corrcoef(torch.stack(inside))[0, 1] > 0.5


def test_what_makes_and_reads_coordinates_does_not_learn(begun: Begun):
    model, pool = copy.deepcopy(begun)
    before = outputs(begun)[1][:, finding.COORDINATES]
    finding.hold_coordinates(model)
    steppers = optimizers(model, weight_decay=0.0)
    for step in range(2):
        latents, tokens = pool.draw(2, torch.Generator().manual_seed(step))
        torch.autograd.backward(model.loss(latents, tokens, step, torch.Generator().manual_seed(step)))
        take_step(steppers, 1e-3)
    after = outputs((model, pool))[1]
    torch.testing.assert_close(after[:, finding.COORDINATES], before)
    assert not after.allclose(outputs(begun)[1], atol=1e-2)
