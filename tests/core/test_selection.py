import itertools
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tomadiff.core.merging import cosine_similarity
from tomadiff.core.selection import TIE_BREAK, coverage, facility_location


def similarity_of(x):
    return cosine_similarity(x, x)


def reference(similarity, count):
    """Greedy facility location in plain Python; None if a pick was too close to call."""
    rows = similarity.double().tolist()
    length = len(rows)
    best, picks = [-1.0] * length, []
    for _ in range(count):
        gains = {
            a: sum(max(0.0, rows[i][a] - best[i]) for i in range(length))
            for a in range(length)
            if a not in picks
        }
        first, *others = sorted(gains.values(), reverse=True)
        if others and first - others[0] < 2 * TIE_BREAK * length:
            return None
        pick = max(gains, key=gains.get)
        picks.append(pick)
        best = [max(best[i], rows[i][pick]) for i in range(length)]
    return picks


@given(st.integers(2, 24), st.integers(2, 8), st.floats(0.1, 1.0), st.integers(0, 10**6))
def test_picks_equal_a_plain_reference_on_random_tokens(length, width, share, seed):
    similarity = similarity_of(torch.randn(1, length, width, generator=torch.Generator().manual_seed(seed)))
    count = max(1, round(share * length / 2))  # late picks among near-equal tokens are ties
    expected = reference(similarity[0], count)
    assume(expected is not None)
    assert facility_location(similarity, count)[0].tolist() == expected


def test_picks_equal_a_plain_reference_on_structured_tokens():
    """Clusters of different size and spread, as in a picture with flat, smooth and detailed parts."""
    centres = torch.randn(5, 16) * 3
    sizes = (20, 12, 8, 5, 3)
    x = torch.cat(
        [c + 0.1 * (i + 1) * torch.randn(n, 16) for i, (c, n) in enumerate(zip(centres, sizes, strict=True))]
    )
    similarity = similarity_of(x[None])
    expected = reference(similarity[0], 5)
    assert expected is not None
    assert facility_location(similarity, 5)[0].tolist() == expected
    owner = torch.repeat_interleave(torch.arange(5), torch.tensor(sizes))
    assert sorted(owner[expected].tolist()) == [0, 1, 2, 3, 4]  # one from every cluster


@given(st.integers(3, 9), st.integers(1, 4), st.integers(0, 10**6))
def test_greedy_is_at_least_1_minus_1_over_e_of_the_best(length, count, seed):
    assume(count < length)
    # f counts from -1, the value of the empty set, which makes it non-negative, monotone and submodular.
    similarity = similarity_of(
        torch.randn(1, length, 3, generator=torch.Generator().manual_seed(seed))
    ).double()
    value = lambda picks: float(coverage(similarity, torch.tensor([picks]))) + length  # noqa: E731
    best = max(value(list(picks)) for picks in itertools.combinations(range(length), count))
    greedy = value(facility_location(similarity.float(), count)[0].tolist())
    assert greedy >= (1 - 1 / math.e) * best - 1e-6


def test_regions_are_independent():
    x = torch.randn(6, 20, 8)
    together = facility_location(similarity_of(x), 7)
    alone = torch.cat([facility_location(similarity_of(region[None]), 7) for region in x])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("count", [1, 5, 12])
def test_picks_are_distinct_even_among_equal_tokens(count):
    picks = facility_location(torch.ones(2, 12, 12), count)
    assert all(len(set(row)) == count for row in picks.tolist())


def test_rounding_does_not_decide_ties():
    similarity = similarity_of(torch.randn(8, 64, 64))
    noisy = similarity + 2e-7 * torch.randn_like(similarity)
    assert torch.equal(facility_location(similarity, 32), facility_location(noisy, 32))


def test_no_random_numbers_are_drawn():
    before = torch.random.get_rng_state()
    facility_location(similarity_of(torch.ones(1, 9, 3)), 4)
    assert torch.equal(torch.random.get_rng_state(), before)
