"""Which resolution, batch size and learning rate each step of a denoiser has."""

from __future__ import annotations

from dataclasses import dataclass

from .loop import ramp


@dataclass(frozen=True)
class Stage:
    """`steps` steps at one resolution; the learning rate falls in a straight line from `peak` to `end`."""

    resolution: int
    steps: int
    batch: int
    peak: float
    end: float
    warmup: int


STAGES: dict[str, tuple[Stage, ...]] = {
    "emoji-flux": (
        Stage(64, 3500, 48, 1.5e-3, 6e-4, 100),
        Stage(128, 1500, 16, 6e-4, 3e-4, 50),
        Stage(256, 2000, 6, 3e-4, 2e-5, 50),
    ),
    "emoji-xl": (
        Stage(64, 2500, 32, 1e-3, 5e-4, 200),
        Stage(128, 1500, 12, 5e-4, 3e-4, 50),
        Stage(256, 2000, 6, 3e-4, 2e-5, 50),
    ),
}

# Both models advance in turn, so that there is something to look at early; flux comes first.
PLAN: tuple[tuple[str, int], ...] = (
    ("emoji-flux", 200),
    ("emoji-xl", 200),
    ("emoji-flux", 2200),
    ("emoji-xl", 1600),
    ("emoji-flux", 3500),
    ("emoji-xl", 2500),
    ("emoji-flux", 5000),
    ("emoji-xl", 4000),
    ("emoji-flux", 6000),
    ("emoji-xl", 5000),
    ("emoji-flux", 7000),
    ("emoji-xl", 6000),
)


def locate(stages: tuple[Stage, ...], step: int) -> tuple[Stage, int]:
    """The stage of a step, and the step's number within it; steps past the end belong to the last stage."""
    for stage in stages[:-1]:
        if step < stage.steps:
            return stage, step
        step -= stage.steps
    return stages[-1], step


def learning_rate(stages: tuple[Stage, ...], step: int) -> float:
    """The learning rate of a step."""
    stage, inside = locate(stages, step)
    return ramp(inside, stage.steps, stage.peak, stage.end, stage.warmup)
