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
        Stage(64, 1400, 32, 2e-3, 3e-4, 30),
        Stage(128, 200, 16, 8e-4, 5e-4, 20),
        Stage(256, 880, 6, 6e-4, 1e-5, 20),
    ),
    "emoji-xl": (
        Stage(64, 900, 32, 1e-3, 3e-4, 50),
        Stage(128, 300, 16, 6e-4, 3e-4, 20),
        Stage(256, 1500, 6, 6e-4, 1e-5, 20),
    ),
}

# The share of noise levels so high that only the caption says what to draw, by side of the latents. What a
# caption says of a place has to be learned anew at each size.
HIGH_NOISE_SHARE = {
    "emoji-flux": {16: 0.5, 32: 0.5, 64: 0.5},
    "emoji-xl": {16: 0.5, 32: 0.4, 64: 0.35},
}

# Which model is trained up to which step, one after the other.
PLAN: tuple[tuple[str, int], ...] = (("emoji-flux", 2480), ("emoji-xl", 2700))


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
