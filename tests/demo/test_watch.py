"""What the training of `emoji-xl` asks of its blocks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small_models import tiny_xl
from torch import nn

from tomadiff.demo.train import vocabulary, watch, xl

TOKENS = vocabulary.MAX_TOKENS
TELLERS = xl.XLModel.tellers


def looked_for(part_of: torch.Tensor) -> torch.Tensor:
    """Loss of places that look for these parts, and only for them. part_of: (side * side,)"""
    # Two heads that look for the same, each token with a key of its own.
    keys = torch.randn(TOKENS, watch.HEAD, generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    seen = watch.Watch()
    seen.queries.append(10 * keys[TELLERS][None, part_of])
    seen.keys.append(keys[None])
    return seen.places(TELLERS)


@pytest.mark.parametrize("side", [8, 16, 32])
def test_a_place_should_look_for_the_part_it_lies_in(side: int):
    rows = torch.arange(side) // (side // 8)
    right = (8 * rows[:, None] + rows).flatten()
    assert looked_for(right) < 1e-3
    assert looked_for(right.flip(0)) > 10


def test_a_block_that_knows_the_latents_below_its_places_has_no_error():
    latents = torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    seen = watch.Watch()
    seen.features += [F.pixel_unshuffle(latents, 4), F.pixel_unshuffle(latents, 2)]
    assert seen.picture(latents, nn.ModuleList([nn.Identity(), nn.Identity()])) == 0
    seen.features[0] = seen.features[0].flip(-1)
    assert seen.picture(latents, nn.ModuleList([nn.Identity(), nn.Identity()])) > 0.5


def test_a_block_that_knows_which_of_two_a_place_is_has_no_error():
    seen, readers = watch.Watch(), nn.ModuleList([nn.Identity(), nn.Identity()])
    seen.features += [watch.halves_of(4)[None], watch.halves_of(8)[None]]
    assert seen.half(readers) == 0
    seen.features[1] = torch.zeros(3, 2, 8, 8)
    assert seen.half(readers) == 0.5


def test_a_unet_is_watched_on_the_way_up_and_only_while_asked():
    model = tiny_xl()
    tokens = vocabulary.encode(["tiger on a blue background"])
    noise, time = torch.randn(1, 8, 32, 32), torch.tensor([999])
    with torch.no_grad():
        with xl.watched(model.unet) as seen:
            model(noise, time, tokens)
        assert [queries.shape[1] for queries in seen.queries] == [16, 16, 64, 64, 256, 256]
        assert {keys.shape[1] for keys in seen.keys} == {TOKENS}
        assert [tuple(features.shape[1:]) for features in seen.features] == [
            (64, 4, 4),
            (64, 8, 8),
            (64, 16, 16),
            (16, 32, 32),
        ]
        assert seen.loss(noise, TELLERS, model.pictures, model.halves).isfinite()
        model(noise, time, tokens)
    assert len(seen.queries) == len(seen.keys) == 6
