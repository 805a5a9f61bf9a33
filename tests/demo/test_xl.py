"""What emoji-xl's training asks of a UNet on the way up."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tomadiff.demo.train import vocabulary, xl

TOKENS = vocabulary.MAX_TOKENS
FIRST_PART = TOKENS - vocabulary.PARTS


def looked_for(side: int, part_of: torch.Tensor) -> torch.Tensor:
    """Loss of places that look for these parts, and only for them. part_of: (side * side,)"""
    keys = torch.eye(TOKENS)[None]
    seen = xl.Watch()
    seen.queries.append(1e3 * keys[:, FIRST_PART + part_of])
    seen.keys.append(keys)
    return seen.places()


@pytest.fixture
def wide_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xl, "HEAD", TOKENS)


@pytest.mark.usefixtures("wide_head")
@pytest.mark.parametrize("side", [8, 16, 32])
def test_a_place_should_look_for_the_part_it_lies_in(side: int):
    rows = torch.arange(side) // (side // 8)
    right = (8 * rows[:, None] + rows).flatten()
    assert looked_for(side, right) < 1e-3
    assert looked_for(side, right.flip(0)) > 10


def test_a_level_that_knows_the_latents_below_its_places_has_no_error():
    latents = torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    seen = xl.Watch()
    seen.features += [F.pixel_unshuffle(latents, 4), F.pixel_unshuffle(latents, 2)]
    assert seen.picture(latents, nn.ModuleList([nn.Identity(), nn.Identity()])) == 0
    seen.features[0] = seen.features[0].flip(-1)
    assert seen.picture(latents, nn.ModuleList([nn.Identity(), nn.Identity()])) > 0.5


def test_the_way_up_is_watched_and_only_while_asked():
    torch.manual_seed(0)
    model = xl.XLModel(
        channels=(16, 32, 32, 32, 32), heads=(1,) * 5, transformer_layers=(1,) * 5, text_layers=1
    )
    tokens = vocabulary.encode(["tiger on a blue background"])
    noise, time = torch.randn(1, 8, 32, 32), torch.tensor([999])
    with torch.no_grad():
        with xl.watch(model.unet) as seen:
            model(noise, time, tokens)
        assert [queries.shape[1] for queries in seen.queries] == [16, 16, 64, 64, 256, 256]
        assert {keys.shape[1] for keys in seen.keys} == {TOKENS}
        assert [tuple(features.shape[1:]) for features in seen.features] == [
            (32, 4, 4),
            (32, 8, 8),
            (32, 16, 16),
        ]
        assert seen.picture(noise, model.readers).isfinite()
        model(noise, time, tokens)
    assert len(seen.queries) == len(seen.keys) == 6
