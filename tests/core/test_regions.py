import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tomadiff.core.regions import make_layout, region_shape

SIDES = st.integers(1, 40)
REGION = st.tuples(st.sampled_from(["tile", "stripe", "global"]), st.integers(1, 50))
RATIO = st.floats(0, 0.99)


@given(SIDES, SIDES, RATIO, REGION)
@example(270, 480, 0.5, ("tile", 8))
@example(1, 1, 0.99, ("tile", 8))
@example(67, 101, 0.3, ("tile", 7))
@example(135, 240, 0.5, ("stripe", 3))
def test_number_of_destinations(height, width, ratio, region):
    layout = make_layout(((height, width),), ratio, region, region)
    assert layout.tokens == height * width
    assert all(1 <= cell.keep <= cell.size for group in layout.groups for cell in group.cells)
    target = round((1 - ratio) * height * width)
    if layout.selection_regions == 1:
        assert layout.kept == max(target, 1)
    assert abs(layout.kept - target) <= layout.selection_regions


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("grid", [(64, 64), (32, 32), (128, 64), (8, 8)])
def test_number_of_destinations_is_exact_where_tiles_allow_it(grid, ratio):
    layout = make_layout((grid,), ratio, ("tile", 8), ("tile", 8))
    assert layout.kept == round((1 - ratio) * grid[0] * grid[1])


@given(SIDES, SIDES, REGION)
def test_order_is_a_permutation_and_restore_undoes_arrange(height, width, region):
    layout = make_layout(((height, width),), 0.5, region, region)
    x = torch.arange(height * width, dtype=torch.float32).reshape(1, -1, 1)
    arranged = layout.arrange(x)
    assert sorted(arranged.flatten().tolist()) == x.flatten().tolist()
    assert torch.equal(layout.restore(arranged), x)


@given(SIDES, SIDES, st.integers(1, 12))
def test_a_region_is_a_rectangle_no_larger_than_asked(height, width, size):
    layout = make_layout(((height, width),), 0.5, ("tile", size), ("tile", size))
    index = torch.arange(height * width) if layout.order is None else layout.order
    start = 0
    for group in layout.groups:
        for region in index[start : start + group.count * group.size].view(group.count, group.size):
            rows, columns = region // width, region % width
            assert rows.max() - rows.min() < size
            assert columns.max() - columns.min() < size
            area = (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)
            assert area == region.numel() == region.unique().numel()
        start += group.count * group.size


def test_tiles_of_a_divisible_grid_are_all_alike():
    layout = make_layout(((64, 64),), 0.5, ("tile", 8), ("tile", 8))
    assert len(layout.groups) == 1
    assert layout.merge_regions == 64


def test_selection_nests_in_merge_regions():
    layout = make_layout(((24, 24),), 0.5, ("tile", 4), ("tile", 12))
    assert (layout.merge_regions, layout.selection_regions) == (4, 36)
    first = layout.order[: 12 * 12].view(9, 16)  # the nine cells of the first merge region
    rows, columns = first // 24, first % 24
    assert int(rows.max()) < 12
    assert int(columns.max()) < 12
    assert ((rows.amax(1) - rows.amin(1)) == 3).all()


@pytest.mark.parametrize(
    ("grid", "tile"), [((64, 64), 16), ((32, 32), 16), ((24, 24), 9), ((16, 16), 4), ((4, 4), 4)]
)
def test_a_size_below_one_is_a_share_of_the_grid(grid, tile):
    layout = make_layout((grid,), 0.5, ("tile", 0.125), ("tile", 0.125))
    assert {group.size for group in layout.groups} == {tile}
    # Also of cells inside regions: their size is a share of the grid, not of the region.
    nested = make_layout((grid,), 0.5, ("tile", 0.125), ("global", 1))
    assert {cell.size for group in nested.groups for cell in group.cells} == {tile}


def test_regions_do_not_span_two_grids():
    layout = make_layout(((8, 8), (4, 6)), 0.5, ("global", 1), ("global", 1))
    assert layout.tokens == 64 + 24
    assert [group.size for group in layout.groups] == [64, 24]


def test_global_and_stripes_of_equal_height_need_no_reordering():
    assert make_layout(((6, 10),), 0.5, ("global", 1), ("global", 1)).order is None
    assert make_layout(((6, 10),), 0.5, ("stripe", 2), ("stripe", 2)).order is None


def test_a_layout_born_in_inference_mode_serves_training():
    with torch.inference_mode():
        layout = make_layout(((4, 12),), 0.123, ("tile", 4), ("tile", 4))
    x = torch.randn(1, 48, 2, requires_grad=True)
    layout.restore(layout.arrange(x)).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_bad_input():
    with pytest.raises(ValueError, match="positive height and width"):
        make_layout(((0, 5),), 0.5, ("tile", 8), ("tile", 8))
    with pytest.raises(ValueError, match="use one of tile, stripe, global"):
        region_shape("hexagon", 8, (4, 4))
