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
        Stage(64, 6000, 48, 1.5e-3, 6e-4, 100),
        Stage(128, 3000, 16, 6e-4, 3e-4, 50),
        Stage(256, 4000, 6, 3e-4, 2e-5, 50),
    ),
    "emoji-xl": (
        Stage(64, 5000, 32, 1e-3, 5e-4, 200),
        Stage(128, 3000, 12, 5e-4, 3e-4, 50),
        Stage(256, 4000, 6, 3e-4, 2e-5, 50),
    ),
}

# Both models advance in turn, so that there is something to look at early; flux comes first.
PLAN: tuple[tuple[str, int], ...] = (
    ("emoji-flux", 1500),
    ("emoji-xl", 1000),
    ("emoji-flux", 3000),
    ("emoji-xl", 2500),
    ("emoji-flux", 4500),
    ("emoji-xl", 4000),
    ("emoji-flux", 6000),
    ("emoji-xl", 5000),
    ("emoji-flux", 9000),
    ("emoji-xl", 8000),
    ("emoji-flux", 11000),
    ("emoji-xl", 10000),
    ("emoji-flux", 13000),
    ("emoji-xl", 12000),
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
