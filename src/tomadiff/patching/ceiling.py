"""How much work merging saves, and how much it could save at best: counted, not timed.

The ceiling is the same model with as many tokens merged away by plans that cost nothing, as of the method
"free". The result is of no use, but its floating point operations are those of the blocks that the
configuration chooses, on the tokens that it leaves them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import ModelMixin
from torch.utils.flop_counter import FlopCounterMode

from tomadiff.methods.free import Free
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
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            twin(*args, **kwargs)
        return int(counter.get_total_flops())

    unmerged = work(None)
    trial = session_of(apply(twin, config=session.config))
    assert trial is not None
    merged = work(trial)
    trial.clock.reset()
    # The layouts of the method, with plans that cost nothing.
    free = type("AtNoCost", (type(trial.method),), {"plan": Free.plan})
    trial.method = free(session.config)
    return Flops(unmerged, merged, work(trial))
