"""Merging that must lose nothing, on pictures made of identical 2 x 2 cells of tokens: wrong positions, wrong
cluster sizes or a wrong order of tokens would all show."""

import pytest
import torch
from small_dits import CONFIG, flux_inputs, grid_ids, make_flux, make_sd3, run, sd3_inputs

import tomadiff
from tomadiff.patching.apply import session_of

CELLS = (4, 6)
QUARTER = CONFIG.replace(ratio=0.75, tau=1e-4)


def spread(x, cells=CELLS):
    """x: (B, N / 4, C), one row per cell -> (B, N, C)"""
    grid = x.unflatten(1, cells)
    return grid.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1, 2)


def cell_inputs(batch, timestep=0.5):
    """One token per cell, at the place of the cell's first token; and the same picture with four each."""
    small = flux_inputs(CELLS, batch, timestep=timestep) | {"img_ids": grid_ids(*CELLS, scale=2.0)}
    large = small | {
        "hidden_states": spread(small["hidden_states"]),
        "img_ids": grid_ids(2 * CELLS[0], 2 * CELLS[1]),
    }
    return small, large


@pytest.mark.parametrize("mode", ["each", "once"])
@pytest.mark.parametrize("batch", [1, 2])
def test_flux_equals_the_same_picture_on_a_quarter_of_the_tokens(batch, mode):
    model = make_flux()
    small, large = cell_inputs(batch)
    expected = spread(run(model, small))
    tomadiff.apply(model, config=QUARTER.replace(mode=mode, proportional=False))
    torch.testing.assert_close(run(model, large), expected, atol=1e-4, rtol=1e-4)
    kept = session_of(model).layouts["dual"]
    assert (kept.tokens, kept.kept) == (96, 24)


@pytest.mark.parametrize("mode", ["each", "once"])
@pytest.mark.parametrize("batch", [1, 2])
def test_flux_with_sizes_equals_four_tokens_at_one_place(batch, mode):
    """Proportional attention counts a merged key as often as it stands for a token."""
    model = make_flux()
    small, large = cell_inputs(batch)
    expected = run(model, large | {"img_ids": spread(small["img_ids"][None])[0]})
    tomadiff.apply(model, config=QUARTER.replace(mode=mode))
    torch.testing.assert_close(run(model, large), expected, atol=1e-4, rtol=1e-4)


def test_a_wrong_rotary_position_would_show():
    """The check above has teeth: moving all tokens by one place changes the result by far more."""
    model = make_flux()
    small, large = cell_inputs(1)
    expected = spread(run(model, small))
    tomadiff.apply(model, config=QUARTER.replace(proportional=False))
    moved = large | {"img_ids": large["img_ids"] * torch.tensor([1.0, 1.0, 0.5])}
    assert (run(model, moved) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("mode", ["each", "once"])
@pytest.mark.parametrize("kind", ["medium", "large", "3.0"])
def test_sd3_with_cells_that_share_a_position_loses_nothing(kind, mode):
    model = make_sd3(kind)
    side = model.pos_embed.pos_embed_max_size
    cells = model.pos_embed.pos_embed.unflatten(1, (side, side))[:, ::2, ::2]
    model.pos_embed.pos_embed = spread(cells.flatten(1, 2), (side // 2, side // 2))
    inputs = sd3_inputs((8, 12), batch=2)
    # Crops of the positions start where whole cells start, and a patch is two latents wide.
    patches = inputs["hidden_states"][:, :, :8, :12].unflatten(2, (4, 2)).unflatten(4, (6, 2))
    patches = patches.repeat_interleave(2, 2).repeat_interleave(2, 4)
    inputs["hidden_states"] = patches.flatten(4, 5).flatten(2, 3)
    expected = run(model, inputs)
    tomadiff.apply(model, config=QUARTER.replace(mode=mode))
    torch.testing.assert_close(run(model, inputs), expected, atol=1e-4, rtol=1e-4)
    assert session_of(model).layouts["joint"].kept == 24
