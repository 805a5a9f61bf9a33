"""The hooks that put tokens in layout order, in which every region is a view, and back."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.hooks import ModelHook
from torch import nn

from tomadiff.core.regions import Layout
from tomadiff.patching.hooks import take_hidden_states
from tomadiff.patching.session import Session, check_tokens


class _OrderOfBlocks(ModelHook):
    """Around a run of blocks of one kind."""

    def __init__(self, session: Session, kind: str) -> None:
        super().__init__()
        self.session = session
        self.kind = kind

    def layout(self) -> Layout | None:
        return self.session.clock.current.arrangement.get(self.kind)


class Arrange(_OrderOfBlocks):
    """At the entry of a run of blocks: into layout order."""

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, args, kwargs = take_hidden_states(args, kwargs)
        return (arranged(x, self.layout()), *args), kwargs


class Restore(_OrderOfBlocks):
    """At the exit of a run of blocks: back into the original order."""

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return restored(output, self.layout())


class _OrderOfModel(_OrderOfBlocks):
    """Around all blocks of a model, whose order stays the same over a whole generation."""

    def layout(self) -> Layout | None:
        return self.session.order


class ArrangeAfter(_OrderOfModel):
    """After the module that makes the tokens: into layout order."""

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return arranged(output, self.layout())


class RestoreBefore(_OrderOfModel):
    """Before the module behind the last block: back into the original order."""

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, args, kwargs = take_hidden_states(args, kwargs)
        return (restored(x, self.layout()), *args), kwargs


def arranged(x: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    """x: (B, N, C) in its original order -> in layout order; as it is if there is no layout."""
    if layout is None:
        return x
    check_tokens(x, layout)
    return layout.arrange(x)


def restored(x: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    """x: (B, N, C) in layout order -> in its original order; as it is if there is no layout."""
    return x if layout is None else layout.restore(x)
