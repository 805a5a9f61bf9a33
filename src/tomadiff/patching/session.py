"""One model with merging applied: its configuration, its clock, and the plans that its hooks share."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tomadiff.config import MergeConfig
from tomadiff.core.regions import Grid, Layout
from tomadiff.methods import METHODS, Plan
from tomadiff.patching.adapters.base import Adapter, Block, Site
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


class Session:
    """Lives on the patched model and is shared by all its hooks.

    Everything that reads values (timesteps, sizes, counters) is in `enter` and `exit`, which run around the
    model, outside of any compiled graph. `plan` and `current_plan` are all that runs inside.
    """

    def __init__(
        self, config: MergeConfig, adapter: Adapter, groups: Mapping[str, Group], places: list[Place]
    ) -> None:
        self.config = config
        self.adapter = adapter
        self.groups = dict(groups)
        self.places = places
        self.handles: tuple[RemovableHandle, ...] = ()
        self.method = METHODS[config.method](config)
        self.counts = {name: Count() for name in groups}
        self.grids: Mapping[str, tuple[Grid, ...]] = {}
        self.layouts: Mapping[str, Layout] = {}
        self.clock = Clock()
        # Tensors that a hook needs from the beginning of its module to its end, by name of the hook.
        self.scratch: dict[str, tuple[torch.Tensor, ...]] = {}
        # Two pipelines may share one model; the clock's current pass must not change under a running call.
        self._lock = threading.RLock()
        self._owner: int | None = None

    def plan(self, group: str, x: torch.Tensor) -> None:
        """Make the plan of a group from x: (B, N, C), if the group merges in this step and has none yet."""
        current = self.clock.current
        layout = current.layouts.get(group)
        if layout is None or group in current.plans:
            return
        check_tokens(x, layout)
        outdated = current.outdated.get(group)
        current.plans[group] = self.method.plan(x, layout) if outdated is None else outdated.refresh(x)

    def current_plan(self, group: str, x: torch.Tensor) -> Plan | None:
        """The plan to merge x: (B, T, C) with. None if the group rests, or if x is a part of the tokens
        only, as blocks hand them to a module one chunk at a time (`enable_forward_chunking`)."""
        current = self.clock.current
        layout = current.layouts.get(group)
        if layout is None or (x.shape[0], x.shape[1]) != (current.batch, layout.tokens):
            return None
        return current.plans.get(group)

    @torch.compiler.disable
    def enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model."""
        self._lock.acquire()
        self._owner = threading.get_ident()
        reading = self.adapter.read(args, kwargs)
        ratio = self.config.ratio_at(reading.progress)
        current = self.clock.enter(reading.call)
        current.advance(ratio, self.config.select_every, self.config.weights_every)
        current.batch = reading.batch
        current.layouts = {}
        for name, group in self.groups.items():
            wanted = ratio if group.ratio is None or ratio is None else group.ratio
            tokens = sum(height * width for height, width in reading.grids[group.kind])
            if wanted and tokens >= self.config.min_tokens:
                current.layouts[name] = self.method.layout(
                    reading.grids[group.kind], wanted, reading.device, current.steps, group.variant
                )
        current.arrangement = {self.groups[name].kind: layout for name, layout in current.layouts.items()}
        self.grids, self.layouts = reading.grids, current.layouts

    @torch.compiler.disable
    def exit(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook of the model; also runs when the model raised."""
        if self._owner != threading.get_ident():
            return
        current = self.clock.current
        for name in current.plans:
            count = self.counts[name]
            count.selected += current.due == "select"
            count.weighed += current.due != "reuse"
            count.reused += current.due == "reuse"
        self.scratch.clear()
        self._owner = None
        self._lock.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        # diffusers' hooks keep calling the modules they were put on, also from a copy of the model.
        raise TypeError(
            "a model with merging applied cannot be copied: `tomadiff.remove` it, copy, apply to both"
        )


def check_tokens(x: torch.Tensor, layout: Layout) -> None:
    """x: (B, N, C) must have the tokens that the layout is for."""
    if x.shape[1] != layout.tokens:
        raise RuntimeError(
            f"expected {layout.tokens} tokens ({layout.grids}), got {tuple(x.shape)}: this model's tokens are "
            "not where tomadiff looks for them. Please `tomadiff.remove` it and report its configuration"
        )
