"""Merge and unmerge as linear maps, built from the similarity of destinations to tokens.

K destinations, L tokens of one region. `assignment` is the attention of the method with the softmax taken
over the destinations: every token hands out a weight of 1. The merge map averages with it, the unmerge map
goes back.
"""

from __future__ import annotations

import torch

NORMALISATIONS = ("destinations", "tokens")
UNMERGES = ("transpose", "pinv", "ridge", "fit")

# Far below anything that changes a picture, far above the subnormal numbers that CPUs multiply 50 times
# slower.
NEGLIGIBLE = 1e-10


def cosine_similarity(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a: (..., K, C), b: (..., L, C) -> (..., K, L) in float32.

    >>> cosine_similarity(torch.tensor([[2.0, 0.0]]), torch.tensor([[3.0, 0.0], [0.0, 1.0]])).tolist()
    [[1.0, 0.0]]
    """
    return _unit_vectors(a) @ _unit_vectors(b).mT


def cosines(x: torch.Tensor) -> torch.Tensor:
    """x: (..., L, C) -> (..., L, L) in float32, of every token to every other.

    The products are divided, not the tokens: there are fewer of them.

    >>> cosines(torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0]])).tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
    """
    products = x.float() @ x.float().mT
    norms = products.diagonal(dim1=-2, dim2=-1).sqrt().clamp_min(1e-12)
    return products / norms.unsqueeze(-1) / norms.unsqueeze(-2)


def _unit_vectors(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(x.float(), dim=-1)


def assignment(similarity: torch.Tensor, tau: float) -> torch.Tensor:
    """similarity: (..., K, L) -> (..., K, L), every column (token) sums to 1.

    >>> assignment(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), tau=0.01).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    return _without_negligible((similarity / tau).softmax(-2))


def merge_map(similarity: torch.Tensor, weights: torch.Tensor, tau: float, normalise: str) -> torch.Tensor:
    """similarity and weights (its assignment): (..., K, L) -> (..., K, L), every row (merged token) sums to
    1.

    `destinations`: the rows of the assignment, each divided by its sum; a merged token is the mean of its
    cluster.
    `tokens`: softmax over the tokens instead, plain attention with the destinations as queries.
    """
    if normalise == "destinations":
        return weights / weights.sum(-1, keepdim=True)
    if normalise == "tokens":
        return _without_negligible((similarity / tau).softmax(-1))
    raise ValueError(f"unknown normalisation {normalise!r}; use one of {', '.join(NORMALISATIONS)}")


def unmerge_map(
    weights: torch.Tensor, merge: torch.Tensor, kind: str, ridge: float, tokens: torch.Tensor
) -> torch.Tensor:
    """weights (assignment) and merge map: (..., K, L), tokens X: (..., L, C) -> (..., L, K), every row
    (token) sums to 1.

    `transpose`: U = A^T, a token gets back what its destination became.
    `pinv`: the pseudo-inverse of the merge map.
    `ridge`: argmin ||U M - I||^2 + ridge ||U - A^T||^2, between the two: the pseudo-inverse as ridge goes to
    0, the transpose as it grows.
    `fit`: argmin ||U M X - X||^2 + ridge s ||U - A^T||^2, the mixture of merged tokens that comes nearest to
    each token there was; s is the mean square of the merged tokens, so ridge has no unit.
    """
    transpose = weights.mT
    if kind == "transpose":
        return transpose
    if kind == "pinv":
        inverse: torch.Tensor = torch.linalg.pinv(merge)
    elif kind == "ridge":
        inverse = _regression(merge @ merge.mT, merge, weights, merge.new_tensor(ridge))
    elif kind == "fit":
        # Around the mean of the region: what all tokens share needs no mixture.
        centred = tokens.float() - tokens.float().mean(-2, keepdim=True)
        merged = merge @ centred
        gram = merged @ merged.mT
        scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        inverse = _regression(gram, merged @ centred.mT, weights, (ridge * scale).clamp_min(1e-6))
    else:
        raise ValueError(f"unknown unmerge {kind!r}; use one of {', '.join(UNMERGES)}")
    # A constant field must come back as it was: what a row lacks to 1 is handed out as the transpose would.
    return inverse + (1 - inverse.sum(-1, keepdim=True)) * transpose


def _regression(
    gram: torch.Tensor, target: torch.Tensor, prior: torch.Tensor, strength: torch.Tensor
) -> torch.Tensor:
    """U with U (G + strength I) = T^T + strength P^T. G: (..., K, K) symmetric, T and P: (..., K, L)"""
    eye = torch.eye(gram.shape[-1], device=gram.device, dtype=gram.dtype)
    solution: torch.Tensor = torch.linalg.solve(gram + strength * eye, target + strength * prior)
    return solution.mT


def cluster_sizes(weights: torch.Tensor) -> torch.Tensor:
    """weights (assignment): (..., K, L) -> (..., K), how many tokens each destination stands for; they add
    up to L."""
    return weights.sum(-1)


def _without_negligible(weights: torch.Tensor) -> torch.Tensor:
    return weights.where(weights >= NEGLIGIBLE, 0)
