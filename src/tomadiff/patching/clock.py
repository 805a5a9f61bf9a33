"""Which denoising step a call of the model belongs to, and when a plan has to be made anew.

Nothing is handed in and no calls of blocks are counted: what a call of the model shows is enough.
- *Conditioning*: a pipeline passes the same tensor of text embeddings at every step of one generation and
  another one in the next. So it tells generations apart, also two that run in turns or in two threads, and
  the conditional from the unconditional pass where a pipeline runs them one after the other. It is held
  weakly: when the pipeline lets go of it, the plans go too.
- *Timestep*: a new one is a new step; one that goes up again is a new generation; the same one again is
  another pass of the same step (tiles of a panorama, the second half of a second-order step).
- *Form*: shape, dtype, device. A plan is never used with tokens of another form.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from tomadiff.core.regions import Layout
from tomadiff.methods import Plan


@dataclass(frozen=True, eq=False)
class Call:
    """What the clock needs to know of one call of a model."""

    timestep: float
    form: tuple[Any, ...]
    conditioning: torch.Tensor | None


@dataclass
class Pass:
    """What is kept from step to step for one call per step.

    layouts: of the groups that merge in this step
    arrangement: for each kind of block with such a group, a layout that tells the order of its tokens
    plans: of this step, by group; outdated: whose destinations still hold but whose weights do not
    steps: how many there were since the ratio changed
    """

    batch: int = 0
    layouts: dict[str, Layout] = field(default_factory=dict)
    arrangement: dict[str, Layout] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    outdated: dict[str, Plan] = field(default_factory=dict)
    due: str = "select"
    steps: int = 0
    _ratio: float | None = None

    def advance(self, ratio: float | None, select_every: int, weights_every: int) -> None:
        """Set up for the next step, where `ratio` holds (None: nothing merges). Plans that are due are taken
        away; the first block that needs one makes it."""
        if ratio != self._ratio:
            self.steps, self._ratio = 0, ratio
        if ratio is None or self.steps % select_every == 0:
            self.due, self.plans, self.outdated = "select", {}, {}
        elif self.steps % weights_every == 0:
            self.due, self.plans, self.outdated = "weights", {}, self.plans
        else:
            self.due, self.outdated = "reuse", {}
        self.steps += 1


@dataclass
class _Generation:
    """The passes of one generation (or of its conditional half, where the two run apart)."""

    form: tuple[Any, ...]
    conditioning: weakref.ref[torch.Tensor] | None
    timestep: float
    passes: list[Pass]
    current: int = 0

    def matches(self, call: Call) -> bool:
        known = None if self.conditioning is None else self.conditioning()
        return known is call.conditioning and self.form == call.form

    def enter(self, timestep: float) -> Pass:
        if timestep > self.timestep:
            self.passes.clear()
        self.current = self.current + 1 if timestep == self.timestep else 0
        self.timestep = timestep
        if self.current >= len(self.passes):
            self.current = len(self.passes)
            self.passes.append(Pass())
        return self.passes[self.current]


class Clock:
    """Finds the `Pass` a call belongs to, and forgets what belongs to finished generations."""

    def __init__(self) -> None:
        self.current = Pass()
        self._generations: list[_Generation] = []

    def enter(self, call: Call) -> Pass:
        self.current = self._find(call)
        return self.current

    def reset(self) -> None:
        self.current = Pass()
        self._generations.clear()

    def _find(self, call: Call) -> Pass:
        for generation in self._generations:
            if generation.matches(call):
                return generation.enter(call.timestep)
        # Whatever is further on than a generation that begins now is over.
        self._generations = [g for g in self._generations if g.timestep >= call.timestep]
        reference = None if call.conditioning is None else weakref.ref(call.conditioning, self._forget)
        generation = _Generation(call.form, reference, call.timestep, [Pass()])
        self._generations.append(generation)
        return generation.passes[0]

    def _forget(self, conditioning: weakref.ref[torch.Tensor]) -> None:
        ended = [g for g in self._generations if g.conditioning is conditioning]
        self._generations = [g for g in self._generations if g.conditioning is not conditioning]
        if any(p is self.current for g in ended for p in g.passes):
            self.current = Pass()
