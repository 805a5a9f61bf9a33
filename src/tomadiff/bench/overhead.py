"""Where merging itself spends its time: choosing destinations, weights, merge, unmerge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tomadiff.bench.stopwatch import timed
from tomadiff.core.regions import Layout
from tomadiff.methods import Method, Plan


@dataclass
class Overhead:
    """Seconds of the parts in one call: a whole new plan, new weights alone, merge, unmerge."""

    plan: float = 0.0
    weights: float = 0.0
    merge: float = 0.0
    unmerge: float = 0.0


class TimedMethod:
    """A method whose plans keep the time; for a run of its own, because keeping time costs time."""

    def __init__(self, method: Method, device: torch.device) -> None:
        self._method = method
        self.device = device
        self.spent = Overhead()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def plan(self, x: torch.Tensor, layout: Layout) -> TimedPlan:
        return TimedPlan(self.count("plan", lambda: self._method.plan(x, layout)), self)

    def count(self, part: str, run: Callable[[], Any]) -> Any:
        result, seconds = timed(run, self.device)
        setattr(self.spent, part, getattr(self.spent, part) + seconds)
        return result


class TimedPlan:
    def __init__(self, plan: Plan, method: TimedMethod) -> None:
        self._plan = plan
        self._method = method

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._method.count("merge", lambda: self._plan.merge(x))
        return result

    def unmerge(self, y: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._method.count("unmerge", lambda: self._plan.unmerge(y))
        return result

    def refresh(self, x: torch.Tensor) -> TimedPlan:
        return TimedPlan(self._method.count("weights", lambda: self._plan.refresh(x)), self._method)
