"""ToFu (Token Fusion): ToMe's matching; early blocks drop what would merge, later ones merge and keep norms.

The paper prunes where a block answers far from linearly to a mixture of its inputs, and merges in the others.
A method does not know a model, so the rule here is depth alone: the first `prune` of all blocks, in the order
in which they run, prune. That, and the largest norm of a cluster as the one to keep, are our reading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tomadiff.core.matching import largest_by_rows, mean_by_rows, rows_of, take_rows
from tomadiff.methods.tome import ToMe, ToMePlan

if TYPE_CHECKING:
    from tomadiff.config import MergeConfig


class PrunePlan(ToMePlan):
    """Tokens that would be merged are dropped and their destinations stay as they are; copies on the way
    back."""

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, N, C) -> (B, D, C)"""
        return take_rows(x, rows_of(self.positions, x.shape[1]))


class MlerpPlan(ToMePlan):
    """A cluster becomes the direction of its mean with the largest norm in it, because a plain mean is
    shorter than what it is the mean of."""

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, N, C) -> (B, D, C)"""
        mean = mean_by_rows(x, self.rows, self.sizes)
        norms = largest_by_rows(x.norm(dim=-1), self.rows, self.sizes)
        return torch.nn.functional.normalize(mean, dim=-1) * norms.unsqueeze(-1)


class ToFu(ToMe):
    def __init__(self, config: MergeConfig) -> None:
        super().__init__(config)
        self.prune = config.prune

    def variant(self, depth: float) -> str:
        return "prune" if depth < self.prune else "merge"

    def plans(self, variant: str) -> type[ToMePlan]:
        return PrunePlan if variant == "prune" else MlerpPlan
