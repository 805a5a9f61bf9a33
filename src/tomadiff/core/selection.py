"""Facility location: which tokens of a region stand for the rest."""

from __future__ import annotations

import torch

# What an earlier token is preferred by, per place: more than rounding in float32, less than any gain that
# matters.
TIE_BREAK = 1e-6


@torch.library.custom_op("tomadiff::facility_location", mutates_args=())
def facility_location(similarity: torch.Tensor, count: int) -> torch.Tensor:
    """Greedy maximiser of f(A) = sum_i max_{a in A} S[i, a], for every region at once.

    similarity: (R, L, L) symmetric, in [-1, 1] -> (R, count) distinct indices into L, in the order they were
    picked

    The first pick is the token most similar to all others. f is monotone submodular, so f(greedy) is at least
    (1 - 1/e) of the best f. Ties go to the earlier token: two tokens that are each other's nearest gain
    exactly the same, and rounding must not decide between them, or a compiled model would choose other
    tokens than an eager one. A custom operator, so that `torch.compile` sees one node instead of `count`
    unrolled picks.

    >>> x = torch.nn.functional.normalize(torch.tensor([[[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]]), dim=-1)
    >>> facility_location(x @ x.mT, 2).tolist()
    [[1, 2]]
    """
    regions, length, _ = similarity.shape
    positions = torch.arange(length, device=similarity.device)
    preference = TIE_BREAK * positions
    best = similarity.new_full((regions, 1, length), -1.0)
    taken = torch.zeros(regions, length, dtype=torch.bool, device=similarity.device)
    offers = torch.empty_like(similarity)  # one for all picks: new memory costs more than the sums
    picks = []
    for _ in range(count):
        # S is symmetric: row a of `similarity` is what candidate a offers to every token.
        gain = torch.sub(similarity, best, out=offers).clamp_min_(0).sum(-1).sub_(preference)
        pick = gain.masked_fill_(taken, -torch.inf).argmax(-1, keepdim=True)
        chosen = positions == pick
        taken |= chosen
        best = torch.maximum(best, chosen.to(similarity.dtype).unsqueeze(1) @ similarity)
        picks.append(pick)
    return torch.cat(picks, dim=-1)


@facility_location.register_fake
def _(similarity: torch.Tensor, count: int) -> torch.Tensor:
    return similarity.new_empty((similarity.shape[0], count), dtype=torch.long)


def coverage(similarity: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
    """f(A) of each region. similarity: (R, L, L), picks: (R, K) -> (R,)

    >>> coverage(torch.eye(3)[None], torch.tensor([[0, 2]])).tolist()
    [2.0]
    """
    return (one_hot(picks, similarity.shape[-1], similarity.dtype) @ similarity).amax(-2).sum(-1)


def one_hot(picks: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """picks: (..., K) -> (..., K, length) rows that pick by matrix product, on any device.

    >>> one_hot(torch.tensor([2, 0]), 3, torch.float32).tolist()
    [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    return (picks.unsqueeze(-1) == torch.arange(length, device=picks.device)).to(dtype)
