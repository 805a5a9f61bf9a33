"""How tokens merge: one file per method, one small interface.

A method is built from a `MergeConfig` and knows nothing of any model. It says how a grid of tokens is laid
out, and makes a plan from hidden states in that layout; hooks then call the plan around the model's modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from tomadiff.core.regions import Grid, Layout
from tomadiff.methods.toma import ToMA

if TYPE_CHECKING:
    from tomadiff.config import MergeConfig


class Plan(Protocol):
    """What was decided about one set of tokens.

    sizes: (B, D) how many tokens each merged token stands for
    positions: (B, D) the row-major index of the token whose place each merged token takes
    """

    @property
    def sizes(self) -> torch.Tensor: ...

    @property
    def positions(self) -> torch.Tensor: ...

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, N, C) in layout order -> (B, D, C)"""
        ...

    def unmerge(self, y: torch.Tensor) -> torch.Tensor:
        """y: (B, D, C) -> (B, N, C) in layout order"""
        ...

    def refresh(self, x: torch.Tensor) -> Plan:
        """The same destinations with weights for new hidden states x: (B, N, C)."""
        ...


class Method(Protocol):
    def layout(self, grids: tuple[Grid, ...], ratio: float, device: torch.device) -> Layout:
        """How the tokens of these grids are grouped, and how many are kept."""
        ...

    def plan(self, x: torch.Tensor, layout: Layout) -> Plan:
        """x: (B, N, C) in layout order -> a plan for every element of the batch."""
        ...


METHODS: dict[str, Callable[[MergeConfig], Method]] = {"toma": ToMA}
