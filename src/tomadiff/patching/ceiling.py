"""How much work merging saves, and how much it could save at best: counted, not timed.

The ceiling is the same model with the same tokens merged away by a plan that costs nothing: it drops tokens
to merge and pads with zeros to unmerge. The result is of no use, but its floating point operations are those
of a merging that is free, in the blocks that the configuration chooses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from diffusers import ModelMixin

from tomadiff.core.regions import Layout
from tomadiff.flops import count_flops
from tomadiff.methods import Method, Plan
from tomadiff.methods.free import free_plan
from tomadiff.patching.apply import apply, session_of
from tomadiff.patching.session import Session


@dataclass(frozen=True)
class Flops:
    """Floating point operations of one call of a model: without merging, with it, and if merging itself were
    free."""

    unmerged: int
    merged: int
    ceiling: int

    def __str__(self) -> str:
        return (
            f"{self.merged / 1e12:.4g} TFLOP a call instead of {self.unmerged / 1e12:.4g} "
            f"({self.unmerged / self.merged:.2f}x less work); "
            f"if merging itself were free, {self.ceiling / 1e12:.4g} ({self.unmerged / self.ceiling:.2f}x)"
        )


class _MergingForNothing:
    """Another method's layouts, with plans that cost nothing."""

    def __init__(self, method: Method) -> None:
        self._method = method

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def plan(self, x: torch.Tensor, layout: Layout) -> Plan:
        """x: (B, N, C)"""
        return free_plan(x, layout)


def count(target: Any) -> Flops | None:
    """The work of the last call of a model with merging applied; None if it was not called yet, or has no
    configuration to build it again from.

    Counted on a twin of the model without weights (the meta device), which takes about a second for a large
    model and leaves the model itself alone.
    """
    session = session_of(target)
    if session is None or session.last is None or not isinstance(session.model, ModelMixin):
        return None
    args, kwargs, reading = session.last
    with torch.device("meta"):
        twin = type(session.model).from_config(session.model.config).eval()
    reading = replace(reading, device=torch.device("meta"))

    def work(replayed: Session | None) -> int:
        if replayed is not None:
            replayed.replay = reading
        return count_flops(lambda: twin(*args, **kwargs))

    unmerged = work(None)
    trial = session_of(apply(twin, config=session.config))
    assert trial is not None
    merged = work(trial)
    trial.clock.reset()
    trial.method = cast(Method, _MergingForNothing(trial.method))
    return Flops(unmerged, merged, work(trial))
