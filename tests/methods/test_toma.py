import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tomadiff.config import MergeConfig
from tomadiff.methods.toma import ToMA

SCOPES = [
    {},
    {"merge_region": "global"},
    {"select_region": "global", "merge_region": "global"},
    {"select_region": "stripe", "select_size": 2, "merge_region": "stripe", "merge_size": 4},
    {"select_size": 3, "merge_size": 7},
]


def plan_for(x, grid, ratio=0.5, **settings):
    method = ToMA(MergeConfig(**settings))
    return method.plan(x, method.layout((grid,), ratio, x.device))


@pytest.mark.parametrize("scope", SCOPES)
@given(
    st.integers(1, 17),
    st.integers(1, 17),
    st.floats(0, 0.95),
    st.integers(1, 3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(0, 10**6),
)
def test_a_constant_field_is_preserved(scope, height, width, ratio, batch, dtype, seed):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, height * width, 6, generator=random).to(dtype)
    plan = plan_for(x, (height, width), ratio, **scope)
    field = torch.full_like(x, 1.5)
    merged = plan.merge(field)
    assert merged.shape == (batch, plan.layout.kept, 6)
    assert merged.dtype == dtype
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert torch.allclose(plan.unmerge(merged), field, atol=tolerance)
    assert torch.allclose(plan.sizes.float().sum(1), torch.tensor(float(height * width)), rtol=1e-2)


@pytest.mark.parametrize("scope", SCOPES)
@given(st.integers(4, 16), st.integers(4, 16), st.integers(1, 3), st.integers(1, 3), st.integers(0, 10**6))
def test_groups_of_equal_tokens_come_back_unchanged(scope, height, width, batch, kinds, seed):
    """No more kinds of token than destinations in any region: nothing is lost."""
    random = torch.Generator().manual_seed(seed)
    palette = torch.eye(8)[torch.randperm(8, generator=random)[:kinds]] * 3
    x = palette[torch.randint(kinds, (batch, height * width), generator=random)]
    plan = plan_for(x, (height, width), 0.5, tau=0.02, **scope)
    fewest = min(cell.keep for group in plan.layout.groups for cell in group.cells)
    if fewest >= kinds:
        assert torch.allclose(plan.unmerge(plan.merge(x)), x, atol=1e-5)


@given(st.integers(0, 10**6), st.floats(0.1, 0.9), st.sampled_from(["transpose", "ridge"]))
def test_shuffling_the_tokens_of_a_region_shuffles_the_plan(seed, ratio, unmerge):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 24, 16, generator=random)
    shuffle = torch.randperm(24, generator=random)
    kwargs = {"select_region": "global", "merge_region": "global", "unmerge": unmerge}
    plan, shuffled = plan_for(x, (4, 6), ratio, **kwargs), plan_for(x[:, shuffle], (4, 6), ratio, **kwargs)
    if sorted(shuffle[shuffled.positions[0]].tolist()) != sorted(plan.positions[0].tolist()):
        return  # a tie: two tokens that gain the same, and the earlier one was taken
    back, back_shuffled = plan.unmerge(plan.merge(x)), shuffled.unmerge(shuffled.merge(x[:, shuffle]))
    assert torch.allclose(back[:, shuffle], back_shuffled, atol=1e-4)


def test_shuffling_changes_the_set_of_destinations_by_ties_only():
    """The test above leaves out ties; they are few."""
    same = 0
    for seed in range(40):
        random = torch.Generator().manual_seed(seed)
        x, shuffle = torch.randn(1, 24, 16, generator=random), torch.randperm(24, generator=random)
        kwargs = {"select_region": "global", "merge_region": "global"}
        plan, shuffled = plan_for(x, (4, 6), **kwargs), plan_for(x[:, shuffle], (4, 6), **kwargs)
        same += sorted(shuffle[shuffled.positions[0]].tolist()) == sorted(plan.positions[0].tolist())
    assert same >= 20


@pytest.mark.parametrize("scope", SCOPES)
def test_every_element_of_a_batch_has_its_own_plan(scope):
    x = torch.randn(3, 99, 8)
    together = plan_for(x, (9, 11), **scope)
    merged = together.merge(x)
    for i in range(3):
        alone = plan_for(x[i : i + 1], (9, 11), **scope)
        assert torch.equal(together.positions[i], alone.positions[0])
        assert torch.allclose(merged[i], alone.merge(x[i : i + 1])[0], atol=1e-6)
    assert not torch.equal(together.positions[0], together.positions[1])


def test_positions_are_row_major_indices_of_the_destinations():
    grid = (16, 24)
    x = torch.randn(2, grid[0] * grid[1], 8)
    method = ToMA(MergeConfig(tau=1e-3))
    layout = method.layout((grid,), 0.5, x.device)
    plan = method.plan(layout.arrange(x), layout)
    chosen = torch.stack([tokens[where] for tokens, where in zip(x, plan.positions, strict=True)])
    similarity = torch.nn.functional.cosine_similarity(plan.merge(layout.arrange(x)), chosen, dim=-1)
    assert similarity.mean() > 0.7  # a merged token is a mean around its destination, not some other token
    assert plan.positions.max() < x.shape[1]


def test_as_many_destinations_as_tokens_is_the_identity():
    x = torch.randn(2, 64, 32)
    plan = plan_for(x, (8, 8), ratio=0.0, tau=1e-3)
    assert torch.allclose(plan.unmerge(plan.merge(x)), x, atol=1e-5)


def test_refresh_keeps_the_destinations_and_makes_new_weights():
    x, y = torch.randn(1, 64, 8), torch.randn(1, 64, 8)
    plan = plan_for(x, (8, 8))
    fresh = plan.refresh(y)
    assert torch.equal(fresh.positions, plan.positions)
    assert not torch.equal(fresh.groups[0].merge, plan.groups[0].merge)


def test_gradients_flow_through_merge_and_unmerge():
    x = torch.randn(2, 64, 8, requires_grad=True)
    plan = plan_for(x, (8, 8))
    plan.unmerge(plan.merge(x) ** 2).sum().backward()
    assert (x.grad.abs().sum(-1) > 0).all()


def test_facility_location_keeps_more_than_arbitrary_destinations():
    """On smooth fields, as latents are: what the method's choice of destinations is for."""
    noise = torch.randn(4, 8, 12, 12)
    smooth = torch.nn.functional.interpolate(noise, (24, 24), mode="bicubic").flatten(2).mT
    method = ToMA(MergeConfig(select_region="global", merge_region="global", tau=0.01))
    layout = method.layout(((24, 24),), 0.75, smooth.device)
    ours = method.plan(smooth, layout)
    arbitrary = method.weigh(smooth, layout, (torch.stack([torch.randperm(576)[:144] for _ in range(4)]),))

    def lost(plan):
        return (plan.unmerge(plan.merge(smooth)) - smooth).square().mean()

    assert lost(ours) < 0.8 * lost(arbitrary)
