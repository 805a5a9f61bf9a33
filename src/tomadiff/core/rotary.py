"""Rotary positions, one table per element of a batch."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair of neighbouring channels by its angle.

    x: (..., D); cos, sin: broadcastable to x, each angle twice in a row -> (..., D) in the dtype of x

    >>> quarter = torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0])
    >>> rotate(torch.tensor([1.0, 0.0]), *quarter).tolist()
    [0.0, 1.0]
    """
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((-second, first), dim=-1).flatten(-2)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)
