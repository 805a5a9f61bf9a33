"""What `tomadiff` has to know of an architecture to merge its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from diffusers.hooks import ModelHook
from torch import nn

from tomadiff.core.regions import Grid
from tomadiff.patching.clock import Call

if TYPE_CHECKING:
    from tomadiff.patching.session import Session

# Makes the hook that merges around a module, for the sites of one group (see `hooks.py`).
HookMaker = Callable[["Session", str], ModelHook]


@dataclass(frozen=True)
class Site:
    """A place where tokens merge: one part of a block ("self", "cross", "ff") and the modules to hook for
    it."""

    part: str
    name: str
    hooks: tuple[tuple[nn.Module, HookMaker], ...]


@dataclass(frozen=True)
class Block:
    """A transformer block. Blocks of one `kind` see the same token grid at the same width and can share
    plans; a plan is made from the hidden states that enter `module`.

    sites: where it merges in mode "each"; once: where it merges in mode "once"
    """

    name: str
    module: nn.Module
    kind: str
    sites: tuple[Site, ...]
    once: Site


@dataclass(frozen=True)
class Passage:
    """Where tokens enter and leave a run of blocks, to be put in layout order and back.

    prefix: what the names of those blocks begin with
    """

    prefix: str
    kind: str
    hooks: tuple[tuple[nn.Module, HookMaker], ...]


@dataclass(frozen=True)
class Reading:
    """What one call of a model shows. `progress` runs from 0 (noise) to 1 (picture); grids: by kind of
    block."""

    call: Call
    progress: float
    batch: int
    grids: Mapping[str, tuple[Grid, ...]]
    device: torch.device


class Adapter(Protocol):
    """Made from a model; holds on to nothing but its modules."""

    @property
    def family(self) -> str:
        """Name of the preset that has this model's defaults."""
        ...

    def blocks(self) -> list[Block]:
        """Every block with image tokens, in the order in which they run."""
        ...

    def passages(self) -> list[Passage]: ...

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Reading: ...


def read_timestep(timestep: Any) -> float:
    """The largest value of a timestep given as number or tensor; 0 on the meta device, where there are no
    values."""
    if not isinstance(timestep, torch.Tensor):
        return float(timestep)
    return 0.0 if timestep.is_meta else float(timestep.max())


def form_of(x: torch.Tensor) -> tuple[Any, ...]:
    """What must be the same for a plan to be used again."""
    return tuple(x.shape), x.dtype, x.device, torch.is_inference_mode_enabled()
