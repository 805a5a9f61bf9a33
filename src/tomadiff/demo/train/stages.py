"""Which batch size and learning rate each step of a denoiser has."""

from __future__ import annotations

from dataclasses import dataclass

from .loop import ramp


@dataclass(frozen=True)
class Stage:
    """`steps` steps of one kind; the learning rate falls in a straight line from `peak` to `end`.

    `window`: how many tokens a side a step shows of each picture; None: all.
    """

    steps: int
    batch: int
    peak: float
    end: float
    warmup: int
    window: int | None = None


STAGES: dict[str, tuple[Stage, ...]] = {
    "emoji-flux": (
        Stage(2000, 24, 6e-4, 1e-4, 20, window=16),
        Stage(400, 6, 1e-4, 1e-5, 20),
    ),
    "emoji-xl": (Stage(1900, 8, 6e-4, 1e-5, 20),),
}

# Which model is trained up to which step, one after the other.
PLAN: tuple[tuple[str, int], ...] = (("emoji-flux", 2400), ("emoji-xl", 1900))


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
