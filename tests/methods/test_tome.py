"""ToMe against the real `tomesd` package, and the matching against its definition."""

from __future__ import annotations

import copy

import pytest
import tomesd
import torch
from diffusers import UNet2DConditionModel
from hypothesis import given, settings
from hypothesis import strategies as st

from tomadiff import MergeConfig, apply, merged, preset, summary
from tomadiff.methods.tome import ToMe, cell_layout

CPU = torch.device("cpu")
grids = st.tuples(st.integers(2, 9), st.integers(2, 9))


@torch.no_grad()
def by_tomesd(unet: UNet2DConditionModel, ratio: float, call: tuple, **options) -> torch.Tensor:
    patched = tomesd.apply_patch(copy.deepcopy(unet), ratio=ratio, use_rand=False, **options)
    return patched(*call).sample


@torch.no_grad()
def by_us(unet: UNet2DConditionModel, config: MergeConfig, call: tuple) -> torch.Tensor:
    with merged(unet, config=config):
        return unet(*call).sample


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("size", [(16, 16), (12, 20), (24, 8), (17, 13)])
def test_preset_tomesd_equals_the_package(unet, size, ratio, inputs):
    call = inputs(*size)
    want = by_tomesd(unet, ratio, call)
    got = by_us(unet, preset("tomesd", ratio=ratio, seed=None), call)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert (want - unet(*call).sample).abs().max() > 1e-3, "nothing was merged"


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("size", [(16, 16), (16, 24)])
def test_preset_tome_equals_the_package_with_everything_merged(unet, size, ratio, inputs):
    call = inputs(*size)
    want = by_tomesd(unet, ratio, call, max_downsample=8, merge_crossattn=True, merge_mlp=True)
    got = by_us(unet, preset("tome", ratio=ratio, seed=None), call)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_every_module_at_full_resolution_on_an_odd_grid(unet, inputs):
    call = inputs(15, 11)
    want = by_tomesd(unet, 0.5, call, merge_crossattn=True, merge_mlp=True)
    got = by_us(unet, preset("tomesd", seed=None, modules=("self", "cross", "ff")), call)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_over_several_steps_every_block_plans_anew(unet, inputs, small_unet):
    apply(unet, config=preset("tomesd", seed=None))
    text = inputs(16, 16)[2]
    for timestep, seed in ((900, 1), (500, 2), (100, 3)):
        call = (inputs(16, 16, seed=seed)[0], timestep, text)
        with torch.no_grad():
            torch.testing.assert_close(
                unet(*call).sample, by_tomesd(small_unet(), 0.5, call), atol=1e-5, rtol=0
            )
    merging = [row for row in summary(unet, show=False)["blocks"] if row["note"] != "left alone"]
    assert [row["block"].split(".")[:2] for row in merging] == [
        ["down_blocks", "0"],
        ["up_blocks", "3"],
        ["up_blocks", "3"],
    ]
    assert all((row["selected"], row["merged"]) == (3, 128) for row in merging)


def test_preset_tomesd_says_where_the_package_would_silently_do_nothing(small_unet):
    like_sdxl = small_unet(
        block_out_channels=(16, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    with pytest.raises(ValueError, match="would merge nothing"):
        apply(like_sdxl, config=preset("tomesd"))


@pytest.mark.parametrize("asked", [{"ratio": 0.8}, {"overrides": {"mid_block.*": 0.9}}])
def test_more_than_cells_allow_is_refused_not_capped(asked):
    with pytest.raises(ValueError, match=r"at most 0\.75"):
        MergeConfig(method="tome", **asked)


def test_a_grid_too_narrow_for_cells_is_refused():
    with pytest.raises(ValueError, match="smaller ratio"):
        cell_layout(((1, 9),), 0.75, None)


def test_unmerge_kinds_of_toma_are_refused():
    with pytest.raises(ValueError, match="leave unmerge at 'transpose'"):
        MergeConfig(method="tome", unmerge="pinv")


@given(grids, st.one_of(st.none(), st.tuples(st.integers(), st.integers(0, 99))))
def test_one_destination_in_every_whole_cell(grid, seed):
    layout = cell_layout((grid,), 0.5, seed)
    rows, columns = layout.destinations // grid[1], layout.destinations % grid[1]
    cells = list(zip((rows // 2).tolist(), (columns // 2).tolist(), strict=True))
    assert sorted(cells) == [(y, x) for y in range(grid[0] // 2) for x in range(grid[1] // 2)]
    if seed is None:
        assert not (rows % 2).any()
        assert not (columns % 2).any()
    every = torch.cat([layout.destinations, layout.sources]).sort().values
    assert torch.equal(every, torch.arange(grid[0] * grid[1]))


def test_random_destinations_use_all_places_of_a_cell_and_change_with_the_step():
    draws = [cell_layout(((32, 32),), 0.5, (7, step)).destinations for step in (0, 1)]
    places = [(d // 32 % 2 * 2 + d % 2).bincount(minlength=4) for d in draws]
    assert all(count > 256 / 8 for place in places for count in place)
    assert not torch.equal(*draws)


@settings(max_examples=30, deadline=None)
@given(grids, st.floats(0.05, 0.75), st.integers(0, 1000), st.integers(1, 3))
def test_the_plan_is_the_definition(grid, ratio, seed, batch):
    """Token by token: the r best sources join their best destination; a mean there, copies on the way."""
    tokens = grid[0] * grid[1]
    x = torch.randn(batch, tokens, 8, generator=torch.Generator().manual_seed(seed))
    method = ToMe(MergeConfig(method="tome", ratio=ratio))
    layout = method.layout((grid,), ratio, CPU)
    plan = method.plan(x, layout)
    count = int(tokens * ratio)
    assert layout.kept == tokens - count
    assert plan.merge(x).shape == (batch, layout.kept, 8)
    back = plan.unmerge(plan.merge(x))
    destinations, sources = layout.destinations.tolist(), layout.sources.tolist()
    for element in range(batch):
        similarity = torch.cosine_similarity(x[element][:, None], x[element][None], dim=-1)
        best = {s: max(destinations, key=lambda d: similarity[s, d]) for s in sources}
        joining = sorted(sources, key=lambda s: -similarity[s, best[s]])[:count]
        for token in range(tokens):
            home = best[token] if token in joining else token
            cluster = [home] + [s for s in joining if best[s] == home]
            torch.testing.assert_close(back[element, token], x[element, cluster].mean(0))
            slot = plan.positions[element].tolist().index(home)
            assert plan.sizes[element, slot] == len(cluster)


def test_gradients_flow_through_merge_and_unmerge():
    x = torch.randn(2, 16, 4, requires_grad=True)
    method = ToMe(MergeConfig(method="tome"))
    plan = method.plan(x, method.layout(((4, 4),), 0.5, CPU))
    plan.unmerge(plan.merge(x)).sum().backward()
    torch.testing.assert_close(x.grad.sum(), torch.tensor(2.0 * 16 * 4))
