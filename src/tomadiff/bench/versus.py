"""Methods against each other on one target, timed in turns, each charged what it costs over a generation."""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from diffusers import UNet2DConditionModel
from torch import nn

import tomadiff
from tomadiff.bench.memory import peak_memory
from tomadiff.bench.overhead import Overhead, TimedMethod
from tomadiff.bench.stopwatch import timed
from tomadiff.bench.targets import Target
from tomadiff.config import MergeConfig
from tomadiff.flops import count_flops
from tomadiff.methods import Method
from tomadiff.patching.apply import session_of

STEPS = 50
METHODS = ("none", "free", "toma", "tome", "tofu", "todo")
# The package itself, with every module at every resolution merged; it knows whole UNets only.
TOMESD = "tomesd-package"
RATIOS = (0.25, 0.5, 0.75)


@dataclass
class Measurement:
    """One method at one ratio. Seconds are of one call of the target.

    kinds: of calls that differ in their cost
    compiled: a target of its own, patched and compiled for good; None: all measurements share one
    rounds: for each round, the seconds of a call that makes a plan, new weights, or neither
    """

    target: str
    method: str
    ratio: float
    config: MergeConfig
    shared_by: int
    kinds: tuple[str, ...]
    compiled: Target | None = None
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
        return statistics.median(self.ratios(other))

    def spread(self, other: Measurement) -> float:
        """Half the distance of the quartiles of those ratios."""
        ratios = self.ratios(other)
        if len(ratios) < 2:
            return 0.0
        low, _, high = statistics.quantiles(ratios, n=4)
        return (high - low) / 2

    def ratios(self, other: Measurement) -> list[float]:
        """How much faster than `other` it was in each round."""
        pairs = zip(other.rounds, self.rounds, strict=False)
        return [other.charged(theirs) / self.charged(ours) for theirs, ours in pairs]


def median_interval(values: list[float]) -> tuple[float, float] | None:
    """Where the true median lies with 95 % confidence, whatever the distribution; None for too few values.

    As many of the largest and of the smallest values are left out as chance alone seldom puts on one side.

    >>> median_interval([float(value) for value in range(12)]), median_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    ((2.0, 9.0), None)
    """
    count = len(values)
    outside, chance = 0, 0.5**count
    while chance <= 0.025:
        outside += 1
        chance += math.comb(count, outside) / 2**count
    ordered = sorted(values)
    return (ordered[outside - 1], ordered[-outside]) if outside else None


def entries(
    target: Target,
    methods: tuple[str, ...],
    ratios: tuple[float, ...],
    compiled: bool = False,
    changes: Mapping[str, Any] | None = None,
) -> list[Measurement]:
    """What to measure: "none" once, every other method at every ratio it can do, ToDo at its own.

    changes: to the settings of ToMA
    """
    if TOMESD in methods:
        _check_tomesd(target, compiled)
    found: list[Measurement] = []
    for ratio in ratios:
        for method in methods:
            if method == "none" and found:
                continue
            if method == "todo" and ratio != 0.75:
                continue
            config = target.settings("none" if method == TOMESD else method, ratio)
            if method == "toma":
                config = config.replace(**changes or {})
            shared = 1 if config.share == "block" else target.shared_by
            found.append(
                Measurement(
                    target.name,
                    method,
                    0.0 if method == "none" else ratio,
                    config,
                    shared,
                    target.kinds(config, shared),
                )
            )
    return found


def _check_tomesd(target: Target, compiled: bool) -> None:
    if not isinstance(target.model, UNet2DConditionModel):
        raise ValueError(f"{TOMESD} merges whole UNets only, not {target.name}")
    if compiled:
        raise ValueError(f"{TOMESD} is timed without --compile only")
    if importlib.util.find_spec("tomesd") is None:
        raise ValueError(f"{TOMESD} is the package tomesd: pip install tomesd")


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
        # There and back: what changes slowly hits every pair of neighbours both ways.
        for i, measurement in enumerate(measurements if turn % 2 == 0 else measurements[::-1]):
            progress(f"round {turn + 1} of {rounds}", (turn + 1) * len(measurements) + i, work)
            measurement.rounds.append(_time(target, measurement))


def compile_each(measurements: list[Measurement], build: Callable[[], Target]) -> None:
    """Give every measurement a compiled target of its own: patching anew in each round would compile anew."""
    for measurement in measurements:
        target = build()
        tomadiff.apply(target.model, config=target.scheduled(measurement.config))
        target.model.compile(dynamic=False)
        measurement.compiled = target
        with torch.no_grad():
            _time(target, measurement)


def _time(target: Target, measurement: Measurement) -> dict[str, float]:
    calls = list(enumerate(measurement.kinds))
    if measurement.compiled is not None:
        own = measurement.compiled
        return {kind: timed(partial(own.call, step), own.device)[1] for step, kind in calls}
    with _merging(target, measurement):
        return {kind: timed(partial(target.call, step), target.device)[1] for step, kind in calls}


@contextmanager
def _merging(target: Target, measurement: Measurement) -> Iterator[None]:
    if measurement.method != TOMESD:
        with tomadiff.merged(target.model, config=target.scheduled(measurement.config)):
            yield
        return
    tomesd = importlib.import_module("tomesd")
    everything = {"max_downsample": 8, "merge_attn": True, "merge_crossattn": True, "merge_mlp": True}

    def by_position(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The package looks for the latents among the positional arguments, where pipelines put them."""
        return (kwargs["sample"], *args), {name: kwargs[name] for name in kwargs if name != "sample"}

    handle = target.model.register_forward_pre_hook(by_position, with_kwargs=True)
    tomesd.apply_patch(target.model, ratio=measurement.ratio, **everything)
    try:
        yield
    finally:
        tomesd.remove_patch(target.model)
        handle.remove()


def _take_apart(target: Target, measurement: Measurement) -> None:
    """The parts of the overhead, in calls of their own."""
    session = session_of(target.model)
    assert session is not None
    method = TimedMethod(session.method, target.device)
    session.method = cast(Method, method)
    for step in range(target.calls_per_plan):
        target.call(step)
    each = {part: getattr(method.spent, part) / target.calls_per_plan for part in ("merge", "unmerge")}
    measurement.overhead = replace(method.spent, **each)
    if "reuse" in measurement.kinds:
        target.call(2)
    if "weights" in measurement.kinds:
        measurement.overhead.weights = method.spent.weights


def _count(target: Target, measurement: Measurement) -> None:
    """FLOPs, memory and the parts of the overhead, in calls of their own that also warm up."""
    with _merging(target, measurement):
        if measurement.method not in ("none", "free", TOMESD):
            _take_apart(target, measurement)

        def usual() -> None:
            """Uses a plan again, where the method does; the peers match anew in every call."""
            measurement.flops = count_flops(lambda: target.call(3))

        measurement.memory = peak_memory(usual, target.device)
