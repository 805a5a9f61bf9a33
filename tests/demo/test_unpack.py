"""What the first blocks of `emoji-flux` learn before the rest."""

import torch

from tomadiff.demo.train import vocabulary
from tomadiff.demo.train.flux import FluxModel, positions
from tomadiff.demo.train.latents import Pool
from tomadiff.demo.train.unpack import dual_blocks_only, unpack_parts


def small_model() -> FluxModel:
    torch.manual_seed(0)
    return FluxModel(heads=1, dual_blocks=2, single_blocks=1, text_layers=1)


def pool() -> Pool:
    """Every caption has one picture, alike in every channel of a place."""
    captions = [f"{name} on a red background" for name in ("tiger", "banana", "lemon", "pear")]
    pictures = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(1)).expand(-1, 8, -1, -1)
    return Pool(pictures.half(), vocabulary.encode(captions), 2)


def test_first_blocks_learn_to_tell_the_picture_and_later_ones_stay_as_they_are():
    model = small_model()
    before = {name: value.clone() for name, value in model.named_parameters()}
    errors = unpack_parts(model, pool(), steps=40)
    assert sum(errors[-5:]) < 0.8 * sum(errors[:5])
    changed = {name for name, value in model.named_parameters() if not value.equal(before[name])}
    assert any(name.startswith("transformer.transformer_blocks.1.") for name in changed)
    assert any(name.startswith("readers.1.") for name in changed)
    left_alone = (
        "text_encoder",
        "transformer.single_transformer_blocks",
        "transformer.proj_out",
        "readers.2",
    )
    assert not any(name.startswith(left_alone) for name in changed)


def test_the_other_blocks_are_back_afterwards_also_after_an_error():
    transformer = small_model().transformer
    single = transformer.single_transformer_blocks
    try:
        with dual_blocks_only(transformer):
            assert len(transformer.single_transformer_blocks) == 0
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert transformer.single_transformer_blocks is single


def test_the_velocity_of_a_whole_picture_is_that_of_its_places():
    model = small_model().eval()
    tokens = vocabulary.encode(["tiger on a red background"])
    image, time = torch.randn(1, 4, 32), torch.ones(1)
    with torch.no_grad():
        states = model.text_states(tokens)
        there = model.velocity(image, time, states, positions(2) + 7)
        here = model.velocity(image, time, states, positions(2))
        assert torch.equal(here, model(image, time, tokens))
    assert not here.allclose(there, atol=1e-4)
