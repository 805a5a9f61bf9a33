"""What the denoisers' training asks of their blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tomadiff.demo.train import flux, vocabulary, watch, xl

TOKENS = vocabulary.MAX_TOKENS
LAST = xl.XLModel.tellers
FIRST = flux.FluxModel.tellers


def looked_for(side: int, part_of: torch.Tensor, tellers: slice, find: watch.Find = "part") -> torch.Tensor:
    """Loss of places that look for these parts, and only for them. part_of: (side * side,)"""
    keys = torch.eye(TOKENS)
    seen = watch.Watch([find])
    seen.queries.append(1e3 * keys[tellers][None, part_of])
    seen.keys.append(keys[None])
    return seen.places(tellers)


@pytest.mark.parametrize("tellers", [FIRST, LAST])
@pytest.mark.parametrize("side", [8, 16, 32])
def test_a_place_should_look_for_the_part_it_lies_in(side: int, tellers: slice):
    rows = torch.arange(side) // (side // 8)
    right = (8 * rows[:, None] + rows).flatten()
    assert looked_for(side, right, tellers) < 1e-3
    assert looked_for(side, right.flip(0), tellers) > 10


@pytest.mark.parametrize("side", [8, 16, 32])
def test_tokens_of_rows_and_columns_lie_in_order_and_tell_the_part_as_well(side: int):
    row, column = (watch.wanted(find, side).view(side, side) for find in ("row", "column"))
    assert torch.equal(row, column.T)
    assert (column.diff(dim=1) == 64 // side).all()
    assert torch.equal(8 * (row // 8) + column // 8, watch.wanted("part", side).view(side, side))
    assert looked_for(side, row.flatten(), FIRST, "row") < 1e-3
    assert looked_for(side, row.flatten(), FIRST, "column") > 10


def test_a_block_that_knows_the_latents_below_its_places_has_no_error():
    latents = torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    seen = watch.Watch()
    seen.features += [F.pixel_unshuffle(latents, 4), F.pixel_unshuffle(latents, 2)]
    assert seen.picture(latents, nn.ModuleList([nn.Identity(), nn.Identity()])) == 0
    seen.features[0] = seen.features[0].flip(-1)
    assert seen.picture(latents, nn.ModuleList([nn.Identity(), nn.Identity()])) > 0.5


def test_a_unet_is_watched_on_the_way_up_and_only_while_asked():
    torch.manual_seed(0)
    model = xl.XLModel(
        channels=(16, 32, 32, 32, 32), heads=(1,) * 5, transformer_layers=(1,) * 5, text_layers=1
    )
    tokens = vocabulary.encode(["tiger on a blue background"])
    noise, time = torch.randn(1, 8, 32, 32), torch.tensor([999])
    with torch.no_grad():
        with xl.watched(model.unet) as seen:
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


@pytest.fixture(scope="module")
def small_flux() -> flux.FluxModel:
    torch.manual_seed(0)
    return flux.FluxModel(heads=len(flux.FINDERS), dual_blocks=1, single_blocks=1, text_layers=1)


def captions() -> torch.Tensor:
    return vocabulary.encode(["tiger on a blue background", "", "banana on a red and white background"] * 2)


def test_flux_is_watched_as_its_attention_sees_it(
    small_flux: flux.FluxModel, monkeypatch: pytest.MonkeyPatch
):
    attended: list[tuple[torch.Tensor, torch.Tensor]] = []
    attention = F.scaled_dot_product_attention

    def spy(query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        if query.shape[2] == TOKENS + 64:
            attended.append((query[:, :, TOKENS:], key[:, :, :TOKENS]))
        return attention(query, key, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    latents = torch.randn(6, 8, 16, 16)
    with torch.no_grad():
        with flux.watched(small_flux.transformer, side=8) as seen:
            small_flux(flux.pack(latents), torch.ones(6), captions())
        assert seen.picture(latents, small_flux.readers).isfinite()
        small_flux(flux.pack(latents), torch.ones(6), captions())
    assert len(attended) == 4
    assert len(seen.queries) == len(seen.keys) == len(flux.FINDERS)
    assert len(seen.features) == 2
    queries, keys = attended[0]
    for head in range(len(flux.FINDERS)):
        torch.testing.assert_close((seen.queries[head], seen.keys[head]), (queries[:, head], keys[:, head]))


def test_pointed_heads_find_places_at_every_resolution(small_flux: flux.FluxModel):
    def chances(side: int) -> list[float]:
        """How much of each head's attention to the caption goes to the token it should find, or to one next
        to it, which lies beside or below it."""
        image = torch.randn(6, side * side, 32, generator=torch.Generator().manual_seed(1))
        with torch.no_grad(), flux.watched(small_flux.transformer, side) as seen:
            small_flux(image, torch.linspace(0, 1, 6), captions())
        found = []
        for queries, keys, find in zip(seen.queries, seen.keys, flux.FINDERS, strict=True):
            attended = (queries @ keys.mT / watch.HEAD**0.5).softmax(-1)[..., FIRST]
            near = {"part": (-9, -8, -7, -1, 0, 1, 7, 8, 9)}.get(find, range(-3, 4))
            token = watch.wanted(find, side)
            which = (token[:, None] + torch.tensor(list(near))).clamp(0, 63)
            mask = torch.zeros(side * side, 64).scatter_(1, which, 1.0)
            found.append((attended * mask).sum(-1).mean().item())
        return found

    assert max(chances(32)) < 0.25
    flux.point_to_places(small_flux, captions())
    for side in (8, 16, 32):
        assert min(chances(side)) > 0.6
