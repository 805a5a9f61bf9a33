"""What `tomadiff` has to know of an architecture to merge its tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from diffusers.hooks import ModelHook
from diffusers.utils import BaseOutput
from torch import nn

from tomadiff.core.regions import Grid, Layout
from tomadiff.patching.clock import Call

if TYPE_CHECKING:
    from tomadiff.patching.session import Session

# Makes the hook that merges around a module, for the sites of one group (see `hooks.py`).
HookMaker = Callable[["Session", str], ModelHook]


@dataclass(frozen=True)
class Site:
    """A place where tokens merge: one part of a block ("self", "cross", "ff", or "self+ff" where the two
    cannot be told apart) and the modules to hook for it, hooks on one module from the inside out."""

    part: str
    name: str
    hooks: tuple[tuple[nn.Module, HookMaker], ...]


@dataclass(frozen=True)
class Block:
    """A transformer block. Blocks of one `kind` see the same token grid at the same width; a plan is made
    from the hidden states that enter `module`.

    stack: the name of a run of blocks of one kind with nothing between them
    sites: where it merges in mode "each"; once: where it merges in mode "once"
    keys: where a method that reduces keys and values alone does that, if not at the sites of self-attention
    """

    name: str
    module: nn.Module
    kind: str
    sites: tuple[Site, ...]
    once: Site
    keys: Site | None = None
    stack: str = ""


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
    """What one call of a model shows. `progress` runs from 0 (noise) to 1 (picture).

    grids: by kind of block; a kind that is missing rests in this call
    apart: why modules must see all of their tokens in this call, so that no block can merge as a whole
    """

    call: Call
    progress: float
    batch: int
    grids: Mapping[str, tuple[Grid, ...]]
    device: torch.device
    apart: str = ""


class Adapter(ABC):
    """Made from a model; holds on to nothing but its modules.

    models: the classes it is for
    family: name of the preset that has their defaults
    order: the kind of block whose tokens are in layout order from the model's entry to its exit, see
        `arrange`; None if passages do that for some blocks at a time
    """

    models: ClassVar[tuple[type[nn.Module], ...]]
    family: str
    order: str | None = None

    @abstractmethod
    def __init__(self, model: Any) -> None: ...

    @abstractmethod
    def blocks(self) -> list[Block]:
        """Every block with image tokens, in the order in which they run."""

    @abstractmethod
    def read(self, given: Mapping[str, Any]) -> Reading:
        """What a call of the model shows that was given these arguments, by name."""

    def passages(self) -> list[Passage]:
        """Where tokens are put in layout order and back, inside the model."""
        return []

    def arrange(self, given: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
        """The arguments of a call with everything that belongs to the tokens one by one in layout order.

        It is the same order at every step of a generation, merging or not, because diffusers' caches keep
        hidden states from step to step.
        """
        return dict(given)

    def restore(self, output: Any, layout: Layout) -> Any:
        """The output of a call with its tokens back in their original order."""
        return output


def read_timestep(timestep: Any) -> float:
    """The largest value of a timestep given as number or tensor; 0 on the meta device, where there are no
    values."""
    if not isinstance(timestep, torch.Tensor):
        return float(timestep)
    return 0.0 if timestep.is_meta else float(timestep.max())


def form_of(x: torch.Tensor) -> tuple[Any, ...]:
    """What must be the same for a plan to be used again."""
    return tuple(x.shape), x.dtype, x.device, torch.is_inference_mode_enabled()


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`function` of a tensor, or of each tensor in a list, tuple, dict or diffusers output.

    >>> map_tensors(torch.neg, (torch.ones(1), None))
    (tensor([-1.]), None)
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, BaseOutput):
        return type(value)(**{name: map_tensors(function, part) for name, part in value.items()})
    if type(value) is dict:
        return {name: map_tensors(function, part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(function, part) for part in value)
    return value
