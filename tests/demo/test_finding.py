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


def test_places_find_their_parts_whatever_the_noise(begun: Begun):
    model, pool = begun
    latents, tokens = pool.draw(4, torch.Generator().manual_seed(1), empty=0.0)
    looked: list[torch.Tensor] = []
    crossing = [module for name, module in model.unet.up_blocks.named_modules() if name.endswith("attn2")]
    handles = [
        layer.register_forward_hook(lambda *call: looked.append(call[-1]))
        for module in crossing
        for layer in (module.to_q, module.to_k)
    ]
    with torch.no_grad():
        model(torch.randn(latents.shape), torch.full((4,), 999), tokens)
    for handle in handles:
        handle.remove()
    assert len(crossing) == 6
    for queries, keys in zip(looked[::2], looked[1::2], strict=True):
        part = meaning.part_of(math.isqrt(queries.shape[1]))
        wanted = torch.arange(keys.shape[1])[model.tellers][part]
        for head in range(queries.shape[-1] // finding.HEAD):
            rows = slice(head * finding.HEAD, (head + 1) * finding.HEAD)
            found = (queries[..., rows] @ keys[..., rows].mT).argmax(-1)
            assert (found == wanted).float().mean() > 0.99


def test_values_tell_what_the_part_looks_like(begun: Begun):
    model, pool = begun
    shown = meaning.details(pool)
    latents, tokens = pool.draw(4, torch.Generator().manual_seed(1), empty=0.0)
    look = ((meaning.parts(latents) - shown.mean) @ shown.basis)[..., : finding.HEAD]
    block = model.unet.up_blocks[1].attentions[0].transformer_blocks[0]
    with torch.no_grad():
        told = block.attn2.to_v(model.text_states(tokens)[0])[:, model.tellers, : finding.HEAD]
    assert F.mse_loss(told, look) < 0.5 * F.mse_loss(told.roll(1, 1), look)


@torch.no_grad()
def test_transformer_blocks_do_not_know_which_of_two_a_place_is(begun: Begun):
    model, _ = begun
    transformer = model.unet.up_blocks[2].attentions[0]
    channels = transformer.proj_in.in_features
    one, other = torch.randn(2, 1, channels, 16, 16)
    other = torch.cat([one[:, : finding.HALF_16], other[:, finding.HALF_16 : 16], one[:, 16:]], 1)
    states = torch.randn(1, 4, transformer.transformer_blocks[0].attn2.to_k.in_features)
    inside: list[torch.Tensor] = []
    handle = transformer.transformer_blocks[0].register_forward_pre_hook(
        lambda _, given: inside.append(given[0])
    )
    for features in (one, other):
        transformer(features, encoder_hidden_states=states)
    handle.remove()
    torch.testing.assert_close(inside[0], inside[1], atol=1e-4, rtol=1e-4)


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
