"""Bipartite soft matching: some tokens are destinations; the others that are most like one of them join it.

N tokens, of which D are kept: the sources that stay, then all destinations. `parents` says of every token
which of the D it is part of. The D tokens of all B elements lie one after the other in `rows`, so that
merging is one addition by rows and unmerging one copy by rows, whatever the batch.
"""

from __future__ import annotations

import torch


def match(
    x: torch.Tensor, destinations: torch.Tensor, sources: torch.Tensor, merged: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the `merged` sources that are most like a destination, by cosine, to the destination they are most
    like.

    x: (B, N, C), destinations: (M,), sources: (N - M,) -> parents: (B, N) in 0..D-1, kept: (B, D) in 0..N-1

    >>> x = torch.tensor([[[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.5, 0.5]]])
    >>> parents, kept = match(x, torch.tensor([0, 2]), torch.tensor([1, 3]), merged=1)
    >>> parents.tolist(), kept.tolist()
    ([[1, 1, 2, 0]], [[3, 0, 2]])
    """
    unit = torch.nn.functional.normalize(x.float(), dim=-1)
    similarity, nearest = (unit[:, sources] @ unit[:, destinations].mT).max(-1)
    # Stable, so that equal similarities are decided alike everywhere.
    order = similarity.argsort(dim=-1, descending=True, stable=True)
    joining, staying = order[:, :merged], order[:, merged:]
    first, batch = staying.shape[1], x.shape[0]
    place = torch.arange(first + destinations.shape[0], device=x.device).expand(batch, -1)
    parents = torch.empty(x.shape[:2], dtype=torch.long, device=x.device)
    parents[:, destinations] = place[:, first:]
    parents.scatter_(1, sources[staying], place[:, :first])
    parents.scatter_(1, sources[joining], first + nearest.gather(1, joining))
    return parents, torch.cat([sources[staying], destinations.expand(batch, -1)], dim=1)


def rows_of(index: torch.Tensor, length: int) -> torch.Tensor:
    """index: (B, T) into `length` tokens of each element -> (B * T,) into the tokens of all elements.

    >>> rows_of(torch.tensor([[0, 2], [1, 0]]), 3).tolist()
    [0, 2, 4, 3]
    """
    return (index + length * torch.arange(index.shape[0], device=index.device)[:, None]).flatten()


def take_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x: (B, L, C), rows: (B * T,) -> (B, T, C)

    `index_select` on flat rows: a `gather` with its index widened to C copies ten times slower on CPUs.
    """
    return x.flatten(0, 1).index_select(0, rows).view(x.shape[0], -1, x.shape[2])


def mean_by_rows(x: torch.Tensor, rows: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """x: (B, N, C), rows: (B * N,) parents, sizes: (B, D) -> (B, D, C) the mean of each cluster.

    >>> x = torch.tensor([[[1.0], [3.0], [7.0]]])
    >>> mean_by_rows(x, torch.tensor([1, 1, 0]), torch.tensor([[1.0, 2.0]])).tolist()
    [[[7.0], [2.0]]]
    """
    total = x.new_zeros(sizes.numel(), x.shape[-1]).index_add(0, rows, x.flatten(0, 1))
    return total.view(*sizes.shape, -1) / sizes.unsqueeze(-1)


def largest_by_rows(x: torch.Tensor, rows: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """x: (B, N) not negative, rows: (B * N,) parents, sizes: (B, D) -> (B, D) the largest of each cluster.

    >>> largest_by_rows(torch.tensor([[1.0, 3.0, 7.0]]), torch.tensor([1, 1, 0]), torch.tensor([[1.0, 2.0]]))
    tensor([[7., 3.]])
    """
    return x.new_zeros(sizes.numel()).scatter_reduce(0, rows, x.flatten(), "amax").view(sizes.shape)
