"""One model with merging applied: its configuration, its clock, and the plans that its hooks share."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tomadiff.config import MergeConfig
from tomadiff.core.regions import Grid, Layout
from tomadiff.methods import METHODS, Method, Plan
from tomadiff.patching.adapters.base import Adapter, Block, Reading, Site, map_tensors
from tomadiff.patching.clock import Clock


@dataclass(frozen=True)
class Group:
    """Sites that share one plan: one kind of block, one ratio (None: the configuration's, which may
    change), one variant of the method."""

    kind: str
    ratio: float | None
    variant: str = ""


@dataclass(frozen=True)
class Place:
    """A site in a model, and the group whose plan it uses; None if it is left alone."""

    block: Block
    site: Site
    group: str | None


@dataclass
class Count:
    """How often the plan of a group was made, got new weights, or was used as it was; in calls of the
    model."""

    selected: int = 0
    weighed: int = 0
    reused: int = 0


@dataclass
class Hooked:
    """A module that carries hooks of ours, and how it was found: a LoRA puts another module in its place,
    fused projections add one beside it, a cache adds a hook to it."""

    module: nn.Module
    siblings: dict[str, nn.Module | None]
    name: str
    hooks: list[str]
    known: tuple[int, int]

    @property
    def changed(self) -> bool:
        replaced = self.name and self.siblings.get(self.name) is not self.module
        return bool(replaced) or self.known != (len(self.siblings), len(self.hooks))


class Session:
    """Lives on the patched model and is shared by all its hooks.

    Everything that reads values (timesteps, sizes, counters) is in `enter` and `exit`, which run around the
    model, outside of any compiled graph. `plan` and `current_plan` are all that runs inside.
    """

    def __init__(
        self,
        model: nn.Module,
        config: MergeConfig,
        adapter: Adapter,
        groups: Mapping[str, Group],
        places: list[Place],
    ) -> None:
        self.model = model
        self.config = config
        self.adapter = adapter
        self.groups = dict(groups)
        self.places = places
        self.handles: tuple[RemovableHandle, ...] = ()
        self.hooked: list[Hooked] = []
        self.renew: Callable[[], None] | None = None
        # The shapes of the last call and what it showed; and what to take for that in a call without values.
        self.last: tuple[Any, Any, Reading] | None = None
        self.replay: Reading | None = None
        self.method: Method = METHODS[config.method](config)
        self.counts = {name: Count() for name in groups}
        self.grids: Mapping[str, tuple[Grid, ...]] = {}
        self.layouts: Mapping[str, Layout] = {}
        self.clock = Clock()
        # What hooks need from the beginning of a module to its end. One module runs at a time, so names are
        # the same for all: one for each block would make `torch.compile` compile each anew.
        self.scratch: dict[str, Any] = {}
        # Two pipelines may share one model; the clock's current pass must not change under a running call.
        self._lock = threading.RLock()
        self._owner: int | None = None
        # Training may run a block again by itself (gradient checkpointing), so there each merges for itself.
        self.in_one_go = True
        # Why blocks cannot merge as a whole in this call.
        self.apart = ""
        # Of the whole model, while it runs: a pipeline may call a part of it (`pos_embed`) by itself.
        self.order: Layout | None = None

    def plan(self, group: str, x: torch.Tensor) -> None:
        """Make the plan of a group from x: (B, N, C), if the group merges in this step and has none yet."""
        current = self.clock.current
        layout = current.layouts.get(group)
        if layout is None or group in current.plans:
            return
        check_tokens(x, layout)
        outdated = current.outdated.get(group)
        with _exact(x.device.type):
            current.plans[group] = self.method.plan(x, layout) if outdated is None else outdated.refresh(x)

    def current_plan(self, group: str, x: torch.Tensor) -> Plan | None:
        """The plan to merge x: (B, T, C) with. None if the group rests, or if x is a part of the tokens
        only, as blocks hand them to a module one chunk at a time (`enable_forward_chunking`)."""
        current = self.clock.current
        layout = current.layouts.get(group)
        if layout is None or (x.shape[0], x.shape[1]) != (current.batch, layout.tokens):
            return None
        return current.plans.get(group)

    def spares_feed_forward(self, x: torch.Tensor) -> bool:
        """Whether x: (B, N, C) are too few tokens to merge the feed-forward, and so the block as a whole."""
        return x.shape[1] < self.config.ff_min_tokens

    @torch.compiler.disable
    def enter(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook of the model."""
        if self._owner != threading.get_ident():  # else an interrupt (Ctrl-C) kept the last call from `exit`
            self._lock.acquire()
        self._owner = threading.get_ident()
        self.order = None
        self.scratch.clear()
        if self.renew is not None and any(hooked.changed for hooked in self.hooked):
            self.renew()
        given = arguments_by_name(model, args, kwargs)
        reading = self.adapter.read(given) if self.replay is None else self.replay
        # Without the conditioning: plans must go when the pipeline lets go of it.
        shown = replace(reading, call=replace(reading.call, conditioning=None))
        self.last = (*(map_tensors(_shape_of, given) for given in (args, kwargs)), shown)
        ratio = self.config.ratio_at(reading.progress)
        current = self.clock.enter(reading.call)
        current.advance(ratio, self.config.select_every, self.config.weights_every)
        current.batch = reading.batch
        self.in_one_go = not torch.is_grad_enabled()
        self.apart = "" if self.config.mode == "each" else reading.apart
        current.layouts = {}
        for name, group in self.groups.items():
            wanted = ratio if group.ratio is None or ratio is None else group.ratio
            grids = reading.grids.get(group.kind, ())
            if wanted and self._enough(grids) and not self.apart:
                current.layouts[name] = self.method.layout(
                    grids, wanted, reading.device, current.steps, group.variant
                )
        current.arrangement = {self.groups[name].kind: layout for name, layout in current.layouts.items()}
        self.grids, self.layouts = reading.grids, current.layouts
        self.order = self._whole_order(reading)
        if self.order is None:
            return args, kwargs
        return (), self.adapter.arrange(given, self.order)

    def _enough(self, grids: tuple[Grid, ...]) -> bool:
        tokens = sum(height * width for height, width in grids)
        return bool(grids) and tokens >= self.config.min_tokens

    def _whole_order(self, reading: Reading) -> Layout | None:
        """The layout whose order the whole model is in, if it is not the original one."""
        grids = reading.grids.get(self.adapter.order or "", ())
        if not (self.groups and self._enough(grids)):
            return None
        # The order depends on the regions alone, so any ratio that is asked for will do.
        asked = (*self.config.ratios, *self.config.overrides.values())
        layout = self.method.layout(grids, max(asked), reading.device)
        return None if layout.order is None else layout

    @torch.compiler.disable
    def exit(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Forward hook of the model; also runs when the model raised, then without an output."""
        if self._owner != threading.get_ident():
            return output
        current = self.clock.current
        for name in current.plans:
            count = self.counts[name]
            count.selected += current.due == "select"
            count.weighed += current.due != "reuse"
            count.reused += current.due == "reuse"
        self.scratch.clear()
        if self.order is not None and output is not None:
            output = self.adapter.restore(output, self.order)
        self.order = None
        self._owner = None
        self._lock.release()
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        # diffusers' hooks keep calling the modules they were put on, also from a copy of the model.
        raise TypeError(
            "a model with merging applied cannot be copied: `tomadiff.remove` it, copy, apply to both"
        )


def arguments_by_name(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a model, however they were given; TypeError if one is missing."""
    bound = inspect.signature(type(model).forward).bind(model, *args, **kwargs)
    _, *named = bound.arguments.items()  # the first is the model
    given = dict(named)
    extra: dict[str, Any] = given.pop("kwargs", {})
    return given | extra


def check_tokens(x: torch.Tensor, layout: Layout) -> None:
    """x: (B, N, C) must have the tokens that the layout is for."""
    if x.shape[1] != layout.tokens:
        raise RuntimeError(
            f"expected {layout.tokens} tokens ({layout.grids}), got {tuple(x.shape)}: this model's tokens "
            "are not where tomadiff looks for them. Please `tomadiff.remove` it and report its configuration"
        )


def _shape_of(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, device="meta")


def _exact(device: str) -> AbstractContextManager[Any]:
    """Plans compare tokens in float32, also where autocast would have products in less."""
    if torch.amp.is_autocast_available(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
