"""One picture with and without merging, side by side: seconds, FLOPs, and how far it moved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from diffusers import DiffusionPipeline

import tomadiff
from tomadiff.evals import metrics
from tomadiff.flops import count_flops


@dataclass(frozen=True)
class Row:
    """One ratio. FLOPs and seconds are of a whole generation; picture: (1, 3, H, W) in [0, 1]"""

    ratio: float
    picture: torch.Tensor
    flops: int
    seconds: float
    flops_saved: float
    speed_up: float
    psnr: float
    ssim: float


def compare(
    pipe: DiffusionPipeline,
    generate: Callable[[], torch.Tensor],
    ratios: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75),
    rounds: int = 2,
    progress: Callable[[Iterator[tuple[int, float]], int], Iterator[tuple[int, float]]] = lambda turns, of: (
        turns
    ),
) -> list[Row]:
    """Run `generate` with each ratio in turn; compare with the first ratio.

    The first turn counts operations and keeps the pictures. `rounds` more are timed, interleaved, because a
    machine's speed changes from minute to minute.
    """
    seconds: dict[float, list[float]] = {ratio: [] for ratio in ratios}
    flops: dict[float, int] = {}
    pictures: dict[float, torch.Tensor] = {}
    turns = ((turn, ratio) for turn in range(rounds + 1) for ratio in ratios)
    for turn, ratio in progress(turns, (rounds + 1) * len(ratios)):
        with tomadiff.merged(pipe, ratio), torch.no_grad():
            if turn == 0:
                kept: list[torch.Tensor] = []
                flops[ratio] = count_flops(lambda kept=kept: kept.append(generate()))  # type: ignore[misc]
                pictures[ratio] = kept[0]
                continue
            start = time.perf_counter()
            generate()
            seconds[ratio].append(time.perf_counter() - start)
    first = ratios[0]
    return [
        Row(
            ratio,
            pictures[ratio],
            flops[ratio],
            median := statistics.median(seconds[ratio]),
            1 - flops[ratio] / flops[first],
            statistics.median(seconds[first]) / median,
            metrics.psnr(pictures[ratio], pictures[first]).item(),
            metrics.ssim(pictures[ratio], pictures[first]).item(),
        )
        for ratio in ratios
    ]
