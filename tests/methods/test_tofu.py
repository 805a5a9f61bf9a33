"""ToFu: ToMe's matching, with a branch that drops and a branch that keeps norms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tomadiff import MergeConfig, apply, merged, preset
from tomadiff.methods.tofu import MlerpPlan, PrunePlan, ToFu
from tomadiff.methods.tome import ToMe
from tomadiff.patching.apply import session_of

CPU = torch.device("cpu")


def plans(x: torch.Tensor, grid: tuple[int, int], ratio: float):
    """The plans of ToMe, of ToFu where it prunes and of ToFu where it merges."""
    tome, tofu = ToMe(MergeConfig(method="tome")), ToFu(MergeConfig(method="tofu"))
    layouts = [tofu.layout((grid,), ratio, CPU, variant=variant) for variant in ("prune", "merge")]
    return tome.plan(x, tome.layout((grid,), ratio, CPU)), *(tofu.plan(x, layout) for layout in layouts)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 9), st.integers(2, 9), st.floats(0.05, 0.75), st.integers(0, 1000))
def test_both_branches_match_as_tome_does(height, width, ratio, seed):
    x = torch.randn(2, height * width, 8, generator=torch.Generator().manual_seed(seed))
    tome, prune, merge = plans(x, (height, width), ratio)
    for plan in (prune, merge):
        assert torch.equal(plan.positions, tome.positions)
        assert torch.equal(plan.sizes, tome.sizes)
        y = torch.randn(2, tome.sizes.shape[1], 8)
        assert torch.equal(plan.unmerge(y), tome.unmerge(y))


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 9), st.integers(2, 9), st.floats(0.05, 0.75), st.integers(0, 1000))
def test_pruning_takes_tomes_destinations_unchanged(height, width, ratio, seed):
    x = torch.randn(2, height * width, 8, generator=torch.Generator().manual_seed(seed))
    tome, prune, _ = plans(x, (height, width), ratio)
    assert isinstance(prune, PrunePlan)
    kept = torch.stack([x[b, tome.positions[b]] for b in range(2)])
    assert torch.equal(prune.merge(x), kept)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 9), st.integers(2, 9), st.floats(0.05, 0.75), st.integers(0, 1000))
def test_merging_keeps_the_largest_norm_and_the_direction_of_the_mean(height, width, ratio, seed):
    x = torch.randn(2, height * width, 8, generator=torch.Generator().manual_seed(seed))
    tome, _, merge = plans(x, (height, width), ratio)
    assert isinstance(merge, MlerpPlan)
    mean, got = tome.merge(x), merge.merge(x)
    torch.testing.assert_close(
        torch.cosine_similarity(mean, got, dim=-1), torch.ones(got.shape[:2]), atol=1e-4, rtol=0
    )
    norms = x.norm(dim=-1)
    for b in range(2):
        owner = tome.unmerge(torch.arange(mean.shape[1]).float().expand(2, -1)[..., None])[b, :, 0]
        largest = torch.stack([norms[b, owner == d].max() for d in range(mean.shape[1])])
        torch.testing.assert_close(got[b].norm(dim=-1), largest)


def test_tokens_of_one_norm_keep_it_and_a_plain_mean_does_not():
    x = torch.nn.functional.normalize(torch.randn(2, 64, 16), dim=-1)
    tome, _, merge = plans(x, (8, 8), 0.5)
    torch.testing.assert_close(merge.merge(x).norm(dim=-1), torch.ones(2, 32))
    assert tome.merge(x).norm(dim=-1).min() < 0.9


def test_first_blocks_prune_and_the_others_merge_also_when_plans_are_shared(unet, inputs):
    for share in ("kind", "stack", "block"):
        apply(unet, config=preset("tofu", share=share))
        session = session_of(unet)
        variants = {place.block.name: session.groups[place.group].variant for place in session.places}
        assert list(variants.values()) == ["prune"] * 5 + ["merge"] * 5
        call = inputs(16, 16)
        with torch.no_grad():
            unet(*call)
        kinds = {type(plan) for plan in session.clock.current.plans.values()}
        assert kinds == {PrunePlan, MlerpPlan}


@torch.no_grad()
def test_prune_sets_how_many_blocks_prune(unet, inputs):
    call = inputs(16, 16)
    results = []
    for share in (0.0, 0.5, 1.0):
        with merged(unet, config=preset("tofu", prune=share)):
            results.append(unet(*call).sample)
    assert not torch.allclose(results[0], results[1])
    assert not torch.allclose(results[1], results[2])
    with pytest.raises(ValueError, match="share of the blocks"):
        MergeConfig(method="tofu", prune=1.5)
