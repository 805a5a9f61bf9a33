"""Ways that are timed against each other compute the same."""

from __future__ import annotations

import torch

from tomadiff.bench import tried


def test_sizes_weigh_the_same_as_a_mask_and_as_a_dimension():
    mask, without, dimension = (run() for run in tried.attention(32).values())
    torch.testing.assert_close(dimension[..., : mask.shape[-1]], mask)
    assert (without - mask).abs().max() > 1e-3


def test_unmerging_in_one_call_is_the_same_as_in_two():
    in_place, two, one, _ = (run() for run in tried.unmerging(0.5).values())
    torch.testing.assert_close(one, two)
    assert torch.equal(in_place, two)


def test_both_orders_are_the_same():
    index, copy = (run() for run in tried.ordering().values())
    assert torch.equal(index, copy)


def test_ways_take_turns_and_the_first_round_is_not_counted():
    calls: list[str] = []
    ways = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    taken = tried.in_turns(ways, rounds=2)
    assert calls == ["a", "b"] * 3
    assert {name: len(seconds) for name, seconds in taken.items()} == {"a": 2, "b": 2}
