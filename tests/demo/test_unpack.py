"""How `emoji-flux` begins: its first block knows what a caption's tokens tell about each place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tomadiff.demo.train import meaning, vocabulary
from tomadiff.demo.train.flux import FluxModel, pack, positions
from tomadiff.demo.train.latents import Pool
from tomadiff.demo.train.unpack import FINDERS, finders, token_at, unpack_parts

CAPTIONS = [f"{name} on a red background" for name in ("tiger", "banana", "lemon", "pear")]


def pool() -> Pool:
    """Every caption has one picture, smooth within its parts."""
    coarse = torch.randn(4, 8, 16, 16, generator=torch.Generator().manual_seed(1))
    return Pool(F.interpolate(coarse, 64, mode="bilinear").half(), vocabulary.encode(CAPTIONS), 2)


@pytest.fixture(scope="module")
def unpacked() -> FluxModel:
    torch.manual_seed(0)
    model, shown = FluxModel(dual_blocks=1, single_blocks=1, text_layers=1), meaning.details(pool())
    meaning.spell(model.text_encoder_2.shared, shown, torch.rand(237, 4, 64, 64))
    with torch.no_grad():
        # As if it had learned what the four look like.
        table = model.text_encoder_2.shared.weight
        ids = vocabulary.with_parts(pool().tokens)[:, : vocabulary.PARTS]
        table[ids, : meaning.SPELLED] = ((meaning.parts(pool().latents.float()) - shown.mean) @ shown.basis)[
            ..., : meaning.SPELLED
        ]
    unpack_parts(model, pool(), shown, tuning_steps=4)
    return model.eval()


@torch.no_grad()
def test_heads_of_the_first_block_find_the_tokens_of_their_place(
    unpacked: FluxModel, monkeypatch: pytest.MonkeyPatch
):
    attended: list[torch.Tensor] = []
    attention = F.scaled_dot_product_attention

    def spy(query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        if query.shape[2] > 1024:
            attended.append((query @ key.mT / query.shape[-1] ** 0.5).softmax(-1))
        return attention(query, key, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    tokens = vocabulary.encode(CAPTIONS[:1])
    unpacked(torch.randn(1, 1024, 32), torch.ones(1), tokens)
    for head, find in enumerate(FINDERS):
        share = attended[0][0, head, tokens.shape[1] :].gather(1, token_at(find)[:, None])
        assert share.mean() > 0.7


@torch.no_grad()
def test_the_first_guess_is_the_picture_the_caption_tells(unpacked: FluxModel):
    picture, noise = pack(pool().latents.float()), torch.randn(4, 1024, 32)
    velocity = unpacked(noise, torch.ones(4), pool().tokens)
    assert F.mse_loss(noise - velocity, picture) < 0.4 * picture.var()


def test_what_finds_places_learns_no_more_and_the_rest_does(unpacked: FluxModel):
    model = unpacked.train()
    still = {id(value) for part in finders(model.transformer) for value in part.parameters()}
    loss = model.loss(pool().latents.float(), pool().tokens, 1, torch.Generator().manual_seed(0), window=4)
    torch.autograd.backward(loss)
    for name, value in model.named_parameters():
        # The last block's text goes nowhere.
        if name.startswith("transformer.") and "context" not in name and ".add_" not in name:
            assert (value.grad is None) == (id(value) in still), name
        if name.startswith("text_encoder"):
            assert value.grad is None, name


@torch.no_grad()
def test_a_window_is_drawn_where_it_lies():
    torch.manual_seed(0)
    model = FluxModel(heads=1, dual_blocks=1, single_blocks=1, text_layers=1).eval()
    tokens = vocabulary.encode(CAPTIONS[:1])
    image, time, states = torch.randn(1, 4, 32), torch.ones(1), model.text_states(tokens)
    there = model.velocity(image, time, states, positions(2) + 7)
    here = model.velocity(image, time, states, positions(2))
    assert torch.equal(here, model(image, time, tokens))
    assert not here.allclose(there, atol=1e-4)
