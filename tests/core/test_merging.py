import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tomadiff.core.merging import (
    NORMALISATIONS,
    UNMERGES,
    assignment,
    cluster_sizes,
    cosine_similarity,
    merge_map,
    unmerge_map,
)


def maps(x, count, tau=0.1, normalise="destinations", unmerge="transpose", ridge=0.1):
    similarity = cosine_similarity(x[:, :count], x)
    weights = assignment(similarity, tau)
    merge = merge_map(similarity, weights, tau, normalise)
    return weights, merge, unmerge_map(weights, merge, unmerge, ridge, x)


@pytest.mark.parametrize("normalise", NORMALISATIONS)
@pytest.mark.parametrize("unmerge", UNMERGES)
@given(st.integers(1, 20), st.floats(0.05, 1), st.sampled_from([1e-3, 0.03, 0.3]), st.integers(0, 10**6))
def test_rows_sum_to_one_and_a_constant_field_is_preserved(normalise, unmerge, length, share, tau, seed):
    x = torch.randn(2, length, 8, generator=torch.Generator().manual_seed(seed))
    count = max(1, round(share * length))
    weights, merge, back = maps(x, count, tau, normalise, unmerge)
    assert torch.allclose(weights.sum(-2), torch.ones(2, length), atol=1e-5)
    assert torch.allclose(merge.sum(-1), torch.ones(2, count), atol=1e-5)
    assert torch.allclose(back.sum(-1), torch.ones(2, length), atol=1e-3 if unmerge == "pinv" else 1e-5)
    assert torch.allclose(cluster_sizes(weights).sum(-1), torch.full((2,), float(length)), rtol=1e-4)
    field = torch.full((2, length, 3), 2.5)
    assert torch.allclose(back @ (merge @ field), field, atol=1e-3 if unmerge == "pinv" else 1e-5)


def test_a_small_tau_assigns_every_token_to_its_nearest_destination():
    x = torch.randn(1, 30, 8)
    weights, _, _ = maps(x, 10, tau=1e-3)
    nearest = cosine_similarity(x[:, :10], x).argmax(-2)
    assert torch.equal(weights.argmax(-2), nearest)
    assert weights.amax(-2).min() > 0.5


def test_no_weight_is_subnormal():
    weights, merge, _ = maps(torch.randn(4, 64, 16), 32, tau=1e-2)
    assert weights[weights > 0].min() >= 1e-10
    assert merge[merge > 0].min() >= 1e-10 / 64  # a row is divided by at most the number of tokens


def test_pinv_solves_what_the_transpose_only_approximates():
    x = torch.randn(1, 24, 8)
    for unmerge, exact in (("pinv", True), ("transpose", False)):
        _, merge, back = maps(x, 12, unmerge=unmerge)
        assert torch.allclose(merge @ back, torch.eye(12).expand(1, 12, 12), atol=1e-3) == exact


def test_ridge_lies_between_pinv_and_transpose():
    x = torch.randn(2, 24, 8)
    _, _, pinv = maps(x, 12, unmerge="pinv")
    _, _, transpose = maps(x, 12, unmerge="transpose")
    _, _, weak = maps(x, 12, unmerge="ridge", ridge=1e-6)
    _, _, strong = maps(x, 12, unmerge="ridge", ridge=1e4)
    assert torch.allclose(weak, pinv, atol=5e-3)
    assert torch.allclose(strong, transpose, atol=1e-3)


def test_ridge_is_the_minimum_it_claims_to_be():
    x = torch.randn(1, 16, 8)
    weights, merge, _ = maps(x, 8)
    gram, eye = merge @ merge.mT, torch.eye(8)
    solution = torch.linalg.solve(gram + 0.1 * eye, merge + 0.1 * weights).mT

    def loss(back):
        return (back @ merge - torch.eye(16)).square().sum() + 0.1 * (back - weights.mT).square().sum()

    assert all(loss(solution) <= loss(solution + 1e-2 * torch.randn_like(solution)) for _ in range(10))


def test_fit_gives_back_tokens_that_lie_between_the_merged_ones():
    """Tokens along a line: copies are off by half a step, mixtures of the merged ones are not."""
    place = torch.linspace(0, 1, 16)[None, :, None]
    x = torch.cat([1 - place, place], dim=-1)
    errors = {}
    for unmerge in ("transpose", "fit"):
        similarity = cosine_similarity(x[:, ::3], x)
        weights = assignment(similarity, 1e-3)
        merge = merge_map(similarity, weights, 1e-3, "destinations")
        back = unmerge_map(weights, merge, unmerge, 1e-4, x)
        errors[unmerge] = (back @ (merge @ x) - x).square().mean().item()
    assert errors["fit"] < 0.05 * errors["transpose"]


def test_fit_holds_on_to_copies_with_a_large_ridge_and_survives_equal_tokens():
    x = torch.randn(2, 24, 8)
    weights, _, strong = maps(x, 12, unmerge="fit", ridge=1e5)
    assert torch.allclose(strong, weights.mT, atol=1e-3)
    _, merge, back = maps(torch.ones(1, 24, 8), 12, unmerge="fit")
    assert torch.allclose(back @ (merge @ torch.ones(1, 24, 8)), torch.ones(1, 24, 8), atol=1e-5)


def test_similarity_is_float32_whatever_comes_in():
    x = torch.randn(1, 4, 8).to(torch.float16)
    assert cosine_similarity(x, x).dtype == torch.float32


def test_unknown_names():
    x = torch.randn(1, 4, 8)
    with pytest.raises(ValueError, match="destinations, tokens"):
        maps(x, 2, normalise="rows")
    with pytest.raises(ValueError, match="transpose, pinv, ridge"):
        maps(x, 2, unmerge="magic")
