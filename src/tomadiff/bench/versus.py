"""Methods against each other on one target, timed in turns, each charged what it costs over a generation."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch

import tomadiff
from tomadiff.bench.memory import peak_memory
from tomadiff.bench.overhead import Overhead, TimedMethod
from tomadiff.bench.stopwatch import timed
from tomadiff.bench.targets import Target
from tomadiff.config import MergeConfig, preset
from tomadiff.flops import count_flops
from tomadiff.methods import Method
from tomadiff.patching.apply import session_of

STEPS = 50
METHODS = ("none", "free", "toma", "tome", "tofu", "todo")
RATIOS = (0.25, 0.5, 0.75)


@dataclass
class Measurement:
    """One method at one ratio. Seconds are of one call of the target.

    rounds: for each round, the seconds of a call that makes a plan, new weights, or neither
    """

    target: str
    method: str
    ratio: float
    config: MergeConfig
    shared_by: int
    rounds: list[dict[str, float]] = field(default_factory=list)
    flops: int = 0
    memory: int = 0
    overhead: Overhead = field(default_factory=Overhead)

    def charged(self, one: dict[str, float]) -> float:
        """Seconds of the average call in a generation of 50 steps, for one of the blocks that share plans."""
        fresh = one["select"]
        reuse = one.get("reuse", fresh)
        selections = -(-STEPS // self.config.select_every)
        weighings = -(-STEPS // self.config.weights_every) - selections
        extra = selections * (fresh - reuse) + weighings * (one.get("weights", reuse) - reuse)
        return reuse + extra / STEPS / self.shared_by

    @property
    def seconds(self) -> float:
        return statistics.median(self.charged(one) for one in self.rounds)

    @property
    def fresh(self) -> float:
        return statistics.median(one["select"] for one in self.rounds)

    def speed_up(self, other: Measurement) -> float:
        """How much faster than `other`: the median of the ratios in each round, so that drift cancels out."""
        pairs = zip(other.rounds, self.rounds, strict=False)
        return statistics.median(other.charged(theirs) / self.charged(ours) for theirs, ours in pairs)

    def spread(self, other: Measurement) -> float:
        """Half the distance of the quartiles of those ratios."""
        pairs = zip(other.rounds, self.rounds, strict=False)
        ratios = sorted(other.charged(theirs) / self.charged(ours) for theirs, ours in pairs)
        if len(ratios) < 2:
            return 0.0
        low, _, high = statistics.quantiles(ratios, n=4)
        return (high - low) / 2


def entries(target: Target, methods: tuple[str, ...], ratios: tuple[float, ...]) -> list[Measurement]:
    """What to measure: "none" once, every other method at every ratio it can do, ToDo at its own."""
    found: list[Measurement] = []
    for ratio in ratios:
        for method in methods:
            if method == "none" and found:
                continue
            if method == "todo" and ratio != 0.75:
                continue
            config = config_for(method, ratio, target.family)
            shared = target.shared_by if config.share else 1
            found.append(Measurement(target.name, method, 0.0 if method == "none" else ratio, config, shared))
    return found


def config_for(method: str, ratio: float, family: str) -> MergeConfig:
    """Every block merged: ToMA with the family's settings, the peers as published but everywhere."""
    ours = preset(family, ratio=ratio, skip_first=0, min_tokens=0)
    if method == "toma":
        return ours
    if method == "free":
        return ours.replace(method="free", proportional=False)
    return preset(method, ratio=ratio)


@torch.no_grad()
def run(
    target: Target,
    measurements: list[Measurement],
    rounds: int,
    progress: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> None:
    """Fill in the measurements, in turns. An interruption leaves what was measured before it."""
    work = len(measurements) * (rounds + 1)
    for i, measurement in enumerate(measurements):
        progress(f"counting {measurement.method} {measurement.ratio or ''}", i, work)
        _count(target, measurement)
    for turn in range(rounds):
        for i, measurement in enumerate(measurements):
            progress(f"round {turn + 1} of {rounds}", (turn + 1) * len(measurements) + i, work)
            measurement.rounds.append(_time(target, measurement))


def _kinds(measurement: Measurement) -> tuple[str, ...]:
    """The kinds of call that differ: a method that plans for itself in every call has one."""
    config = measurement.config
    if measurement.method in ("none", "free") or (config.select_every == 1 and measurement.shared_by == 1):
        return ("select",)
    return (
        ("select", "reuse") if config.select_every == config.weights_every else ("select", "reuse", "weights")
    )


def _time(target: Target, measurement: Measurement) -> dict[str, float]:
    # Every kind of call comes in the first three steps of this schedule.
    config = measurement.config.replace(select_every=4, weights_every=2)
    with tomadiff.merged(target.model, config=config):
        return {
            kind: timed(partial(target.call, step), target.device)[1]
            for step, kind in enumerate(_kinds(measurement))
        }


def _count(target: Target, measurement: Measurement) -> None:
    """FLOPs, memory and the parts of the overhead, in calls of their own that also warm up."""
    config = measurement.config.replace(select_every=4, weights_every=2)
    with tomadiff.merged(target.model, config=config):
        target.call(0)
        measurement.flops = count_flops(lambda: target.call(1))
    with tomadiff.merged(target.model, config=config):
        session = session_of(target.model)
        assert session is not None
        method = TimedMethod(session.method, target.device)
        session.method = cast(Method, method)
        for step in range(2):
            target.call(step)
        # Merging happened in two calls, planning in one.
        method.spent.merge /= 2
        method.spent.unmerge /= 2
        if "weights" in _kinds(measurement):
            target.call(2)
        measurement.overhead = method.spent
    with tomadiff.merged(target.model, config=config):
        target.call(0)
        measurement.memory = peak_memory(lambda: target.call(1), target.device)
