"""What a method is to the rest of the package, and what it makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from tomadiff.core.regions import Grid, Layout

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
    """Made from a configuration; raises ValueError where that asks for what the method cannot do.

    keys_only: merged tokens serve as keys and values of self-attention only; all queries stay and nothing is
        unmerged
    """

    keys_only: ClassVar[bool] = False

    def __init__(self, config: MergeConfig) -> None: ...

    def variant(self, depth: float) -> str:
        """What the method does at a depth of the model, 0 the first block and 1 behind the last, where it
        does not do the same everywhere. Only blocks of one variant share a plan."""
        return ""

    def layout(
        self, grids: tuple[Grid, ...], ratio: float, device: torch.device, step: int = 0, variant: str = ""
    ) -> Layout:
        """How the tokens of these grids are grouped, and how many are kept. `step` counts the denoising
        steps at this ratio; a method that draws random numbers draws new ones at each."""
        ...

    def plan(self, x: torch.Tensor, layout: Layout) -> Plan:
        """x: (B, N, C) in layout order -> a plan for every element of the batch."""
        ...
